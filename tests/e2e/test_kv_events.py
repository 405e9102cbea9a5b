"""KV events on the ZMQ sockets of a running server, read with libzmq itself. What is in the messages, to the byte, is
the business of tests/unit/server/kv_event_publisher_test.cc."""
import ctypes
import unittest

import harness
from harness import PATIENCE, Server, eventually, run

zmq = ctypes.CDLL("libzmq.so.5")
for name in ("zmq_ctx_new", "zmq_socket"):
    getattr(zmq, name).restype = ctypes.c_void_p
SUB, DEALER, SUBSCRIBE, RCVMORE, LINGER, RCVTIMEO, SNDMORE = 2, 5, 6, 13, 17, 27, 2
END = b"\xff" * 8


class Socket:
    def __init__(self, context, kind, port, topic=None):
        self.socket = ctypes.c_void_p(zmq.zmq_socket(context, kind))
        for option, value in ((RCVTIMEO, PATIENCE * 1000), (LINGER, 0)):
            zmq.zmq_setsockopt(self.socket, option, ctypes.byref(ctypes.c_int(value)), 4)
        if topic is not None:
            zmq.zmq_setsockopt(self.socket, SUBSCRIBE, topic, len(topic))
        assert zmq.zmq_connect(self.socket, f"tcp://127.0.0.1:{port}".encode()) == 0

    def close(self):
        zmq.zmq_close(self.socket)

    def send(self, *frames):
        for i, frame in enumerate(frames):
            zmq.zmq_send(self.socket, frame, len(frame), SNDMORE if i + 1 < len(frames) else 0)

    def receive(self):
        frames, more = [], ctypes.c_int(1)
        buffer = ctypes.create_string_buffer(1 << 20)
        while more.value:
            size = zmq.zmq_recv(self.socket, buffer, len(buffer), 0)
            assert size >= 0, "no message came"
            frames.append(buffer.raw[:size])
            zmq.zmq_getsockopt(self.socket, RCVMORE, ctypes.byref(more), ctypes.byref(ctypes.c_size_t(4)))
        return frames


class KvEvents(unittest.TestCase):
    def setUp(self):
        self.context = ctypes.c_void_p(zmq.zmq_ctx_new())

    def tearDown(self):
        zmq.zmq_ctx_term(self.context)

    def replay(self, server, start=0):
        """All batches that are kept: (topic, number, payload)."""
        listening = next(e for e in server.events() if e["event"] == "listening")
        socket = Socket(self.context, DEALER, listening["kv_events_replay_port"])
        socket.send(b"", start.to_bytes(8, "big"))
        batches = []
        while (frames := socket.receive())[3]:
            batches.append((frames[1], int.from_bytes(frames[2], "big"), frames[3]))
        self.assertEqual(frames[2], END)
        socket.close()
        return batches

    def test_a_prompt_is_told_and_the_end_is(self):
        with Server("--kv-events", "on", "--kv-events-zmq", "127.0.0.1:0", "--kv-events-replay", "127.0.0.1:0",
                    "--anonymous-prefixes", "shared", "--max-context", "2048", "--model-name", "needle") as server:
            listening = next(e for e in server.events() if e["event"] == "listening")
            reader = Socket(self.context, SUB, listening["kv_events_port"], b"kv@")
            self.assertIn(b"AllBlocksCleared", self.replay(server)[0][2])
            api = harness.Api(server.address)
            # A subscription arrives when it arrives: prompts until something is heard of one.
            heard = None
            for attempt in range(1000):
                list(api.generate(harness.counting_request(f"{attempt} " + "a long story " * 60, 1), timeout=PATIENCE))
                # An engine tells of a step after its answers.
                eventually(lambda: len(self.replay(server, start=1)) > attempt, "its batch")  # noqa: B023
                zmq.zmq_setsockopt(reader.socket, RCVTIMEO, ctypes.byref(ctypes.c_int(50)), 4)
                try:
                    heard = reader.receive()
                    # A reader that is there before the publisher's first batch hears that one, too.
                    while not any(heard[1]):
                        heard = reader.receive()
                    break
                except AssertionError:
                    pass
            zmq.zmq_setsockopt(reader.socket, RCVTIMEO, ctypes.byref(ctypes.c_int(PATIENCE * 1000)), 4)
            self.assertIsNotNone(heard)
            batches = self.replay(server, start=1)
            topic, number, payload = heard
            self.assertEqual(topic, f"kv@127.0.0.1:{server.http_port}@needle".encode())
            self.assertIn(b"BlockStored", payload)
            self.assertIn((topic, int.from_bytes(number, "big"), payload), batches)
            self.assertEqual([n for _, n, _ in batches], list(range(1, len(batches) + 1)))
            self.assertEqual(server.metric("winnow_kv_event_batches_missed_total"), 0)
            server.signal(15)
            while b"AllBlocksCleared" not in payload:
                topic, number, payload = reader.receive()
            self.assertEqual(server.wait(), 0)
            reader.close()

    def test_an_address_that_is_taken_and_one_that_is_open_to_all(self):
        with Server("--kv-events", "on", "--kv-events-zmq", "127.0.0.1:0", "--max-context", "512") as server:
            port = next(e for e in server.events() if e["event"] == "listening")["kv_events_port"]
            taken = run("serve", "--model", harness.MODEL, "--listen", "127.0.0.1:0", "--http", "off", "--metrics", "off",
                        "--kv-events", "on", "--kv-events-zmq", f"127.0.0.1:{port}", "--max-context", "512")
            self.assertEqual(taken.returncode, 1, taken.stderr)
            self.assertIn(f"cannot listen on 127.0.0.1:{port}", taken.stderr)
        refused = run("serve", "--model", harness.MODEL, "--check-config", "--kv-events", "on", "--kv-events-zmq", "0.0.0.0:0")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("tells the tokens of prompts", refused.stderr)


if __name__ == "__main__":
    harness.main()

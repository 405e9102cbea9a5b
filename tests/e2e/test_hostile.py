#!/usr/bin/python3
"""Clients that do not keep to the rules. The promise is always the same: the process survives, and serves others."""
import random
import socket
import struct
import unittest

import grpc

from harness import PATIENCE, SEED, Api, Server, counting_request, eventually, main
from http2_attacks import CONTINUATION, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, call_headers, frame, literal


class Hostile(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--max-streams", 50)
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        self.api = Api(self.server.address)
        self.random = random.Random(SEED)  # of each test: one alone does the same

    def tearDown(self):
        """Alive, serving, and holding nothing."""
        self.assertIsNone(self.server.process.poll())
        self.assertTrue(self.api.serving())
        eventually(self.answers, "an answer")
        eventually(lambda: self.server.metric("winnow_kv_blocks_used") == 0, "blocks free")

    def answers(self):
        """While calls of the hostile client are still being torn down, others may be told to try again: they do."""
        try:
            responses = list(self.api.generate(counting_request("Still there?", 3), timeout=PATIENCE))
        except grpc.RpcError as error:
            self.assertEqual(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, error)
            return False
        self.assertEqual(sum(len(r.tokens) for r in responses), 3)
        return True

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)
        self.addCleanup(connection.close)
        return connection

    def send(self, data):
        """Sends it on a connection of its own and reads until the server closes it or is silent."""
        connection = self.connect()
        connection.settimeout(0.2)
        try:
            connection.sendall(data)
            while connection.recv(65536):
                pass
        except OSError:
            pass
        connection.close()

    def hello(self):
        return PREFACE + frame(SETTINGS, 0, 0)

    def test_bytes_that_are_not_http2(self):
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", self.random.randbytes(1000), PREFACE[:10]):
            self.send(data)

    def test_random_frames(self):
        for _ in range(30):
            data = self.hello()
            for _ in range(20):
                payload = self.random.randbytes(self.random.randrange(200))
                data += frame(self.random.randrange(12), self.random.randrange(256), self.random.randrange(8), payload)
            self.send(data)

    def test_odd_headers(self):
        odd = [
            ((b"x-bin", b"!!! not base64 !!!"),), ((b"grpc-timeout", b"-1S"),), ((b"grpc-timeout", b"99999999999H"),),
            ((b"te", b"chunked"),), ((b"content-type", b"text/html"),), ((b"grpc-encoding", b"nonsense"),),
            ((b"x-winnow-tenant", b"\x00\xff\n"),), ((b"", b"no name"),), ((b"UPPER", b"case"),),
            ((b":path", b"/again"),), ((b"grpc-accept-encoding", b"," * 100),), ((b"user-agent", b"\xff" * 100),),
            ((b"grpc-tags-bin", b"AAAA"), (b"grpc-trace-bin", b"A")), ((b"connection", b"keep-alive"),),
            ((b"grpc-previous-rpc-attempts", b"99999999999999999999"),), ((b"x-endpoint-load-metrics-bin", b"AAAA"),),
        ]
        for more in odd:
            block = call_headers(*more)
            self.send(self.hello() + frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
        for path in (b"", b"/", b"*", b"/winnow.v1.InferenceService/", b"/" + b"a" * 120, b"\xff\x00"):
            self.send(self.hello() + frame(HEADERS, END_HEADERS, 1, call_headers(path=path)))
        self.send(self.hello() + frame(HEADERS, END_HEADERS, 1, self.random.randbytes(300)))  # not HPACK

    def test_metadata_over_the_limit_is_refused(self):
        # On a connection of its own, which gRPC closes after some of such calls: only others' must live on.
        api = Api(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        with self.assertRaises(grpc.RpcError) as caught:
            list(api.generate(counting_request("x", 1), metadata=[("x-big", "a" * 20000)], timeout=PATIENCE))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)

    def test_endless_continuations(self):
        data = self.hello() + frame(HEADERS, 0, 1, call_headers())
        data += b"".join(frame(CONTINUATION, 0, 1, literal(b"x-%d" % i, b"a" * 120)) for i in range(3000))
        self.send(data)

    def test_rapid_reset(self):
        connection = self.connect()
        connection.sendall(self.hello())
        block = call_headers()
        connection.settimeout(5)
        try:
            for stream in range(1, 4001, 2):
                connection.sendall(frame(HEADERS, END_HEADERS, stream, block) +
                                   frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
        except OSError:
            pass  # the server may well close the connection
        connection.close()

    def test_more_streams_than_allowed_wait_or_are_refused(self):
        connection = self.connect()
        connection.sendall(self.hello() + b"".join(
            frame(HEADERS, END_HEADERS, stream, call_headers()) for stream in range(1, 401, 2)))
        connection.close()

    def test_many_connections(self):
        connections = [self.connect() for _ in range(200)]
        for connection in connections:
            connection.sendall(PREFACE)
        self.assertTrue(self.api.serving())
        for connection in connections:
            connection.close()

    def test_message_that_is_announced_and_never_comes(self):
        connection = self.connect()
        connection.sendall(self.hello() + frame(HEADERS, END_HEADERS, 1, call_headers()) +
                           frame(0, 0, 1, b"\x00" + struct.pack(">I", 1000) + b"abc"))
        connection.close()
        self.send(self.hello() + frame(HEADERS, END_HEADERS, 1, call_headers()) +
                  frame(0, 1, 1, b"\x00" + struct.pack(">I", 1 << 31) + b"abc"))

    def test_garbage_instead_of_a_message(self):
        method = self.api.channel.unary_stream("/winnow.v1.InferenceService/Generate")
        for _ in range(200):
            with self.assertRaises(grpc.RpcError) as caught:
                list(method(self.random.randbytes(self.random.randrange(1, 200)), timeout=PATIENCE))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)


if __name__ == "__main__":
    main()

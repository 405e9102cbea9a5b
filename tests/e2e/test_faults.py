"""Faults that were seen on the served program: descriptors, the log's reader, scrapes, floods, full and open directories.
docs/faults.md has a row for each."""
import collections
import concurrent.futures
import contextlib
import ctypes
import fcntl
import http.client
import json
import os
import pathlib
import signal
import socket
import stat
import subprocess
import threading
import time
import unittest

import grpc

import harness
from harness import Api, Server, counting_request, eventually, health, main, run, temporary_directory, token_ids

MIB = 1 << 20
DYING_DEVICE = os.environ.get("WINNOW_DYING_DEVICE", str(pathlib.Path(harness.BIN).parent / "winnow_dying_device"))


def ask(api, tokens=1, timeout=harness.PATIENCE, **kwargs):
    return list(api.generate(counting_request("Count: one two three", tokens), timeout=timeout, **kwargs))


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def threaded_post(server, tokens):
    """A request over HTTP that does not stream: the thread, whose `answer` is status and body, and its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=harness.PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "Count: one", "max_tokens": tokens, "ignore_eos": True}))
    def read():
        response = connection.getresponse()
        thread.answer = response.status, response.read()
        connection.close()
    thread = threading.Thread(target=read)
    thread.start()
    return thread, connection


def until_it_ends(stream):
    """What still comes of a stream whose server goes."""
    with contextlib.suppress(grpc.RpcError):
        yield from stream


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=harness.PATIENCE)


def is_open(connection):
    """Whether the server has neither said anything nor closed it."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def served(address):
    """Whether a new connection is."""
    with contextlib.suppress(grpc.RpcError):
        return bool(ask(Api(address, options=[("grpc.use_local_subchannel_pool", 1)])))
    return False


class Descriptors(unittest.TestCase):
    def test_the_soft_limit_is_raised(self):
        with Server(descriptors=(200, 700)) as server:
            limits = pathlib.Path(f"/proc/{server.process.pid}/limits").read_text()
            line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
            self.assertEqual(line.split()[3:5], ["700", "700"])
            self.assertEqual(server.terminate(), 0)

    def test_running_out_is_survived(self):
        for limit in (256, 700, 1100):
            with self.subTest(limit=limit), Server(descriptors=(limit, limit)) as server, \
                    contextlib.ExitStack() as idle:
                early = Api(server.address)
                ask(early)
                for _ in range(limit + 100):
                    idle.enter_context(connect(server.port))
                eventually(lambda: any(e["event"] == "connections_refused" for e in server.events()), "a refusal")
                # There are descriptors left for a scrape, and who was connected is served and told the truth.
                self.assertEqual(server.metric("winnow_serving"), 1)
                self.assertLess(server.metric("process_open_fds"), limit)
                ask(early)
                self.assertTrue(early.serving())
                idle.close()
                eventually(lambda: served(server.address), "a new connection is served")  # noqa: B023
                self.assertEqual(server.terminate(), 0)

    def test_a_server_whose_listener_died_says_so_and_ends(self):
        with Server("--drain-grace", "10m", "--slow-reader-timeout", "10m") as server:
            api = Api(server.address)
            self.assertTrue(api.serving())  # it is connected from here on
            # With log-probabilities it is more than all that lies between engine and reader: it cannot end before it is read.
            slow = Api(server.address, options=[("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)])
            stream = slow.generate(counting_request("Count: one", 1500, top_logprobs=20), timeout=harness.PATIENCE)
            got = token_ids([next(stream)])
            self.shut_listener(server)
            eventually(lambda: not api.serving(), "NOT_SERVING")
            self.assertEqual(len(got) + len(token_ids(stream)), 1500)  # what runs ends well
            self.assertEqual(server.wait(), 1)
            self.assertEqual([e["level"] for e in server.events() if e["event"] == "listener_failed"], ["error"])

    def shut_listener(self, server):
        inodes = set()
        for line in pathlib.Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == server.port:
                inodes.add(f"socket:[{fields[9]}]")
        libc = ctypes.CDLL(None, use_errno=True)
        pidfd = libc.syscall(434, server.process.pid, 0)  # pidfd_open
        for name in os.listdir(f"/proc/{server.process.pid}/fd"):
            if os.readlink(f"/proc/{server.process.pid}/fd/{name}") not in inodes:
                continue
            fd = libc.syscall(438, pidfd, int(name), 0)  # pidfd_getfd
            if fd < 0:
                self.skipTest(f"pidfd_getfd is refused: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=fd) as listener:
                listener.shutdown(socket.SHUT_RDWR)
            return
        self.fail("no listening socket")


class Device(unittest.TestCase):
    """A device that dies while it serves, seen from outside (dying_device.cc)."""

    def stream_over_http(self, server, tokens):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=harness.PATIENCE)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "Count: one", "max_tokens": tokens, "ignore_eos": True,
                                                                  "stream": True}))
        response = connection.getresponse()
        self.assertEqual(response.status, 200)
        self.assertTrue(response.readline().startswith(b"data: {"))
        return connection, response

    def test_a_server_whose_device_died_says_so_and_exits_with_70(self):
        # Its grace is longer than this waits, and none of it is spent: nothing is left to wait for.
        with Server("--drain-grace", "10m", "--max-running", 3, program=DYING_DEVICE) as server:
            api = Api(server.address)
            self.assertEqual(len(token_ids(ask(api, tokens=5))), 5)
            healths = api.watch(health.HealthCheckRequest(), timeout=harness.PATIENCE)
            self.assertEqual(next(healths).status, 1)
            over_grpc = api.generate(counting_request("Count: one", 20000), timeout=harness.PATIENCE)
            next(over_grpc)
            (whole, _), (connection, over_http) = (threaded_post(server, 20000), self.stream_over_http(server, 20000))
            eventually(lambda: server.metric("winnow_requests_running") == 3, "three run")
            waiting = api.generate(counting_request("Count: two", 20000), timeout=harness.PATIENCE)
            eventually(lambda: server.metric("winnow_requests_waiting") == 1, "one waits")
            server.signal(signal.SIGUSR1)
            # Answers in flight end with what it was, and what waits with them.
            for stream in (over_grpc, waiting):
                with self.assertRaises(grpc.RpcError) as failed:
                    list(stream)
                self.assertEqual(failed.exception.code(), grpc.StatusCode.UNAVAILABLE)
                self.assertEqual(harness.details_of(failed.exception)["ErrorInfo"].reason, "ENGINE_FAILED")
            rest = over_http.read()
            connection.close()
            self.assertIn(b'"error"', rest)
            self.assertNotIn(b"[DONE]", rest)
            whole.join()
            self.assertEqual(whole.answer[0], 503, whole.answer)
            self.assertEqual(json.loads(whole.answer[1])["error"]["code"], "engine_failed")
            # A watcher hears of it before the server is gone.
            self.assertEqual([answer.status for answer in until_it_ends(healths)][:1], [2])
            self.assertEqual(server.wait(), 70)
            events = server.events()
            self.assertEqual([e["level"] for e in events if e["event"] == "engine_failed"], ["error"])
            self.assertEqual([e["serving"] for e in events if e["event"] == "health"][-1], False)

    def test_between_two_requests(self):
        """Nothing runs: the next request finds out, and its client is told."""
        with Server(program=DYING_DEVICE) as server:
            api = Api(server.address)
            ask(api)
            server.signal(signal.SIGUSR1)
            failures = []
            def failed():  # a request may be answered before the device hears of the signal
                try:
                    ask(api)
                except grpc.RpcError as error:
                    failures.append(error)
                return failures
            eventually(failed, "a request finds out")
            self.assertEqual(failures[0].code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(harness.details_of(failures[0])["ErrorInfo"].reason, "ENGINE_FAILED")
            self.assertEqual(server.wait(), 70)

    def test_nothing_of_a_dead_device_is_kept(self):
        with temporary_directory() as directory:
            flags = ("--disk-bytes", "256MiB", "--store-dir", directory / "store")
            text = "The keeper of the lighthouse wrote down every ship. " * 40
            with Server(*flags, program=DYING_DEVICE) as server:
                api = Api(server.address)
                stream = api.generate(counting_request(text, 20000), timeout=harness.PATIENCE)
                next(stream)
                server.signal(signal.SIGUSR1)
                with self.assertRaises(grpc.RpcError):
                    list(stream)
                self.assertEqual(server.wait(), 70)
            with Server(*flags) as server, Server() as fresh:
                request = counting_request(text, 40)
                answers = [token_ids(Api(s.address).generate(request, timeout=harness.PATIENCE)) for s in (server, fresh)]
                self.assertEqual(answers[0], answers[1])


class LogReader(unittest.TestCase):
    def test_nobody_reads_the_log(self):
        with temporary_directory() as path:
            reader, writer = os.pipe()
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
            process = subprocess.Popen(
                [harness.BIN, "serve", "--model", harness.MODEL, "--listen", "127.0.0.1:0", "--metrics", "off",
                 "--log-format", "json", "--port-file", path / "port"], stdout=subprocess.DEVNULL, stderr=writer)
            try:
                os.close(writer)
                text = b""
                while b'"listening"' not in text or not text.endswith(b"\n"):
                    text += os.read(reader, 4096)
                eventually((path / "port").exists, "the port file")
                api = Api(f"127.0.0.1:{(path / 'port').read_text().strip()}")
                for _ in range(200):  # twenty times what the pipe holds
                    ask(api)
                self.assertTrue(api.serving())
                process.send_signal(signal.SIGTERM)  # its end does not wait for a reader either
                self.assertEqual(process.wait(timeout=harness.PATIENCE), 0)
                lines = b"".join(iter(lambda: os.read(reader, 4096), b"")).splitlines()
                for line in lines[:-1]:  # the last may be cut
                    json.loads(line)
            finally:
                process.kill()
                process.wait()
                os.close(reader)


class Scrapes(unittest.TestCase):
    def test_half_sent_scrapes_block_nobody(self):
        def answered_meanwhile():
            with contextlib.ExitStack() as stack:
                half = [stack.enter_context(connect(server.metrics_port)) for _ in range(30)]
                for connection in half:
                    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
                for _ in range(3):
                    self.assertIn("winnow_log_dropped_lines_total 0", server.metrics_text())
                return all(map(is_open, half))

        with Server() as server:
            # The server waits a second for the rest of a request, which a busy machine may need for the scrapes: then again.
            eventually(answered_meanwhile, "scrapes are answered while the server waits for the rest of others")
            self.assertEqual(server.terminate(), 0)


class Cancelled(unittest.TestCase):
    def test_calls_cancelled_at_once_are_counted_as_cancelled(self):
        with Server("--max-streams", "1000") as server:
            api = Api(server.address)
            ask(api)
            for _ in range(10):
                calls = [api.generate(counting_request("Count: one two " * 2000, 50), timeout=60) for _ in range(30)]
                for call in calls:
                    call.cancel()
            # One more, over the same connection, which has an answer when it is cancelled: the server has read all that came before.
            last = api.generate(counting_request("Count: one", 20000), timeout=harness.PATIENCE)
            next(last)
            last.cancel()
            outcome = lambda name: server.metric(f'winnow_requests_total{{outcome="{name}"}}')
            # How many of the 300 had left the client when it cancelled them is not known. Each that came has an outcome; lines of
            # those that are refused are sampled.
            eventually(lambda: server.metric("winnow_requests_running") + server.metric("winnow_requests_waiting") == 0, "the end of all")
            eventually(lambda: outcome("cancelled") > 0, "a cancelled one")
            requests = [e for e in server.events() if e["event"] == "request"]
            ended = outcome("cancelled") + outcome("rejected") + outcome("ok")
            self.assertTrue(len(requests) <= ended <= 302, (len(requests), ended))
            self.assertEqual(outcome("invalid"), 0)
            self.assertEqual(outcome("ok"), 1)
            self.assertEqual({e["reason"] for e in requests} - {"", "CANCELLED", "QUEUE_FULL"}, set())
            self.assertEqual(server.terminate(), 0)


class Compressed(unittest.TestCase):
    def test_a_message_that_inflates_a_thousand_times_is_not_inflated(self):
        def resident():
            return int(next(line for line in pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
                            if line.startswith("VmHWM")).split()[1]) / 1024  # MiB, the most so far

        with Server("--max-message-bytes", "8MiB") as server:
            ask(Api(server.address))
            before = resident()
            bomb = counting_request("x", 1).SerializeToString() + bytes([0xfa, 0x7f]) + varint(
                400 * MIB) + bytes(400 * MIB)  # a field that is not known
            for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
                api = Api(server.address, options=[("grpc.max_send_message_length", -1)])
                call = api.channel.unary_stream("/winnow.v1.InferenceService/Generate")
                with self.assertRaises(grpc.RpcError) as raised:
                    list(call(bomb, compression=algorithm, timeout=harness.PATIENCE))
                self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
            self.assertLess(resident() - before, 32)
            ask(Api(server.address))
            self.assertEqual(server.terminate(), 0)


class Environment(unittest.TestCase):
    def test_a_misspelt_variable_is_named(self):
        environment = {**os.environ, "WINNOW_THREDS": "2", "WINNOW_PORT": "tcp://10.0.0.1:80",
                       "WINNOW_SERVICE_HOST": "10.0.0.1"}
        checked = run("serve", "--model", harness.MODEL, "--check-config", env=environment)
        self.assertEqual(checked.returncode, 0)
        self.assertIn("WINNOW_THREDS is no option of winnow serve: did you mean WINNOW_THREADS?", checked.stderr)
        self.assertNotIn("WINNOW_PORT", checked.stderr)
        self.assertNotIn("SERVICE_HOST", checked.stderr)
        with Server(env={"WINNOW_THREDS": "2"}) as server:
            events = [e for e in server.events() if e["event"] == "unknown_environment"]
            self.assertTrue(any("WINNOW_THREADS" in e["text"] and e["level"] == "warn" for e in events))

    def test_an_unknown_key_of_the_file_is_named(self):
        with temporary_directory() as path:
            (path / "config.yaml").write_text("threds: 2\n")
            checked = run("serve", "--config", path / "config.yaml", "--check-config")
            self.assertEqual(checked.returncode, 2)
            self.assertIn("did you mean threads?", checked.stderr)


class Store(unittest.TestCase):
    FLAGS = ("--disk-bytes", "64MiB", "--kv-bytes", "32MiB", "--max-context", "4096")

    def test_a_directory_that_others_may_write(self):
        with temporary_directory() as path:
            store = path / "store"
            store.mkdir()
            store.chmod(0o777)
            with Server(*self.FLAGS, "--store-dir", store) as server:
                warned = [e["message"] for e in server.events() if e["event"] == "store" and e["level"] == "warn"]
                self.assertTrue(any("mode 0777" in message and str(store) in message for message in warned), warned)
                self.assertEqual(stat.S_IMODE((store / "index").stat().st_mode), 0o700)
                self.assertEqual(server.terminate(), 0)
            with self.assertRaisesRegex(RuntimeError, "mode 0777"):
                Server(*self.FLAGS, "--store-dir", store, "--strict-store")
            if os.geteuid() == 0:
                store.chmod(0o700)
                os.chown(store, 12345, -1)
            else:
                store = pathlib.Path("/usr")  # only root may give a directory away, so another's is taken
            with self.assertRaisesRegex(RuntimeError, f"belongs to user {store.stat().st_uid}"):
                Server(*self.FLAGS, "--store-dir", store, "--strict-store")

    @contextlib.contextmanager
    def mounted(self, path, size):
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self.skipTest(f"nothing can be mounted: {error}")
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", path], check=True)

    def test_a_file_system_that_is_full_at_start(self):
        with temporary_directory() as path, self.mounted(path, "400k"):
            filler = path / "filler"
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            with Server(*self.FLAGS, "--store-dir", path / "store") as server:
                warned = [e["message"] for e in server.events() if e["event"] == "store" and e["level"] == "warn"]
                self.assertTrue(any("full" in m and str(path / "store") in m and str(64 * MIB) in m for m in warned),
                                warned)
                api = Api(server.address)
                self.assertTrue(api.serving())
                expected = harness.token_ids(ask(api, 20))
                self.assertEqual(server.metric("winnow_store_state"), 2)
                filler.unlink()
                subprocess.run(["mount", "-o", "remount,size=256m", path], check=True)
                eventually(lambda: ask(api) and server.metric("winnow_store_state") == 0, "the store")
                self.assertEqual(harness.token_ids(ask(api, 20)), expected)
                self.assertEqual(server.terminate(), 0)
            self.assertEqual(run("store", "verify", "--dir", path / "store").returncode, 0)

    def test_a_store_too_large_for_its_disk(self):
        with temporary_directory() as path, self.mounted(path, "48m"):
            with Server(*self.FLAGS, "--store-dir", path / "store") as server:
                warned = [e["message"] for e in server.events() if e["event"] == "store" and e["level"] == "warn"]
                self.assertTrue(any(str(64 * MIB) in m and "has room for" in m for m in warned), warned)


class Tenants(unittest.TestCase):
    """Offered load of 5 and 10 times what is served: every tenant keeps that many calls open and asks again at once. How long that lasts
    is counted in answers, of which a busy machine gives fewer in a second."""
    FLAGS = ("--max-running", "2", "--queue-requests", "8", "--prefix-cache", "off")
    ASKED = 40
    ANSWERS = 1000

    def setUp(self):
        self.served, self.lock, self.over = collections.Counter(), threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def load(self, server, tenants, calls):
        """Clients of `tenants` with so many calls each, until the end of the `with`."""
        def one(api, tenant):
            while not self.over.is_set():
                try:
                    tokens = len(token_ids(ask(api, 12, metadata=[("x-winnow-tenant", tenant)])))
                    with self.lock:
                        self.served[tenant] += tokens
                except grpc.RpcError as error:
                    self.assertEqual(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
                    time.sleep(0.02)

        self.served.clear()
        self.over.clear()
        with concurrent.futures.ThreadPoolExecutor(len(tenants) * calls) as threads:
            try:
                apis = [Api(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in tenants]
                loads = [threads.submit(one, api, tenant) for api, tenant in zip(apis, tenants) for _ in range(calls)]
                yield
            finally:
                self.over.set()
            for load in loads:
                load.result()

    def tokens(self):
        with self.lock:
            return sum(self.served.values())

    def test_a_light_tenant_gets_in_beside_heavy_ones(self):
        for heavy, times in ((1, 5), (1, 10), (4, 5)):
            with self.subTest(heavy=heavy, times=times), Server(*self.FLAGS) as server:
                answered = 0
                with self.load(server, [f"heavy{i}" for i in range(heavy)], 2 * times):
                    eventually(lambda: server.metric('winnow_requests_total{outcome="rejected"}') > 0, "the queue is full")  # noqa: B023
                    api = Api(server.address)
                    for _ in range(self.ASKED):
                        with contextlib.suppress(grpc.RpcError):
                            ask(api, 4, metadata=[("x-winnow-tenant", "light")])
                            answered += 1
                        others = self.tokens()
                        eventually(lambda: self.tokens() > others, "others are answered before it asks again")  # noqa: B023
                print(f"{heavy} heavy at {times}x: light {answered} of {self.ASKED}; served {dict(self.served)}", flush=True)
                self.assertGreaterEqual(answered, 0.95 * self.ASKED)
                self.assertEqual(server.terminate(), 0)

    def test_equal_tenants_are_served_equally(self):
        with Server(*self.FLAGS) as server:
            with self.load(server, [f"tenant{i}" for i in range(5)], 10):
                eventually(lambda: self.tokens() >= 12 * self.ANSWERS, "answers")
            tokens = list(self.served.values())
            jain = sum(tokens) ** 2 / (5 * sum(t * t for t in tokens))
            print(f"Jain's index {jain:.3f}, served {dict(self.served)}", flush=True)
            self.assertGreaterEqual(jain, 0.95)


if __name__ == "__main__":
    main()

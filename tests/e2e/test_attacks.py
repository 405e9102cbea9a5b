#!/usr/bin/python3
"""Floods and hindrances (http2_attacks.py, a log that nobody reads) against the program: memory stays bounded, tiny requests of others are answered
meanwhile, and it is over when the attack is. WINNOW_ATTACK_SECONDS makes each longer."""
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

import grpc

from harness import PATIENCE, SANITIZED, SOURCE, Api, Server, counting_request, eventually, inference, main, temporary_directory

sys.path.append(str(SOURCE / "loadtest"))
from ports import unused_port  # noqa: E402

SECONDS = float(os.environ.get("WINNOW_ATTACK_SECONDS", "0.7"))


def resident_mib(pid, what="VmRSS"):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(what)).split()[1]) / 1024


# Between tiny requests. A proxy's limit of requests is of an address, and these are far below it.
PAUSE = 0.02


class Attack:
    """The attacker as a process, the tiny requests that it should not disturb, and what came of both."""

    def __init__(self, server, kind, seconds=SECONDS, connections=4, port=None, credentials=None, source="127.0.0.1",
                 target=None, until_eof=False):
        """`port`: of a proxy before the server; `target`: the attacker's, where it is another; `credentials`: of TLS, for who asks and
        for the attacker; `until_eof`: it ends when self.process.stdin does, if that is earlier."""
        self.server, self.kind = server, kind
        self.connect = lambda: Api(f"localhost:{port or server.port}", credentials,
                                   options=[("grpc.use_local_subchannel_pool", 1)])
        self.api = self.connect()
        self.before = resident_mib(server.process.pid)
        self.latencies, self.failed = [], 0
        self.process = subprocess.Popen(
            [sys.executable, str(SOURCE / "tests/e2e/http2_attacks.py"), kind, "--port", str(target or port or server.port),
             "--seconds", str(seconds), "--connections", str(connections), "--source", source,
             *(["--tls"] if credentials else []), *(["--until-eof"] if until_eof else [])], stdout=subprocess.PIPE, text=True,
            stdin=subprocess.PIPE if until_eof else None,
            stderr=subprocess.DEVNULL if seconds > SECONDS else None)

    def ask(self, api=None, timeout=10.0):
        started = time.monotonic()
        try:
            list((api or self.api).generate(counting_request("Still there?", 1), timeout=timeout))
        except grpc.RpcError:
            self.failed += 1
            return False
        finally:
            self.latencies.append(time.monotonic() - started)
        return True

    def run(self):
        self.ask()
        self.process.stdout.readline()
        self.latencies.clear()
        done = threading.Event()
        result = []

        def wait():
            with self.process.stdout as said:  # communicate() would end its input
                result.append(said.read().strip())
            self.process.wait()
            done.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not done.is_set():
            self.ask()
            done.wait(PAUSE)
        waiter.join()
        ended = time.monotonic()
        # A connection of its own: a newcomer is served, too.
        while not self.ask(self.connect(), timeout=2):
            if time.monotonic() - ended > PATIENCE:
                break
        self.recovered = time.monotonic() - ended
        self.grown = resident_mib(self.server.process.pid, "VmHWM") - self.before
        ordered = sorted(self.latencies)
        self.p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        print(f"{self.kind}: {len(ordered)} tiny requests, {self.failed} failed, median {1e3 * statistics.median(ordered):.1f} ms, "
              f"p99 {1e3 * self.p99:.1f} ms, longest {1e3 * ordered[-1]:.1f} ms; answer {self.recovered:.2f} s after it; RSS grew by {self.grown:.0f} MiB; "
              f"attacker {result[0]}", flush=True)
        return self


class Watched(Attack):
    """Keeps the largest value that each series had meanwhile. With `until_eof` it ends when each had one."""

    def __init__(self, server, *arguments, series, **options):
        self.seen = dict.fromkeys(series, 0)
        super().__init__(server, *arguments, **options)

    def ask(self, *arguments, **options):
        for name, value in self.seen.items():
            self.seen[name] = max(value, self.server.metric(name))
        if self.process.stdin and all(self.seen.values()):
            self.process.stdin.close()
        return super().ask(*arguments, **options)


class UnreadServer(Server):
    """Its log is a pipe that nobody reads any more, and that is full."""

    def __init__(self):
        self.pipe = os.pipe()
        fcntl.fcntl(self.pipe[1], fcntl.F_SETPIPE_SZ, 4096)
        super().__init__(pipe=self.pipe)

    def close(self):
        super().close()
        for end in self.pipe:
            os.close(end)


class Bounds(unittest.TestCase):
    def hold(self, attack, p99_s=1):
        self.assertIsNone(attack.server.process.poll())
        if not SANITIZED:
            self.assertEqual(attack.failed, 0)
            self.assertLess(attack.p99, p99_s)
            self.assertLess(attack.recovered, 1)
            self.assertLess(attack.grown, 150)
        self.assertLess(os.path.getsize(attack.server.log_path), 1 << 20)


class Floods(Bounds):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def flood(self, kind):
        self.hold(Attack(self.server, kind).run())


for _kind in ("rapid_reset", "rapid_reset_body", "rapid_reset_whole", "announced_header", "continuations", "connections", "pings", "settings",
              "empty_data"):
    setattr(Floods, "test_" + _kind, lambda self, kind=_kind: self.flood(kind))


class Others(Bounds):
    """What is no flood of frames: messages that inflate, heads without an end, connections and scrapes that say nothing more, answers and a
    log that nobody reads."""

    def test_compressed_messages(self):
        with Server() as server:
            self.hold(Attack(server, "compressed").run())
            lines = lambda: [e for e in server.events() if e["event"] == "grpc"]
            self.assertLess(len(lines()), 200)
            # gRPC has a line for each of thousands. A busy machine takes some seconds for as many as are not all written.
            call = Api(server.address).channel.unary_stream("/winnow.v1.InferenceService/Generate")

            def told():
                for _ in range(20):
                    with self.assertRaises(grpc.RpcError):
                        list(call(bytes(4096), compression=grpc.Compression.Gzip, timeout=PATIENCE))
                return any(e["not_logged"] for e in lines())
            eventually(told, "a line says how many were not written")

    def test_endless_heads_over_http(self):
        with Server() as server:
            self.hold(Attack(server, "endless_head", target=server.http_port).run())

    def test_1100_idle_connections(self):
        """More than there are descriptors for, at the port of gRPC and at that of HTTP."""
        for port in ("port", "http_port"):
            with self.subTest(port=port), Server(descriptors=(1024, 1024)) as server:
                attack = Attack(server, "idle", connections=1100, target=getattr(server, port)).run()
                attack.kind += " at " + port
                self.hold(attack)
                self.assertLess(server.metric("process_open_fds"), 1024)

    def test_30_half_sent_scrapes(self):
        with Server() as server:
            self.hold(Attack(server, "half_scrapes", connections=30, target=server.metrics_port).run())

    def test_answers_that_nobody_reads(self):
        """What is kept for a reader fills, and its sequence pauses."""
        for kind, port in (("unread_grpc", "port"), ("unread_http", "http_port")):
            with self.subTest(kind=kind), Server("--slow-reader-timeout", f"{PATIENCE}s") as server:
                attack = Watched(server, kind, seconds=PATIENCE, connections=16, target=getattr(server, port), until_eof=True,
                                 series=["winnow_requests_paused"]).run()
                self.hold(attack)
                self.assertGreater(attack.seen["winnow_requests_paused"], 0)
                eventually(lambda: server.metric("winnow_kv_blocks_used") == 0, "the readers are gone")  # noqa: B023

    def test_a_log_that_nobody_reads(self):
        with UnreadServer() as server:
            for _ in range(10):  # more lines than the pipe holds
                list(Api(server.address).generate(counting_request("Hello", 1), timeout=PATIENCE))
            attack = Attack(server, "idle", connections=0).run()
            attack.kind = "unread log"
            self.hold(attack)
            self.assertEqual(server.terminate(), 0)


def certificate(directory):
    """A self-signed one for localhost; its files, and credentials that trust it."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                    "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
                   check=True, capture_output=True)
    return cert, key, grpc.ssl_channel_credentials(cert.read_bytes())


class Encrypted(unittest.TestCase):
    def test_tls_ends_where_frames_are_counted(self):
        with temporary_directory() as directory:
            cert, key, credentials = certificate(directory)
            with Server("--tls-cert", cert, "--tls-key", key) as server:
                for kind in ("rapid_reset", "continuations"):
                    with self.subTest(kind=kind):
                        attack = Attack(server, kind, credentials=credentials).run()
                        if not SANITIZED:
                            self.assertEqual(attack.failed, 0)
                            self.assertLess(attack.p99, 1)
                            self.assertLess(attack.recovered, 1)
                            self.assertLess(attack.grown, 150)
                self.assertEqual(server.terminate(), 0)


class Proxy(unittest.TestCase):
    """deploy/proxy/nginx.conf, with ports and certificate of this test."""

    @contextlib.contextmanager
    def nginx(self, server, directory):
        program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
        cert, key, credentials = certificate(directory)
        port = unused_port()
        text = (SOURCE / "deploy/proxy/nginx.conf").read_text()
        for old, new in (("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"), ("127.0.0.1:50051", server.address),
                         ("127.0.0.1:8000", f"127.0.0.1:{server.http_port}"), ("/etc/nginx/winnow.crt", str(cert)),
                         ("/etc/nginx/winnow.key", str(key)), ("/run/nginx.pid", str(directory / "pid")),
                         ("/var/log/nginx/error.log", str(directory / "error.log")),
                         ("server_tokens off;", "server_tokens off;" + "".join(
                             f" {kind}_temp_path {directory}/{kind};"
                             for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")))):
            self.assertIn(old, text)
            text = text.replace(old, new)
        (directory / "nginx.conf").write_text(text)
        process = subprocess.Popen([program, "-e", directory / "error.log", "-c", directory / "nginx.conf", "-g", "daemon off;"])
        try:
            def listens():
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    return True
                self.assertIsNone(process.poll(), "nginx did not start")
                return False
            eventually(listens, "nginx listens")
            yield port, credentials
        finally:
            process.terminate()
            process.wait()

    def test_floods_end_at_the_proxy_and_gRPC_and_HTTP_pass(self):
        if shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin") is None:
            print("LEFT OUT: nginx is not installed, so deploy/proxy/nginx.conf was not tested", flush=True)
            return
        with temporary_directory() as directory, Server() as server, self.nginx(server, directory) as (port, credentials):
            os.chmod(directory, 0o755)  # nginx's workers are another user's
            for kind in ("rapid_reset", "rapid_reset_body", "continuations"):
                with self.subTest(kind=kind):
                    attack = Attack(server, kind, port=port, credentials=credentials, source="127.0.0.2").run()
                    if not SANITIZED:
                        self.assertEqual(attack.failed, 0)
                        self.assertLess(attack.p99, 1)
                        self.assertLess(attack.recovered, 1)
                        self.assertLess(attack.grown, 150)
            context = ssl.create_default_context(cafile=directory / "cert.pem")
            request = urllib.request.Request(f"https://localhost:{port}/v1/completions", json.dumps(
                {"prompt": "x", "max_tokens": 3, "stream": True}).encode())
            with urllib.request.urlopen(request, context=context, timeout=PATIENCE) as response:
                self.assertTrue(response.read().endswith(b"data: [DONE]\n\n"))
            # Beyond the address's rate gRPC clients are told to come back.
            codes = set()
            api = Api(f"localhost:{port}", credentials)
            calls = [api.get_model.future(inference.GetModelRequest()) for _ in range(600)]
            for call in calls:
                codes.add(call.code())
            self.assertEqual(codes, {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED})


class Drain(unittest.TestCase):
    def test_sigterm_ends_within_its_grace_while_attacked(self):
        with Server("--drain-grace", "2s") as server:
            attack = Attack(server, "rapid_reset", seconds=30)
            try:
                attack.process.stdout.readline()
                eventually(lambda: server.metric("winnow_grpc_delays_total") > 0, "the guard makes the attackers wait")
                started = time.monotonic()
                self.assertEqual(server.terminate(), 0)
                if not SANITIZED:
                    self.assertLess(time.monotonic() - started, 5)
            finally:
                attack.process.kill()
                attack.process.communicate()


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""Floods of HTTP/2 frames (http2_attacks.py) against the program: memory stays bounded, tiny requests of others are answered
meanwhile, and it is over when the attack is. WINNOW_ATTACK_SECONDS makes each longer."""
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import unittest

import grpc

from harness import PATIENCE, SOURCE, Api, Server, counting_request, main

SECONDS = float(os.environ.get("WINNOW_ATTACK_SECONDS", "1"))
# Under a sanitizer everything is slower and larger; there the bounds are of no interest, surviving is.
PLAIN = "check" not in os.environ.get("WINNOW_BIN", "") and "tsan" not in os.environ.get("WINNOW_BIN", "")


def resident_mib(pid, what="VmRSS"):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(what)).split()[1]) / 1024


class Attack:
    """The attacker as a process, the tiny requests that it should not disturb, and what came of both."""

    def __init__(self, server, kind, seconds=SECONDS, connections=4, port=None):
        self.server, self.kind = server, kind
        self.api = Api(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.before = resident_mib(server.process.pid)
        self.latencies, self.failed = [], 0
        self.process = subprocess.Popen(
            [sys.executable, str(SOURCE / "tests/e2e/http2_attacks.py"), kind, "--port", str(port or server.port),
             "--seconds", str(seconds), "--connections", str(connections)], stdout=subprocess.PIPE, text=True,
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
            result.append(self.process.communicate()[0].strip())
            done.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not done.is_set():
            self.ask()
            time.sleep(0.02)
        waiter.join()
        ended = time.monotonic()
        # A connection of its own: a newcomer is served, too.
        while not self.ask(Api(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)]), timeout=2):
            if time.monotonic() - ended > PATIENCE:
                break
        self.recovered = time.monotonic() - ended
        self.grown = resident_mib(self.server.process.pid, "VmHWM") - self.before
        ordered = sorted(self.latencies)
        self.p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        print(f"{self.kind}: {len(ordered)} tiny requests, {self.failed} failed, median {1e3 * statistics.median(ordered):.1f} ms, "
              f"p99 {1e3 * self.p99:.1f} ms; answer {self.recovered:.2f} s after it; RSS grew by {self.grown:.0f} MiB; "
              f"attacker {result[0]}", flush=True)
        return self


class Floods(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def flood(self, kind):
        attack = Attack(self.server, kind).run()
        self.assertIsNone(self.server.process.poll())
        if PLAIN:
            self.assertEqual(attack.failed, 0)
            self.assertLess(attack.p99, 1)
            self.assertLess(attack.recovered, 1)
            self.assertLess(attack.grown, 150)
        self.assertLess(os.path.getsize(self.server.log_path), 1 << 20)


for _kind in ("rapid_reset", "rapid_reset_body", "rapid_reset_whole", "announced_header", "continuations", "pings", "settings",
              "empty_data"):
    setattr(Floods, "test_" + _kind, lambda self, kind=_kind: self.flood(kind))


class Drain(unittest.TestCase):
    def test_sigterm_ends_within_its_grace_while_attacked(self):
        with Server("--drain-grace", "2s") as server:
            attack = Attack(server, "rapid_reset", seconds=30)
            try:
                attack.process.stdout.readline()
                time.sleep(1)  # of the attack
                started = time.monotonic()
                self.assertEqual(server.terminate(), 0)
                if PLAIN:
                    self.assertLess(time.monotonic() - started, 5)
            finally:
                attack.process.kill()
                attack.process.communicate()


if __name__ == "__main__":
    main()

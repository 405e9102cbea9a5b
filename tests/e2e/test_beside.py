#!/usr/bin/python3
"""Bounds of time for tiny requests while the store is in trouble: a full disk, a slow one."""
import concurrent.futures
import random
import statistics
import threading
import time

from disks import Disks, document
from harness import PATIENCE, SEED, Api, Server, counting_request, main
from test_attacks import SECONDS, Bounds, Watched


class Patient(Watched):
    def ask(self, api=None, timeout=PATIENCE):
        return super().ask(api, timeout=timeout)


class Beside(Disks, Bounds):
    """Tiny requests while the store is in trouble and others' long prompts want it."""

    def hinder(self, kind, series, trouble=lambda server: None):
        texts = [document(random.Random(SEED + i), 900) for i in range(8)]
        with Server("--max-context", 4096, "--max-running", 16, "--step-tokens", 192, "--block-tokens", 32, "--kv-bytes", "16MiB",
                    "--disk-bytes", "256MiB", "--store-dir", self.store) as server, \
                concurrent.futures.ThreadPoolExecutor(1) as threads:
            api = Api(server.address)

            def ask_each():
                """Until the first token of each. More than the memory for KV holds, so that each is looked for in the store."""
                for text in texts:
                    begun = time.monotonic()
                    list(api.generate(counting_request(text, 1), timeout=PATIENCE))
                    yield time.monotonic() - begun

            computed = list(ask_each())
            trouble(server)
            ended = threading.Event()

            def load():
                taken = []
                while not ended.is_set():
                    taken += ask_each()
                return taken

            loading = threads.submit(load)
            attack = Patient(server, "idle", connections=0, seconds=max(SECONDS, 3), series=series)
            attack.kind = kind
            try:
                attack.run()
            finally:
                ended.set()
            taken = loading.result()
            print(f"{kind}: first token of a long prompt after {1e3 * statistics.median(computed):.0f} ms when it is computed, beside it after "
                  f"{1e3 * statistics.median(taken):.0f} ms in the median, {1e3 * max(taken):.0f} ms at most, of {len(taken)}", flush=True)
            self.hold(attack)
            self.assertEqual(server.terminate(), 0, server.log())
        return attack.seen

    def test_a_full_file_system(self):
        self.mount_tmpfs("6m")  # no segment fits
        self.assertEqual(self.hinder("full file system", ["winnow_store_state"])["winnow_store_state"], 1)

    def test_a_slow_disk(self):
        seen = self.hinder("slow disk", ["winnow_store_io_errors_total"], lambda server: self.slow_down(server, 5))
        self.assertGreater(seen["winnow_store_io_errors_total"], 0)  # late


if __name__ == "__main__":
    main()

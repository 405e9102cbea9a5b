#!/usr/bin/python3
"""KV in slower tiers as clients see it: the tokens are those of all KV in memory, whatever happens to what is below."""
import concurrent.futures
import os
import random
import re
import signal
import subprocess
import time

import grpc

from disks import Disks, document
from harness import BIN, MODEL, PATIENCE, SEED, Api, Server, counting_request, eventually, main, run, token_ids

MIB = 1 << 20
POLICIES = ["dense", "spotlight:k=3%,window=48,completion=on,suffix=40,from=0"]
TOKENS = 16
# Few sequences, small steps and small blocks: the fewer frames can work.
SIZES = ["--max-context", 4096, "--max-running", 3, "--step-tokens", 192, "--block-tokens", 32, "--index", "spotlight",
         "--retrieval-from", 0, "--probe-interval", 0]


def serve(*flags, **options):
    """`winnow serve` that is to refuse its flags."""
    return run("serve", "--model", MODEL, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--http", "127.0.0.1:0", *SIZES, *flags,
               **options)


def least_kv_bytes():
    """As the server says it."""
    result = serve("--kv-bytes", "1MiB", "--host-bytes", "64MiB")
    found = re.search(r"kv_bytes.*at least (\d+)", result.stderr)
    assert result.returncode != 0 and found, result.stderr
    return int(found[1])


class Tiers(Disks):
    @classmethod
    def setUpClass(cls):
        cls.rng = random.Random(SEED)
        text = document(cls.rng, 2200)
        # Two questions about one text, and a text of its own.
        prompts = [text + " Which value?", text + " When does the server check it? Say why.", document(cls.rng, 1500)]
        cls.requests = [counting_request(prompt, TOKENS, policy=policy) for prompt in prompts for policy in POLICIES]
        cls.least = least_kv_bytes()
        with Server(*SIZES, "--kv-bytes", "64MiB", "--prefix-cache", "off") as server:
            cls.expected, usages = cls.ask_all(server)
        cls.prompt_tokens = [usage.prompt_tokens for usage in usages]
        # Else the frames hold everything and the tests show nothing.
        kv_bytes = sum(cls.prompt_tokens[::2]) * 6 * 2 * 2 * 64 * 2
        assert kv_bytes > 3 * cls.least, (kv_bytes, cls.least)

    @classmethod
    def ask(cls, api, request, metadata=()):
        responses = list(api.generate(request, timeout=PATIENCE, metadata=metadata))
        return token_ids(responses), next(r.finish.usage for r in responses if r.HasField("finish"))

    @classmethod
    def ask_all(cls, server):
        """All requests at once, so that they take each other's frames."""
        api = Api(server.address)
        with concurrent.futures.ThreadPoolExecutor(len(cls.requests)) as threads:
            replies = list(threads.map(lambda request: cls.ask(api, request), cls.requests))
        return [ids for ids, _ in replies], [usage for _, usage in replies]

    def tiered(self, *flags, kv_bytes=None, **options):
        return Server(*SIZES, "--kv-bytes", kv_bytes or self.least, *flags, **options)

    def on_disk(self, *flags, size="256MiB", **options):
        return self.tiered("--disk-bytes", size, "--store-dir", self.store, *flags, **options)

    def check(self, server):
        """The same tokens, and nothing is left over. The usages."""
        ids, usages = self.ask_all(server)
        for i, request in enumerate(self.requests):
            self.assertEqual(ids[i], self.expected[i], f"request {i}, {request.policy}, seed {SEED}; {server.log()}")
        self.assertEqual(server.metric("winnow_kv_blocks_used"), 0)
        return usages

    def check_losses(self, server):
        """None, with a disk in order. On a busy machine it may take longer than reads wait for; that is counted."""
        if server.metric("winnow_store_io_errors_total") == 0:
            self.assertEqual(server.metric("winnow_kv_losses_total"), 0)

    def finish(self, server):
        self.assertEqual(server.terminate(), 0, server.log())

    # ---- tiers ----

    def test_host_memory(self):
        with self.tiered("--host-bytes", "64MiB") as server:
            usages = self.check(server)
            self.assertEqual(server.metric("winnow_kv_losses_total"), 0)
            self.assertGreater(server.metric('winnow_kv_read_bytes_total{tier="host"}'), 0)
            self.assertEqual(server.metric('winnow_kv_read_bytes_total{tier="disk"}'), 0)
            self.assertEqual(sum(u.kv_read_bytes.host for u in usages),
                             server.metric('winnow_kv_read_bytes_total{tier="host"}'))

    def test_disk_with_few_frames_and_what_usage_says_of_it(self):
        for flags in (["--io", "threads"], ["--io", "auto", "--row-cache-bytes", "1KiB", "--prefix-cache", "off"]):
            with self.subTest(flags=flags), self.on_disk(*flags) as server:
                usages = self.check(server)
                self.check_losses(server)
                for policy in (0, 1):
                    read = [usage.kv_read_bytes for usage in usages[policy::2]]
                    self.assertGreater(sum(r.disk for r in read), 0)
                    self.assertEqual(sum(r.host for r in read), 0)
                self.assertEqual(sum(u.kv_read_bytes.disk for u in usages),
                                 server.metric('winnow_kv_read_bytes_total{tier="disk"}'))
                self.assertEqual(sum(u.cached_tokens for u in usages), server.metric("winnow_cached_tokens_total"))
                for usage in usages:
                    self.assertLess(usage.cached_tokens, usage.prompt_tokens)
                    self.assertEqual(usage.cached_tokens % 32, 0)
                    if "off" in flags:
                        self.assertEqual(usage.cached_tokens, 0)
                self.finish(server)

    def test_host_over_disk(self):
        with self.on_disk("--host-bytes", "2MiB") as server:
            usages = self.check(server)
            for tier in ("host", "disk"):
                self.assertGreater(sum(getattr(u.kv_read_bytes, tier) for u in usages), 0, tier)

    def test_the_log_says_where_each_request_read(self):
        several = type(self.requests[0])()
        several.CopyFrom(self.requests[0])
        several.n = 2
        with self.on_disk("--host-bytes", "2MiB") as server:
            usages = self.check(server)
            usages += [r.finish.usage for r in Api(server.address).generate(several, timeout=PATIENCE)
                       if r.HasField("finish")]
            self.finish(server)
            lines = [event for event in server.events() if event["event"] == "request"]
        self.assertEqual(len(lines), len(self.requests) + 1)
        for line, what in (("kv_read_bytes", "fast"), ("kv_read_host_bytes", "host"), ("kv_read_disk_bytes", "disk")):
            self.assertGreater(sum(getattr(u.kv_read_bytes, what) for u in usages), 0, what)
            self.assertEqual(sum(event[line] for event in lines), sum(getattr(u.kv_read_bytes, what) for u in usages))
        self.assertEqual(sum(event["kv_dense_bytes"] for event in lines), sum(u.kv_dense_bytes for u in usages))

    # ---- prefixes ----

    def test_a_prefix_outlives_the_process(self):
        with self.on_disk() as server:
            self.check(server)
            self.finish(server)
        with self.on_disk() as server:
            for i, request in enumerate(self.requests):  # one by one: nothing comes from each other
                ids, usage = self.ask(Api(server.address), request)
                self.assertEqual(ids, self.expected[i], f"request {i}, {request.policy}, seed {SEED}")
                if server.metric("winnow_store_io_errors_total") == 0:
                    self.assertGreater(usage.cached_tokens, usage.prompt_tokens - 100)
                    self.assertGreater(usage.kv_read_bytes.disk, 0)
            self.check_losses(server)
            self.finish(server)
        # Without it the server does not look there.
        with self.on_disk("--prefix-cache", "off") as server:
            ids, usage = self.ask(Api(server.address), self.requests[0])
            self.assertEqual((ids, usage.cached_tokens), (self.expected[0], 0))

    def test_tenants_share_nothing(self):
        with self.on_disk() as server:
            api = Api(server.address)
            cached = []
            for tenant in ("a", "b", "a"):
                responses = list(api.generate(self.requests[0], timeout=PATIENCE,
                                              metadata=[("x-winnow-tenant", tenant)]))
                self.assertEqual(token_ids(responses), self.expected[0])
                cached.append(next(r.finish.usage.cached_tokens for r in responses if r.HasField("finish")))
        self.assertEqual(cached[:2], [0, 0])
        self.assertGreater(cached[2], 0)

    # ---- what happens to it ----

    def test_killed_while_it_answers(self):
        for _ in range(2):
            with self.on_disk() as server:
                with concurrent.futures.ThreadPoolExecutor(1) as threads:
                    answers = threads.submit(self.ask_all, server)
                    time.sleep(self.rng.uniform(0, 1.5))
                    server.signal(signal.SIGKILL)
                    server.wait()
                    try:
                        self.assertEqual(answers.result()[0], self.expected)  # it was quicker
                    except grpc.RpcError as error:
                        self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE)
        with self.on_disk() as server:
            self.check(server)
            self.finish(server)

    def damage(self, path):
        data = bytearray(path.read_bytes())
        way = self.rng.randrange(8)
        if way == 0:
            path.unlink()
        elif way == 1:
            path.write_bytes(data[:self.rng.randrange(len(data) + 1)])
        else:
            for _ in range(min(len(data), 50)):
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)

    def test_damaged_files(self):
        with self.on_disk() as server:
            self.check(server)
            self.finish(server)
        segments = sorted(self.store.glob("seg-*.wseg"))
        self.assertGreater(len(segments), 0)
        for path in segments:
            self.damage(path)
        with self.on_disk() as server:
            self.check(server)
            self.finish(server)
        index = [path for path in sorted((self.store / "index").iterdir()) if path.is_file()]
        for path in [*self.rng.sample(index, 2), *sorted(self.store.glob("seg-*.wseg"))[:1]]:
            self.damage(path)
        with self.on_disk() as server:
            self.check(server)
            self.finish(server)

    def test_a_store_smaller_than_what_is_asked(self):
        # Room for one text and a half.
        with self.on_disk(size="16MiB") as server:
            self.check(server)
            self.check(server)
            self.assertLessEqual(sum(p.stat().st_size for p in self.store.glob("seg-*")), 16 * MIB)
            self.finish(server)

    def test_a_full_file_system(self):
        self.mount_tmpfs("14m")
        # Frames for one text: what the store does not take must find room there.
        with self.on_disk(kv_bytes="24MiB") as server:
            self.check(server)
            self.finish(server)
        with self.on_disk(kv_bytes="24MiB") as server:
            self.check(server)

    def test_a_full_file_system_that_gets_room_again(self):
        room = self.mount_tmpfs("6m")
        # No segment fits, and no text into the frames: everybody waits.
        with self.on_disk() as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
            checked = threads.submit(self.check, server)
            eventually(lambda: server.metric("winnow_store_state") == 1, "a store that takes nothing")
            self.assertTrue(Api(server.address).serving())
            subprocess.run(["mount", "-o", "remount,size=256m", room], check=True)
            checked.result()
            self.assertEqual(server.metric("winnow_store_state"), 0)
            self.finish(server)

    def test_a_full_ext4(self):
        # Room for one segment of 8 MiB, where the texts want two however much they share.
        self.mount_ext4(14 * MIB)
        with self.on_disk(size="128MiB", kv_bytes="24MiB") as server, \
                concurrent.futures.ThreadPoolExecutor(1) as threads:
            checked = threads.submit(self.check, server)
            # While it answers: the state lasts for a pause only.
            eventually(lambda: server.metric("winnow_store_state") == 1, "a store that takes nothing more")
            checked.result()
            self.assertGreater(server.metric("winnow_store_blocks"), 0)
            self.finish(server)
        self.assertEqual(len(list(self.store.glob("seg-*"))), 1)
        with self.on_disk(size="128MiB", kv_bytes="24MiB") as server:
            self.check(server)
            self.finish(server)
        self.assertEqual(run("store", "verify", "--dir", self.store).returncode, 0)

    def test_a_full_ext4_that_gets_room_again(self):
        room = self.mount_ext4(256 * MIB)
        free = os.statvfs(room)
        filler = room / "filler"
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - 6 * MIB)
        with self.on_disk() as server, concurrent.futures.ThreadPoolExecutor(1) as threads:
            checked = threads.submit(self.check, server)
            eventually(lambda: server.metric("winnow_store_state") == 1, "a store that takes nothing")
            filler.unlink()
            checked.result()
            self.assertEqual(server.metric("winnow_store_state"), 0)
            self.finish(server)

    def test_a_disk_that_others_fill(self):
        """To the last byte, also for the index: it must not end the process."""
        room = self.mount_ext4(96 * MIB)
        filler = room / "filler"
        with self.on_disk(size="128MiB", kv_bytes="24MiB") as server, open(filler, "wb", buffering=0) as file:
            self.check(server)  # a segment is open
            for tenant in "ab":
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
                # Of another tenant everything is new to the store.
                for request, expected in zip(self.requests, self.expected):
                    ids, _ = self.ask(Api(server.address), request, metadata=[("x-winnow-tenant", tenant)])
                    self.assertEqual(ids, expected)
                file.truncate(0)
                file.seek(0)
                eventually(lambda: server.metric("winnow_store_state") == 0, "the store to come back")
            self.check(server)
            self.finish(server)
        with self.on_disk(size="128MiB", kv_bytes="24MiB") as server:
            self.check(server)
            self.finish(server)
        self.assertEqual(run("store", "verify", "--dir", self.store).returncode, 0)

    # ---- a slow disk ----

    def test_a_slow_disk(self):
        with self.on_disk(kv_bytes="24MiB") as server:
            self.check(server)
            self.finish(server)
        # A prefix that is all there, and cannot be read in time: computed again, and the tokens are the same.
        with self.on_disk(kv_bytes="24MiB") as server:
            undo = self.slow_down(server, 5)
            self.check(server)
            self.assertGreater(server.metric("winnow_store_io_errors_total"), 0)  # late
            self.assertGreater(server.metric("winnow_kv_losses_total"), 0)
            undo()
            eventually(lambda: server.metric("winnow_store_state") == 0, "the store to come back")
            self.check(server)
            self.finish(server)

    # ---- refusals ----

    def test_what_cannot_be_honoured_is_refused_by_name(self):
        for flags, parts in ((["--disk-bytes", "64MiB"], ["store"]),
                             (["--store-dir", self.store], ["disk"]),
                             (["--disk-bytes", "4KiB", "--store-dir", self.store], ["disk"]),
                             (["--host-bytes", "4KiB"], ["host"]),
                             (["--host-bytes", "64MiB", "--io", "aio"], ["--io"]),
                             (["--host-bytes", "lots"], ["--host-bytes"]),
                             (["--host-bytes", "64MiB", "--prefix-cache", "maybe"], ["--prefix-cache"]),
                             (["--host-bytes", "64MiB", "--kv-bytes", self.least - 1], ["kv", str(self.least)])):
            with self.subTest(flags=flags):
                result = serve(*flags)
                self.assertIn(result.returncode, (2, 78), result.stderr)
                for part in parts:
                    self.assertIn(part, result.stderr)
        self.assertFalse(self.store.exists())

    def test_one_process_at_a_time(self):
        with self.on_disk() as server:
            result = serve("--kv-bytes", self.least, "--disk-bytes", "64MiB", "--store-dir", self.store)
            self.assertEqual(result.returncode, 78, result.stderr)
            for part in (str(self.store), "in use", str(server.process.pid)):
                self.assertIn(part, result.stderr)
            self.assertNotIn("device", result.stderr)  # another thing that may be missing at the start
            self.finish(server)
        with self.on_disk() as server:
            self.finish(server)

    def test_a_directory_that_cannot_be_written(self):
        file = self.directory / "file"
        file.write_text("")
        flags = ["--kv-bytes", self.least, "--disk-bytes", "64MiB", "--store-dir"]
        result = serve(*flags, file / "store")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(str(file / "store"), result.stderr)
        self.store.mkdir(mode=0o555)
        who = {}
        if os.getuid() == 0:  # who may write everywhere
            self.directory.chmod(0o755)
            who = {"user": 65534, "group": 65534, "extra_groups": [], "env": {**os.environ, "HOME": "/nonexistent"}}
            try:
                runs = subprocess.run([BIN, "--version"], capture_output=True, **who).returncode == 0
            except PermissionError:  # below root's own folder
                runs = False
            if not runs:
                self.skipTest("nobody cannot run the program here")
        result = serve(*flags, self.store, **who)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(str(self.store), result.stderr)


if __name__ == "__main__":
    main()

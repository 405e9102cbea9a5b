#!/usr/bin/python3
"""Kills a server with a store again and again, damages its files, and asks what came back.

    loadtest/kill_server.py [--rounds 100] [--model models/needle-5m] [--seed N]

A round: start over the same directory (now with io_uring, now with threads, now with a little host memory), compare the
bytes that the server counts with its files, ask, go on under load, flip bits in its open files every third
time, and SIGKILL it at a random time (sometimes SIGTERM). Then `winnow store stat`, and every other round flip bits in
some files, truncate or delete some, or add garbage. Every answer that came is compared with all KV in memory. Exits 1
at the end if there was a wrong token, an error, a failed start, an answer past its deadline, or bytes that the store
does not count.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import tier_load
from harness import BIN, MODEL, Api, Server
from tier_load import MIB

DISK_BYTES = 48 * MIB


class Load:
    """Asks from several threads until told to stop or until the server is gone."""

    def __init__(self, server, requests, streams, deadline, seed):
        self.server, self.requests, self.deadline = server, requests, deadline
        self.stopping = False
        self.replies = []
        self.threads = [threading.Thread(target=self.stream, args=(seed * 100 + i,)) for i in range(streams)]
        for thread in self.threads:
            thread.start()

    def stream(self, seed):
        rng = random.Random(seed)
        api = Api(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        while not self.stopping:
            request = rng.choice(self.requests)
            reply = tier_load.ask(api, request, self.deadline)
            self.replies.append((request, reply))
            if reply.error:
                break
        api.channel.close()

    def stop(self):
        self.stopping = True
        for thread in self.threads:
            thread.join()


def flip_under_it(directory, rng):
    """Flips bits in segments that the server has open."""
    for path in rng.sample(sorted(directory.glob("seg-*.wseg")), 1):
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(rng.randrange(1, 40)):
                at = rng.randrange(size)
                byte = os.pread(file.fileno(), 1, at)
                if byte:
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << rng.randrange(8)]), at)


def damage(directory, rng):
    """What was done, in words."""
    files = [path for path in sorted(pathlib.Path(directory).rglob("*")) if path.is_file() and path.stat().st_size]
    if not files:
        return "nothing to damage"
    done = []
    for path in rng.sample(files, min(len(files), rng.randrange(1, 4))):
        data = bytearray(path.read_bytes())
        way = rng.choice(["flip", "flip", "flip many", "truncate", "delete", "garbage"])
        if way == "delete":
            path.unlink()
        elif way == "truncate":
            path.write_bytes(data[:rng.randrange(len(data))])
        elif way == "garbage":
            path.write_bytes(data + rng.randbytes(rng.randrange(1, 9000)))
        else:
            for _ in range(1 if way == "flip" else len(data) // 20000 + 1):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        done.append(f"{way} {path.relative_to(directory)}")
    return ", ".join(done)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--low", type=int, default=800, help="tokens of the shortest document (default %(default)s)")
    parser.add_argument("--high", type=int, default=3000, help="tokens of the longest (default %(default)s)")
    parser.add_argument("--load", type=float, default=4, help="longest time under load, seconds (default %(default)s)")
    parser.add_argument("--deadline", type=float, default=300, help="of an answer, seconds (default %(default)s)")
    parser.add_argument("--directory", type=pathlib.Path, help="of the store; kept if something is wrong")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    sizes = ["--max-running", args.streams, "--step-tokens", 256, "--block-tokens", 32, "--retrieval-from", 0,
             "--max-context", 2 * args.high]
    requests = tier_load.make_requests(24, 3, args.low, args.high, tier_load.policies_of(args.model), 12, args.seed)
    reference = tier_load.Reference()
    reference.compute(args.model, sizes, "128MiB", requests, args.streams, args.deadline)
    least = tier_load.least_kv_bytes(args.model, sizes)
    root = args.directory or pathlib.Path(tempfile.mkdtemp(prefix="winnow-kill-"))
    root.mkdir(parents=True, exist_ok=True)
    directory = root / "store"
    print(f"{args.model}, {args.rounds} rounds, seed {args.seed}, {len(requests)} requests, disk {DISK_BYTES // MIB} "
          f"MiB, frames {least} bytes", flush=True)

    faults, counts = [], collections.Counter()

    def fault(number, text):
        faults.append(f"round {number}: {text}")
        print(f"FAULT, round {number}: {text}", flush=True)

    def check(number, request, reply, killed=False):
        if reply.error:
            # Whatever came before the server went must be right, too.
            if not killed or not reply.error.startswith(("UNAVAILABLE", "CANCELLED")):
                fault(number, f"{request.policy}: {reply.error}")
            counts["cut off"] += 1
            right = reply.ids == reference[request][:len(reply.ids)]
        else:
            counts["answers"] += 1
            counts["cached"] += reply.usage.cached_tokens
            right = reply.ids == reference[request]
        if not right:
            fault(number, f"{request.policy}: {reply.ids}, expected {reference[request]}")

    done = ""
    for number in range(args.rounds):
        flags = ["--io", rng.choice(["uring", "threads", "auto"])]
        if rng.random() < 0.3:
            flags += ["--host-bytes", "2MiB"]
        begin = tier_load.now()
        try:
            server = Server(*sizes, "--kv-bytes", least, "--disk-bytes", DISK_BYTES, "--store-dir", directory, *flags,
                            model=args.model)
        except RuntimeError as error:
            fault(number, f"failed start after: {done}\n{error}")
            shutil.copytree(directory, root / f"failed-{number}", dirs_exist_ok=True)
            shutil.rmtree(directory)
            continue
        with server:
            counts["start ms"] += int(1000 * (tier_load.now() - begin))
            found, mib = tier_load.store_at_start(server)
            counts["blocks found"] += found
            used, bytes_now = server.metric("winnow_store_used_bytes"), tier_load.store_bytes(directory)
            if "--host-bytes" not in flags and used != bytes_now:
                fault(number, f"the server counts {used:.0f} bytes, its files have {bytes_now}")
            asked = rng.sample(requests, 2)
            for request, reply in zip(asked, tier_load.ask_all(server, asked, 2, args.deadline)):
                check(number, request, reply)
            load = Load(server, requests, args.streams, args.deadline, args.seed + number)
            time.sleep(rng.uniform(0, args.load))
            if number % 3 == 2 and tier_load.store_bytes(directory):
                flip_under_it(directory, rng)
                counts["flipped"] += 1
                time.sleep(rng.uniform(0, args.load))
            if rng.random() < 0.1:
                load.stop()
                if server.terminate() != 0:
                    fault(number, f"exit code {server.process.returncode}:\n{server.log()[-3000:]}")
                counts["ended well"] += 1
            else:
                if server.process.poll() is not None:
                    fault(number, f"the server went away ({server.process.returncode}):\n{server.log()[-3000:]}")
                server.signal(signal.SIGKILL)
                server.wait()
                load.stop()
                counts["killed"] += 1
            for request, reply in load.replies:
                check(number, request, reply, killed=True)
            bytes_now = tier_load.store_bytes(directory)
            if bytes_now > DISK_BYTES:
                fault(number, f"{bytes_now} bytes of files, {DISK_BYTES} are allowed")
        stat = subprocess.run([BIN, "store", "stat", "--json", "--dir", directory], capture_output=True, text=True)
        if stat.returncode != 0 or json.loads(stat.stdout)["file_bytes"] != bytes_now:
            fault(number, f"winnow store stat: {stat.returncode}, {stat.stderr}{stat.stdout}; files: {bytes_now} bytes")
        done = ""
        if number % 2:
            done = damage(directory, rng)
            counts["damaged"] += 1
        print(f"round {number}: {flags}, {found} blocks, {mib} MiB found; {len(load.replies)} under load"
              f"{'; ' + done if done else ''}", flush=True)

    starts = max(1, counts["killed"] + counts["ended well"])
    print(f"{args.rounds} rounds: {counts['killed']} kills, {counts['ended well']} ends by SIGTERM, {counts['damaged']}"
          f" times damaged, {counts['flipped']} times while it ran; {counts['answers']} answers compared and "
          f"{counts['cut off']} that the kill cut off; {counts['cached']} tokens cached, "
          f"{counts['blocks found'] / starts:.0f} blocks and {counts['start ms'] / starts:.0f} ms a start; "
          f"{len(faults)} faults", flush=True)
    if args.directory is None and not faults:
        shutil.rmtree(root, ignore_errors=True)
    elif faults:
        print(f"the store is left in {root}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

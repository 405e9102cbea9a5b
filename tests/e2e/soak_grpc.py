#!/usr/bin/python3
"""Many streams at once over gRPC, with random cancels, deadlines, broken connections and slow readers.

    tests/e2e/soak_grpc.py [--seconds 300] [--streams 64] [--requests 16] [--disk]

Against WINNOW_BIN, which may be built with a sanitizer. Passes if every request that finished has the tokens that it
has alone, if afterwards exactly no KV block is in use and nothing runs or waits, and if the server drains with exit
code 0 and has no sanitizer report in its log. With --disk most KV is in a store on disk that is too small for it, too.
"""
import argparse
import collections
import random
import sys
import tempfile
import threading
import time

import grpc

from harness import PATIENCE, SEED, Api, Server, counting_request, eventually, inference, token_ids


# Small windows and budgets, so that prompts of a few hundred tokens retrieve. What is computed again after a preemption
# must choose the same rows.
POLICIES = ["dense", "window:sink=2,window=16,from=0", "oracle:k=5%,window=16,from=0", "quest:k=32,window=16,from=0",
            "lsh:k=8,window=16,suffix=40,from=0", "hata:k=6,p=0.9,window=16,from=0",
            "spotlight:k=8,window=16,completion=on,suffix=20,from=0"]


def make_requests(count, rng):
    requests = []
    for i in range(count):
        words = " ".join(rng.choice(["river", "stone", "lamp", "code", "seven", "garden"])
                         for _ in range(rng.choice([3, 40, 300])))
        sampling = inference.SamplingOptions()
        if i % 2:
            sampling = inference.SamplingOptions(temperature=1.0, top_p=0.9, seed=i)
        requests.append(counting_request(f"{i}: {words}", rng.choice([1, 8, 40, 120]), sampling=sampling,
                                         policy=POLICIES[i % len(POLICIES)]))
    return requests


class Soak:
    def __init__(self, server, requests, expected, seconds):
        self.server, self.requests, self.expected = server, requests, expected
        self.end = time.monotonic() + seconds
        self.lock = threading.Lock()
        self.outcomes = collections.Counter()
        self.wrong = []

    def stream(self, number):
        rng = random.Random(SEED * 1000 + number)
        api = Api(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
        while time.monotonic() < self.end:
            which = rng.randrange(len(self.requests))
            action = rng.choice(["finish", "finish", "cancel", "deadline", "disconnect", "slow"])
            timeout = rng.uniform(0.001, 1.0) if action == "deadline" else PATIENCE
            stop_after = rng.randrange(12) if action in ("cancel", "disconnect") else -1
            got, outcome = [], "ok"
            call = api.generate(self.requests[which], timeout=timeout)
            try:
                if stop_after == 0:
                    call.cancel()
                for count, response in enumerate(call, 1):
                    got.extend(token.id for token in response.tokens)
                    if action == "slow":
                        time.sleep(rng.uniform(0, 0.05))
                    if count == stop_after:
                        if action == "cancel":
                            call.cancel()
                        else:
                            api.channel.close()
                            break
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed under the call
                outcome = error.code().name if isinstance(error, grpc.RpcError) else "CLOSED"
            if action == "disconnect":
                if outcome == "ok" and len(got) < len(self.expected[which]):
                    outcome = "DISCONNECTED"
                api.channel.close()
                api = Api(self.server.address, options=[("grpc.use_local_subchannel_pool", 1)])
            with self.lock:
                self.outcomes[outcome] += 1
                if outcome == "ok" and got != self.expected[which]:
                    self.wrong.append((which, got))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--disk", action="store_true")
    args = parser.parse_args()
    print(f"seed {SEED}: {args.streams} streams for {args.seconds:g} s", flush=True)

    directory = tempfile.TemporaryDirectory(prefix="winnow-soak-")
    # A pool that holds a few of the longest requests, so that preemption is part of it.
    flags = ["--max-context", 2048, "--kv-bytes", "6MiB", "--max-running", 32, "--slow-reader-timeout", "20s"]
    if args.disk:
        flags += ["--block-tokens", 16, "--disk-bytes", "16MiB", "--store-dir", directory.name]
    with directory, Server(*flags) as server:
        api = Api(server.address)
        requests = make_requests(args.requests, random.Random(SEED))
        expected = [token_ids(api.generate(request, timeout=PATIENCE)) for request in requests]
        soak = Soak(server, requests, expected, args.seconds)
        threads = [threading.Thread(target=soak.stream, args=(i,)) for i in range(args.streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for series in ("winnow_kv_blocks_used", "winnow_requests_running", "winnow_requests_waiting"):
            eventually(lambda: server.metric(series) == 0, f"{series} at zero")
        again = [token_ids(api.generate(request, timeout=PATIENCE)) for request in requests]
        preemptions = server.metric("winnow_preemptions_total")
        blocks = server.metric("winnow_kv_blocks_used")
        code = server.terminate()
        log = server.log()

    print(f"outcomes {dict(soak.outcomes)}, {preemptions:g} preemptions, {blocks:g} blocks in use, exit code {code}")
    faults = []
    if soak.wrong:
        faults.append(f"{len(soak.wrong)} requests have other tokens than alone; the first: {soak.wrong[0]}")
    if again != expected:
        faults.append("the answers changed")
    if not soak.outcomes["ok"]:
        faults.append("no request finished")
    if blocks != 0:
        faults.append(f"{blocks:g} blocks are in use")
    if code != 0 or "Sanitizer" in log:
        faults.append(f"exit code {code}; log:\n{log[-6000:]}")
    for fault in faults:
        print("FAULT:", fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""Tokens with KV in slower tiers against tokens with all KV in memory, over every way to configure the tiers.

    loadtest/tiers_equal.py [--model models/needle-5m] [--requests 200] [--only NAME ...] [--reference FILE]

Documents of 2K to 30K tokens with questions about each, under the policies that the model can honour, greedy. Prints a
line for each configuration; exits 0 if every answer of every configuration equals its reference and none failed.
A reference that is kept in a file is computed once, however often the command is run with the same requests.
"""
import argparse
import pathlib
import shutil
import statistics
import sys
import tempfile

import tier_load
from harness import MODEL, Server
from tier_load import MIB


def configurations(kv_bytes):
    """Name, flags, which store directory ("": none). The same directory again is what an earlier server left there."""
    disk = ["--disk-bytes", max(64 * MIB, 3 * kv_bytes)]
    tenth = ["--host-bytes", max(MIB, kv_bytes // 10)]
    return [
        ("memory, shared prefixes", ["--kv-bytes", 2 * kv_bytes], ""),
        ("host 10 % over disk", [*tenth, *disk], "tenth"),
        ("disk, io_uring", [*disk, "--io", "uring"], "uring"),
        ("  resumed lazily after a restart", [*disk, "--io", "uring", "--resume", "lazy"], "uring"),
        ("  resumed eagerly", [*disk, "--io", "uring", "--resume", "eager"], "uring"),
        ("  resumed, threads, prefetch", [*disk, "--io", "threads", "--prefetch", "on"], "uring"),
        ("  resumed, host 10 %, tiny row cache", [*tenth, *disk, "--row-cache-bytes", "1KiB"], "uring"),
        ("disk, threads", [*disk, "--io", "threads"], "threads"),
        ("disk, prefetch", [*disk, "--prefetch", "on"], "prefetch"),
        ("disk, tiny row cache", [*disk, "--row-cache-bytes", "1KiB"], "tiny"),
        ("disk, nothing shared", [*disk, "--prefix-cache", "off"], "alone"),
        ("host 10 % over disk, nothing shared", [*tenth, *disk, "--prefix-cache", "off"], "tenth alone"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--per-document", type=int, default=5, help="questions (default %(default)s)")
    parser.add_argument("--low", type=int, default=2000, help="tokens of the shortest document (default %(default)s)")
    parser.add_argument("--high", type=int, default=30000, help="tokens of the longest (default %(default)s)")
    parser.add_argument("--answer", type=int, default=24, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time (default %(default)s)")
    parser.add_argument("--deadline", type=float, default=1800, help="of a request, seconds (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="configurations whose name has this part; may be repeated")
    parser.add_argument("--policy", action="append", help="may be repeated; by default what the model can honour")
    parser.add_argument("--reference", type=pathlib.Path, help="file to keep the reference's tokens in")
    parser.add_argument("--directory", type=pathlib.Path, help="where stores are made; a temporary one by default")
    args = parser.parse_args()

    sizes = ["--max-running", args.streams, "--step-tokens", 512, "--block-tokens", tier_load.BLOCK_TOKENS,
             "--retrieval-from", 0]
    requests = tier_load.make_requests(args.requests, args.per_document, args.low, args.high,
                                       args.policy or tier_load.policies_of(args.model), args.answer, args.seed)
    least = tier_load.least_kv_bytes(args.model, sizes)
    reference = tier_load.Reference(args.reference)
    print(f"{args.model}, {len(requests)} requests, seed {args.seed}, {args.streams} at a time; at least {least} "
          f"bytes of frames", flush=True)
    print(f"{'configuration':38} {'requests':>8} {'equal':>6} {'errors':>6} {'losses':>6} {'prompt':>8} {'cached':>8} "
          f"{'fast MB':>9} {'host MB':>9} {'disk MB':>9} {'first s':>8} {'seconds':>8}", flush=True)

    def report(name, replies, losses, seconds):
        done = [reply for reply in replies if reply.usage is not None]
        equal = sum(reply.ids == reference[request] for request, reply in zip(requests, replies))
        total = lambda value: sum(map(value, (reply.usage for reply in done)))
        first = statistics.median(reply.usage.time_to_first_token_seconds for reply in done) if done else float("nan")
        print(f"{name:38} {len(replies):>8} {equal:>6} {len(replies) - len(done):>6} {losses:>6.0f} "
              f"{total(lambda u: u.prompt_tokens):>8} {total(lambda u: u.cached_tokens):>8} "
              f"{total(lambda u: u.kv_read_bytes.fast) / 1e6:>9.1f} "
              f"{total(lambda u: u.kv_read_bytes.host) / 1e6:>9.1f} "
              f"{total(lambda u: u.kv_read_bytes.disk) / 1e6:>9.1f} {first:>8.2f} {seconds:>8.1f}", flush=True)
        for number, (request, reply) in enumerate(zip(requests, replies)):
            if reply.error or reply.ids != reference[request]:
                print(f"  NOT EQUAL: request {number}, {request.policy}: {reply.error or reply.ids}, "
                      f"expected {reference[request]}", flush=True)
        return equal == len(replies)

    # For the reference: room for the longest prompts of all streams.
    begin = tier_load.now()
    with Server(*sizes, "--kv-bytes", "64MiB", model=args.model) as server:
        per_token = server.metric("winnow_kv_block_bytes") / tier_load.BLOCK_TOKENS
    memory = int(per_token * (args.high * 1.2 + 1024) * args.streams)
    replies = reference.compute(args.model, sizes, memory, requests, args.streams, args.deadline)
    if len(replies) == len(requests):
        report("memory, nothing shared: the reference", replies, 0, tier_load.now() - begin)
    # The KV of every document once.
    documents = max(1, len(requests) // args.per_document)
    tokens = sum(args.low * (args.high / args.low) ** (i / max(1, documents - 1)) for i in range(documents))
    kv_bytes = int(tokens * per_token)

    root = args.directory or pathlib.Path(tempfile.mkdtemp(prefix="winnow-tiers-"))
    root.mkdir(parents=True, exist_ok=True)
    good = True
    try:
        for name, flags, directory in configurations(kv_bytes):
            if args.only and not any(part in name for part in args.only):
                continue
            if directory:
                flags = ["--kv-bytes", least, "--store-dir", root / directory, *flags]
            begin = tier_load.now()
            with Server(*sizes, *flags, model=args.model) as server:
                replies = tier_load.ask_all(server, requests, args.streams, args.deadline)
                losses = server.metric("winnow_kv_losses_total")
                seconds = tier_load.now() - begin
                left = server.metric("winnow_kv_blocks_used")
                code = server.terminate()
                log = server.log()
            good = report(name, replies, losses, seconds) and good
            if left != 0 or code != 0:
                print(f"  FAULT: {left:g} blocks in use, exit code {code}; the log's end:\n{log[-2000:]}", flush=True)
                good = False
            if directory and "resumed" not in name and not name.startswith("disk, io_uring"):
                shutil.rmtree(root / directory, ignore_errors=True)
    finally:
        if args.directory is None:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

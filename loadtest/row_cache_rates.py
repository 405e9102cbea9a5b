#!/usr/bin/env python3
"""How many of the rows that decode steps choose lie in the GPU's row cache, by its size, on real text.

    loadtest/row_cache_rates.py --model DIR --text FILE [--artifact FILE] [--bytes 110000] [--policy lsh:k=2%] [--tokens 128]
        [--size 1MiB ...] [--host-bytes 8GiB] [-- FLAG ...]

For each size a server with --device cuda and KV in pinned host memory: it reads the text's first bytes as a prompt, then generates
under the policy, greedy. Counted are the rows of all steps, the first of which finds an empty cache. Prints a line for each size: its
share of the sequence's KV in the host's memory, rows per token, how many were cached, what was left for the bus, and the time per token
beside that of the largest size. Needs the winnow program (WINNOW_BIN) and Python only.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

from own_server import WINNOW, own_server


def metrics_of(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def run(flags, prompt, policy, tokens):
    """Metrics' growth over the steps, and usage."""
    with tempfile.TemporaryDirectory() as work, own_server("--device", "cuda", *flags) as (address, metrics_port, _):
        before = metrics_of(metrics_port)
        text = pathlib.Path(work, "chat.json")
        text.write_text(json.dumps([{"role": "user", "content": prompt}]))
        answer = subprocess.run([WINNOW, "generate", "--server", address, "--chat-file", text, "--max-tokens", str(tokens), "--temperature",
                                 "0", "--ignore-eos", "--policy", policy, "--json"], capture_output=True, text=True)
        if answer.returncode != 0:
            sys.exit(f"winnow generate failed: {answer.stderr}")
        after = metrics_of(metrics_port)
        return {name: after[name] - before.get(name, 0) for name in after}, json.loads(answer.stdout)["usage"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--artifact")
    parser.add_argument("--text", required=True, type=pathlib.Path)
    parser.add_argument("--bytes", type=int, default=110000, help="of the text (default %(default)s)")
    parser.add_argument("--policy", action="append", help="may be repeated (default lsh:k=2%%)")
    parser.add_argument("--tokens", type=int, default=128, help="to generate (default %(default)s)")
    parser.add_argument("--size", action="append", help="of the row cache; may be repeated")
    parser.add_argument("--host-bytes", default="8GiB", help="(default %(default)s)")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    prompt = args.text.read_bytes()[:args.bytes].decode(errors="ignore")
    flags = ["--model", args.model, "--host-bytes", args.host_bytes, *args.flags]
    if args.artifact:
        flags += ["--artifact", args.artifact]
    print(f"{'policy':28} {'cache':>8} {'prompt':>7} {'rows/token':>10} {'cached':>8} {'bus MB/token':>12} {'ms/token':>9}", flush=True)
    for policy in args.policy or ["lsh:k=2%"]:
        for size in args.size or ["1MiB", "2MiB", "4MiB", "8MiB", "16MiB", "64MiB"]:
            grown, usage = run([*flags, "--row-cache-bytes", size], prompt, policy, args.tokens)
            hits, misses = grown["winnow_kv_row_cache_hits_total"], grown["winnow_kv_row_cache_misses_total"]
            tokens = usage["generated_tokens"] - 1  # the prompt's pass gave the first
            bus = grown['winnow_kv_read_bytes_total{tier="host"}']
            seconds = usage["total_seconds"] - usage["time_to_first_token_seconds"]
            print(f"{policy:28} {size:>8} {usage['prompt_tokens']:>7} {(hits + misses) / tokens:>10.0f} {hits / max(1, hits + misses):>8.1%} "
                  f"{bus / tokens / 1e6:>12.2f} {1000 * seconds / tokens:>9.2f}", flush=True)


if __name__ == "__main__":
    main()

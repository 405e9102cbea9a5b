#!/usr/bin/env python3
"""How long a prompt's log-probabilities take. An answer of --tokens tokens is decoded, with the log-probability of each; then the request and
its answer together are a prompt, which is scored (`echo` and `logprobs` of /v1/completions), and read for one token more. Nothing is cached.

    loadtest/prompt_scores.py --model FILE [--tokens 2000] [--runs 5] [-- FLAG...]

Prints medians. Exits 1 if a score is not, bit for bit, what decoding said of the token.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request

from own_server import WINNOW, own_server

START = [1, 2, 3]


def decode(address, tokens):
    """Seconds, and the answer's tokens with their log-probabilities."""
    run = subprocess.run([WINNOW, "generate", "--server", address, "--tokens", ",".join(map(str, START)), "--max-tokens", str(tokens), "--ignore-eos",
                          "--temperature", "0", "--top-logprobs", "0", "--no-cache-use", "--no-cache-store", "--json"], capture_output=True, check=True)
    answer = json.loads(run.stdout)
    return answer["usage"]["total_seconds"], [(token["id"], token["logprob"]) for token in answer["logprobs"]]


def complete(port, prompt, **fields):
    """Seconds, and the choice."""
    body = {"prompt": prompt, "temperature": 0, "winnow": {"cache": {"use": False, "store": False}}, **fields}
    begun = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode()) as answer:
        text = answer.read()
    return time.monotonic() - begun, json.loads(text)["choices"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="of winnow serve")
    args = parser.parse_args()

    times = {"decoded": [], "scored": [], "read": []}
    with own_server("--model", args.model, "--policy", "dense", *args.flags) as ports:
        for _ in range(args.runs):
            seconds, decoded = decode(ports.address, args.tokens)
            times["decoded"].append(seconds)
            prompt = START + [token for token, _ in decoded]
            seconds, choice = complete(ports.http_port, prompt, echo=True, logprobs=1, max_tokens=0)
            times["scored"].append(seconds)
            times["read"].append(complete(ports.http_port, prompt, max_tokens=1)[0])
            wrong = sum(score != said for score, (_, said) in zip(choice["logprobs"]["token_logprobs"][len(START):], decoded, strict=True))
            if wrong > 0:
                print(f"{wrong} of {len(decoded)} scores are not what decoding said")
                return 1
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name:8} {len(prompt)} tokens in {seconds:7.3f} s ({min(times[name]):.3f} to {max(times[name]):.3f}), {seconds / medians['scored']:6.2f} times the time of scoring")
    return 0


if __name__ == "__main__":
    sys.exit(main())

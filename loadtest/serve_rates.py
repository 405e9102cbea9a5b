#!/usr/bin/env python3
"""What clients get of a server's decode steps: tokens a second with several answers at a time, beside `winnow bench decode`.

    loadtest/serve_rates.py --model DIR [--streams 1 --streams 8 ...] [--prompt 2000] [--tokens 256] [--option "--temperature 0" ...] [-- FLAG ...]

Starts `winnow serve --model DIR FLAG...` once. For each number of streams and each set of options so many `winnow generate` ask at the
same time, each about its own text of about --prompt tokens. Counted is what the server itself says of the time between an answer's first and
last token: the median over streams, and tokens a second of all while they ran side by side. Needs the winnow program (WINNOW_BIN) and
Python only. A model of any shape: `winnow make-model --like CONFIG.json --tokenizer-from models/needle-5m --out DIR`.
"""
import argparse
import json
import pathlib
import random
import shlex
import statistics
import subprocess
import sys
import tempfile

from own_server import WINNOW, own_server


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, action="append", help="answers at a time; may be repeated (default 1, 8, 24)")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of each prompt, random ids (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer (default %(default)s)")
    parser.add_argument("--option", action="append", help="flags of winnow generate; may be repeated (default greedy, and temperature 0.8 with top-p 0.95)")
    parser.add_argument("--policy", default="dense", help="(default %(default)s)")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    options = args.option or ["--temperature 0", "--temperature 0.8 --top-p 0.95"]
    numbers = random.Random(1)
    with own_server("--model", args.model, *args.flags) as (address, *_):

        def ask(option, seed, directory):
            prompt = ",".join(str(numbers.randrange(1000)) for _ in range(args.prompt))
            command = [WINNOW, "generate", "--server", address, "--tokens", prompt, "--max-tokens", str(args.tokens), "--ignore-eos",
                       "--seed", str(seed), "--policy", args.policy, "--json", *shlex.split(option)]
            out = open(pathlib.Path(directory, str(seed)), "w+")
            return subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True), out

        print(f"{'options':40} {'streams':>7} {'ms/token':>9} {'tokens/s':>9} {'first s':>8}", flush=True)
        for option in options:
            for streams in args.streams or [1, 8, 24]:
                with tempfile.TemporaryDirectory() as directory:
                    asked = [ask(option, seed, directory) for seed in range(streams)]
                    usages = []
                    for process, out in asked:
                        _, error = process.communicate()
                        if process.returncode != 0:
                            sys.exit(f"winnow generate failed: {error}")
                        out.seek(0)
                        usages.append(json.load(out)["usage"])
                        out.close()
                # From the last first token on all of them decode, and nothing else runs.
                each = [(u["total_seconds"] - u["time_to_first_token_seconds"]) / (u["generated_tokens"] - 1) for u in usages]
                last = max(usages, key=lambda u: u["time_to_first_token_seconds"])
                seconds = (last["total_seconds"] - last["time_to_first_token_seconds"]) / (last["generated_tokens"] - 1)
                print(f"{option:40} {streams:>7} {1000 * statistics.median(each):>9.2f} {streams / seconds:>9.1f} "
                      f"{last['time_to_first_token_seconds']:>8.2f}", flush=True)


if __name__ == "__main__":
    main()

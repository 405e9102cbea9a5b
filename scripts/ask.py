#!/usr/bin/env python3
"""Asks a running winnow server the questions of make_document.py, one `winnow generate` each, and checks the answers.

Every question is asked under every policy, one after the other, so that a busy spell of the machine meets all of them.
Prints each answer with the KV that was read for it, the time to its first token, and tokens per second. Exits 0 if under
each policy at most one answer in four is wrong (with --as-good-as-dense: if each policy has as many right answers as
dense attention less one, and dense attention has any), and every policy but dense read less than dense attention would have.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

INTRO = "Read the document below and answer the questions that follow.\n"


def ask(args, content, policy):
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=args.dir) as chat:
        json.dump([{"role": "user", "content": content}], chat)
        chat.flush()
        run = subprocess.run([args.winnow, "generate", "--server", args.server, "--chat-file", chat.name, "--max-tokens",
                              "48", "--temperature", "0", "--policy", policy,
                              "--json"], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"winnow generate failed with {run.returncode}: {run.stderr}")
    return json.loads(run.stdout)


def names(text, fact):
    """Whether a text has a fact as a word of its own: 79622777 is not 7962277."""
    return re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text) is not None


def size(count):
    return f"{count / 1e6:.1f} MB"


class Run:
    """What a reply cost."""

    def __init__(self, reply, fact):
        usage = reply["usage"]
        self.text = reply["text"].strip()
        self.right = names(reply["text"], fact)
        self.prompt_tokens = usage["prompt_tokens"]
        self.cached = usage["cached_tokens"]
        self.read = usage["kv_read_bytes"]["fast"]
        self.below = usage["kv_read_bytes"]["host"] + usage["kv_read_bytes"]["disk"]
        self.dense = usage["kv_dense_bytes"]
        self.kept = usage["retrieval"]["kept"]
        self.first = usage["time_to_first_token_seconds"]
        decode = usage["total_seconds"] - self.first
        self.speed = (usage["generated_tokens"] - 1) / decode if decode > 0 else float("nan")

    def is_cached(self):
        return 2 * self.cached > self.prompt_tokens

    def share(self):
        return 100 * self.read / self.dense if self.dense else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--winnow", required=True, help="the winnow program")
    parser.add_argument("--server", required=True, help="HOST:PORT")
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="what make_document.py wrote")
    parser.add_argument("--policy", action="append", help="may be repeated; dense where absent")
    parser.add_argument("--as-good-as-dense", action="store_true",
                        help="of a model that cannot answer all questions: what dense attention answers is the yardstick")
    args = parser.parse_args()
    if args.as_good_as_dense and "dense" not in (args.policy or ["dense"]):
        parser.error("--as-good-as-dense needs --policy dense")
    policies = args.policy or ["dense"]

    document = (args.dir / "document.txt").read_text()
    questions = [json.loads(line) for line in (args.dir / "questions.jsonl").read_text().splitlines()]
    runs = {policy: [] for policy in policies}
    for number, question in enumerate(questions, 1):
        print(f"{number}. {question['question']}", flush=True)
        for policy in policies:
            run = Run(ask(args, f"{INTRO}{document}\n\n{question['question']}", policy), question["fact"])
            runs[policy].append(run)
            kept = "" if run.kept is None else f", {100 * run.kept:.1f} % of what it chose from"
            if run.below > 0:
                kept += f"; {size(run.below)} from slower tiers"
            print(f"   {policy}\n"
                  f"     {'right' if run.right else 'WRONG'}: {run.text}\n"
                  f"     KV read: {size(run.read)} of {size(run.dense)}, {run.share():.1f} %{kept}; first token after "
                  f"{run.first:.2f} s ({run.cached} prompt tokens were cached), then {run.speed:.0f} tokens/s", flush=True)

    good = True
    # Who asks about a document first has it computed; the others begin with its KV.
    print(f"\n{'right':>9} {'KV read':>9} {'first token':>12} {'if cached':>10} {'then':>14}   policy "
          f"({runs[policies[0]][0].prompt_tokens} prompt tokens; medians)")
    for policy, all_of in runs.items():
        wrong = sum(not run.right for run in all_of)
        median = lambda value: statistics.median(map(value, all_of))
        computed = [f"{statistics.median(r.first for r in of):.2f} s" if of else "-" for of in
                    ([r for r in all_of if not r.is_cached()], [r for r in all_of if r.is_cached()])]
        print(f"{len(all_of) - wrong:>4} of {len(all_of)} {median(Run.share):>7.1f} % {computed[0]:>12} {computed[1]:>10} "
              f"{median(lambda r: r.speed):>7.0f} tokens/s   {policy}")
        if args.as_good_as_dense:
            right_dense = sum(run.right for run in runs["dense"])
            good = good and right_dense > 0 and len(all_of) - wrong >= right_dense - 1
        else:
            good = good and 4 * wrong <= len(all_of)
        if policy != "dense" and not all(run.read < run.dense for run in all_of):
            print(f"{policy} read as much as dense attention")
            good = False
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

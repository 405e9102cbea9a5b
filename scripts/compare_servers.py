#!/usr/bin/env python3
"""Compares the greedy answers of two running winnow servers, token by token: --device cuda with --device cpu, say.

Every prompt is asked under every policy. Where the answers part, the line says at which token and how far the two tokens
lie apart in each server's log-probabilities: two backends that round differently may choose either of two tokens that are
nearly equal in both, and after that the texts are different texts. Also prints the largest distance of the log-probabilities
of tokens before that. Exits 0 if all answers are the same, 1 if some part where neither server's gap is more than --gap, 2
else: a wider gap, an answer that ends before the other, a server that does not answer.
"""
import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile


def ask(args, server, chat, policy):
    command = [args.winnow, "generate", "--server", server, "--chat-file", chat, "--max-tokens", str(args.max_tokens), "--temperature",
               "0", "--ignore-eos", "--top-logprobs", "5", "--policy", policy, "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"winnow generate failed with {run.returncode}: {run.stderr}")
    return json.loads(run.stdout)


def ask_both(args, content, policy):
    """The answers of both servers to one prompt, the second's under --against where that is given."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as chat:
        json.dump([{"role": "user", "content": content}], chat)
        chat.flush()
        return [ask(args, server, chat.name, asked) for server, asked in zip(args.server, (policy, args.against or policy))]


def logprob_of(entry, token):
    """Of a token at a place of an answer; None if it was not among the likeliest."""
    for other in [entry] + entry["top"]:
        if other["id"] == token:
            return other["logprob"]
    return None


def compare(left, right):
    """The first place where they part or None, the gaps there, the largest distance before. Answers of no tokens part: nothing
    was compared."""
    distance = 0.0
    for at, (a, b) in enumerate(zip(left["logprobs"], right["logprobs"])):
        if a["id"] != b["id"]:
            gaps = []
            for entry, other in ((a, b["id"]), (b, a["id"])):
                of_other = logprob_of(entry, other)
                gaps.append(float("inf") if of_other is None else entry["logprob"] - of_other)
            return at, gaps, distance
        distance = max(distance, abs(a["logprob"] - b["logprob"]))
    shorter, longer = sorted([len(left["logprobs"]), len(right["logprobs"])])
    if shorter != longer or shorter == 0:
        return shorter, [float("inf")] * 2, distance
    return None, [], distance


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--winnow", required=True, help="the winnow program")
    parser.add_argument("--server", action="append", required=True, help="host:port; twice")
    parser.add_argument("--document", required=True, help="a file that the questions are about")
    parser.add_argument("--bytes", type=int, action="append", help="of the document; once for each length; all of it where absent")
    parser.add_argument("--question", action="append", required=True)
    parser.add_argument("--policy", action="append", required=True)
    parser.add_argument("--against", help="the policy that the second server is asked under; absent: the same")
    parser.add_argument("--digits", action="store_true", help="log-probabilities must be the same in all digits, too")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--gap", type=float, default=0.05, help="of log-probabilities that rounding may bridge")
    parser.add_argument("--parallel", type=int, default=1, help="prompts that are asked at a time")
    args = parser.parse_args()
    if len(args.server) != 2:
        parser.error("--server is needed twice")
    document = pathlib.Path(args.document).read_bytes()
    same = parted = 0
    worst = 0.0
    print(f"{'policy':44} {'prompt':>7} {'tokens':>6}  {'max |dlogprob|':>14}  parts")
    prompts = [(policy, f"{document[:length].decode(errors='ignore')}\n{question}") for policy in args.policy
               for length in args.bytes or [len(document)] for question in args.question]
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        answers = pool.map(lambda prompt: ask_both(args, prompt[1], prompt[0]), prompts)
        for (policy, _), (left, right) in zip(prompts, answers):
            at, gaps, distance = compare(left, right)
            end = ""
            if at is None and args.digits and distance > 0:
                parted += 1
                worst = float("inf")
                end = "log-probabilities differ"
            elif at is None:
                same += 1
            else:
                parted += 1
                worst = max(worst, *gaps)
                end = f"at token {at}, gaps {gaps[0]:.4f} and {gaps[1]:.4f}"
            print(f"{policy:44} {left['usage']['prompt_tokens']:>7} {len(left['token_ids']):>6}  {distance:>14.5f}  {end}", flush=True)
    print(f"{same} answers are the same, {parted} part" + (f"; the widest gap of those is {worst:.4f}" if parted else ""))
    sys.exit(0 if parted == 0 else 1 if worst <= args.gap else 2)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

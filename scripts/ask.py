#!/usr/bin/env python3
"""Asks a running winnow server the questions of make_document.py, one `winnow generate` each, and checks the answers.

Prints each answer with its prompt tokens, time to first token and tokens per second. Exits 0 if at most one in four is
wrong.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

INTRO = "Read the document below and answer the questions that follow.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--winnow", required=True, help="the winnow program")
    parser.add_argument("--server", required=True, help="HOST:PORT")
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="what make_document.py wrote")
    args = parser.parse_args()

    document = (args.dir / "document.txt").read_text()
    questions = [json.loads(line) for line in (args.dir / "questions.jsonl").read_text().splitlines()]
    right = 0
    for number, question in enumerate(questions, 1):
        content = f"{INTRO}{document}\n\n{question['question']}"
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=args.dir) as chat:
            json.dump([{"role": "user", "content": content}], chat)
            chat.flush()
            run = subprocess.run(
                [args.winnow, "generate", "--server", args.server, "--chat-file", chat.name, "--max-tokens", "48", "--json"],
                capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"winnow generate failed with {run.returncode}: {run.stderr}")
        reply = json.loads(run.stdout)
        usage = reply["usage"]
        good = question["fact"] in reply["text"]
        right += good
        first = usage["time_to_first_token_seconds"]
        decode = usage["total_seconds"] - first
        speed = (usage["generated_tokens"] - 1) / decode if decode > 0 else float("nan")
        print(f"{number}. {question['question']}\n"
              f"   {'right' if good else 'WRONG'}: {reply['text'].strip()}\n"
              f"   {usage['prompt_tokens']} prompt tokens, first token after {first:.2f} s, "
              f"then {usage['generated_tokens'] - 1} tokens at {speed:.0f} a second", flush=True)
    print(f"{right} of {len(questions)} answers are right.")
    sys.exit(0 if 4 * (len(questions) - right) <= len(questions) else 1)


if __name__ == "__main__":
    main()

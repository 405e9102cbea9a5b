#!/usr/bin/env python3
"""Compares `winnow tokenize` with the reference library on random and awkward strings.

    pip install -r requirements.txt
    ./tokenizer_differential.py --winnow ../../build/winnow --count 1000000

Trains tokenizers of every supported kind on the spot, beside needle's, and for each sends the same strings
through both: encoding (with and without the template; special tokens recognised or not) and decoding (of
the encoded ids and of random ids; with and without special tokens). Prints counts and differences; exits
with 1 if there is any.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import real_vocabularies  # noqa: E402
import tokenizer_kinds  # noqa: E402
from text_generator import TextGenerator  # noqa: E402

BATCH = 100000  # a call of the program reads the whole vocabulary


def run(winnow, model_dir, lines):
    result = subprocess.run([*winnow, model_dir], input="\n".join(lines) + "\n", capture_output=True, text=True)
    answers = [json.loads(line) for line in result.stdout.split("\n") if line]
    if len(answers) != len(lines):
        sys.exit(f"winnow gave {len(answers)} answers to {len(lines)} lines: {result.stderr.strip()}")
    return answers


def reference_encode(tokenizer, text, add_special_tokens, parse_special):
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def compare(name, tokenizer, count, winnow, seed, show):
    generator = TextGenerator(f"{seed}-{name}", tokenizer_kinds.special_texts(tokenizer))
    r = generator.random
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    encoded = decoded = tokens = different = 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as model_dir:
        tokenizer.save(os.path.join(model_dir, "tokenizer.json"))
        while encoded < count:
            lines, expected = [], []
            for _ in range(min(BATCH, count - encoded)):
                text = generator.text()
                add, parse, skip = r.random() < 0.5, r.random() < 0.8, r.random() < 0.5
                ids = reference_encode(tokenizer, text, add, parse)
                lines.append(json.dumps({"text": text, "add_special_tokens": add, "parse_special": parse}))
                expected.append(("ids", ids, text))
                if r.random() < 0.3:
                    ids = generator.ids(vocab_size, r.randint(1, 12))
                lines.append(json.dumps({"ids": ids, "skip_special_tokens": skip}))
                expected.append(("text", tokenizer.decode(ids, skip_special_tokens=skip), ids))
                encoded += 1
                decoded += 1
                tokens += len(ids)
            for line, answer, (key, value, source) in zip(lines, run(winnow, model_dir, lines), expected):
                if answer.get(key) != value:
                    different += 1
                    if different <= show:
                        print(f"  {name}: {line}\n    expected {value!r}\n    got      {answer}")
    seconds = time.monotonic() - begin
    print(f"{name:16s} {encoded:9d} encoded, {decoded:9d} decoded, {tokens:10d} tokens, {different} differences, "
          f"{seconds:.0f} s", flush=True)
    return encoded, different


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--winnow", required=True, help="the program")
    parser.add_argument("--count", type=int, default=1000000, help="strings in total, shared out evenly")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--kinds", nargs="*", help="only these tokenizers")
    parser.add_argument("--packages", help="a folder of wheels with published vocabularies (real_vocabularies.py): those too")
    parser.add_argument("--show", type=int, default=5, help="differences to print for each tokenizer")
    parser.add_argument("--raw-driver", action="store_true", help="the program is called without the subcommand")
    args = parser.parse_args()
    winnow = [args.winnow] if args.raw_driver else [args.winnow, "tokenize", "--model"]
    kinds = tokenizer_kinds.all_kinds(os.path.join(here, "../../models/needle-5m/tokenizer.json"))
    if args.packages:
        made = {name: make(args.packages) for name, make in real_vocabularies.KINDS.items() if not args.kinds or name in args.kinds}
        kinds.update({name: tokenizer for name, tokenizer in made.items() if tokenizer is not None})
        print("without their packages:", ", ".join(name for name in made if made[name] is None) or "none")
    if args.kinds:
        kinds = {name: kinds[name] for name in args.kinds}
    total = different = 0
    for name, tokenizer in kinds.items():
        count = -(-args.count // len(kinds))
        encoded, failed = compare(name, tokenizer, count, winnow, args.seed, args.show)
        total += encoded
        different += failed
    print(f"tokenizers {tokenizer_kinds.VERSION}: {total} strings, {len(kinds)} tokenizers, {different} differences")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

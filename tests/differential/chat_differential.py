#!/usr/bin/env python3
"""Compares the chat formats of `winnow tokenize` with their templates, run by Jinja as transformers runs them.

    pip install -r requirements.txt
    ./chat_differential.py --winnow ../../build/winnow --templates templates.json [--golden ../golden/chat]

templates.json maps names to template texts, as found in the tokenizer_config.json of published models; the
texts are not part of this repository. Random conversations, also in orders that templates refuse, go through
both; prints counts and differences, exits with 1 if there is any. With --golden, writes a few of the
conversations and what Jinja renders, for the unit tests.
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

import jinja2
import jinja2.sandbox

NEEDLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../models/needle-5m")
CONTENTS = ["Hello", "  padded \n", "", " ", "\n\nlines\n\n", "a\tb", "<|im_end|>", "</s><s>[INST] x [/INST]", "<<SYS>>\ny\n<</SYS>>",
            "<think>\nhm\n</think>\n\nyes", "</think>", "<think>a</think>b<think>c</think>\n\nd", "thinking</think>\n", "\x1c odd \x85",
            "\u3000wide\u3000", "caf\u00e9 \u4e2d\u6587 \U0001f642", "<tool_response>\n1\n</tool_response>", "'quoted' \"twice\" \\n", "{{ x }} {% y %}"]


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals["raise_exception"] = raise_exception
    return env


def render(template, messages, prompt, date, bos, eos):
    extra = {"date_string": date} if date else {}
    try:
        return template.render(messages=messages, add_generation_prompt=prompt, bos_token=bos, eos_token=eos, **extra)
    except jinja2.exceptions.TemplateError:
        return None


def conversation(r):
    messages = []
    if r.random() < 0.5:
        messages.append({"role": "system", "content": r.choice(CONTENTS)})
    for i in range(r.randint(0 if messages else 1, 5)):
        role = ("user", "assistant")[i % 2]
        if r.random() < 0.1:
            role = r.choice(("system", "user", "assistant"))
        messages.append({"role": role, "content": r.choice(CONTENTS)})
    return messages


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--winnow", required=True)
    parser.add_argument("--templates", required=True)
    parser.add_argument("--count", type=int, default=2000, help="conversations for each template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--golden", help="folder to write goldens to")
    args = parser.parse_args()
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    different = total = refused = 0
    for name, text in json.load(open(args.templates)).items():
        r = random.Random(f"{args.seed}-{name}")
        template = environment().from_string(text)
        cases = []
        for _ in range(args.count):
            messages, prompt = conversation(r), r.random() < 0.5
            date = "01 Feb 2025" if r.random() < 0.5 else ""
            cases.append({"messages": messages, "add_generation_prompt": prompt, **({"date": date} if date else {}),
                          "rendered": render(template, messages, prompt, date, bos, eos)})
        with tempfile.TemporaryDirectory() as model_dir:
            shutil.copy(os.path.join(NEEDLE, "tokenizer.json"), model_dir)
            with open(os.path.join(model_dir, "tokenizer_config.json"), "w") as out:
                json.dump({"bos_token": bos, "eos_token": {"content": eos}, "chat_template": text}, out)
            lines = [json.dumps({key: value for key, value in case.items() if key != "rendered"}) for case in cases]
            result = subprocess.run([args.winnow, "tokenize", "--model", model_dir], input="\n".join(lines) + "\n",
                                    capture_output=True, text=True)
        answers = [json.loads(line) for line in result.stdout.split("\n") if line]
        if len(answers) != len(cases):
            sys.exit(f"{name}: {len(answers)} answers to {len(cases)} lines: {result.stderr.strip()}")
        wrong = 0
        for line, case, answer in zip(lines, cases, answers):
            total += 1
            refused += case["rendered"] is None
            if answer.get("text") != case["rendered"]:
                wrong += 1
                if wrong <= 3:
                    print(f"  {name}: {line}\n    expected {case['rendered']!r}\n    got      {answer}")
        different += wrong
        print(f"{name:24s} {len(cases)} conversations, {wrong} differences")
        if args.golden:
            with open(os.path.join(args.golden, f"{name}.json"), "w") as out:
                json.dump({"bos_token": bos, "eos_token": eos, "cases": cases[:16]}, out, indent=0, ensure_ascii=True)
                out.write("\n")
    print(f"{total} conversations ({refused} refused by the template), {different} differences")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

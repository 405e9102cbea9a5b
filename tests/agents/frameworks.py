"""langchain-openai, instructor, pydantic-ai and llm against a running server whose model calls functions: each way in which they ask.

    frameworks.py http://127.0.0.1:8000 needle

Prints a line for each thing that was tried; exits 1 at the first that is wrong. The model is small, and so are the values that it fills in:
what counts is that there are some, of the right types.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import version

import instructor
import openai
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Tell me a story about a fox."
SETTINGS = {"max_tokens": 16, "temperature": 0}


class City(BaseModel):
    name: str
    population: int


class Server:
    def __init__(self, base, model):
        self.url, self.model = base + "/v1", model

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps({"model": self.model, **body}).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def chat(self):
        """The answer, and of how many tokens it is."""
        answer = self.post("/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], **SETTINGS})
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    def complete(self, prompt):
        return self.post("/completions", {"prompt": prompt, **SETTINGS})["choices"][0]["text"]


def check(name, condition, what=None):
    print(("ok    " if condition else "WRONG ") + name, flush=True)
    if not condition:
        raise SystemExit(f"{name}: {what!r}")


def langchain(server):
    chat = ChatOpenAI(model=server.model, base_url=server.url, api_key="any", **SETTINGS)
    text, tokens = server.chat()
    whole = chat.invoke(QUESTION)
    check("langchain: chat", whole.content == text, whole)
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    summed = sum(chunks[1:], chunks[0])
    check("langchain: stream", summed.content == text and summed.usage_metadata["output_tokens"] == tokens, summed)
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    check("langchain: log-probabilities", len(answer.response_metadata["logprobs"]["content"]) == tokens, answer)
    responses = ChatOpenAI(model=server.model, base_url=server.url, api_key="any", use_responses_api=True, **SETTINGS).invoke(QUESTION)
    check("langchain: responses", responses.text == text, responses)
    longer = ChatOpenAI(model=server.model, base_url=server.url, api_key="any", max_tokens=300, temperature=0)
    for method in ("json_schema", "function_calling"):
        city = longer.with_structured_output(City, method=method).invoke("Paris has 2 million people.")
        check(f"langchain: structured output by {method}", isinstance(city, City), city)
    completion = OpenAI(model=server.model, base_url=server.url, api_key="any", **SETTINGS)
    prompts = ["A story", "Once upon a time there was", "The code is"]
    texts = [one[0].text for one in completion.generate(prompts).generations]
    check("langchain: completions of several prompts", texts == [server.complete(prompt) for prompt in prompts], texts)
    check("langchain: completions, streamed", "".join(completion.stream("A story")) == texts[0], texts[0])


def instructed(server):
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        client = instructor.from_openai(openai.OpenAI(base_url=server.url, api_key="any"), mode=getattr(instructor.Mode, mode))
        city = client.chat.completions.create(model=server.model, response_model=City, max_retries=0, max_tokens=300, temperature=0,
                                              messages=[{"role": "user", "content": "Paris has 2 million people."}])
        check(f"instructor: {mode}", isinstance(city, City), city)


def pydantic_ai(server):
    provider = OpenAIProvider(base_url=server.url, api_key="any")
    for kind, output in ((OpenAIChatModel, str), (OpenAIResponsesModel, str)):
        run = Agent(kind(server.model, provider=provider), model_settings=SETTINGS).run_sync(QUESTION)
        check(f"pydantic-ai: text by {kind.__name__}", run.output == server.chat()[0], run)
    for output in (NativeOutput(City), ToolOutput(City)):
        agent = Agent(OpenAIChatModel(server.model, provider=provider), output_type=output, retries=0, model_settings={"max_tokens": 300, "temperature": 0})
        city = agent.run_sync("Paris has 2 million people.").output
        check(f"pydantic-ai: {type(output).__name__}", isinstance(city, City), city)


def llm(server):
    with tempfile.TemporaryDirectory(prefix="winnow-llm-") as home:
        common = [f'  model_name: {server.model}', f'  api_base: "{server.url}"']
        (pathlib.Path(home) / "extra-openai-models.yaml").write_text("\n".join(
            ["- model_id: chat", *common, "  supports_schema: true", "- model_id: text", *common, "  completion: true"]) + "\n")

        def ask(*arguments):
            done = subprocess.run([pathlib.Path(sys.executable).parent / "llm", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  env={**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "any"})
            return done.stdout.removesuffix("\n") if done.returncode == 0 else done.stderr

        options = ["-o", "max_tokens", "16", "-o", "temperature", "0"]
        for name, flags in (("streamed", []), ("whole", ["--no-stream"])):
            text = ask("-m", "chat", *flags, QUESTION, *options)
            check(f"llm: chat, {name}", text == server.chat()[0], text)
        text = ask("-m", "text", "A story", *options)
        check("llm: completions", text == server.complete("A story"), text)
        schema = {"type": "object", "properties": {"is_good": {"type": "boolean"}}, "required": ["is_good"]}
        text = ask("-m", "chat", "--schema", json.dumps(schema), "A dog", "-o", "max_tokens", "60", "-o", "temperature", "0")
        check("llm: schema", isinstance(json.loads(text)["is_good"], bool), text)


def main():
    server = Server(*sys.argv[1:])
    print(", ".join(f"{package} {version(package)}" for package in ("langchain-openai", "instructor", "pydantic-ai-slim", "llm", "openai")))
    langchain(server)
    instructed(server)
    pydantic_ai(server)
    llm(server)


if __name__ == "__main__":
    main()

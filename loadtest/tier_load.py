"""What the load tests of slower tiers share: documents with questions, servers, asking, comparing.

Uses the end-to-end tests' harness (WINNOW_BIN, WINNOW_SOURCE_DIR) and the demo's documents.
"""
import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import random
import re
import sys
import time

SOURCE = pathlib.Path(os.environ.get("WINNOW_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[1]))
sys.path[:0] = [str(SOURCE / "tests/e2e"), str(SOURCE / "scripts")]

import grpc  # noqa: E402
import harness  # noqa: E402
import make_document  # noqa: E402

MIB = 1 << 20
BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 3.7  # of the documents, with the needle models' tokenizer
LEARNED = ["dense", "spotlight:k=2%,completion=on,suffix=64", "lsh:k=2%,suffix=64", "quest:k=2%,suffix=64",
           "hata:k=2%,p=0.95"]
UNLEARNED = ["dense", "lsh:k=2%,suffix=64", "quest:k=2%,suffix=64", "lsh:k=1%,p=0.9", "window"]


def policies_of(model):
    """What the model can honour."""
    return LEARNED if pathlib.Path(model, "winnow-artifact.safetensors").exists() else UNLEARNED


@dataclasses.dataclass
class Reply:
    ids: list
    usage: object = None
    error: str = ""


def document(tokens, questions, seed):
    """A text of about so many tokens, and chats that ask about it."""
    text, asked = make_document.make(int(tokens * BYTES_PER_TOKEN), questions, seed)
    return [f"Read the document below and answer the questions that follow.\n{text}\n\n{q['question']}" for q in asked]


def make_requests(count, per_document, low, high, policies, answer, seed):
    """`count` requests over documents of `low` to `high` tokens, evenly over orders of magnitude, in random order."""
    rng = random.Random(seed)
    documents = math.ceil(count / per_document)
    requests = []
    for i in range(documents):
        share = i / max(1, documents - 1)
        for content in document(low * (high / low) ** share, per_document, rng.randrange(1 << 30)):
            chat = harness.inference.ChatPrompt(
                messages=[harness.inference.ChatMessage(role="user", content=content)])
            requests.append(harness.inference.GenerateRequest(
                chat=chat, policy=policies[len(requests) % len(policies)],
                stopping=harness.inference.StoppingOptions(max_tokens=answer, ignore_eos=True)))
    del requests[count:]
    rng.shuffle(requests)
    return requests


def name_of(request):
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()


def ask(api, request, deadline):
    """A reply, with what went wrong in it."""
    reply = Reply([])
    try:
        for response in api.generate(request, timeout=deadline):
            reply.ids.extend(token.id for token in response.tokens)
            if response.HasField("finish"):
                reply.usage = response.finish.usage
    except grpc.RpcError as error:
        reply.error = f"{error.code().name}: {error.details()}"
    return reply


def ask_all(server, requests, streams, deadline):
    api = harness.Api(server.address)
    with concurrent.futures.ThreadPoolExecutor(streams) as threads:
        return list(threads.map(lambda request: ask(api, request, deadline), requests))


def least_kv_bytes(model, sizes):
    """The fewest frames that can work below which there is a store, as the server says."""
    result = harness.run("serve", "--model", model, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--http", "127.0.0.1:0", *sizes,
                         "--kv-bytes", "1MiB", "--host-bytes", "64MiB")
    found = re.search(r"kv_bytes.*at least (\d+)", result.stderr)
    if not found:
        sys.exit(f"the server did not say what it needs at least:\n{result.stderr}")
    return int(found[1])


class Reference:
    """Tokens of all KV in memory and nothing shared; kept in a file, if one is named."""

    def __init__(self, path=None):
        self.path = path and pathlib.Path(path)
        self.known = json.loads(self.path.read_text()) if self.path and self.path.exists() else {}

    def compute(self, model, sizes, kv_bytes, requests, streams, deadline):
        """The replies that had to be computed."""
        missing = [request for request in requests if name_of(request) not in self.known]
        replies = []
        if missing:
            with harness.Server(*sizes, "--kv-bytes", kv_bytes, "--prefix-cache", "off", model=model) as server:
                replies = ask_all(server, missing, streams, deadline)
            for request, reply in zip(missing, replies):
                if reply.error:
                    sys.exit(f"the reference failed: {reply.error}")
                self.known[name_of(request)] = reply.ids
            if self.path:
                self.path.write_text(json.dumps(self.known))
        return replies

    def __getitem__(self, request):
        return self.known[name_of(request)]


def rss_bytes(server):
    for line in pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


def store_bytes(directory):
    return sum(path.stat().st_size for path in pathlib.Path(directory).glob("seg-*.wseg"))


def store_at_start(server):
    """(blocks, MiB) that the server found in its store, from its log."""
    for event in server.events():
        found = re.search(r": (\d+) blocks, (\d+) of \d+ MiB", str(event.get("message", "")))
        if found:
            return int(found[1]), int(found[2])
    raise RuntimeError("the server said nothing of a store:\n" + server.log())


def now():
    return time.monotonic()

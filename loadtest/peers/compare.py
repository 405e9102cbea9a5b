#!/usr/bin/env python3
"""winnow beside its peers, through their servers: the same prompts, contexts and batches, one server after the other, in one run.

    loadtest/peers/compare.py --server "winnow=build/release/winnow serve --model MODEL --http 127.0.0.1:{port} --listen 127.0.0.1:0"
        --server "winnow, lsh=build/release/winnow serve --model MODEL --policy lsh:k=2%,from=0 --http 127.0.0.1:{port} --listen 127.0.0.1:0"
        --server "llama.cpp=llama-server -m MODEL.gguf -c 65536 -np 8 --port {port}" --server "vLLM=vllm serve MODEL --port {port}"
        [--shape 1x2048 --shape 8x2048 ...] [--tokens 64] [--json OUT]

A server is any command that serves OpenAI's /v1/completions with prompts of token ids; {port} is where. Each shape is BATCHxCONTEXT: so many prompts
of so many random token ids are sent together, each its own, and answers of --tokens tokens are read as they stream. Printed are the prompts' tokens
a second until the last first token, and ms a step: the time between tokens while all answers are read side by side (the median over
steps and streams). Before a server is measured it gets one short request. Models of any shape: `winnow make-model`.
Needs Python only. Exit code 1: a server did not start, or refused.
"""
import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import load_report  # noqa: E402
from ports import unused_port  # noqa: E402


class Refused(Exception):
    """A server that did not start, or did not answer as asked. The text says which, and what it said."""


class PeerServer:
    """A server for as long as the context lasts, with all processes that it starts."""

    def __init__(self, name, command, patience):
        self.name, self.port, self.log = name, unused_port(), tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.command = [word.replace("{port}", str(self.port)) for word in shlex.split(command)]
        try:
            self.process = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise Refused(f"{name}: {error} (a name ends at the first =)") from error
        end = time.monotonic() + patience
        while True:
            try:
                self.model = json.loads(self.get("/v1/models"))["data"][0]["id"]
                return
            except (OSError, http.client.HTTPException, ValueError, LookupError):
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                text = pathlib.Path(self.log.name).read_text()[-2000:]
                self.close()
                raise Refused(f"{name} does not serve ({shlex.join(self.command)}):\n{text}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)  # its end is an answer, too

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(answer.status)
            return answer.read()
        finally:
            connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        except ProcessLookupError:
            self.process.wait()

    def stream(self, prompt, tokens, times):
        """Appends the time of each token to `times` as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", "/v1/completions", json.dumps({
                "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise Refused(f"{self.name}: {answer.status} {answer.read()[:500].decode(errors='replace')}")
            for line in answer:
                line = line.strip()
                if line.startswith(b"data:") and line != b"data: [DONE]":
                    chunk = json.loads(line[5:])
                    if "error" in chunk:
                        raise Refused(f"{self.name}: {chunk['error']}")
                    # A token without text (half a character) may have no chunk of its own; a chunk that only ends the answer is no token.
                    if chunk.get("choices") and (chunk["choices"][0].get("text") or chunk["choices"][0].get("finish_reason") is None):
                        times.append(time.monotonic())
        finally:
            connection.close()


def reduce(begin, streams, tokens, context):
    """{prompt_tokens_per_s, ms_per_step, tokens_per_s} of the times of each stream's tokens. A stream's chunks may be fewer than its tokens:
    then time is shared out over `tokens`."""
    last_first = max(times[0] for times in streams)
    gaps = []
    for times in streams:
        chunks_per_token = (len(times) - 1) / (tokens - 1)
        gaps += [(b - a) * chunks_per_token for a, b in zip(times, times[1:]) if a >= last_first]
    if not gaps:  # the first stream ended before the last began: there was no step with all of them
        return {"prompt_tokens_per_s": len(streams) * context / (last_first - begin), "ms_per_step": None, "tokens_per_s": None}
    step = statistics.median(gaps)
    return {"prompt_tokens_per_s": len(streams) * context / (last_first - begin), "ms_per_step": 1000 * step, "tokens_per_s": len(streams) / step}


def measure(server, batch, context, tokens, numbers):
    prompts = [[numbers.randrange(100, 4000) for _ in range(context)] for _ in range(batch)]
    streams, failures = [[] for _ in prompts], []

    def ask(prompt, times):
        try:
            server.stream(prompt, tokens, times)
        except (Refused, OSError, http.client.HTTPException, ValueError) as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(prompts, streams)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures or not all(len(times) > 1 for times in streams):
        raise Refused(str(failures[0]) if failures else f"{server.name}: an answer had no tokens")
    return reduce(begin, streams, tokens, context)


def table(shapes, names, results):
    lines = ["| shape | " + " | ".join(f"{name}: ms a step; tokens/s; prompt tokens/s" for name in names) + " |", "|" + "---|" * (len(names) + 1)]
    number = lambda value, digits: "–" if value is None else f"{value:,.{digits}f}"
    for batch, context in shapes:
        cells = [results[name][f"{batch}x{context}"] for name in names]
        lines.append(f"| {batch} x {context:,} | " + " | ".join(
            f"{number(of['ms_per_step'], 2)}; {number(of['tokens_per_s'], 1)}; {number(of['prompt_tokens_per_s'], 0)}" for of in cells) + " |")
    return "\n".join(lines)


def shape(text):
    batch, _, context = text.partition("x")
    if not (batch.isdigit() and context.isdigit() and 1 <= int(batch) <= 512 and int(context) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxCONTEXT, as 8x2048, with at most 512 at a time")
    return int(batch), int(context)


def named_command(text):
    name, equals, command = text.partition("=")
    if not equals or not name or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in it")
    return name, command


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, action="append", type=named_command, help="NAME=COMMAND, a name without =; may be repeated")
    parser.add_argument("--shape", action="append", type=shape, help="BATCHxCONTEXT; may be repeated (default 1x512, 1x4096, 4x2048)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at least 2 (default %(default)s)")
    parser.add_argument("--patience", type=float, default=600, help="seconds until a server must serve (default %(default)s)")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    names = [name for name, _ in args.server]
    if args.tokens < 2 or len(set(names)) != len(names):
        parser.error("--tokens must be at least 2, and names of servers differ")
    shapes = args.shape or [(1, 512), (1, 4096), (4, 2048)]
    report = {"command": shlex.join(["loadtest/peers/compare.py", *(argv or sys.argv[1:])]), "machine": load_report.machine(), "tokens": args.tokens, "results": {}}
    try:
        for name, command in args.server:
            with PeerServer(name, command, args.patience) as server:
                measure(server, 1, 16, args.tokens, random.Random(0))
                numbers = random.Random(1)  # the same prompts for each server
                report["results"][name] = {f"{batch}x{context}": measure(server, batch, context, args.tokens, numbers) for batch, context in shapes}
    except Refused as error:
        sys.exit(f"compare.py: {error}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(shapes, names, report["results"]))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Thousands of open HTTP streams: memory of a stream, threads, and the time between tokens.

    loadtest/http_streams.py [--streams 200,2000] [--tokens 64] [--running N] [--model DIR]

Starts a server of its own for each number of streams, opens them all at once, and reads them to the end in one
process. With --running fewer streams decode than are open; the others wait, pinged. Prints a line for each number.
"""
import argparse
import asyncio
import json
import pathlib
import resource
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/e2e"))
import harness  # noqa: E402


def status(pid):
    fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["Threads"])


async def stream(port, number, tokens, opened, gaps):
    """Reads one stream; notes when tokens came. Returns how many pings there were."""
    body = json.dumps({"prompt": f"Story {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                  f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}").encode())
    opened.append(number)
    last, pings, done = None, 0, False
    while line := await reader.readline():
        if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            raise RuntimeError(line.decode() + (await reader.read(2000)).decode())
        pings += line == b": \n"
        if line.startswith(b"data: {"):
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            last = now
        done = done or line == b"data: [DONE]\n"
    writer.close()
    if not done:
        raise RuntimeError("a stream broke off")
    return pings


async def measure(server, streams, tokens, running):
    pid = server.process.pid
    warm = [asyncio.create_task(stream(server.http_port, 0, 4, [], [])) for _ in range(8)]
    await asyncio.gather(*warm)
    before, _ = status(pid)
    opened, gaps, most, threads = [], [], before, 0
    tasks = [asyncio.create_task(stream(server.http_port, i, tokens, opened, gaps)) for i in range(streams)]
    began = time.monotonic()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.25)
        now, threads = status(pid)
        most = max(most, now)
    pings = sum(await asyncio.gather(*tasks))
    seconds = time.monotonic() - began
    gaps.sort()
    at = lambda share: gaps[min(len(gaps) - 1, int(len(gaps) * share))] * 1e3
    print(f"streams {streams:5d} running {running:5d} tokens {tokens}: {streams * tokens / seconds:7.0f} tokens/s; "
          f"between tokens p50 {at(.5):.1f} ms p99 {at(.99):.1f} ms max {gaps[-1] * 1e3:.1f} ms; "
          f"RSS +{(most - before) / 1e6:.1f} MB, {(most - before) / streams / 1e3:.1f} kB a stream; "
          f"threads {threads}; pings {pings}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="200,2000")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--running", type=int, default=0, help="streams that decode at once; 0: all")
    parser.add_argument("--model", default=harness.MODEL)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    for streams in map(int, options.streams.split(",")):
        running = options.running or streams
        with harness.Server("--max-running", running, "--step-tokens", max(512, running), "--queue-requests", streams,
                            "--kv-bytes", "2GiB", "--retrieval-from", "0", model=options.model) as server:
            asyncio.run(measure(server, streams, options.tokens, running))


if __name__ == "__main__":
    main()

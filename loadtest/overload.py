#!/usr/bin/python3
"""Overload: what a server still gives when it is asked for several times what it can do.

    loadtest/overload.py [--transport http|grpc] [--times 5,10] [--seconds 20] [--peak-seconds 20] [--tenants 5 --flood 4] [--cores 0/1] [-- SERVE FLAGS]

First the peak: as many requests at once as run, each followed by the next. Then an open loop: requests come at random
times at a multiple of that rate, whether or not others were answered, as from clients that know nothing of each other.
The peak is measured again after each, because a shared machine's speed drifts. Goodput is tokens of answers that were
given whole. With --tenants the arrivals are spread over so many, and the last of them asks --flood times as often as
each other; Jain's index is of the tokens that those got who asked for more than an equal share. --cores gives server and
driver processors of their own, as on two machines: else the driver takes from the server what the server's goodput then lacks.
"""
import argparse
import asyncio
import json
import os
import pathlib
import random
import sys
import time

SOURCE = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("WINNOW_SOURCE_DIR", str(SOURCE))
sys.path.insert(0, str(SOURCE / "tests/e2e"))
import grpc  # noqa: E402
from harness import Server, counting_request, inference  # noqa: E402

PROMPT = "Count: one two three four five six seven eight nine ten"


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


class Http:
    """Connections that are kept and used again, one request at a time each."""

    def __init__(self, server, tokens):
        self.port, self.idle = server.http_port, []
        self.closed_idle = 0  # requests that met a connection which the server was closing, and were sent again on a new one
        self.body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}).encode()

    async def send(self, tenant, reader, writer):
        """The answer's head."""
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-winnow-tenant: %s\r\nContent-Length: %d\r\n\r\n%s" % (
            tenant.encode(), len(self.body), self.body))
        return await reader.readuntil(b"\r\n\r\n")

    async def ask(self, tenant):
        head = None
        while head is None and self.idle:
            reader, writer = self.idle.pop()
            try:
                head = await self.send(tenant, reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise
                self.closed_idle += 1
                writer.close()
        if head is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            head = await self.send(tenant, reader, writer)
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(length)
        self.idle.append((reader, writer))
        status = int(head[9:12])
        if status not in (200, 429):
            raise RuntimeError(f"{status}: {body[:200]}")
        return json.loads(body)["usage"]["completion_tokens"] if status == 200 else None

    async def close(self):
        for _, writer in self.idle:
            writer.close()


class Grpc:
    closed_idle = 0  # a channel sees to that itself

    def __init__(self, server, tokens):
        self.channels = [grpc.aio.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
        self.methods = [channel.unary_stream("/winnow.v1.InferenceService/Generate") for channel in self.channels]
        self.request = counting_request(PROMPT, tokens).SerializeToString()
        self.next = 0

    async def ask(self, tenant):
        self.next += 1
        got = 0
        try:
            async for message in self.methods[self.next % 4](self.request, metadata=[("x-winnow-tenant", tenant)]):
                got += len(inference.GenerateResponse.FromString(message).tokens)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return None
        return got

    async def close(self):
        for channel in self.channels:
            await channel.close()


class Phase:
    def __init__(self, client):
        self.client = client
        self.answered, self.refused = [], []  # (tenant, tokens, seconds), seconds
        self.ends = float("inf")

    async def one(self, tenant="t0"):
        began = time.monotonic()
        tokens = await self.client.ask(tenant)
        now = time.monotonic()
        if tokens is None:
            self.refused.append(now - began)
        elif now <= self.ends:
            self.answered.append((tenant, tokens, now - began))

    async def closed_loop(self, at_once, seconds):
        self.ends = time.monotonic() + seconds

        async def chain():
            while time.monotonic() < self.ends:
                await self.one()

        await asyncio.gather(*[chain() for _ in range(at_once)])
        return self.goodput(seconds)

    async def open_loop(self, rate, seconds, tenants, flood):
        weights = [1.0] * (tenants - 1) + [flood if tenants > 1 else 1.0]
        self.ends = time.monotonic() + seconds
        at, tasks = time.monotonic(), set()
        while at < self.ends:
            at += random.expovariate(rate)
            if (pause := at - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            task = asyncio.create_task(self.one(f"t{random.choices(range(tenants), weights)[0]}"))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        late = time.monotonic() - at
        await asyncio.gather(*tasks)
        return self.goodput(seconds), late

    def goodput(self, seconds):
        return sum(tokens for _, tokens, _ in self.answered) / seconds


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid):
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


async def measure(server, args):
    make = {"http": Http, "grpc": Grpc}[args.transport]
    client = make(server, args.tokens)
    await Phase(client).closed_loop(args.running, 2)  # warm
    peak_seconds = args.peak_seconds or args.seconds
    peak = await Phase(client).closed_loop(args.running, peak_seconds)
    for times in args.times:
        rate = times * peak / args.tokens
        phase = Phase(client)
        before_mib = rss_mib(server.process.pid)
        own, theirs = time.process_time(), cpu_seconds(server.process.pid)
        goodput, late = await phase.open_loop(rate, args.seconds, args.tenants, args.flood)
        own, theirs = time.process_time() - own, cpu_seconds(server.process.pid) - theirs
        after_mib = rss_mib(server.process.pid)
        after = await Phase(client).closed_loop(args.running, peak_seconds)
        by_tenant = {f"t{i}": 0 for i in range(args.tenants)}
        for tenant, tokens, _ in phase.answered:
            by_tenant[tenant] += tokens
        got = list(by_tenant.values())
        light = [s for tenant, _, s in phase.answered if tenant == "t0"]
        result = {
            "transport": args.transport, "times": times, "offered_requests_s": round(rate, 1),
            "goodput_tokens_s": round(goodput, 1), "peak_before": round(peak, 1), "peak_after": round(after, 1),
            "share_of_peak": round(goodput / ((peak + after) / 2), 3),
            "answered": len(phase.answered), "refused": len(phase.refused),
            "refused_p50_ms": round(1e3 * percentile(phase.refused, 0.5), 2),
            "refused_p99_ms": round(1e3 * percentile(phase.refused, 0.99), 2),
            "answered_p99_s": round(percentile([s for _, _, s in phase.answered], 0.99), 2),
            "driver_cpu_s": round(own, 2), "server_cpu_s": round(theirs, 2), "driver_late_s": round(late, 2),
            "closed_idle": client.closed_idle, "seconds": args.seconds, "server_rss_mib": [before_mib, after_mib],
            "rss_growth": round(after_mib / before_mib - 1, 4), "load_average": round(os.getloadavg()[0], 1)}
        if args.tenants > 1:
            result["tokens_by_tenant"] = by_tenant
            result["light_tenant_p99_s"] = round(percentile(light, 0.99), 2)
            result["jain"] = round(sum(got) ** 2 / (len(got) * sum(g * g for g in got)), 3)
        print(json.dumps(result), flush=True)
        peak = after
    await client.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=["http", "grpc"], default="http")
    parser.add_argument("--times", type=lambda text: [float(t) for t in text.split(",")], default=[5, 10])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--peak-seconds", type=float, help="of each measurement of the peak; as --seconds, if absent")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--running", type=int, default=16, help="--max-running of the server, and requests at once at the peak")
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--flood", type=float, default=1)
    parser.add_argument("--cores", help="processors of the server, a slash, those of the driver: 0,1/2")
    parser.add_argument("serve", nargs="*", help="after --: flags of winnow serve")
    args = parser.parse_args()
    cores = [{int(core) for core in part.split(",")} for part in args.cores.split("/")] if args.cores else []
    if cores:
        os.sched_setaffinity(0, cores[0])  # which the server inherits
    with Server("--max-running", args.running, "--queue-requests", 2 * args.running, "--prefix-cache", "off", *args.serve) as server:
        if cores:
            os.sched_setaffinity(0, cores[1])
        asyncio.run(measure(server, args))


if __name__ == "__main__":
    main()

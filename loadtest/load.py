#!/usr/bin/env python3
"""An open-loop load test over gRPC: conversations come when the workload says, whether or not the server keeps up.

    loadtest/load.py --workload loadtest/workloads/chats.json [--server 127.0.0.1:50051] [--scale 1/8] [--rate 0.5] [--conversations 20]
                     [--policy TEXT] [--slo first=2,token=0.1,share=0.95 [--search 0.1:4]] [--json OUT] [--html OUT]

Prints a summary; --json and --html write the report, with this command line and the machine's load in it. It has what HTTP clients cannot
see: bytes of KV by tier beside what dense attention reads, coverage, drafts. --search looks for the largest rate of conversations that
holds the SLO; each try has texts of its own, so that none finds those of an earlier one in the prefix cache. Exit code 1: a request failed (not with
--search, which drives the server to where they do). Needs Debian's python3-grpcio, python3-protobuf, and for --html python3-matplotlib.
"""
import argparse
import asyncio
import fractions
import json
import math
import os
import pathlib
import random
import shlex
import sys
import time

SOURCE = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SOURCE / "clients/python"), str(SOURCE / "loadtest")]
from google.protobuf import json_format  # noqa: E402
from winnow_client import AsyncClient, WinnowError  # noqa: E402
from winnow_client.errors import NO_RETRIES  # noqa: E402

import load_report  # noqa: E402
import workload as workloads  # noqa: E402


class Texts:
    """Token ids of a workload's segments. One name always has the same ones, and a shorter segment of a name begins as a longer one does.

    They are stretches of `corpus` (token ids of real text, which attention treats as text), each from a place that follows from its name,
    behind four ids that follow from it, too: prompts of different names part at their first tokens.
    """

    def __init__(self, corpus):
        self.corpus = corpus

    def ids(self, name, count):
        numbers = random.Random(name)
        head = [self.corpus[numbers.randrange(len(self.corpus))] for _ in range(4)]
        at = numbers.randrange(len(self.corpus))
        ids = head + self.corpus[at:]
        while len(ids) < count:
            ids += self.corpus
        return ids[:count]


def usage_of(usage):
    """The server's usage as plain data, with every field that reports add up."""
    raw = json_format.MessageToDict(usage, preserving_proto_field_name=True, including_default_value_fields=True)
    numbers = lambda of: {key: int(value) if isinstance(value, str) else value for key, value in of.items()}
    words = {key: raw.pop(key, "") for key in ("policy", "exactness")}  # all other strings are numbers of 64 bits
    plain = {**words, **numbers({key: value for key, value in raw.items() if not isinstance(value, dict)})}
    plain["kv_read_bytes"] = {"fast": 0, "host": 0, "disk": 0, **numbers(raw.get("kv_read_bytes", {}))}
    plain["retrieval"] = {"coverage": None, "probes": 0, **numbers(raw.get("retrieval", {}))}
    drafts = raw.get("drafts", {})
    plain["drafts"] = {name: int(drafts.get(name, 0)) for name in ("drafted_tokens", "verified_tokens", "accepted_tokens", "verifications")}
    return plain


class Run:
    """One run of a workload against one server. `client` is an AsyncClient that tries nothing again: a refusal is a result."""

    def __init__(self, client, conversations, texts, policy=None, timeout=300.0):
        self.client, self.conversations, self.texts, self.policy, self.timeout = client, conversations, texts, policy, timeout
        self.records = []

    async def measure(self):
        self.begin = time.monotonic()
        await asyncio.gather(*(self._converse(i, one) for i, one in enumerate(self.conversations)))
        return self.records

    def _now(self):
        return time.monotonic() - self.begin

    async def _converse(self, index, conversation):
        due = conversation.arrival
        given = []  # answers so far, each as many tokens as it had
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(max(due - self._now(), 0))
            answers = iter(given)
            prompt = []
            for name, count in turn.segments:
                prompt += next(answers) if name == workloads.ANSWER else self.texts.ids(name, count)
            record = load_report.Record(index, number, due, self._now())
            self.records.append(record)
            answer = await self._ask(record, prompt, turn)
            if record.status not in (load_report.OK, load_report.CANCELLED):
                return  # a client whose request failed does not go on
            given.append(answer)
            if number + 1 < len(conversation.turns):
                due = record.end + conversation.turns[number + 1].think_seconds

    async def _ask(self, record, prompt, turn):
        answer = []
        stream = self.client.stream(prompt, max_tokens=turn.answer_tokens, ignore_eos=True, temperature=0.0, policy=self.policy)
        try:
            await asyncio.wait_for(self._read(record, stream, answer, turn),
                                   self.timeout if turn.cancel_after_seconds is None else min(turn.cancel_after_seconds, self.timeout))
        except asyncio.TimeoutError:
            record.status = load_report.CANCELLED if turn.cancel_after_seconds is not None and turn.cancel_after_seconds < self.timeout else "TIMEOUT"
        except WinnowError as error:
            record.status = error.reason or error.code.name
        finally:
            await stream.aclose()  # cancels a call that has not ended
        record.end = self._now()
        return answer

    async def _read(self, record, stream, answer, turn):
        async for piece in stream:
            now = self._now()
            if piece.tokens:
                if record.first is None:
                    record.first = now
                    record.gaps += [0.0] * (len(piece.tokens) - 1)
                else:
                    record.gaps += [now - record.last] + [0.0] * (len(piece.tokens) - 1)
                record.last = now
                record.tokens += len(piece.tokens)
                answer += [token.id for token in piece.tokens]
            if piece.usage is not None:
                record.usage = usage_of(piece.usage)
            elif turn.cancel_after_tokens is not None and record.tokens >= turn.cancel_after_tokens:
                record.status = load_report.CANCELLED
                return


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="a file of loadtest/workloads")
    parser.add_argument("--server", default="127.0.0.1:50051", help="(default %(default)s)")
    parser.add_argument("--scale", type=fractions.Fraction, default=1, help="times each length, as 1/8 (default 1)")
    parser.add_argument("--rate", type=float, help="conversations a second; of a trace: how many times faster (default: the workload's)")
    parser.add_argument("--conversations", type=int, help="only the first so many")
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--policy", help="attention policy (default: the server's)")
    parser.add_argument("--text", default=str(SOURCE / "docs/retrieval.md"), help="prompts are stretches of this (default docs/retrieval.md)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a request (default %(default)s)")
    parser.add_argument("--api-key")
    parser.add_argument("--slo", type=load_report.Slo.parse, help="first=SECONDS,token=SECONDS[,share=0.95]")
    parser.add_argument("--search", help="LOW:HIGH, rates of conversations")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--html", type=pathlib.Path)
    args = parser.parse_args(argv)
    if args.search:
        if args.slo is None:
            parser.error("--search needs --slo")
        try:
            args.search = tuple(float(rate) for rate in args.search.split(":"))
            if len(args.search) != 2 or not 0 < args.search[0] <= args.search[1] < math.inf:
                raise ValueError
        except ValueError:
            parser.error("--search must be LOW:HIGH with 0 < LOW <= HIGH")
    if args.html:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--html needs Debian's python3-matplotlib")
    return args


async def connect(args):
    client = AsyncClient(args.server, api_key=args.api_key, retry=NO_RETRIES)
    model = await client.model()
    corpus = await client.tokenize(pathlib.Path(args.text).read_text()[:max(model.max_prompt_bytes // 2, 1)])
    return client, model, Texts(corpus)


def prepare(args, seed, max_context):
    """Conversations of this seed. Raises WorkloadError where a request would not fit into the server's context."""
    workload = workloads.load(args.workload).scaled(float(args.scale))
    if args.rate is not None:
        workload = workload.at_rate(args.rate)
    if args.conversations is not None:
        workload = workload.cut(args.conversations)
    laid_out = workloads.lay_out(workload, seed)
    longest = max(sum(count for _, count in turn.segments) + turn.answer_tokens for one in laid_out for turn in one.turns)
    if longest > max_context:
        raise workloads.WorkloadError(f"{workload.name}: a request has {longest} tokens with its answer, and the server takes {max_context}: try --scale")
    return workload, laid_out


async def measure(args):
    """(report, records of the last run)."""
    report = {"command": " ".join(shlex.quote(word) for word in ["loadtest/load.py", *sys.argv[1:]]), "machine": load_report.machine()}
    client, model, texts = await connect(args)
    async with client:
        workload, laid_out = prepare(args, args.seed, model.max_context)
        report["workload"] = {"name": workload.name, "about": workload.about, "source": workload.source, "scale": workload.scale, "rate": workload.per_second,
                              "conversations": len(laid_out), "requests": sum(len(one.turns) for one in laid_out), "seed": args.seed, "policy": args.policy}
        report["server"] = {"model": model.name, "version": model.version, "max_context": model.max_context}
        if not args.search:
            records = await Run(client, laid_out, texts, args.policy, args.timeout).measure()
            report["summary"] = load_report.summarise(records, args.slo)
        else:
            report["search"], records = await search(args, client, texts, model.max_context)
            report["summary"] = load_report.summarise(records, args.slo)
    report["machine"]["load_average_after"] = [round(value, 2) for value in os.getloadavg()]
    return report, records


async def search(args, client, texts, max_context):
    """Tries rates; (what came of it, records of the largest rate that held, else of the smallest one)."""
    trials, kept = [], {}
    loop = asyncio.get_running_loop()

    async def attempt(rate):
        args.rate = rate
        _, laid_out = prepare(args, args.seed + len(trials), max_context)
        records = await Run(client, laid_out, texts, args.policy, args.timeout).measure()
        summary = load_report.summarise(records, args.slo)
        trials.append({"rate": rate, **summary})
        kept[rate] = records
        print(f"  {rate:.3f} conversations a second: {load_report.share_text(summary['slo']['held_share'])} hold the SLO", file=sys.stderr, flush=True)
        return summary["slo"]["held"]

    holds = lambda rate: asyncio.run_coroutine_threadsafe(attempt(rate), loop).result()
    good, bad = await loop.run_in_executor(None, lambda: load_report.search(holds, *args.search))
    return {"largest_rate": good, "smallest_missed": bad, "trials": trials}, kept[good if good is not None else trials[0]["rate"]]


def show(report):
    summary, reads = report["summary"], report["summary"]["reads"]
    text, share = load_report.seconds_text, load_report.share_text
    print(f"{report['workload']['name']}: {summary['answered']} of {summary['requests']} answered, {summary['cancelled']} cancelled, failed {summary['failed'] or 0}, "
          f"in {summary['seconds']:.1f} s; {summary['tokens_per_second']:.1f} tokens/s")
    for name, key in (("first token", "first_token_seconds"), ("per token", "per_token_seconds"), ("request", "request_seconds"), ("client late", "client_late_seconds")):
        of = summary[key]
        print(f"  {name:12}" + "".join(f" {p} {text(of.get(p)):>9}" for p in ("p50", "p95", "p99", "max")))
    print(f"  prompts: {share(summary['cached_share'])} from a cache; KV read: {share(reads['read_share'])} of dense, "
          f"host {load_report.bytes_text(reads['kv_read_bytes']['host'])}, disk {load_report.bytes_text(reads['kv_read_bytes']['disk'])}; "
          f"coverage {share(reads['coverage'])}; drafts accepted {reads['accepted_tokens']} of {reads['verified_tokens']} verified, {reads['drafted_tokens']} drafted")
    if "slo" in summary:
        print(f"  SLO: {share(summary['slo']['held_share'])} hold it, {'held' if summary['slo']['held'] else 'missed'}; goodput {summary['slo']['goodput_per_second']:.3f} a second")
    if "search" in report:
        rate = lambda value: "none" if value is None else f"{value:.3f}"
        print(f"  largest rate that holds: {rate(report['search']['largest_rate'])}; smallest that does not: {rate(report['search']['smallest_missed'])} conversations a second")


def main(argv=None):
    args = arguments(argv)
    try:
        report, records = asyncio.run(measure(args))
    except (workloads.WorkloadError, WinnowError, OSError) as error:
        sys.exit(f"load.py: {error}")
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.html:
        args.html.write_text(load_report.page(report, records))
    return 1 if report["summary"]["failed"] and not args.search else 0


if __name__ == "__main__":
    sys.exit(main())

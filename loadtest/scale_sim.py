#!/usr/bin/env python3
"""What routing does to many replicas: hit rates, first tokens and cost of 10 to 1,000 of them, simulated with the measured
costs of one.

    loadtest/scale_sim.py [--replicas 10,100,1000] [--rules round_robin,least_loaded,prefix_aware] [--json OUT]

Conversations over shared documents come at random times; each turn sends the document, all before it, and a question. A replica
reads prompts one after the other, takes over what its store has of them, and decodes what runs together in one batch. What
is left out makes real servers slower: prompts and decoding do not slow each other down, routers know everything at once, nothing fails.
The same seed gives the same numbers. docs/scale.md has results.
"""
import argparse
import bisect
import collections
import heapq
import json
import pathlib
import random
import sys
from dataclasses import dataclass, field

COSTS = pathlib.Path(__file__).resolve().parent / "shapes/h200-llama-3.1-8b.costs.json"
RULES = ("round_robin", "least_loaded", "prefix_aware")


@dataclass
class Traffic:
    conversations_per_replica_s: float = 0.06
    seconds: float = 600.0
    documents_per_replica: float = 20.0
    document_tokens: int = 32768
    turns: int = 6
    question_tokens: int = 200
    answer_tokens: int = 300
    think_s: float = 30.0


@dataclass
class Costs:
    prompt_tokens_per_s: float
    resume_tokens_per_s: float
    step_seconds: list  # of (sequences, seconds), by sequences
    store_tokens: int = 16_000_000  # 2 TB at 128 KiB a token

    def step(self, sequences):
        """Seconds of a step, between the measured points on a line, past the last one along the last line."""
        points = self.step_seconds
        if len(points) == 1:
            return points[0][1]
        at = min(max(bisect.bisect_left(points, (sequences, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        return y0 + (y1 - y0) * (max(sequences, points[0][0]) - x0) / (x1 - x0)


def load_costs(path, policy, store_tokens=16_000_000):
    raw = json.loads(pathlib.Path(path).read_text())
    return Costs(raw["prompt_tokens_per_s"], raw["resume_tokens_per_s"], [tuple(p) for p in raw["step_seconds"][policy]], store_tokens)


@dataclass
class Replica:
    costs: Costs
    free_at: float = 0.0  # when it has read all prompts that it was given
    ends: list = field(default_factory=list)  # heap: when sequences that decode end
    store: collections.OrderedDict = field(default_factory=collections.OrderedDict)  # document or conversation -> tokens, oldest first
    own: dict = field(default_factory=dict)  # of each entry: tokens that no other holds
    stored: int = 0

    def known(self, document, conversation):
        """Tokens of the prompt that it need not compute. A conversation's prefix begins with the document's."""
        return max(self.store.get(("document", document), 0), self.store.get(("conversation", conversation), 0))

    def keep(self, key, tokens, own, dropped):
        self.stored -= self.own.pop(key, 0)
        self.store.pop(key, None)
        if own > self.costs.store_tokens:
            return
        self.store[key], self.own[key] = tokens, own
        self.stored += own
        while self.stored > self.costs.store_tokens:
            oldest, _ = self.store.popitem(last=False)
            self.stored -= self.own.pop(oldest)
            dropped(oldest)


class Router:
    """Chooses a replica by one rule. prefix_aware: of those that hold the longest prefix the least loaded, unless it is behind the
    least loaded of all by more than computing the prefix would take."""

    def __init__(self, rule, replicas):
        self.rule, self.replicas, self.next = rule, replicas, 0
        self.holders = collections.defaultdict(set)

    def least(self, among):
        return min(among, key=lambda i: (self.replicas[i].free_at, len(self.replicas[i].ends), i))

    def choose(self, now, document, conversation):
        if self.rule == "round_robin":
            self.next += 1
            return (self.next - 1) % len(self.replicas)
        least = self.least(range(len(self.replicas)))
        if self.rule == "least_loaded":
            return least
        for key in (("conversation", conversation), ("document", document)):
            if not self.holders[key]:
                continue
            holder = self.least(self.holders[key])
            behind = max(self.replicas[holder].free_at, now) - max(self.replicas[least].free_at, now)
            if behind <= self.replicas[holder].known(document, conversation) / self.replicas[holder].costs.prompt_tokens_per_s:
                return holder
        return least


def arrivals(traffic, replicas, rng):
    """(time, conversation, document, turn) of first turns; documents are asked for as 1 / rank."""
    documents = max(1, round(traffic.documents_per_replica * replicas))
    weights, total = [], 0.0
    for rank in range(1, documents + 1):
        total += 1 / rank
        weights.append(total)
    now, conversation, out = 0.0, 0, []
    while (now := now + rng.expovariate(traffic.conversations_per_replica_s * replicas)) < traffic.seconds:
        out.append((now, conversation, bisect.bisect_left(weights, rng.random() * total), 0))
        conversation += 1
    return out


def simulate(replicas, rule, traffic, costs, seed=1):
    rng = random.Random(seed)
    machines = [Replica(costs) for _ in range(replicas)]
    router = Router(rule, machines)
    queue = arrivals(traffic, replicas, rng)
    heapq.heapify(queue)
    first_tokens, waits, prompt, cached, on_holder, followups, step_sum, last = [], [], 0, 0, 0, 0, 0.0, traffic.seconds
    while queue:
        now, conversation, document, turn = heapq.heappop(queue)
        index = router.choose(now, document, conversation)
        machine = machines[index]
        tokens = traffic.document_tokens + turn * (traffic.question_tokens + traffic.answer_tokens) + traffic.question_tokens
        known = min(machine.known(document, conversation), tokens - 1)
        if turn > 0:
            followups += 1
            on_holder += ("conversation", conversation) in machine.store
        began = max(now, machine.free_at)
        machine.free_at = began + known / costs.resume_tokens_per_s + (tokens - known) / costs.prompt_tokens_per_s
        while machine.ends and machine.ends[0] <= machine.free_at:
            heapq.heappop(machine.ends)
        step = costs.step(len(machine.ends) + 1)
        ended = machine.free_at + step * traffic.answer_tokens
        heapq.heappush(machine.ends, ended)
        first_tokens.append(machine.free_at + step - now)
        waits.append(began - now)
        prompt, cached, step_sum, last = prompt + tokens, cached + known, step_sum + step, max(last, ended)
        drop = lambda key, index=index: router.holders[key].discard(index)
        for key, held, own in ((("document", document), traffic.document_tokens, traffic.document_tokens),
                               (("conversation", conversation), tokens + traffic.answer_tokens,
                                tokens + traffic.answer_tokens - traffic.document_tokens)):
            machine.keep(key, held, own, drop)
            if key in machine.store:
                router.holders[key].add(index)
        if turn + 1 < traffic.turns:
            heapq.heappush(queue, (ended + rng.expovariate(1 / traffic.think_s), conversation, document, turn + 1))
    first_tokens.sort()
    count = len(first_tokens)
    at = lambda share: first_tokens[min(count - 1, int(share * count))]
    return {"replicas": replicas, "rule": rule, "requests": count, "cached_share": cached / prompt,
            "followups_on_holder": on_holder / followups if followups else None, "computed_tokens": prompt - cached,
            "first_token_p50_s": at(.5), "first_token_p95_s": at(.95), "first_token_p99_s": at(.99),
            "mean_wait_s": sum(waits) / count, "mean_step_ms": 1e3 * step_sum / count,
            "replica_hours_per_million": replicas * last / 3600 / count * 1e6}


def highest_rate(replicas, rule, traffic, costs, limit_s, seed=1):
    """Conversations a replica and second at which the p95 of first tokens stays under the limit, to 2 %."""
    def good(rate):
        return simulate(replicas, rule, Traffic(**{**traffic.__dict__, "conversations_per_replica_s": rate}), costs, seed)["first_token_p95_s"] <= limit_s
    low, high = 0.005, 0.01
    if not good(low):
        return 0.0
    while good(high) and high < 10:
        low, high = high, high * 2
    while high / low > 1.02:
        middle = (low * high) ** .5
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="10,100,1000")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--costs", default=str(COSTS))
    parser.add_argument("--policy", default="lsh:k=512")
    parser.add_argument("--rate", type=float, default=Traffic.conversations_per_replica_s, help="conversations a replica and second")
    parser.add_argument("--seconds", type=float, default=Traffic.seconds)
    parser.add_argument("--store-tokens", type=int, default=16_000_000)
    parser.add_argument("--slo", type=float, help="also: the highest rate with this p95 of first tokens, for the first of --replicas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args()
    rules = args.rules.split(",")
    if unknown := set(rules) - set(RULES):
        parser.error(f"--rules: {', '.join(sorted(unknown))} is not one of {', '.join(RULES)}")
    costs = load_costs(args.costs, args.policy, args.store_tokens)
    traffic = Traffic(conversations_per_replica_s=args.rate, seconds=args.seconds)
    results, slo = [], []
    print(f"{'replicas':>8} {'rule':<13} {'requests':>8} {'cached':>7} {'on holder':>9} {'p50':>7} {'p95':>7} {'p99 s':>7} {'GPU h / 1M':>10}")
    for replicas in map(int, args.replicas.split(",")):
        for rule in rules:
            r = simulate(replicas, rule, traffic, costs, args.seed)
            results.append(r)
            print(f"{replicas:>8} {rule:<13} {r['requests']:>8} {r['cached_share']:>7.1%} {r['followups_on_holder'] or 0:>9.1%} {r['first_token_p50_s']:>7.2f} "
                  f"{r['first_token_p95_s']:>7.2f} {r['first_token_p99_s']:>7.2f} {r['replica_hours_per_million']:>10.0f}", flush=True)
    if args.slo:
        replicas = int(args.replicas.split(",")[0])
        for rule in rules:
            rate = highest_rate(replicas, rule, traffic, costs, args.slo, args.seed)
            slo.append({"replicas": replicas, "rule": rule, "first_token_p95_s": args.slo, "conversations_per_replica_s": rate})
            print(f"p95 under {args.slo:g} s with {rule}: {rate:.3f} conversations a replica and second", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(
            {"command": " ".join(sys.argv), "costs": json.loads(pathlib.Path(args.costs).read_text()), "policy": args.policy,
             "traffic": traffic.__dict__, "results": results, "slo": slo}, indent=1) + "\n")


if __name__ == "__main__":
    main()

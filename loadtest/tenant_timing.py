#!/usr/bin/env python3
"""Can a tenant learn from the time to its first token what another has asked?

    loadtest/tenant_timing.py [--trials 200] [--words 900] [--model DIR] [-- SERVER FLAGS]

Each trial has a fresh document. In half of them, in random order, tenant A asks about that document before B does, in the others A asks about another document of the
same length, so that the server has done the same work. B's times of both kinds are compared (Kolmogorov-Smirnov): p is the chance of such a
difference if there is none. The control is A itself, asking a second time: it must be told apart, or the measurement shows nothing. Exit code 1 where B can tell
(p at most 0.01) or the control cannot.
"""
import argparse
import math
import pathlib
import random
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/e2e"))
import harness  # noqa: E402

WORDS = "the a keeper house light ship wrote down every storm river letter winter bread salt key door stone field horse".split()


def kolmogorov_smirnov(a, b):
    """The largest distance of the two distributions, and the chance of one as large from equal ones (asymptotic)."""
    a, b = sorted(a), sorted(b)
    i = j = 0
    distance = 0.0
    while i < len(a) and j < len(b):
        x = min(a[i], b[j])
        while i < len(a) and a[i] <= x:
            i += 1
        while j < len(b) and b[j] <= x:
            j += 1
        distance = max(distance, abs(i / len(a) - j / len(b)))
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (root + 0.12 + 0.11 / root) * distance
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return distance, 1.0 if x < 0.2 else min(1.0, max(0.0, sum(terms)))


def first_token(api, text, tenant):
    """Seconds to the first token, and how many of the prompt's were found."""
    began = time.monotonic()
    call = api.generate(harness.counting_request(text, 1), metadata=[("x-winnow-tenant", tenant)], timeout=harness.PATIENCE)
    messages = [next(call)]
    seconds = time.monotonic() - began
    messages += list(call)
    return seconds, messages[-1].finish.usage.cached_tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--words", type=int, default=900)
    parser.add_argument("--model", default=harness.MODEL)
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    dice = random.Random(harness.SEED)
    document = lambda: " ".join(dice.choice(WORDS) for _ in range(arguments.words)) + ". What then?"
    with harness.Server(*arguments.flags, model=arguments.model) as server:
        api = harness.Api(server.address)
        first_token(api, document(), "warm")
        times = {True: [], False: []}
        control = []
        kinds = [True, False] * (arguments.trials // 2)
        dice.shuffle(kinds)
        for primed in kinds:
            text, other = document(), document()
            first_token(api, text if primed else other, "a")
            seconds, found = first_token(api, text, "b")
            assert found == 0, f"B found {found} tokens of A's"
            times[primed].append(seconds)
            if len(control) < len(kinds) // 2:
                control.append(first_token(api, text if primed else other, "a")[0])
    distance, p = kolmogorov_smirnov(times[True], times[False])
    seen, p_control = kolmogorov_smirnov(control, times[False])
    print(f"seed {harness.SEED}; {len(kinds)} trials; B's first token, median ms: {1e3 * statistics.median(times[True]):.1f} after A asked the same, "
          f"{1e3 * statistics.median(times[False]):.1f} after A asked another; KS distance {distance:.3f}, p {p:.3f}; "
          f"control (A again): {1e3 * statistics.median(control):.1f} ms, distance {seen:.3f}, p {p_control:.2g}")
    return 0 if p > 0.01 and p_control < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())

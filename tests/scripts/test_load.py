#!/usr/bin/env python3
"""Workloads and the arithmetic of load reports, without a server. The client itself: tests/e2e/test_load.py."""
import contextlib
import copy
import gzip
import io
import json
import math
import os
import pathlib
import random
import re
import socket
import statistics
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree

SOURCE = pathlib.Path(os.environ.get("WINNOW_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
sys.path[:0] = [str(SOURCE / "loadtest"), str(SOURCE / "loadtest/peers")]
import compare  # noqa: E402
import http_tools  # noqa: E402
import load_report  # noqa: E402
import ports  # noqa: E402
import workload  # noqa: E402
from load_report import CANCELLED, OK, Record, Slo  # noqa: E402

SEED = int(os.environ.get("WINNOW_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
CHAT = {"format": "winnow-workload/1", "about": "a", "source": "b", "conversations": 40, "arrivals": {"process": "poisson", "per_second": 2},
        "shared": [{"count": 3, "tokens": {"uniform": [50, 90]}, "skew": 1}], "own_tokens": 7, "turns": 3, "new_tokens": {"uniform": [5, 9]},
        "answer_tokens": 11, "think_seconds": {"exponential": 4}}


def tokens(turn):
    return sum(count for _, count in turn.segments)


class Distributions(unittest.TestCase):
    def draw(self, value, count=4000):
        numbers = random.Random(SEED)
        drawn = workload.Distribution(value, "x")
        return [drawn.draw(numbers) for _ in range(count)]

    def test_they_have_the_means_and_medians_that_they_name(self):
        for value, mean, median in (({"uniform": [10, 30]}, 20, 20), ({"exponential": 5}, 5, 5 * math.log(2)),
                                    ({"lognormal": {"mean": 15, "median": 10}}, 15, 10),
                                    ({"mix": [[3, 2], [1, {"uniform": [10, 10]}]]}, 4, 2)):
            with self.subTest(value=value, seed=SEED):
                drawn = self.draw(value)
                self.assertAlmostEqual(statistics.fmean(drawn), mean, delta=0.12 * mean)
                self.assertAlmostEqual(statistics.median(drawn), median, delta=0.12 * median)

    def test_bounds_cut(self):
        drawn = self.draw({"exponential": 5, "min": 4, "max": 6})
        self.assertEqual((min(drawn), max(drawn)), (4, 6))


class Layout(unittest.TestCase):
    def test_a_seed_gives_one_layout_and_another_seed_other_texts(self):
        of = workload.parse(CHAT)
        first = workload.lay_out(of, SEED)
        self.assertEqual(first, workload.lay_out(of, SEED))
        names = lambda laid_out: {name for one in laid_out for turn in one.turns for name, _ in turn.segments} - {workload.ANSWER}
        self.assertFalse(names(first) & names(workload.lay_out(of, SEED + 1)))

    def test_a_rate_moves_arrivals_and_nothing_else(self):
        of = workload.parse(CHAT)
        slow, fast = (workload.lay_out(of.at_rate(rate), SEED) for rate in (1, 4))
        self.assertEqual([one.turns for one in slow], [one.turns for one in fast])
        for a, b in zip(slow, fast):
            self.assertAlmostEqual(a.arrival, 4 * b.arrival)

    def test_arrivals(self):
        many = dict(CHAT, conversations=2000)
        times = [one.arrival for one in workload.lay_out(workload.parse(many), SEED)]
        gaps = [b - a for a, b in zip(times, times[1:])]
        self.assertAlmostEqual(statistics.fmean(gaps), 0.5, delta=0.06)
        self.assertAlmostEqual(statistics.pstdev(gaps), 0.5, delta=0.08)  # a Poisson process: as much as the mean
        constant = workload.parse(dict(CHAT, arrivals={"process": "constant", "per_second": 4}))
        self.assertEqual([one.arrival for one in workload.lay_out(constant, 1)][:3], [0, 0.25, 0.5])
        at_once = workload.parse(dict(CHAT, arrivals={"process": "at_once"}))
        self.assertEqual({one.arrival for one in workload.lay_out(at_once, 1)}, {0})

    def test_turns_repeat_all_before_them_and_the_answers(self):
        for one in workload.lay_out(workload.parse(CHAT), SEED):
            self.assertEqual(len(one.turns), 3)
            self.assertEqual([turn.think_seconds > 0 for turn in one.turns], [False, True, True])
            for before, after in zip(one.turns, one.turns[1:]):
                self.assertEqual(after.segments[:len(before.segments) + 1], before.segments + ((workload.ANSWER, 11),))
                self.assertTrue(5 <= after.segments[-1][1] <= 9)
            shared, own = one.turns[0].segments[:2]
            self.assertTrue(50 <= shared[1] <= 90 and own[1] == 7)

    def test_popular_texts_are_asked_for_as_the_skew_says(self):
        counts = {}
        for one in workload.lay_out(workload.parse(dict(CHAT, conversations=3000)), SEED):
            counts[one.turns[0].segments[0]] = counts.get(one.turns[0].segments[0], 0) + 1
        shares = sorted((count / 3000 for count in counts.values()), reverse=True)
        for share, expected in zip(shares, (6 / 11, 3 / 11, 2 / 11)):  # 1, 1/2, 1/3
            self.assertAlmostEqual(share, expected, delta=0.05)

    def test_contexts_end_where_they_are_full(self):
        of = workload.parse(dict(CHAT, turns=50, max_context=300))
        for one in workload.lay_out(of, SEED):
            used = tokens(one.turns[-1]) + 11
            self.assertTrue(300 - 20 < used <= 300, used)
        with self.assertRaisesRegex(workload.WorkloadError, "fits"):
            workload.lay_out(workload.parse(dict(CHAT, max_context=40)), SEED)

    def test_a_scale_is_on_every_length(self):
        of = workload.parse(dict(CHAT, shared=[{"count": 1, "tokens": 80}], new_tokens=8, answer_tokens=16, own_tokens=40, max_context=200))
        turn = workload.lay_out(of.scaled(1 / 8), SEED)[0].turns
        self.assertEqual([count for _, count in turn[0].segments], [10, 5, 1])
        self.assertEqual(turn[0].answer_tokens, 2)
        # 200 tokens hold 120, then 24 a turn: 3 turns; scaled by 1/8 25, 15 and 3: 3.
        self.assertEqual(len(turn), 3)

    def test_cancels(self):
        of = workload.parse(dict(CHAT, conversations=500, cancel={"share": 0.3, "after_tokens": {"uniform": [2, 5]}}))
        turns = [turn for one in workload.lay_out(of, SEED) for turn in one.turns]
        cancelled = [turn.cancel_after_tokens for turn in turns if turn.cancel_after_tokens is not None]
        self.assertAlmostEqual(len(cancelled) / len(turns), 0.3, delta=0.06)
        self.assertEqual((min(cancelled), max(cancelled)), (2, 5))


class Traces(unittest.TestCase):
    LINES = [{"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [0, 1, 2]},
             {"timestamp": 500, "input_length": 9, "output_length": 8, "hash_ids": [0, 1, 7]},
             {"timestamp": 1500, "input_length": 4, "output_length": 1, "hash_ids": [5]}]

    def parse(self, lines, **fields):
        with tempfile.TemporaryDirectory() as folder:
            with gzip.open(pathlib.Path(folder, "t.jsonl.gz"), "wt") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines)
            return workload.parse({"format": "winnow-workload/1", "about": "a", "source": "b", "trace": {"file": "t.jsonl.gz", "block_tokens": 4}, **fields},
                                  folder=pathlib.Path(folder))

    def test_blocks_of_one_number_are_one_text(self):
        laid_out = workload.lay_out(self.parse(self.LINES).at_rate(2), SEED)
        self.assertEqual([one.arrival for one in laid_out], [0, 0.25, 0.75])
        first, second, third = (one.turns[0] for one in laid_out)
        self.assertEqual([count for _, count in first.segments], [4, 4, 2])
        self.assertEqual([count for _, count in second.segments], [4, 4, 1])
        self.assertEqual(first.segments[:2], second.segments[:2])
        self.assertNotEqual(first.segments[2][0], second.segments[2][0])
        self.assertEqual((third.segments[0][1], third.answer_tokens), (4, 1))

    def test_what_does_not_fit_is_left_out(self):
        self.assertEqual([one.arrival for one in workload.lay_out(self.parse(self.LINES, max_context=13), SEED)], [0, 1.5])

    def test_lines_that_are_wrong_are_named(self):
        for change, message in (({"hash_ids": [0, 1]}, "t.jsonl.gz:2.hash_ids.*3 blocks"), ({"timestamp": -1}, ":2.timestamp"), ({"x": 1}, ":2.x.*not a field"),
                                ({"input_length": 0}, ":2.input_length"), ({"output_length": 1.5}, ":2.output_length.*integer")):
            with self.subTest(change=change), self.assertRaisesRegex(workload.WorkloadError, message):
                self.parse([self.LINES[0], {**self.LINES[1], **change}])


class Validation(unittest.TestCase):
    def test_the_field_that_is_wrong_is_named(self):
        for path, value, message in (
                (("format",), "winnow-workload/2", r"w\.format"), (("conversations",), 0, r"w\.conversations.*at least 1"),
                (("conversations",), 1.5, r"w\.conversations.*integer"), (("conversations",), True, r"w\.conversations"),
                (("arrivals", "process"), "often", r"w\.arrivals\.process"), (("arrivals", "per_second"), 0, r"w\.arrivals\.per_second"),
                (("arrivals", "bursts"), 2, r"w\.arrivals\.bursts.*not a field"), (("surprise",), 1, r"w\.surprise.*not a field"),
                (("shared", 0, "tokens"), {"uniform": [9, 5]}, r"w\.shared\[0\]\.tokens\.uniform\[1\]"), (("shared", 0, "skew"), -1, r"skew"),
                (("turns",), {"normal": [1, 2]}, r"w\.turns.*exactly one of"), (("turns",), {"uniform": [1, 2], "exponential": 3}, r"exactly one"),
                (("turns",), 0, r"w\.turns.*at least 1"), (("new_tokens",), {"lognormal": {"mean": 5, "median": 6}}, r"new_tokens\.lognormal\.mean"),
                (("new_tokens",), {"mix": [[1, 5], [0, 6]]}, r"mix\[1\]\[0\]"), (("answer_tokens",), {"exponential": 5, "max": 0}, r"answer_tokens\.max"),
                (("think_seconds",), float("nan"), r"think_seconds"), (("about",), "", r"w\.about"),
                (("cancel",), {"share": 2, "after_tokens": 1}, r"cancel\.share"), (("cancel",), {"share": 0.5}, r"exactly one of after_tokens"),
                (("trace",), {"file": "x", "block_tokens": 4}, r"not a field"), (("max_context",), 1, r"max_context")):
            with self.subTest(path=path, value=value):
                raw = copy.deepcopy(CHAT)
                of = raw
                for key in path[:-1]:
                    of = of[key]
                of[path[-1]] = value
                with self.assertRaisesRegex(workload.WorkloadError, message):
                    workload.parse(raw, "w")

    def test_missing_fields_and_other_things(self):
        for key in ("about", "conversations", "arrivals", "turns", "answer_tokens"):
            with self.subTest(missing=key), self.assertRaisesRegex(workload.WorkloadError, rf"w\.{key}"):
                workload.parse({k: v for k, v in CHAT.items() if k != key}, "w")
        with self.assertRaisesRegex(workload.WorkloadError, "must be an object"):
            workload.parse([], "w")
        for trace in ({"file": "../x", "block_tokens": 4}, {"file": "absent.jsonl", "block_tokens": 4}, {"file": "x"}):
            with self.assertRaisesRegex(workload.WorkloadError, r"w\.trace"):
                workload.parse({"format": "winnow-workload/1", "about": "a", "source": "b", "trace": trace}, "w")
        of = workload.parse(CHAT)
        for wrong in (lambda: of.scaled(0), lambda: of.scaled(100), lambda: of.at_rate(-1), lambda: of.cut(41), lambda: of.cut(0)):
            self.assertRaises(workload.WorkloadError, wrong)

    def test_the_files_of_the_project_are_workloads(self):
        files = sorted((SOURCE / "loadtest/workloads").glob("*.json"))
        self.assertGreaterEqual(len(files), 5)
        for file in files:
            with self.subTest(file=file.name):
                self.assertGreater(len(workload.lay_out(workload.load(file), SEED)), 0)
        page = (SOURCE / "loadtest/workloads/README.md").read_text()
        for file in files:
            self.assertIn(f"`{file.name}`", page)


def usage(**fields):
    return {"prompt_tokens": 100, "cached_tokens": 0, "preemptions": 0, "queue_seconds": 0.5, "kv_dense_bytes": 1000, "attended_rows": 1, "dense_rows": 2,
            "kv_read_bytes": {"fast": 100, "host": 0, "disk": 0}, "retrieval": {"coverage": None, "probes": 0},
            "drafts": {"drafted_tokens": 0, "verified_tokens": 0, "accepted_tokens": 0}, **fields}


def answered(due, first, gaps, turn=0, sent=None, **fields):
    return Record(0, turn, due, due if sent is None else sent, first, first + sum(gaps), first + sum(gaps), len(gaps) + 1, gaps, OK, usage(**fields))


class Report(unittest.TestCase):
    def test_percentiles_are_those_of_the_standard_library(self):
        numbers = random.Random(SEED)
        for count in (1, 2, 3, 7, 100):
            values = sorted(numbers.expovariate(1) for _ in range(count))
            for share in (0, 50, 90, 95, 99, 100):
                expected = statistics.quantiles(values, n=100, method="inclusive")[share - 1] if 0 < share < 100 and count > 1 else values[0 if share == 0 else -1]
                self.assertAlmostEqual(load_report.percentile(values, share), expected)
        self.assertEqual(load_report.statistics([None]), {"count": 0})

    def test_times_count_from_when_a_request_was_due(self):
        summary = load_report.summarise([answered(1, 4, [0.5, 1.5], sent=3)])
        self.assertEqual(summary["first_token_seconds"]["p50"], 3)
        self.assertEqual(summary["client_late_seconds"]["max"], 2)
        self.assertEqual(summary["per_token_seconds"]["mean"], 1)
        self.assertEqual(summary["request_seconds"]["max"], 5)
        self.assertEqual((summary["seconds"], summary["tokens_per_second"]), (5, 3 / 5))
        self.assertEqual(summary["inter_token_seconds"]["count"], 2)

    def test_sums_are_by_hand(self):
        records = [answered(0, 1, [1], prompt_tokens=100, kv_read_bytes={"fast": 200, "host": 7, "disk": 1}, retrieval={"coverage": 0.9, "probes": 1},
                            drafts={"drafted_tokens": 8, "verified_tokens": 6, "accepted_tokens": 3}),
                   answered(0, 1, [1], turn=1, prompt_tokens=300, cached_tokens=300, retrieval={"coverage": 0.5, "probes": 3}),
                   Record(2, 0, 1, 1, 2, 3, 5, 4, [0.5, 0.25, 0.25], CANCELLED), Record(3, 0, 1, 1, end=1, status="QUEUE_FULL")]
        summary = load_report.summarise(records, Slo(2, 2))
        self.assertEqual([summary[key] for key in ("requests", "answered", "cancelled", "failed")], [4, 2, 1, {"QUEUE_FULL": 1}])
        self.assertEqual((summary["generated_tokens"], summary["prompt_tokens"], summary["cached_share"]), (8, 400, 0.75))
        reads = summary["reads"]
        self.assertEqual(reads["kv_read_bytes"], {"fast": 300, "host": 7, "disk": 1})
        self.assertEqual((reads["read_share"], reads["kv_dense_bytes"]), (0.15, 2000))
        self.assertAlmostEqual(reads["coverage"], 0.6)  # each probe counts once
        self.assertEqual((reads["drafted_tokens"], reads["accepted_share"]), (8, 0.5))
        self.assertEqual([(of["turn"], of["requests"], of["cached_share"]) for of in summary["by_turn"]], [(0, 1, 0), (1, 1, 1)])
        # The cancelled request counts for nothing, the refused one against it.
        self.assertEqual((summary["slo"]["good"], summary["slo"]["of"], summary["slo"]["held"]), (2, 3, False))
        self.assertAlmostEqual(summary["slo"]["goodput_per_second"], 2 / 5)

    def test_an_slo_is_held_to_its_limits(self):
        slo = Slo.parse("first=1,token=0.5,share=0.5")
        good, late, slow = answered(0, 1, [0.5]), answered(0, 1.01, [0.1]), answered(0, 0.5, [0.1, 0.95])
        self.assertEqual([slo.held_by(of) for of in (good, late, slow)], [True, False, False])
        self.assertTrue(slo.held_by(answered(0, 1, [])))
        self.assertTrue(load_report.summarise([good, late], slo)["slo"]["held"])
        self.assertFalse(load_report.summarise([good, late, slow], slo)["slo"]["held"])
        self.assertFalse(load_report.summarise([Record(0, 0, 0, 0, status=CANCELLED)], slo)["slo"]["held"])
        for text in ("first=1", "first=1,token=x", "first=1,token=1,share=2", "first=0,token=1", "first=1,token=1,late=3", ""):
            self.assertRaises(ValueError, Slo.parse, text)

    def test_search_finds_the_largest_rate(self):
        for limit in (0.13, 0.9, 3.7):
            tried = []
            holds = lambda rate: tried.append(rate) or rate <= limit
            good, bad = load_report.search(holds, 0.1, 8)
            self.assertTrue(good <= limit < bad, (good, bad))
            self.assertLessEqual(bad / good, 1.1 + 1e-9)
            self.assertEqual(len(tried), len(set(tried)))
        self.assertEqual(load_report.search(lambda rate: True, 0.1, 8), (8, None))
        self.assertEqual(load_report.search(lambda rate: False, 0.1, 8), (None, 0.1))
        self.assertRaises(ValueError, load_report.search, lambda rate: True, 2, 1)


class Tools(unittest.TestCase):
    def test_aiperf_gets_the_numbers_of_the_workload(self):
        raw = json.loads((SOURCE / "loadtest/workloads/coding_agents.json").read_text())
        whole, small = (http_tools.Agents.generator_config(scale, delays=delays) for scale, delays in ((1, 1), (1 / 10, 0.1)))
        self.assertEqual(whole["max_prompt_tokens"], raw["max_context"])
        self.assertEqual(whole["cache"]["layer1_tokens"], raw["shared"][0]["tokens"])
        self.assertEqual(whole["cache"]["layer2"], {"mean": 15000, "median": 5000, "max": 30000})
        self.assertEqual(whole["inter_turn_delay"], {"agentic_fraction": 0.7, "agentic_delay": {"mean": 2500, "median": 1800, "max": 10000},
                                                     "human_delay": {"mean": 40000, "median": 25000, "max": 120000}, "max": None})
        self.assertEqual((small["new_tokens_per_turn"], small["generation_length"]), ({"mean": 600, "median": 600}, {"mean": 100, "median": 100}))
        self.assertEqual((small["max_prompt_tokens"], small["cache"]["layer1_tokens"] % http_tools.Agents.BLOCK), (16700, 0))
        self.assertEqual(small["inter_turn_delay"]["human_delay"]["mean"], 4000)

    def test_each_configuration_is_a_line(self):
        self.assertEqual([(attention, cache, flags) for attention, cache, flags in http_tools.configurations("quest:k=64")],
                         [("dense", "on", ["--prefix-cache", "on"]), ("dense", "off", ["--prefix-cache", "off"]),
                          ("quest:k=64", "on", ["--policy", "quest:k=64", "--prefix-cache", "on"]), ("quest:k=64", "off", ["--policy", "quest:k=64", "--prefix-cache", "off"])])
        results = [{"attention": "dense", "prefix_cache": "on", "cached_share": 0.5, "kv_read_share": None, "rows": [{"a": 1.25, "b": [0.5, 2.0]}, {"a": 3, "b": [0.01, 0.02]}, {"a": 0.0, "b": None}]}]
        self.assertEqual(http_tools.table(("a", "b"), results).splitlines()[2:],
                         ["| dense | on | 1.25 | 500.0 ms / 2.00 s | 50.0 % | – |", "| dense | on | 3 | 10.0 ms / 20.0 ms | 50.0 % | – |", "| dense | on | 0 | – | 50.0 % | – |"])

    def test_a_tool_that_fails_or_hangs_ends_the_run_with_its_log(self):
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder, "log")
            http_tools.run_tool(["sh", "-c", "echo well"], os.environ, log, 60)
            self.assertEqual(log.read_text(), "well\n")
            with self.assertRaisesRegex(SystemExit, "(?s)ended with 3:.*no such model"):
                http_tools.run_tool(["sh", "-c", "echo no such model; exit 3"], os.environ, log, 60)
            with self.assertRaisesRegex(SystemExit, "ended with none after 0.2 s"):
                http_tools.run_tool(["sh", "-c", "sleep 600 & sleep 600"], os.environ, log, 0.2)


class Peers(unittest.TestCase):
    def test_steps_count_while_all_streams_are_read(self):
        # The first stream's first two gaps lie before the second's first token.
        result = compare.reduce(0, [[1, 2, 4, 4.5, 5], [4, 4.5, 5, 5.5, 6]], 5, 100)
        self.assertEqual(result, {"prompt_tokens_per_s": 50, "ms_per_step": 500, "tokens_per_s": 4})
        # Two tokens in each chunk but the first: half the time each.
        self.assertEqual(compare.reduce(0, [[1, 2, 3]], 5, 100)["ms_per_step"], 500)
        # One slow step is not the usual one.
        self.assertEqual(compare.reduce(0, [[1, 2, 3, 13]], 4, 100)["ms_per_step"], 1000)
        self.assertEqual(compare.reduce(0, [[1, 2], [3, 4]], 2, 100)["tokens_per_s"], 2)
        self.assertIsNone(compare.reduce(0, [[1, 2], [9]], 2, 100)["ms_per_step"])

    def test_a_line_for_each_shape(self):
        results = {"a": {"1x2048": {"ms_per_step": 4.5, "tokens_per_s": 222.2, "prompt_tokens_per_s": 30000.0}},
                   "b": {"1x2048": {"ms_per_step": None, "tokens_per_s": None, "prompt_tokens_per_s": 1.0}}}
        self.assertEqual(compare.table([(1, 2048)], ["a", "b"], results).splitlines()[2], "| 1 x 2,048 | 4.50; 222.2; 30,000 | –; –; 1 |")

    def test_what_cannot_be_is_said(self):
        for args, message in ((["--server", "a=true"], "NAME=COMMAND"), (["--server", "a=true {port}", "--shape", "0x5"], "BATCHxCONTEXT"),
                              (["--server", "a=true {port}", "--server", "a=true {port}"], "differ"), (["--server", "a=true {port}", "--tokens", "1"], "at least 2")):
            with self.subTest(args=args), contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
                compare.main(args)
            self.assertIn(message, said.getvalue())
        with self.assertRaisesRegex(SystemExit, "(?s)a does not serve .*no weights"):
            compare.main(["--server", "a=sh -c 'echo no weights; exit 1 # {port}'"])
        with self.assertRaisesRegex(SystemExit, "a: .*absent-program.*name ends at the first ="):
            compare.main(["--server", "a=absent-program=true {port}"])


class Ports(unittest.TestCase):
    def test_no_other_socket_gets_the_port(self):
        """Neither sockets bound to port 0 nor connections: a peer's server was started on a port that one of those had taken meanwhile."""
        self.assertLess(ports.first_ephemeral(), 65536)
        for _ in range(20):
            self.assertIn(ports.unused_port(), range(ports.LOWEST, ports.first_ephemeral()))

    def test_none_is_given_twice(self):
        """Two servers that begin together had the same one, about once in twenty thousand times."""
        with unittest.mock.patch.multiple(ports, LOWEST=ports.first_ephemeral() - 40):
            given = [ports.unused_port() for _ in range(20)]
        self.assertEqual(len(set(given)), 20)

    def test_a_taken_port_is_passed_over(self):
        with contextlib.ExitStack() as taken, unittest.mock.patch.multiple(ports, LOWEST=20000, first_ephemeral=lambda: 20003):
            held = set()
            for port in range(20000, 20003):
                with contextlib.suppress(OSError):  # somebody else's is taken as well
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
                held.add(port)
                with contextlib.suppress(OSError):
                    self.assertNotIn(ports.unused_port(), held)
            with self.assertRaisesRegex(OSError, "no port from 20000 to 20002 is free"):
                ports.unused_port()

    def test_without_room_below_the_range_the_system_chooses(self):
        with unittest.mock.patch.object(ports, "first_ephemeral", lambda: 1024), socket.socket() as server:
            server.bind(("127.0.0.1", ports.unused_port()))


class Page(unittest.TestCase):
    def test_it_is_one_file_with_plots_and_the_command(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("Debian's python3-matplotlib is not there")
        records = [answered(i, i + 1, [0.1, 0.2], turn=i % 2) for i in range(5)] + [Record(9, 0, 1, 1, end=3, status="QUEUE_FULL"), Record(8, 0, 1, 1, end=2, status=CANCELLED)]
        slo = Slo(1, 1)
        summary = load_report.summarise(records, slo)
        report = {"command": "loadtest/load.py --policy <b>", "workload": {"name": "w", "about": "a & b"}, "server": {}, "machine": {}, "summary": summary,
                  "search": {"trials": [{"rate": 1, **summary}, {"rate": 2, **summary}]}}
        page = load_report.page(report, records)
        self.assertIn("loadtest/load.py --policy &lt;b&gt;", page)
        self.assertIn("a &amp; b", page)
        self.assertFalse(re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|<script|@import", page))
        figures = re.findall(r"(?s)<svg.*?</svg>", page)
        self.assertEqual(len(figures), 5)
        for figure in figures:
            xml.etree.ElementTree.fromstring(figure)
        self.assertEqual(page, load_report.page(report, records))
        # Without a single answer there is a page, too.
        nothing = [Record(0, 0, 0, 0, end=1, status="QUEUE_FULL")]
        page = load_report.page({**report, "summary": load_report.summarise(nothing), "search": None}, nothing)
        self.assertIn("1 QUEUE_FULL", page)


if __name__ == "__main__":
    print("seed", SEED, flush=True)
    unittest.main(verbosity=2)

"""loadtest/load.py against a started server: what it counts is what the server counts. Without a server: tests/scripts/test_load.py."""
import asyncio
import json
import pathlib
import re
import subprocess
import sys
import unittest

import harness
from harness import SOURCE, Server

sys.path[:0] = [str(SOURCE / "loadtest"), str(SOURCE / "clients/python")]
import load  # noqa: E402
import load_report  # noqa: E402
import workload as workloads  # noqa: E402
from winnow_client import AsyncClient  # noqa: E402
from winnow_client.errors import NO_RETRIES  # noqa: E402

CHAT = {"format": "winnow-workload/1", "about": "a", "source": "b", "conversations": 6, "arrivals": {"process": "constant", "per_second": 20},
        "shared": [{"count": 1, "tokens": 700}], "own_tokens": 30, "turns": 2, "new_tokens": {"uniform": [5, 40]}, "answer_tokens": {"uniform": [3, 9]}}
LONG = 20000


def play(server, raw, seed=harness.SEED, **options):
    """(records, conversations) of a workload."""
    async def run():
        async with AsyncClient(server.address, retry=NO_RETRIES) as client:
            corpus = await client.tokenize((SOURCE / "README.md").read_text())
            laid_out = workloads.lay_out(workloads.parse(raw), seed)
            return await load.Run(client, laid_out, load.Texts(corpus), **options).measure(), laid_out
    return asyncio.run(run())


class Load(unittest.TestCase):
    def test_counts_are_the_servers(self):
        policy = "lsh:k=2%,from=0,sink=4,window=4,dense_layers=0"
        with Server("--retrieval-from", "0", "--probe-interval", "1") as server:
            records, laid_out = play(server, CHAT, policy=policy)
            summary = load_report.summarise(records)
            metric = server.metric
            self.assertEqual([record.status for record in records], ["ok"] * 12)
            self.assertEqual(summary["generated_tokens"], metric("winnow_generated_tokens_total"))
            self.assertEqual(summary["prompt_tokens"], metric("winnow_prompt_tokens_total"))
            self.assertEqual(summary["cached_tokens"], metric("winnow_cached_tokens_total"))
            self.assertEqual(summary["reads"]["kv_read_bytes"]["fast"], metric('winnow_kv_read_bytes_total{tier="fast"}'))
            self.assertEqual(summary["reads"]["kv_dense_bytes"], metric("winnow_kv_dense_bytes_total"))
            self.assertTrue(0 < summary["reads"]["read_share"] < 0.5, summary["reads"])
            self.assertTrue(0 < summary["reads"]["coverage"] <= 1)
            self.assertGreater(summary["reads"]["probes"], 0)
        turns = {(record.conversation, record.turn): record for record in records}
        for index, conversation in enumerate(laid_out):
            context = 0
            for number, turn in enumerate(conversation.turns):
                record = turns[index, number]
                self.assertEqual(record.tokens, turn.answer_tokens)
                self.assertEqual(len(record.gaps), record.tokens - 1)
                self.assertEqual(record.usage["prompt_tokens"], sum(count for _, count in turn.segments))
                self.assertTrue(record.due <= record.sent <= record.first <= record.last <= record.end)
                # A follow-up repeats what was computed a moment ago, in whole blocks.
                if number:
                    self.assertGreater(record.usage["cached_tokens"], context - 128)
                context = record.usage["prompt_tokens"]

    def test_drafts_are_counted(self):
        with Server() as server:
            records, _ = play(server, dict(CHAT, conversations=2, answer_tokens=40), policy="lsh:k=2%,from=0,verify=4")
            reads = load_report.summarise(records)["reads"]
            self.assertTrue(0 < reads["accepted_tokens"] <= reads["verified_tokens"] <= reads["drafted_tokens"], reads)
            self.assertEqual(sum(record.tokens for record in records), 4 * 40)

    def test_a_slow_server_does_not_slow_the_clock(self):
        """Conversations come when they are due, while earlier ones still wait."""
        with Server("--max-running", "1", "--prefix-cache", "off") as server:
            records, laid_out = play(server, dict(CHAT, conversations=8, turns=1, answer_tokens=250, arrivals={"process": "constant", "per_second": 100}))
        self.assertEqual([record.due for record in records], [one.arrival for one in laid_out])
        self.assertLess(max(record.sent for record in records), max(record.end for record in records) / 2)
        waits = [record.first_token_seconds for record in records]
        self.assertGreater(waits[-1], 2 * waits[0])

    def test_cancelled_answers_free_the_server(self):
        with Server() as server:
            # Answers that no server has given before a client has read three tokens of them.
            records, laid_out = play(server, dict(CHAT, answer_tokens=LONG, turns=1, cancel={"share": 1, "after_tokens": 3}))
            self.assertEqual({record.status for record in records}, {load_report.CANCELLED})
            self.assertTrue(all(3 <= record.tokens < LONG for record in records), [record.tokens for record in records])
            harness.eventually(lambda: server.metric("winnow_requests_running") == 0, "nothing runs")
            harness.eventually(lambda: server.metric('winnow_requests_total{outcome="cancelled"}') == len(laid_out), "all are counted")
            records, _ = play(server, dict(CHAT, answer_tokens=LONG, turns=1, cancel={"share": 1, "after_seconds": 0.05}))
            self.assertEqual({record.status for record in records}, {load_report.CANCELLED})

    def test_refusals_have_the_servers_reason_and_end_the_conversation(self):
        with Server("--queue-requests", "1", "--max-running", "1") as server:
            records, _ = play(server, dict(CHAT, answer_tokens=200, arrivals={"process": "at_once"}))
            failed = load_report.summarise(records)["failed"]
            self.assertEqual(set(failed), {"QUEUE_FULL"})
            refused = {record.conversation for record in records if record.status == "QUEUE_FULL" and record.turn == 0}
            self.assertFalse([record for record in records if record.conversation in refused and record.turn])


class Program(unittest.TestCase):
    def run_load(self, *args):
        done = subprocess.run([sys.executable, SOURCE / "loadtest/load.py", *map(str, args)], capture_output=True, text=True, timeout=harness.PATIENCE)
        return done

    def test_reports(self):
        with Server() as server, harness.temporary_directory() as out:
            args = ["--server", server.address, "--workload", SOURCE / "loadtest/workloads/chats.json", "--scale", "1/2", "--rate", "50", "--conversations", "3"]
            (out / "w.json").write_text(json.dumps(dict(CHAT, arrivals={"process": "poisson", "per_second": 50})))
            args[3] = out / "w.json"
            done = self.run_load(*args, "--json", out / "r.json", "--slo", "first=60,token=10")
            self.assertEqual(done.returncode, 0, done.stderr)
            report = json.loads((out / "r.json").read_text())
            self.assertIn("--scale 1/2", report["command"])
            self.assertEqual(report["workload"]["conversations"], 3)
            self.assertEqual(report["summary"]["answered"], 6)
            self.assertTrue(report["summary"]["slo"]["held"])
            self.assertEqual(len(report["machine"]["load_average_before"]), 3)
            self.assertIn("6 of 6 answered", done.stdout)
            # The search's range is so easy that its upper end holds, and then so hard that nothing does.
            done = self.run_load(*args, "--json", out / "r.json", "--slo", "first=60,token=10", "--search", "20:40")
            report = json.loads((out / "r.json").read_text())
            self.assertEqual((report["search"]["largest_rate"], report["search"]["smallest_missed"]), (40, None), done.stderr)
            self.assertEqual([trial["rate"] for trial in report["search"]["trials"]], [20, 40])
            # Texts of one try are not those of the one before: the first of three conversations finds nothing in the cache.
            self.assertLess(report["search"]["trials"][1]["by_turn"][0]["cached_share"], 0.7)
            done = self.run_load(*args, "--json", out / "r.json", "--slo", "first=0.000001,token=10", "--search", "20:40")
            report = json.loads((out / "r.json").read_text())
            self.assertEqual((report["search"]["largest_rate"], report["search"]["smallest_missed"]), (None, 20), done.stderr)

    def test_peers_are_measured_through_their_servers(self):
        command = f"{harness.BIN} serve --model {harness.MODEL} --http 127.0.0.1:{{port}} --listen 127.0.0.1:0 --metrics 127.0.0.1:0"
        with harness.temporary_directory() as out:
            done = subprocess.run([sys.executable, SOURCE / "loadtest/peers/compare.py", "--server", f"dense={command}", "--server", f"window={command} --policy window",
                                   "--shape", "1x300", "--shape", "3x200", "--tokens", "600", "--json", out / "r.json"], capture_output=True, text=True, timeout=harness.PATIENCE)
            self.assertEqual(done.returncode, 0, done.stderr)
            results = json.loads((out / "r.json").read_text())["results"]
        self.assertEqual({name: set(of) for name, of in results.items()}, {"dense": {"1x300", "3x200"}, "window": {"1x300", "3x200"}})
        for of in (one for shapes in results.values() for one in shapes.values()):
            self.assertTrue(all(value is not None and value > 0 for value in of.values()), results)
        self.assertIn("| 3 x 200 |", done.stdout)

    def test_what_cannot_be_is_said(self):
        with Server() as server, harness.temporary_directory() as out:
            (out / "w.json").write_text(json.dumps({**CHAT, "shared": [{"count": 1, "tokens": 90000}]}))
            (out / "bad.json").write_text(json.dumps({**CHAT, "turns": 0}))
            for args, message in ((["--workload", out / "w.json"], r"a request has 9\d{4} tokens.*--scale"), (["--workload", out / "bad.json"], r"bad\.turns"),
                                  (["--workload", out / "absent.json"], "absent.json"), (["--workload", out / "w.json", "--search", "1:2"], "needs --slo"),
                                  (["--workload", out / "w.json", "--slo", "first=1,token=1", "--search", "2:1"], "LOW:HIGH"),
                                  (["--workload", out / "w.json", "--slo", "quick"], "--slo"), (["--workload", out / "w.json", "--conversations", "7"], "6 conversations")):
                with self.subTest(args=args):
                    done = self.run_load("--server", server.address, *args)
                    self.assertNotEqual(done.returncode, 0)
                    self.assertRegex(done.stderr, message)
                    self.assertFalse(re.search("Traceback", done.stderr), done.stderr)
            done = self.run_load("--server", "127.0.0.1:1", "--workload", pathlib.Path(SOURCE, "loadtest/workloads/chats.json"))
            self.assertRegex(done.stderr, "load.py: UNAVAILABLE")


if __name__ == "__main__":
    harness.main()

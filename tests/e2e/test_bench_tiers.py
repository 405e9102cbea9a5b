#!/usr/bin/python3
"""bench tiers and bench resume: what they print adds up."""
import json
import unittest

from harness import MODEL, main, run, temporary_directory

SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
         "vocab_size": 512, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 0,
         "eos_token_id": 1}
PAGE = 4096


def sources(directory):
    """Random weights with noise for KV, and the test model with a text that it reads."""
    shape, text = directory / "config.json", directory / "text"
    shape.write_text(json.dumps(SHAPE))
    text.write_text("".join(f"The mount point of volume {i * 7919 % 1000} is directory {i}. " for i in range(1000)))
    return ("--like", shape), ("--model", MODEL, "--text", text)


class BenchTiers(unittest.TestCase):
    def check(self, out, heads, row_bytes):
        rows = out["tiers"]
        self.assertEqual([(row["context"] // 1000, row["share_asked"]) for row in rows],
                         [(c, s) for c in (1, 3) for s in (0, 0.5, 1)])
        for row in rows:
            self.assertAlmostEqual(row["share_in_memory"], 1 - row["stored_rows"] / row["selected_rows"], 4)
            self.assertAlmostEqual(row["share_in_memory"], row["share_asked"], delta=0.25)
            self.assertAlmostEqual(row["payload_bytes"], row["stored_rows"] * row_bytes,
                                   delta=row["payload_bytes"] / 1e4)
            # Only pages of rows are read, each once, and neighbours together.
            self.assertAlmostEqual(row["device_bytes"], row["pages"] * PAGE, delta=row["device_bytes"] / 1e4)
            self.assertLessEqual(row["reads"], row["pages"] * 1.0001)
            self.assertLessEqual(row["pages"], row["stored_rows"] * 1.0001)
            self.assertLessEqual(row["ms_per_token_best"], row["ms_per_token"])
            self.assertGreater(row["ms_attending"], 0)
            self.assertLessEqual(row["ms_attending"] + row["ms_waiting"], row["ms_per_token_mean"])
            self.assertEqual((row["cached_rows"], row["asked_ahead_rows"]), (0, 0))
            self.assertGreater(row["device_iops_before"], 0)
            self.assertAlmostEqual(row["share_of_device"] * max(row["device_iops_before"], row["device_iops_after"]),
                                   row["iops"], delta=row["iops"] / 1e3)
            if row["share_asked"] == 1:
                self.assertEqual((row["stored_rows"], row["device_bytes"], row["reads"]), (0, 0, 0))
            if row["share_asked"] == 0:
                self.assertGreater(row["stored_rows"], heads)

    def test_shares_in_memory_are_counted(self):
        with temporary_directory() as directory:
            noise, text = sources(directory)
            store = directory / "store"
            for source, heads, row_bytes in ((noise, 2, 256), (text, 2, 256)):
                result = run("bench", "tiers", *source, "--store-dir", store, "--contexts", "1100,3100", "--shares",
                             "0,50,100", "--steps", "3", "--device-seconds", "0.05", "--policy", "lsh:k=5%",
                             "--kv-dtype", "bf16", "--json", "-")
                self.assertEqual(result.returncode, 0, result.stderr)
                out = json.loads(result.stdout)
                self.check(out, heads, row_bytes)
                self.assertFalse(store.exists())
            layers = [row["layer"] for row in out["overlap"]]
            self.assertEqual(layers, [2, 3, 4, 5] * 2)
            for row in out["overlap"]:
                self.assertTrue(0 <= row["overlap"] <= 1, row)
                self.assertTrue(1 <= row["distinct_over_rows"] <= row["steps"], row)

    def test_row_cache_and_prefetch_take_reads_from_the_step(self):
        with temporary_directory() as directory:
            _, text = sources(directory)
            ways = {}
            for name, *flags in (("plain",), ("cache", "--row-cache-bytes", 8 << 20), ("prefetch", "--prefetch", "on")):
                result = run("bench", "tiers", *text, "--store-dir", directory / "store", "--contexts", "3100",
                             "--shares", "0", "--steps", "4", "--device-seconds", "0.05", "--policy", "lsh:k=5%",
                             "--kv-dtype", "bf16", "--json", "-", *flags)
                self.assertEqual(result.returncode, 0, result.stderr)
                ways[name], = json.loads(result.stdout)["tiers"]
            self.assertEqual(len({way["selected_rows"] for way in ways.values()}), 1)
            self.assertGreater(ways["cache"]["cached_rows"], 0)
            self.assertLess(ways["cache"]["stored_rows"], ways["plain"]["stored_rows"])
            self.assertLess(ways["cache"]["device_bytes"], ways["plain"]["device_bytes"])
            # Rows chosen at random would be right one time in twenty.
            self.assertGreater(ways["prefetch"]["asked_ahead_rows"], 0)
            self.assertGreater(ways["prefetch"]["used_ahead_rows"], ways["prefetch"]["asked_ahead_rows"] / 3)

    def test_what_is_wrong_is_said(self):
        with temporary_directory() as directory:
            noise, text = sources(directory)
            full = directory / "full"
            full.mkdir()
            (full / "file").write_text("mine")
            for words, *arguments in (
                    ("is not empty", "tiers", *noise, "--store-dir", full),
                    ("dense chooses no rows", "tiers", *noise, "--store-dir", directory / "s", "--policy", "dense"),
                    ("more than the model's context", "tiers", *noise, "--store-dir", directory / "s", "--contexts",
                     "100000"),
                    ("no room for", "tiers", *noise, "--store-dir", directory / "s", "--contexts", "100"),
                    ("--text: needs --model", "resume", *noise, "--store-dir", directory / "s", "--tokens", "1000",
                     *text[2:]),
                    ("tokens, and", "resume", *text, "--store-dir", directory / "s", "--tokens", "32000")):
                result = run("bench", *arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(words, result.stderr)
            self.assertEqual((full / "file").read_text(), "mine")


class BenchResume(unittest.TestCase):
    def test_bytes_of_every_way_add_up(self):
        with temporary_directory() as directory:
            noise, text = sources(directory)
            for source, layers in ((noise, 4), (text, 6)):
                result = run("bench", "resume", *source, "--store-dir", directory / "store", "--tokens", "4000",
                             "--questions", "5,40", "--repetitions", "1", "--policy", "lsh:k=2%", "--policy",
                             "lsh:k=16,dense_layers=1", "--kv-dtype", "bf16", "--json", "-")
                self.assertEqual(result.returncode, 0, result.stderr)
                out = json.loads(result.stdout)
                kv = out["run"]["kv_bytes"]
                self.assertEqual([(r["policy"], r["question_tokens"], r["way"]) for r in out["resume"]],
                                 [(policy, question, way) for policy in ("lsh:k=2%", "lsh:k=16,dense_layers=1")
                                  for question in (5, 40) for way in ("lazy", "eager", "prefill")])
                for at, dense in ((0, 2), (3, 2), (6, 1), (9, 1)):
                    self.check(out, out["resume"][at:at + 3], kv, layers, dense, source is text)

    def check(self, out, results, kv, layers, dense, is_text):
        lazy, eager, prefill = results
        self.assertEqual(out["run"]["document_tokens"], 3968)
        self.assertEqual(kv, 3968 * layers * 2 * 256)
        for way in (lazy, eager):
            self.assertEqual(sum(part["device_bytes"] for part in way["parts"].values()), way["device_bytes"])
            self.assertAlmostEqual(way["share_of_kv"], way["device_bytes"] / kv, 4)
            times = [way[key] for key in ("ms_names", "ms_index", "ms_load", "ms_question")]
            self.assertAlmostEqual(sum(times), way["ms_to_first_token"], delta=way["ms_to_first_token"] / 1e3)
            self.assertEqual(way["parts"]["index"]["operations"], 62)
        self.assertEqual(lazy["parts"]["dense_layers"]["payload_bytes"], kv * dense / layers)
        # A block that is wanted almost whole comes whole, and no part of it is read again.
        few = (lazy["policy"], lazy["question_tokens"]) == ("lsh:k=16,dense_layers=1", 5)
        many = (lazy["policy"], lazy["question_tokens"]) == ("lsh:k=2%", 40)
        pieces, rows = lazy["parts"]["pieces"], lazy["parts"]["rows"]
        if few:
            self.assertLess(pieces["device_bytes"], kv / 10)
            self.assertGreater(rows["device_bytes"], 0)
        if many:
            self.assertGreater(pieces["operations"], 0)
        self.assertLessEqual(pieces["device_bytes"] + rows["device_bytes"], kv * (layers - dense) / layers)
        self.assertEqual(eager["parts"]["dense_layers"]["payload_bytes"] +
                         eager["parts"]["pieces"]["payload_bytes"], kv)
        self.assertEqual(eager["parts"]["rows"]["operations"], 0)
        self.assertEqual(prefill["device_bytes"], 0)
        self.assertEqual(lazy["first_token"], eager["first_token"])
        if is_text:
            self.assertEqual(prefill["first_token"], lazy["first_token"])
        self.assertAlmostEqual(lazy["times_faster_than_prefill"],
                               prefill["ms_to_first_token"] / lazy["ms_to_first_token"], 2)


if __name__ == "__main__":
    main()

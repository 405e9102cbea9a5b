#!/usr/bin/python3
"""The commands that run a model without serving it: eval and bench."""
import gzip
import json
import subprocess
import unittest

from harness import BIN, MODEL, PATIENCE, main, run, temporary_directory

SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
         "vocab_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 0,
         "eos_token_id": 1}


def task(length):
    filler = "The file system is mounted when the kernel starts. " * 8
    return {"id": f"fact-{length}", "task": "fact", "target_tokens": length,
            "intro": "Read the document below and answer the questions that follow.\n",
            "document": filler + "The secret code for river-stone is 7319942. " + filler,
            "questions": [{"question": "What is the secret code for river-stone?",
                           "answer": "The secret code for river-stone is 7319942.", "must_contain": ["7319942"]}]}


class Eval(unittest.TestCase):
    def test_tasks_give_a_table_and_json(self):
        with temporary_directory() as directory:
            tasks, out = directory / "tasks.jsonl.gz", directory / "out.json"
            tasks.write_bytes(gzip.compress("\n".join(json.dumps(task(n)) for n in (512, 1024)).encode()))
            result = run("eval", "--model", MODEL, "--tasks", tasks, "--policy", "dense", "--lengths", "512",
                         "--json", out)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertRegex(result.stdout, r"dense +fact +512 +1 +1\.000 +1\.0000 +1\.000 +1\.000")
            self.assertIn("prompts: chat", result.stderr)
            self.assertIn("100%", result.stderr)
            written = json.loads(out.read_text())
            self.assertEqual(len(written["results"]), 1)
            cell = written["results"][0]
            self.assertEqual([cell[key] for key in ("policy", "task", "length", "n", "exact", "token_acc", "contains",
                                                    "kept", "coverage", "iou")],
                             ["dense", "fact", 512, 1, 1, 1, 1, 1, 1, 1])
            self.assertIsNone(cell["exact_se"])  # of one question
            self.assertIsNone(cell["against_dense"])
            self.assertEqual(written["run"]["prompt"], "chat")

    def test_a_form_of_the_weights_is_compared_with_another(self):
        with temporary_directory() as directory:
            text, wide = directory / "text", directory / "wide.jsonl"
            text.write_text("".join(f"The mount point of volume {i} is a directory. " for i in range(20)))
            def measure(*flags):
                result = run("eval", "--model", MODEL, "--text", text, "--policy", "dense", "--window", "128", "--score-from", "32",
                             "--json", "-", *flags)
                self.assertEqual(result.returncode, 0, result.stderr)
                return json.loads(result.stdout)["text"][0]
            reference = measure("--save-reference", wide)
            self.assertIsNone(reference["against_dense"])
            again = measure("--reference", wide)["against_dense"]
            self.assertEqual((again["percent"], again["top1"]), (0, 1))
            eight, four, floats, both, halves = (measure("--weights", form, "--reference", wide)
                                                 for form in ("int8", "int4", "fp8", "w8a8", "w4a8"))
            for rounded in (eight, four, floats, both, halves):
                self.assertAlmostEqual(rounded["against_dense"]["percent"],
                                       100 * (rounded["perplexity"] / reference["perplexity"] - 1), 2)
            self.assertNotEqual(eight["perplexity"], reference["perplexity"])
            self.assertNotEqual(floats["perplexity"], reference["perplexity"])
            self.assertNotEqual(both["perplexity"], eight["perplexity"])
            self.assertNotEqual(halves["perplexity"], both["perplexity"])
            self.assertGreaterEqual(eight["against_dense"]["top1"], four["against_dense"]["top1"])

    def test_text_gives_perplexity(self):
        with temporary_directory() as directory:
            text = directory / "text"
            text.write_text("".join(f"The mount point of volume {i} is a directory. " for i in range(20)))
            result = run("eval", "--model", MODEL, "--text", text, "--policy", "window:sink=1,window=8", "--policy",
                         "dense", "--window", "128", "--retrieve-from", "32", "--probe-interval", "7", "--json", "-")
            self.assertEqual(result.returncode, 0, result.stderr)
            window, dense = json.loads(result.stdout)["text"]
            self.assertGreater(dense["tokens"], 100)
            self.assertTrue(1 < dense["perplexity"] < 1000, dense)
            self.assertGreater(dense["perplexity_se"], 0)
            pair = window["against_dense"]
            self.assertAlmostEqual(pair["percent"], 100 * (window["perplexity"] / dense["perplexity"] - 1), 2)
            self.assertTrue(0 < pair["top1"] < 1, pair)
            self.assertAlmostEqual(pair["run"], pair["top1"] / (1 - pair["top1"]), 3)
            # One in seven of the queries that retrieve, in four layers of two KV heads.
            self.assertTrue(0.5 < window["probes"] / (dense["tokens"] * 8 / 7) < 1.5, window)
            self.assertIn("±", result.stderr)

    def test_suites_are_made_and_read(self):
        with temporary_directory() as directory:
            out = directory / "out.json"
            result = run("eval", "--model", MODEL, "--suite", "ruler", "--lengths", "1024", "--only",
                         "niah_single_1,vt", "--limit", "2", "--policy", "dense", "--policy", "window", "--json", out)
            self.assertEqual(result.returncode, 0, result.stderr)
            written = json.loads(out.read_text())
            self.assertEqual([(cell["policy"], cell["task"], cell["length"], cell["n"]) for cell in written["results"]],
                             [(policy, task, 1024, n) for policy in ("dense", "window")
                              for task, n in (("niah_single_1", 2), ("vt", 2), ("mean", 4))])
            for cell in written["results"]:
                self.assertTrue(0 <= cell["score"] <= 1, cell)
                self.assertEqual(cell["against_dense"] is None, cell["policy"] == "dense")
            self.assertEqual(written["run"]["seed"], 1)
            lines = directory / "lb.jsonl"
            lines.write_text("".join(json.dumps(
                {"input": "What is the secret code for river-stone?", "context": task(512)["document"] * times,
                 "answers": ["7319942"], "length": 99, "dataset": "passage_count", "language": "en",
                 "all_classes": None, "_id": f"q{times}"}) + "\n" for times in (1, 400)))
            result = run("eval", "--model", MODEL, "--suite", "longbench", "--tasks", lines, "--policy", "dense",
                         "--limit", "1", "--json", out)
            self.assertEqual(result.returncode, 0, result.stderr)
            cells = json.loads(out.read_text())["results"]
            self.assertEqual([(cell["task"], cell["length"], cell["n"]) for cell in cells],
                             [("passage_count", 0, 1), ("mean", 0, 1)])

    def test_an_answer_that_nobody_got_is_no_success(self):
        with open("/dev/full", "w") as full:
            for arguments in (["bench", "kernels", "--filter", "rope", "--seconds", "0.01", "--json", "-"],
                              ["serve", "--model", MODEL, "--print-config"]):
                result = subprocess.run([BIN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
                self.assertEqual(result.returncode, 1, result.stderr)
                self.assertIn("standard output", result.stderr)

    def test_what_is_wrong_is_said(self):
        with temporary_directory() as directory:
            tasks = directory / "tasks.jsonl"
            tasks.write_text(json.dumps(task(512)))
            lines = directory / "lb.jsonl"
            lines.write_text(json.dumps({"dataset": "none"}))
            for code, text, *arguments in (
                    (2, "no artifact", "--tasks", tasks, "--artifact", "none", "--policy", "hata:k=2%"),
                    (2, "did you mean 'dense'?", "--tasks", tasks, "--policy", "dence"),
                    (2, "given twice", "--tasks", tasks, "--policy", "dense", "--policy", "dense"),
                    (2, "No such file", "--tasks", directory / "none", "--policy", "dense"),
                    (2, "no task of the lengths", "--tasks", tasks, "--policy", "dense", "--lengths", "7"),
                    (2, "--tasks", "--policy", "dense"),
                    (2, "no suite", "--suite", "ruler", "--text", tasks, "--policy", "dense"),
                    (2, "needs --lengths", "--suite", "ruler", "--policy", "dense"),
                    (2, "RULER has no task 'vtt'", "--suite", "ruler", "--lengths", "1024", "--only", "vtt", "--policy",
                     "dense"),
                    (2, "is more than the", "--suite", "ruler", "--lengths", "100000000", "--policy", "dense"),
                    (2, "needs its file", "--suite", "longbench", "--policy", "dense"),
                    (2, "is not one of LongBench's", "--suite", "longbench", "--tasks", lines, "--policy", "dense"),
                    (2, "--haystack: is for", "--haystack", tasks, "--tasks", tasks, "--policy", "dense"),
                    (2, "--score-from", "--text", tasks, "--policy", "dense", "--score-from", "100000"),
                    (2, "--policy", "--tasks", tasks),
                    (2, "needs --policy dense", "--text", tasks, "--policy", "window", "--save-reference", directory / "out"),
                    (2, "lb.jsonl:1", "--text", tasks, "--policy", "dense", "--reference", lines),
                    (2, "f16 is for float16", "--tasks", tasks, "--policy", "dense", "--dtype", "f16"),
                    (2, "there is no directory", "--tasks", tasks, "--policy", "dense", "--json", directory / "no/out"),
                    (2, "is a directory", "--tasks", tasks, "--policy", "dense", "--json", directory)):
                result = run("eval", "--model", MODEL, *arguments)
                self.assertEqual(result.returncode, code, result.stderr)
                self.assertIn(text, result.stderr)
            tasks.write_text(json.dumps(task(512)) + "\n{\n")
            result = run("eval", "--model", MODEL, "--tasks", tasks, "--policy", "dense")
            self.assertEqual(result.returncode, 2)
            self.assertIn("tasks.jsonl:2", result.stderr)
            result = run("eval", "--model", directory, "--tasks", tasks, "--policy", "dense")
            self.assertNotEqual(result.returncode, 0)


class Bench(unittest.TestCase):
    def test_decode_gives_shares_of_a_read_loop(self):
        with temporary_directory() as directory:
            shape = directory / "config.json"
            shape.write_text(json.dumps(SHAPE))
            for source in (("--like", shape), ("--model", MODEL)):
                result = run("bench", "decode", *source, "--context", "64,1000", "--batch", "2", "--steps", "2",
                             "--json", "-")
                self.assertEqual(result.returncode, 0, result.stderr)
                rows = json.loads(result.stdout)["decode"]
                self.assertEqual([row["context"] for row in rows], [64, 1000])
                for row in rows:
                    self.assertEqual(row["batch"], 2)
                    self.assertAlmostEqual(row["share_of_read_loop"], row["gb_per_s"] / row["read_loop_gb_per_s"], 3)
                    self.assertLess(row["matmul_ms"] + row["attention_ms"], row["ms_per_step"])
                self.assertGreater(rows[1]["bytes_per_step"], rows[0]["bytes_per_step"])

    def test_a_verification_reads_everything_once_for_all_its_rows(self):
        with temporary_directory() as directory:
            shape = directory / "config.json"
            shape.write_text(json.dumps(SHAPE))
            result = run("bench", "decode", "--like", shape, "--context", "1000", "--rows", "1,5", "--steps", "2", "--json", "-")
            self.assertEqual(result.returncode, 0, result.stderr)
            one, five = json.loads(result.stdout)["decode"]
            self.assertEqual((one["rows"], five["rows"]), (1, 5))
            # Each step's context is longer by its rows, so the mean of few steps differs by some of a thousand tokens.
            self.assertGreater(five["kv_bytes_per_step"], one["kv_bytes_per_step"])
            self.assertLess(five["kv_bytes_per_step"], 1.05 * one["kv_bytes_per_step"])
            for flags, part in ((["--rows", "5", "--policy", "window"], "without --policy"), (["--rows", "66"], "--rows"),
                                (["--rows", "9", "--context", "8"], "more than a context")):
                result = run("bench", "decode", "--like", shape, "--context", "1000", *flags)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(part, result.stderr)

    def test_a_round_is_drafts_and_the_pass_that_verifies_them(self):
        with temporary_directory() as directory:
            shape = directory / "config.json"
            shape.write_text(json.dumps({**SHAPE, "num_hidden_layers": 4}))
            made = {}
            for form in ("none", "int8"):
                policies = ["pca:k=16,window=16,from=0,verify=4", *([] if form == "none" else ["dense:verify=2"])]
                result = run("bench", "verify", "--like", shape, "--contexts", "300,1000", "--batch", "2", "--steps", "2",
                             "--accepted", "1.5", "--draft-weights", form, "--json", "-",
                             *(flag for policy in policies for flag in ("--policy", policy)))
                self.assertEqual(result.returncode, 0, result.stderr)
                report = json.loads(result.stdout)
                made[form] = report["run"]["draft_weight_bytes"]
                self.assertEqual([(row["context"], row["policy"]) for row in report["verify"]],
                                 [(context, policy) for context in (300, 1000) for policy in policies])
                for row in report["verify"]:
                    self.assertEqual(row["drafted"], int(row["policy"][-1]))
                    self.assertAlmostEqual(row["ms_per_round"], row["drafted"] * row["ms_per_draft_step"] +
                                           row["ms_per_verification"], delta=0.01)
                    self.assertAlmostEqual(row["ms_per_token"], row["ms_per_round"] / 2.5, delta=0.01)
            self.assertEqual(made["none"], 0)
            self.assertGreater(made["int8"], 0)
            for text, *flags in (("verify=N", "--policy", "pca:k=16,verify=auto"), ("verify=N", "--policy", "pca:k=16"),
                                 ("--accepted: 1.5 of 1 drafted", "--policy", "pca:k=16,verify=1"),
                                 ("lookup=on", "--policy", "pca:k=16,lookup=on,verify=4"),
                                 ("--draft-weights", "--policy", "dense:verify=4"),
                                 ("fill the shortest", "--policy", "pca:verify=9", "--contexts", "9"),
                                 ("--draft-weights", "--policy", "pca:verify=4", "--draft-weights", "wide")):
                result = run("bench", "verify", "--like", shape, "--contexts", "300", "--accepted", "1.5", *flags)
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(text, result.stderr)

    def test_a_shared_document_lies_in_memory_once(self):
        with temporary_directory() as directory:
            shape = directory / "config.json"
            shape.write_text(json.dumps(SHAPE))
            pools = {}
            for shared in (0, 1000, 5000):  # of 1,000 tokens in 16 blocks of 64, the last of which is each one's own
                result = run("bench", "decode", "--like", shape, "--context", "1000", "--batch", "3", "--steps", "1",
                             "--shared", str(shared), "--policy", "lsh:k=16,from=0,window=16", "--json", "-")
                self.assertEqual(result.returncode, 0, result.stderr)
                report = json.loads(result.stdout)
                self.assertEqual([row["shared_tokens"] for row in report["decode"]], 2 * [min(shared, 960)])
                pools[shared] = report["run"]["kv_pool_bytes"]
            self.assertEqual(pools[5000], pools[1000])
            self.assertEqual(pools[0] * (15 + 3), pools[1000] * 3 * 16)

    def test_prefill_makes_the_indexes_of_policies(self):
        with temporary_directory() as directory:
            shape = directory / "config.json"
            shape.write_text(json.dumps({**SHAPE, "num_hidden_layers": 4}))
            result = run("bench", "prefill", "--like", shape, "--tokens", "300", "--repetitions", "1", "--json", "-",
                         "--policy", "hata:k=16,from=0,window=16", "--policy", "spotlight:k=16,completion=on,from=0,window=16")
            self.assertEqual(result.returncode, 0, result.stderr)
            dense, *rows = json.loads(result.stdout)["prefill"]
            self.assertEqual(dense["index_ms"], 0)
            self.assertEqual(len(rows), 2)
            for row in rows:
                self.assertGreater(row["index_ms"], 0, row["index_of"])

    def test_decode_takes_every_policy(self):
        """Learned ones, too: of a model with its artifact's functions, of a shape alone with random ones."""
        policies = [f"{kind}:k=16,from=0,window=16" for kind in
                    ("oracle", "quest", "lsh", "hata", "spotlight", "hashattention")]
        policies.append("spotlight:k=16,p=0.9,completion=on,from=0,window=16")
        with temporary_directory() as directory:
            shape = directory / "config.json"
            shape.write_text(json.dumps({**SHAPE, "num_hidden_layers": 4}))
            for source in (("--like", shape), ("--model", MODEL)):
                result = run("bench", "decode", *source, "--context", "1000", "--batch", "2", "--steps", "1", "--json",
                             "-",
                             *(flag for policy in policies for flag in ("--policy", policy)))
                self.assertEqual(result.returncode, 0, result.stderr)
                dense, *rows = json.loads(result.stdout)["decode"]
                self.assertEqual(len(rows), len(policies))
                for row in rows:
                    self.assertLess(row["kv_bytes_per_step"], dense["kv_bytes_per_step"], row["policy"])

    def test_what_is_wrong_is_said(self):
        with temporary_directory() as directory:
            shape = directory / "config.json"
            shape.write_text(json.dumps(SHAPE))
            for text, *arguments in (
                    ("artifact: is of a model", "decode", "--like", shape, "--artifact", "none.safetensors"),
                    ("needs learned functions", "decode", "--model", MODEL, "--artifact", "none", "--context", "1000",
                     "--policy", "hata:k=2%"),
                    ("--contexts: 5000 is more than the model's context of 4096", "decode", "--like", shape,
                     "--contexts", "5000"),
                    ("--without: is for --device cuda", "decode", "--like", shape, "--without", "early-start"),
                    ("--tokens: 5000 is more than", "prefill", "--like", shape, "--tokens", "5000"),
                    ("--like,--model", "decode"),
                    ("No such file", "decode", "--like", directory / "none"),
                    ("nothing to run", "kernels", "--filter", "no such kernel")):
                result = run("bench", *arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(text, result.stderr)


if __name__ == "__main__":
    main()

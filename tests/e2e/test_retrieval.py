#!/usr/bin/python3
"""Attention policies as clients see them: answers, usage, refusals; and what a server is told about them."""
import json
import os
import pathlib
import random
import shutil
import unittest

import grpc

from harness import (MODEL, PATIENCE, SEED, Api, Server, counting_request, details_of, inference, main, run,
                     temporary_directory, token_ids)

ARTIFACT = os.path.join(MODEL, "winnow-artifact.safetensors")
TRAINING_FREE = ["window", "oracle:k=2%", "quest:k=64", "lsh:k=5%", "lsh:k=2%,p=0.9", "quest:k=2%,p=0.8"]
LEARNED = ["spotlight:k=2%", "spotlight:k=2%,completion=on", "window:completion=on", "hata:k=2%,p=0.95"]


def document(tokens):
    rng = random.Random(SEED)
    words = "when the server reads a new row of the table it checks every value before the cache is closed".split()
    return " ".join(rng.choice(words) for _ in range(tokens))


class Policies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--probe-interval", 8)
        cls.addClassCleanup(cls.server.close)
        cls.api = Api(cls.server.address)
        cls.prompt = document(1500)
        cls.dense = cls.ask("dense")[1]

    @classmethod
    def ask(cls, policy, tokens=24):
        responses = list(cls.api.generate(counting_request(cls.prompt, tokens, policy=policy), timeout=PATIENCE))
        return token_ids(responses), next(r.finish.usage for r in responses if r.HasField("finish"))

    def check_usage(self, policy, usage, dense):
        with self.subTest(policy=policy):
            read = usage.kv_read_bytes
            self.assertEqual((read.host, read.disk), (0, 0))
            self.assertEqual(usage.kv_dense_bytes, dense.kv_dense_bytes)
            self.assertEqual(usage.dense_rows, dense.dense_rows)
            self.assertLess(read.fast, usage.kv_dense_bytes)
            self.assertEqual(usage.dense_rows - usage.attended_rows,
                             usage.retrieval.candidate_rows - usage.retrieval.selected_rows)
            self.assertEqual(read.fast * usage.dense_rows, usage.kv_dense_bytes * usage.attended_rows)
            self.assertAlmostEqual(usage.retrieval.kept, usage.retrieval.selected_rows / usage.retrieval.candidate_rows)
            self.assertLess(usage.retrieval.kept, 0.2)
            self.assertGreater(usage.retrieval.probes, 0)
            self.assertTrue(0 < usage.retrieval.coverage < 1.0001, usage.retrieval.coverage)
            self.assertTrue(0 <= usage.retrieval.iou <= 1, usage.retrieval.iou)
            completes = "completion=on" in policy
            self.assertEqual(usage.retrieval.tail_estimates > 0, completes)
            self.assertEqual(usage.retrieval.HasField("tail_mass"), completes)

    def test_dense_reads_everything(self):
        self.assertEqual(self.dense.kv_read_bytes.fast, self.dense.kv_dense_bytes)
        self.assertEqual(self.dense.attended_rows, self.dense.dense_rows)
        self.assertEqual(self.dense.retrieval, inference.RetrievalUsage())

    def test_training_free_policies_answer_and_read_less(self):
        for policy in TRAINING_FREE:
            text = policy + ("," if ":" in policy else ":") + "from=0"
            ids, usage = self.ask(text)
            self.assertEqual(len(ids), 24)
            self.assertEqual(ids, self.ask(text)[0])
            self.check_usage(text, usage, self.dense)
            if policy.startswith("oracle"):
                self.assertAlmostEqual(usage.retrieval.iou, 1, places=4)

    def test_learned_policies_of_the_models_artifact(self):
        for policy in LEARNED:
            text = policy + ",from=0"
            self.check_usage(text, self.ask(text)[1], self.dense)

    def test_a_suffix_retrieves_too(self):
        with_suffix = self.ask("lsh:k=2%,suffix=32,from=0")[1]
        without = self.ask("lsh:k=2%,from=0")[1]
        self.assertGreater(with_suffix.retrieval.candidate_rows, without.retrieval.candidate_rows)
        self.assertGreater(with_suffix.kv_dense_bytes, without.kv_dense_bytes)

    def test_below_from_a_policy_is_dense(self):
        ids, usage = self.ask("lsh:k=2%,from=30000")
        self.assertEqual(ids, self.ask("dense")[0])
        self.assertEqual(usage.kv_read_bytes.fast, self.dense.kv_dense_bytes)
        self.assertEqual(usage.retrieval.candidate_rows, 0)

    def test_a_policy_that_chooses_everything_is_dense(self):
        ids, usage = self.ask("lsh:k=100%,from=0")
        self.assertEqual(ids, self.ask("dense")[0])
        self.assertEqual(usage.attended_rows, usage.dense_rows)

    def test_impossible_policies_name_the_option(self):
        for policy, option in (("lsh:bits=64", "lsh:64"), ("spotlight:bits=32", "bits"), ("quest:k=0", "k"),
                               ("hata:dense_layers=0", "dense_layers"), ("lsh:k=2%,k=3", "k"), ("dense:k=3", "k"),
                               ("window:p=0.9", "p"), ("oracle:p=2", "p"), ("spotlite", "spotlight"),
                               ("quest:completion=maybe", "completion")):
            with self.subTest(policy=policy):
                with self.assertRaises(grpc.RpcError) as caught:
                    list(self.api.generate(counting_request("x", 1, policy=policy), timeout=PATIENCE))
                self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                violations = details_of(caught.exception)["BadRequest"].field_violations
                self.assertEqual([v.field for v in violations], ["policy"])
                self.assertIn(option, violations[0].description)

    def test_get_model_tells_what_there_is(self):
        model = self.api.get_model(inference.GetModelRequest())
        self.assertEqual(list(model.policies), ["dense", "window", "oracle", "quest", "lsh", "hata", "spotlight",
                                                "hashattention"])
        retrieval = model.retrieval
        indexes = {index.name: index for index in retrieval.indexes}
        self.assertEqual((indexes["lsh"].bits, indexes["lsh"].learned), (128, False))
        self.assertTrue(indexes["spotlight"].learned)
        self.assertGreater(indexes["spotlight"].bits, 0)
        self.assertTrue(all(index.pool_bytes > 0 for index in indexes.values()))
        self.assertTrue(retrieval.completion)
        self.assertIn("spotlight:", retrieval.artifact)
        self.assertTrue(retrieval.retrieve_from_measured)
        self.assertEqual(retrieval.probe_interval, 8)
        self.assertEqual(self.server.metric("winnow_retrieval_from_tokens"), retrieval.retrieve_from)
        self.assertEqual(self.server.metric('winnow_index_bytes{index="lsh:128"}'), indexes["lsh"].pool_bytes)

    def test_the_command_says_what_was_read(self):
        result = run("generate", "--server", self.server.address, "--prompt-file", "-", "--max-tokens", 8, "--ignore-eos",
                     "--policy", "lsh:k=2%,from=0", input=self.prompt)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, r"^KV read: \d+\.\d % \(\d+ of \d+ bytes\)\n$")
        self.assertLess(float(result.stderr.split()[2]), 60)

    def test_exactness_is_applied_and_told(self):
        def ask(**words):
            responses = list(self.api.generate(counting_request(self.prompt, 24, **words), timeout=PATIENCE))
            return token_ids(responses), responses[-1].finish.usage
        dense = ask(policy="dense")[0]
        ids, usage = ask(policy="window:window=32,from=0", exactness="exact")
        self.assertEqual(ids, dense)
        self.assertEqual((usage.policy, usage.exactness), ("window:window=32,from=0,verify=auto", "exact"))
        # "auto" drafts where that has paid, and as many as pay; a length is what is drafted. One draft reads less than the dense
        # pass that verifies it.
        ids, usage = ask(policy="window:window=32,from=0,verify=1", exactness="exact")
        self.assertEqual(ids, dense)
        self.assertEqual(usage.policy, "window:window=32,from=0,verify=1")
        self.assertGreater(usage.drafts.verified_tokens, 0)
        self.assertGreater(usage.drafts.draft_read_bytes.fast, 0)
        self.assertGreater(usage.drafts.verify_read_bytes.fast, usage.drafts.draft_read_bytes.fast)
        _, usage = ask(policy="lsh:k=1%,window=32,from=0", exactness="floor:1")
        self.assertEqual((usage.policy, usage.exactness), ("lsh:k=1%,window=32,from=0,floor=1", "floor:1"))
        self.assertGreater(usage.retrieval.widened_tokens, 0)
        self.assertEqual(ask(policy="lsh:k=1%,from=0", exactness="fast")[1].exactness, "fast")
        self.assertEqual(ask(exactness="fast")[1].exactness, "exact")  # the server's policy is dense
        for words, field in (({"policy": "lsh:k=1%,verify=8", "exactness": "fast"}, "exactness"),
                             ({"policy": "lsh:k=1%,floor=0.5", "exactness": "exact"}, "exactness"),
                             ({"exactness": "nearly"}, "exactness")):
            with self.assertRaises(grpc.RpcError) as caught:
                ask(**words)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertEqual([v.field for v in details_of(caught.exception)["BadRequest"].field_violations], [field])
        result = run("generate", "--server", self.server.address, "--prompt-file", "-", "--max-tokens", 8, "--ignore-eos",
                     "--policy", "window:from=0", "--exactness", "exact", "--json", input=self.prompt)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(json.loads(result.stdout)["usage"]["exactness"], "exact")
        talk = run("chat", "--server", self.server.address, "--max-tokens", 4, "--policy", "window:from=0",
                   input="/exactness exact\nHello\n")
        self.assertIn("exactness: exact", talk.stderr)
        self.assertIn("window:from=0,verify=auto (exact) read", talk.stderr)

    def test_metrics_follow(self):
        count = lambda: self.server.metric("winnow_retrieval_kept_ratio_count")
        before, rows = count(), self.server.metric("winnow_retrieval_selected_rows_total")
        usage = self.ask("lsh:k=2%,from=0")[1]
        self.assertEqual(count(), before + 1)
        self.assertEqual(self.server.metric("winnow_retrieval_selected_rows_total"), rows + usage.retrieval.selected_rows)


class Configuration(unittest.TestCase):
    def test_server_without_artifact_and_with_one_index(self):
        with Server("--artifact", "none", "--index", "lsh:64", "--retrieval-from", "0", "--probe-interval", "0",
                    "--policy", "lsh:k=3%,bits=64") as server:
            api = Api(server.address)
            model = api.get_model(inference.GetModelRequest())
            self.assertEqual([(i.name, i.bits) for i in model.retrieval.indexes], [("lsh", 64)])
            self.assertEqual(list(model.policies), ["dense", "window", "oracle", "lsh"])
            self.assertEqual((model.retrieval.artifact, model.retrieval.completion), ("", False))
            self.assertEqual((model.retrieval.retrieve_from, model.retrieval.retrieve_from_measured), (0, False))
            responses = list(api.generate(counting_request(document(800), 8), timeout=PATIENCE))
            usage = responses[-1].finish.usage
            self.assertLess(usage.attended_rows, usage.dense_rows)  # the server's policy
            self.assertEqual(usage.retrieval.probes, 0)
            for policy, option in (("spotlight", "artifact"), ("window:completion=on", "completion"),
                                   ("lsh:bits=64,floor=0.5", "floor"), ("lsh:bits=64,p=0.9", "p"), ("quest", "quest")):
                with self.assertRaises(grpc.RpcError) as caught:
                    list(api.generate(counting_request("x", 1, policy=policy), timeout=PATIENCE))
                self.assertIn(option, details_of(caught.exception)["BadRequest"].field_violations[0].description)

    def test_transform_codes_and_the_finer_code_that_re_ranks(self):
        """Without an artifact: pca as it is, and with residual codes where the server keeps them."""
        def ask(server, policy):
            finish = list(Api(server.address).generate(counting_request(document(1500), 24, policy=policy), timeout=PATIENCE))
            return token_ids(finish), finish[-1].finish.usage

        with Server("--artifact", "none", "--index", "pca,residual", "--retrieval-from", "0", "--probe-interval", "1") as server:
            dense, _ = ask(server, "dense")
            usages = {}
            for policy in ("pca:k=2%", "pca:k=2%,rerank=on", "pca:k=2%,rerank=on,min_mass=0.001"):
                ids, usages[policy] = ask(server, policy)
                self.assertEqual(ids, ask(server, policy)[0])
                self.assertGreater(usages[policy].retrieval.tail_estimates, 0)
                self.assertTrue(0 < usages[policy].retrieval.tail_mass < 1, usages[policy].retrieval.tail_mass)
            first, both, least = usages.values()
            self.assertEqual(both.retrieval.candidate_rows, first.retrieval.candidate_rows)
            self.assertEqual(both.retrieval.selected_rows, first.retrieval.selected_rows)
            self.assertLess(least.retrieval.selected_rows, both.retrieval.selected_rows)
            # The second code is there to be nearer to the true choice.
            self.assertGreater(both.retrieval.iou, first.retrieval.iou + 0.05)
            self.assertEqual(ask(server, "pca:k=2%,rerank=on,verify=4")[0], dense)
        with Server("--artifact", "none", "--index", "pca", "--retrieval-from", "0") as server:
            with self.assertRaises(grpc.RpcError) as caught:
                ask(server, "pca:k=2%,rerank=on")
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn("rerank", details_of(caught.exception)["BadRequest"].field_violations[0].description)

    def test_drafts_have_weights_of_their_own(self):
        def ask(server, policy):
            responses = list(Api(server.address).generate(
                counting_request(document(300), 40, policy=policy,
                                 sampling=inference.SamplingOptions(temperature=0.7, seed=5)), timeout=PATIENCE))
            return token_ids(responses), responses[-1].finish.usage
        with Server("--draft-weights", "int4", "--policy", "dense:verify=4") as server:
            dense, _ = ask(server, "dense")
            for policy in ("dense:verify=4", "lsh:k=3%,from=0,verify=4", "dense:lookup=on,verify=4", ""):
                ids, usage = ask(server, policy)
                self.assertEqual(ids, dense, policy)
                self.assertEqual(usage.exactness, "exact")
                self.assertGreater(usage.drafts.verified_tokens, 0, policy)
                self.assertGreater(usage.drafts.accepted_tokens, 0, policy)
        with Server() as server:
            with self.assertRaises(grpc.RpcError) as caught:
                ask(server, "dense:verify=4")
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn("--draft-weights", details_of(caught.exception)["BadRequest"].field_violations[0].description)

    def test_exactness_of_the_server(self):
        with Server("--retrieval-from", "0", "--policy", "lsh:k=3%,floor=0.5", "--exactness", "floor:0.5") as server:
            api = Api(server.address)
            model = api.get_model(inference.GetModelRequest())
            self.assertEqual((model.default_policy, model.default_exactness), ("lsh:k=3%,floor=0.5", "floor:0.5"))
            for words, applied in (({}, "floor:0.5"), ({"exactness": "exact"}, "exact"), ({"policy": "dense"}, "exact"),
                                   ({"policy": "lsh:k=3%"}, "floor:0.5"), ({"exactness": "floor:0.7"}, "floor:0.7")):
                responses = list(api.generate(counting_request(document(300), 2, **words), timeout=PATIENCE))
                self.assertEqual(responses[-1].finish.usage.exactness, applied, words)
            with self.assertRaises(grpc.RpcError) as caught:
                list(api.generate(counting_request("x", 1, policy="lsh:k=3%,verify=4"), timeout=PATIENCE))
            self.assertIn("the exactness is the server's",
                          details_of(caught.exception)["BadRequest"].field_violations[0].description)

    def serve(self, *flags, model=MODEL):
        return run("serve", "--model", model, "--listen", "127.0.0.1:0", "--metrics", "off", "--http", "off", *flags)

    def test_flags_that_cannot_be_honoured_end_the_start(self):
        with temporary_directory() as directory:
            damaged = directory / "damaged.safetensors"
            data = pathlib.Path(ARTIFACT).read_bytes()
            data = data[:len(data) // 2]
            damaged.write_bytes(data)
            for flags, code, part in ((["--artifact", damaged], 78, str(damaged)),
                                      (["--artifact", directory / "none"], 78, "none"),
                                      (["--index", "spotlite"], 2, "spotlite"),
                                      (["--artifact", "none", "--index", "spotlight"], 2, "spotlight"),
                                      (["--retrieval-from", "4k"], 2, "4k"),
                                      (["--exactness", "nearly"], 2, "floor:C"),
                                      (["--exactness", "fast", "--policy", "lsh:verify=8"], 78, "verify"),
                                      (["--exactness", "floor:0.9", "--policy", "lsh", "--probe-interval", "0"], 78, "floor"),
                                      (["--exactness", "exact", "--policy", "lsh", "--step-tokens", "64"], 78, "step-tokens"),
                                      (["--draft-weights", "wide"], 2, "draft-weights"),
                                      (["--draft-weights", "int8", "--weights", "int8"], 2, "draft_weights is int8"),
                                      (["--draft-weights", "stored"], 2, "draft_weights is stored"),
                                      (["--policy", "dense:verify=4"], 78, "--draft-weights"),
                                      (["--artifact", "none", "--policy", "spotlight"], 78, "artifact")):
                with self.subTest(flags=flags):
                    result = self.serve(*flags)
                    self.assertEqual(result.returncode, code, result.stderr)
                    self.assertIn(part, result.stderr)

    def test_an_artifact_of_another_model_is_refused(self):
        with temporary_directory() as directory:
            model = directory / "model"
            shutil.copytree(MODEL, model)
            data = bytearray((model / "model.safetensors").read_bytes())
            data[-1000] ^= 1
            (model / "model.safetensors").write_bytes(data)
            result = self.serve(model=model)
            self.assertEqual(result.returncode, 78, result.stderr)
            self.assertIn("winnow-artifact.safetensors", result.stderr)

    def test_the_crossover_is_measured_once_and_a_damaged_cache_is_told(self):
        with temporary_directory() as directory:
            cache = directory / "crossover.json"
            said = []
            for _ in range(2):
                with Server("--crossover-cache", cache) as server:
                    said.append(next(e for e in server.events() if e["event"] == "retrieval_from"))
            self.assertEqual([e["source"] for e in said], ["measured now", "measured by an earlier start"])
            self.assertEqual(said[0]["tokens"], said[1]["tokens"])
            json.loads(cache.read_text())
            cache.write_text("{")
            with Server("--crossover-cache", cache) as server:
                events = server.events()
            self.assertIn(str(cache), next(e for e in events if e["event"] == "crossover_cache")["message"])
            json.loads(cache.read_text())


if __name__ == "__main__":
    main()

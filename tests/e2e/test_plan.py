"""`winnow plan` against `winnow serve`: servers are started with the options that were planned for, and what they
allocated and read is compared, byte for byte."""
import concurrent.futures
import json
import pathlib
import shutil
import unittest

import harness
from harness import Api, Server, inference

SPEEDS = ("--bandwidth", "fast=40,host=10,disk=0.5")


def plan(*flags, model=harness.MODEL, code=0):
    done = harness.run("plan", "--model", model, "--json", "-", *SPEEDS, *flags)
    if done.returncode != code:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def event(server, name):
    return next(e for e in server.events() if e["event"] == name)


def changed_model(directory, **changes):
    """The test model with another configuration: its output embedding a matrix of its own where that says so, and the
    bits of its values taken for float16, which sizes do not depend on, where that is its type."""
    source = pathlib.Path(harness.MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, directory)
    config = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    file = (source / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(file[:8], "little")
    tensors, values = json.loads(file[8:begin]), file[begin:]
    if not config["tie_word_embeddings"]:
        embedding = tensors["model.embed_tokens.weight"]
        first, last = embedding["data_offsets"]
        tensors["lm_head.weight"] = {**embedding, "data_offsets": [len(values), len(values) + last - first]}
        values += values[first:last]
    if config["torch_dtype"] == "float16":
        tensors = {name: {**tensor, "dtype": "F16"} if "dtype" in tensor else tensor for name, tensor in tensors.items()}
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    return str(directory)


def model_of_experts(directory):
    """Random weights, two of three layers of experts, and the test model's tokenizer."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128, "intermediate_size": 192,
              "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
              "mlp_only_layers": [1], "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
              "vocab_size": 4096, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
              "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    like = pathlib.Path(directory, "like.json")
    like.write_text(json.dumps(config))
    made = harness.run("make-model", "--like", like, "--out", pathlib.Path(directory, "model"), "--tokenizer-from", harness.MODEL)
    if made.returncode != 0:
        raise AssertionError(made.stderr)
    return str(pathlib.Path(directory, "model"))


class Experts(unittest.TestCase):
    def test_a_plan_counts_them_and_its_step_those_that_tokens_go_to(self):
        of_experts = 2 * 8 * 3 * 128 * 64
        with harness.temporary_directory() as directory:
            model = model_of_experts(directory)
            # So small a model is computed in float32.
            for weights, value_bytes in (("wide", 4), ("int8", 34 / 32)):
                flags = ("--weights", weights, "--index", "none", "--max-running", 4)
                all_bytes = plan(*flags, model=model)["memory"]["weight_bytes"]
                with Server(*flags, model=model) as server:
                    # A router of 8 outputs is packed as one of 16.
                    self.assertAlmostEqual(event(server, "sizes")["weight_bytes"], all_bytes, delta=2 * 8 * 128 * 4)
                drafts = (*flags, "--draft-weights", "int4")
                with Server(*drafts, model=model) as server:
                    # Routers, which are the same for drafts, are there once.
                    sizes = event(server, "sizes")
                    self.assertEqual(sizes["draft_weight_bytes"], plan(*drafts, model=model)["memory"]["draft_weight_bytes"])
                    self.assertAlmostEqual(sizes["weight_bytes"], all_bytes, delta=2 * 8 * 128 * 4)
                for batch in (1, 4):
                    unread = of_experts * value_bytes * 0.75 ** batch
                    self.assertAlmostEqual(plan(*flags, "--context", 256, "--batch", batch, model=model)["step"]["weight_bytes"],
                                           all_bytes - unread, delta=1)

    def test_answers_are_the_same_alone_and_among_others(self):
        with harness.temporary_directory() as directory:
            model = model_of_experts(directory)
            with Server("--max-running", 6, "--index", "lsh:128", "--retrieval-from", 0, "--step-tokens", 64, model=model) as server:
                def answer(number):
                    request = inference.GenerateRequest(
                        tokens=inference.TokenPrompt(ids=[11 + (i * (number + 3)) % 997 for i in range(60 + 70 * number)]),
                        policy=("dense", "lsh:k=40,window=16")[number % 2], top_logprobs=1,
                        stopping=inference.StoppingOptions(max_tokens=24, ignore_eos=True))
                    answers = Api(server.address).generate(request, timeout=harness.PATIENCE)
                    return [(token.id, token.logprob) for part in answers for token in part.tokens]
                alone = [answer(number) for number in range(6)]
                self.assertEqual([len(tokens) for tokens in alone], [24] * 6)
                with concurrent.futures.ThreadPoolExecutor(6) as pool:
                    together = list(pool.map(answer, range(6)))
                self.assertEqual(alone, together)


class PlanAndServe(unittest.TestCase):
    def check_sizes(self, *flags):
        planned = plan(*flags)
        with Server(*flags) as server:
            self.compare(planned, server)

    def compare(self, planned, server):
        sizes, retrieval = event(server, "sizes"), event(server, "retrieval")
        memory, kv = planned["memory"], planned["kv"]
        self.assertEqual(memory["kv_pool_bytes"], sizes["kv_pool_bytes"])
        self.assertEqual(memory["row_cache_bytes"], sizes["row_cache_bytes"])
        self.assertEqual(memory["index_bytes"], retrieval["index_bytes"])
        self.assertEqual(memory["summary_bytes"], retrieval["summary_bytes"])
        self.assertEqual(kv["blocks"], sizes["kv_blocks"])
        self.assertEqual(kv["layers"], sizes["kv_layers"])
        self.assertEqual(kv["token_bytes"] * kv["block_tokens"], sizes["kv_block_bytes"])
        self.assertEqual(planned["plan"]["max_context"], sizes["max_context"])
        self.assertEqual((planned["plan"]["dtype"], planned["plan"]["kv_dtype"]), (sizes["dtype"], sizes["kv_dtype"]))
        # What is packed has the output embedding and not the one that is looked up; a step reads it all.
        self.assertEqual(planned["step"]["weight_bytes"], sizes["weight_bytes"])
        described = Api(server.address).get_model(inference.GetModelRequest(), timeout=harness.PATIENCE).retrieval
        self.assertEqual({index["name"]: index["bytes"] for index in memory["indexes"]},
                         {index.name: index.pool_bytes for index in described.indexes})
        for index in memory["indexes"]:
            self.assertEqual(index["bytes"], server.metric(f'winnow_index_bytes{{index="{index["title"]}"}}'))

    def check_reads(self, server, flags, policy, context, model=harness.MODEL):
        """One decode step: the first of two tokens belongs to the prompt."""
        planned = plan(*flags, "--policy", policy, "--context", context, model=model)
        request = inference.GenerateRequest(
            tokens=inference.TokenPrompt(ids=[11 + i % 97 for i in range(context - 1)]), policy=policy,
            stopping=inference.StoppingOptions(max_tokens=2, ignore_eos=True))
        answers = list(Api(server.address).generate(request, timeout=harness.PATIENCE))
        usage = answers[-1].finish.usage
        self.assertEqual(usage.attended_rows, planned["step"]["kv_rows"], policy)
        self.assertEqual(usage.dense_rows, planned["dense_step"]["kv_rows"], policy)
        self.assertEqual(usage.kv_read_bytes.fast, planned["step"]["kv_bytes"]["fast"], policy)
        self.assertEqual(usage.kv_dense_bytes, planned["dense_step"]["kv_bytes"]["fast"], policy)

    def test_sizes_and_reads_with_all_kv_in_memory(self):
        flags = ("--max-context", 4096, "--index", "lsh:128,quest,int4", "--max-running", 3, "--retrieval-from", 0)
        with Server(*flags) as server:
            self.compare(plan(*flags), server)
            self.check_reads(server, flags, "dense", 700)
            self.check_reads(server, flags, "lsh:k=100", 1000)
            self.check_reads(server, flags, "quest:k=5%,sink=4,window=32,dense_layers=1", 900)
            # Nothing to choose from, and shorter than what retrieves.
            self.check_reads(server, flags, "lsh:k=100", 90)
            self.check_reads(server, flags, "lsh:k=10,from=2000", 700)

    def test_sizes_and_reads_of_layers_with_a_window(self):
        flags = ("--max-context", 4096, "--index", "lsh:128,quest,int4", "--max-running", 3, "--retrieval-from", 0)
        with harness.temporary_directory() as directory:
            types = ["full_attention", "sliding_attention"] * 3
            model = changed_model(directory, architectures=["SmolLM3ForCausalLM"], model_type="smollm3", no_rope_layers=[1] * 6,
                                  use_sliding_window=True, sliding_window=300, layer_types=types)
            with Server(*flags, model=model) as server:
                planned = plan(*flags, model=model)
                self.compare(planned, server)
                self.assertIn("window 300, dense", planned["kv"]["layers"])
                self.check_reads(server, flags, "dense", 700, model)
                self.check_reads(server, flags, "dense", 299, model)
                self.check_reads(server, flags, "lsh:k=100", 1000, model)
                self.check_reads(server, flags, "quest:k=5%,sink=4,window=32,dense_layers=1", 900, model)

    def test_sizes_with_the_indexes_of_the_artifact(self):
        self.check_sizes("--max-context", 2048)

    def test_sizes_with_fitted_codes(self):
        self.check_sizes("--max-context", 2048, "--artifact", "none", "--index", "pca:64,lsh:64", "--max-running", 2)

    def test_sizes_with_a_host_tier(self):
        self.check_sizes("--max-context", 2048, "--kv-bytes", "8MiB", "--host-bytes", "64MiB", "--index", "lsh:128", "--max-running", 2)

    def test_sizes_with_a_disk_tier(self):
        with harness.temporary_directory() as store:
            self.check_sizes("--max-context", 4096, "--kv-bytes", "16MiB", "--disk-bytes", "256MiB", "--store-dir", store / "s",
                             "--index", "lsh:128,int4", "--row-cache-bytes", "3MiB", "--max-running", 4)

    def test_a_resume_from_disk_is_counted(self):
        request = inference.GenerateRequest(
            tokens=inference.TokenPrompt(ids=[11 + i % 97 for i in range(2000)]), policy="lsh:k=64,suffix=64",
            stopping=inference.StoppingOptions(max_tokens=4, ignore_eos=True))
        with harness.temporary_directory() as store:
            flags = ("--max-context", 4096, "--kv-bytes", "16MiB", "--disk-bytes", "256MiB", "--store-dir", store / "s",
                     "--index", "lsh:128", "--max-running", 2, "--retrieval-from", 0)
            for resumes in (0, 1):
                with Server(*flags) as server:
                    list(Api(server.address).generate(request, timeout=harness.PATIENCE))
                    self.assertEqual(server.metric("winnow_resume_seconds_count"), resumes)
                    self.assertEqual(server.metric("winnow_resume_bytes_total") > 0, resumes == 1)
                    row_bytes = server.metric("winnow_kv_block_bytes") / 64 / 12  # 6 layers, 2 KV heads
                    self.assertEqual(server.metric('winnow_kv_read_rows_total{tier="disk"}') * row_bytes,
                                     server.metric('winnow_kv_read_bytes_total{tier="disk"}'))
                    self.assertEqual(server.terminate(), 0)

    def test_what_is_not_resident_is_read_from_the_tier_that_has_it(self):
        flags = ("--max-context", 8192, "--kv-bytes", "8MiB", "--max-running", 4, "--index", "lsh:128", "--context", 8192)
        disk = plan(*flags, "--disk-bytes", "1GiB")["dense_step"]["kv_bytes"]
        whole = 8192 * plan(*flags, "--disk-bytes", "1GiB")["kv"]["token_bytes"]
        self.assertEqual(disk["fast"] + disk["disk"], whole)
        self.assertAlmostEqual(disk["fast"], 8 << 20, delta=whole * 0.01)
        host = plan(*flags, "--host-bytes", "128MiB")["dense_step"]["kv_bytes"]
        self.assertEqual((host["host"], host["disk"]), (disk["disk"], 0))
        both = plan(*flags, "--host-bytes", "8MiB", "--disk-bytes", "1GiB")["dense_step"]["kv_bytes"]
        self.assertEqual(both["host"], 8 << 20)
        self.assertEqual(sum(both.values()), whole)
        # Single rows come with their pages, unless the row cache has them.
        step = plan(*flags, "--disk-bytes", "1GiB", "--policy", "lsh:k=64,from=0", "--row-cache-hits", 1)["step"]["kv_bytes"]
        missing = plan(*flags, "--disk-bytes", "1GiB", "--policy", "lsh:k=64,from=0")["step"]["kv_bytes"]
        # Four layers choose; two read whole blocks either way.
        away = 1 - (8 << 20) / whole
        self.assertAlmostEqual(missing["disk"] - step["disk"], 4 * 2 * (64 + 144) * 4096 * away, delta=2)

    def test_a_gpu_is_planned_for_without_one(self):
        shape = harness.SOURCE / "loadtest/shapes/llama-3.1-8b.json"
        done = harness.run("plan", "--like", shape, "--device", "cuda", "--host-bytes", "64GiB", "--policy", "lsh:k=2048",
                           "--context", 131072, "--row-cache-hits", 0.9, "--json", "-")
        self.assertEqual(done.returncode, 0, done.stderr)
        planned = json.loads(done.stdout)
        # LIMITS: 128 KiB of KV and 512 bytes of codes a layer and token; two layers stay on the GPU.
        self.assertEqual(planned["kv"]["token_bytes"], 128 << 10)
        lsh = next(i for i in planned["memory"]["indexes"] if i["title"] == "lsh:128")
        self.assertEqual(lsh["bytes"], planned["kv"]["blocks"] * 64 * 4096)
        rows = 30 * 8 * (2048 + 144)
        self.assertAlmostEqual(planned["step"]["kv_bytes"]["host"], rows * 512 * 0.1, delta=1)
        self.assertAlmostEqual(planned["step"]["kv_bytes"]["fast"], 2 * 8 * 131072 * 512 + rows * 512 * 0.9, delta=1)
        self.assertEqual(planned["dense_step"]["kv_bytes"]["host"], 30 * 8 * 131072 * 512)

    def test_a_gpu_keeps_weights_in_fewer_bits_and_room_to_widen_them(self):
        down = 6 * 704 * 256
        layers, output = 6 * (512 + 256 + 2 * 704) * 256 + down, 4096 * 256
        norms = 13 * 256 * 4
        # Rows of 704 values are no multiple of 128.
        for weights, expected in (("int8", (layers + output) * 17 // 16), ("int4", layers * 5 // 8 + output * 17 // 16),
                                  ("fp8", (layers - down + output) * 33 // 32 + down * 9 // 8),
                                  ("w8a8", (layers - down) * 33 // 32 + down // 704 * 6 * 132 + output * 17 // 16),
                                  ("w4a8", (layers - down) * 17 // 32 + down // 704 * 6 * 68 + output * 17 // 16)):
            with self.subTest(weights):
                planned = plan("--device", "cuda", "--max-context", 2048, "--weights", weights)
                memory = planned["memory"]
                self.assertEqual(memory["weight_bytes"], expected + norms)
                self.assertEqual(planned["step"]["weight_bytes"], expected + norms)
                self.assertEqual(memory["widening_bytes"], 2 * output)  # the largest product's
                self.assertEqual(memory["fast_bytes"], sum(memory[name] for name in (
                    "weight_bytes", "widening_bytes", "kv_pool_bytes", "index_bytes", "summary_bytes", "row_cache_bytes")))
        self.assertEqual(plan("--device", "cuda", "--max-context", 2048)["memory"]["widening_bytes"], 0)
        # On a CPU products read what is stored.
        self.assertEqual(plan("--max-context", 2048, "--weights", "int8")["memory"]["widening_bytes"], 0)

    def test_sizes_of_weights_in_every_form(self):
        for weights in ("wide", "int8", "int4", "fp8", "w8a8", "w4a8"):
            with self.subTest(weights):
                self.check_sizes("--max-context", 2048, "--weights", weights)

    def test_draft_weights_are_counted_beside_the_others(self):
        for form in ("int8", "int4", "fp8"):
            with self.subTest(form):
                flags = ("--max-context", 2048, "--draft-weights", form)
                planned = plan(*flags)
                with Server(*flags) as server:
                    self.compare(planned, server)
                    sizes = event(server, "sizes")
                    self.assertEqual(sizes["draft_weights"], form)
                    self.assertEqual(sizes["draft_weight_bytes"], planned["memory"]["draft_weight_bytes"])
                without = plan("--max-context", 2048)["memory"]
                self.assertEqual(planned["memory"]["fast_bytes"] - without["fast_bytes"], planned["memory"]["draft_weight_bytes"])
        memory = plan("--max-context", 2048, "--device", "cuda", "--draft-weights", "int8")["memory"]
        self.assertEqual(memory["widening_bytes"], 2 * 4096 * 256)

    def test_sizes_of_other_models(self):
        for changes in ({"tie_word_embeddings": False}, {"torch_dtype": "float16"},
                        {"tie_word_embeddings": False, "torch_dtype": "float16"}):
            with harness.temporary_directory() as directory:
                model = changed_model(directory, **changes)
                for weights in ("wide", "int8", "fp8"):
                    with self.subTest(changes=changes, weights=weights):
                        flags = ("--max-context", 2048, "--index", "none", "--weights", weights)
                        planned = plan(*flags, model=model)
                        with Server(*flags, model=model) as server:
                            self.compare(planned, server)

    def test_what_does_not_fit_is_said_and_exits_with_one(self):
        planned = plan("--max-context", 2048, "--index", "none", "--memory", "16MiB", code=1)
        self.assertFalse(planned["memory"]["fits"])
        self.assertTrue(planned["kv"]["fits"])
        planned = plan("--max-context", 2048, "--index", "lsh:128", "--memory", "200MiB")
        self.assertTrue(planned["memory"]["fits"])
        # The largest pool that is said to fit does, and one of a hundredth more does not.
        most = planned["memory"]["kv_bytes_that_fit"]
        self.assertTrue(plan("--max-context", 2048, "--index", "lsh:128", "--memory", "200MiB", "--kv-bytes", most)["memory"]["fits"])
        plan("--max-context", 2048, "--index", "lsh:128", "--memory", "200MiB", "--kv-bytes", int(most * 1.01), code=1)
        self.assertFalse(plan("--max-context", 2048, "--kv-bytes", "6MiB", "--batch", 2, "--context", 2000, code=1)["kv"]["fits"])

    def test_what_serve_refuses_is_refused_in_the_same_words(self):
        for flags, words in [(("--kv-dtype", "f64"), "kv-dtype"), (("--device", "cuda", "--threads", "2"), "threads"),
                             (("--device", "cuda", "--kv-dtype", "f32"), "--device cuda KV is bf16, int8 or fp8"),
                             (("--index", "wavelets"), "wavelets"), (("--policy", "dense:k=3"), "dense"),
                             (("--host-bytes", "1"), "host_bytes"), (("--context", "40000"), "--context"),
                             (("--batch", "65"), "--max-running"), (("--bandwidth", "fast=0"), "--bandwidth"),
                             (("--bandwidth", "fast=1,fast=2"), "--bandwidth"), (("--memory", "lots"), "--memory"),
                             (("--policy", "pca:k=9"), "no index")]:
            done = harness.run("plan", "--model", harness.MODEL, *flags)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))
            self.assertIn(words, done.stderr)
        self.assertEqual(harness.run("plan", "--model", "/nowhere").returncode, 78)
        self.assertEqual(harness.run("plan").returncode, 2)
        self.assertEqual(harness.run("plan", "--like", "a", "--model", "b").returncode, 2)


if __name__ == "__main__":
    harness.main()

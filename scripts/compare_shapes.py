#!/usr/bin/env python3
"""Compares what two ways to compute make of models of well-known shapes: --device cuda with --device cpu, say.

    compare_shapes.py --winnow build/cuda/winnow --left "--device cpu" --right "--device cuda" [--shape NAME ...]

A model of each shape, of a layer or two and with random weights, reads a made-up manual under dense attention and under
policies that choose (`winnow eval --text`). Attention has a part in what it says: under `window` every second likeliest token
is another one than under `dense`. A line a shape says

    dense%   by how much the right perplexity under dense attention is above the left one, in per cent
    top1%    the share of places with the same likeliest token under it
    worst%   the largest such difference of perplexity among the other policies, and of which
    exact    answers under verify= that the right way gives exactly as it does under dense attention, token by token; with
             --draft-weights FORM drafted with such weights, also by dense attention

Exits with 0 where dense% and worst% are at most --percent, top1% is at least --top1 and all answers are exact; with 1 where
some are not, with 2 where something could not be compared.
"""
import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
POLICIES = ["pca:k=5%", "lsh:k=5%", "quest:k=5%", "oracle:k=5%", "window"]
EXACT_POLICIES = ["pca:k=5%,verify=8,dense_layers=0", "lsh:k=5%,verify=3,dense_layers=0"]

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
SMOLLM3, SEED_OSS, GRANITE, PHI3 = "SmolLM3ForCausalLM", "SeedOssForCausalLM", "GraniteForCausalLM", "Phi3ForCausalLM"
MIXTRAL, QWEN3_MOE, GPT_OSS = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"
GLM, ERNIE, MINISTRAL3 = "GlmForCausalLM", "Ernie4_5ForCausalLM", "Ministral3ForCausalLM"
OLMOE, GRANITE_MOE = "OlmoeForCausalLM", "GraniteMoeForCausalLM"
QWEN2_MOE, MINIMAX_M2, GLM4_MOE, ERNIE_MOE = ("Qwen2MoeForCausalLM", "MiniMaxM2ForCausalLM", "Glm4MoeForCausalLM",
                                              "Ernie4_5_MoeForCausalLM")
GLM4, OLMO3, GEMMA3, EXAONE4 = "Glm4ForCausalLM", "Olmo3ForCausalLM", "Gemma3ForCausalLM", "Exaone4ForCausalLM"
MODEL_TYPES = {SEED_OSS: "seed_oss", QWEN3_MOE: "qwen3_moe", ERNIE: "ernie4_5",
               GEMMA3: "gemma3_text", GPT_OSS: "gpt_oss", QWEN2_MOE: "qwen2_moe", MINIMAX_M2: "minimax_m2",
               GLM4_MOE: "glm4_moe", ERNIE_MOE: "ernie4_5_moe"}  # where it is not the family's name
# Family, layers (so that a shape has about 300 million weights at most), hidden and intermediate size, heads, KV heads, head
# dimension, vocabulary (the family's where it is a small part of the weights).
SHAPES = {
    "smollm2-360m": (LLAMA, 2, 960, 2560, 15, 5, 64, 49152),
    "smollm2-1.7b": (LLAMA, 2, 2048, 8192, 32, 32, 64, 49152),
    "tinyllama-1.1b": (LLAMA, 2, 2048, 5632, 32, 4, 64, 32000),
    "llama-3.2-1b": (LLAMA, 2, 2048, 8192, 32, 8, 64, 16384),
    "llama-3.2-3b": (LLAMA, 2, 3072, 8192, 24, 8, 128, 16384),
    "llama-3.1-8b": (LLAMA, 1, 4096, 14336, 32, 8, 128, 16384),
    "llama-3.1-70b": (LLAMA, 1, 8192, 28672, 64, 8, 128, 4096),
    "llama-2-7b": (LLAMA, 1, 4096, 11008, 32, 32, 128, 32000),
    "phi-3-mini": (LLAMA, 2, 3072, 8192, 32, 32, 96, 32064),
    "stablelm-3b": (LLAMA, 2, 2560, 6912, 32, 32, 80, 50304),
    "mistral-nemo-12b": (LLAMA, 1, 5120, 14336, 32, 8, 128, 16384),
    "starcoder-1b": (LLAMA, 2, 2048, 8192, 16, 1, 128, 49152),
    "qwen2.5-0.5b": (QWEN2, 2, 896, 4864, 14, 2, 64, 151936),
    "qwen2.5-1.5b": (QWEN2, 2, 1536, 8960, 12, 2, 128, 65536),
    "qwen2.5-7b": (QWEN2, 1, 3584, 18944, 28, 4, 128, 16384),
    "qwen2.5-14b": (QWEN2, 1, 5120, 13824, 40, 8, 128, 16384),
    "qwen3-0.6b": (QWEN3, 2, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-4b": (QWEN3, 2, 2560, 9728, 32, 8, 128, 16384),
    "smollm3-3b": (SMOLLM3, 4, 2048, 11008, 16, 4, 128, 16384),
    "seed-oss-36b": (SEED_OSS, 1, 5120, 27648, 80, 8, 128, 4096),
    "granite-3.3-2b": (GRANITE, 2, 2048, 8192, 32, 8, 64, 49152),
    "granite-3.3-8b": (GRANITE, 1, 4096, 12800, 32, 8, 128, 16384),
    "phi-4-mini": (PHI3, 2, 3072, 8192, 24, 8, 128, 16384),
    "glm-4-9b": (GLM, 1, 4096, 13696, 32, 2, 128, 16384),
    "ernie-4.5-0.3b": (ERNIE, 2, 1024, 3072, 16, 2, 128, 103424),
    "ministral-3-8b": (MINISTRAL3, 1, 4096, 14336, 32, 8, 128, 16384),
    "glm-4-0414-9b": (GLM4, 1, 4096, 13696, 32, 2, 128, 16384),
    "olmo-3-7b": (OLMO3, 2, 4096, 5504, 32, 32, 128, 8192),  # half as wide
    "gemma-3-27b": (GEMMA3, 2, 5376, 5376, 32, 16, 128, 4096),  # a quarter as wide
    "gemma-3-4b": (GEMMA3, 2, 2560, 10240, 8, 4, 256, 8192),
    "exaone-4-32b": (EXAONE4, 2, 5120, 6848, 40, 8, 128, 4096),  # a quarter as wide
    "mixtral-8x7b": (MIXTRAL, 1, 4096, 3584, 32, 8, 128, 8192),  # a quarter as wide
    "qwen3-30b-a3b": (QWEN3_MOE, 2, 2048, 6144, 32, 4, 128, 16384),
    "gpt-oss-20b": (GPT_OSS, 2, 2880, 2880, 64, 8, 64, 8192),
    "olmoe-1b-7b": (OLMOE, 2, 2048, 1024, 16, 16, 128, 16384),
    "granite-3.1-3b-a800m": (GRANITE_MOE, 2, 1536, 512, 24, 8, 64, 49152),
    "qwen1.5-moe-a2.7b": (QWEN2_MOE, 2, 2048, 5632, 16, 16, 128, 16384),
    "minimax-m2": (MINIMAX_M2, 1, 3072, 1536, 48, 8, 128, 8192),
    "glm-4.5-air": (GLM4_MOE, 2, 4096, 2736, 48, 4, 128, 8192),  # half of the heads; its dense layer is a quarter as wide
    "ernie-4.5-21b-a3b": (ERNIE_MOE, 2, 2560, 3072, 20, 4, 128, 16384),  # its dense layer is a quarter as wide
}
# Keys of a shape beside those of its sizes. Granite's attention_multiplier is larger than the family's, so that attention has a
# part in what random weights say.
MORE_KEYS = {
    "granite-3.3-2b": {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
                       "logits_scaling": 8.0},
    "granite-3.3-8b": {"embedding_multiplier": 12.0, "attention_multiplier": 0.07, "residual_multiplier": 0.22,
                       "logits_scaling": 16.0},
    "phi-4-mini": {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
                   "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
                                    "long_factor": [1.1 * 1.09**pair for pair in range(48)]}},
    # A shorter length than the family's, so that most queries of the text are scaled.
    "ministral-3-8b": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                                           "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0,
                                           "llama_4_scaling_beta": 0.3}},
    # A layer of each type, and a window that is shorter than the families'.
    "olmo-3-7b": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 300},
    "gemma-3-27b": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 300, "query_pre_attn_scalar": 168,
                    "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1000000.0},
    "gemma-3-4b": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 300, "query_pre_attn_scalar": 256,
                   "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1000000.0},
    "exaone-4-32b": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 300, "sliding_window_pattern": "LG"},
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2},
    # Quarters of the experts.
    "gpt-oss-20b": {"num_local_experts": 8, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "attention_bias": True,
                    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 300,
                    "rope_theta": 150000.0,
                    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                     "truncate": False, "original_max_position_embeddings": 256}},
    # Parts of the experts.
    "olmoe-1b-7b": {"num_experts": 16, "num_experts_per_tok": 8},
    "granite-3.1-3b-a800m": {"num_local_experts": 40, "num_experts_per_tok": 8, "embedding_multiplier": 12.0,
                             "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 6.0},
    "qwen1.5-moe-a2.7b": {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                          "shared_expert_intermediate_size": 5632},
    "minimax-m2": {"num_local_experts": 16, "num_experts_per_tok": 8, "rotary_dim": 64},
    "glm-4.5-air": {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "n_shared_experts": 1,
                    "first_k_dense_replace": 1, "attention_bias": True, "routed_scaling_factor": 1.5},
    "ernie-4.5-21b-a3b": {"moe_num_experts": 16, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
    "qwen3-30b-a3b": {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
}


def configuration(name):
    family, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary = SHAPES[name]
    model_type = MODEL_TYPES.get(family, family.removesuffix("ForCausalLM").lower())
    return {"architectures": [family], "model_type": model_type, "hidden_size": hidden,
            "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocabulary, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": hidden < 2560,
            "torch_dtype": "bfloat16", **MORE_KEYS.get(name, {})}


class Failure(Exception):
    """Something could not be compared; the message says what."""


class Comparison:
    """One shape's model, in the folder `work`, which reads `document`."""

    def __init__(self, args, name, document, work):
        self.args = args
        self.document = document
        self.work = work
        self.model = work / name
        like = work / f"{name}.json"
        like.write_text(json.dumps(configuration(name)))
        self.run("make-model", "--like", like, "--out", self.model, "--tokenizer-from", ROOT / "models/needle-5m", "--seed",
                 args.seed)

    def run(self, *words):
        command = [str(word) for word in (self.args.winnow, *words)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            said = " ".join(result.stderr.split())[-500:]
            raise Failure(f"{shlex.join(command)} exited with {result.returncode}: {said}")

    def evaluate(self, way, reference):
        """What `eval` says of dense and the policies, computed this way, by policy."""
        policies = ["dense", *(f"{policy}{',' if ':' in policy else ':'}dense_layers=0" for policy in POLICIES)]
        out = self.work / "eval.json"
        self.run("eval", "--model", self.model, "--text", self.document, "--window", self.args.window, "--limit", 2,
                 "--retrieve-from", self.args.window // 4, "--score-from", 2, "--probe-interval", 0, *reference,
                 *(word for policy in policies for word in ("--policy", policy)), "--json", out, *way)
        return {row["policy"]: row for row in json.loads(out.read_text())["text"]}

    def exact(self, way):
        """(equal, asked) of answers under EXACT_POLICIES."""
        out = self.work / "exact.json"
        drafts, policies = [], EXACT_POLICIES
        if self.args.draft_weights != "none":
            drafts, policies = ["--draft-weights", self.args.draft_weights], [*EXACT_POLICIES, "dense:verify=4"]
        self.run("bench", "exact", "--model", self.model, "--text", self.document, "--requests", 6, "--min-prompt",
                 self.args.window // 4, "--max-prompt", self.args.window, "--max-tokens", 24, "--concurrent", 3, "--json", out,
                 *(word for policy in policies for word in ("--policy", policy)), *drafts, *way)
        rows = [row for row in json.loads(out.read_text())["exact"] if row["policy"] != "dense"]
        return sum(row["equal"] for row in rows), sum(row["requests"] for row in rows)

    def line(self):
        """The shape's measures, and whether they are good."""
        reference = self.work / "reference"
        left = self.evaluate(shlex.split(self.args.left), ["--save-reference", reference])
        right = self.evaluate(shlex.split(self.args.right), ["--reference", reference])
        differences = {policy: 100 * (right[policy]["perplexity"] / row["perplexity"] - 1) for policy, row in left.items()}
        dense = differences.pop("dense")
        top1 = 100 * right["dense"]["against_dense"]["top1"]
        worst = max(differences, key=lambda policy: abs(differences[policy]))
        equal, asked = self.exact(shlex.split(self.args.right))
        good = (abs(dense) <= self.args.percent and abs(differences[worst]) <= self.args.percent and top1 >= self.args.top1 and
                0 < equal == asked)
        return f"{dense:+7.3f} {top1:7.2f} {differences[worst]:+7.3f} {worst.split(':')[0]:7} {equal:4} of {asked}", good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--winnow", required=True, help="the winnow program")
    parser.add_argument("--left", required=True, help="flags of `winnow eval`: --device, --isa, --weights, --kv-dtype")
    parser.add_argument("--right", required=True, help="the other flags, also of `winnow bench exact`")
    parser.add_argument("--draft-weights", default="none", help="of `winnow bench exact`")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="only these")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read at a time, twice")
    parser.add_argument("--seed", type=int, default=1, help="of weights and manual")
    parser.add_argument("--percent", type=float, default=0.5, help="of perplexity that rounding may bridge")
    parser.add_argument("--top1", type=float, default=97.0, help="per cent of likeliest tokens that must be the same")
    args = parser.parse_args()
    code = 0
    print(f"{'shape':18} {'dense%':>7} {'top1%':>7} {'worst%':>15} {'exact':>9}")
    with tempfile.TemporaryDirectory(prefix="winnow-shapes-") as folder:
        top = pathlib.Path(folder)
        subprocess.run([sys.executable, ROOT / "scripts/make_document.py", "--seed", str(args.seed), "--bytes",
                        str(16 * args.window), "--out", top], check=True)
        for name in args.shape or SHAPES:
            # A shape's files go before the next one's come: a model has up to 2 GB.
            with tempfile.TemporaryDirectory(dir=top) as work:
                try:
                    line, good = Comparison(args, name, top / "document.txt", pathlib.Path(work)).line()
                except Failure as failure:
                    line, good = str(failure), False
                    code = 2
            if not good:
                code = max(code, 1)
            print(f"{name:18} {line}{'' if good else '  <- not so'}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Makes tiny random models of every family and option, and what the reference computes from them.

README.md in this folder says what is written. The script also proves that the goldens can fail: it
takes each option away in turn (a bias, a norm, the RoPE scaling, ...) and insists that the logits move
by far more than the tolerance of the test that reads them.
"""

import argparse
import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config, Mistral3Config,
                          PixtralVisionConfig, Qwen3VLConfig, Qwen3VLMoeConfig, SiglipVisionConfig)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding
from transformers.utils import logging

HERE = Path(__file__).resolve().parent

VOCAB = 96
MAX_POSITIONS = 512
LENGTHS = (2, 70, 380)
GREEDY_TOKENS = 16
GREEDY_MARGIN = 1e-2  # the best logit's lead over the second at each greedy step
LOGIT_CHANGE_MIN = 2e-2  # what leaving an option out must change; the tests' tolerance is 1e-3
# Families whose default lies beyond this vocabulary, or is none.
PADDING = {family: {"pad_token_id": 0} for family in ("smollm3", "seed_oss", "granite", "granitemoe", "olmoe", "phi3", "glm", "glm4")}
CORRECTION = "e_score_correction_bias"  # of scores that experts are chosen by
ROUTER_MARGIN = 2e-5  # the lead, in logits, of the last expert that a token goes to over the next


@dataclass
class Case:
    name: str
    what: str
    family: str  # model_type
    dtype: str = "bfloat16"
    config: dict = field(default_factory=dict)
    rope: dict | None = None
    keys: str = "5"  # as which major version of transformers writes config.json
    shard_bytes: int | None = None
    drop: tuple = ()  # keys to leave out of config.json: the reader must know the default
    max_context: int | None = None  # that winnow serves; for LongRoPE, whose factors it decides
    # The text part of a model that reads images, `family` its model_type; how its tensors are called: as by
    # transformers before 4.52 ("old"), or since ("new").
    names: str | None = None
    mxfp4: bool = False  # experts are 4-bit floats with powers of two, as gpt-oss was published


def shape(hidden, heads, kv_heads, head_dim=None, intermediate=40, **more):
    config = dict(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        **more,
    )
    if head_dim is not None:
        config["head_dim"] = head_dim
    return config


def longrope(pairs):
    return dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=128,
                short_factor=[1.0 + 0.02 * j for j in range(pairs)], long_factor=[1.1 + 0.3 * j for j in range(pairs)])


def by_type(full, sliding):
    return dict(full_attention=full, sliding_attention=sliding)


def yarn(**more):
    return dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, **more)


CASES = [
    Case("llama2_mha", "Llama 2: as many KV heads as query heads, derived head_dim 64, float16, transformers 4 keys",
         "llama", "float16", shape(128, 2, 2, intermediate=32, rms_norm_eps=1e-5), keys="4",
         drop=("head_dim", "num_key_value_heads", "rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings")),
    Case("llama_gqa", "Llama: 4 query heads on 2 KV heads, explicit head_dim 64, theta 500000, transformers 4 keys",
         "llama", config=shape(64, 4, 2, 64, rms_norm_eps=1e-5), rope=dict(rope_type="default", rope_theta=500000.0), keys="4"),
    Case("llama3_rope", "Llama 3.1/3.2: RoPE scaling llama3, tied embeddings, transformers 4 keys",
         "llama", config=shape(64, 2, 1, 64, rms_norm_eps=1e-5, tie_word_embeddings=True),
         rope=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64), keys="4"),
    Case("llama3_rope_v5", "the same as transformers 5 writes it (rope_parameters, dtype), untied",
         "llama", config=shape(64, 2, 1, 64, rms_norm_eps=1e-5),
         rope=dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=128)),
    Case("llama_linear", "Llama: RoPE scaling linear (the older key \"type\"), head_dim 80, transformers 4 keys",
         "llama", config=shape(64, 2, 1, 80), rope=dict(rope_type="linear", rope_theta=10000.0, factor=4.0), keys="4-type"),
    Case("llama_yarn", "Llama: RoPE scaling yarn with defaults", "llama", config=shape(64, 2, 1, 64), rope=yarn()),
    Case("llama_yarn_mscale", "Llama: yarn with mscale, mscale_all_dim and truncate false",
         "llama", config=shape(64, 2, 1, 64), rope=yarn(mscale=1.3, mscale_all_dim=0.6, truncate=False)),
    Case("llama_yarn_attention_factor", "Llama: yarn with attention_factor, beta_fast and beta_slow; head_dim 128",
         "llama", config=shape(64, 2, 1, 128, intermediate=32), rope=yarn(attention_factor=0.9, beta_fast=16.0, beta_slow=2.0)),
    Case("llama_attention_bias", "Llama with attention_bias: q, k, v and o; head_dim 96",
         "llama", config=shape(64, 2, 1, 96, attention_bias=True)),
    Case("llama_mlp_bias", "Llama with mlp_bias; float32 weights", "llama", "float32",
         shape(32, 2, 1, 64, intermediate=40, mlp_bias=True)),
    Case("llama_sharded", "Llama in shards with an index", "llama", config=shape(64, 2, 1, 64), shard_bytes=60_000),
    Case("mistral", "Mistral: head_dim 128 where hidden_size / heads is 40, sliding_window null, transformers 4 keys",
         "mistral", config=shape(80, 2, 1, 128, intermediate=32, rms_norm_eps=1e-5, sliding_window=None),
         rope=dict(rope_type="default", rope_theta=1000000.0), keys="4"),
    Case("mistral_yarn", "Mistral with yarn; a sliding window that cannot bite",
         "mistral", config=shape(64, 2, 1, 64, sliding_window=MAX_POSITIONS), rope=yarn()),
    Case("qwen2_tied", "Qwen2: QKV bias without o bias, tied embeddings, use_sliding_window false, transformers 4 keys",
         "qwen2", config=shape(128, 2, 1, intermediate=32, tie_word_embeddings=True, sliding_window=64, max_window_layers=1),
         rope=dict(rope_type="default", rope_theta=1000000.0), keys="4"),
    Case("qwen2_5_yarn", "Qwen2.5: QKV bias, yarn (the older key \"type\"), untied, float16, transformers 4 keys",
         "qwen2", "float16", shape(128, 2, 1, intermediate=32),
         rope=dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=64), keys="4-type"),
    Case("qwen3", "Qwen3: QK norm, head_dim 128 by the family's default, tied embeddings",
         "qwen3", config=shape(64, 2, 1, 128, intermediate=32, tie_word_embeddings=True),
         rope=dict(rope_type="default", rope_theta=1000000.0), keys="4", drop=("head_dim",)),
    Case("qwen3_bias", "Qwen3 with attention_bias (q, k, v and o), QK norm, head_dim 64, linear scaling, untied, float16",
         "qwen3", "float16", shape(64, 4, 2, 64, intermediate=32, attention_bias=True),
         rope=dict(rope_type="linear", rope_theta=1000000.0, factor=2.0)),
    Case("smollm3", "SmolLM3: every fourth layer without RoPE by the family's default, tied by default, transformers 4 keys",
         "smollm3", config=shape(64, 4, 2, 64, intermediate=32, num_hidden_layers=5),
         rope=dict(rope_type="default", rope_theta=2000000.0), keys="4",
         drop=("no_rope_layers", "no_rope_layer_interval", "rope_theta", "tie_word_embeddings")),
    Case("smollm3_listed", "SmolLM3: no_rope_layers names the layers, attention_bias, mlp_bias, yarn, untied",
         "smollm3", config=shape(64, 2, 1, 64, intermediate=32, num_hidden_layers=3, no_rope_layers=[0, 1, 1],
                                 attention_bias=True, mlp_bias=True, tie_word_embeddings=False), rope=yarn()),
    Case("seed_oss", "Seed-OSS: QKV bias and head_dim 128 by the family's defaults, no bias of o",
         "seed_oss", config=shape(64, 2, 1, 128, intermediate=32), rope=dict(rope_type="default", rope_theta=10000000.0),
         drop=("head_dim", "attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings")),
    Case("seed_oss_out_bias", "Seed-OSS: attention_out_bias and mlp_bias without attention_bias, float16",
         "seed_oss", "float16", shape(64, 2, 1, 64, intermediate=32, attention_bias=False, attention_out_bias=True,
                                      mlp_bias=True)),
    Case("granite", "Granite: all four multipliers, tied embeddings, transformers 4 keys",
         "granite", config=shape(128, 2, 1, intermediate=32, rms_norm_eps=1e-5, tie_word_embeddings=True,
                                 embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4,
                                 logits_scaling=2.0),
         rope=dict(rope_type="default", rope_theta=10000000.0), keys="4"),
    Case("granite_defaults", "Granite: attention_multiplier is 1 where it is absent; biases",
         "granite", config=shape(128, 2, 1, intermediate=32, attention_bias=True, mlp_bias=True),
         drop=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")),
    Case("phi3", "Phi-3: fused qkv_proj and gate_up_proj, head_dim 96, a sliding window that cannot bite",
         "phi3", config=shape(192, 2, 1, intermediate=32, sliding_window=MAX_POSITIONS), drop=("rms_norm_eps",)),
    Case("phi3_longrope", "Phi-4-mini: three quarters of a head rotate, longrope's long factors, tied, transformers 4 keys",
         "phi3", config=shape(128, 2, 1, intermediate=32, original_max_position_embeddings=128, tie_word_embeddings=True),
         rope=dict(partial_rotary_factor=0.75, **longrope(24)), keys="4-type", max_context=MAX_POSITIONS),
    Case("phi3_longrope_short", "the same served up to the original length: the short factors, transformers 5 keys",
         "phi3", config=shape(128, 2, 1, intermediate=32, original_max_position_embeddings=128),
         rope=dict(partial_rotary_factor=0.75, **longrope(24)), max_context=128),
    Case("mixtral", "Mixtral: 2 of 4 experts, weights always normalised, transformers 4 keys",
         "mixtral", config=shape(64, 2, 1, 64, intermediate=24, num_local_experts=4),
         rope=dict(rope_type="default", rope_theta=1000000.0), keys="4", drop=("num_experts_per_tok",)),
    Case("qwen3_moe", "Qwen3 MoE: 2 of 8 experts with normalised weights, QK norm, transformers 4 keys",
         "qwen3_moe", config=shape(64, 2, 1, 64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
                                   norm_topk_prob=True),
         rope=dict(rope_type="default", rope_theta=1000000.0), keys="4"),
    Case("qwen3_moe_dense_layer", "Qwen3 MoE: mlp_only_layers, 3 of 8 experts whose weights are not normalised, float32, yarn",
         "qwen3_moe", "float32", shape(32, 2, 1, 64, intermediate=24, num_hidden_layers=3, num_experts=8, num_experts_per_tok=3,
                                       moe_intermediate_size=12, norm_topk_prob=False, mlp_only_layers=[1]), rope=yarn()),
    Case("qwen3_moe_step", "Qwen3 MoE: decoder_sparse_step 2, attention_bias, tied, float16",
         "qwen3_moe", "float16", shape(64, 2, 1, 64, intermediate=24, num_hidden_layers=4, num_experts=5, num_experts_per_tok=2,
                                       moe_intermediate_size=16, norm_topk_prob=True, decoder_sparse_step=2, attention_bias=True,
                                       tie_word_embeddings=True)),
    Case("glm", "GLM-4: neighbouring values rotate together, half of a head by the family's default, fused gate_up_proj, QKV bias",
         "glm", config=shape(64, 2, 1, 128, intermediate=32),
         drop=("head_dim", "attention_bias", "rms_norm_eps", "tie_word_embeddings", "partial_rotary_factor"), keys="4"),
    Case("glm_edge", "GLM-Edge: no biases, three quarters of a head of 64 rotate, tied, float16, transformers 5 keys",
         "glm", "float16", shape(64, 4, 2, 64, intermediate=32, attention_bias=False, tie_word_embeddings=True),
         rope=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)),
    Case("ernie4_5", "ERNIE 4.5: neighbouring values rotate together, head_dim 128 and tied by the family's defaults, transformers 4 keys",
         "ernie4_5", config=shape(64, 2, 1, 128, intermediate=32), keys="4",
         drop=("head_dim", "rope_theta", "use_bias", "tie_word_embeddings", "rms_norm_eps"),
         rope=dict(rope_type="default", rope_theta=500000.0)),
    Case("ernie4_5_bias", "ERNIE 4.5: use_bias, all seven matrices; yarn, untied, float32",
         "ernie4_5", "float32", shape(32, 2, 1, 64, intermediate=24, use_bias=True, tie_word_embeddings=False), rope=yarn()),
    Case("ministral3", "Ministral 3: queries scaled by their position, yarn whose factors cancel, head_dim 128 by the family's default",
         "ministral3", config=shape(64, 2, 1, 128, intermediate=32),
         rope=yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4),
         drop=("head_dim", "rms_norm_eps", "tie_word_embeddings")),
    Case("mistral3_ministral3", "the text part of a model that reads images: Ministral 3, tied, head_dim 64, older names of tensors",
         "ministral3", config=shape(64, 4, 2, 64, intermediate=32, tie_word_embeddings=True),
         rope=yarn(mscale=1.0, mscale_all_dim=0.7, llama_4_scaling_beta=0.3, type="yarn"), names="old"),
    Case("mistral3_mistral", "the same of a Mistral, untied, float16, newer names of tensors, in shards",
         "mistral", "float16", config=shape(64, 2, 1, 64, intermediate=32, sliding_window=None),
         rope=dict(rope_type="default", rope_theta=1000000.0), names="new", shard_bytes=60_000),
    Case("mistral_window", "Mistral: a window of 100 tokens in every layer, transformers 4 keys",
         "mistral", config=shape(64, 4, 2, 64, intermediate=32, sliding_window=100), keys="4"),
    Case("phi3_window", "Phi-3-mini-4k: the same of 65 tokens, head_dim 80",
         "phi3", config=shape(160, 2, 1, intermediate=32, sliding_window=65)),
    Case("qwen2_window", "Qwen2: a window of 40 tokens in the layers from max_window_layers on, without layer_types",
         "qwen2", config=shape(128, 2, 1, intermediate=32, num_hidden_layers=3, use_sliding_window=True, sliding_window=40,
                               max_window_layers=2), drop=("layer_types",)),
    Case("qwen3_window", "Qwen3: a window of 128 tokens in the layers that layer_types names",
         "qwen3", config=shape(64, 2, 1, 64, intermediate=32, num_hidden_layers=3, use_sliding_window=True, sliding_window=128,
                               layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    Case("smollm3_window", "SmolLM3: a window of 64 tokens in the layers without RoPE, without layer_types",
         "smollm3", config=shape(64, 2, 1, 64, intermediate=32, num_hidden_layers=3, no_rope_layer_interval=2,
                                 use_sliding_window=True, sliding_window=64), drop=("layer_types", "no_rope_layers")),
    Case("olmo2", "OLMo 2: norms of what attention and MLP give, Q and K normed as a whole, as many KV heads as query heads",
         "olmo2", config=shape(128, 2, 2, intermediate=32), drop=("num_key_value_heads", "rms_norm_eps")),
    Case("olmo3", "OLMo 3: the same, a window of 90 tokens in all layers but each fourth, which has yarn, transformers 4 keys",
         "olmo3", config=shape(64, 2, 1, intermediate=32, head_dim=64, num_hidden_layers=5, sliding_window=90),
         rope=by_type({**yarn(), "rope_theta": 500000.0}, dict(rope_type="default", rope_theta=500000.0)), keys="4",
         drop=("layer_types",)),
    Case("olmo3_types", "OLMo 3: layer_types, RoPE with other bases by type, attention_bias, transformers 5 keys",
         "olmo3", "float32", shape(32, 2, 1, intermediate=24, head_dim=64, num_hidden_layers=3, sliding_window=70, attention_bias=True,
                                   layer_types=["full_attention", "sliding_attention", "full_attention"]),
         rope=by_type(dict(rope_type="linear", rope_theta=50000.0, factor=2.0), dict(rope_type="default", rope_theta=500.0))),
    Case("gemma3", "Gemma 3: norms around with 1 + w, GELU, scaled embedding, head_dim 256, a window of 50 tokens in all layers but each sixth, "
         "which has linear scaling, transformers 4 keys",
         "gemma3_text", config=shape(32, 2, 1, intermediate=24, num_hidden_layers=7, sliding_window=50, query_pre_attn_scalar=100),
         rope=by_type(dict(rope_type="linear", rope_theta=1000000.0, factor=8.0), dict(rope_type="default", rope_theta=10000.0)),
         keys="4", drop=("layer_types", "head_dim", "hidden_activation", "rms_norm_eps",
                         "tie_word_embeddings", "attention_bias")),
    Case("gemma3_128", "Gemma 3: head_dim 128, layer_types, RoPE by type, untied, float16, transformers 5 keys",
         "gemma3_text", "float16", shape(64, 4, 2, 128, intermediate=32, num_hidden_layers=3, sliding_window=128,
                                         layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                         query_pre_attn_scalar=128, tie_word_embeddings=False),
         rope=by_type(dict(rope_type="default", rope_theta=100000.0), dict(rope_type="default", rope_theta=1000.0))),
    Case("gemma3_whole", "the text part of a Gemma 3 that reads images, older names of tensors",
         "gemma3_text", config=shape(64, 2, 1, 64, intermediate=32, num_hidden_layers=2, sliding_window=70,
                                     layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=64),
         rope=by_type(dict(rope_type="linear", rope_theta=1000000.0, factor=8.0), dict(rope_type="default", rope_theta=10000.0)),
         names="old"),
    Case("glm4", "GLM-4-0414: norms before and after, half of a head rotates, QKV bias, fused gate_up_proj",
         "glm4", config=shape(64, 2, 1, 128, intermediate=32), drop=("head_dim", "rms_norm_eps")),
    Case("exaone4", "EXAONE 4: norms of outputs, each head of Q and K normed, a window of 70 tokens in all layers but each fourth, which does "
         "not rotate; llama3 scaling, transformers 4 keys",
         "exaone4", config=shape(128, 2, 1, intermediate=32, num_hidden_layers=5, sliding_window=70),
         rope=dict(rope_type="llama3", rope_theta=1000000.0, factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64), keys="4", drop=("layer_types", "sliding_window_pattern", "rms_norm_eps")),
    Case("exaone4_full", "EXAONE 4 without windows, as its model of 1.2B: all layers rotate; tied, head_dim 80 given",
         "exaone4", config=shape(64, 2, 1, 80, intermediate=32, sliding_window=None, layer_types=["full_attention"] * 2,
                                 tie_word_embeddings=True)),
    Case("gpt_oss", "gpt-oss: sinks, a window of 50 tokens in the layers that layer_types names, 3 of 5 experts with biases and a clamped "
         "gate of another alpha and limit, no biases of attention, yarn without truncate, transformers 5 keys",
         "gpt_oss", config=shape(64, 4, 2, 64, intermediate=24, num_hidden_layers=3, num_local_experts=5, num_experts_per_tok=3,
                                 sliding_window=50, layer_types=["full_attention", "sliding_attention", "full_attention"],
                                 attention_bias=False, swiglu_alpha=1.1, swiglu_limit=0.8), rope=yarn(truncate=False)),
    Case("gpt_oss_mxfp4", "gpt-oss as it was published: experts in MXFP4, biases of attention, windows in every other layer by the family's "
         "default, transformers 4 keys",
         "gpt_oss", config=shape(64, 2, 1, 64, intermediate=32, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2,
                                 sliding_window=70), rope=dict(yarn(truncate=False), rope_theta=150000.0), keys="4",
         drop=("layer_types", "head_dim", "rms_norm_eps", "swiglu_alpha", "attention_bias"), mxfp4=True),
    Case("gpt_oss_defaults", "gpt-oss: sizes, window, gate and yarn by the family's defaults, float32",
         "gpt_oss", "float32", config=shape(32, 4, 1, 64, intermediate=16, num_local_experts=5, num_experts_per_tok=4,
                                            num_hidden_layers=4, sliding_window=128),
         rope=dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                   original_max_position_embeddings=4096),
         drop=("layer_types", "head_dim", "rms_norm_eps", "swiglu_alpha", "swiglu_limit", "attention_bias", "sliding_window",
               "rope_parameters", "num_experts_per_tok", "tie_word_embeddings")),
    Case("qwen3_vl", "the text part of a Qwen3-VL: QK norm, positions of images in turn, tied",
         "qwen3_vl_text", config=shape(64, 4, 2, 64, intermediate=32, tie_word_embeddings=True),
         rope=dict(rope_type="default", rope_theta=5000000.0, mrope_section=[12, 10, 10], mrope_interleaved=True), names="new"),
    Case("qwen3_vl_moe", "the same with experts, 3 of 5, whose gates and ups are halves of one tensor, and a dense layer",
         "qwen3_vl_moe_text", config=shape(64, 2, 1, 64, intermediate=48, num_hidden_layers=3, num_experts=5, num_experts_per_tok=3,
                                           moe_intermediate_size=24, mlp_only_layers=[1], tie_word_embeddings=False),
         rope=dict(rope_type="default", rope_theta=5000000.0, mrope_section=[12, 10, 10], mrope_interleaved=True), names="new"),
    Case("olmoe", "OLMoE: 8 of 12 experts by the family's default, weights not normalised, all heads of Q normed together, transformers 4 keys",
         "olmoe", config=shape(128, 2, 1, intermediate=12, num_experts=12), keys="4",
         drop=("num_experts_per_tok", "norm_topk_prob", "rms_norm_eps")),
    Case("olmoe_normalized", "OLMoE: norm_topk_prob, attention_bias, tied, float16",
         "olmoe", "float16", shape(128, 2, 2, intermediate=16, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
                                   attention_bias=True, tie_word_embeddings=True)),
    Case("granitemoe", "Granite MoE: 3 of 6 experts in one tensor with outputs as rows, all four multipliers, tied, transformers 4 keys",
         "granitemoe", config=shape(128, 2, 1, intermediate=24, tie_word_embeddings=True, num_local_experts=6, num_experts_per_tok=3,
                                    embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=2.0),
         rope=dict(rope_type="default", rope_theta=10000000.0), keys="4"),
    Case("granitemoe_defaults", "Granite MoE: 2 of 8 experts and multipliers of 1 where they are absent; attention_bias, float32",
         "granitemoe", "float32", shape(128, 2, 1, intermediate=12, attention_bias=True),
         drop=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "num_local_experts",
               "num_experts_per_tok")),
    Case("qwen2_moe", "Qwen2 MoE: 2 of 6 experts, not normalised, beside a shared one of another size with its gate, one dense layer, transformers 4 keys",
         "qwen2_moe", config=shape(128, 2, 1, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
                                   shared_expert_intermediate_size=20, mlp_only_layers=[0]),
         keys="4", drop=("qkv_bias", "layer_types")),
    Case("qwen2_moe_normalized", "Qwen2 MoE: norm_topk_prob, no biases, every second layer dense, tied, float16",
         "qwen2_moe", "float16", shape(128, 2, 2, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=12,
                                       shared_expert_intermediate_size=8, decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False,
                                       tie_word_embeddings=True)),
    Case("minimax_m2", "MiniMax-M2: 3 of 8 experts by sigmoids and a correction, half of each head rotated (rotary_dim), transformers 4 keys",
         "minimax_m2", config=shape(128, 2, 1, 64, 12, num_local_experts=8, num_experts_per_tok=3),
         rope=dict(rope_type="default", rope_theta=50000.0, partial_rotary_factor=0.5), keys="4"),
    Case("minimax_m2_whole", "MiniMax-M2: 8 of 256 experts by the family's default, heads rotated whole, head_dim 128",
         "minimax_m2", config=shape(16, 2, 1, intermediate=4),
         drop=("num_local_experts", "num_experts_per_tok", "head_dim")),
    Case("glm4_moe", "GLM-4.5: one dense layer, then 3 of 8 experts by sigmoids and a correction, scaled, beside a shared one; qk_norm, attention_bias, transformers 4 keys, a layer that predicts further tokens",
         "glm4_moe", config=shape(128, 2, 1, 64, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
                                  routed_scaling_factor=2.5, attention_bias=True, use_qk_norm=True),
         rope=dict(rope_type="default", rope_theta=1000000.0, partial_rotary_factor=0.5), keys="4",
         drop=("first_k_dense_replace", "n_shared_experts", "norm_topk_prob", "partial_rotary_factor")),
    Case("glm4_moe_plain", "GLM-4.5: experts in all layers, two shared ones, weights not normalised, no qk_norm, no biases, two shards",
         "glm4_moe", config=shape(64, 4, 2, 64, first_k_dense_replace=0, n_routed_experts=5, num_experts_per_tok=2,
                                  moe_intermediate_size=12, n_shared_experts=2, norm_topk_prob=False),
         rope=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5), shard_bytes=100_000),
    Case("ernie4_5_moe", "ERNIE 4.5 MoE: 2 of 6 experts by corrected softmax, two shared ones, one dense layer, tied, transformers 4 keys",
         "ernie4_5_moe", config=shape(128, 2, 1, moe_num_experts=6, moe_k=2, moe_intermediate_size=12,
                                      tie_word_embeddings=True),
         rope=dict(rope_type="default", rope_theta=500000.0), keys="4",
         drop=("moe_layer_start_index", "moe_layer_end_index", "moe_num_shared_experts", "head_dim")),
    Case("ernie4_5_moe_range", "ERNIE 4.5 MoE: experts in layers 1 and 3 of 5, none shared, not tied",
         "ernie4_5_moe", config=shape(64, 1, 1, num_hidden_layers=5, moe_num_experts=4, moe_k=3, moe_intermediate_size=12,
                                          moe_num_shared_experts=0, moe_layer_start_index=1, moe_layer_end_index=3,
                                          moe_layer_interval=2, tie_word_embeddings=False)),
    Case("dots1", "dots.llm1: one dense layer, then 2 of 6 experts by sigmoids and a correction, normalised and scaled, two shared, windows but in the first layer, transformers 4 keys",
         "dots1", config=shape(128, 2, 1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
                               n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.5,
                               sliding_window=10, max_window_layers=1),
         keys="4", drop=("layer_types",)),
    Case("dots1_plain", "dots.llm1: weights not normalised, attention_bias, no window by the family's default",
         "dots1", config=shape(128, 2, 2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1,
                               attention_bias=True, tie_word_embeddings=True),
         drop=("max_window_layers", "sliding_window", "layer_types", "norm_topk_prob", "first_k_dense_replace")),
]


def plain_norm(model):
    """The weight of a norm that leaves what it norms as it is."""
    return 0.0 if "gemma" in model.config.model_type else 1.0


def randomise(model, seed):
    """Every tensor random; scaled so that logits spread over a few units and attention is selective."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda tensor, std, mean=0.0: tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                normal(tensor, 0.25, plain_norm(model))
            elif name.endswith((".bias", "_bias")):
                normal(tensor, 3.0 if name.endswith("gate_up_proj_bias") else 0.3)  # some beyond the gate's limit, which is 7
            elif name.endswith(".sinks"):
                normal(tensor, 2.0, 4.0)  # from a small part of attention to most of it
            elif "embed_tokens" in name:
                normal(tensor, 0.3 if tied else 1.0)
            elif "lm_head" in name:
                normal(tensor, 2.0 * tensor.shape[1] ** -0.5)
            else:
                gain = 1.4 if any(kind in name for kind in ("q_proj", "k_proj", "qkv_proj")) else 1.0
                gain *= 2.0 if ".experts." in name or name.endswith(("mlp.gate.weight", "mlp.router.weight", "expert_gate.weight")) else 1.0
                normal(tensor, gain * tensor.shape[-1] ** -0.5)
        for name, tensor in model.named_buffers():
            if name.endswith(CORRECTION):
                normal(tensor, 0.3)


def older_keys(config, style):
    """config.json as transformers 4 wrote it."""
    rope = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if config["model_type"] in ("olmo3", "gemma3_text"):
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if config["model_type"] in ("phi3", "glm", "glm4_moe"):
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "minimax_m2":
        config["rotary_dim"] = round(config["head_dim"] * rope.pop("partial_rotary_factor"))
        config["scoring_func"], config["attn_type_list"] = "sigmoid", [1] * config["num_hidden_layers"]
    if config["model_type"] == "dots1":
        config["scoring_func"] = "noaux_tc"
    if config["model_type"] == "phi3":
        config["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    kind = rope.pop("rope_type")
    if kind == "default":
        config["rope_scaling"] = None
    else:
        config["rope_scaling"] = {"type" if style == "4-type" else "rope_type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.46.0"
    if config["model_type"] in ("qwen3_moe", "olmoe") and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"] in ("qwen2", "qwen3"):
        config.pop("layer_types")
        if config["model_type"] == "qwen2" or not config["use_sliding_window"]:
            config["use_sliding_window"] = False
            config["sliding_window"] = 64
    return config


def rename(name, names):
    """What a tensor of a model that reads images is called, as Case.names says."""
    part = name.removeprefix("model.")
    if part.startswith(("vision_tower.", "multi_modal_projector.", "visual.")):
        return part if names == "old" else f"model.{part}"
    text = part.removeprefix("language_model.").removeprefix("model.")
    is_head = text.startswith("lm_head.")
    if names == "old":
        return f"language_model.{text}" if is_head else f"language_model.model.{text}"
    return text if is_head else f"model.language_model.{text}"


def rename_tensors(folder, names):
    for path in folder.glob("*.safetensors"):
        save_file({rename(name, names): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    for path in folder.glob("*.index.json"):
        index = json.loads(path.read_text())
        index["weight_map"] = {rename(name, names): file for name, file in index["weight_map"].items()}
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


# E2M1: the magnitudes of codes 0 to 7; code 8 and more are negative.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
MXFP4_VALUES = 32  # of a scale


def to_mxfp4(weight):
    """Blocks [...][n / 32][16] and scales [...][n / 32] of rows [...][n]: the scale makes the largest value one of 4 to 8."""
    groups = weight.float().unflatten(-1, (-1, MXFP4_VALUES))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    codes = (groups[..., None] * 2.0 ** -exponents[..., None, None] - E2M1).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def from_mxfp4(blocks, scales):
    """The rows of to_mxfp4."""
    values = torch.stack((E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]), -1).flatten(-2)
    return (values * 2.0 ** (scales.float()[..., None] - 127)).flatten(-2)


def write_mxfp4(folder):
    """Rewrites the experts' matrices, which transformers has with outputs as columns, and says so in config.json."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor.transpose(-1, -2).contiguous())
        else:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_mxfp4(folder, config):
    """The model with experts as they are in the file, widened."""
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        of = name.removesuffix("_blocks")
        tensors[of] = from_mxfp4(tensors.pop(name), tensors.pop(f"{of}_scales")).transpose(-1, -2)
    model.load_state_dict(tensors)
    return model.eval()


def write_prediction_layer(folder):
    """Adds tensors of a layer behind the last one, as GLM-4.5's files have them."""
    path = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    tensors, behind = load_file(path), f"model.layers.{config['num_hidden_layers']}"
    tensors[f"{behind}.enorm.weight"] = torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    tensors[f"{behind}.self_attn.q_proj.weight"] = torch.zeros(2, config["hidden_size"], dtype=torch.bfloat16)
    save_file(tensors, path, {"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_transposed(folder):
    """Rewrites the experts' matrices as they were published, with outputs as columns."""
    path = folder / "model.safetensors"
    save_file({name: tensor.transpose(-1, -2).contiguous() if ".experts." in name else tensor
               for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def with_images(text):
    """The configuration of a whole of which `text` is a part."""
    if text.model_type == "gemma3_text":
        vision = SiglipVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                    image_size=4, patch_size=2)
        return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    if text.model_type.startswith("qwen3_vl"):
        vision = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=2, spatial_merge_size=1,
                      out_hidden_size=text.hidden_size, num_position_embeddings=4, deepstack_visual_indexes=[0])
        kind = Qwen3VLConfig if text.model_type == "qwen3_vl_text" else Qwen3VLMoeConfig
        return kind(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=text.tie_word_embeddings)
    vision = PixtralVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8,
                                 image_size=4, patch_size=2)
    return Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=text.tie_word_embeddings)


def text_of(model):
    """The layers, norms and embedding, without the part that reads images."""
    return getattr(model.model, "language_model", model.model)


def write_model(case, seed, folder):
    rope = dict(case.rope or dict(rope_type="default", rope_theta=10000.0))
    config = AutoConfig.for_model(
        case.family, vocab_size=VOCAB, max_position_embeddings=MAX_POSITIONS, rope_parameters=rope, bos_token_id=1,
        eos_token_id=2, **{"num_hidden_layers": 2, **PADDING.get(case.family, {}), **case.config})
    if case.names:
        model = AutoModelForImageTextToText.from_config(with_images(config), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model = model.to(getattr(torch, case.dtype))
    model.generation_config.eos_token_id = [2, 3]
    more = {"max_shard_size": case.shard_bytes} if case.shard_bytes else {}
    model.save_pretrained(folder, **more)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if case.keys != "5":
        config = older_keys(config, case.keys)
    for key in case.drop:
        config.pop(key, None)
    if case.names:
        rename_tensors(folder, case.names)
        if not config["model_type"].startswith("qwen3_vl"):
            config.pop("tie_word_embeddings", None)  # the text part's counts
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if case.mxfp4:
        write_mxfp4(folder)
    if case.family == "qwen3_vl_moe_text":
        write_transposed(folder)
    if case.name == "glm4_moe":
        write_prediction_layer(folder)


def load(folder, max_context=None):
    """The model in float32. LongRoPE's factors are those of contexts up to max_context, for short sequences, too."""
    config = AutoConfig.from_pretrained(folder)
    is_text_part = config.model_type in ("mistral3", "gemma3", "qwen3_vl", "qwen3_vl_moe")
    rope = (config.text_config if is_text_part else config).rope_parameters
    if max_context is not None and max_context > rope["original_max_position_embeddings"]:
        rope["short_factor"] = rope["long_factor"]
    if getattr(config, "quantization_config", None) is not None:
        return load_mxfp4(folder, config)
    kind = AutoModelForImageTextToText if is_text_part else AutoModelForCausalLM
    return kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def chosen_by(router, inputs, logits):
    """What a router takes the largest of."""
    if type(router).__name__.startswith("Ernie"):
        return router.moe_statics(logits.softmax(-1))
    if len(inputs) > 1:  # MiniMax's is told of the correction
        return logits.sigmoid() + inputs[1]
    return logits.sigmoid() + getattr(router, CORRECTION) if hasattr(router, CORRECTION) else logits


def router_lead(model, ids):
    """How close a token comes to going to another expert."""
    leads = [math.inf]

    def note(module, inputs, output):
        best = torch.topk(chosen_by(module, inputs, output[0]), min(module.top_k + 1, module.num_experts)).values
        if best.shape[-1] > module.top_k:
            leads.append((best[:, -2] - best[:, -1]).min().item())
    hooks = [module.register_forward_hook(note) for module in routers_of(model)]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return min(leads)


def run_sequence(model, ids):
    """The golden of one sequence, or None where greedy decoding or the choice of experts would hang on rounding."""
    logits = logits_of(model, ids)
    if router_lead(model, ids) < ROUTER_MARGIN:
        return None
    nll = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])).item()
    last = logits[-1].tolist()
    greedy = []
    for _ in range(GREEDY_TOKENS):
        best = torch.topk(logits_of(model, ids + greedy)[-1], 2)
        if best.values[0] - best.values[1] < GREEDY_MARGIN:
            return None
        greedy.append(best.indices[0].item())
    return {"input_ids": ids, "last_logits": last, "mean_nll": nll, "greedy_ids": greedy}


def knockouts(model):
    """Names of what the model has, each with a function that takes it away."""
    parameters = dict(text_of(model).named_parameters(prefix="model"))
    kinds = sorted({name.split(".", 3)[-1] if ".layers." in name else name for name in parameters})
    for kind in kinds:
        members = [tensor for name, tensor in parameters.items() if name.endswith(kind)]
        if kind.endswith((".bias", "_bias")):
            yield kind, lambda members=members: [tensor.zero_() for tensor in members]
        elif kind.endswith(".sinks"):
            yield kind, lambda members=members: [tensor.fill_(-1e4) for tensor in members]
        elif "norm" in kind:
            yield kind, lambda members=members: [tensor.fill_(plain_norm(model)) for tensor in members]
    rotary = text_of(model).rotary_emb
    by_type = isinstance(rotary.rope_type, dict)  # one set for each type of layers
    if by_type:
        def swap():
            for name in ("inv_freq", "attention_scaling"):
                full, sliding = (getattr(rotary, f"{kind}_attention_{name}") for kind in ("full", "sliding"))
                setattr(rotary, f"full_attention_{name}", sliding)
                setattr(rotary, f"sliding_attention_{name}", full)
        yield "which layers rotate how", swap
    elif rotary.rope_type != "default":
        def plain():
            inv_freq, _ = rotary.compute_default_rope_parameters(rotary.config)
            rotary.inv_freq.copy_(inv_freq)
            rotary.original_inv_freq, rotary.long_inv_freq = inv_freq, inv_freq
        yield "rope frequencies", plain
    if getattr(rotary.config, "sliding_window", None) and rotary.config.sliding_window < MAX_POSITIONS:
        # The last logits see one token less through each layer with a window.
        for name, change in (("windows", MAX_POSITIONS), ("the last token of windows", -1)):
            yield name, lambda change=change: setattr(rotary.config, "sliding_window", rotary.config.sliding_window + change)
    if "llama_4_scaling_beta" in rotary.config.rope_parameters:
        yield "scaled queries", lambda: rotary.config.rope_parameters.update(llama_4_scaling_beta=0.0)
    layers = text_of(model).layers
    if any(not getattr(layer.self_attn, "use_rope", True) for layer in layers):
        yield "layers without rope", lambda: [setattr(layer.self_attn, "use_rope", 1) for layer in layers]
    if model.config.model_type in ("granite", "granitemoe"):
        half = 0.5  # of what it is
        for name, owners, attribute in (
                ("embedding_multiplier", [model.model], "embedding_multiplier"),
                ("residual_multiplier", layers, "residual_multiplier"),
                ("attention_multiplier", [layer.self_attn for layer in layers], "scaling"),
                ("logits_scaling", [model.config], "logits_scaling")):
            yield name, lambda owners=owners, attribute=attribute: [
                setattr(owner, attribute, half * getattr(owner, attribute)) for owner in owners]
    routers = routers_of(model)
    corrections = [tensor for name, tensor in model.named_buffers() if name.endswith(CORRECTION)]
    if corrections:
        yield "corrections", lambda: [tensor.zero_() for tensor in corrections]
    shared = [getattr(layer.mlp, name) for layer in layers for name in ("shared_expert", "shared_experts")
              if getattr(layer.mlp, name, None) is not None]
    if shared:
        yield "shared experts", lambda: [expert.down_proj.weight.zero_() for expert in shared]
    gates = [layer.mlp.shared_expert_gate for layer in layers if hasattr(layer.mlp, "shared_expert_gate")]
    if gates:
        yield "gates of shared experts", lambda: [gate.weight.zero_() for gate in gates]
    if any(getattr(router, "routed_scaling_factor", 1.0) != 1.0 for router in routers):
        yield "the scale of weights", lambda: [setattr(router, "routed_scaling_factor", 1.0) for router in routers]
    if routers:
        yield "routers", lambda: [router.weight.copy_(-router.weight) for router in routers]
        yield "half of what experts give", lambda: [module.down_proj.mul_(0.5) for module in model.modules() if type(module).__name__.endswith("Experts")]
        yield "the last slot", lambda: [setattr(router, "top_k", router.top_k - 1) for router in routers]
    if model.config.model_type == "gpt_oss":
        for name, value in (("limit", 1e4), ("alpha", 0.5 * layers[0].mlp.experts.alpha)):
            yield f"the gate's {name}", lambda name=name, value=value: [setattr(layer.mlp.experts, name, value) for layer in layers]
    if any(hasattr(router, "norm_topk_prob") for router in routers):
        yield "whether weights are normalised", lambda: [
            setattr(router, "norm_topk_prob", not router.norm_topk_prob) for router in routers]
    if not by_type and rotary.attention_scaling != 1.0:
        yield "rope attention factor", lambda: setattr(rotary, "attention_scaling", 1.0)


def prove_sensitivity(folder, max_context, ids, expected):
    for name in [name for name, _ in knockouts(load(folder, max_context))]:
        model = load(folder, max_context)
        with torch.no_grad():
            dict(knockouts(model))[name]()
        change = (logits_of(model, ids)[-1] - torch.tensor(expected)).abs().max().item()
        print(f"    without {name}: logits move by {change:.3f}")
        assert change > LOGIT_CHANGE_MIN, (folder.name, name, change)


def rope_of(rotary):
    """How layers rotate that see all tokens."""
    of_type = "full_attention_" if isinstance(rotary.rope_type, dict) else ""
    return {"inv_freq": getattr(rotary, f"{of_type}inv_freq").tolist(),
            "attention_factor": getattr(rotary, f"{of_type}attention_scaling")}


def make_case(case, seed):
    print(f"{case.name}: {case.what}", flush=True)
    folder = HERE / case.name
    if folder.exists():
        shutil.rmtree(folder)
    write_model(case, seed, folder)
    model = load(folder, case.max_context)
    generator = torch.Generator().manual_seed(seed + 1)
    sequences = []
    for length in LENGTHS:
        if case.max_context is not None:
            length = min(length, case.max_context - GREEDY_TOKENS)
        sequence = None
        while sequence is None:
            sequence = run_sequence(model, torch.randint(0, VOCAB, (length,), generator=generator).tolist())
        sequences.append(sequence)
    prove_sensitivity(folder, case.max_context, sequences[-1]["input_ids"], sequences[-1]["last_logits"])
    rotary = text_of(model).rotary_emb
    golden = {
        "name": case.name,
        "what": case.what,
        "rope": rope_of(rotary),
        "sequences": sequences,
    }
    if case.max_context is not None:
        golden["max_context"] = case.max_context
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


# ---- RoPE frequencies alone, at the shapes of public models and at odd ones ----

ROPE_TABLE = [
    # head_dim, max_position_embeddings, rope parameters
    (64, 2048, dict(rope_type="default", rope_theta=10000.0)),
    (80, 4096, dict(rope_type="default", rope_theta=10000.0)),
    (96, 4096, dict(rope_type="default", rope_theta=25000.5)),
    (128, 8192, dict(rope_type="default", rope_theta=500000.0)),
    (128, 32768, dict(rope_type="default", rope_theta=1000000.0)),
    (128, 1010000, dict(rope_type="default", rope_theta=10000000.0)),
    (128, 4096, dict(rope_type="linear", rope_theta=10000.0, factor=2.5)),
    (80, 16384, dict(rope_type="linear", rope_theta=10000.0, factor=8)),
    (128, 131072, dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                       original_max_position_embeddings=8192)),
    (64, 131072, dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192)),
    (96, 65536, dict(rope_type="llama3", rope_theta=123456.7, factor=3.3, low_freq_factor=0.7, high_freq_factor=9.1,
                     original_max_position_embeddings=3000)),
    (128, 131072, dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=32768)),
    (64, 131072, dict(rope_type="yarn", rope_theta=10000.0, factor=32.0, original_max_position_embeddings=4096,
                      beta_fast=32, beta_slow=1, truncate=False)),
    (64, 163840, dict(rope_type="yarn", rope_theta=10000.0, factor=40, original_max_position_embeddings=4096, beta_fast=32,
                      beta_slow=1, mscale=1.0, mscale_all_dim=1.0)),
    (96, 8192, dict(rope_type="yarn", rope_theta=10000.0, factor=1.7, original_max_position_embeddings=2048, mscale=0.707,
                    mscale_all_dim=0.3)),
    (80, 8192, dict(rope_type="yarn", rope_theta=50000.0, factor=16.0, original_max_position_embeddings=512,
                    attention_factor=1.25, beta_fast=20.5, beta_slow=0.5)),
    (128, 65536, dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, original_max_position_embeddings=4096, mscale=0.8)),
    (128, 1024, dict(rope_type="yarn", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=4, beta_fast=32,
                     beta_slow=1)),
    (128, 1024, dict(rope_type="yarn", rope_theta=10000.0, factor=1.0, original_max_position_embeddings=1024)),
    (96, 131072, dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=4096,
                      short_factor=[1.0 + 0.01 * j for j in range(48)], long_factor=[1.07 * 1.09**j for j in range(48)])),
    (64, 8192, dict(rope_type="longrope", rope_theta=500000.0, original_max_position_embeddings=8192,
                    short_factor=[1.0 + 0.3 * j for j in range(32)], long_factor=[2.0] * 32)),
    (80, 16384, dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=4096, factor=8.0,
                     attention_factor=0.875, short_factor=[1.0] * 40, long_factor=[1.0 + 0.7 * j for j in range(40)])),
]


def make_rope_table():
    table = []
    for head_dim, max_positions, rope in ROPE_TABLE:
        config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim,
                             max_position_embeddings=max_positions, rope_parameters=dict(rope))
        compute = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
        longest = {"seq_len": max_positions} if rope["rope_type"] == "longrope" else {}
        inv_freq, attention_factor = compute(config, **longest)
        table.append({"head_dim": head_dim, "max_position_embeddings": max_positions, "rope_parameters": rope,
                      "inv_freq": inv_freq.tolist(), "attention_factor": attention_factor})
    (HERE / "rope.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in table) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="make these cases, with commas between them")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make_rope_table()
    for index, case in enumerate(CASES):
        if arguments.only is None or case.name in arguments.only.split(","):
            make_case(case, 1000 + 10 * index)
    (HERE / "cases.json").write_text(json.dumps({"cases": [case.name for case in CASES]}, indent=1) + "\n")
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"{len(CASES)} cases, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

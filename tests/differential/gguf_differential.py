#!/usr/bin/env python3
"""Compares how winnow reads GGUF files with the PyPI package `gguf` and with transformers.

    pip install gguf==0.19.0 numpy            # and for the others: torch transformers==5.23.0 accelerate
    cmake --build ../../build/release --target winnow_model_tool
    ./gguf_differential.py types --tool ../../build/release/winnow_model_tool --files 20
    ./gguf_differential.py families --tool ../../build/release/winnow_model_tool
    ./gguf_differential.py model --tool ../../build/release/winnow_model_tool FILE.gguf

`types` writes files with random blocks of every type and compares all values, bit for bit (no number is equal to no number).
`families` writes the models of ../golden/families that GGUF files can hold as llama.cpp's converter does, and compares the
logits that winnow computes from file and directory with each other and with those of transformers, which are in the goldens.
`model` converts FILE.gguf to a Hugging Face directory with transformers, and compares greedy tokens and logits of 50 prompts:
of winnow from the file, of winnow from the directory, and of transformers. It prints every difference with its gap in
log-probability. Exits with 1 if values differ, or tokens do where transformers' lead was more than --lead.
"""
import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]


def dequantize(kind, data):
    with np.errstate(all="ignore"):
        return gguf.dequantize(data, kind).astype(np.float32).reshape(-1)


def random_tensor(name, generator):
    """(data as the writer takes them, kind); half of them as the package quantises noise, where it can"""
    kind = Type[name]
    values, size = GGML_QUANT_SIZES[kind]
    rows, blocks = int(generator.integers(1, 20)), int(generator.integers(1, 30))
    if generator.random() < 0.5:
        noise = (generator.standard_normal((rows, blocks * values)) * 10.0 ** generator.integers(-6, 5)).astype(np.float32)
        try:
            return gguf.quantize(noise, kind), kind
        except NotImplementedError:
            pass  # the package reads these types only
    data = generator.integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    if name == "F32":
        data = data.view(np.float32)
    if name == "F16":
        data = data.view(np.float16)
    return data, kind


def compare_types(tool, files, seed):
    values = different = 0
    for number in range(files):
        generator = np.random.default_rng([seed, number])
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "random.gguf")
            writer = gguf.GGUFWriter(path, "llama")
            tensors = [random_tensor(name, generator) for name in TYPES]
            generator.shuffle(tensors)
            for i, (data, kind) in enumerate(tensors):
                writer.add_tensor(f"t{i}", data, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            subprocess.run([tool, "tensors", path, folder], check=True)
            for i, tensor in enumerate(gguf.GGUFReader(path).tensors):
                expected = dequantize(tensor.tensor_type, tensor.data)
                got = np.fromfile(os.path.join(folder, f"{i}.f32"), dtype=np.float32)
                same = got.shape == expected.shape and np.where(
                    np.isnan(expected), np.isnan(got), got.view(np.uint32) == expected.view(np.uint32))
                values += expected.size
                if not np.all(same):
                    different += int(expected.size - np.sum(same))
                    print(f"file {number}, seed {seed}: {tensor.name} of type {tensor.tensor_type.name} differs")
    print(f"{files} files with {len(TYPES)} types: {values} values, {different} different")
    return different == 0


FAMILIES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "families")
INTERLEAVED = ("llama", "smollm3", "granite", "granitemoe", "mixtral", "ministral3")  # their writer puts values of Q and K that rotate together side by side
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{shared}.{matrix}_proj": f"ffn_{matrix}_shexp" for shared in ("shared_expert", "shared_experts")
       for matrix in ("gate", "up", "down")}}
# Norms that are others than in most families, or have other names there.
OTHER_NORMS = {
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4_moe": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    **{family: {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm"}
       for family in ("olmo2", "olmo3", "gemma3_text", "exaone4")}}
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "ministral3": "mistral3",
                 "olmo3": "olmo2", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "qwen2_moe": "qwen2moe",
                 "minimax_m2": "minimax-m2", "glm4_moe": "glm4moe", "ernie4_5_moe": "ernie4_5-moe"}  # where it is not the model_type
EXPERT_NAMES = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps", "gate_proj": "ffn_gate_exps",
                "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "minimax_m2", "glm4_moe", "dots1",
                   "ernie4_5_moe")
OTHER_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
               "lm_head.weight": "output.weight"}


def gguf_name(name, family):
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    if rest == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    if rest.endswith("e_score_correction_bias"):
        return f"blk.{layer}.exp_probs_b.bias"
    base, suffix = rest.rsplit(".", 1)
    if base in OTHER_NORMS.get(family, ()):
        return f"blk.{layer}.{OTHER_NORMS[family][base]}.{suffix}"
    return f"blk.{layer}.{LAYER_NAMES[base]}.{suffix}"


def interleave(tensor, heads):
    rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return rows.swapaxes(1, 2).reshape(tensor.shape)


def token_texts(config):
    """No text is read, but a model without a tokenizer does not load."""
    return ["a", "b", "ab"] + [f"t{i}" for i in range(3, config.vocab_size)]


def rope_of(config):
    """How layers rotate that see all tokens."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def mxfp4_blocks(blocks, scales):
    """GGUF's blocks of a safetensors file's: the scale, then values i and i + 16 in a byte, where neighbours are there."""
    codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate((scales[..., None], packed), -1).reshape(*blocks.shape[:-2], -1)


def add_stacked_experts(writer, name, tensors):
    """A layer's gpt-oss experts of one matrix, or their biases; gates and ups lie in turn."""
    _, _, layer, _, _, matrix = name.split(".")
    suffix = "bias" if matrix.endswith("_bias") else "weight"
    matrix = matrix.removesuffix("_blocks").removesuffix("_bias")
    kind = None
    if name.endswith("_blocks"):
        values, kind = mxfp4_blocks(tensors[name].numpy(), tensors[name.replace("_blocks", "_scales")].numpy()), Type.MXFP4
    else:
        values = tensors[name].float().numpy()
        values = values if suffix == "bias" else values.swapaxes(1, 2)
    parts = {"ffn_gate_exps": values[:, 0::2], "ffn_up_exps": values[:, 1::2]} if matrix == "gate_up_proj" else {"ffn_down_exps": values}
    for part, of_part in parts.items():
        writer.add_tensor(f"blk.{layer}.{part}.{suffix}", np.ascontiguousarray(of_part), raw_dtype=kind)


def write_family(directory, config, path):
    """The model of a directory as a GGUF file in float32, with `config` as transformers resolves it."""
    from safetensors.torch import load_file
    family, rope = config.model_type, rope_of(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(family, family))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if family in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in EXPERT_FAMILIES:
        writer.add_expert_count(config.num_experts if family in ("ernie4_5_moe", "qwen2_moe") else config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if family in ("minimax_m2", "glm4_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family in ("glm4_moe", "dots1"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if family == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if family == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if family == "gemma3_text":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if family in ("olmo3", "gemma3_text") or family == "exaone4" and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(token_texts(config))
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    experts = {}  # the matrices of a layer's experts, by the name of the tensor that has them all
    tensors = load_file(os.path.join(directory, "model.safetensors"))
    for name, tensor in tensors.items():
        if name.endswith(("input_linear.weight", "output_linear.weight")):  # Granite MoE's, each of all experts
            layer, halves = name.split(".")[2], np.split(tensor.float().numpy(), 2, axis=1)
            parts = ({"ffn_gate_exps": halves[0], "ffn_up_exps": halves[1]} if "input_linear" in name
                     else {"ffn_down_exps": tensor.float().numpy()})
            for part, of_part in parts.items():
                writer.add_tensor(f"blk.{layer}.{part}.weight", np.ascontiguousarray(of_part))
            continue
        if family == "gpt_oss" and ".experts." in name:
            if not name.endswith("_scales"):
                add_stacked_experts(writer, name, tensors)
            continue
        if name.startswith(f"model.layers.{config.num_hidden_layers}."):
            continue  # predicts further tokens
        values = tensor.float().numpy()
        if name.endswith("e_score_correction_bias"):
            values = values.reshape(-1)
        if family == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1  # as their writer has them
        if ".experts." in name:
            _, _, layer, _, _, number, matrix, _ = name.split(".")
            experts.setdefault(f"blk.{layer}.{EXPERT_NAMES[matrix]}.weight", {})[int(number)] = values
            continue
        if family in INTERLEAVED and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        if family in INTERLEAVED and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name, family), np.ascontiguousarray(values))
    for name, matrices in experts.items():
        writer.add_tensor(name, np.stack([matrices[i] for i in range(len(matrices))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Windows that llama.cpp's files of these families do not have, or not in these layers, what divides Gemma's logits, where it is not
# that of a published model, and the limit of gpt-oss's gates, where it is another.
NOT_IN_GGUF = ("qwen2_window", "qwen3_window", "smollm3_window", "dots1", "gemma3", "gpt_oss")


def has_gguf_experts(config):
    """Whether every layer has experts with weights as llama.cpp computes the family's, or there are none."""
    if config.model_type == "olmoe":
        return not config.norm_topk_prob
    if config.model_type == "qwen2_moe":
        return not config.norm_topk_prob and config.decoder_sparse_step == 1 and not config.mlp_only_layers
    if config.model_type == "ernie4_5_moe":
        return config.moe_layer_end_index == config.num_hidden_layers - 1
    if config.model_type != "qwen3_moe":
        return True
    return config.norm_topk_prob and config.decoder_sparse_step == 1 and not config.mlp_only_layers


def compare_families(tool):
    """Whether all logits are within 1e-3 of the goldens' and those of file and directory are the same."""
    from transformers import AutoConfig
    good = True
    with open(os.path.join(FAMILIES, "cases.json")) as file:
        cases = json.load(file)["cases"]
    for case in cases:
        source = os.path.join(FAMILIES, case)
        config = AutoConfig.from_pretrained(source)
        if config.model_type in ("mistral3", "gemma3", "qwen3_vl", "qwen3_vl_moe"):
            continue  # the text part's tensors have other names, and their file is that of a text model
        kind = rope_of(config)["rope_type"]
        # llama.cpp's files say less of yarn than config.json does, and have one base for all layers.
        kinds = ("yarn",) if config.model_type in ("ministral3", "olmo3", "gpt_oss") else ("default", "linear", "longrope", "llama3")
        every_fourth = [int((i + 1) % 4 != 0) for i in range(config.num_hidden_layers)]
        if (not os.path.exists(os.path.join(source, "model.safetensors")) or kind not in kinds
                or config.model_type in ("mistral", "glm") or case in NOT_IN_GGUF or not has_gguf_experts(config) or getattr(config, "no_rope_layers", every_fourth) != every_fourth):
            continue
        with open(os.path.join(source, "golden.json")) as file:
            golden = json.load(file)
        context = str(golden.get("max_context", config.max_position_embeddings))
        with tempfile.TemporaryDirectory() as folder:
            path, directory = os.path.join(folder, "m.gguf"), os.path.join(folder, "m")
            write_family(source, config, path)
            shutil.copytree(source, directory)
            with open(os.path.join(directory, "tokenizer.json"), "w") as file:
                vocab = {text: i for i, text in enumerate(token_texts(config))}
                json.dump({"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
                           "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                             "use_regex": True},
                           "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]}}, file)
            prompts = [sequence["input_ids"] for sequence in golden["sequences"]]
            of_file = run_tool(tool, path, "f32", 16, prompts, context)
            of_directory = run_tool(tool, directory, "f32", 16, prompts, context)
        worst = between = 0.0
        for ours, theirs, sequence in zip(of_file, of_directory, golden["sequences"]):
            worst = max(worst, float(np.abs(np.array(ours["logits"]) - sequence["last_logits"]).max()))
            between = max(between, float(np.abs(np.array(ours["logits"]) - theirs["logits"]).max()))
            good &= ours["greedy"] == sequence["greedy_ids"]
        print(f"{case}: logits differ by at most {worst:.6f} from transformers', {between:.6f} from the directory's")
        good &= worst < 1e-3 and between < 1e-4
    return good


WORDS = ("the of and a to in is it that was for on are with as his they at be this have from or had by word but what some we can "
         "out other were all there when up use your how said an each she which do their time if will way about many then them "
         "Paris river 1984 3.14 def return class import while { } ( ) Zürich 漢字 😀 \n\n").split(" ")


def make_prompts(count, seed, vocab_size):
    source = random.Random(seed)
    texts = [" ".join(source.choice(WORDS) for _ in range(source.randint(1, 60))) for _ in range(count)]
    return texts


def run_tool(tool, model, dtype, tokens, prompts, *context):
    lines = "\n".join(" ".join(map(str, ids)) for ids in prompts) + "\n"
    result = subprocess.run([tool, "greedy", model, dtype, str(tokens), *context], input=lines, capture_output=True,
                            text=True)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    if len(answers) != len(prompts):
        sys.exit(f"{tool} gave {len(answers)} answers to {len(prompts)} prompts: {result.stderr}")
    return answers


def log_probabilities(logits):
    logits = np.asarray(logits, dtype=np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def compare_answers(what, ours, theirs, lead_max):
    """Prints differences; whether all that there are can be rounding."""
    good, parted, worst, mean = True, 0, 0.0, 0.0
    for number, (a, b) in enumerate(zip(ours, theirs)):
        difference = np.abs(np.asarray(a["logits"]) - np.asarray(b["logits"]))
        worst, mean = max(worst, float(difference.max())), mean + float(difference.mean()) / len(ours)
        for at, (x, y) in enumerate(zip(a["greedy"], b["greedy"])):
            if x != y:
                gap = b["leads"][at]
                parted += 1
                good &= gap <= lead_max
                print(f"  {what}: prompt {number} parts at token {at}: {x} for {y}, whose log-probability led by {gap:.5f}")
                break
    print(f"{what}: {len(ours) - parted} of {len(ours)} prompts have equal greedy tokens; logits differ by at most {worst:.5f}, "
          f"{mean:.6f} on average")
    return good


def save_directory(model, tokenizer, directory):
    """What save_pretrained writes; it refuses to write a model that was read from a GGUF file."""
    from safetensors.torch import save_file
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config, file)
    tensors = {name: values.detach().contiguous().clone() for name, values in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, os.path.join(directory, "model.safetensors"))
    tokenizer.save_pretrained(directory)


def compare_model(tool, path, count, tokens, seed, lead_max):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder, name = os.path.split(os.path.abspath(path))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    prompts = [tokenizer(text).input_ids for text in make_prompts(count, seed, len(tokenizer))]

    @torch.no_grad()
    def continue_greedily(ids):
        out = model(torch.tensor([ids]), use_cache=True)
        first, greedy, leads = out.logits[0, -1].tolist(), [], []
        while True:
            best = out.logits[0, -1].topk(2)
            greedy.append(best.indices[0].item())
            leads.append((best.values[0] - best.values[1]).item())
            if len(greedy) == tokens:
                return {"greedy": greedy, "leads": leads, "logits": first}
            out = model(torch.tensor([greedy[-1:]]), past_key_values=out.past_key_values, use_cache=True)

    reference = [continue_greedily(ids) for ids in prompts]
    good = True
    with tempfile.TemporaryDirectory() as directory:
        save_directory(model, tokenizer, directory)
        for dtype in ("f32", "bf16"):
            of_file = run_tool(tool, path, dtype, tokens, prompts)
            of_directory = run_tool(tool, directory, dtype, tokens, prompts)
            good &= compare_answers(f"{dtype}: the file and the directory", of_file, of_directory, 0)
            good &= compare_answers(f"{dtype}: the file and transformers in float32", of_file, reference,
                                    lead_max if dtype == "f32" else 0.5)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["types", "families", "model"])
    parser.add_argument("model", nargs="?", help="a GGUF file")
    parser.add_argument("--tool", required=True, help="winnow_model_tool")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--lead", type=float, default=1e-3)
    flags = parser.parse_intermixed_args()
    print(f"seed {flags.seed}")
    if flags.what == "types":
        good = compare_types(flags.tool, flags.files, flags.seed)
    elif flags.what == "families":
        good = compare_families(flags.tool)
    else:
        good = compare_model(flags.tool, flags.model, flags.prompts, flags.tokens, flags.seed, flags.lead)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

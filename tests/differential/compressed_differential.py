#!/usr/bin/env python3
"""Compares how winnow reads quantised model directories with the PyPI package that writes them, `compressed-tensors`.

    pip install compressed-tensors==0.20.0 safetensors          # brings torch and transformers
    cmake --build ../../build/release --target winnow_model_tool
    ./compressed_differential.py --tool ../../build/release/winnow_model_tool --models 5

Makes Llama and Mixtral models of random shapes, quantises their matrices in each way that winnow reads (FP8 with a scale for a matrix, an
output or a block; 4-bit groups, with zero points and without; 8-bit integers with a scale for a matrix, an output or a group, plain and
packed), and has the package compress and write them. What the package
decompresses and what winnow widens must be the same numbers: bit for bit where the model is float32, else after rounding to its
type. Exits with 1 if one differs.
"""
import argparse
import json
import pathlib
import random
import sys
import tempfile

import torch
import widened_matrices
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus,
                                             apply_quantization_config)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import LlamaConfig, LlamaForCausalLM

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
EXPERTS = 3
ALL, HALVES = [torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16, torch.float16]
# Arguments of the weights, whether activations are quantised like them, and the models' types.
FORMS = {
    "fp8, a scale for a matrix": ({**FLOAT8, "strategy": "tensor"}, True, ALL),
    "fp8, a scale for an output": ({**FLOAT8, "strategy": "channel"}, True, ALL),
    "fp8, a scale for 128 x 128": ({**FLOAT8, "strategy": "block", "block_structure": [128, 128]}, True, ALL[:2]),
    "int4, groups of 128": ({**INT4, "strategy": "group", "group_size": 128}, False, HALVES),
    "int4, groups of 32 with zero points": ({**INT4, "symmetric": False, "strategy": "group", "group_size": 32}, False, HALVES),
    "int4, a scale for an output": ({**INT4, "strategy": "channel"}, False, HALVES),
    "int8, a scale for a matrix": ({**INT8, "strategy": "tensor"}, True, HALVES),
    "int8, a scale for an output": ({**INT8, "strategy": "channel"}, True, HALVES),
    "int8, packed, a scale for an output": ({**INT8, "strategy": "channel"}, False, HALVES),
    "int8, packed, groups of 32": ({**INT8, "strategy": "group", "group_size": 32}, False, HALVES),
}


def make_model(source, dtype):
    heads = 2 * source.randint(1, 2)  # of 64 values: rows of o_proj, too, are whole groups of 128
    config = LlamaConfig(hidden_size=128 * source.randint(1, 3), intermediate_size=128 * source.randint(1, 4), num_hidden_layers=1,
                         num_attention_heads=heads, num_key_value_heads=source.choice([1, 2]), head_dim=source.choice([64, 128]),
                         vocab_size=128, max_position_embeddings=256, tie_word_embeddings=False)
    torch.manual_seed(source.randrange(1 << 32))
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape) * 10 ** source.uniform(-3, 1))
    return model


def put_experts(model, source):
    """Makes it a Mixtral, as files have one: with a matrix for each expert."""
    config = model.config
    width = 128 * source.randint(1, 2)

    def linear(rows, cols):
        made = torch.nn.Linear(cols, rows, bias=False, dtype=model.dtype)
        with torch.no_grad():
            made.weight.copy_(torch.randn(rows, cols) * 10 ** source.uniform(-3, 1))
        return made

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = linear(EXPERTS, config.hidden_size)
            self.experts = torch.nn.ModuleList(torch.nn.ModuleDict({
                "w1": linear(width, config.hidden_size), "w2": linear(config.hidden_size, width),
                "w3": linear(width, config.hidden_size)}) for _ in range(EXPERTS))
    for layer in model.model.layers:
        del layer.mlp
        layer.block_sparse_moe = Mlp()
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2, "intermediate_size": width}


def ranges(weight, arguments):
    """Smallest and largest values of what shares a scale."""
    rows, cols = weight.shape
    strategy = arguments["strategy"]
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "group":
        groups = weight.reshape(rows, cols // arguments["group_size"], -1)
        return groups.amin(2), groups.amax(2)
    high, wide = arguments["block_structure"]
    blocks = [[weight[i:i + high, j:j + wide] for j in range(0, cols, wide)] for i in range(0, rows, high)]
    return (torch.stack([torch.stack([block.min() for block in line]) for line in blocks]),
            torch.stack([torch.stack([block.max() for block in line]) for line in blocks]))


def quantise(model, arguments, with_activations):
    weights = QuantizationArgs(**arguments)
    of_inputs = {name: arguments[name] for name in ("num_bits", "type", "symmetric")}
    inputs = QuantizationArgs(**of_inputs, strategy="token", dynamic=True) if with_activations else None
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*block_sparse_moe.gate$"],
                                quantization_status=QuantizationStatus.INITIALIZED)
    apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        scale, zero = calculate_qparams(*ranges(module.weight.data, arguments), weights)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape).to(module.weight_zero_point.dtype)


def compare(tool, name, arguments, with_activations, dtype, source):
    """(values compared, values that differ)"""
    model = make_model(source, dtype)
    keys = put_experts(model, source) if source.random() < 0.5 else {}
    quantise(model, arguments, with_activations)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        compressor.update_config(directory)
        path = pathlib.Path(directory, "config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
        compressor.decompress_model(model)
        matrices = [(tensor, values) for tensor, values in model.state_dict().items()
                    if values.ndim == 2 and tensor.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))]
        return widened_matrices.compare(tool, f"{name}, {dtype}", directory, matrices)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, help="winnow_model_tool")
    parser.add_argument("--models", type=int, default=5, help="of each form and type")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    flags = parser.parse_args()
    print(f"seed {flags.seed}")
    source = random.Random(flags.seed)
    bad = 0
    for name, (arguments, with_activations, dtypes) in FORMS.items():
        for dtype in dtypes:
            results = [compare(flags.tool, name, arguments, with_activations, dtype, source) for _ in range(flags.models)]
            values, different = (sum(column) for column in zip(*results))
            bad += different + (values == 0)
            print(f"{name}, {str(dtype).removeprefix('torch.')}: {flags.models} models, {values} values, {different} different")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

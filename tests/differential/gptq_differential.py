#!/usr/bin/env python3
"""Compares how winnow reads GPTQ's model directories with the PyPI package that writes them, `gptqmodel`.

    pip install torch && pip install gptqmodel==7.7.0 --no-build-isolation
    cmake --build ../../build/release --target winnow_model_tool
    ./gptq_differential.py --tool ../../build/release/winnow_model_tool --models 2

Makes Llama models of random shapes, has the package quantise them after random tokens (4 and 8 bits, groups and whole rows, in order and
with act-order, both checkpoint formats) and write them. What the package dequantises and what winnow widens must be the same numbers
after rounding to float16. Exits with 1 if one differs. No GPU is needed; a model takes some seconds.
"""
import argparse
import os
import pathlib
import random
import sys
import tempfile

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # the package wants at least two

import torch
import widened_matrices
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FORMS = {
    "4 bits, groups of 32": {"bits": 4, "group_size": 32, "desc_act": False},
    "4 bits, groups of 128, no zero point in the middle": {"bits": 4, "group_size": 128, "desc_act": False, "sym": False,
                                                           "format": "gptq_v2"},
    "4 bits, groups of 64, act-order": {"bits": 4, "group_size": 64, "desc_act": True},
    "4 bits, whole rows": {"bits": 4, "group_size": -1, "desc_act": False},
    "8 bits, groups of 128": {"bits": 8, "group_size": 128, "desc_act": False},
    "8 bits, groups of 32, act-order": {"bits": 8, "group_size": 32, "desc_act": True},
    "8 bits, whole rows, second format": {"bits": 8, "group_size": -1, "desc_act": False, "format": "gptq_v2"},
}
VOCABULARY = 128


def make_model(source, directory):
    config = LlamaConfig(hidden_size=128 * source.randint(1, 3), intermediate_size=128 * source.randint(1, 4), num_hidden_layers=1,
                         num_attention_heads=2 * source.randint(1, 2), num_key_value_heads=source.choice([1, 2]),
                         head_dim=source.choice([64, 128]), vocab_size=VOCABULARY, max_position_embeddings=256,
                         tie_word_embeddings=False)
    torch.manual_seed(source.randrange(1 << 32))
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    tokens = {chr(33 + i): i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(tokens, unk_token="!")),
                            eos_token="!", pad_token="!").save_pretrained(directory)


def compare(tool, name, arguments, source):
    """(values compared, values that differ)"""
    with tempfile.TemporaryDirectory() as folder:
        plain, quantised = pathlib.Path(folder, "plain"), pathlib.Path(folder, "quantised")
        make_model(source, plain)
        model = GPTQModel.load(str(plain), QuantizeConfig(**arguments, act_group_aware=False))
        samples = [[source.randrange(VOCABULARY) for _ in range(64)] for _ in range(64)]
        model.quantize([{"input_ids": sample, "attention_mask": [1] * len(sample)} for sample in samples], batch_size=8)
        model.save(str(quantised))
        loaded = GPTQModel.load(str(quantised), backend=BACKEND.TORCH, device="cpu",
                                dtype=torch.float16)  # its scales' type in the files
        matrices = [(f"{module_name}.weight", module.dequantize_weight().T) for module_name, module in loaded.model.named_modules()
                    if hasattr(module, "qweight")]
        return widened_matrices.compare(tool, name, quantised, matrices)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, help="winnow_model_tool")
    parser.add_argument("--models", type=int, default=2, help="of each form")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    flags = parser.parse_args()
    print(f"seed {flags.seed}")
    source = random.Random(flags.seed)
    bad = 0
    tool = pathlib.Path(flags.tool).resolve()
    logs = tempfile.TemporaryDirectory()  # which the package writes where it runs
    os.chdir(logs.name)
    for name, arguments in FORMS.items():
        results = [compare(tool, name, arguments, source) for _ in range(flags.models)]
        values, different = (sum(column) for column in zip(*results))
        bad += different + (values == 0)
        print(f"RESULT {name}: {flags.models} models, {values} values, {different} different")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

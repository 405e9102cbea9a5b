#!/usr/bin/env python3
"""Makes corpus/gguf: small files of every kind that winnow reads, written by the PyPI package `gguf` (0.19.0)."""
from pathlib import Path

import gguf
import numpy as np

FOLDER = Path(__file__).parent / "corpus" / "gguf"
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # that the package can write


def write(name, architecture, fill):
    writer = gguf.GGUFWriter(FOLDER / name, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shape(writer, heads=1):
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64 * heads)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)


def embedding(writer, tokens, kind="Q8_0", width=64):
    data = np.linspace(-1, 1, tokens * width, dtype=np.float32).reshape(tokens, width)
    kind = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("token_embd.weight", gguf.quantize(data, kind), raw_dtype=kind)


def byte_level(writer, pre, tokens=("h", "e", "he", "<|im_end|>", "<think>")):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([1, 1, 1, 3, 4])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages[0].content }}")


def sentencepiece(writer):
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁a"])
    writer.add_token_scores([0, 0, 0, 0, -1, -2, -3, -4, -5])
    writer.add_token_types([2, 3, 3, 6, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)


def llama(writer):
    shape(writer)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(64)
    sentencepiece(writer)
    embedding(writer, 9)
    writer.add_tensor("rope_freqs.weight", np.ones(32, dtype=np.float32))


def qwen(writer):
    shape(writer, 2)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    byte_level(writer, "qwen2")
    embedding(writer, 5, "F16", 128)


def every_type(writer):
    writer.add_custom_alignment(64)
    for i, kind in enumerate(TYPES):
        data = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"t{i}", gguf.quantize(data, kind), raw_dtype=kind)
    for i, (name, size) in enumerate((("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210), ("IQ4_NL", 18))):
        writer.add_tensor(f"k{i}", np.full((1, size), 17 + i, dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType[name])


def every_key(writer):
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{name}")(f"k.{name}", 7)
    writer.add_float32("k.float32", 0.5)
    writer.add_float64("k.float64", 0.25)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "text")
    writer.add_array("k.ints", [1, 2, 3])
    writer.add_array("k.floats", [1.0, 2.0])
    writer.add_array("k.strings", ["a", "b"])
    writer.add_array("k.bools", [True, False])


def smollm(writer):
    shape(writer)
    byte_level(writer, "smollm")
    embedding(writer, 5, "Q4_1")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    write("llama.gguf", "llama", llama)
    write("qwen2.gguf", "qwen2", qwen)
    write("smollm.gguf", "llama", smollm)
    write("types.gguf", "other", every_type)
    write("keys.gguf", "qwen3", every_key)


if __name__ == "__main__":
    main()

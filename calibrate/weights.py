"""Weights of a model, read one tensor at a time, so that a model need not fit in memory.

A source is opened for the few tensors of one layer and closed again: then the pages of the mapped file that
were read no longer count as this process's memory. Tensors are named as in a Hugging Face directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

# Names in a Hugging Face directory of the tensors of a GGUF file.
GGUF_LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
              "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
              "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
              "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
GGUF_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


def pretrained_arguments(path: str | Path) -> tuple[str, dict]:
    """What transformers' from_pretrained takes for a directory or a GGUF file."""
    path = Path(path)
    return (str(path.parent), {"gguf_file": path.name}) if is_gguf(path) else (str(path), {})


class DirectoryWeights:
    """The safetensors files of a Hugging Face directory."""

    def __init__(self, directory: Path):
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self._files = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        else:
            with safe_open(directory / "model.safetensors", "pt") as file:
                self._files = dict.fromkeys(file.keys(), directory / "model.safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of each, in the file's type; the values are gone when the next ones are asked for."""
        for path in sorted({self._files[name] for name in names}):
            with safe_open(path, "pt") as file:
                for name in names:
                    if self._files[name] == path:
                        tensor = file.get_tensor(name)
                        if not tensor.is_floating_point():
                            raise ValueError(f"tensor {name} has type {tensor.dtype}: calibrate reads weights of "
                                             "bfloat16, float16 or float32")
                        yield name, tensor

    def rows(self, name: str, ids: list[int]) -> torch.Tensor:
        """float32 [len(ids), ..]"""
        return next(tensor[torch.tensor(ids)].float() for _, tensor in self.tensors([name]))


class GgufWeights:
    """A GGUF file, dequantised as the package `gguf` does."""

    def __init__(self, path: Path):
        from gguf import GGUFReader

        self._path = path
        reader = GGUFReader(path)
        self._tensors = {t.name: (int(t.data_offset), t.data.dtype, t.data.shape, t.tensor_type) for t in reader.tensors}
        if "rope_freqs.weight" in self._tensors:
            raise ValueError(f"{path}: calibrate does not read RoPE factors (tensor rope_freqs.weight); give a directory")
        architecture = reader.fields["general.architecture"].contents()
        # Writers of llama files put the two values that rotate together side by side; the model rotates halves.
        self._interleaved = architecture == "llama"
        heads = reader.fields[f"{architecture}.attention.head_count"].contents()
        kv_heads = reader.fields.get(f"{architecture}.attention.head_count_kv")
        self._heads = {"attn_q": heads, "attn_k": kv_heads.contents() if kv_heads else heads}

    @staticmethod
    def _gguf_name(name: str) -> str:
        stem, _, ending = name.rpartition(".")
        if stem.startswith("model.layers."):
            number, _, role = stem.removeprefix("model.layers.").partition(".")
            return f"blk.{number}.{GGUF_LAYER.get(role, role)}.{ending}"
        return f"{GGUF_OUTSIDE.get(stem, stem)}.{ending}"

    def __contains__(self, name: str) -> bool:
        return self._gguf_name(name) in self._tensors

    def _values(self, name: str, rows: list[int] | None = None) -> torch.Tensor:
        import gguf

        own = self._gguf_name(name)
        offset, dtype, shape, kind = self._tensors[own]
        data = np.memmap(self._path, dtype, "r", offset, shape)
        data = data if rows is None else data[rows]
        values = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32, copy=True))
        role = own.split(".")[2] if own.startswith("blk.") else ""
        if self._interleaved and role in self._heads:
            values = values.view(self._heads[role], -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of each, in float32."""
        for name in names:
            yield name, self._values(name)

    def rows(self, name: str, ids: list[int]) -> torch.Tensor:
        """float32 [len(ids), ..]"""
        return self._values(name, ids)


def open_weights(path: str | Path) -> DirectoryWeights | GgufWeights:
    return GgufWeights(Path(path)) if is_gguf(path) else DirectoryWeights(Path(path))

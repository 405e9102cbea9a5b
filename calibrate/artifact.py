"""Writes and reads the artifact: one safetensors file with all learned functions of one model.

The format is docs/artifact-format.md. `read` checks everything that the server checks, so that a
file which loads here loads there.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .weights import is_gguf

FORMAT = 1
METADATA_KEY = "winnow_artifact"
FINGERPRINT_BYTES_PER_TENSOR = 65536
STAGES = {"hata": 1, "spotlight": 2, "hashattention": 3}
FEATURE_ROLES = ("stem", "gate", "up", "down", "out")
# Weights below this are stored as zero: it keeps every product of a code's sum a normal float32
# (docs/artifact-format.md), and is far below what can turn a bit.
SMALLEST_WEIGHT = 2.0 ** -30


class ArtifactError(ValueError):
    pass


# --- the model's identity --------------------------------------------------------------------------

def _safetensors_files(directory: Path) -> list[Path]:
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return [directory / name for name in sorted(set(index["weight_map"].values()))]


# What the library takes where a family's config.json is silent, and so does the server.
KV_HEADS_ABSENT = {"mistral": 8, "qwen2": 32, "qwen3": 32}
HEAD_DIM_ABSENT = {"qwen3": 128}


def _rope(config: dict) -> tuple[float, str, float]:
    """Base, kind and factor of the rotary embedding, as the server resolves them (engine/model/model_config.cc)."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        factor = 1.0
    elif scaling.get("factor") is not None:
        factor = scaling["factor"]
    else:  # yarn alone may leave it out: the ratio of the lengths
        longest = config["max_position_embeddings"]
        factor = longest / (config.get("original_max_position_embeddings")
                            or scaling.get("original_max_position_embeddings") or longest)
    return float(theta), kind, float(factor)


def _gguf_fields(path: Path) -> tuple[object, Callable]:
    """The reader of a GGUF file, and its architecture's keys: get(key, default)."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def get(key: str, default=None):
        field_ = reader.fields.get(f"{architecture}.{key}")
        return default if field_ is None else field_.contents()

    return reader, get


def _gguf_shape(get: Callable) -> dict[str, int]:
    heads = get("attention.head_count")
    return {"layers": get("block_count"), "query_heads": heads, "kv_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length") or get("embedding_length") // heads}


def _gguf_rope(get: Callable) -> tuple[float, str, float]:
    """As engine/model/gguf_config.cc resolves them."""
    linear = get("rope.scale_linear", 1.0)
    kind = get("rope.scaling.type", "linear" if linear != 1.0 else "none")
    factor = (get("rope.scaling.factor", linear) or 1.0) if kind != "none" else 1.0
    return float(get("rope.freq_base", 10000.0)), "default" if kind == "none" else kind, float(factor)


def model_shape(path: str | Path) -> dict[str, int]:
    if is_gguf(path):
        return _gguf_shape(_gguf_fields(Path(path))[1])
    config = json.loads((Path(path) / "config.json").read_text())
    family = config.get("model_type")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", KV_HEADS_ABSENT.get(family))
    head_dim = config.get("head_dim", HEAD_DIM_ABSENT.get(family))
    return {"layers": config["num_hidden_layers"], "query_heads": heads, "kv_heads": kv_heads or heads,
            "head_dim": head_dim or config["hidden_size"] // heads}


def _gguf_tensors(reader) -> list[tuple[str, str, list[int], bytes]]:
    """(name, type, dimensions, first bytes); dimensions as the file has them, the fastest first."""
    return [(t.name, t.tensor_type.name, [int(x) for x in t.shape],
             t.data.view(np.uint8).reshape(-1)[:FINGERPRINT_BYTES_PER_TENSOR].tobytes()) for t in reader.tensors]


def _directory_tensors(directory: Path) -> list[tuple[str, str, list[int], bytes]]:
    entries = []
    for path in _safetensors_files(directory):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            for name, entry in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    file.seek(8 + length + begin)
                    entries.append((name, entry["dtype"], entry["shape"],
                                    file.read(min(end - begin, FINGERPRINT_BYTES_PER_TENSOR))))
    return entries


def fingerprint(path: str | Path) -> str:
    """SHA-256 over what keys and queries depend on: see docs/artifact-format.md, "Fingerprint"."""
    path = Path(path)
    if is_gguf(path):
        reader, get = _gguf_fields(path)
        shape, rope, tensors = _gguf_shape(get), _gguf_rope(get), _gguf_tensors(reader)
    else:
        config = json.loads((path / "config.json").read_text())
        shape, rope, tensors = model_shape(path), _rope(config), _directory_tensors(path)
    theta, kind, factor = rope
    digest = hashlib.sha256()
    digest.update(b"winnow-model-fingerprint 1\n")
    for key, value in (("layers", shape["layers"]), ("query_heads", shape["query_heads"]),
                       ("kv_heads", shape["kv_heads"]), ("head_dim", shape["head_dim"]),
                       ("rope_theta", "%.17g" % theta), ("rope_type", kind), ("rope_factor", "%.17g" % factor)):
        digest.update(f"{key}={value}\n".encode())
    for name, dtype, dims, data in sorted(tensors, key=lambda t: t[0].encode()):
        digest.update(name.encode() + f" {dtype} {'x'.join(map(str, dims))}\n".encode())
        digest.update(data)
    return digest.hexdigest()


# --- contents --------------------------------------------------------------------------------------

@dataclass
class Functions:
    """What one kind holds. Stage i of a side: (weight [heads, out, in] bfloat16, bias [heads, out] float32)."""

    kind: str
    bits: int
    query: str = "head"  # or "group": one function of the group's G queries, side by side, gives G codes
    layers: dict[int, dict[str, list[tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=dict)
    training: dict = field(default_factory=dict)
    measured: dict = field(default_factory=dict)


@dataclass
class Features:
    """log-features: per layer and side, role -> (weight [heads, out, in], bias [heads, out]), both float32 or bfloat16.

    `helps`: the verdict (calibrate/verdict.py), for each layer, ascending, and KV head. None: not judged, so the server
    refuses completion.
    """

    features: int
    layers: dict[int, dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=dict)
    training: dict = field(default_factory=dict)
    measured: dict = field(default_factory=dict)
    helps: list[bool] | None = None


@dataclass
class Artifact:
    fingerprint: str
    shape: dict[str, int]
    dense_layers: int
    functions: dict[str, Functions] = field(default_factory=dict)
    features: Features | None = None
    provenance: dict = field(default_factory=dict)


def storable_weight(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach().float().cpu()
    weight = torch.where(weight.abs() < SMALLEST_WEIGHT, torch.zeros_like(weight), weight)
    return weight.to(torch.bfloat16).contiguous()


def write(path: str | Path, artifact: Artifact) -> None:
    tensors: dict[str, torch.Tensor] = {}
    kinds = {}
    for kind, functions in artifact.functions.items():
        for layer, sides in functions.layers.items():
            for side, stages in sides.items():
                for i, (weight, bias) in enumerate(stages):
                    tensors[f"layers.{layer}.{kind}.{side}.{i}.weight"] = weight.contiguous()
                    tensors[f"layers.{layer}.{kind}.{side}.{i}.bias"] = bias.contiguous()
        kinds[kind] = {"bits": functions.bits, "query": functions.query, "stages": STAGES[kind], "layers": sorted(functions.layers),
                       "training": functions.training, "measured": functions.measured}
    metadata = {"format": FORMAT, "model": {"fingerprint": artifact.fingerprint, **artifact.shape},
                "dense_layers": artifact.dense_layers, "kinds": kinds, "provenance": artifact.provenance}
    if artifact.features is not None:
        f = artifact.features
        for layer, sides in f.layers.items():
            for side, roles in sides.items():
                for role, (weight, bias) in roles.items():
                    tensors[f"layers.{layer}.features.{side}.{role}.weight"] = weight.contiguous()
                    tensors[f"layers.{layer}.features.{side}.{role}.bias"] = bias.contiguous()
        metadata["features"] = {"features": f.features, "layers": sorted(f.layers), "training": f.training,
                                "measured": f.measured}
        if f.helps is not None:
            metadata["features"]["helps"] = f.helps
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(metadata, sort_keys=True)})
    os.replace(temporary, path)
    os.chmod(path, 0o644)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ArtifactError(message)


def read(path: str | Path, model_directory: str | Path | None = None) -> Artifact:
    """Reads and checks; with a model directory also that the artifact was made for that model."""
    with safe_open(path, "pt") as file:
        raw = (file.metadata() or {}).get(METADATA_KEY)
        _need(raw is not None, f"{path}: no {METADATA_KEY!r} in the metadata: not a winnow artifact")
        metadata = json.loads(raw)
        _need(metadata.get("format") == FORMAT,
              f"{path}: format {metadata.get('format')}, this version reads format {FORMAT}")
        model = metadata["model"]
        shape = {k: model[k] for k in ("layers", "query_heads", "kv_heads", "head_dim")}
        if model_directory is not None:
            wanted = model_shape(model_directory)
            for key, value in wanted.items():
                _need(shape[key] == value, f"{path}: made for a model with {key} {shape[key]}, this one has {value}")
            _need(model["fingerprint"] == fingerprint(model_directory),
                  f"{path}: made for another model of the same shape (fingerprints differ)")
        names = set(file.keys())
        used = set()

        def get(name: str, dims: tuple, dtypes) -> torch.Tensor:
            _need(name in names, f"{path}: tensor {name} is missing")
            tensor = file.get_tensor(name)
            _need(tensor.dtype in dtypes, f"{path}: tensor {name} has type {tensor.dtype}")
            _need(len(dims) == tensor.dim() and all(d is None or d == s for d, s in zip(dims, tensor.shape)),
                  f"{path}: tensor {name} has shape {tuple(tensor.shape)}, expected {dims}")
            _need(bool(torch.isfinite(tensor.float()).all()), f"{path}: tensor {name} holds values that are not finite")
            used.add(name)
            return tensor

        bf16, f32 = {torch.bfloat16}, {torch.float32}
        heads = shape["kv_heads"]
        functions = {}
        for kind, info in metadata["kinds"].items():
            _need(kind in STAGES, f"{path}: unknown kind {kind!r}")
            _need(info["bits"] in (32, 64, 128, 256), f"{path}: {kind} has {info['bits']} bits")
            _need(info["query"] in ("head", "group"), f"{path}: {kind} has query functions of kind {info['query']!r}")
            layers = {}
            for layer in info["layers"]:
                _need(0 <= layer < shape["layers"], f"{path}: {kind} names layer {layer}")
                sides = {}
                for side in ("key", "query"):
                    # A query function that reads the whole group at once is G times as wide at both ends.
                    group = shape["query_heads"] // shape["kv_heads"]
                    joint = side == "query" and info["query"] == "group"
                    stages, width = [], shape["head_dim"] * (group if joint else 1)
                    for i in range(STAGES[kind]):
                        prefix = f"layers.{layer}.{kind}.{side}.{i}"
                        out = info["bits"] * (group if joint else 1) if i + 1 == STAGES[kind] else None
                        weight = get(prefix + ".weight", (heads, out, width), bf16)
                        width = weight.shape[1]
                        stages.append((weight, get(prefix + ".bias", (heads, width), f32)))
                    sides[side] = stages
                layers[layer] = sides
            functions[kind] = Functions(kind, info["bits"], info["query"], layers, info["training"], info["measured"])
        features = None
        if "features" in metadata:
            info = metadata["features"]
            count, d = info["features"], shape["head_dim"]
            layers = {}
            for layer in info["layers"]:
                sides = {}
                for side in ("key", "query"):
                    roles = {}
                    prefix = f"layers.{layer}.features.{side}."
                    stem = get(prefix + "stem.weight", (heads, None, d), bf16)
                    width = stem.shape[1]
                    inner = get(prefix + "gate.weight", (heads, None, width), bf16).shape[1]
                    dims = {"stem": (width, d), "gate": (inner, width), "up": (inner, width), "down": (width, inner),
                            "out": (count, width)}
                    for role in FEATURE_ROLES:
                        roles[role] = (get(f"{prefix}{role}.weight", (heads, *dims[role]), bf16),
                                       get(f"{prefix}{role}.bias", (heads, dims[role][0]), f32))
                    sides[side] = roles
                layers[layer] = sides
            helps = info.get("helps")
            heads_in_all = len(layers) * shape["kv_heads"]
            _need(helps is None or (isinstance(helps, list) and len(helps) == heads_in_all
                                    and all(isinstance(h, bool) for h in helps)),
                  f"{path}: features.helps must be a list of {heads_in_all} truth values")
            features = Features(count, layers, info["training"], info["measured"], helps)
        _need(used == names, f"{path}: unknown tensors {sorted(names - used)[:4]}")
        return Artifact(model["fingerprint"], shape, metadata["dense_layers"], functions, features,
                        metadata["provenance"])

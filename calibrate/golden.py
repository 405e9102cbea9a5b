"""Writes what other implementations must reproduce: the codes of the encoders (tests/golden/codes) and
log-features and completion (tests/golden/features).

    python -m calibrate.golden DIR            writes DIR/codes and DIR/features
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from . import codes

# kind -> widths; head dimensions and code lengths differ so that all are met somewhere.
SHAPES = {"hata": (80, 256), "spotlight": (64, 128, 128), "hashattention": (128, 128, 128, 32)}


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for kind, widths in SHAPES.items():
        rng = np.random.default_rng(sum(map(ord, kind)))
        tensors = {}
        stages = []
        for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
            weight = codes.to_bfloat16(rng.standard_normal((fan_out, fan_in)).astype(np.float32) / np.float32(fan_in) ** 0.5)
            bias = (rng.standard_normal(fan_out) * 0.3).astype(np.float32)
            stages.append((weight, bias))
            # bfloat16 as its upper 16 bits: NumPy has no such type.
            tensors[f"{i}.weight"] = (weight.view(np.uint32) >> 16).astype(np.uint16)
            tensors[f"{i}.bias"] = bias
        x = (rng.standard_normal((96, widths[0])) * 3.0).astype(np.float32)
        x[90] = 0.0
        x[91] = -0.0
        x[92] *= 1e4   # SiLU saturates on both sides
        x[93] *= 1e-6
        x[94] = codes.to_bfloat16(x[94]) * np.float32(1.00390625)  # halfway between two bfloat16 values
        tensors["input"] = x
        tensors["codes"] = codes.encode(x, stages)
        save_file(tensors, directory / f"{kind}.safetensors", metadata={
            "kind": kind, "what": "input [t, d] f32; weights as the upper 16 bits of f32; codes [t, bits / 8]"})
    a = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    a = a[np.isfinite(a)]
    table = (codes.silu(a).view(np.uint32) >> 16).astype("<u2")
    some = np.arange(0, len(a), 257)
    (directory / "silu.json").write_text(json.dumps({
        "what": "silu of every finite bfloat16, in the order of its 16 bits, as little-endian 16-bit values",
        "sha256": hashlib.sha256(table.tobytes()).hexdigest(), "count": len(a),
        "samples": [[int(a.view(np.uint32)[i] >> 16), int(table[i])] for i in some]}) + "\n")


def features_case() -> dict[str, np.ndarray]:
    """Random maps of two KV heads with two queries each; 90 mid tokens, of which some are chosen.

    The maps and their results are what `features.apply_folded` and `features.complete` make of them.
    """
    import torch

    from . import features

    heads, group, tokens, chosen, widths = 2, 2, 90, 12, {"d": 80, "w": 40, "u": 24, "F": 33}
    rng = np.random.default_rng(64)
    bits = lambda x: (codes.to_bfloat16(x.astype(np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    tensors, maps = {}, {}
    for side in ("key", "query"):
        maps[side] = {}
        for role, (fan_in, fan_out) in {"stem": "dw", "gate": "wu", "up": "wu", "down": "uw", "out": "wF"}.items():
            shape = (heads, widths[fan_out], widths[fan_in])
            weight = codes.to_bfloat16(rng.standard_normal(shape).astype(np.float32) * np.float32(1.5 / shape[2] ** 0.5))
            bias = (rng.standard_normal(shape[:2]) * 0.3).astype(np.float32)
            tensors[f"{side}.{role}.weight"], tensors[f"{side}.{role}.bias"] = bits(weight), bias
            maps[side][role] = (torch.from_numpy(weight), torch.from_numpy(bias))
    vectors = lambda n: torch.from_numpy(codes.to_bfloat16(rng.standard_normal((heads, n, widths["d"])).astype(np.float32)))
    keys, values, queries = vectors(tokens), vectors(tokens), vectors(group)
    a, b = features.apply_folded(maps["key"], keys), features.apply_folded(maps["query"], queries)
    m, s, z = (x.double() for x in features.summary(a.double(), values.double(), torch.ones(tokens, dtype=torch.bool)))
    picks = np.stack([np.sort(rng.choice(tokens, chosen, replace=False)) for _ in range(heads)]).astype(np.int32)
    out, lse = np.empty((heads, group, widths["d"]), np.float32), np.empty((heads, group), np.float32)
    for head in range(heads):
        pick = torch.from_numpy(picks[head]).long()
        for g in range(group):
            o, total = features.complete(m[head], s[head], z[head], a[head, pick].double(), values[head, pick].double(),
                                         b[head, g].double())
            out[head, g], lse[head, g] = o.numpy(), total.numpy()
    return tensors | {"keys": bits(keys.numpy()), "values": bits(values.numpy()), "queries": queries.numpy(),
                      "key_features": a.numpy(), "query_features": b.numpy(), "chosen": picks, "out": out, "lse": lse}


def write_features(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(x) for name, x in features_case().items()}, directory / "completion.safetensors",
              metadata={"what": "{key,query}.{role}: maps, weights as the upper 16 bits of f32, as are keys and values "
                                "[heads, t, d]; queries [heads, G, d] f32; log-features; chosen tokens [heads, c]; "
                                "out [heads, G, d] and lse of completion"})


if __name__ == "__main__":
    write(Path(sys.argv[1]) / "codes")
    write_features(Path(sys.argv[1]) / "features")

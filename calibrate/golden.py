"""Writes tests/golden/codes: inputs and codes that every implementation of the encoders must reproduce.

    python -m calibrate.golden DIR
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


if __name__ == "__main__":
    write(Path(sys.argv[1]))

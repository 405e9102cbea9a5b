#!/usr/bin/env python3
"""Makes blocks.json: random blocks of every GGUF type, and what the PyPI package `gguf` (0.19.0) makes of them.

    pip install gguf==0.19.0
    ./make_blocks.py

Scales and offsets are finite float16 numbers of every size, subnormal and negative ones too; everything else in a
block is any byte. Both are written as hexadecimal digits of little-endian bytes.
"""
import json
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
         "MXFP4"]
# Where in a block there are float16 numbers, or float32 and bfloat16 ones: they are made finite.
HALVES = {"F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}
TOP_BYTE = {"F32": 3, "BF16": 1}


def random_blocks(name, count, random):
    """[count][bytes of a block]"""
    _, size = GGML_QUANT_SIZES[Type[name]]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES.get(name, []):
        high = blocks[:, at + 1]
        high[(high & 0x7C) == 0x7C] &= 0xFB  # an exponent of 31 is infinite, or no number
    if name == "MXFP4":
        blocks[blocks[:, 0] == 255, 0] = 127  # no number by OCP's standard, 2^127 in this package
    if name in TOP_BYTE:
        blocks[:, TOP_BYTE[name]] &= 0xBF
    return blocks


def dequantize(name, blocks):
    """float32 values of rows of bytes."""
    kind = Type[name]
    data = blocks.view(np.float32) if name == "F32" else blocks.view(np.float16) if name == "F16" else blocks
    with np.errstate(all="ignore"):
        return gguf.dequantize(data, kind).astype(np.float32).reshape(-1)


def main():
    random = np.random.default_rng(20261124)
    goldens = []
    for name in TYPES:
        values, _ = GGML_QUANT_SIZES[Type[name]]
        count = 64 if values == 1 else 4 if values == 32 else 2
        blocks = random_blocks(name, count, random)
        goldens.append({"type": name, "blocks": blocks.tobytes().hex(), "values": dequantize(name, blocks).tobytes().hex()})
    path = Path(__file__).parent / "blocks.json"
    path.write_text(json.dumps(goldens, indent=0) + "\n")


if __name__ == "__main__":
    main()

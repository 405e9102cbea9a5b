"""The exact arithmetic of an encoder: what every implementation must reproduce bit for bit.

This module is the reference for docs/artifact-format.md ("How a code is computed") and favours
being obviously the same as that text over speed. Training and reports use `torch_codes`, which does
the same operations in the same order on whole tensors.

Inputs and weights are bfloat16, so a product of two has at most 16 significant bits and is exact in
float32: adding it is one rounding whether or not it is fused. All that is left to agree on is the
order of the sum (input 0, 1, 2, ..) and SiLU, which is given below operation by operation.
"""

from __future__ import annotations

import numpy as np
import torch

# exp(x) = 2^n * p(f), n = rint(x / ln 2), f = x / ln 2 - n in [-1/2, 1/2]; p is the Taylor polynomial of
# 2^f, correct to 2e-7, far below the bfloat16 that the result is rounded to.
LOG2_E = np.float32(1.44269502162933349609375)
EXP2 = [np.float32(c) for c in (
    1.0, 0.693147182464599609375, 0.2402265071868896484375, 0.05550410971045494079589844,
    0.00961812958121299743652344, 0.00133335590362548828125, 0.000154035304149053990840911865234375)]
CLAMP = np.float32(87.0)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to the nearest bfloat16, ties to even, as float32."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000))
    return np.where(np.isnan(x), x, rounded.view(np.float32)).astype(np.float32)


def silu(a: np.ndarray) -> np.ndarray:
    """bfloat16 in (as float32), bfloat16 out. Every line is one correctly rounded float32 operation."""
    with np.errstate(over="ignore"):
        a = np.maximum(a, -CLAMP)
        z = np.maximum(-a, -CLAMP)
        t = z * LOG2_E
        n = np.rint(t)                       # ties to even
        f = t - n                            # exact
        p = EXP2[6]
        for c in EXP2[5::-1]:
            p = p * f                        # two roundings per step: product, then sum; never fused
            p = p + c
        e = np.ldexp(p, n.astype(np.int32))  # exact: n is in [-126, 126]
        return to_bfloat16(a / (np.float32(1.0) + e))


def affine(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """x [t, in] bfloat16 values, weight [out, in] bfloat16 values, bias [out] float32 -> [t, out] float32."""
    acc = np.zeros((x.shape[0], weight.shape[0]), np.float32) if bias is None else \
        np.broadcast_to(bias.astype(np.float32), (x.shape[0], weight.shape[0])).copy()
    for j in range(x.shape[1]):
        acc += x[:, j:j + 1] * weight[:, j]
    return acc


def activations(x: np.ndarray, stages: list[tuple[np.ndarray, np.ndarray | None]]) -> np.ndarray:
    """x [t, d] float32 -> the last stage's sums [t, bits], whose signs are the code."""
    x = to_bfloat16(x)
    for i, (weight, bias) in enumerate(stages):
        acc = affine(x, weight, bias)
        if i + 1 < len(stages):
            x = silu(to_bfloat16(acc))
    return acc


def pack(positive: np.ndarray) -> np.ndarray:
    """Booleans [t, bits] -> bytes [t, bits / 8]: bit b is bit b % 8 of byte b / 8."""
    if positive.shape[1] % 8:
        raise ValueError(f"{positive.shape[1]} bits do not fill bytes")
    return np.packbits(positive, axis=1, bitorder="little")


def unpack(codes: np.ndarray) -> np.ndarray:
    return np.unpackbits(codes, axis=1, bitorder="little").astype(bool)


def encode(x: np.ndarray, stages) -> np.ndarray:
    """x [t, d] float32 -> packed codes [t, bits / 8]. Zero of either sign counts as positive."""
    return pack(activations(x, stages) >= 0)


def agreement(key_codes: np.ndarray, query_codes: np.ndarray) -> np.ndarray:
    """Sum over the group of (bits - Hamming distance). key_codes [n, bytes], query_codes [G, bytes] -> [n]."""
    bits = key_codes.shape[1] * 8
    distance = np.bitwise_count(key_codes[:, None, :] ^ query_codes[None]).sum((1, 2), dtype=np.int64)
    return query_codes.shape[0] * bits - distance


# --- the same on whole tensors ---------------------------------------------------------------------

def torch_silu(a: torch.Tensor) -> torch.Tensor:
    a = torch.clamp(a, min=-float(CLAMP))
    z = torch.clamp(-a, min=-float(CLAMP))
    t = z * float(LOG2_E)
    n = torch.round(t)
    f = t - n
    p = torch.full_like(f, float(EXP2[6]))
    for c in EXP2[5::-1]:
        p = p * f
        p = p + float(c)
    e = torch.ldexp(p, n.int())
    return (a / (1.0 + e)).to(torch.bfloat16).float()


def torch_activations(x: torch.Tensor, stages) -> torch.Tensor:
    """x [N, t, d] float32; stages of (weight [N, out, in], bias [N, out]) -> [N, t, bits], exactly as above."""
    x = x.to(torch.bfloat16).float()
    for i, (weight, bias) in enumerate(stages):
        weight = weight.float()
        acc = bias.float().unsqueeze(1).expand(-1, x.shape[1], -1).clone()
        for j in range(x.shape[2]):
            acc = acc + x[:, :, j:j + 1] * weight[:, :, j].unsqueeze(1)
        if i + 1 < len(stages):
            x = torch_silu(acc.to(torch.bfloat16).float())
    return acc

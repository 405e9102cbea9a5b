"""The arithmetic that other implementations must reproduce."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate import codes

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "codes"


def random_stages(rng, widths, heads=None):
    stages = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        shape = (fan_out, fan_in) if heads is None else (heads, fan_out, fan_in)
        weight = codes.to_bfloat16(rng.standard_normal(shape).astype(np.float32) / np.sqrt(fan_in))
        stages.append((weight, rng.standard_normal(shape[:-1]).astype(np.float32) * 0.3))
    return stages


def test_bfloat16_rounding_equals_torch():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(10000) * 10.0 ** rng.integers(-20, 20, 10000)).astype(np.float32)
    x = np.concatenate([x, np.array([0.0, -0.0, 1.00390625, 1.01171875, -1.00390625], np.float32)])  # ties
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    assert np.array_equal(codes.to_bfloat16(x).view(np.uint32), expected.view(np.uint32))


def test_silu_is_the_rounded_exact_value_for_every_bfloat16():
    a = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    a = a[np.isfinite(a)]
    clamped = np.maximum(a, np.float32(-87.0)).astype(np.float64)
    with np.errstate(over="ignore"):
        exact = torch.from_numpy(clamped / (1.0 + np.exp(-clamped))).to(torch.bfloat16).float().numpy()
    got = codes.silu(a)
    assert np.array_equal(got.view(np.uint32), exact.view(np.uint32))
    digest = hashlib.sha256((got.view(np.uint32) >> 16).astype("<u2").tobytes()).hexdigest()
    assert digest == json.loads((GOLDEN / "silu.json").read_text())["sha256"]


def test_silu_does_not_depend_on_fused_multiply_add():
    a = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    a = a[np.isfinite(a)]
    z = np.maximum(-np.maximum(a, np.float32(-87.0)), np.float32(-87.0))
    n = np.rint(z * codes.LOG2_E)
    f = (z.astype(np.float64) * np.float64(codes.LOG2_E) - n).astype(np.float32)
    p = np.full_like(f, codes.EXP2[6])
    for c in codes.EXP2[5::-1]:
        p = (p.astype(np.float64) * f.astype(np.float64) + np.float64(c)).astype(np.float32)
    e = np.ldexp(p, n.astype(np.int32))
    fused = codes.to_bfloat16(np.maximum(a, np.float32(-87.0)) / (np.float32(1.0) + e))
    assert np.array_equal(codes.silu(a).view(np.uint32), fused.view(np.uint32))


def test_sum_runs_over_inputs_in_order():
    # 2^24 + 1 - 2^24 is 0 from the left and 1 in any order that meets the large terms first.
    x = np.array([[2.0 ** 24, 1.0, -(2.0 ** 24)]], np.float32)
    ones = np.ones((1, 3), np.float32)
    assert codes.affine(x, ones, None)[0, 0] == 0.0
    assert codes.affine(x[:, [0, 2, 1]], ones, None)[0, 0] == 1.0
    # The bias is where the sum starts, not what is added at the end.
    assert codes.affine(x[:, 1:], np.ones((1, 2), np.float32), np.array([2.0 ** 24], np.float32))[0, 0] == 0.0


def test_fused_and_separate_products_agree():
    rng = np.random.default_rng(5)
    x = codes.to_bfloat16(rng.standard_normal((50, 128)).astype(np.float32) * 3)
    (weight, bias), = random_stages(rng, (128, 64))
    acc = np.broadcast_to(bias.astype(np.float32), (50, 64)).copy()
    for j in range(128):  # float64 holds product and sum of these magnitudes exactly enough to be an FMA
        acc = (x[:, j:j + 1].astype(np.float64) * weight[:, j] + acc).astype(np.float32)
    assert np.array_equal(acc, codes.affine(x, weight, bias))


def test_bits_are_packed_lowest_first():
    positive = np.zeros((1, 128), bool)
    positive[0, [0, 9, 64, 127]] = True
    packed = codes.pack(positive)
    assert packed[0, 0] == 1 and packed[0, 1] == 2 and packed[0, 8] == 1 and packed[0, 15] == 128
    words = packed.view("<u8")[0]
    assert words[0] == (1 | 1 << 9) and words[1] == (1 | 1 << 63)
    assert np.array_equal(codes.unpack(packed), positive)


def test_zero_of_either_sign_counts_as_positive():
    stage = [(np.ones((32, 2), np.float32), None)]
    x = np.array([[1.0, -1.0], [-0.0, -0.0], [1.0, -2.0]], np.float32)
    assert codes.encode(x, stage).tolist() == [[255] * 4, [255] * 4, [0] * 4]


def test_agreement_is_bits_less_distance_summed_over_the_group():
    rng = np.random.default_rng(9)
    keys, queries = rng.random((40, 128)) < 0.5, rng.random((3, 128)) < 0.5
    expected = [(keys[i] == queries).sum() for i in range(40)]
    assert codes.agreement(codes.pack(keys), codes.pack(queries)).tolist() == expected


@pytest.mark.parametrize("widths", [(64, 128), (64, 128, 128), (80, 96, 96, 32)])
def test_torch_equals_the_reference(widths):
    rng = np.random.default_rng(len(widths))
    stages = random_stages(rng, widths, heads=3)
    x = rng.standard_normal((3, 200, widths[0])).astype(np.float32) * 2
    batched = codes.torch_activations(torch.from_numpy(x), [(torch.from_numpy(w), torch.from_numpy(b)) for w, b in stages])
    for head in range(3):
        reference = codes.activations(x[head], [(w[head], b[head]) for w, b in stages])
        assert np.array_equal(batched[head].numpy(), reference)


@pytest.mark.parametrize("kind", ["hata", "spotlight", "hashattention"])
def test_golden_codes(kind):
    from safetensors.numpy import load_file

    tensors = load_file(GOLDEN / f"{kind}.safetensors")
    raw = lambda name: (tensors[name].astype(np.uint32) << 16).view(np.float32)
    count = len([n for n in tensors if n.endswith(".weight")])
    stages = [(raw(f"{i}.weight"), tensors[f"{i}.bias"]) for i in range(count)]
    assert np.array_equal(codes.encode(tensors["input"], stages), tensors["codes"])

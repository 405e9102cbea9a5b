"""Completion: the summary of what was not read, and what subtraction leaves of it."""

import math
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from calibrate import golden
from calibrate.features import FeatureMaps, apply_folded, complete, kernel, losses, summary
from calibrate.policies import Policy, Selector, attend


def exact_features(keys, queries, scale):
    """Features for which the kernel is exact: one per distinct key, a_j(k) = 0 if k is key j, else -inf-like."""
    n = keys.shape[0]
    a = torch.full((n, n), -60.0)
    a.fill_diagonal_(0.0)
    return a, queries @ keys.T * scale


def softmax_state(logits, values):
    lse = torch.logsumexp(logits, -1)
    return torch.exp(logits - lse.unsqueeze(-1)) @ values, lse


def test_subtracting_every_key_leaves_nothing():
    torch.manual_seed(4)
    a, v, b = torch.randn(50, 8) * 5, torch.randn(50, 6), torch.randn(8)
    m, s, z = summary(a.unsqueeze(0), v.unsqueeze(0), torch.ones(50, dtype=torch.bool))
    out, lse = complete(m[0], s[0], z[0], a, v, b)
    assert lse == -math.inf and torch.equal(out, torch.zeros(6))


def test_subtraction_equals_a_summary_of_the_rest():
    torch.manual_seed(5)
    a, v, b = torch.randn(80, 8, dtype=torch.float64) * 3, torch.randn(80, 6, dtype=torch.float64), torch.randn(8).double()
    members = torch.ones(80, dtype=torch.bool)
    chosen = torch.randperm(80)[:30]
    m, s, z = summary(a.unsqueeze(0), v.unsqueeze(0), members)
    out, lse = complete(m[0], s[0], z[0], a[chosen], v[chosen], b)
    rest = members.clone()
    rest[chosen] = False
    expected, expected_lse = softmax_state(torch.logsumexp(b + a[rest], -1), v[rest])
    assert torch.allclose(out, expected) and torch.allclose(lse, expected_lse)


def test_with_exact_features_completion_is_dense_attention():
    torch.manual_seed(6)
    keys, queries, values = torch.randn(40, 16).double(), torch.randn(3, 16).double(), torch.randn(40, 16).double()
    a, b = exact_features(keys, queries, 0.25)
    chosen = torch.arange(10)
    m, s, z = summary(a.double().unsqueeze(0), values.unsqueeze(0), torch.ones(40, dtype=torch.bool))
    for i in range(3):
        rest, rest_lse = complete(m[0], s[0], z[0], a[chosen].double(), values[chosen], b[i])
        read, read_lse = softmax_state((queries @ keys.T * 0.25)[i, chosen], values[chosen])
        lse = torch.logaddexp(rest_lse, read_lse)
        merged = rest * torch.exp(rest_lse - lse) + read * torch.exp(read_lse - lse)
        dense, _ = softmax_state((queries @ keys.T * 0.25)[i], values)
        assert torch.allclose(merged, dense, atol=1e-9)


def test_the_kernel_used_in_training_is_the_summary():
    torch.manual_seed(7)
    a, b, v = torch.randn(2, 30, 8) * 4, torch.randn(2, 2, 5, 8) * 4, torch.randn(2, 30, 6)
    members = torch.ones(30, dtype=torch.bool)
    w, shift = kernel(a, b, members)
    m, s, z = summary(a, v, members)
    none = torch.zeros(0, dtype=torch.long)
    for head in range(2):
        for g in range(2):
            for i in range(5):
                out, lse = complete(m[head], s[head], z[head], a[head, none], v[head, none], b[head, g, i])
                mass = w[head, g, i].sum()
                assert torch.allclose(torch.log(mass) + shift[head, g, i], lse, atol=1e-4)
                assert torch.allclose(w[head, g, i] @ v[head] / mass, out, atol=1e-4)


def test_folded_maps_equal_the_trained_ones(corpus):
    keys, queries = corpus.sample()
    maps = FeatureMaps(keys, queries, 8, 12, seed=1)
    with torch.no_grad():
        for p in maps.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
        trained = maps.key_features(keys[:, :50])
        # float32 in place of the stored bfloat16, to see the folding and not the rounding
        roles = {role: (w.detach(), maps.key.biases[role].detach()) for role, w in maps.key.weights.items()}
        weight, bias = roles["stem"]
        weight = weight / maps.key.spread
        roles["stem"] = (weight, bias - (weight @ maps.key.mean.transpose(1, 2)).squeeze(-1))
        stored = maps.key.folded()
    assert torch.allclose(apply_folded(roles, keys[:, :50]), trained, atol=1e-3)
    for role in roles:
        assert torch.equal(stored[role][0], roles[role][0].to(torch.bfloat16))
        assert torch.allclose(stored[role][1], roles[role][1])


def test_dense_and_oracle_of_everything_have_no_error(corpus):
    shard, region = corpus.shards[0], corpus.region
    rows = torch.arange(len(shard.positions))
    tensors = [shard.q.float(), shard.k.float(), shard.v.float(), shard.anchor.float(), shard.anchor_lse, shard.lse,
               shard.positions]
    dense = attend(Policy("dense"), None, *tensors, region, corpus.scaling)
    everything = Policy("oracle", count=10_000)
    oracle = attend(everything, Selector(everything, corpus.scaling), *tensors, region, corpus.scaling)
    assert torch.equal(dense.output, oracle.output)
    # bfloat16 anchors and float32 sums: mass adds up to one
    some = shard.positions[rows] > 200
    assert torch.allclose(dense.covered[:, :, some], torch.ones_like(dense.covered[:, :, some]), atol=1e-3)


def test_golden_features():
    stored = load_file(Path(__file__).resolve().parents[2] / "tests" / "golden" / "features" / "completion.safetensors")
    made = golden.features_case()
    assert stored.keys() == made.keys()
    for name, x in made.items():
        if x.dtype == np.float32:
            assert np.allclose(stored[name], x, rtol=1e-5, atol=1e-4), name
        else:
            assert np.array_equal(stored[name], x), name


def test_maps_learn(corpus):
    keys, queries = corpus.sample()
    torch.manual_seed(0)
    maps = FeatureMaps(keys, queries, 8, 12, seed=1)
    rows = torch.arange(0, 40, 2)
    first = losses(maps, corpus.shards[0], rows, 0.02, corpus.region, corpus.scaling, 0.0)
    optimizer = torch.optim.Adam(maps.parameters(), lr=1e-2)
    for _ in range(60):
        output, divergence, partition = losses(maps, corpus.shards[0], rows, 0.02, corpus.region, corpus.scaling, 0.0)
        optimizer.zero_grad()
        (output + divergence + partition).sum().backward()
        optimizer.step()
    last = losses(maps, corpus.shards[0], rows, 0.02, corpus.region, corpus.scaling, 0.0)
    for before, after in zip(first, last):
        assert after.mean() < before.mean()

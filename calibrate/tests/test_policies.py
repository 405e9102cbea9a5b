"""Top-p pruning against plain loops, and the four-bit keys that it reads."""

import math

import pytest
import torch

from calibrate.capture import Model
from calibrate.evaluate import PolicyAttention, describe
from calibrate.policies import Policy, four_bit, top_p
from calibrate.region import Region


def plain_top_p(p, logits, candidates, anchor_lse):
    kept = torch.zeros_like(candidates)
    for n, m in torch.cartesian_prod(torch.arange(candidates.shape[0]), torch.arange(candidates.shape[1])).tolist():
        tokens = torch.nonzero(candidates[n, m])[:, 0].tolist()
        for g in range(logits.shape[1]):
            weight = {i: math.exp(float(logits[n, g, m, i])) for i in tokens}
            anchors = math.exp(float(anchor_lse[n, g, m]))
            needed, had = p * (anchors + sum(weight.values())) - anchors, 0.0
            for i in sorted(tokens, key=lambda i: (-weight[i], -i)):
                if had >= needed and p < 1.0:
                    break
                kept[n, m, i] = True
                had += weight[i]
    return kept


@pytest.mark.parametrize("p", [0.5, 0.85, 0.95, 1.0])
@pytest.mark.parametrize("anchors", [-30.0, 2.0, 9.0])
def test_keeps_the_fewest_that_reach_p_with_the_anchors(p, anchors):
    generator = torch.Generator().manual_seed(int(100 * p + anchors))
    # Steps of a half: many equal weights.
    logits = torch.round(torch.randn(2, 3, 4, 40, generator=generator) * 4) / 2
    candidates = torch.rand(2, 4, 40, generator=generator) < 0.6
    candidates[1, 2] = False
    lse = torch.randn(2, 3, 4, generator=generator) + anchors
    kept = top_p(p, logits, candidates, lse)
    assert torch.equal(kept, plain_top_p(p, logits, candidates, lse))
    if p == 1.0:
        assert torch.equal(kept, candidates)
    elif anchors == 2.0:
        assert 0 < int(kept.sum()) < int(candidates.sum())


def test_no_candidates():
    none = torch.zeros(1, 2, 5, dtype=torch.bool)
    assert not top_p(0.9, torch.zeros(1, 1, 2, 5), none, torch.zeros(1, 1, 2)).any()


def test_a_four_bit_key_is_wrong_by_half_a_step_at_most():
    k = torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).float()
    k[0, 0] = 1.5  # a key without a spread
    got = four_bit(k)
    step = (k.amax(-1) - k.amin(-1)) / 15 * (1 + 2**-6) + 2**-7 / 15 * k.abs().amax(-1)
    assert torch.equal(got[0, 0], k[0, 0]) and bool(((got - k).abs().amax(-1) <= step / 2 + 1e-6).all())


def test_pruning_in_the_whole_model(tiny_model, text_file):
    """A small p keeps less of the candidates than a large one, all of them are kept at p = 1, and k counts four times."""
    model = Model(tiny_model)
    ids = model.tokenizer(text_file.read_text()[:900], add_special_tokens=False)["input_ids"]
    kept = {}
    for text in ("oracle:k=2%,p=0.3", "oracle:k=2%,p=0.9", "oracle:k=2%,p=1", "oracle:k=8%"):
        attention = PolicyAttention(model, Policy.parse(text), None, 1, Region(4, 64))
        attention.from_row = 700
        model.set_hook(attention)
        model.run(ids)
        kept[text] = attention.means()
        assert attention.means()["iou"] > 0.5 and describe(Policy.parse(text)) == text
    model.set_hook(None)
    share = lambda text: kept[text]["kept"]
    assert share("oracle:k=2%,p=0.3") < share("oracle:k=2%,p=0.9") < share("oracle:k=2%,p=1")
    assert share("oracle:k=2%,p=1") == pytest.approx(share("oracle:k=8%"), rel=0.02)

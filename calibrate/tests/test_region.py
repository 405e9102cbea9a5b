import math
import random

import torch

from calibrate.region import Region, budget, group_importance, intersection_over_union, select_top


def test_mid_is_what_lies_between_sink_and_window():
    mask = Region(sink=4, window=8).mid_mask(torch.tensor([5, 11, 12, 30]), 40)
    # A query at t sees n = t + 1 tokens; the last 8 of them, itself included, are the window.
    assert mask.sum(1).tolist() == [0, 0, 1, 19]
    assert torch.nonzero(mask[3])[:, 0].tolist() == list(range(4, 23))


def test_budget_is_a_share_of_the_context_rounded_half_up():
    assert budget(0.02, torch.tensor([8191, 0, 24, 74, 99])).tolist() == [164, 1, 1, 2, 2]


def test_ties_go_to_the_most_recent_token():
    seed = 11
    rng = random.Random(seed)
    for _ in range(50):
        n, k = rng.randint(1, 60), rng.randint(1, 20)
        scores = [rng.randint(0, 3) for _ in range(n)]
        valid = [rng.random() < 0.8 for _ in range(n)]
        order = sorted((j for j in range(n) if valid[j]), key=lambda j: (-scores[j], -j))
        chosen = select_top(torch.tensor([[scores]]).float(), torch.tensor([k]), torch.tensor([valid]))
        assert torch.nonzero(chosen[0, 0])[:, 0].tolist() == sorted(order[:k]), f"seed {seed}"


def test_every_row_may_have_its_own_k():
    scores = torch.randn(3, 4, 20)
    k = torch.randint(1, 6, (3, 4))
    k[1, 2] = 0
    chosen = select_top(scores, k, torch.ones(4, 20, dtype=torch.bool))
    assert torch.equal(chosen.sum(-1), k)
    worst = scores.masked_fill(~chosen, math.inf).amin(-1)
    assert bool((worst > scores.masked_fill(chosen, -math.inf).amax(-1)).all())


def test_importance_is_the_mass_summed_over_the_group():
    torch.manual_seed(2)
    logits = torch.randn(1, 2, 1, 5)
    lse = torch.tensor([[[4.0], [math.inf]]])  # the second query looks elsewhere with all its mass
    assert torch.allclose(group_importance(logits, lse)[0, 0], torch.exp(logits[0, 0, 0] - 4.0))


def test_intersection_over_union():
    a = torch.tensor([[True, True, False, False], [False] * 4])
    b = torch.tensor([[True, False, True, False], [False] * 4])
    assert intersection_over_union(a, b).tolist() == [1 / 3, 1.0]

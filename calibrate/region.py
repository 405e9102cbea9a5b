"""Which tokens are anchors, which are mid, how many of them k is, and what the oracle would choose.

These definitions are part of the artifact's contract (docs/calibration.md): the figures stored in
an artifact mean what they say only if the server and `winnow eval` use the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Region:
    """The visible tokens of a query at position t are 0..t, n = t + 1 of them, itself included."""

    sink: int = 16
    window: int = 128

    def mid_mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """[m, length], true where key j is mid for the query at positions[i]."""
        j = torch.arange(length, device=positions.device)
        end = (positions + 1 - self.window).unsqueeze(1)
        return (j >= self.sink) & (j < end)


def budget(share: float, positions: torch.Tensor) -> torch.Tensor:
    """k = max(1, round half up(share * n)), n = position + 1. A share of the context, not of mid."""
    return torch.clamp(torch.floor(share * (positions + 1).double() + 0.5).long(), min=1)


def group_importance(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """[N, G, m, n] logits, [N, G, m] log normaliser over ALL visible tokens -> [N, m, n].

    The oracle's score of a key is the attention mass it receives, summed over the queries of the
    group: keeping the k largest maximises the mass that the shared set covers, which is what an
    attention output loses first. (A sum of raw logits lets a query that looks only at the sink
    outvote one that needs the token.)
    """
    return torch.exp(logits - lse.unsqueeze(-1)).sum(dim=1)


def select_top(scores: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Boolean [.., m, n]: the k[i] largest valid scores of each row; ties go to the most recent token.

    scores [.., m, n], k [m] or [.., m], valid [m, n]. Rows with fewer than k valid keys keep all of them.
    """
    masked = scores.masked_fill(~valid, -math.inf)
    k = k.to(scores.device).expand(masked.shape[:-1]).unsqueeze(-1)
    most = int(k.max().clamp(max=masked.shape[-1]))
    if most < 1:
        return torch.zeros_like(masked, dtype=torch.bool)
    cut = masked.topk(most, -1).values.gather(-1, (k - 1).clamp(0, most - 1)).masked_fill(k < 1, math.inf)
    above, equal = masked > cut, masked == cut
    left = k - above.sum(-1, keepdim=True)
    at_or_after = equal.flip(-1).cumsum(-1).flip(-1)
    return (above | (equal & (at_or_after <= left))) & valid


def intersection_over_union(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    both = (a & b).sum(-1).double()
    either = (a | b).sum(-1).double()
    return torch.where(either > 0, both / either.clamp(min=1), torch.ones_like(both))

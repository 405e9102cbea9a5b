"""What an encoder is trained to do: the losses, from scores of keys to one number per head.

`soft_top_k` is winnow's own; `hata`, `spotlight` and `hashattention` are those of the papers, kept
so that the difference can be measured (docs/calibration.md has the table).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Batch:
    """One document, some of its queries, and keys of it to rank for them. N heads, B queries, C keys.

    `weights` corrects for keys that stand for several: where only a sample of the unwanted keys is
    ranked, a sampled one counts as many times as it was likely to be left out.
    """

    keys: torch.Tensor        # [N, C, d]
    values: torch.Tensor      # [N, C, d]
    queries: torch.Tensor     # [N, G, B, d]
    importance: torch.Tensor  # [N, B, C], the oracle's score, -1 where not mid
    wanted: torch.Tensor      # [N, B, C] bool, the oracle's set
    mid: torch.Tensor         # [N, B, C] bool
    weights: torch.Tensor     # [N, C]
    k: torch.Tensor           # [B]
    logits: torch.Tensor      # [N, G, B, C] of each query head, -inf where not mid: the papers choose for each alone


def soft_top_k(scores: torch.Tensor, alpha: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Cross entropy between membership of the oracle's set and a soft top-k of the scores.

    The soft membership is sigmoid(alpha s - theta) with theta such that memberships sum to k. At
    that theta the gradient sums to zero over the keys, so only the order of keys is trained, and it
    acts where the server's cut will fall. (With a hard threshold, the k-th score itself, the
    gradient does not sum to zero and training drifts apart; a plain softmax over the keys spends
    itself on keys that are safely in.) alpha is learned with the rest: it sharpens as scores improve.
    """
    counts = batch.weights.unsqueeze(1) * batch.mid
    z = scores * alpha
    with torch.no_grad():
        masked = z.masked_fill(~batch.mid, -1e9)
        high = masked.amax(-1, keepdim=True) + 20.0
        low = z.amin(-1, keepdim=True) - 40.0
        k = batch.k.view(1, -1, 1)
        for _ in range(18):
            middle = (high + low) / 2
            too_many = (torch.sigmoid(masked - middle) * counts).sum(-1, keepdim=True) > k
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        theta = (high + low) / 2
    z = z - theta
    wanted = batch.wanted.float()
    loss = (F.softplus(-z) * wanted + F.softplus(z) * (1.0 - wanted)) * counts
    return (loss.sum(-1) / batch.k).mean(-1)


def spotlight_ranking(scores: torch.Tensor, batch: Batch, generator: torch.Generator, beta=1.0, alpha=3.0):
    """Bradley-Terry: every key among a query head's k best is to score above every other, by a margin.

    scores [N, G, B, C]. Sampled pairs stand for all, as in the paper's appendix A.3.
    """
    n, g, b, c = scores.shape
    cut = batch.logits.topk(int(batch.k.max()), -1).values.gather(-1, (batch.k - 1).view(1, 1, -1, 1).expand(n, g, -1, 1))
    wanted = batch.logits >= cut
    others = (batch.mid.unsqueeze(1) & ~wanted) * batch.weights[:, None, None, :]

    def draw(weights, count):
        """Indices [N, G, B, count], each with a probability proportional to its weight."""
        total = torch.cumsum(weights.float(), -1)
        at = torch.rand(n, g, b, count, generator=generator).to(scores.device) * total[..., -1:]
        return torch.searchsorted(total, at, right=True).clamp(max=c - 1)

    inside = scores.gather(-1, draw(wanted, 32)).unsqueeze(-1)
    outside = scores.gather(-1, draw(others, 256)).unsqueeze(-2)
    return F.softplus(alpha - beta * (inside - outside)).mean((1, 2, 3, 4))


def hata_similarity(query_codes: torch.Tensor, key_codes: torch.Tensor, weight: torch.Tensor, batch: Batch,
                    epsilon=0.01, eta=2.0, lam=1.0):
    """Labels 20..1 for the best tenth of a query head's keys and -1 for the rest; balanced, uncorrelated bits.

    The first two terms are means over the keys, where the paper has sums: a sum of its balance term grows with the
    square of the document's length. weight [N, bits, d].
    """
    counts = batch.weights[:, None, None, :] * batch.mid.unsqueeze(1)
    ranked = batch.logits.argsort(-1, descending=True)
    seen = torch.cumsum(counts.expand_as(batch.logits).gather(-1, ranked), -1)
    total = counts.sum(-1, keepdim=True)
    share = torch.empty_like(seen).scatter_(-1, ranked, seen) / total
    labels = torch.where(share <= 0.1, 20.0 - 19.0 * share / 0.1, -1.0) * counts
    squared = query_codes.pow(2).sum(-1, keepdim=True) + key_codes.pow(2).sum(-1)[:, None, None, :] \
        - 2.0 * torch.einsum("ngbr,ncr->ngbc", query_codes, key_codes)
    similar = (labels * squared / total).sum(-1).mean((1, 2))
    balance = (key_codes * batch.weights.unsqueeze(-1)).sum(1) / batch.weights.sum(-1, keepdim=True)
    gram = weight @ weight.transpose(1, 2)
    uncorrelated = (gram - torch.eye(gram.shape[-1], device=gram.device)).pow(2).sum((1, 2)).sqrt()
    return epsilon * similar + eta * balance.pow(2).sum(-1) + lam * uncorrelated


def hashattention_membership(scores: torch.Tensor, batch: Batch, top=64, alpha=20.0, beta=0.0):
    """Binary cross entropy of being among the `top` keys of largest a_i |v_i| of a query head; scores [N, G, B, C].

    Those weigh alpha + beta n: the values of the authors' program.
    """
    mid = batch.mid.unsqueeze(1)
    counts = batch.weights[:, None, None, :] * mid
    value = batch.logits + torch.log(batch.values.norm(dim=-1).clamp(min=1e-20))[:, None, None, :]
    cut = value.topk(min(top, value.shape[-1]), -1).values[..., -1:]
    wanted = ((value >= cut) & mid).float()
    length = counts.sum(-1, keepdim=True)
    loss = (F.softplus(-scores) * wanted * (alpha + beta * length) + F.softplus(scores) * (1.0 - wanted)) * counts
    return (loss.sum(-1) / length.squeeze(-1).clamp(min=1)).mean((1, 2))

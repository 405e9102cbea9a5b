"""Learned log-features: a fixed-size summary that stands for the mid tokens which were not read.

exp(q.k / sqrt d) is approximated by sum_j exp(b_j(q) + a_j(k)), so that the sums over any set of
keys need only per-feature sums of exp(a_j(k)) and exp(a_j(k)) v. Per layer and head; a map is

    h = stem(x);  h = h + down(gelu(gate(h)) * up(h));  log-features = out(h)

with GELU(x) = x Phi(x). The scalar of a ReZero block is folded into `down`, which starts at zero.

The maps start as cells of the keys (`FeatureMaps`). Real keys lie far from the origin, so that q.k of the mid tokens
is 10 to 20 below that of the sink, and differs from query to query by a term that is common to all keys. Maps that
start at random have to learn that term first, with weights of 10^5 times too much mass; they did not get there.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .artifact import storable_weight
from .capture import Shard
from .region import Region, budget, group_importance, select_top

EPSILON = 1e-6  # share of a feature's sum below which what subtraction left of it counts as nothing


class Maps(nn.Module):
    """The maps of all heads of one side. [B, t, d] -> [B, t, F]."""

    def __init__(self, mean: torch.Tensor, spread: torch.Tensor, features: int, inner: int,
                 generator: torch.Generator):
        super().__init__()
        heads, d = mean.shape
        normal = lambda *shape: torch.randn(*shape, generator=generator).to(mean.device)
        self.register_buffer("mean", mean.unsqueeze(1))
        self.register_buffer("spread", spread.unsqueeze(1))
        weights = {"stem": torch.linalg.qr(normal(heads, d, d))[0], "gate": normal(heads, inner, d) / math.sqrt(d),
                   "up": normal(heads, inner, d) / math.sqrt(d), "down": torch.zeros(heads, d, inner, device=mean.device),
                   "out": normal(heads, features, d) * 0.7 / math.sqrt(d)}
        self.weights = nn.ParameterDict({k: nn.Parameter(w) for k, w in weights.items()})
        self.biases = nn.ParameterDict({k: nn.Parameter(torch.zeros(heads, w.shape[1], device=mean.device))
                                        for k, w in weights.items()})

    def _affine(self, role: str, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.biases[role].unsqueeze(1), x, self.weights[role].transpose(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self._affine("stem", (x - self.mean) / self.spread)
        h = h + self._affine("down", F.gelu(self._affine("gate", h)) * self._affine("up", h))
        return self._affine("out", h)

    @torch.no_grad()
    def set_linear(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Makes the log-features weight x + bias [B, F, d], [B, F], as far as the block between is zero."""
        self.weights["out"].copy_((weight * self.spread) @ self.weights["stem"].transpose(1, 2))
        self.biases["out"].copy_(bias + (weight @ self.mean.transpose(1, 2)).squeeze(-1))

    @torch.no_grad()
    def folded(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        out = {role: (w.detach().clone(), self.biases[role].detach().clone()) for role, w in self.weights.items()}
        weight, bias = out["stem"]
        weight = weight / self.spread
        out["stem"] = (weight, bias - (weight @ self.mean.transpose(1, 2)).squeeze(-1))
        return {role: (storable_weight(w), b.float().cpu()) for role, (w, b) in out.items()}


def apply_folded(roles: dict[str, tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """What the server computes: x [B, t, d] float32 -> log-features [B, t, F]."""
    affine = lambda role, h: torch.baddbmm(roles[role][1].unsqueeze(1), h, roles[role][0].float().transpose(1, 2))
    h = affine("stem", x)
    h = h + affine("down", F.gelu(affine("gate", h)) * affine("up", h))
    return affine("out", h)


def cells(x: torch.Tensor, count: int, rounds: int = 15) -> torch.Tensor:
    """k-means: centres [B, count, d] of x [B, t, d]."""
    generator = torch.Generator().manual_seed(0)
    if x.shape[1] < count:
        raise ValueError(f"{x.shape[1]} sampled keys are fewer than {count} features")
    centres = x[:, torch.randperm(x.shape[1], generator=generator)[:count].to(x.device)].clone()
    for _ in range(rounds):
        member = F.one_hot(torch.cdist(x, centres).argmin(-1), count).to(x.dtype)
        size = member.sum(1).unsqueeze(-1)
        centres = torch.where(size > 0, member.transpose(1, 2) @ x / size.clamp(min=1.0), centres)
    return centres


class FeatureMaps(nn.Module):
    """Keys' and queries' maps, one of each per KV head.

    Feature j starts as a cell of the keys with centre c_j: b_j(q) = q.c_j / sqrt(d), the logit of the centre, and
    a_j(k) = t (y.y_j - |y_j|^2 / 2), a soft membership, where y are the keys less their mean, as queries weigh their
    directions. t is the SHARPNESS with which the head's sample is matched best, and a bias makes the mass that of the
    sample, in both cases less the tokens of largest mass, which are READ and not completed. Training starts from there.
    """

    SHARPNESS = (0.05, 0.1, 0.2, 0.4)
    READ = 0.02

    def __init__(self, keys: torch.Tensor, queries: torch.Tensor, features: int, inner: int, seed: int):
        """keys [N, t, d], of mid tokens, and queries [N, G, u, d] are samples."""
        super().__init__()
        self.features = features
        generator = torch.Generator().manual_seed(seed)
        flat = queries.flatten(1, 2)
        spread = lambda x: x.std(1).clamp(min=1e-3)
        self.key = Maps(keys.mean(1), spread(keys), features, inner, generator)
        self.query = Maps(flat.mean(1), spread(flat), features, inner, generator)
        self._start_as_cells(keys, queries)

    @torch.no_grad()
    def _start_as_cells(self, keys: torch.Tensor, queries: torch.Tensor) -> None:
        flat, d = queries.flatten(1, 2), keys.shape[2]
        scaling, mean = 1.0 / math.sqrt(d), keys.mean(1, keepdim=True)
        moment = flat.transpose(1, 2) @ flat / flat.shape[1]
        moment = moment + 1e-4 * moment.diagonal(dim1=1, dim2=2).mean(-1).view(-1, 1, 1) * torch.eye(d, device=keys.device)
        values, vectors = torch.linalg.eigh(moment)
        root = (vectors * values.sqrt().unsqueeze(1)) @ vectors.transpose(1, 2) * scaling
        centres = cells((keys - mean) @ root, self.features)
        inverse = (vectors / values.sqrt().unsqueeze(1)) @ vectors.transpose(1, 2) / scaling
        self.query.set_linear((centres @ inverse + mean) * scaling, torch.zeros(centres.shape[:2], device=keys.device))

        weight = centres @ root
        bias = -0.5 * centres.pow(2).sum(-1) - (weight @ mean.transpose(1, 2)).squeeze(-1)
        sharpness = torch.tensor(self.SHARPNESS, device=keys.device)
        fits, shifts = zip(*(self._fit_of(keys, queries, t, weight, bias) for t in self.SHARPNESS))
        best = torch.stack(fits).argmin(0)
        t = sharpness[best].view(-1, 1)
        self.key.set_linear(weight * t.unsqueeze(-1), bias * t)
        self.query.biases["out"].add_(torch.stack(shifts).gather(0, best.unsqueeze(0)).view(-1, 1))

    def _fit_of(self, keys: torch.Tensor, queries: torch.Tensor, t: float, weight: torch.Tensor, bias: torch.Tensor,
                most: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
        """Per head, of what is not read: divergence of the sample's attention from the maps' with sharpness t, and what their
        mass lacks."""
        self.key.set_linear(weight * t, bias * t)
        q = queries[:, :, ::max(1, queries.shape[2] // most)]
        logits = torch.einsum("ngmd,nld->ngml", q, keys) / math.sqrt(keys.shape[2])
        importance = group_importance(logits, torch.logsumexp(logits, -1))
        read = importance.topk(max(1, round(self.READ * keys.shape[1])), -1).indices
        rest = torch.ones_like(importance, dtype=torch.bool).scatter_(-1, read, False).unsqueeze(1)
        logits = logits.masked_fill(~rest, -1e9)
        teacher = torch.log_softmax(logits, -1)
        w, shift = kernel(self.key_features(keys), self.query_features(q),
                          torch.ones(keys.shape[1], dtype=torch.bool, device=keys.device))
        w = w * rest
        mass = torch.log(w.sum(-1).clamp(min=1e-30))
        student = torch.log(w.clamp(min=1e-30)) - mass.unsqueeze(-1)
        lacks = torch.logsumexp(logits, -1) - mass - shift
        divergence = (teacher.exp() * (teacher - student)).sum(-1)
        return divergence.mean((1, 2)) + lacks.std((1, 2)), lacks.mean((1, 2))

    def key_features(self, k: torch.Tensor) -> torch.Tensor:
        return self.key(k)

    def query_features(self, q: torch.Tensor) -> torch.Tensor:
        n, g, m, d = q.shape
        return self.query(q.reshape(n, g * m, d)).view(n, g, m, self.features)


def summary(a: torch.Tensor, v: torch.Tensor, members: torch.Tensor):
    """The cache of a set of keys: m_j, S_j, Z_j. a [N, n, F], v [N, n, dv], members [n] or [N, n] bool."""
    members = members.expand(a.shape[:2]).unsqueeze(-1)
    m = a.masked_fill(~members, -math.inf).amax(1)  # [N, F]
    e = torch.exp(a - m.unsqueeze(1)) * members
    return m, e.sum(1), e.transpose(1, 2) @ v


def complete(m, s, z, a_chosen, v_chosen, b):
    """The state (o, lse) of a summary less the chosen keys, for one query.

    m, s [F], z [F, dv]; a_chosen [c, F], v_chosen [c, dv]; b [F]. A feature of which subtraction left
    less than EPSILON is dropped: what remains of it is rounding.
    """
    e = torch.exp(a_chosen - m)
    rest = s - e.sum(0)
    z = z - e.T @ v_chosen
    keep = rest > EPSILON * s
    if not bool(keep.any()):
        return torch.zeros(z.shape[1], device=z.device, dtype=z.dtype), torch.tensor(-math.inf)
    c = (b + m + torch.log(rest.clamp(min=1e-30))).masked_fill(~keep, -math.inf)
    lse = torch.logsumexp(c, 0)
    weight = torch.exp(c - lse) / rest.clamp(min=1e-30)
    return (weight.masked_fill(~keep, 0.0)) @ z, lse


def kernel(a: torch.Tensor, b: torch.Tensor, members: torch.Tensor):
    """The surrogate's unnormalised weights: a [N, n, F], b [N, G, m, F] -> (w [N, G, m, n], shift [N, G, m]).

    exp(shift) w_i stands for exp(q.k_i / sqrt d). Equal to sums of the summary over any set, and
    differentiable where the summary's subtraction is not needed.
    """
    top = a.masked_fill(~members.view(1, -1, 1), -math.inf).amax(1)  # [N, F]
    c = b + top[:, None, None, :]
    shift = c.amax(-1)
    left = torch.exp(c - shift.unsqueeze(-1))
    # Keys that are not members may exceed the maximum; their weight is never used.
    right = torch.exp((a - top.unsqueeze(1)).clamp(max=0.0))
    n, g, m, f = left.shape
    return (left.reshape(n, g * m, f) @ right.transpose(1, 2)).view(n, g, m, -1), shift


def losses(maps: FeatureMaps, shard: Shard, rows: torch.Tensor, share: float, region: Region, scaling: float,
           noise: float, keys: torch.Tensor | None = None):
    """Per head [N]: squared output error relative to no completion, KL on the remainder, mass error."""
    q, k, v = shard.q[:, :, rows].float(), shard.k.float(), shard.v.float()
    positions, lse = shard.positions[rows], shard.lse[:, :, rows]
    with torch.no_grad():
        logits = torch.einsum("ngmd,nld->ngml", q, k) * scaling
        mid = region.mid_mask(positions, shard.length)
        importance = group_importance(logits, lse)
        if noise > 0:  # the server's sets are not the oracle's; the maps must do for those, too
            importance = importance * torch.exp(noise * torch.randn_like(importance))
        chosen = select_top(importance, budget(share, positions), mid).unsqueeze(1)
        p = torch.exp(logits - lse.unsqueeze(-1)) * mid
        anchor_mass = torch.exp(shard.anchor_lse[:, :, rows] - lse).unsqueeze(-1)
        exact_mass = anchor_mass + (p * chosen).sum(-1, keepdim=True)
        exact = anchor_mass * shard.anchor[:, :, rows].float() + (p * chosen) @ v.unsqueeze(1)
        rest = p * ~chosen
        rest_mass = rest.sum(-1, keepdim=True)
        dense = exact + rest @ v.unsqueeze(1)
        without = ((exact / exact_mass - dense) ** 2).sum(-1)
        live = (mid & ~chosen)
    w, shift = kernel(maps.key_features(k), maps.query_features(q), mid.any(0))
    w = w * live
    total = w.sum(-1, keepdim=True)
    log_mass = torch.log(total.clamp(min=1e-30)) + (shift - lse).unsqueeze(-1)
    scale = torch.exp((shift - lse).clamp(max=30.0)).unsqueeze(-1)
    mass = total * scale
    estimate = (exact + (w @ v.unsqueeze(1)) * scale) / (exact_mass + mass)
    error = ((estimate - dense) ** 2).sum(-1)
    output = error.mean((1, 2)) / without.mean((1, 2)).clamp(min=1e-12)
    teacher = rest / rest_mass.clamp(min=1e-20)
    student = torch.log(w.clamp(min=1e-30)) - torch.log(total.clamp(min=1e-30))
    divergence = (teacher * (torch.log(teacher.clamp(min=1e-20)) - student)).sum(-1).mean((1, 2))
    # The logarithm itself counts: the clamped exponent above has no gradient where the mass is far too large.
    off = (log_mass - torch.log(rest_mass.clamp(min=1e-20))).squeeze(-1)
    # Overestimates hurt more: they dilute tokens that were read exactly.
    partition = (F.huber_loss(off, torch.zeros_like(off), reduction="none") * torch.where(off > 0, 2.0, 1.0)).mean((1, 2))
    return output, divergence, partition

"""The server's policies, simulated with whole tensors: slow, exact, and short enough to be checked by eye.

A policy is written as on the server's command line: `dense`, `window`, `oracle:k=2%`,
`hata:k=2%,p=0.95,completion=on`, `lsh:k=2%,bits=1024`, .. (`bits` only for lsh).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .artifact import Artifact
from .features import apply_folded, kernel
from .region import Region, budget, group_importance, select_top

NAMES = ("dense", "window", "oracle", "quest", "lsh", "hata", "spotlight", "hashattention")
QUEST_PAGE = 16
REFUSED = -1e30  # log-feature of queries at heads where completion is refused
CANDIDATES = 4  # times k, of which pruning keeps what p asks for


@dataclass(frozen=True)
class Policy:
    name: str
    share: float = 0.0
    count: int = 0
    completion: bool = False
    bits: int = 128
    p: float | None = None

    @staticmethod
    def parse(text: str) -> "Policy":
        name, _, rest = text.partition(":")
        if name not in NAMES:
            raise ValueError(f"policy {text!r}: unknown name {name!r}; one of {', '.join(NAMES)}")
        values = {}
        for option in filter(None, rest.split(",")):
            key, _, value = option.partition("=")
            if key == "k" and value.endswith("%"):
                values["share"] = float(value[:-1]) / 100.0
            elif key == "k":
                values["count"] = int(value)
            elif key == "completion" and value in ("on", "off"):
                values["completion"] = value == "on"
            elif key == "p" and name not in ("dense", "window"):
                values["p"] = float(value)
            elif key == "bits" and name == "lsh":
                values["bits"] = int(value)
            else:
                raise ValueError(f"policy {text!r}: unknown option {option!r}")
        policy = Policy(name, **values)
        if name not in ("dense", "window") and not (0.0 < policy.share <= 1.0 or policy.count > 0):
            raise ValueError(f"policy {text!r}: k is missing or not positive")
        if policy.p is not None and not 0.0 < policy.p <= 1.0:
            raise ValueError(f"policy {text!r}: p is not above 0 and at most 1")
        return policy

    def budget(self, positions: torch.Tensor) -> torch.Tensor:
        if self.count:
            return torch.full_like(positions, self.count)
        return budget(self.share, positions)


def fast_codes(x: torch.Tensor, stages) -> torch.Tensor:
    """Signs as +-1 [N, t, bits], by matrix products: codes.torch_activations but for the order of sums."""
    x = x.to(torch.bfloat16).float()
    for i, (weight, bias) in enumerate(stages):
        x = torch.baddbmm(bias.unsqueeze(1), x, weight.float().transpose(1, 2))
        if i + 1 < len(stages):
            x = F.silu(x.to(torch.bfloat16).float()).to(torch.bfloat16).float()
    return torch.where(x >= 0, 1.0, -1.0)


def random_planes(bits: int, head_dim: int, heads: int, seed: int = 0) -> torch.Tensor:
    """[heads, bits, d]: rows of as many random rotations as `bits` need."""
    generator = torch.Generator().manual_seed(seed)
    rotations = [torch.linalg.qr(torch.randn(heads, head_dim, head_dim, generator=generator))[0]
                 for _ in range(-(-bits // head_dim))]
    return torch.cat(rotations, 1)[:, :bits]


class Selector:
    """Scores keys for the queries of a group, for the KV heads of one layer (or of several, stacked)."""

    def __init__(self, policy: Policy, scaling: float, functions=None, seed: int = 0):
        """functions: {"key": stages, "query": stages} of the heads at hand, for a learned policy."""
        self.policy, self._scaling, self._functions, self._seed = policy, scaling, functions, seed

    def scores(self, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, mid: torch.Tensor) -> torch.Tensor:
        """q [N, G, m, d], k [N, n, d], lse [N, G, m] (of all visible tokens), mid [m, n] -> [N, m, n]."""
        n, g, m, d = q.shape
        name = self.policy.name
        if name == "oracle":
            logits = torch.einsum("ngmd,nld->ngml", q, k) * self._scaling
            return group_importance(logits, lse)
        if name == "quest":
            return self._quest(q, k, mid)
        if name == "lsh":
            planes = random_planes(self.policy.bits, d, n, self._seed).to(k.device)
            sign = lambda x: torch.where(x @ planes.transpose(1, 2) >= 0, 1.0, -1.0)
            keys, queries = sign(k), sign(q.reshape(n, g * m, d))
        else:
            keys = fast_codes(k, self._functions["key"])
            if self._functions["query"][0][0].shape[2] == d:
                queries = fast_codes(q.reshape(n, g * m, d), self._functions["query"])
            else:  # one function of the whole group: G codes side by side
                queries = fast_codes(q.transpose(1, 2).reshape(n, m, g * d), self._functions["query"])
                return queries.view(n, m, g, -1).sum(2) @ keys.transpose(1, 2)
        # Agreement less a constant; sums of +-1 are exact in float32.
        return queries.view(n, g, m, -1).sum(1) @ keys.transpose(1, 2)

    def _quest(self, q, k, mid):
        n, length, d = k.shape
        pages = -(-length // QUEST_PAGE)
        padded = F.pad(k, (0, 0, 0, pages * QUEST_PAGE - length), mode="constant", value=0.0)
        blocks = padded.view(n, pages, QUEST_PAGE, d)
        blocks[:, -1, length - (pages - 1) * QUEST_PAGE:] = k[:, -1:].clone()
        high, low = blocks.amax(2), blocks.amin(2)
        bound = torch.relu(q).flatten(1, 2) @ high.transpose(1, 2) + torch.clamp(q, max=0).flatten(1, 2) @ low.transpose(1, 2)
        bound = bound.view(n, q.shape[1], q.shape[2], pages).sum(1)
        return bound.repeat_interleave(QUEST_PAGE, -1)[..., :length]


def four_bit(k: torch.Tensor) -> torch.Tensor:
    """What the server's four-bit keys stand for (kernels/int4_keys.h); k [..., d]."""
    low, high = k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)
    towards = lambda x, limit: torch.nextafter(x, torch.full_like(x, limit))
    zero = low.to(torch.bfloat16)
    zero = torch.where(zero.float() > low, towards(zero, -math.inf), zero).float()
    step = (high - zero) / 15.0
    scale = step.to(torch.bfloat16)
    scale = torch.where(scale.float() < step, towards(scale, math.inf), scale).float().clamp(min=2.0**-100)
    code = torch.round((k - zero) * (1.0 / scale)).clamp(0.0, 15.0)
    return torch.where(high > zero, zero + scale * code, zero.expand_as(k))


def top_p(p: float, logits: torch.Tensor, candidates: torch.Tensor, anchor_lse: torch.Tensor) -> torch.Tensor:
    """Twilight's pruning as kernels/top_p.h has it: which of `candidates` [N, m, n] a group keeps.

    logits [N, G, m, n] are of four-bit keys, anchor_lse [N, G, m] the log-sum-exp of the anchors'. Each
    query keeps the fewest candidates whose weight, together with the anchors', reaches p of the
    weight of anchors and candidates; the group keeps what any of its queries does.
    """
    logits = logits.masked_fill(~candidates.unsqueeze(1), -math.inf)
    top = torch.maximum(logits.amax(-1), anchor_lse).unsqueeze(-1)
    weight = torch.exp(logits - top)
    anchors = torch.exp(anchor_lse.unsqueeze(-1) - top).double()
    needed = p * (anchors + weight.sum(-1, keepdim=True, dtype=torch.float64)) - anchors
    kept = torch.zeros_like(candidates)
    most = int(candidates.sum(-1).max())
    if most == 0:
        return kept
    # The candidates' positions, the latest first: a stable sort then puts the later of equal weights first.
    places = torch.arange(candidates.shape[-1], device=candidates.device).masked_fill(~candidates, -1).topk(most, -1).values
    absent, places = places < 0, places.clamp(min=0)
    for g in range(weight.shape[1]):
        own = weight[:, g].gather(-1, places).masked_fill(absent, 0.0)
        value, order = torch.sort(own, dim=-1, descending=True, stable=True)
        before = torch.cumsum(value.double(), -1) - value.double()
        keep = (value > 0) & ((before < needed[:, g]) if p < 1.0 else torch.ones_like(value, dtype=torch.bool))
        chosen = places.gather(-1, order).masked_fill(~keep, candidates.shape[-1])  # of no token: a spare column
        spare = torch.zeros(*kept.shape[:-1], kept.shape[-1] + 1, dtype=torch.bool, device=kept.device)
        kept |= spare.scatter_(-1, chosen, True)[..., :-1]
    return kept


@dataclass
class Outcome:
    """What attention under a policy gave, and how it compares with dense attention. Heads as in q."""

    output: torch.Tensor       # [N, G, m, d]
    chosen: torch.Tensor       # [N, m, n] bool
    wanted: torch.Tensor       # [N, m, n] bool, the oracle's set of equal size
    covered: torch.Tensor      # [N, G, m] share of the attention mass that anchors and chosen tokens hold
    mid_covered: torch.Tensor  # [N, G, m] share of the mid tokens' mass that the chosen hold


def attend(policy: Policy, selector: Selector, q, k, v, anchor, anchor_lse, lse, positions, region: Region,
           scaling: float, features=None, estimated_anchor_lse=None) -> Outcome:
    """One layer's (or several layers') attention. Shapes as in capture.Shard, all float32.

    features: {"key": roles, "query": roles} of the heads at hand; needed for completion.
    estimated_anchor_lse: anchor_lse of four-bit keys, for pruning; absent where the anchors' keys are
    not at hand (captures do not keep a suffix's): then the exact one stands for it.
    """
    n, g, m, d = q.shape
    mid = region.mid_mask(positions, k.shape[1])
    logits = torch.einsum("ngmd,nld->ngml", q, k) * scaling
    p = torch.exp(logits - lse.unsqueeze(-1)) * mid
    importance = p.sum(1)
    if policy.name == "dense":
        chosen = mid.unsqueeze(0).expand(n, -1, -1)
        wanted = chosen
    elif policy.name == "window":
        chosen = torch.zeros_like(importance, dtype=torch.bool)
        wanted = chosen
    else:
        amount = policy.budget(positions) * (1 if policy.p is None else CANDIDATES)
        scores = importance if policy.name == "oracle" else selector.scores(q, k, lse, mid)
        chosen = select_top(scores, amount, mid)
        if policy.p is not None:
            estimated = torch.einsum("ngmd,nld->ngml", q, four_bit(k)) * scaling
            chosen = top_p(policy.p, estimated, chosen,
                           anchor_lse if estimated_anchor_lse is None else estimated_anchor_lse)
        wanted = select_top(importance, chosen.sum(-1), mid)
    picked = p * chosen.unsqueeze(1)
    anchor_mass = torch.exp(anchor_lse - lse)
    mass = anchor_mass + picked.sum(-1)
    numerator = anchor_mass.unsqueeze(-1) * anchor + picked @ v.unsqueeze(1)
    covered = mass.clone()
    if policy.completion and policy.name != "dense":
        live = mid & ~chosen
        members = mid.any(0)
        if bool(members.any()):
            a = apply_folded(features["key"], k)
            b = apply_folded(features["query"], q.reshape(n, g * m, d)).view(n, g, m, -1)
            w, shift = kernel(a, b, members)
            w = w * live.unsqueeze(1) * torch.exp((shift - lse).clamp(max=60.0)).unsqueeze(-1)
            mass = mass + w.sum(-1)
            numerator = numerator + w @ v.unsqueeze(1)
    mid_mass = p.sum(-1)
    return Outcome(numerator / mass.unsqueeze(-1), chosen, wanted, covered,
                   picked.sum(-1) / mid_mass.clamp(min=1e-20))


def stacked_functions(artifact: Artifact, kind: str, layers, device="cpu"):
    """The stages of several layers as one: {"key": [(weight [N, out, in], bias)], "query": ..}."""
    functions = artifact.functions.get(kind)
    if functions is None:
        raise ValueError(f"the artifact holds no {kind!r}; it has {sorted(artifact.functions)}")
    missing = [l for l in layers if l not in functions.layers]
    if missing:
        raise ValueError(f"the artifact holds no {kind!r} for layers {missing}")
    out = {}
    for side in ("key", "query"):
        per_layer = [functions.layers[l][side] for l in layers]
        out[side] = [(torch.cat([s[i][0] for s in per_layer]).to(device), torch.cat([s[i][1] for s in per_layer]).to(device))
                     for i in range(len(per_layer[0]))]
    return out


def stacked_features(artifact: Artifact, layers, device="cpu"):
    if artifact.features is None:
        raise ValueError("the artifact holds no feature maps: completion is not possible")
    out = {}
    for side in ("key", "query"):
        per_layer = [artifact.features.layers[l][side] for l in layers]
        out[side] = {role: (torch.cat([s[role][0] for s in per_layer]).to(device),
                            torch.cat([s[role][1] for s in per_layer]).to(device)) for role in per_layer[0]}
    if artifact.features.helps is not None:  # at refused heads the summary has no mass, as in the server
        order = sorted(artifact.features.layers)
        kv_heads = artifact.shape["kv_heads"]
        helps = [h for l in layers for h in artifact.features.helps[order.index(l) * kv_heads:][:kv_heads]]
        weight, bias = out["query"]["out"]
        out["query"]["out"] = (weight, bias.masked_fill(~torch.tensor(helps, device=bias.device).unsqueeze(1), REFUSED))
    return out

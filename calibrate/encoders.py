"""The learned hash functions: chains of affine stages with SiLU between them, and a sign at the end.

    hata           one stage
    spotlight      two stages
    hashattention  three stages

Keys and queries have their own chains. A query chain of kind `head` maps each query of a group on its
own to one code, all by the same function; of kind `each`, by a function of its own for each query head; one of kind
`group` maps all G queries, side by side, to G codes. Heads of all layers are trained at once, stacked in the first
dimension: N = layers * KV heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

STAGES = {"hata": 1, "spotlight": 2, "hashattention": 3}
DEFAULT_BITS = {"hata": 128, "spotlight": 128, "hashattention": 32}


@dataclass(frozen=True)
class Balance:
    """Linear maps under which keys and queries have equal, diagonal second moments.

    With k' = Tk (k - mean) and q' = Tq q the dot product is kept up to a constant per query:
    q'.k' = q.k - q.mean. Directions in which dot products vary most get the largest moments, so
    random hyperplanes in this space spend the bits where they tell keys apart.
    """

    mean: torch.Tensor       # [N, d]
    key_map: torch.Tensor    # [N, d, d]
    query_map: torch.Tensor  # [N, d, d]

    @staticmethod
    def identity(keys: torch.Tensor) -> "Balance":
        n, _, d = keys.shape
        eye = torch.eye(d, device=keys.device).expand(n, d, d).clone()
        return Balance(torch.zeros(n, d, device=keys.device), eye, eye.clone())

    @staticmethod
    def fit(keys: torch.Tensor, queries: torch.Tensor) -> "Balance":
        """keys [N, t, d], queries [N, u, d]."""
        keys, queries = keys.double(), queries.double()
        d = keys.shape[-1]
        eye = torch.eye(d, dtype=torch.float64, device=keys.device)
        mean = keys.mean(1)
        centred = keys - mean.unsqueeze(1)
        moment = lambda x: x.transpose(1, 2) @ x / x.shape[1]
        regular = lambda c: c + eye * (1e-4 * c.diagonal(dim1=1, dim2=2).mean(-1) + 1e-12).view(-1, 1, 1)
        lk = torch.linalg.cholesky(regular(moment(centred)))
        lq = torch.linalg.cholesky(regular(moment(queries)))
        u, s, vt = torch.linalg.svd(lq.transpose(1, 2) @ lk)
        root = s.sqrt().unsqueeze(-1)
        key_map = root * (vt @ torch.linalg.inv(lk))
        query_map = root * (u.transpose(1, 2) @ torch.linalg.inv(lq))
        return Balance(mean.float(), key_map.float(), query_map.float())


class Chain(nn.Module):
    """One side's functions for all heads. Input [B, t, d] -> pre-activations [B, t, bits]."""

    def __init__(self, weights: list[torch.Tensor], last_bias: bool = True):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(w.clone()) for w in weights])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros_like(w[:, :, 0])) for w in weights])
        self.biases[-1].requires_grad_(last_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = len(self.weights) - 1
        for i, (w, b) in enumerate(zip(self.weights, self.biases)):
            x = torch.baddbmm(b.unsqueeze(1), x, w.transpose(1, 2))
            if i < last:
                x = F.silu(x)
        return x


def _unit_rows(w: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Scales rows so that w.x has mean square 1 when x has the given diagonal second moment [B, d]."""
    power = (w * w * moment.unsqueeze(1)).sum(-1, keepdim=True)
    return w / power.clamp(min=1e-12).sqrt()


def initial_weights(kind: str, bits: int, hidden: int, balance: Balance,
                    generator: torch.Generator) -> list[torch.Tensor]:
    """Weights [N, out, in] in balanced coordinates: random hyperplanes, and for deeper chains near-linear stages.

    silu(a) - silu(-a) = a, so a stage of mirrored pairs starts as a linear map and learns its
    curvature, instead of having to learn the dot product first.
    """
    n, d = balance.mean.shape
    device = balance.mean.device

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    ones = torch.ones(n, d, device=device)
    stages = STAGES[kind]
    # Rows of random rotations: planes at right angles repeat each other less than independent ones.
    planes = torch.cat([torch.linalg.qr(normal(n, d, d))[0] for _ in range(-(-bits // d))], 1)[:, :bits]
    if stages == 1:
        return [planes]
    if hidden >= 2 * d:
        half = normal(n, d, d)
        basis = torch.linalg.qr(half)[0]
        extra = _unit_rows(normal(n, hidden - 2 * d, d), ones)
        first = torch.cat([basis, -basis, extra], 1)
        back = torch.cat([basis, -basis, torch.zeros_like(extra)], 1).transpose(1, 2)  # [n, d, hidden]
    else:
        basis = torch.linalg.qr(normal(n, d, d))[0][:, : hidden // 2]
        first = torch.cat([basis, -basis], 1)
        back = first.transpose(1, 2)
        if first.shape[1] < hidden:
            raise ValueError("an odd number of hidden units cannot be paired")
    weights = [first]
    for _ in range(stages - 2):
        # x -> back x is (nearly) the input again; then mirror it once more.
        weights.append(first @ back)
    weights.append(planes @ back)
    return weights


def random_weights(kind: str, bits: int, hidden: int, heads: int, head_dim: int, device, generator) -> list[torch.Tensor]:
    """Weights [N, out, in] as the papers start: independent normal values of variance 1 / in."""
    widths = [head_dim, *[hidden] * (STAGES[kind] - 1), bits]
    return [(torch.randn(heads, b, a, generator=generator) / math.sqrt(a)).to(device) for a, b in zip(widths, widths[1:])]


def block_diagonal(w: torch.Tensor, copies: int) -> torch.Tensor:
    """[N, out, in] -> [N, copies * out, copies * in]: every copy sees its own part of the input."""
    n, out, width = w.shape
    eye = torch.eye(copies, device=w.device)
    return torch.einsum("noi,gh->ngohi", w, eye).reshape(n, copies * out, copies * width)


class Encoder(nn.Module):
    """Both chains, trained in balanced coordinates; `folded` gives them in the model's own.

    query: "shared", one chain for keys and queries, as the papers' hata and spotlight have it; "head", "each" or
    "group" (see the top of this file).
    """

    def __init__(self, kind: str, bits: int, weights: list[torch.Tensor], balance: Balance, group: int, query: str,
                 alpha: float, last_bias: bool = True):
        super().__init__()
        self.kind, self.bits, self.group, self.query_kind = kind, bits, group, query
        self.key = Chain(weights, last_bias)
        if query == "shared":
            self.query = self.key
        elif query == "group":
            self.query = Chain([block_diagonal(w, group) for w in weights], last_bias)
        elif query == "each":
            self.query = Chain([w.repeat_interleave(group, 0) for w in weights], last_bias)
        elif query == "head":
            self.query = Chain(weights, last_bias)
        else:
            raise ValueError(f"query functions are of kind shared, head, each or group, not {query!r}")
        n = balance.mean.shape[0]
        device = balance.mean.device
        self.register_buffer("mean", balance.mean)
        self.register_buffer("key_map", balance.key_map)
        self.register_buffer("query_map", balance.query_map)
        self.register_buffer("scale", torch.ones(n, 1, 1, device=device))
        # How much one agreeing bit is worth in logits: of the loss soft_top_k, not stored.
        self.log_alpha = nn.Parameter(torch.full((n,), math.log(alpha), device=device))

    @torch.no_grad()
    def set_scale(self, keys: torch.Tensor) -> None:
        """One scale per head, so that the first stage sees keys of mean square 1 per dimension."""
        x = self.balanced_keys(keys)
        self.scale.copy_(self.scale / x.pow(2).mean((1, 2)).sqrt().clamp(min=1e-6).view(-1, 1, 1))

    def balanced_keys(self, k: torch.Tensor) -> torch.Tensor:
        return (k - self.mean.unsqueeze(1)) @ self.key_map.transpose(1, 2) * self.scale

    def key_activations(self, k: torch.Tensor) -> torch.Tensor:
        """[N, t, d] -> [N, t, bits]"""
        return self.key(self.balanced_keys(k))

    def query_activations(self, q: torch.Tensor) -> torch.Tensor:
        """[N, G, m, d] -> [N, G, m, bits]"""
        n, g, m, d = q.shape
        x = q.reshape(n, g * m, d) @ self.query_map.transpose(1, 2) * self.scale
        if self.query_kind == "group":
            x = self.query(x.view(n, g, m, d).transpose(1, 2).reshape(n, m, g * d))
            return x.view(n, m, g, self.bits).transpose(1, 2)
        x = self.query(x.view(n * g, m, d)) if self.query_kind == "each" else self.query(x)
        return x.view(n, g, m, self.bits)

    @torch.no_grad()
    def folded(self) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """{"key" | "query": (weights [N, out, in], biases [N, out])} in the coordinates of the KV cache.

        Functions of kind `each` become one of the group, whose weights are zero between different query heads.
        """
        out = {}
        n, g = self.mean.shape[0], self.group
        for side, chain in (("key", self.key), ("query", self.query)):
            weights = [w.detach().clone() for w in chain.weights]
            biases = [b.detach().clone() for b in chain.biases]
            linear = self.key_map if side == "key" else self.query_map
            if side == "query" and self.query_kind == "each":
                eye = torch.eye(g, device=self.mean.device)
                weights = [torch.einsum("ngoi,gh->ngohi", w.view(n, g, *w.shape[1:]), eye)
                           .reshape(n, g * w.shape[1], g * w.shape[2]) for w in weights]
                biases = [b.view(n, -1) for b in biases]
            if side == "query" and self.query_kind in ("each", "group"):
                linear = block_diagonal(linear, g)
            weights[0] = weights[0] @ (linear * self.scale)
            if side == "key":
                biases[0] = biases[0] - (weights[0] @ self.mean.unsqueeze(-1)).squeeze(-1)
            out[side] = (weights, biases)
        return out


def clip_gradients(module: nn.Module, heads: int, limit: float) -> None:
    """Per head, so that one head's outliers do not slow the others. Every parameter's first dimension counts heads."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.stack([g.reshape(heads, -1).pow(2).sum(1) for g in gradients]).sum(0).sqrt()
    factor = (limit / norm.clamp(min=1e-12)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor.repeat_interleave(g.shape[0] // heads).view(-1, *[1] * (g.dim() - 1)))


def soft_sign(x: torch.Tensor, sharpness: float) -> torch.Tensor:
    y = x * sharpness
    return y / (1.0 + y.abs())


def straight_through(x: torch.Tensor, sharpness: float) -> torch.Tensor:
    """Hard sign forward, the slope of a soft sign backward."""
    soft = soft_sign(x, sharpness)
    hard = torch.where(x >= 0, 1.0, -1.0)
    return hard.detach() + soft - soft.detach()

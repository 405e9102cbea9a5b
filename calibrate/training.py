"""Trains encoders and feature maps on captured shards, layer by layer in passes that fit memory.

Every step's randomness comes from (seed, kind, pass, step) alone and the state is saved as it goes, so
that a run which was interrupted ends with the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from . import recipes
from .artifact import Functions, storable_weight
from .capture import Shard, load_shard
from .encoders import (DEFAULT_BITS, Balance, Encoder, clip_gradients, initial_weights, random_weights, soft_sign,
                       straight_through)
from .features import FeatureMaps, losses
from .recipes import Batch
from .region import Region, budget, group_importance

SAVE_EVERY = 100


@dataclass(frozen=True)
class EncoderSettings:
    kind: str
    bits: int
    hidden: int
    recipe: str = "winnow"       # or "paper"
    query: str = "group"         # functions of queries: "group", "head", "each" or "shared" (encoders.py)
    steps: int = 1500
    queries: int = 64            # per step
    candidates: int = 3072       # keys ranked per step and head; the rest is represented by a sample
    shares: tuple[float, ...] = (0.02,)  # of the context that is to be found: one for each step
    moved: float = 0.5           # share of steps that move their document along the positions
    learning_rate: float = 2e-3
    sharpness: float = 1.0
    alpha: float = 0.08
    seed: int = 0


@dataclass(frozen=True)
class FeatureSettings:
    features: int = 64
    inner: int = 64
    steps: int = 1200
    queries: int = 32
    shares: tuple[float, ...] = (0.01, 0.02, 0.05)
    learning_rate: float = 2e-3
    noise: tuple[float, ...] = (1.0,)  # of the log of what keys are chosen by: one for each step
    seed: int = 0


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """RoPE as the models have it: dimension i turns with i + d / 2. x [..., d], angles [d / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Corpus:
    """Training shards of some layers, in memory, and statistics of their keys and queries."""

    def __init__(self, paths: list[Path], layers: tuple[int, ...], group: int, head_dim: int, region: Region,
                 device: str, frequencies: torch.Tensor | None = None, positions: int = 0):
        """frequencies: RoPE's radians per token, [head_dim / 2], of a model of `positions` positions; for `moved`."""
        if not paths:
            raise ValueError("no training documents were captured")
        self.shards = [load_shard(p, layers, group, device) for p in paths]
        self.region, self.scaling = region, 1.0 / math.sqrt(head_dim)
        self.frequencies = None if frequencies is None else frequencies.to(device)
        self.positions = min(positions, 2 * max(s.length for s in self.shards))

    def moved(self, rng: random.Random, share: float, length: int, *vectors: torch.Tensor):
        """A `share` of the time, the vectors as they would be had the document begun some tokens later.

        RoPE makes that a rotation: products of queries and keys stay as they are, codes do not.
        """
        room = self.positions - length
        if self.frequencies is None or room <= 0 or rng.random() >= share:
            return vectors
        angles = rng.randrange(1, room + 1) * self.frequencies
        return tuple(rotated(x, angles) for x in vectors)

    def sample(self, rows: int = 1500) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [N, t, d] and queries [N, G, u, d] of all documents, for first and second moments."""
        generator = torch.Generator().manual_seed(0)
        pick = lambda s: torch.randperm(s.length, generator=generator)[:rows].to(s.k.device)
        keys = torch.cat([s.k[:, pick(s)] for s in self.shards], 1).float()
        queries = torch.cat([s.q for s in self.shards], 2).float()
        return keys, queries

    def mid_sample(self, rows: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
        """As `sample`, `rows` keys of all documents together and none of a sink, whose weight is that of thousands."""
        generator = torch.Generator().manual_seed(0)
        each = -(-rows // len(self.shards))
        pick = lambda s: (torch.randperm(s.length - self.region.sink, generator=generator)[:each]
                          + self.region.sink).to(s.k.device)
        keys = torch.cat([s.k[:, pick(s)] for s in self.shards], 1).float()
        return keys, torch.cat([s.q for s in self.shards], 2).float()

    def pick(self, rng: random.Random, queries: int) -> tuple[Shard, torch.Tensor]:
        """A document and `queries` of its queries; half are those of answers where it has any."""
        shard = self.shards[rng.randrange(len(self.shards))]
        answers = torch.nonzero(shard.answers == 1)[:, 0].tolist()
        everything = range(len(shard.positions))
        rows = [rng.choice(answers) if answers and i < queries // 2 else rng.choice(everything) for i in range(queries)]
        return shard, torch.tensor(sorted(rows), device=shard.k.device)

    @torch.no_grad()
    def batch(self, rng: random.Random, generator: torch.Generator, queries: int, candidates: int,
              share: float, moved: float = 0.0) -> Batch:
        shard, rows = self.pick(rng, queries)
        q, keys = self.moved(rng, moved, shard.length, shard.q[:, :, rows].float(), shard.k.float())
        positions = shard.positions[rows]
        n, length, d = keys.shape
        b = len(rows)
        mid = self.region.mid_mask(positions, length)
        logits = torch.einsum("ngmd,nld->ngml", q, keys) * self.scaling
        importance = group_importance(logits, shard.lse[:, :, rows]).masked_fill(~mid, -1.0)
        logits = logits.masked_fill(~mid, -math.inf)
        k = torch.minimum(budget(share, positions), mid.sum(-1)).clamp(min=1)
        top = importance.topk(int(k.max()), -1).values
        cut = top.gather(-1, (k - 1).view(1, -1, 1).expand(n, -1, 1))
        wanted = (importance >= cut) & mid
        mid = mid.unsqueeze(0).expand(n, -1, -1)
        weights = torch.ones(n, length, device=keys.device)
        values = shard.v
        if length > candidates:
            # Per head: the keys that some query wants or nearly wants, and a sample of the others.
            nearness = (importance / cut.clamp(min=1e-30)).amax(1)
            near = nearness.topk(candidates // 2, -1).indices
            lottery = torch.rand(n, length, generator=generator).to(keys.device).scatter_(1, near, -1.0)
            others = lottery.topk(candidates - candidates // 2, -1).indices
            chosen = torch.cat([near, others], 1)
            weights = torch.ones(n, candidates, device=keys.device)
            weights[:, candidates // 2:] = (length - candidates // 2) / others.shape[1]
            rows_of = chosen.unsqueeze(-1).expand(-1, -1, d)
            keys, values = keys.gather(1, rows_of), values.gather(1, rows_of)
            columns = chosen.unsqueeze(1).expand(-1, b, -1)
            importance, wanted, mid = (x.gather(2, columns) for x in (importance, wanted, mid))
            logits = logits.gather(3, columns.unsqueeze(1).expand(-1, logits.shape[1], -1, -1))
        return Batch(keys, values.float(), q, importance, wanted, mid, weights, k, logits)


def _save(path: Path, state: dict) -> None:
    temporary = path.with_suffix(".part")
    torch.save(state, temporary)
    os.replace(temporary, path)


def _resume(path: Path | None, settings, module, optimizer) -> int:
    """Loads what `path` holds, if it is of the same settings; returns the step to continue with."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["settings"] != json.dumps(asdict(settings)):
        raise ValueError(f"{path} was trained with other settings: {state['settings']}; "
                         "give another --resume directory or remove this file")
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _schedule(optimizer, rate: float, step: int, steps: int, warm_up: int = 50, floor: float = 0.01) -> None:
    warm = min(1.0, (step + 1) / warm_up)
    for group in optimizer.param_groups:
        group["lr"] = rate * warm * (0.5 * (1.0 + math.cos(math.pi * step / steps)) + floor)


def build_encoder(corpus: Corpus, settings: EncoderSettings, group: int) -> Encoder:
    keys, queries = corpus.sample()
    generator = torch.Generator().manual_seed(settings.seed)
    heads, _, head_dim = keys.shape
    if settings.recipe == "paper":  # raw coordinates
        balance = Balance.identity(keys)
        weights = random_weights(settings.kind, settings.bits, settings.hidden, heads, head_dim, keys.device, generator)
    else:
        balance = Balance.fit(keys, queries.flatten(1, 2))
        weights = initial_weights(settings.kind, settings.bits, settings.hidden, balance, generator)
    # The papers' hata and spotlight have no bias in their last stage.
    last_bias = settings.recipe == "winnow" or settings.kind == "hashattention"
    encoder = Encoder(settings.kind, settings.bits, weights, balance, group, settings.query, settings.alpha, last_bias)
    if settings.recipe == "winnow":
        encoder.set_scale(keys)
    return encoder.to(keys.device)


def encoder_loss(encoder: Encoder, batch: Batch, settings: EncoderSettings, generator) -> torch.Tensor:
    """Per head [N]."""
    key = encoder.key_activations(batch.keys)
    query = encoder.query_activations(batch.queries)
    if settings.recipe == "winnow":
        key, query = straight_through(key, settings.sharpness), straight_through(query, settings.sharpness)
        alpha = encoder.log_alpha.exp().view(-1, 1, 1)
        return recipes.soft_top_k(query.sum(1) @ key.transpose(1, 2), alpha, batch)
    agreement = lambda query, key: query @ key.unsqueeze(1).transpose(2, 3)  # [N, G, B, C]
    if settings.kind == "hata":
        key, query = 2.0 * torch.sigmoid(0.1 * key) - 1.0, 2.0 * torch.sigmoid(0.1 * query) - 1.0
        return recipes.hata_similarity(query, key, encoder.key.weights[0], batch)
    if settings.kind == "spotlight":
        return recipes.spotlight_ranking(agreement(soft_sign(query, 64.0), soft_sign(key, 64.0)), batch, generator)
    return recipes.hashattention_membership(agreement(torch.tanh(query), torch.tanh(key)), batch)


class _Optimizer:
    """The optimiser, rate and clipping of a recipe; the papers' as their appendices give them."""

    def __init__(self, settings: EncoderSettings, encoder: Encoder):
        parameters = [p for p in encoder.parameters() if p.requires_grad]
        self._settings, self._encoder = settings, encoder
        if settings.recipe == "winnow":
            self._rate, self._clip = settings.learning_rate, 1.0
            self.state = torch.optim.AdamW(parameters, lr=self._rate, betas=(0.9, 0.98), weight_decay=0.0)
        elif settings.kind == "hata":
            self._rate, self._clip = 0.1, None
            self.state = torch.optim.SGD(parameters, lr=self._rate, momentum=0.9, weight_decay=1e-6)
        elif settings.kind == "spotlight":
            self._rate, self._clip = 1e-3, 1.0
            self.state = torch.optim.AdamW(parameters, lr=self._rate, betas=(0.9, 0.98), weight_decay=0.1)
        else:
            self._rate, self._clip = 1e-3, None
            self.state = torch.optim.Adam(parameters, lr=self._rate)

    def step(self, loss: torch.Tensor, step: int) -> None:
        if self._settings.recipe == "winnow":
            _schedule(self.state, self._rate, step, self._settings.steps)
        elif self._settings.kind == "spotlight":
            _schedule(self.state, self._rate, step, self._settings.steps, max(1, self._settings.steps // 100), 0.0)
        self.state.zero_grad()
        loss.backward()
        if self._clip is not None:
            clip_gradients(self._encoder, self._encoder.mean.shape[0], self._clip)
        self.state.step()


def train_encoder(corpus: Corpus, settings: EncoderSettings, group: int, tag: str,
                  state_path: Path | None = None, stop_after: int | None = None) -> tuple[Encoder, list[float]]:
    """Trains all heads of the corpus. `stop_after` ends early with the state saved, as a kill would."""
    encoder = build_encoder(corpus, settings, group)
    optimizer = _Optimizer(settings, encoder)
    first = _resume(state_path, settings, encoder, optimizer.state)
    history = []
    progress = tqdm(range(first, settings.steps), desc=f"{settings.kind} {tag}", initial=first, total=settings.steps,
                    unit="step", mininterval=1.0)
    for step in progress:
        rng = random.Random(f"{settings.seed}/{settings.kind}/{tag}/{step}")
        generator = torch.Generator().manual_seed(rng.getrandbits(60))
        share = settings.shares[step % len(settings.shares)]
        batch = corpus.batch(rng, generator, settings.queries, settings.candidates, share, settings.moved)
        per_head = encoder_loss(encoder, batch, settings, generator)
        optimizer.step(per_head.sum(), step)  # heads share no parameter: the sum trains each on its own loss
        history.append(float(per_head.detach().mean()))
        if step % 20 == 0:
            progress.set_postfix(loss=f"{history[-1]:.3f}")
        done = step + 1
        if state_path is not None and (done % SAVE_EVERY == 0 or done == settings.steps or done == stop_after):
            _save(state_path, {"settings": json.dumps(asdict(settings)), "step": done,
                               "module": encoder.state_dict(), "optimizer": optimizer.state.state_dict()})
        if done == stop_after:
            break
    return encoder, history


def export_encoder(encoder: Encoder, layers: tuple[int, ...], kv_heads: int, functions: Functions) -> None:
    """Puts the trained functions of `layers` into `functions`, as they are stored."""
    folded = encoder.folded()
    for i, layer in enumerate(layers):
        sides = {}
        for side, (weights, biases) in folded.items():
            heads = slice(i * kv_heads, (i + 1) * kv_heads)
            sides[side] = [(storable_weight(w[heads]), b[heads].float().cpu().contiguous())
                           for w, b in zip(weights, biases)]
        functions.layers[layer] = sides


def train_features(corpus: Corpus, settings: FeatureSettings, tag: str,
                   state_path: Path | None = None) -> tuple[FeatureMaps, list[float]]:
    keys, queries = corpus.mid_sample()
    maps = FeatureMaps(keys, queries, settings.features, settings.inner, settings.seed).to(keys.device)
    optimizer = torch.optim.AdamW(maps.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    first = _resume(state_path, settings, maps, optimizer)
    history = []
    progress = tqdm(range(first, settings.steps), desc=f"features {tag}", initial=first, total=settings.steps,
                    unit="step", mininterval=1.0)
    for step in progress:
        rng = random.Random(f"{settings.seed}/features/{tag}/{step}")
        torch.manual_seed(rng.getrandbits(60))
        shard, rows = corpus.pick(rng, settings.queries)
        _schedule(optimizer, settings.learning_rate, step, settings.steps)
        output, divergence, partition = losses(maps, shard, rows, rng.choice(settings.shares), corpus.region,
                                               corpus.scaling, settings.noise[step % len(settings.noise)])
        total = output + 0.1 * divergence + 0.1 * partition
        optimizer.zero_grad()
        total.sum().backward()
        clip_gradients(maps, len(total), 1.0)
        optimizer.step()
        history.append(float(total.detach().mean()))
        if not math.isfinite(history[-1]):
            heads = [i for i, x in enumerate(total.detach()) if not math.isfinite(float(x))]
            raise FloatingPointError(f"feature maps of {tag} diverged at step {step}: the loss of heads {heads} (layer "
                                     "after layer) is not finite; a smaller --feature-steps or fewer --features may help")
        if step % 20 == 0:
            progress.set_postfix(**{name: f"{float(x.detach().mean()):.3f}" for name, x in
                                    (("output", output), ("kl", divergence), ("mass", partition))})
        done = step + 1
        if state_path is not None and (done % SAVE_EVERY == 0 or done == settings.steps):
            _save(state_path, {"settings": json.dumps(asdict(settings)), "step": done,
                               "module": maps.state_dict(), "optimizer": optimizer.state_dict()})
    return maps, history


def default_hidden(kind: str, head_dim: int) -> int:
    # spotlight: pairs of mirrored units for every input, so that it starts as an exact linear map.
    return {"hata": 0, "spotlight": 2 * head_dim, "hashattention": head_dim}[kind]


def default_bits(kind: str) -> int:
    return DEFAULT_BITS[kind]

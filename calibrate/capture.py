"""Runs a model and records, per layer, keys, values and a sample of queries.

Everything is recorded after RoPE (and after a model's QK norm), i.e. exactly what the server's KV
cache holds, and rounded to bfloat16 as that cache is. One safetensors file ("shard") per document,
so that a capture that was interrupted continues where it stopped.
"""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from .documents import Document, Text, needle_document, text_document
from .region import Region
from .weights import open_weights, pretrained_arguments

ATTENTION_NAME = "winnow_calibrate"
RESIDENT_BYTES = 1 << 30  # float32 layers up to this size are read once and stay on the device


class KvCache:
    """Keys and values of the tokens that a call continues, of the layers that ran so far."""

    def __init__(self):
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self._layers:
            key, value = (torch.cat([old, new], 2) for old, new in zip(self._layers[layer], (key, value)))
        self._layers[layer] = key, value
        return key, value

    def length(self) -> int:
        return next(iter(self._layers.values()))[0].shape[2] if self._layers else 0

    def drop(self, count: int) -> None:
        """Forgets the last `count` tokens."""
        self._layers = {i: (k[:, :, :-count], v[:, :, :-count]) for i, (k, v) in self._layers.items()}


def _attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Dense causal attention that first offers its inputs to the module's hook."""
    if module.winnow_cache is not None:
        key, value = module.winnow_cache.extend(module.layer_idx, key, value)
    if module.winnow_hook is not None:
        out = module.winnow_hook(module.layer_idx, query, key, value, scaling)
        if out is not None:
            return out, None
    return dense_attention(query, key, value, scaling), None


def dense_attention(query, key, value, scaling):
    """[1, H, T, d] x [1, Hkv, n, d] -> [1, T, H, d]; the T queries are the last of the n tokens."""
    rows, n = query.shape[2], key.shape[2]
    mask = None
    if rows not in (1, n):
        mask = torch.ones(rows, n, dtype=torch.bool, device=query.device).tril(diagonal=n - rows)
    group = query.shape[1] // key.shape[1]
    if group > 1:  # with enable_gqa only the kernel that holds all n * n logits takes float32
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=rows == n and n > 1,
                                         scale=scaling)
    return out.transpose(1, 2).contiguous()


class Model:
    """A causal model of the Llama, Mistral, Qwen2 or Qwen3 family whose attention can be watched.

    It computes in float32. Weights stay on the device if they take at most RESIDENT_BYTES there; those of a larger
    model are read a layer at a time, whenever that layer runs.
    """

    def __init__(self, path: str | Path, device: str = "cpu", resident_bytes: int = RESIDENT_BYTES):
        """path: a Hugging Face directory or a GGUF file."""
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register(ATTENTION_NAME, _attention)
        name, arguments = pretrained_arguments(path)
        config = AutoConfig.from_pretrained(name, **arguments)
        if config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(f"{path}: model_type {config.model_type!r} is not one that calibrate knows: llama, mistral, qwen2, qwen3")
        self.config = config
        self.layers = config.num_hidden_layers
        self.query_heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.query_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.query_heads
        self.group = self.query_heads // self.kv_heads
        self.scaling = 1.0 / math.sqrt(self.head_dim)
        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(name, **arguments)
        self._weights = open_weights(path)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
        whole.eval()
        self._resident = 4 * sum(p.numel() for p in whole.model.layers.parameters()) <= resident_bytes
        # Layers are alike: where they do not stay, the first one's memory takes the weights of whichever runs.
        self._layers = [layer.to_empty(device=self.device) for layer in whole.model.layers[:None if self._resident else 1]]
        self._norm, self._head = whole.model.norm.to_empty(device=self.device), None
        # Its buffers are computed and not stored.
        self.rotary = type(whole.model.rotary_emb)(config=config).to(self.device)
        self.set_hook(None)
        for i, layer in enumerate(self._layers):
            layer.self_attn.winnow_cache = None
            if self._resident:
                self._load(layer, f"model.layers.{i}")
        self._load(self._norm, "model.norm")

    @torch.no_grad()
    def _load(self, module, prefix: str) -> None:
        parameters = {f"{prefix}.{name}": parameter for name, parameter in module.named_parameters()}
        missing = [name for name in parameters if name not in self._weights]
        if missing:
            raise ValueError(f"the model's files have no tensor {missing[0]}")
        for name, tensor in self._weights.tensors(list(parameters)):
            if tensor.shape != parameters[name].shape:
                raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(parameters[name].shape)}")
            parameters[name].copy_(tensor)

    def set_hook(self, hook) -> None:
        for layer in self._layers:
            layer.self_attn.winnow_hook = hook

    def embed(self, ids: list[int]) -> torch.Tensor:
        """[1, T, width]"""
        return self._weights.rows("model.embed_tokens.weight", ids).unsqueeze(0).to(self.device)

    def layer(self, index: int):
        """Gives layer `index` as a function of hidden states, their first position and a KvCache or None.

        It may run until the next layer is asked for.
        """
        module = self._layers[index if self._resident else 0]
        if not self._resident:
            self._load(module, f"model.layers.{index}")
        attention = module.self_attn
        attention.layer_idx = index

        @torch.no_grad()
        def run(hidden: torch.Tensor, first: int, cache: KvCache | None) -> torch.Tensor:
            positions = torch.arange(first, first + hidden.shape[1], device=self.device).unsqueeze(0)
            attention.winnow_cache = cache
            hidden = module(hidden, attention_mask=None, position_ids=positions,
                            position_embeddings=self.rotary(hidden, positions))
            attention.winnow_cache = None
            return hidden

        return run

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, width] -> [T, vocabulary]"""
        if self._head is None:
            name = "lm_head.weight" if "lm_head.weight" in self._weights else "model.embed_tokens.weight"
            _, weight = next(self._weights.tensors([name]))
            self._head = weight.to(self.device).to(torch.float32, copy=True)
        return F.linear(self._norm(hidden), self._head)[0]

    def run(self, ids: list[int], cache: KvCache | None = None, hidden_only: bool = True):
        """Feeds `ids` after what `cache` holds; returns (None or logits, cache)."""
        cache = cache if cache is not None else KvCache()
        first, hidden = cache.length(), self.embed(ids)
        for index in range(self.layers):
            hidden = self.layer(index)(hidden, first, cache)
        return (None if hidden_only else self.logits(hidden)), cache


@dataclass(frozen=True)
class CaptureSettings:
    lengths: tuple[int, ...] = (8192, 16384)
    documents: int = 16
    validation_documents: int = 3
    text_queries: int = 256          # positions sampled per document, besides those of answers
    questions: int = 8
    first_position: int = 1024       # queries before this see too little mid to be worth learning from
    layers: tuple[int, ...] = ()
    sink: int = 16
    window: int = 128
    seed: int = 0


class _Recorder:
    """The hook: keeps K and V of the prefix and, for chosen queries, q and its exact anchor state."""

    def __init__(self, settings: CaptureSettings, group: int):
        self._settings, self._group = settings, group
        self._region = Region(settings.sink, settings.window)
        self.rows: torch.Tensor | None = None  # indices into this call's queries
        self.base = 0                          # position of this call's first query
        self.keep_kv = False
        self.tensors: dict[str, list[torch.Tensor]] = {}

    def __call__(self, layer, query, key, value, scaling):
        out = dense_attention(query, key, value, scaling)
        if layer not in self._settings.layers:
            return out
        if self.keep_kv:
            self._put(f"k.{layer}", key[0])
            self._put(f"v.{layer}", value[0])
        if self.rows is not None and len(self.rows):
            self._record(layer, query[0], key[0], value[0], scaling)
        return out

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        dtype = torch.float32 if name.startswith(("lse", "anchor_lse")) else torch.bfloat16
        self.tensors.setdefault(name, []).append(tensor.to(dtype).cpu())

    def _record(self, layer, query, key, value, scaling):
        rounded = lambda x: x.to(torch.bfloat16).float()
        keys = rounded(key).repeat_interleave(self._group, 0)
        values = rounded(value).repeat_interleave(self._group, 0)
        n = keys.shape[1]
        for rows in self.rows.split(64):
            positions = (rows + self.base).to(query.device)
            q = rounded(query[:, rows.to(query.device)])
            logits = (q @ keys.transpose(1, 2)) * scaling
            visible = torch.arange(n, device=q.device) <= positions.unsqueeze(1)
            logits.masked_fill_(~visible, -math.inf)
            lse = torch.logsumexp(logits, -1)
            logits.masked_fill_(self._region.mid_mask(positions, n), -math.inf)
            anchor_lse = torch.logsumexp(logits, -1)
            anchor = torch.exp(logits - anchor_lse.unsqueeze(-1)) @ values
            self._put(f"q.{layer}", q)
            self._put(f"lse.{layer}", lse)
            self._put(f"anchor_lse.{layer}", anchor_lse)
            self._put(f"anchor.{layer}", anchor)


@dataclass
class _Segment:
    """Consecutive tokens of a document that are computed together, and the queries that are kept of them."""

    ids: list[int]
    first: int        # position of the first token
    rows: list[int]   # kept queries, as indices into ids


def _capture_document(model: Model, document: Document, settings: CaptureSettings, rng: random.Random,
                      path: Path, kind: str) -> None:
    """Computes a layer of all segments before the next layer, because a layer's weights may have to be read for it."""
    n = len(document.prefix)
    first = min(settings.first_position, n // 2)
    count = settings.text_queries if not document.suffixes else settings.text_queries // 4
    segments = [_Segment(document.prefix, 0, sorted(rng.sample(range(first, n), min(count, n - first))))]
    answers = [0] * len(segments[0].rows)
    for suffix, start in zip(document.suffixes, document.answer_starts):
        suffix = suffix[:settings.window]  # later ones would see suffix tokens as mid, which are not kept
        begin = max(0, start - 8)          # the question's last tokens retrieve too
        segments.append(_Segment(suffix, n, list(range(begin, len(suffix)))))
        answers += [1 if r >= start - 1 else 2 for r in segments[-1].rows]

    recorder = _Recorder(settings, model.group)
    model.set_hook(recorder)
    hidden = [model.embed(s.ids) for s in segments]
    for index in range(max(settings.layers, default=-1) + 1):
        cache, run = KvCache(), model.layer(index)
        for i, segment in enumerate(segments):
            recorder.rows, recorder.base, recorder.keep_kv = torch.tensor(segment.rows), segment.first, i == 0
            hidden[i] = run(hidden[i], segment.first, cache)
            if i > 0:
                cache.drop(len(segment.ids))
    model.set_hook(None)
    tensors = {name: torch.cat(parts, dim=1).contiguous() for name, parts in recorder.tensors.items()}
    tensors["positions"] = torch.tensor([s.first + r for s in segments for r in s.rows], dtype=torch.int32)
    tensors["answers"] = torch.tensor(answers, dtype=torch.uint8)
    temporary = path.with_suffix(".part")
    save_file(tensors, temporary, metadata={"kind": kind, "length": str(n)})
    os.replace(temporary, path)


def capture(model: Model, text: Text, settings: CaptureSettings, directory: Path) -> list[Path]:
    """Writes the shards that are missing in `directory`; returns all of them, training first."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = directory / "capture.json"
    wanted = json.loads(json.dumps(asdict(settings)))
    if stamp.exists():
        if json.loads(stamp.read_text()) != wanted:
            raise ValueError(f"{directory} holds a capture with other settings ({stamp}); "
                             "give another --resume directory or remove this one")
    else:
        stamp.write_text(json.dumps(wanted, indent=1))
    paths = []
    plan = [("train", i) for i in range(settings.documents)]
    plan += [("validation", i) for i in range(settings.validation_documents)]
    for part, i in tqdm(plan, desc="capture", unit="document"):
        path = directory / f"{part}-{i:04d}.safetensors"
        paths.append(path)
        if path.exists():
            continue
        rng = random.Random(f"{settings.seed}/{part}/{i}")
        length = settings.lengths[i % len(settings.lengths)]
        if (i // len(settings.lengths)) % 2 == 0:
            document, kind = needle_document(rng, text, model.tokenizer, length, part, settings.questions), "needle"
        else:
            document, kind = text_document(rng, text, model.tokenizer, length, part), "text"
        _capture_document(model, document, settings, rng, path, kind)
    return paths


@dataclass
class Shard:
    """One document of all captured layers, heads flattened: N = layers * KV heads, G = group.

    k, v [N, n, d]; q [N, G, m, d]; lse, anchor_lse [N, G, m]; anchor [N, G, m, d]; positions,
    answers [m] (1: an answer's query, 2: a question's, 0: other). Float tensors are bfloat16 where
    the KV cache is, float32 otherwise.
    """

    name: str
    kind: str
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    lse: torch.Tensor
    anchor: torch.Tensor
    anchor_lse: torch.Tensor
    positions: torch.Tensor
    answers: torch.Tensor

    @property
    def length(self) -> int:
        return self.k.shape[1]


def load_shard(path: Path, layers: tuple[int, ...], group: int, device="cpu") -> Shard:
    with safe_open(path, "pt", device="cpu") as file:
        get = lambda role: torch.cat([file.get_tensor(f"{role}.{l}") for l in layers]).to(device)
        grouped = lambda x: x.reshape(-1, group, *x.shape[1:])
        return Shard(name=path.stem, kind=file.metadata()["kind"], k=get("k"), v=get("v"), q=grouped(get("q")),
                     lse=grouped(get("lse")), anchor=grouped(get("anchor")), anchor_lse=grouped(get("anchor_lse")),
                     positions=file.get_tensor("positions").long().to(device),
                     answers=file.get_tensor("answers").to(device))

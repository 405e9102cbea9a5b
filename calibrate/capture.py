"""Runs a Hugging Face model and records, per layer, keys, values and a sample of queries.

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

ATTENTION_NAME = "winnow_calibrate"


def _attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Dense causal attention that first offers its inputs to the module's hook."""
    hook = getattr(module, "winnow_hook", None)
    if hook is not None:
        out = hook(module.layer_idx, query, key, value, scaling)
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
    """A causal model of the Llama, Mistral, Qwen2 or Qwen3 family whose attention can be watched."""

    def __init__(self, directory: str | Path, device: str = "cpu"):
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register(ATTENTION_NAME, _attention)
        self.directory = Path(directory)
        config = AutoConfig.from_pretrained(directory)
        if config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
            raise ValueError(f"{directory}: model_type {config.model_type!r} is not one that winnow serves")
        self.config = config
        self.layers = config.num_hidden_layers
        self.query_heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.query_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.query_heads
        self.group = self.query_heads // self.kv_heads
        self.scaling = 1.0 / math.sqrt(self.head_dim)
        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                          attn_implementation=ATTENTION_NAME)
        self.model.to(self.device).eval()
        self._attentions = [layer.self_attn for layer in self.model.model.layers]

    def set_hook(self, hook) -> None:
        for attention in self._attentions:
            attention.winnow_hook = hook

    @torch.no_grad()
    def run(self, ids: list[int], cache=None, hidden_only: bool = True):
        """Feeds `ids` after what `cache` holds; returns (last hidden states or logits, cache)."""
        from transformers import DynamicCache

        cache = cache if cache is not None else DynamicCache(config=self.config)
        tokens = torch.tensor([ids], device=self.device)
        if hidden_only:
            self.model.model(input_ids=tokens, past_key_values=cache, use_cache=True)
            return None, cache
        out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True)
        return out.logits[0], cache


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


def _capture_document(model: Model, document: Document, settings: CaptureSettings, rng: random.Random,
                      path: Path, kind: str) -> None:
    recorder = _Recorder(settings, model.group)
    model.set_hook(recorder)
    n = len(document.prefix)
    positions, answers = [], []
    first = min(settings.first_position, n // 2)
    count = settings.text_queries if not document.suffixes else settings.text_queries // 4
    sampled = sorted(rng.sample(range(first, n), min(count, n - first)))
    recorder.rows, recorder.keep_kv = torch.tensor(sampled), True
    positions += sampled
    answers += [0] * len(sampled)
    _, cache = model.run(document.prefix)
    recorder.keep_kv = False
    for suffix, start in zip(document.suffixes, document.answer_starts):
        suffix = suffix[:settings.window]  # later ones would see suffix tokens as mid, which are not kept
        begin = max(0, start - 8)          # the question's last tokens retrieve too
        rows = list(range(begin, len(suffix)))
        recorder.rows, recorder.base = torch.tensor(rows), n
        positions += [n + r for r in rows]
        answers += [1 if r >= start - 1 else 2 for r in rows]
        model.run(suffix, cache)
        cache.crop(-len(suffix))
    model.set_hook(None)
    tensors = {}
    for name, parts in recorder.tensors.items():
        tensors[name] = torch.cat(parts, dim=1).contiguous()
    tensors["positions"] = torch.tensor(positions, dtype=torch.int32)
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

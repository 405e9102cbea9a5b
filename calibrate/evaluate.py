"""Measures policies without the server: on captured queries, on tasks, and as perplexity of text.

    python -m calibrate.evaluate --model DIR [--artifact FILE] [--captured DIR] [--tasks FILE.jsonl[.gz]]
        [--text FILE] --policy P [--policy P ...] [--json OUT]

Tasks and text run the whole model with its attention replaced, layer by layer, so errors of one layer
reach the next as they do in the server. Greedy decoding needs no loop: an answer is produced exactly
if and only if every one of its tokens is the argmax given the ones before.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from pathlib import Path

import torch
from tqdm import tqdm

from .artifact import Artifact, read
from .capture import Model, Shard, dense_attention, load_shard
from .policies import Policy, Selector, attend, four_bit, stacked_features, stacked_functions
from .region import Region, intersection_over_union

LEARNED = ("hata", "spotlight", "hashattention")


def make_selector(policy: Policy, artifact: Artifact | None, layers, scaling: float, device):
    """(selector, features) for the stacked heads of `layers`."""
    functions = features = None
    if policy.name in LEARNED:
        if artifact is None:
            raise ValueError(f"policy {policy.name} is learned: give --artifact")
        functions = stacked_functions(artifact, policy.name, layers, device)
    if policy.completion:
        if artifact is None:
            raise ValueError("completion needs learned feature maps: give --artifact")
        features = stacked_features(artifact, layers, device)
    return Selector(policy, scaling, functions), features


# --- captured queries ------------------------------------------------------------------------------

@torch.no_grad()
def measure_shard(shard: Shard, rows: torch.Tensor, policy: Policy, selector: Selector, features, region: Region,
                  scaling: float) -> dict[str, torch.Tensor]:
    """Per head: iou, recall, coverage, error (relative, of the output), entropy (of mid, 0 to 1)."""
    parts = []
    k, v = shard.k.float(), shard.v.float()
    for r in rows.split(48):
        q = shard.q[:, :, r].float()
        lse, positions = shard.lse[:, :, r], shard.positions[r]
        anchor, anchor_lse = shard.anchor[:, :, r].float(), shard.anchor_lse[:, :, r]
        got = attend(policy, selector, q, k, v, anchor, anchor_lse, lse, positions, region, scaling, features)
        mid = region.mid_mask(positions, shard.length)
        logits = torch.einsum("ngmd,nld->ngml", q, k) * scaling
        p = torch.exp(logits - lse.unsqueeze(-1)) * mid
        dense = torch.exp(anchor_lse - lse).unsqueeze(-1) * anchor + p @ v.unsqueeze(1)
        inside = p / p.sum(-1, keepdim=True).clamp(min=1e-20)
        entropy = -(inside * torch.log(inside.clamp(min=1e-20))).sum(-1) / torch.log(mid.sum(-1).float().clamp(min=2))
        recall = (got.chosen & got.wanted).sum(-1) / got.wanted.sum(-1).clamp(min=1)
        error = (got.output - dense).norm(dim=-1) / dense.norm(dim=-1).clamp(min=1e-12)
        parts.append({"iou": intersection_over_union(got.chosen, got.wanted).float(), "recall": recall.float(),
                      "coverage": got.covered.mean(1), "mid_coverage": got.mid_covered.mean(1),
                      "error": error.mean(1), "entropy": entropy.mean(1)})
    return {key: torch.cat([part[key] for part in parts], 1).mean(1) for key in parts[0]}


def measure(shards: list[Shard], policies: list[Policy], artifact: Artifact | None, layers, region: Region,
            scaling: float, rows_per_shard: int = 96, answers: int | None = None, progress: bool = True):
    """{policy: {figure: tensor [shards, layers * KV heads]}}. answers: only queries of that kind."""
    out = {}
    device = shards[0].k.device
    for policy in tqdm(policies, desc="measure", unit="policy", disable=not progress):
        selector, features = make_selector(policy, artifact, layers, scaling, device)
        gathered = []
        for shard in shards:
            rows = torch.arange(len(shard.positions), device=device)
            if answers is not None:
                rows = rows[shard.answers == answers]
            if not len(rows):
                continue
            rows = rows[:: max(1, -(-len(rows) // rows_per_shard))]
            gathered.append(measure_shard(shard, rows, policy, selector, features, region, scaling))
        if gathered:
            out[policy] = {key: torch.stack([g[key] for g in gathered]).cpu() for key in gathered[0]}
    return out


class Validation:
    """Captured documents that training did not see, of which some layers at a time are in memory."""

    def __init__(self, paths: list[Path], passes: list[tuple[int, ...]], kv_heads: int, group: int, region: Region,
                 scaling: float, device: str):
        """passes: ascending layers; those of one are held, and measured, together."""
        self.layers, self.kv_heads = tuple(layer for some in passes for layer in some), kv_heads
        self._paths, self._passes, self._group = paths, passes, group
        self._region, self._scaling, self._device = region, scaling, device

    def measure(self, policies: list[Policy], artifact: Artifact | None, rows: int = 96,
                answers: int | None = None) -> dict[Policy, dict[str, torch.Tensor]]:
        """As `measure`, of all layers."""
        parts = []
        for some in self._passes:
            shards = [load_shard(path, some, self._group, self._device) for path in self._paths]
            parts.append(measure(shards, policies, artifact, some, self._region, self._scaling, rows, answers))
            del shards
        return {policy: {key: torch.cat([part[policy][key] for part in parts], 1) for key in figures}
                for policy, figures in parts[0].items()}


def passes_of(layers: tuple[int, ...], heads: int, kv_heads: int) -> list[tuple[int, ...]]:
    """`layers` in parts of at most `heads` KV heads, or of one layer."""
    some = max(1, heads // kv_heads)
    return [layers[i:i + some] for i in range(0, len(layers), some)]


# --- the whole model -------------------------------------------------------------------------------

class PolicyAttention:
    """The hook that computes chosen rows under a policy, and all others densely."""

    def __init__(self, model: Model, policy: Policy, artifact: Artifact | None, dense_layers: int, region: Region):
        self._model, self._policy, self._region, self._dense_layers = model, policy, region, dense_layers
        self.from_row: int | None = None  # rows of a call from here on follow the policy; None: none do
        self._selectors = {}
        self.figures = {"coverage": [], "iou": [], "kept": []}
        if policy.name != "dense":
            for layer in range(dense_layers, model.layers):
                self._selectors[layer] = make_selector(policy, artifact, (layer,), model.scaling, model.device)

    def __call__(self, layer, query, key, value, scaling):
        if self.from_row is None or layer < self._dense_layers or self._policy.name == "dense":
            return dense_attention(query, key, value, scaling)
        rows, n = query.shape[2], key.shape[2]
        if self.from_row > 0:
            out = dense_attention(query, key, value, scaling)
        else:
            out = torch.empty(1, rows, query.shape[1], query.shape[3], device=query.device)
        selector, features = self._selectors[layer]
        group = self._model.group
        k, v = (x[0].to(torch.bfloat16).float() for x in (key, value))
        for r in torch.arange(self.from_row, rows, device=query.device).split(128):
            positions = r + (n - rows)
            q = query[0, :, r].to(torch.bfloat16).float()
            q = q.view(k.shape[0], group, len(r), -1)
            logits = torch.einsum("ngmd,nld->ngml", q, k) * scaling
            logits.masked_fill_(torch.arange(n, device=q.device) > positions.unsqueeze(1), -math.inf)
            lse = torch.logsumexp(logits, -1)
            anchors = logits.masked_fill(self._region.mid_mask(positions, n), -math.inf)
            anchor_lse = torch.logsumexp(anchors, -1)
            anchor = torch.exp(anchors - anchor_lse.unsqueeze(-1)) @ v.unsqueeze(1)
            estimated = None
            if self._policy.p is not None:
                estimated = torch.einsum("ngmd,nld->ngml", q, four_bit(k)) * scaling
                estimated = torch.logsumexp(estimated.masked_fill(torch.isneginf(anchors), -math.inf), -1)
            got = attend(self._policy, selector, q, k, v, anchor, anchor_lse, lse, positions, self._region, scaling,
                         features, estimated)
            out[0, r] = got.output.flatten(0, 1).transpose(0, 1)
            mid = self._region.mid_mask(positions, n).sum(-1)
            some = mid > 0
            if bool(some.any()):
                self.figures["coverage"].append(float(got.covered[:, :, some].mean()))
                self.figures["iou"].append(float(intersection_over_union(got.chosen, got.wanted)[:, some].mean()))
                self.figures["kept"].append(float((got.chosen.sum(-1)[:, some] / mid[some]).mean()))
        return out

    def means(self) -> dict[str, float | None]:
        return {key: sum(x) / len(x) if x else None for key, x in self.figures.items()}


def _open(path: str):
    return gzip.open(path, "rt", encoding="utf-8") if str(path).endswith(".gz") else open(path, encoding="utf-8")


@torch.no_grad()
def run_tasks(model: Model, path: str, policies: list[Policy], artifact, dense_layers: int, region: Region,
              lengths=None, tasks=None, retrieve_question: bool = False) -> list[dict]:
    """One row per policy, task and length. The prompt is computed densely; answer tokens retrieve."""
    totals: dict[tuple, list] = {}
    attentions = {p: PolicyAttention(model, p, artifact, dense_layers, region) for p in policies}
    marker = "\x00"
    with _open(path) as file:
        items = [json.loads(line) for line in file]
    items = [i for i in items if (not lengths or i["target_tokens"] in lengths) and (not tasks or i["task"] in tasks)]
    encode = lambda s: model.tokenizer(s, add_special_tokens=False)["input_ids"]
    for item in tqdm(items, desc="tasks", unit="document"):
        content = item["intro"] + item["document"] + "\n\n" + marker
        chat = model.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                                   add_generation_prompt=True)
        before, after = chat.split(marker)
        # Prompt and question are tokenised together, as the server does; the tokens that all questions
        # of a document share are computed once.
        prefix = encode(before)
        wholes = [encode(before + question["question"] + after) for question in item["questions"]]
        for whole in wholes:
            agree = next((i for i, (a, b) in enumerate(zip(prefix, whole)) if a != b), len(prefix))
            prefix = prefix[:agree]
        model.set_hook(None)
        _, cache = model.run(prefix)
        for question, whole in zip(item["questions"], wholes):
            head, answer = whole[len(prefix):], encode(question["answer"])
            for policy, attention in attentions.items():
                attention.from_row = 0 if retrieve_question else len(head) - 1
                attention.figures = {key: [] for key in attention.figures}
                model.set_hook(attention)
                logits, _ = model.run(head + answer, cache, hidden_only=False)
                cache.drop(len(head) + len(answer))
                said = logits[len(head) - 1:-1].argmax(-1).tolist()
                right = [a == b for a, b in zip(said, answer)]
                totals.setdefault((policy, item["task"], item["target_tokens"]), []).append(
                    {"exact": float(all(right)), "token_acc": sum(right) / len(right), **attention.means()})
        model.set_hook(None)
    rows = []
    for (policy, task, length), values in totals.items():
        mean = lambda key: (lambda x: sum(x) / len(x) if x else None)([v[key] for v in values if v[key] is not None])
        rows.append({"policy": describe(policy), "task": task, "length": length, "n": len(values),
                     **{key: mean(key) for key in ("exact", "token_acc", "kept", "coverage", "iou")}})
    return rows


@torch.no_grad()
def run_text(model: Model, path: str, policies: list[Policy], artifact, dense_layers: int, region: Region,
             length: int = 8192, windows: int = 4, skip: int = 1024) -> list[dict]:
    """Perplexity of tokens skip.. of `windows` stretches, spread over the text; these positions retrieve."""
    with _open(path) as file:
        ids = model.tokenizer(file.read(), add_special_tokens=False)["input_ids"]
    bos = [model.tokenizer.bos_token_id] if model.tokenizer.bos_token_id is not None else []
    body = length - len(bos)
    windows = min(windows, len(ids) // body)
    if windows == 0:
        raise ValueError(f"{path} has {len(ids)} tokens, fewer than one stretch of {length}")
    step = (len(ids) - body) // max(1, windows - 1)
    stretches = [bos + ids[i * step:i * step + body] for i in range(windows)]
    rows = []
    for policy in tqdm(policies, desc="text", unit="policy"):
        attention = PolicyAttention(model, policy, artifact, dense_layers, region)
        attention.from_row = skip
        loss, count = 0.0, 0
        model.set_hook(attention)
        for stretch in stretches:
            logits, _ = model.run(stretch, hidden_only=False)
            targets = torch.tensor(stretch[skip + 1:], device=logits.device)
            loss += float(torch.nn.functional.cross_entropy(logits[skip:-1].float(), targets, reduction="sum"))
            count += len(targets)
        model.set_hook(None)
        rows.append({"policy": describe(policy), "perplexity": math.exp(loss / count), "tokens": count,
                     **attention.means()})
    return rows


def describe(policy: Policy) -> str:
    if policy.name in ("dense", "window") and not policy.completion:
        return policy.name
    k = f"{policy.count}" if policy.count else f"{policy.share * 100:g}%"
    text = f"{policy.name}:k={k}" + (f",bits={policy.bits}" if policy.name == "lsh" else "")
    text += f",p={policy.p:g}" if policy.p is not None else ""
    return text + (",completion=on" if policy.completion else "")


def _table(rows: list[dict]) -> str:
    if not rows:
        return ""
    show = lambda x: "" if x is None else (f"{x:.4f}" if isinstance(x, float) else str(x))
    keys = list(rows[0])
    widths = [max(len(k), *(len(show(r[k])) for r in rows)) for k in keys]
    line = lambda cells: "  ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip()
    return "\n".join([line(keys)] + [line([show(r[k]) for k in keys]) for r in rows])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibrate.evaluate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--artifact")
    parser.add_argument("--captured", help="directory of a capture (calibrate --resume DIR keeps it in DIR/capture)")
    parser.add_argument("--tasks")
    parser.add_argument("--text")
    parser.add_argument("--policy", action="append", required=True)
    parser.add_argument("--lengths", help="only tasks of these lengths, comma-separated")
    parser.add_argument("--only", help="only these tasks, comma-separated")
    parser.add_argument("--text-length", type=int, default=8192)
    parser.add_argument("--text-windows", type=int, default=4)
    parser.add_argument("--retrieve-question", action="store_true", help="the question's tokens retrieve, too")
    parser.add_argument("--dense-layers", type=int, default=2)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--heads-per-pass", type=int, default=32, help="KV heads measured at once: bounds memory")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    policies = [Policy.parse(p) for p in args.policy]
    region = Region(args.sink, args.window)
    artifact = read(args.artifact, args.model) if args.artifact else None
    model = Model(args.model, args.device)
    result = {}
    if args.captured:
        layers = tuple(range(args.dense_layers, model.layers))
        paths = sorted(Path(args.captured).glob("validation-*.safetensors"))
        if not paths:
            parser.error(f"{args.captured} holds no validation documents")
        validation = Validation(paths, passes_of(layers, args.heads_per_pass, model.kv_heads), model.kv_heads, model.group,
                                region, model.scaling, args.device)
        rows = []
        for kind, answers in (("all", None), ("answers", 1)):
            for policy, figures in validation.measure(policies, artifact, answers=answers).items():
                figures = {key: x.mean(0) for key, x in figures.items()}
                diffuse = figures["entropy"] >= figures["entropy"].median()
                rows.append({"policy": describe(policy), "queries": kind,
                             **{key: float(figures[key].mean()) for key in ("iou", "recall", "coverage", "mid_coverage", "error")},
                             "error_diffuse": float(figures["error"][diffuse].mean()),
                             "error_focused": float(figures["error"][~diffuse].mean())})
        print(_table(rows))
        result["captured"] = rows
    if args.tasks:
        pick = [int(x) for x in args.lengths.split(",")] if args.lengths else None
        rows = run_tasks(model, args.tasks, policies, artifact, args.dense_layers, region, pick,
                         args.only.split(",") if args.only else None, args.retrieve_question)
        rows.sort(key=lambda r: (r["task"], r["length"]))
        print(_table(rows))
        result["results"] = rows
    if args.text:
        rows = run_text(model, args.text, policies, artifact, args.dense_layers, region, args.text_length,
                        args.text_windows)
        print(_table(rows))
        result["text"] = rows
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The per-head report: what each head's functions find, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from pathlib import Path

from .artifact import Artifact
from .evaluate import LEARNED, Validation, describe
from .policies import Policy

SHARES = (0.01, 0.02, 0.05, 0.10)


def build(artifact: Artifact, validation: Validation, rows: int = 64) -> dict:
    """Figures of every kind at every share on validation documents: per head ("policies") and per document."""
    kinds = [k for k in LEARNED if k in artifact.functions]
    policies = [Policy("oracle", share=s) for s in SHARES]
    policies += [Policy("lsh", share=0.02, bits=b) for b in (128, 1024)]
    policies += [Policy(kind, share=s) for kind in kinds for s in SHARES]
    if artifact.features is not None:
        policies += [Policy(kind, share=s, completion=True) for kind in ["oracle", *kinds] for s in (0.01, 0.02)]
    heads = [(layer, head) for layer in validation.layers for head in range(validation.kv_heads)]
    out = {"heads": [{"layer": l, "kv_head": h} for l, h in heads], "policies": {}, "documents": {}}
    for policy, figures in validation.measure(policies, artifact, rows).items():
        out["policies"][describe(policy)] = {key: [round(float(x), 4) for x in values.mean(0)] for key, values in figures.items()}
        out["documents"][describe(policy)] = {key: [round(float(x), 5) for x in values.mean(1)] for key, values in figures.items()}
    return out


def measured_of(kind: str, report: dict) -> dict:
    """What the artifact's header says of one kind: per share, figures per layer and KV head."""
    out = {}
    for share in SHARES:
        figures = report["policies"].get(f"{kind}:k={share * 100:g}%")
        if figures:
            out[f"{share * 100:g}%"] = {key: figures[key] for key in ("recall", "iou", "coverage")}
    return out


def table(report: dict) -> str:
    lines = []
    policies = report["policies"]
    mean = lambda x: sum(x) / len(x)
    lines.append(f"{'policy':34s} {'iou':>6s} {'recall':>7s} {'coverage':>9s} {'of mid':>7s} {'error':>7s} {'diffuse':>8s}")
    entropies = next(iter(policies.values()))["entropy"]
    middle = sorted(entropies)[len(entropies) // 2]
    for name, f in policies.items():
        diffuse = [e for e, h in zip(f["error"], entropies) if h >= middle]
        lines.append(f"{name:34s} {mean(f['iou']):6.3f} {mean(f['recall']):7.3f} {mean(f['coverage']):9.3f} "
                     f"{mean(f['mid_coverage']):7.3f} {mean(f['error']):7.4f} {mean(diffuse):8.4f}")
    kinds = [name for name in policies if name.endswith("k=2%") and not name.startswith(("oracle", "lsh"))]
    lines += ["", "IoU with the oracle at k=2%, per head", "layer head  entropy " + "".join(f"{n.split(':')[0]:>15s}" for n in kinds)]
    for i, head in enumerate(report["heads"]):
        lines.append(f"{head['layer']:5d} {head['kv_head']:4d}  {entropies[i]:7.3f} " +
                     "".join(f"{policies[n]['iou'][i]:15.3f}" for n in kinds))
    return "\n".join(lines)


def markdown(report: dict) -> str:
    """The means at k = 2 %, with standard errors over the validation documents."""
    lines = ["| policy | IoU | recall | coverage | error |", "|---|---|---|---|---|"]
    for name, figures in report["documents"].items():
        if ":k=2%" in name:
            cells = []
            for key in ("iou", "recall", "coverage", "error"):
                x = figures[key]
                mean = sum(x) / len(x)
                deviation = (sum((y - mean) ** 2 for y in x) / max(1, len(x) - 1)) ** 0.5
                cells.append(f"{mean:.4f} ± {deviation / len(x) ** 0.5:.4f}")
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    policies = report["policies"]
    labels = [f"{h['layer']}.{h['kv_head']}" for h in report["heads"]]
    figure, axes = plt.subplots(2, 1, figsize=(max(6.0, 0.45 * len(labels) + 3), 7.5), constrained_layout=True)
    for kind in LEARNED:
        name = f"{kind}:k=2%"
        if name in policies:
            axes[0].plot(labels, policies[name]["iou"], marker="o", label=kind)
    for name, figures in policies.items():
        if name.startswith("lsh"):
            axes[0].plot(labels, figures["iou"], linestyle="--", label=name.replace("lsh:k=2%,", "lsh "))
    entropies = next(iter(policies.values()))["entropy"]
    axes[0].plot(labels, entropies, color="grey", linestyle=":", label="entropy of mid")
    axes[0].set_ylabel("IoU with the oracle, k = 2 %")
    axes[0].set_xlabel("layer.KV head")
    axes[0].set_ylim(0, 1)
    axes[0].legend(fontsize="small", ncols=3)
    for kind in ("oracle", *LEARNED):
        points = [(s * 100, policies.get(f"{kind}:k={s * 100:g}%")) for s in SHARES]
        points = [(s, sum(f["mid_coverage"]) / len(f["mid_coverage"])) for s, f in points if f]
        if points:
            axes[1].plot(*zip(*points), marker="o", label=kind)
    axes[1].set_xscale("log")
    axes[1].set_xlabel("share of the context read, %")
    axes[1].set_ylabel("share of mid attention mass covered")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write(report: dict, directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    text = table(report)
    (directory / "report.txt").write_text(text + "\n")
    (directory / "report.md").write_text(markdown(report) + "\n")
    (directory / "report.json").write_text(json.dumps(report))
    plot(report, directory / "report.png")
    return text

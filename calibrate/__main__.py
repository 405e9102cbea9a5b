"""python -m calibrate: learns a model's hash functions and feature maps, and writes the artifact."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from . import report as reporting
from .artifact import Artifact, Features, Functions, fingerprint, write
from .capture import CaptureSettings, Model, capture
from .documents import Text
from .encoders import DEFAULT_BITS
from .evaluate import Validation, passes_of
from .region import Region
from .training import (Corpus, EncoderSettings, FeatureSettings, default_hidden, export_encoder, train_encoder,
                       train_features)
from .verdict import describe, judge

KINDS = ("hata", "spotlight", "hashattention", "features")


def parse_bits(text: str, kinds) -> dict[str, int]:
    """"128" for all kinds, or "hata=128,hashattention=32"; kinds not named keep their defaults."""
    bits = dict(DEFAULT_BITS)
    for part in text.split(",") if text else ():
        kind, sep, value = part.rpartition("=")
        if sep and kind not in bits:
            raise argparse.ArgumentTypeError(f"--bits: {kind!r} is not a kind that has bits")
        if not value.isdigit() or int(value) not in (32, 64, 128, 256):
            raise argparse.ArgumentTypeError(f"--bits: {value!r} is not 32, 64, 128 or 256")
        for name in [kind] if sep else list(bits):
            bits[name] = int(value)
    return {kind: bits[kind] for kind in kinds if kind in bits}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m calibrate", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face model directory, or GGUF file")
    parser.add_argument("--text", required=True, help="text to calibrate on, plain or gzip")
    parser.add_argument("--out", required=True, help="artifact to write (.safetensors)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated: %(default)s")
    parser.add_argument("--bits", default="", help="of a code: 128, or hata=128,hashattention=32")
    parser.add_argument("--layers", help="layers to learn for, as 2-5 or 2,3,4 (default: all after --dense-layers)")
    parser.add_argument("--dense-layers", type=int, default=2)
    parser.add_argument("--lengths", default="8192,12288", help="document lengths in tokens (default %(default)s)")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--validation-documents", type=int, default=4)
    parser.add_argument("--text-queries", type=int, default=256, help="queries kept of each document of text")
    parser.add_argument("--questions", type=int, default=8, help="questions asked about each document of facts")
    parser.add_argument("--steps", type=int, default=1500, help="training steps of each encoder")
    parser.add_argument("--feature-steps", type=int, default=1000)
    parser.add_argument("--features", type=int, default=64, help="features of the summary (F)")
    parser.add_argument("--queries", type=int, default=64, help="queries per step")
    parser.add_argument("--candidates", type=int, default=3072, help="keys ranked per step")
    parser.add_argument("--share", default="0.02",
                        help="shares of the context that training aims at, comma-separated: one for each step")
    parser.add_argument("--moved", type=float,
                        help="share of the steps that move their document to later positions (default 0.5; 0 with "
                             "--recipe paper)")
    parser.add_argument("--feature-noise", default="1",
                        help="how far from the oracle's the sets are that feature maps complete, comma-separated")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of encoders, with --recipe winnow")
    parser.add_argument("--hidden", type=int, help="hidden units of spotlight and hashattention")
    parser.add_argument("--recipe", choices=("winnow", "paper"), default="winnow")
    parser.add_argument("--query", choices=("group", "head", "each", "shared"),
                        help="query functions: one of a group's queries together, one for every query of a KV head, one "
                             "for each query head, or the keys' own (default group; with --recipe paper as the papers "
                             "have it)")
    parser.add_argument("--heads-per-pass", type=int, default=32, help="KV heads trained and measured at once: bounds memory")
    parser.add_argument("--resume", help="directory that keeps the capture and training state; an interrupted "
                                         "run given the same directory continues")
    parser.add_argument("--report", help="directory for report.txt, report.json and report.png")
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def query_kind(asked: str | None, recipe: str, kind: str) -> str:
    if asked:
        return asked
    if recipe == "winnow":
        return "group"
    return "each" if kind == "hashattention" else "shared"


def parse_layers(text: str | None, dense_layers: int, total: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(dense_layers, total))
    layers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
    if not layers or min(layers) < 0 or max(layers) >= total:
        raise ValueError(f"--layers {text}: the model has layers 0 to {total - 1}")
    return tuple(sorted(set(layers)))


def main(argv=None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    kinds = [k for k in args.kinds.split(",") if k]
    unknown = [k for k in kinds if k not in KINDS]
    if unknown or not kinds:
        parser.error(f"--kinds: {unknown or 'none given'}; choose from {', '.join(KINDS)}")
    try:
        bits = parse_bits(args.bits, kinds)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if "features" in kinds and args.validation_documents < 1:
        parser.error("--validation-documents: feature maps need some, because completion is used only at heads where "
                     "it lowers the error there")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is available")
    if args.resume is None:
        with tempfile.TemporaryDirectory(prefix="winnow-calibrate-") as directory:
            return run(args, kinds, bits, Path(directory))
    return run(args, kinds, bits, Path(args.resume))


def run(args, kinds: list[str], bits: dict[str, int], state: Path) -> int:
    """0, or 1 where feature maps were asked for and help at no head: then the artifact is written without them."""
    text = Text(args.text)
    model = Model(args.model, args.device)
    layers = parse_layers(args.layers, args.dense_layers, model.layers)
    settings = CaptureSettings(lengths=tuple(int(x) for x in args.lengths.split(",")), documents=args.documents,
                               validation_documents=args.validation_documents, layers=layers,
                               text_queries=args.text_queries, questions=args.questions, sink=args.sink,
                               window=args.window, seed=args.seed)
    paths = capture(model, text, settings, state / "capture")
    training = [p for p in paths if p.name.startswith("train-")]
    validation = [p for p in paths if p.name.startswith("validation-")]
    region = Region(args.sink, args.window)
    shape = {"layers": model.layers, "query_heads": model.query_heads, "kv_heads": model.kv_heads,
             "head_dim": model.head_dim}
    frequencies, positions = model.rotary.inv_freq.float().cpu(), model.config.max_position_embeddings
    kv_heads, group, head_dim, scaling = model.kv_heads, model.group, model.head_dim, model.scaling
    del model

    common = {"recipe": args.recipe, "documents": args.documents, "lengths": list(settings.lengths),
              "sink": args.sink, "window": args.window, "seed": args.seed}
    artifact = Artifact(fingerprint(args.model), shape, args.dense_layers,
                        provenance={"tool": "calibrate", "text": Path(args.text).name})
    shares = tuple(float(x) for x in args.share.split(","))
    moved = args.moved if args.moved is not None else 0.0 if args.recipe == "paper" else 0.5
    encoder_settings = {kind: EncoderSettings(kind=kind, bits=bits[kind],
                                              hidden=args.hidden or default_hidden(kind, head_dim),
                                              recipe=args.recipe, query=query_kind(args.query, args.recipe, kind),
                                              steps=args.steps, queries=args.queries,
                                              candidates=args.candidates, shares=shares, moved=moved,
                                              learning_rate=args.learning_rate, seed=args.seed)
                        for kind in kinds if kind != "features"}
    feature_settings = FeatureSettings(features=args.features, inner=head_dim // 2, steps=args.feature_steps,
                                       queries=max(8, args.queries // 2), noise=tuple(float(x) for x in args.feature_noise.split(",")),
                                       seed=args.seed)
    for kind, s in encoder_settings.items():
        artifact.functions[kind] = Functions(kind, s.bits, "group" if s.query in ("group", "each") else "head",
                                             training={**common, "steps": s.steps, "queries": s.queries,
                                                       "hidden": s.hidden, "shares": list(s.shares), "moved": s.moved,
                                                       "query": s.query})
    if "features" in kinds:
        artifact.features = Features(args.features, training={**common, "steps": feature_settings.steps})

    passes = passes_of(layers, args.heads_per_pass, kv_heads)
    for some in passes:
        tag = f"layers {some[0]}-{some[-1]}"
        corpus = Corpus(training, some, group, head_dim, region, args.device, frequencies, positions)
        for kind, s in encoder_settings.items():
            encoder, _ = train_encoder(corpus, s, group, tag, state / f"{kind}-{some[0]}-{some[-1]}.pt")
            export_encoder(encoder, some, kv_heads, artifact.functions[kind])
        if artifact.features is not None:
            maps, _ = train_features(corpus, feature_settings, tag, state / f"features-{some[0]}-{some[-1]}.pt")
            folded = {"key": maps.key.folded(), "query": maps.query.folded()}
            for i, layer in enumerate(some):
                heads = slice(i * kv_heads, (i + 1) * kv_heads)
                artifact.features.layers[layer] = {
                    side: {role: (w[heads].contiguous(), b[heads].contiguous()) for role, (w, b) in roles.items()}
                    for side, roles in folded.items()}
        del corpus

    diverged = False
    if validation:
        measuring = Validation(validation, passes, kv_heads, group, region, scaling, args.device)
        if artifact.features is not None:
            helps = judge(artifact, measuring)
            print(describe(helps, layers, kv_heads), file=sys.stderr)
            diverged = not any(helps)
            artifact.features.helps = helps
        measured = reporting.build(artifact, measuring)
        for kind in encoder_settings:
            artifact.functions[kind].measured = reporting.measured_of(kind, measured)
        if args.report:
            print(reporting.write(measured, Path(args.report)))
        else:
            print(reporting.table(measured))
    if diverged:
        print("calibrate: completion helps at no head, because the feature maps diverged or the model has no use for "
              "them: they are left out of the artifact", file=sys.stderr)
        artifact.features = None
        kinds = [k for k in kinds if k != "features"]
    write(args.out, artifact)
    print(f"wrote {args.out}: {Path(args.out).stat().st_size:,} bytes, {', '.join(kinds)} for layers "
          f"{layers[0]} to {layers[-1]}", file=sys.stderr)
    return 1 if diverged else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Whether completion helps, head by head, on documents that training did not see.

Feature maps can diverge: those that started at random turned SmolLM2-135M-Instruct's perplexity of 6.8 into 118. So completion is used only
at heads where it lowers the error of attention's output under every policy that was measured, and an artifact without
this verdict does not complete at all. Training writes the verdict; this command adds it to an artifact made before:

    python -m calibrate.verdict --model DIR --artifact FILE --text FILE[.gz]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from .artifact import Artifact, read, write
from .capture import CaptureSettings, Model, capture
from .documents import Text
from .evaluate import LEARNED, Validation, passes_of
from .policies import Policy
from .region import Region

SHARES = (0.01, 0.02)


def judge(artifact: Artifact, validation: Validation, rows: int = 96) -> list[bool]:
    """One truth value for each layer of `validation` and KV head: completion lowers the output error under every policy.

    Measures all maps, also those that an earlier verdict refused.
    """
    artifact.features.helps = None
    names = ["oracle", "lsh", *(k for k in LEARNED if k in artifact.functions)]
    pairs = [(Policy(name, share=s), Policy(name, share=s, completion=True)) for name in names for s in SHARES]
    figures = validation.measure([p for pair in pairs for p in pair], artifact, rows)
    helps = [True] * (len(validation.layers) * validation.kv_heads)
    for without, completed in pairs:
        before, after = figures[without]["error"].mean(0), figures[completed]["error"].mean(0)
        # A NaN is not below anything, so maps that overflow are refused, too.
        helps = [h and bool(b < a) for h, a, b in zip(helps, before, after)]
    return helps


def describe(helps: list[bool], layers, kv_heads: int) -> str:
    refused = [f"{layers[i // kv_heads]}.{i % kv_heads}" for i, h in enumerate(helps) if not h]
    text = f"completion lowers the error at {sum(helps)} of {len(helps)} heads"
    return text + (f"; refused (layer.head): {', '.join(refused)}" if refused else "")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibrate.verdict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face model directory")
    parser.add_argument("--artifact", required=True, help="artifact to judge; its header is rewritten")
    parser.add_argument("--text", required=True, help="text that training did not see, plain or gzip")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--lengths", default="8192", help="document lengths in tokens, comma-separated")
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--heads-per-pass", type=int, default=32, help="KV heads measured at once: bounds memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    artifact = read(args.artifact, args.model)
    if artifact.features is None:
        parser.error(f"{args.artifact} has no feature maps: there is nothing to judge")
    layers = tuple(sorted(artifact.features.layers))
    model = Model(args.model, args.device)
    settings = CaptureSettings(lengths=tuple(int(x) for x in args.lengths.split(",")), documents=0,
                               validation_documents=args.documents, layers=layers, sink=args.sink, window=args.window,
                               seed=args.seed)
    with tempfile.TemporaryDirectory(prefix="winnow-verdict-") as directory:
        paths = capture(model, Text(args.text), settings, Path(directory))
        validation = Validation(paths, passes_of(layers, args.heads_per_pass, model.kv_heads), model.kv_heads, model.group,
                                Region(args.sink, args.window), model.scaling, args.device)
        artifact.features.helps = judge(artifact, validation)
    write(args.artifact, artifact)
    print(describe(artifact.features.helps, layers, model.kv_heads))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Makes smollm2.json: what transformers computes from the real model's GGUF file (scripts/real_model.sh).

    pip install gguf==0.19.0 tokenizers==0.23.3 torch transformers==5.23.0 accelerate
    ./make_smollm2.py "$(../../../scripts/real_model.sh | tail -1)"

For each prompt: its token ids, the greedy tokens that follow in float32 and by how much each led the second best, and the
logits after the prompt (every 97th, and the 5 best). Ids are those of the model's own tokenizer.json, which the PyPI package
`tokenizers` is told here: transformers' reader of GGUF files does not take digits one by one, as that does.
"""
import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "In 1969, three astronauts flew to the Moon. 2 of them",
    "Die Hauptstadt von Österreich heißt",
    "Q: What is the largest planet of the solar system?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 12 + "The quick brown",
    "Water boils at 100 degrees, and it freezes at",
]
GREEDY = 24
STEP = 97


def make_tokenizer(path):
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@torch.no_grad()
def continue_greedily(model, ids):
    """(greedy ids, leads, logits after the prompt)"""
    out = model(torch.tensor([ids]), use_cache=True)
    first = out.logits[0, -1]
    greedy, leads = [], []
    while True:
        best = out.logits[0, -1].topk(2)
        greedy.append(best.indices[0].item())
        leads.append((best.values[0] - best.values[1]).item())
        if len(greedy) == GREEDY:
            return greedy, leads, first
        out = model(torch.tensor([greedy[-1:]]), past_key_values=out.past_key_values, use_cache=True)


def main():
    path = Path(sys.argv[1])
    tokenizer = make_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    prompts = []
    for text in PROMPTS:
        ids = tokenizer.encode(text).ids
        greedy, leads, logits = continue_greedily(model, ids)
        best = logits.topk(5)
        prompts.append({"text": text, "ids": ids, "greedy": greedy, "leads": [round(x, 4) for x in leads],
                        "continuation": tokenizer.decode(greedy), "logits": [round(x, 4) for x in logits[::STEP].tolist()],
                        "best": [[i, round(x, 4)] for i, x in zip(best.indices.tolist(), best.values.tolist())]})
        print(text[:40], "->", prompts[-1]["continuation"], min(leads), flush=True)
    out = {"model": path.name, "step": STEP, "prompts": prompts}
    (Path(__file__).parent / "smollm2.json").write_text(json.dumps(out, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

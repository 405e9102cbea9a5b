#!/usr/bin/env python3
"""Remakes tests/golden/sampler_golden.json: what `transformers` would draw from.

Random rows of logits through the library's own processors, in the order in which its generate()
applies them. Needs torch and transformers; the tests need neither.
"""

import json
import pathlib
import random

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 48
CASES = 60


def make_case(rng):
    logits = [round(rng.gauss(0, 3), 4) for _ in range(VOCAB)]
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
    generated = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 8))]
    options = {
        "temperature": rng.choice([0.3, 0.7, 1.0, 1.8]),
        "top_k": rng.choice([0, 1, 5, 20]),
        "top_p": rng.choice([1.0, 0.95, 0.8, 0.3]),
        "min_p": rng.choice([0.0, 0.05, 0.3]),
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
        "logit_bias": [
            [token, round(rng.uniform(-4, 4), 2)]
            for token in rng.sample(range(VOCAB), rng.choice([0, 3]))
        ],
        "min_tokens": rng.choice([0, 5]),
        "stop_token_ids": rng.sample(range(VOCAB), 2),
    }
    processors = LogitsProcessorList()
    if options["logit_bias"]:
        processors.append(
            SequenceBiasLogitsProcessor({(token,): bias for token, bias in options["logit_bias"]})
        )
    if options["repetition_penalty"] != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if options["min_tokens"] > 0:
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                len(prompt), options["min_tokens"], options["stop_token_ids"]
            )
        )
    processors.append(TemperatureLogitsWarper(options["temperature"]))
    if options["top_k"] > 0:
        processors.append(TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1.0:
        processors.append(TopPLogitsWarper(options["top_p"]))
    if options["min_p"] > 0:
        processors.append(MinPLogitsWarper(options["min_p"]))
    ids = torch.tensor([prompt + generated])
    scores = processors(ids, torch.tensor([logits], dtype=torch.float32))[0]
    probabilities = torch.softmax(scores.double(), dim=-1).tolist()
    return {
        "logits": logits,
        "prompt": prompt,
        "generated": generated,
        **options,
        "expected": [[i, p] for i, p in enumerate(probabilities) if p > 0],
    }


def main():
    rng = random.Random(2024)
    cases = [make_case(rng) for _ in range(CASES)]
    path = pathlib.Path(__file__).parent.parent / "tests/golden/sampler_golden.json"
    path.write_text(json.dumps({"vocab_size": VOCAB, "cases": cases}) + "\n")
    print(f"{path.name}: {CASES} cases")


if __name__ == "__main__":
    main()

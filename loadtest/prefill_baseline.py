#!/usr/bin/env python3
"""What PyTorch reaches on the parts of a prompt that cost most, to compare `winnow bench prefill --device cuda` with.

    python3 loadtest/prefill_baseline.py [--tokens 8192,32768,131072] [--chunk 8192] [--json FILE]

Only a yardstick: nothing of winnow uses PyTorch. It needs a GPU and a PyTorch that sees it. Random bfloat16 values in
the shape of one layer of Llama-3.1-8B:

  products   torch.matmul of a chunk of the prompt by the layer's four matrices (q, k, v in one; gate and up in one)
  attention  causal scaled_dot_product_attention of the whole prompt, grouped heads; of the backends that take it the
             fastest, which is named

tokens/s is what a model of 32 such layers would reach if nothing else took any time: no norms, no rotation, no gate, no
cache of keys and values, no first or last layer. winnow's figure has all of those. Run both in turn on the same card.
"""

import argparse
import json
import statistics
import sys
import warnings

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    sys.exit(f"prefill_baseline.py: {error}")

HIDDEN, INTER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4096, 14336, 32, 8, 128, 32
MATRICES = [
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, HEADS * HEAD_DIM),
    (2 * INTER, HIDDEN),
    (HIDDEN, INTER),
]
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def milliseconds(call, repetitions):
    """Median time of `call` on the device, after a call that is not timed."""
    call()
    times = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def time_products(chunk, repetitions):
    """Milliseconds of a layer's products for a chunk of so many tokens."""
    operands = [(random(chunk, columns), random(rows, columns) * columns**-0.5) for rows, columns in MATRICES]

    def layer():
        for x, w in operands:
            torch.matmul(x, w.t())

    return milliseconds(layer, repetitions)


def time_attention(tokens, repetitions):
    """Milliseconds of a layer's attention over a prompt, and the backend that took so long."""
    q = random(1, HEADS, tokens, HEAD_DIM)
    k, v = random(1, KV_HEADS, tokens, HEAD_DIM), random(1, KV_HEADS, tokens, HEAD_DIM)
    best = None
    warnings.simplefilter("ignore")  # PyTorch says at length why a backend does not take these heads
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel([backend]):
                time = milliseconds(
                    lambda: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    ),
                    repetitions,
                )
        except RuntimeError:  # this one does not take such heads
            continue
        if best is None or time < best[0]:
            best = (time, name)
    if best is None:
        sys.exit("prefill_baseline.py: no backend of scaled_dot_product_attention takes these heads")
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="8192,32768,131072", help="lengths of the prompt")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a product")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("prefill_baseline.py: PyTorch sees no GPU")
    lengths = [int(n) for n in args.tokens.split(",")]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"one layer; TFLOP/s in brackets; products of chunks of up to {args.chunk} tokens")
    print(f"{'tokens':>8} {'products, ms':>20} {'attention, ms':>20} {'backend':>10} {'tokens/s, 32 layers':>20}")
    results = []
    for tokens in lengths:
        chunk = min(args.chunk, tokens)
        products = time_products(chunk, args.repetitions) * tokens / chunk
        attention, backend = time_attention(tokens, args.repetitions)
        product_flops = 2 * tokens * sum(rows * columns for rows, columns in MATRICES)
        attention_flops = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2
        result = {
            "tokens": tokens,
            "products_ms": products,
            "products_tflops": product_flops / products / 1e9,
            "attention_ms": attention,
            "attention_tflops": attention_flops / attention / 1e9,
            "backend": backend,
            "tokens_per_s": tokens / (LAYERS * (products + attention)) * 1e3,
        }
        results.append(result)
        of_products = f"{products:.2f} ({result['products_tflops']:.0f})"
        of_attention = f"{attention:.2f} ({result['attention_tflops']:.0f})"
        print(f"{tokens:>8} {of_products:>20} {of_attention:>20} {backend:>10} {result['tokens_per_s']:>20.0f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": results}, file, indent=1)


if __name__ == "__main__":
    main()

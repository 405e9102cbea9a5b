#!/usr/bin/python3
"""A hundred requests over one stored document: what grows in memory and on disk.

    loadtest/one_document.py [--requests 100] [--tokens 8000] [--policy P]

A server stores the document with its first question. A second one, over the same directory, answers `requests` other
questions about it. Memory is the process's resident set, disk what the store says of itself at the next start and the
lengths of its files. A suffix is what follows the document's whole blocks, question and answer: growth must be the
suffixes', not the document's. Exits 1 if a request did not find the document, or if anything grew by more than the KV
of the suffixes and a margin.
"""
import argparse
import sys
import tempfile

import tier_load
from harness import MODEL, PATIENCE, Server, inference
from tier_load import BLOCK_TOKENS, MIB


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8000, help="of the document (default %(default)s)")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="requests at a time (default %(default)s)")
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    text = tier_load.document(args.tokens, 1, args.seed)[0].rpartition("\n\n")[0]
    chats = [f"{text}\n\nQuestion {i}: what is the secret code for number {i * 7919}, and which part of the document "
             "says so?" for i in range(args.requests + 1)]
    requests = [inference.GenerateRequest(
        chat=inference.ChatPrompt(messages=[inference.ChatMessage(role="user", content=chat)]), policy=args.policy,
        stopping=inference.StoppingOptions(max_tokens=args.answer, ignore_eos=True)) for chat in chats]
    sizes = ["--max-running", args.streams, "--step-tokens", 256, "--block-tokens", BLOCK_TOKENS, "--retrieval-from", 0,
             "--max-context", 2 * args.tokens]

    with tempfile.TemporaryDirectory(prefix="winnow-one-") as directory:
        flags = [*sizes, "--disk-bytes", "1GiB", "--store-dir", directory, "--kv-bytes",
                 tier_load.least_kv_bytes(args.model, sizes)]

        def serve(some):
            """Replies; blocks and bytes of the store at the start; memory after the first request and after all."""
            with Server(*flags, model=args.model) as server:
                block_bytes = server.metric("winnow_kv_block_bytes")
                stored = tier_load.store_at_start(server)[0], tier_load.store_bytes(directory)
                replies = tier_load.ask_all(server, some[:1], 1, PATIENCE)
                before = tier_load.rss_bytes(server)
                replies += tier_load.ask_all(server, some[1:], args.streams, PATIENCE)
                after = tier_load.rss_bytes(server)
                if server.terminate() != 0:
                    sys.exit("the server failed:\n" + server.log())
            return replies, stored, (before, after), block_bytes

        first = serve(requests[:1])[0]
        replies, stored, memory, block_bytes = serve(requests[:1] + requests[1:])
        grown = serve([])[1]

    wrong = [reply for reply in first + replies if reply.error]
    if wrong:
        sys.exit(f"{len(wrong)} requests failed: {wrong[0].error}")
    tokens = [reply.usage.prompt_tokens for reply in replies]
    cached = [reply.usage.cached_tokens for reply in replies]
    # The last token's KV is never needed.
    suffixes = [prompt + args.answer - 1 - min(cached) for prompt in tokens]
    suffix_bytes = sum(s // BLOCK_TOKENS for s in suffixes[1:]) * block_bytes
    document_bytes = min(cached) // BLOCK_TOKENS * block_bytes
    print(f"{args.model}, {args.policy}, {args.requests} requests over one document, {args.streams} at a time, seed "
          f"{args.seed}")
    print(f"prompt tokens         {min(tokens)} to {max(tokens)}, of them cached {min(cached)} to {max(cached)}")
    print(f"document's KV         {document_bytes / MIB:.2f} MiB; {args.requests} copies would be "
          f"{args.requests * document_bytes / MIB:.0f} MiB")
    print(f"suffixes              {sum(suffixes[1:])} tokens; {suffix_bytes / MIB:.2f} MiB of KV in full blocks")
    print(f"disk                  {stored[0]} to {grown[0]} blocks, {stored[1] / MIB:.2f} to {grown[1] / MIB:.2f} MiB: "
          f"{(grown[1] - stored[1]) / MIB:+.2f} MiB")
    print(f"memory                {memory[0] / MIB:.1f} to {memory[1] / MIB:.1f} MiB: "
          f"{(memory[1] - memory[0]) / MIB:+.1f} MiB")
    good = min(cached) > 0.9 * args.tokens
    # Beside the KV of a block the store has its indexes, and a page of header for each piece.
    good = good and grown[1] - stored[1] <= 1.5 * suffix_bytes + 4 * MIB
    good = good and memory[1] - memory[0] <= suffix_bytes + 64 * MIB
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

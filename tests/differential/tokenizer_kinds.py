"""The tokenizers that the comparison uses: needle, and others trained on the spot on a small text."""
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# The patterns that the model families publish in their tokenizer.json files.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")

TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
          r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_V3 = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
               "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
               " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def steps(*patterns, digits=False, use_regex=False):
    """The JSON of a pre-tokenizer that splits by each pattern in turn and then maps bytes."""
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns]
    if digits:
        splits.append({"type": "Digits", "individual_digits": True})
    return {"type": "Sequence", "pretokenizers": splits + [{**BYTE_LEVEL, "use_regex": use_regex}]}


def family(pre_tokenizer, normalizer=None, ignore_merges=False):
    return {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer, "ignore_merges": ignore_merges}


# By the name that GGUF files have for them, as the families' tokenizer.json files have them.
FAMILIES = {
    "gpt-2": family(BYTE_LEVEL),
    "smollm": family(steps(digits=True, use_regex=True)),
    "llama-bpe": family(steps(LLAMA3), ignore_merges=True),
    "dbrx": family(steps(LLAMA3)),
    "qwen2": family(steps(QWEN2), {"type": "NFC"}),
    "tekken": family(steps(TEKKEN), ignore_merges=True),
    "gpt-4o": family(steps(O200K)),
    "deepseek-v3": family(steps(*DEEPSEEK_V3)),
    "deepseek-coder": family(steps("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, digits=True)),
    "command-r": family(steps(digits=True, use_regex=True), {"type": "NFC"}),
}


def corpus():
    """Enough text of many kinds that merges of all lengths are learned."""
    from text_generator import CODE, CONTRACTIONS, WORDS
    lines = []
    for i, word in enumerate(WORDS):
        other = WORDS[(i * 7 + 3) % len(WORDS)]
        lines += [f"{word} {other}, {word}{other} and the {word}.", f"  {word}\t{other}\r\n\r\n{i * 37} {i}{i}",
                  f"I{CONTRACTIONS[i % len(CONTRACTIONS)]} {CODE[i % len(CODE)]}", f"{word}{CONTRACTIONS[i % 3]} \n\n {other}"]
    return lines * 3


def train(tokenizer, vocab_size, special, alphabet=()):
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=list(alphabet))
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def byte_level(pre_tokenizer, special, normalizer=None, vocab_size=1500, template=True, **bpe):
    tokenizer = Tokenizer(models.BPE(**bpe))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, vocab_size, special, pre_tokenizers.ByteLevel.alphabet())
    if template:
        bos = special[0]
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                          special_tokens=[(bos, tokenizer.token_to_id(bos))])])
    return tokenizer


def llama3(vocab_size=1500):
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated", invert=False)
    tokenizer = byte_level(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
                           ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"],
                           vocab_size=vocab_size, ignore_merges=True)
    return tokenizer


def qwen2(vocab_size=1500):
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated", invert=False)
    tokenizer = byte_level(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
                           ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer=normalizers.NFC(),
                           vocab_size=vocab_size, template=False)
    # As in Qwen3: not special, yet cut out before all else.
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False),
                          AddedToken("<|word|>", normalized=False, single_word=True),
                          AddedToken("<|left|>", normalized=False, lstrip=True),
                          AddedToken("<|right|>", normalized=False, rstrip=True, lstrip=True)])
    return tokenizer


def gpt2_digits(vocab_size=1500):
    return byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=True)]),
                      ["<|endoftext|>", "<|pad|>"], vocab_size=vocab_size)


BYTES = [f"<0x{b:02X}>" for b in range(256)]


def sentencepiece(metaspace, vocab_size=1500, scheme="first", split=False):
    """Like Llama 2: byte fallback. By normalisers (Prepend, Replace) or, the newer way, by Metaspace."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=split)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    # Trained on words, not on lines: without a word boundary merges would grow across them.
    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    train(words, vocab_size, ["<unk>", "<s>", "</s>"] + BYTES)
    import json
    trained, full = json.loads(words.to_str()), json.loads(tokenizer.to_str())
    full["model"]["vocab"], full["model"]["merges"] = trained["model"]["vocab"], trained["model"]["merges"]
    # The byte tokens are ordinary tokens of the vocabulary, as in the published files.
    full["added_tokens"] = [token for token in trained["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(full))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def legacy_specials(vocab_size=1500):
    """The older Llama 2 files: special tokens are looked for in normalised text."""
    import json
    full = json.loads(sentencepiece(False, vocab_size).to_str())
    for token in full["added_tokens"]:
        token["normalized"] = True
    return Tokenizer.from_str(json.dumps(full))


def of_family(name, vocab_size=1500, missing=(), **bpe):
    """A tokenizer of FAMILIES[name]; the bytes `missing` have no token, as some published vocabularies have it."""
    import json
    parts = FAMILIES[name]
    template = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
                "normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"], "decoder": BYTE_LEVEL,
                "model": {"type": "BPE", "vocab": {}, "merges": []}}
    tokenizer = Tokenizer.from_str(json.dumps(template))
    train(tokenizer, vocab_size, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet())
    full = json.loads(tokenizer.to_str())
    spelled = {pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(b))[0][0]
               for b in missing if b < 0x80}
    lost = {token for token in full["model"]["vocab"] if any(character in token for character in spelled)}
    lost -= {token["content"] for token in full["added_tokens"]}
    kept = [token for token in full["model"]["vocab"] if token not in lost]
    full["model"]["vocab"] = {token: number for number, token in enumerate(sorted(kept, key=full["model"]["vocab"].get))}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in full["model"]["merges"]]
    full["model"]["merges"] = [m for m in merges if not lost.intersection((*m, m[0] + m[1]))]
    full["model"].update(ignore_merges=parts["ignore_merges"], **bpe)
    return Tokenizer.from_str(json.dumps(full))


# Letters, a digit, control characters and punctuation without tokens.
MISSING = [ord(c) for c in "QZx7~^"] + [0x00, 0x0B, 0x7F]


def affixes(vocab_size=1500):
    """Prefixes inside words and suffixes at their end, as in older vocabularies."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["[UNK]", "[PAD]"], show_progress=False,
                                  continuing_subword_prefix="##", end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def odd(vocab_size=1500):
    """Rarely used parts together."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(True, False), normalizers.Nmt(),
                                                 normalizers.Replace(Regex(r"\s{2,}"), "  ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("the", "merged_with_previous"), pre_tokenizers.Split(Regex(r"[0-9]"), "contiguous"),
        pre_tokenizers.Split(Regex(r"[.,;]"), "removed", invert=False), pre_tokenizers.Whitespace()])
    tokenizer.decoder = decoders.Metaspace()
    return train(tokenizer, vocab_size, ["[UNK]", "[PAD]"])


def all_kinds(needle_path):
    return {
        "needle": Tokenizer.from_file(needle_path),
        "llama3": llama3(),
        "qwen2": qwen2(),
        "gpt2_digits": gpt2_digits(),
        "metaspace": sentencepiece(True),
        "prepend_replace": sentencepiece(False),
        "metaspace_split": sentencepiece(True, scheme="always", split=True),
        "legacy_specials": legacy_specials(),
        "odd": odd(),
        "smollm": of_family("smollm", missing=MISSING),
        "gpt2_unk": of_family("gpt-2", missing=MISSING, unk_token="<|endoftext|>"),
        "gpt2_fused_unk": of_family("gpt-2", missing=MISSING, unk_token="<|endoftext|>", fuse_unk=True),
        "tekken": of_family("tekken"),
        "gpt4o": of_family("gpt-4o"),
        "phi4": of_family("dbrx"),
        "deepseek_v3": of_family("deepseek-v3"),
        "deepseek_coder": of_family("deepseek-coder"),
        "command_r": of_family("command-r"),
        "affixes": affixes(),
    }


def special_texts(tokenizer):
    return [token.content for token in tokenizer.get_added_tokens_decoder().values()]


VERSION = tokenizers.__version__

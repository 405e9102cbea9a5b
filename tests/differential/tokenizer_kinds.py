"""The tokenizers that the comparison uses: needle, and others trained on the spot on a small text."""
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# The patterns that the model families publish in their tokenizer.json files.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")


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
    }


def special_texts(tokenizer):
    return [token.content for token in tokenizer.get_added_tokens_decoder().values()]


VERSION = tokenizers.__version__

"""What the model reads while it is watched: stretches of text, and documents with planted facts.

Facts are planted because the queries that matter most in use are those of an answer: they look
thousands of tokens back for a few exact tokens, which running text rarely asks of a model.
"""

from __future__ import annotations

import gzip
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

# (sentence in the document, question, answer). The facts are made up here; only the text they are
# planted into comes from the file.
FACTS = [
    ("The secret code for {key} is {value}.", "What is the secret code for {key}?",
     "The secret code for {key} is {value}."),
    ("One of the special magic numbers for {key} is: {value}.",
     "What is the special magic number for {key} mentioned in the provided text?",
     "The special magic number for {key} mentioned in the provided text is {value}."),
    ("Remember: the serial number of {key} reads {value}.", "Which serial number does {key} have?",
     "The serial number of {key} reads {value}."),
    ("For {key}, use port {value}.", "Which port is used for {key}?", "For {key}, use port {value}."),
    ("The password of {key} was set to {value}.", "What was the password of {key} set to?",
     "The password of {key} was set to {value}."),
]
INTROS = [
    "Read the document below and answer the questions that follow.\n",
    "Some special magic numbers are hidden within the following text. Make sure to memorize them.\n",
    "",
]


@dataclass
class Document:
    """Token ids of one prompt, and of what follows it: each suffix is a question and its answer."""

    prefix: list[int]
    suffixes: list[list[int]] = field(default_factory=list)
    answer_starts: list[int] = field(default_factory=list)  # index in the suffix of the first answer token


class Text:
    """A text file (gzip or plain), of which the last `holdout` share is never handed out for training."""

    def __init__(self, path: str | Path, holdout: float = 0.1):
        opened = gzip.open if str(path).endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            text = file.read()
        if len(text) < 10_000:
            raise ValueError(f"{path}: {len(text)} characters are too few to calibrate on (10,000 at least)")
        cut = int(len(text) * (1.0 - holdout))
        self._parts = {"train": text[:cut], "validation": text[cut:]}
        self._words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", self._parts["train"])))

    def stretch(self, rng: random.Random, characters: int, part: str) -> str:
        text = self._parts[part]
        characters = min(characters, len(text))
        start = rng.randrange(len(text) - characters + 1)
        return text[start:start + characters]

    def word(self, rng: random.Random) -> str:
        return rng.choice(self._words)


def text_document(rng: random.Random, text: Text, tokenizer, length: int, part: str) -> Document:
    ids = tokenizer(text.stretch(rng, length * 6 + 1000, part), add_special_tokens=False)["input_ids"]
    while len(ids) < length:  # dense scripts: fewer characters per token than guessed
        ids += tokenizer(text.stretch(rng, length * 6 + 1000, part), add_special_tokens=False)["input_ids"]
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    return Document(prefix=(bos + ids)[:length])


def _chat(tokenizer, content: str) -> str:
    if tokenizer.chat_template is None:
        bos = tokenizer.bos_token or ""
        return f"{bos}{content}\n"
    return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                         add_generation_prompt=True)


def needle_document(rng: random.Random, text: Text, tokenizer, length: int, part: str,
                    questions: int = 8) -> Document:
    """A prompt of about `length` tokens with planted facts, and `questions` questions about it.

    A third of the documents are full of facts of one kind, so that the keys of the fact asked for
    have many near neighbours: the hard negatives of retrieval.
    """
    crowded = rng.random() < 0.35
    count = max(questions, length // 150) if crowded else max(questions, length // 700)
    one_kind = rng.choice(FACTS) if crowded else None
    kinds = [one_kind or rng.choice(FACTS) for _ in range(count)]
    facts = []
    for sentence, question, answer in kinds:
        key = f"{text.word(rng)}-{text.word(rng)}"
        value = "".join(rng.choice("0123456789") for _ in range(7))
        facts.append([s.format(key=key, value=value) for s in (sentence, question, answer)])

    probe = text.stretch(rng, 20_000, part)
    characters_per_token = len(probe) / max(1, len(tokenizer(probe, add_special_tokens=False)["input_ids"]))
    fact_tokens = sum(len(tokenizer(" " + f[0], add_special_tokens=False)["input_ids"]) for f in facts)
    body_tokens = max(200, length - fact_tokens - 80)
    body = text.stretch(rng, int(body_tokens * characters_per_token), part)
    lines = body.split("\n")
    for sentence, _, _ in facts:
        at = rng.randrange(len(lines))
        lines[at] += " " + sentence
    marker = "\x00"
    chat = _chat(tokenizer, rng.choice(INTROS) + "\n".join(lines).replace(marker, "") + "\n\n" + marker)
    before, after = chat.split(marker)
    encode = lambda s: tokenizer(s, add_special_tokens=False)["input_ids"]
    document = Document(prefix=encode(before))
    asked = rng.sample(facts, min(questions - 2, len(facts)))
    pairs = [(question, answer) for _, question, answer in asked]
    while len(pairs) < questions:  # verbatim recall: the query must find one place among all the text
        words = rng.choice(lines).split()
        if len(words) < 12:
            continue
        at = rng.randrange(len(words) - 11)
        pairs.append(("Continue the passage that begins: " + " ".join(words[at:at + 6]),
                      " " + " ".join(words[at + 6:at + 12])))
    for question, answer in pairs:
        head = encode(question + after)
        document.suffixes.append(head + encode(answer))
        document.answer_starts.append(len(head))
    return document

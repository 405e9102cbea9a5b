"""Random and awkward strings for the comparison of tokenizers: the same seed gives the same strings."""
import random

WHITESPACE = [" ", "  ", "   ", "\t", "\n", "\r", "\r\n", "\n\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x1f",
              "\x85", "\xa0", "\u1680", "\u180e", "\u2000", "\u2003", "\u2007", "\u2009", "\u200a", "\u200b",
              "\u2028", "\u2029", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff"]
MARKS = ["\u0300", "\u0301", "\u0308", "\u0327", "\u0331", "\u0345", "\u0483", "\u05b0", "\u064b", "\u093c", "\u094d",
         "\u0e38", "\u1ab0", "\u1df6", "\u20d0", "\u302a", "\u3099", "\ufe0f", "\U00010eab", "\U0001e2ae"]
EMOJI = ["\U0001f642", "\U0001f680", "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
         "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f1e9\U0001f1ea", "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "\u263a"]
CONTRACTIONS = ["'s", "'S", "'t", "'re", "'RE", "'ve", "'m", "'ll", "'d", "'\u017f", "\u2019s", "'", "''", "'x"]
CODE = ["def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) {", "#include <vector>\r\n", "a->b::c", "}}", "/* */",
        "\treturn NULL;", "{\"k\": [1, 2.5e-3]}", "https://example.org/a?b=c&d=%20", "<div class=\"x\">", "&nbsp;", "x_y-z", "//",
        "SELECT * FROM t WHERE a='b';", "0x1F", "1e10", "\\n", "$x", "@a", "C:\\dir"]
WORDS = ("the and of to in is that for it as with was on be at by this have from or an they which you are not "
         "Hello world token model cache prefix attention README naïve café Übermensch straße façade "
         "привет мир Москва слово こんにちは 世界 日本語 テキスト 漢字 中文 文字 한국어 안녕하세요 العربية مرحبا "
         "हिन्दी नमस्ते ภาษาไทย Ελληνικά שלום ქართული አማርኛ Tiếng Việt İstanbul ǅ ﬁ ﬀ ß ſ K Å").split()
# First and last code points of ranges with their own difficulties.
BLOCKS = [(0x00, 0x7F), (0x80, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x590, 0x6FF),
          (0x700, 0x8FF), (0x900, 0xDFF), (0xE00, 0xFFF), (0x1000, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x16FF),
          (0x1700, 0x1AFF), (0x1B00, 0x1CFF), (0x1C80, 0x1C8F), (0x1D00, 0x1DFF), (0x1E00, 0x1FFF), (0x2000, 0x2BFF),
          (0x2C00, 0x2E7F), (0x2E80, 0x33FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xABFF), (0xAC00, 0xD7FF),
          (0xE000, 0xF8FF), (0xF900, 0xFFFF), (0x10000, 0x10FFF), (0x11000, 0x11FFF), (0x12000, 0x16FFF),
          (0x17000, 0x1CFFF), (0x1D000, 0x1EFFF), (0x1F000, 0x1FFFF), (0x20000, 0x323AF), (0xE0000, 0xE01EF),
          (0xF0000, 0x10FFFF)]


class TextGenerator:
    def __init__(self, seed, special_texts):
        self.random = random.Random(seed)
        self.special = list(special_texts) or ["<s>"]

    def code_point(self, lo, hi):
        while True:
            c = self.random.randint(lo, hi)
            if not 0xD800 <= c <= 0xDFFF:
                return chr(c)

    def piece(self):
        r = self.random
        kind = r.randrange(16)
        if kind == 0:
            return self.code_point(0, 0x10FFFF)
        if kind == 1:
            return self.code_point(*r.choice(BLOCKS))
        if kind == 2:
            block = r.choice(BLOCKS)
            return "".join(self.code_point(*block) for _ in range(r.randint(1, 8)))
        if kind == 3:
            return r.choice(WHITESPACE) * r.randint(1, 4)
        if kind == 4:
            return "".join(r.choice(WHITESPACE) for _ in range(r.randint(1, 6)))
        if kind == 5:
            return "".join(r.choice("0123456789٣४๕５²½Ⅷ") for _ in range(r.randint(1, 12)))
        if kind == 6:
            return r.choice(EMOJI)
        if kind == 7:
            return r.choice("aeoucAEskk\u212b\uac00\u1100\u0b47\U00011935") + "".join(
                r.choice(MARKS) for _ in range(r.randint(1, 4)))
        if kind == 8:
            return r.choice(CONTRACTIONS)
        if kind == 9:
            return r.choice(CODE)
        if kind == 10:
            text = r.choice(self.special)
            return text if r.random() < 0.7 else text[: r.randint(1, len(text))]
        if kind == 11:
            return chr(r.randrange(0x20)) * r.randint(1, 3)
        if kind == 12:
            return "".join(r.choice("!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~ \u2581\u2014\u201c") for _ in range(r.randint(1, 5)))
        if kind == 13:
            return r.choice(["<0x0A>", "<0xE4>", "\ufffd", "\u0120", "\u010a", "\u2581", "\u2581\u2581", "<unk>", "ab" * 9])
        return r.choice(WORDS)

    def text(self):
        r = self.random
        pieces = [self.piece() for _ in range(r.choice((0, 1, 1, 2, 3, 4, 6, 9)))]
        return (" " if r.random() < 0.4 else "").join(pieces)

    def ids(self, vocab_size, count):
        """Ids that no encoding gives: what a model may emit."""
        r = self.random
        return [r.randrange(vocab_size + (3 if r.random() < 0.05 else 0)) for _ in range(count)]

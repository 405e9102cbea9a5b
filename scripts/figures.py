#!/usr/bin/env python3
"""Draws the pictures of README.md and docs/ as SVG, from measured JSON (docs/results) and the shape of a model, and writes README.md's table:

    scripts/figures.py             says which are not current, and exits with 1 if one is not
    scripts/figures.py --write     writes them, to docs/img and README.md

Needs Debian's python3-matplotlib.
"""
import html
import json
import pathlib
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SOURCE / "loadtest"))
import load_report  # noqa: E402

IMAGES = SOURCE / "docs/img"
WEIGHTS, DENSE, CODES, ROWS, UNREAD = "#90a4ae", "#5c6bc0", "#f9a825", "#00796b", "#eceff1"


def step_bytes(shape, context, chosen, dense_layers=2, code_bytes=16):
    """GB that a decode step reads, by what it is: KV and weights in 2 bytes a number, codes of 128 bits a key."""
    heads, layers = shape["num_key_value_heads"], shape["num_hidden_layers"]
    size = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    hidden, queries = shape["hidden_size"], shape["num_attention_heads"] * size
    layer = hidden * (2 * queries + 2 * heads * size) + 3 * hidden * shape["intermediate_size"]
    weights = 2 * (layers * layer + hidden * shape["vocab_size"])
    row = 2 * 2 * heads * size  # K and V of a token in a layer
    retrieving = layers - dense_layers
    return {"weights": weights / 1e9, "kv": context * row * layers / 1e9, "dense_layers": context * row * dense_layers / 1e9,
            "codes": context * heads * code_bytes * retrieving / 1e9, "rows": chosen * row * retrieving / 1e9}


class Drawing:
    """SVG, built from top to bottom."""

    def __init__(self, width, height):
        self.width, self.height, self.parts = width, height, []

    def box(self, x, y, width, height, colour, title=""):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1.2):.1f}" height="{height:.1f}" fill="{colour}"><title>{html.escape(title)}</title></rect>')

    def text(self, x, y, words, size=14, anchor="start", colour="#263238", weight="normal"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{html.escape(words)}</text>')

    def line(self, points, colour="#607d8b", arrow=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{" marker-end=" + chr(34) + "url(#arrow)" + chr(34) if arrow else ""}/>')

    def svg(self):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" font-family="system-ui, sans-serif">'
                '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#607d8b"/></marker></defs>'
                f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>' + "\n".join(self.parts) + "</svg>\n")


def step_picture():
    """A decode step of an 8B model at 128K tokens, dense and retrieving, to scale; and the way of a layer."""
    read = step_bytes(json.loads((SOURCE / "loadtest/shapes/llama-3.1-8b.json").read_text()), 131072, 2048)
    drawing, left, scale = Drawing(960, 392), 20, 920 / (read["weights"] + read["kv"])

    def bar(y, title, parts, total):
        drawing.text(left, y - 8, title, 15, weight="600")
        drawing.text(940, y - 8, f"{total:.1f} GB read", 15, "end", weight="600")
        at = left
        for size, colour, name, inside in parts:
            drawing.box(at, y, size * scale, 40, colour, f"{name}: {size:.2f} GB")
            if inside:
                drawing.text(at + size * scale / 2, y + 25, f"{name}, {size:.1f} GB", 13, "middle", "#ffffff" if colour != UNREAD else "#607d8b")
            at += size * scale

    some = [read["dense_layers"], read["codes"], read["rows"]]
    bar(36, "Dense attention: every step reads all keys and values", [(read["weights"], WEIGHTS, "weights", True), (read["kv"], DENSE, "KV of 131,072 tokens", True)],
        read["weights"] + read["kv"])
    bar(122, "Retrieving (lsh:k=2048): a step reads codes of the keys, and the entries that they point at",
        [(read["weights"], WEIGHTS, "weights", True), (some[0], DENSE, "KV of two dense layers", False), (some[1], CODES, "codes", False), (some[2], ROWS, "chosen entries", False),
         (read["kv"] - sum(some), UNREAD, "KV that stays where it is: GPU, host memory or SSD", True)], read["weights"] + sum(some))
    at = left + read["weights"] * scale
    for move, (size, colour, words) in zip((-200, 0, 200), zip(some, (DENSE, CODES, ROWS), ("two dense layers", "codes of 128 bits", "2,048 entries a head"))):
        middle = at + size * scale / 2
        x = middle + move - 6
        drawing.line([(middle, 164), (middle, 178), (x + 6, 178), (x + 6, 190)], colour)
        drawing.text(x, 206, f"{words}, {size:.2f} GB", 13, colour="#263238")
        at += size * scale
    drawing.text(left, 250, "In each layer that retrieves", 15, weight="600")
    steps = (("query", "of the new token"), ("index", "scan the codes of all keys"), ("select", "the best matches"), ("fetch", "fast memory, host, SSD"),
             ("attend", "chosen + first and last"), ("complete", "tail estimate of the rest"))
    width = 140
    for i, (name, what) in enumerate(steps):
        x = left + i * (width + 16)
        drawing.box(x, 266, width, 58, "#e0f2f1" if i else UNREAD)
        drawing.text(x + width / 2, 290, name, 15, "middle", weight="600")
        drawing.text(x + width / 2, 310, what, 9.5, "middle")
        if i:
            drawing.line([(x - 16, 295), (x - 1, 295)], arrow=True)
    drawing.text(left, 352, "Bytes of one decode step of a Llama-3.1-8B shape in bf16 at 128K tokens, to scale; computed from the shape by scripts/figures.py.", 12, colour="#607d8b")
    drawing.text(left, 372, "Each answer's usage says what its steps read, by tier, and what dense attention would have read.", 12, colour="#607d8b")
    return drawing.svg()


def peers_plot():
    measured = json.loads((SOURCE / "docs/results/peers-h200.json").read_text())
    rows = [row for row in measured["decode_ms"] if row["batch"] == 1 and "winnow lsh:k=2048" in row]

    def draw(axes):
        for name, colour, style in (("llama.cpp", "#8d6e63", "s--"), ("vLLM", "#5c6bc0", "^--"), ("winnow dense", "#78909c", "o-"), ("winnow lsh:k=2048", ROWS, "o-")):
            axes.plot([row["context"] for row in rows], [row[name] for row in rows], style, color=colour, label=name, linewidth=1.6, markersize=5)
            axes.annotate(f"{rows[-1][name]:g}", (rows[-1]["context"], rows[-1][name]), textcoords="offset points", xytext=(8, -3), color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["context"] for row in rows], [f"{row['context'] // 1024}K" for row in rows])
        axes.set(xlabel="tokens of context", ylabel="ms a decode step", ylim=(0, None), xlim=(7400, 165000), title=f"Llama-3.1-8B shape, one sequence, one H200 ({measured['date']})")
        axes.legend(frameon=False)
    return load_report.figure(draw, (6.4, 3.4)) + "\n"


def results(name, kind):
    return json.loads((SOURCE / f"docs/results/{name}.json").read_text())[kind]


def context_axis(axes, contexts):
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{round(context / 1024)}K" for context in contexts])
    axes.minorticks_off()


def attention_plot():
    """Milliseconds of attention in a step by context, for each policy of one run on a CPU."""
    rows = results("retrieval-decode-1b", "decode")
    contexts = sorted({row["context"] for row in rows})
    styles = {"dense": ("#5c6bc0", "s-"), "lsh:k=2%,p=0.95,from=0": ("#f9a825", "v-"), "quest:k=2%,from=0": ("#8d6e63", "^--"), "lsh:k=2%,from=0": (ROWS, "o-"), "window": ("#78909c", "D--")}

    def draw(axes):
        for policy, (colour, style) in styles.items():
            times = [next(row["attention_ms"] for row in rows if (row["policy"], row["context"]) == (policy, context)) for context in contexts]
            axes.plot(contexts, times, style, color=colour, label=policy.removesuffix(",from=0"), linewidth=1.6, markersize=5)
            axes.annotate(f"{times[-1]:.3g}", (contexts[-1], times[-1]), textcoords="offset points", xytext=(8, 3 if policy.startswith("quest") else -8), color=colour)
        context_axis(axes, contexts)
        axes.set_yscale("log")
        axes.set_yticks([1, 10, 100], ["1", "10", "100"])
        axes.minorticks_off()
        axes.set(xlabel="tokens of context", ylabel="ms of attention a decode step", xlim=(7000, 850000), title="Llama-3.2-1B shape, 16 threads, two of 16 layers dense")
        axes.legend(frameon=False)
    return load_report.figure(draw, (6.4, 3.8)) + "\n"


def quality_points():
    """(policy, share of the candidates that were read, share of positions whose likeliest token is not dense attention's)."""
    rows = {row["policy"]: row for name in ("smollm2-8k-gpu", "smollm2-rerank-8k") for row in results(name, "text")}
    shown = ("pca:k=2%", "pca:k=1%", "pca:k=2%,rerank=on", "pca:k=1%,rerank=on", "pca:k=2%,tail=off", "oracle:k=2%", "lsh:k=2%", "lsh:k=10%", "lsh:k=2%,p=0.95", "quest:k=2%")
    return [(policy, rows[policy]["kept"], 1 - rows[policy]["against_dense"]["top1"]) for policy in shown]


def quality_plot():
    colours = {"pca": ROWS, "oracle": "#37474f", "lsh": "#f9a825", "quest": "#8d6e63"}
    beside = {"pca:k=2%,rerank=on": (7, -9), "pca:k=2%": (7, 1), "pca:k=2%,tail=off": (7, 1), "oracle:k=2%": (-64, -3)}

    def draw(axes):
        for policy, read, differs in quality_points():
            colour = colours[policy.partition(":")[0]]
            axes.plot(100 * read, 100 * differs, "o", color=colour, markersize=6)
            axes.annotate(policy, (100 * read, 100 * differs), textcoords="offset points", xytext=beside.get(policy, (7, -3)), color=colour)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([1, 2, 5, 10], ["1 %", "2 %", "5 %", "10 %"])
        axes.set_yticks([2, 5, 10, 20], ["2 %", "5 %", "10 %", "20 %"])
        axes.minorticks_off()
        axes.set(xlabel="candidates that were read", ylabel="another likeliest token than dense", xlim=(0.8, 20), ylim=(2, 26),
                 title="SmolLM2-135M-Instruct, 14,334 positions in windows of 8,192 tokens")
    return load_report.figure(draw, (6.4, 3.8)) + "\n"


def tiers_plot():
    """Milliseconds of a step by the share of the document's blocks that is in memory; the rest is on a disk."""
    series = (("8B shape on a GPU, lsh:k=256, 128K", "tiers-8b-cuda-256", 131011, "#37474f", "s-"), ("1B shape, lsh:k=256, 128K", "tiers-1b", 131016, "#5c6bc0", "^-"),
              ("needle-26m, lsh:k=2%, 32K", "tiers-needle-26m", 32720, "#f9a825", "v-"), ("needle-5m, hata:k=2%, 32K", "tiers-needle-5m", 32720, ROWS, "o-"))

    def draw(axes):
        for label, name, context, colour, style in series:
            rows = sorted((row["share_asked"], row["ms_per_token"]) for row in results(name, "tiers") if row["context"] == context)
            axes.plot([100 * share for share, _ in rows], [ms for _, ms in rows], style, color=colour, label=label, linewidth=1.6, markersize=5)
            axes.annotate(f"{rows[0][1]:.3g}", rows[0], textcoords="offset points", xytext=(0, 6), ha="center", color=colour)
            axes.annotate(f"{rows[-1][1]:.3g}", (100, rows[-1][1]), textcoords="offset points", xytext=(8, -3), color=colour)
        axes.set_yscale("log")
        axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        axes.minorticks_off()
        axes.set(xlabel="blocks in memory, %", ylabel="ms a decode step, median", xlim=(-4, 112), ylim=(0.6, 3000), title="A disk of 87,000 to 122,000 random reads a second has the rest")
        axes.legend(frameon=False, ncols=2, loc="upper right")
    return load_report.figure(draw, (6.4, 3.8)) + "\n"


def peers_table():
    """Markdown: a line for each measured shape, with the command that measures winnow's part of it."""
    measured = json.loads((SOURCE / "docs/results/peers-h200.json").read_text())
    columns = ("winnow dense", "winnow lsh:k=", "vLLM", "llama.cpp")
    lines = [f"On {measured['machine']}; {measured['shape']}; {measured['date']}, one run; vLLM {measured['versions']['vLLM']};",
             f"llama.cpp with {measured['versions']['llama.cpp'].replace('-fa 1', '`-fa 1`')}. More: [docs/results/measured.md](docs/results/measured.md).", "",
             "| | winnow | winnow, retrieving | vLLM | llama.cpp | winnow's command: `winnow bench ... --device cuda --like loadtest/shapes/llama-3.1-8b.json` |", "|---|---|---|---|---|---|"]

    def cells(row, best):
        shown = []
        for column in columns:
            key = next((key for key in row if key.startswith(column)), None)
            value = "" if key is None else f"{row[key]:,}" if row[key] >= 1000 else f"{row[key]:#.3g}"
            shown.append(f"**{value}**" if key is not None and row[key] == best(v for k, v in row.items() if k not in ("context", "batch", "tokens")) else value)
        return " | ".join(shown)

    for row in measured["decode_ms"]:
        policy = next((key.partition(" ")[2] for key in row if key.startswith("winnow lsh")), None)
        flags = f"decode --contexts {row['context']} --batch {row['batch']}" + (f" --policy {policy},from=0" if policy else "")
        lines.append(f"| {row['batch']} x {row['context'] // 1024}K, ms a step | {cells(row, min)} | `{flags}` |")
    for row in measured["prompt_tokens_per_s"]:
        prompt = {key if key != "winnow" else "winnow dense": value for key, value in row.items()}
        lines.append(f"| prompt of {row['tokens'] // 1024}K, tokens/s | {cells(prompt, max)} | `prefill --tokens {row['tokens']}` |")
    return "\n".join(lines)


FIGURES = {"step.svg": step_picture, "peers.svg": peers_plot, "attention.svg": attention_plot, "quality.svg": quality_plot, "tiers.svg": tiers_plot}


def current():
    """{path: text} of all that is drawn and written."""
    readme = SOURCE / "README.md"
    head, mark, rest = readme.read_text().partition("from docs/results/peers-h200.json -->\n")
    texts = {IMAGES / name: make() for name, make in FIGURES.items()}
    texts[readme] = head + mark + peers_table() + "\n<!-- /peers -->" + rest.partition("<!-- /peers -->")[2]
    return texts


def stale():
    return [path.name for path, text in current().items() if not path.exists() or path.read_text() != text]


def main():
    if "--write" in sys.argv[1:]:
        IMAGES.mkdir(exist_ok=True)
        for path, text in current().items():
            path.write_text(text)
    elif names := stale():
        sys.exit(f"not current: {', '.join(names)}; run scripts/figures.py --write")


if __name__ == "__main__":
    main()

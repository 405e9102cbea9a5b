#!/usr/bin/env python3
"""Makes the generated pages of the reference: docs/metrics.md of what a server's /metrics says, docs/flags.md of the
program's --help.

    scripts/reference_pages.py             says which are not current, and exits with 1 if one is not
    scripts/reference_pages.py --write     writes them

Runs build/release/winnow (or WINNOW_BIN), with the small model. tests/deploy compares.
"""
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[1]

GROUPS = [
    ("Requests", r"winnow_(requests|waiting|sequences|serving)"),
    ("Time", r"winnow_(time_to|inter_token|request_duration|queue_seconds|step_)"),
    ("Tokens and prefixes", r"winnow_(prompt|cached|generated|computed|prefix|preemptions)"),
    ("Engine and KV", r"winnow_(engine|device|kv_block|build_info)"),
    ("Answers that keep a form", r"winnow_structured_"),
    ("Drafts of policies with verify", r"winnow_(draft|verify)_"),
    ("What attention reads", r"winnow_(kv_read_bytes|kv_read_rows|kv_dense|kv_selected|retrieval|index|kv_row_cache|kv_prefetch)"),
    ("KV events", r"winnow_kv_event_"),
    ("Slower tiers", r"winnow_(kv_|store_|resume_)"),
    ("HTTP and gRPC ports, log, TLS", r"winnow_(http|grpc|log|tls)_"),
    ("The process", r"process_"),
    ("Scrapes of the metrics port", r"exposer_"),  # prometheus-cpp's own
    ("OpenTelemetry's names", r"gen_ai_"),
    ("vLLM's names", r"vllm:"),
]

HEAD = """# Metrics

`GET /metrics` on the metrics port (`--metrics`, without a key) and on the HTTP port (with one, where keys are asked for; histograms and outcomes of requests at
most a second old). Names, texts and labels are those of a running server: this page is made by `scripts/reference_pages.py`, and a test
compares. Every series is there from the start, at zero, unless it counts something that a server does not have (`winnow_index_bytes`).

Dashboards and alerts: [deploy](deploy.md#monitoring).
"""


def metrics_page(text):
    families, labels = {}, {}
    for name, help_text in re.findall(r"^# HELP (\S+) (.*)$", text, re.M):
        families[name] = [None, help_text]
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M):
        families[name][0] = kind
    for name, series in re.findall(r"^([A-Za-z_:][A-Za-z0-9_:]*)\{(.*)\} ", text, re.M):
        family = name if name in families else re.sub(r"_(bucket|sum|count)$", "", name)
        for label, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', series):
            if label != "le":
                labels.setdefault(family, {}).setdefault(label, set()).add(value)
    out = [HEAD]
    left = dict(families)
    for title, pattern in GROUPS:
        chosen = [name for name in left if re.match(pattern, name)]
        if not chosen:
            continue
        out.append(f"## {title}\n\n| name | kind | what it says |\n|---|---|---|")
        for name in sorted(chosen):
            kind, help_text = left.pop(name)
            shown = []
            for label, values in sorted(labels.get(name, {}).items()):
                several = sorted(values) if len(values) > 1 or label == "tier" else []
                shown.append(f"`{label}`" + (" (" + ", ".join(several) + ")" if several else ""))
            text_of = help_text.replace("\\\"", "\"").replace("\\\\", "\\").replace("|", "\\|")
            text_of = re.sub(r"((?:--[a-z][a-z0-9-]*[a-z0-9](?: (?:on|off)\b)?)|winnow_[a-z0-9_]+(?:\{[^}]*\})?)", r"`\1`", text_of)
            out.append(f"| `{name}` | {kind} | {text_of}" + (" Labels: " + ", ".join(shown) + "." if shown else "") + " |")
        out.append("")
    assert not left, f"of no group: {sorted(left)}"
    return "\n".join(out).rstrip() + "\n"


FLAGS_HEAD = """# Options

`winnow serve` takes each option as a flag, as an environment variable (`--kv-bytes`: `WINNOW_KV_BYTES`), and in a YAML file
(`--config FILE`, or `WINNOW_CONFIG`; there `kv_bytes`). Flags win over variables, variables over the file. An unknown name is an error
in a flag and in the file, and a warning in a variable. `winnow serve ... --check-config` says whether all of it fits together,
`--print-config` prints every value and where it came from. This page is made by `scripts/reference_pages.py`, and a test compares.
"""


def help_of(binary, *command):
    return subprocess.run([binary, *command, "--help"], capture_output=True, text=True, check=True).stdout


def options_of(text):
    """(flags, value, what it does) of each option of a --help text."""
    out = []
    for line in text.splitlines():
        option = re.match(r"  (-\S.*?)(?:\s{2,}(\S.*))?$", line)
        if option:
            head, what = option.groups()
            flags, _, value = head.partition(" ")
            out.append([flags, value, what or ""])
        elif out and re.match(r"\s{10,}\S", line):
            out[-1][2] = (out[-1][2] + " " + line.strip()).strip()
    return [option for option in out if not option[0].startswith("-h,")]


def cell(text):
    return text.replace("|", "\\|").replace("<", "&lt;")


def flags_page(binary):
    top = help_of(binary)
    commands = re.findall(r"^  ([a-z][a-z-]*)\s{2,}(\S.*)$", top.partition("Subcommands:")[2], re.M)
    out = [FLAGS_HEAD]
    for command, what in commands:
        text = help_of(binary, command)
        nested = re.findall(r"^  ([a-z][a-z-]*)\s{2,}(\S.*)$", text.partition("Subcommands:")[2], re.M)
        out.append(f"## winnow {command}\n\n{what}.\n")
        for words, title in [((command,), None)] + [((command, name), f"{what}") for name, what in nested]:
            options = options_of(help_of(binary, *words).partition("Subcommands:")[0])
            if title is not None:
                out.append(f"### winnow {' '.join(words)}\n\n{title}.\n")
            if not options:
                continue
            out.append("| option | value | what it does | default | variable |\n|---|---|---|---|---|")
            for flags, value, text in options:
                default = re.search(r" ?\[default: ([^]]*)\]", text)
                variable = re.search(r" ?\[(WINNOW_[A-Z0-9_]+)\]", text)
                for found in (default, variable):
                    if found:
                        text = text.replace(found.group(0), "")
                out.append(f"| `{flags}` | {cell(value)} | {cell(text)} | {'`' + cell(default.group(1)) + '`' if default else ''} | "
                           f"{'`' + variable.group(1) + '`' if variable else ''} |")
            out.append("")
    return "\n".join(out).rstrip() + "\n"


def main():
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    sys.path.insert(0, str(SOURCE / "tests/e2e"))
    import harness
    with harness.Server("--index", "lsh:128") as server:
        pages = {"docs/metrics.md": metrics_page(server.metrics_text()), "docs/flags.md": flags_page(harness.BIN)}
    stale = [path for path, text in pages.items() if not (SOURCE / path).exists() or (SOURCE / path).read_text() != text]
    if sys.argv[1:]:
        for path in stale:
            (SOURCE / path).write_text(pages[path])
    elif stale:
        sys.exit("not current, run scripts/reference_pages.py --write: " + ", ".join(stale))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes the generated pages of the reference: docs/metrics.md of what a server's /metrics says, docs/flags.md of the
program's --help, docs/api.md of proto/.

    scripts/reference_pages.py             says which are not current, and exits with 1 if one is not
    scripts/reference_pages.py --write     writes them

Runs build/release/winnow (or WINNOW_BIN), with the small model, and protoc. tests/deploy compares.
"""
import html
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


API_HEAD = """# API over gRPC

What `proto/winnow/v1` says, as pages: services, messages and their fields with ranges and defaults, errors, metadata. A field without a text is
explained by its name or by the field above it. This page is made of the comments by `scripts/reference_pages.py`, and a test compares.

On the same port are `grpc.health.v1.Health` and, where the build has it, the [service of routers](router.md#vllmgrpcenginevllmengine).
What the same requests are over HTTP: [clients over HTTP](http.md). A typed client: `clients/python`.
"""
# In the order of the page: each file has one service.
API_FILES = ("inference", "prefix", "admin")


def prose(text):
    """A comment's words as Markdown, which must not take them for marks of its own."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for i in range(0, len(parts), 2):
        text = html.escape(parts[i], quote=False).replace("|", "\\|").replace("*", "\\*")
        text = re.sub(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9]\b(?: (?:on|off)\b)?)", r"`\1`", text)
        # Names of fields, metadata and constants: words with an underscore, and paths of them.
        parts[i] = re.sub(r"(?<![\w`.])([A-Za-z][A-Za-z0-9]*(?:\.[A-Za-z][A-Za-z0-9]*)*(?:[._][A-Za-z0-9]+)*_[A-Za-z0-9_]*[A-Za-z0-9](?:\.[a-z_]+)*)", r"`\1`", text)
    for i in range(1, len(parts), 2):
        parts[i] = parts[i].replace("|", "\\|")
    return "".join(parts)


def rows_of(lines):
    """Rows of a comment's indented lines, whose columns are two spaces or more apart. A line that is indented deeper goes on with the last
    cell, or is a row of its own with the first cell of the row above where it begins with a NAME of a reason."""
    first = min(len(line) - len(line.lstrip()) for line in lines)
    rows = []
    for line in lines:
        cells = re.split(r" {2,}", re.sub(r"^([A-Z_]+) (?=[A-Z_]+ {2})", r"\1  ", line.strip()))
        if len(line) - len(line.lstrip()) == first:
            rows.append(cells if len(cells) > 1 else line.strip().split(" ", 1))
        elif len(cells) > 1 and re.fullmatch(r"[A-Z][A-Z_]+", cells[0]):
            rows.append([rows[-1][0], *cells])
        else:
            rows[-1][-1] += " " + " ".join(cells)
    return rows


def blocks_of(comment):
    """(paragraph, rows) of a comment: one of them is None."""
    found, lines, indented = [], [], False

    def end():
        if lines:
            found.append((None, rows_of(lines)) if indented else (" ".join(lines), None))
            lines.clear()

    for line in comment.splitlines():
        is_row = line.startswith("   ") and line.strip() != ""
        if not line.strip() or is_row != indented:
            end()
        indented = is_row
        if line.strip():
            lines.append(line if is_row else line.strip())
    end()
    return found


def comment_page(comment):
    """A comment as paragraphs and tables."""
    out = []
    for paragraph, rows in blocks_of(comment):
        if rows is None:
            out.append(prose(paragraph) + "\n")
            continue
        width = max(len(row) for row in rows)
        assert all(len(row) == width for row in rows), rows
        out.append("|" + " |" * width + "\n" + "|---" * width + "|")
        before = None
        for row in rows:
            shown = [f"`{cell}`" if len(cell.split()) == 1 else prose(cell) for cell in row[:-1]]
            if width == 3 and row[0] == before:
                shown[0] = ""
            before = row[0]
            out.append("| " + " | ".join([*shown, prose(row[-1])]) + " |")
        out.append("")
    return "\n".join(out)


def comment_cell(comment):
    def shown(row):
        return ", ".join(f"`{name}`" for name in row[0].split(", ")) + " " + prose(" ".join(row[1:]))

    return "<br>".join(prose(paragraph) if rows is None else "<br>".join(map(shown, rows)) for paragraph, rows in blocks_of(comment))


def api_page(file_set):
    """Of a FileDescriptorSet with comments (tests/proto/proto_lint.py makes it)."""
    files = {pathlib.PurePosixPath(file.name).stem: file for file in file_set.file}
    assert set(files) == set(API_FILES), f"API_FILES lacks, or has too many of {sorted(files)}"
    ours = {f".{file.package}.{message.name}" for file in files.values() for message in [*file.message_type, *file.enum_type]}
    out = [API_HEAD]
    for stem in API_FILES:
        file = files[stem]
        comments = {tuple(location.path): location.leading_comments for location in file.source_code_info.location}
        messages = {message.name: (i, message) for i, message in enumerate(file.message_type)}

        def type_of(message, field):
            kinds = field.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number
            name = kinds[field.type].name.removeprefix("TYPE_").lower()
            if name in ("message", "enum"):
                short = field.type_name.rpartition(".")[2]
                nested = next((one for one in message.nested_type if one.name == short and one.options.map_entry), None)
                if nested is not None:
                    return "map of " + " to ".join(type_of(nested, one) for one in nested.field)
                assert field.type_name in ours, field.type_name
                name = f"[{short}](#{short.lower()})"
            if field.label == field.LABEL_REPEATED:
                return f"list of {name}"
            return f"{name}, optional" if field.proto3_optional else name

        def fields_page(i, message):
            groups = {j: oneof.name for j, oneof in enumerate(message.oneof_decl)
                      if not any(field.proto3_optional and field.oneof_index == j for field in message.field)}
            lines = [f"One of `{name}`: {prose(comments.get((4, i, 8, j), ''))}\n" for j, name in groups.items()]
            if not message.field:
                return "No fields.\n"
            lines.append("| field | type | what it says |\n|---|---|---|")
            for j, field in enumerate(message.field):
                kind = type_of(message, field)
                if field.HasField("oneof_index") and field.oneof_index in groups:
                    kind += f", of `{groups[field.oneof_index]}`"
                lines.append(f"| `{field.name}` = {field.number} | {kind} | {comment_cell(comments.get((4, i, 2, j), ''))} |")
            return "\n".join(lines) + "\n"

        (service,) = file.service
        out.append(f"## {service.name}\n\n`{file.package}.{service.name}`, in `proto/{file.name}`. {prose(comments[(6, 0)])}\n")
        out.append(comment_page(comments[(12,)]))
        of_methods = set()
        for i, method in enumerate(service.method):
            of_methods |= {method.input_type.rpartition(".")[2], method.output_type.rpartition(".")[2]}
            out.append(f"### {service.name}.{method.name}\n\n{comment_page(comments[(6, 0, 2, i)])}")
            for word, name, stream in (("Request", method.input_type, method.client_streaming), ("Response", method.output_type, method.server_streaming)):
                index, message = messages[name.rpartition(".")[2]]
                about = comment_page(comments.get((4, index), ""))
                out.append(f"#### {message.name}\n\n{word}{', a stream of them' if stream else ''}. {about}".rstrip() + "\n")
                out.append(fields_page(index, message))
        out.append(f"### Other messages of {service.name}\n" if len(messages) > len(of_methods) else "")
        for name, (i, message) in messages.items():
            if name not in of_methods:
                out.append(f"#### {name}\n\n{comment_page(comments.get((4, i), ''))}\n{fields_page(i, message)}")
        for i, enum in enumerate(file.enum_type):
            out.append(f"#### {enum.name}\n\n{comment_page(comments.get((5, i), ''))}\n| value | what it says |\n|---|---|")
            out.extend(f"| `{value.name}` = {value.number} | {comment_cell(comments.get((5, i, 2, j), ''))} |" for j, value in enumerate(enum.value))
            out.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).rstrip() + "\n"


def protos():
    sys.path.insert(0, str(SOURCE / "tests/proto"))
    import proto_lint
    return proto_lint.compile_protos(SOURCE / "proto")


def main():
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    sys.path.insert(0, str(SOURCE / "tests/e2e"))
    import harness
    with harness.Server("--index", "lsh:128") as server:
        pages = {"docs/metrics.md": metrics_page(server.metrics_text()), "docs/flags.md": flags_page(harness.BIN),
                 "docs/api.md": api_page(protos())}
    stale = [path for path, text in pages.items() if not (SOURCE / path).exists() or (SOURCE / path).read_text() != text]
    if sys.argv[1:]:
        for path in stale:
            (SOURCE / path).write_text(pages[path])
    elif stale:
        sys.exit("not current, run scripts/reference_pages.py --write: " + ", ".join(stale))


if __name__ == "__main__":
    main()

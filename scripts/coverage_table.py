#!/usr/bin/env python3
"""Prints line coverage by group and by file, from the .gcda files below a build folder (scripts/coverage.sh).

A line counts as reached if any of its instantiations ran. A line within a macro's expansion counts as the line
that names the macro. Files of a group that no test loads count with all their lines, because their .gcno says them.
"""

import collections
import fnmatch
import json
import pathlib
import subprocess
import sys

GROUPS = {
    # Text and bytes from outside: requests, answers of the model, model files, templates, configuration.
    "parsers": [
        "server/parse/*.cc", "server/ordered_json.cc", "server/http2_meter.cc", "server/trace_context.cc",
        "server/api_keys.cc", "server/config.cc", "server/utf8.cc", "server/wire.cc", "server/http/json_fields.cc",
        "server/http/*_request.cc", "server/http/anthropic.cc", "server/http/responses.cc", "engine/grammar/grammar_check.cc",
        "engine/base/json_*.cc", "engine/model/gguf*.cc", "engine/model/safetensors*.cc", "engine/model/model_config.cc",
        "engine/retrieval/artifact*.cc", "engine/text/tokenizer_json.cc", "engine/text/tokenizer_regex_syntax.cc",
        "engine/text/bpe_load.cc", "engine/text/jinja/*.cc", "engine/text/chat_template.cc",
    ],
    "validator": ["server/validate.cc"],
    "store": ["storage/*.cc"],
    "scheduler": ["engine/schedule/*.cc"],
}


def reached_lines(build):
    """Maps each source file, relative to the project, to {line: whether it ran}."""
    root = pathlib.Path(__file__).resolve().parent.parent
    build = pathlib.Path(build).resolve()  # the compiler's working directory, to which names are relative
    notes = sorted(build.rglob("*.gcno"))
    if not notes:
        sys.exit(f"coverage_table.py: no .gcno files below {build}")
    lines = collections.defaultdict(dict)
    for first in range(0, len(notes), 20):
        batch = [str(note) for note in notes[first : first + 20]]
        # -r leaves out the headers of the system, which are most of the output.
        command = ["gcov", "--json-format", "--stdout", "-r", "-s", str(root), *batch]
        output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=build).stdout
        for document in output.splitlines():
            for file in json.loads(document)["files"]:
                path = (build / file["file"]).resolve()
                if not path.is_relative_to(root):
                    continue
                of_file = lines[str(path.relative_to(root))]
                for line in file["lines"]:
                    number = line["line_number"]
                    of_file[number] = of_file.get(number, False) or line["count"] > 0
    return lines


def ranges(numbers):
    """Shortens [3, 4, 5, 9] to "3-5 9"."""
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def main():
    lines = reached_lines(sys.argv[1])
    by_group, files = [], []
    for group, patterns in GROUPS.items():
        names = sorted(name for name in lines if any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
        total = reached = 0
        for name in names:
            missed = sorted(number for number, ran in lines[name].items() if not ran)
            count = len(lines[name])
            total += count
            reached += count - len(missed)
            files.append((group, name, count, count - len(missed), ranges(missed)))
        by_group.append((group, len(names), total, reached))
    print("| group | files | lines | reached | share |\n|---|---|---|---|---|")
    for group, count, total, reached in by_group:
        share = f"{100 * reached / total:.1f} %" if total else "not built"
        print(f"| {group} | {count} | {total} | {reached} | {share} |")
    print("\nBy file, those with lines that were not reached:")
    for group, name, count, reached, missed in files:
        if missed:
            print(f"{group:10} {100 * reached / count:5.1f} % {reached:5} of {count:5}  {name}  missed: {missed}")


if __name__ == "__main__":
    main()

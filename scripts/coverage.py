#!/usr/bin/env python3
"""Which lines of parsers, validator, store and scheduler the tests reach.

    scripts/coverage.py [--release build/release] [--jobs 2] [GROUP ...]      all four groups, if none is named

The sources of a group and the tests that are about them are compiled without optimization into build/coverage, the sources
with GCC's --coverage; all else is taken from the libraries of a release build (scripts/build.sh release server_test), so that
kernels stay fast. Each group is one test program; parsers have the short runs of the fuzz targets besides, with a seed of their
own. Prints line coverage by group, and by file what was missed. Exits with 1 where a test failed: lines that it did not reach
are missing then. Needs what scripts/install-deps.sh installs (gcov comes with GCC).

A line counts as reached if any of its instantiations ran. A line within a macro's expansion counts as the line that names the macro.
"""
import argparse
import collections
import fnmatch
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/coverage"

SOURCES = {
    # Text and bytes from outside: requests, answers of the model, model files, templates, configuration.
    "parsers": [
        "server/parse/*.cc", "server/ordered_json.cc", "server/http2_meter.cc", "server/trace_context.cc",
        "server/api_keys.cc", "server/tenant_limits.cc", "server/prefix_file.cc", "server/config.cc", "server/utf8.cc", "server/wire.cc",
        "server/http/json_fields.cc", "server/http/*_request.cc", "server/http/anthropic.cc", "server/http/responses.cc",
        "engine/grammar/grammar_check.cc", "engine/base/json_*.cc", "engine/model/gguf*.cc", "engine/model/safetensors*.cc",
        "engine/model/model_config.cc", "engine/retrieval/artifact*.cc", "engine/text/tokenizer_json.cc",
        "engine/text/tokenizer_regex_syntax.cc", "engine/text/bpe_load.cc", "engine/text/jinja/*.cc", "engine/text/chat_template.cc",
    ],
    "validator": ["server/validate.cc"],
    "store": ["storage/*.cc"],
    "scheduler": ["engine/schedule/*.cc"],
}
TESTS = {
    "parsers": [
        *(f"tests/unit/server/{name}_test.cc" for name in [
            "answer_formats", "answer_parser", "config", "http2_meter", "http_request", "prefix_file", "tenant_limits", "tools_request",
            "trace_context", "wire"]),
        *(f"tests/unit/engine/{name}_test.cc" for name in [
            "artifact", "chat_template", "gguf", "gguf_config", "gguf_tokenizer", "gguf_weights", "grammar", "jinja", "json_file",
            "model_config", "safetensors", "tokenizer_golden", "tokenizer_load", "tokenizer_regex", "tokenizer"]),
    ],
    "validator": ["tests/unit/server/validate_test.cc"],
    "store": ["tests/unit/storage/*_test.cc", "tests/fault/storage_*_test.cc"],
    "scheduler": [f"tests/unit/engine/{name}_test.cc" for name in [
        "answer", "draft", "draft_length", "engine", "engine_random", "output_queue", "prefix", "prefix_table", "prompt_lookup",
        "request_queue", "sampler", "scheduler", "stop_matcher", "tenant_shares", "verify"]],
}


def files(patterns):
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


class Compilation:
    """A release build's compiler, flags and libraries, for other objects: those of server_test, which has everything."""

    def __init__(self, release):
        self.release = release
        commands = json.loads((release / "compile_commands.json").read_text())
        command = next(entry["command"] for entry in commands if "/server_test.dir/" in entry["command"])
        words, self.flags = shlex.split(command.split(" -o ")[0]), []
        self.compiler = words[0]
        for word in words[1:]:
            if re.match(r"-O|-W|-DNDEBUG|-DWINNOW_SOURCE_DIR", word):
                continue
            # The sources are this checkout's, wherever the libraries were built.
            self.flags.append(f"-I{ROOT}" if word.startswith("-I") and (pathlib.Path(word[2:]) / "CMakePresets.json").exists() else word)
        self.flags += ["-O0", "-DNDEBUG", "-w", f'-DWINNOW_SOURCE_DIR="{ROOT}"']
        link = subprocess.run(["ninja", "-C", release, "-t", "commands", "server_test"], capture_output=True, text=True, check=True)
        words = shlex.split(link.stdout.splitlines()[-1].removeprefix(": &&").partition(" && ")[0])
        self.libraries = words[words.index("server_test") + 1:]
        self.linker = [word for word in words if word.startswith("-fuse-ld=")]

    def write_ninja(self, groups):
        quoted = lambda words: " ".join(shlex.quote(word).replace("$", "$$") for word in words)
        cache = "ccache " if subprocess.run(["sh", "-c", "command -v ccache"], capture_output=True).returncode == 0 else ""
        lines = [
            "rule compile", f"  command = {cache}{self.compiler} {quoted(self.flags)} $more -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d", "  deps = gcc", "rule link",
            # A library's member brings the release's code of its other files along: what is compiled here comes first.
            f"  command = cd {self.release} && {self.compiler} --coverage {quoted(self.linker)} -Wl,--allow-multiple-definition $in -o $out "
            f"{quoted(self.libraries)}"]
        made = set()

        def compiled(source, more="", suffix=".o"):
            out = BUILD / "objects" / f"{source.relative_to(ROOT)}{suffix}"
            if out not in made:
                made.add(out)
                lines.extend([f"build {out}: compile {source}", f"  more = {more}"])
            return str(out)

        instrument = "--coverage -fprofile-update=atomic"
        # One group's tests go through others' sources, too: a request's parser through the validator.
        sources = [compiled(source, instrument) for group in groups for source in files(SOURCES[group])]
        for group in groups:
            # Tests of grammars start the worker, which is made here, too.
            worker = shlex.quote(f'-DWINNOW_GRAMMAR_WORKER="{BUILD}/grammar_worker"')
            tests = [compiled(test, worker if test.name == "grammar_test.cc" else "") for test in files(TESTS[group])]
            lines.append(f"build {BUILD / group}_test: link {' '.join(tests + sources)}")
            if group == "parsers":
                targets = files(["tests/fuzz/*_fuzz.cc"])
                names = [target.name.removesuffix("_fuzz.cc") for target in targets]
                (BUILD / "fuzz_targets.inc").write_text("".join(f"WINNOW_FUZZ_TARGET({name})\n" for name in names))
                objects = [compiled(target, f"-DLLVMFuzzerTestOneInput=Fuzz_{name}") for target, name in zip(targets, names)]
                objects.append(compiled(ROOT / "tests/fuzz/short_run.cc", f"-I{BUILD}"))
                lines.append(f"build {BUILD}/fuzz_test: link {' '.join(objects + sources)}")
                lines.append(f"build {BUILD}/grammar_worker: link {compiled(ROOT / 'tests/unit/grammar_worker.cc')}")
        (BUILD / "build.ninja").write_text("\n".join(lines) + "\n")


def run_tests(groups):
    """Whether all passed. Their output is in build/coverage/*.log."""
    environment = {**os.environ, "GTEST_BRIEF": "1"}
    commands = [(group, [BUILD / f"{group}_test"]) for group in groups]
    if "parsers" in groups:
        commands += [(f"fuzz_{name}", [BUILD / "fuzz_test", name, "2000", "5"])
                     for name in re.findall(r"\((\w+)\)", (BUILD / "fuzz_targets.inc").read_text())]
    passed = True
    for name, command in commands:
        with open(BUILD / f"{name}.log", "w") as log:
            code = subprocess.run(command, stdout=log, stderr=log, cwd=BUILD, env=environment).returncode
        if code != 0:
            passed = False
            failures = re.findall(r"^\[  FAILED  \] (\S+\.\S+) \(", (BUILD / f"{name}.log").read_text(errors="replace"), re.MULTILINE)
            print(f"{name}: exit code {code} {' '.join(failures)}", flush=True)
    return passed


def reached_lines():
    """Maps each source file, relative to the project, to {line: whether it ran}."""
    notes = sorted((BUILD / "objects").rglob("*.gcno"))
    lines = collections.defaultdict(dict)
    for first in range(0, len(notes), 20):
        # -r leaves out the headers of the system, which are most of the output.
        command = ["gcov", "--json-format", "--stdout", "-r", "-s", ROOT, *notes[first:first + 20]]
        output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=BUILD).stdout
        for document in output.splitlines():
            for file in json.loads(document)["files"]:
                path = pathlib.Path(file["file"])
                of_file = lines[str(path.relative_to(ROOT) if path.is_absolute() else path)]
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


def print_tables(groups):
    lines = reached_lines()
    rows, missed_rows = [], []
    for group in groups:
        names = sorted(name for name in lines if any(fnmatch.fnmatch(name, pattern) for pattern in SOURCES[group]))
        missing = {name for name in map(str, (path.relative_to(ROOT) for path in files(SOURCES[group])))} - set(names)
        if missing:
            sys.exit(f"coverage.py: nothing is known of {' '.join(sorted(missing))}")
        total = sum(len(lines[name]) for name in names)
        reached = sum(sum(lines[name].values()) for name in names)
        rows.append(f"| {group} | {len(names)} | {total} | {reached} | {100 * reached / total:.1f} % |")
        for name in names:
            if missed := sorted(number for number, ran in lines[name].items() if not ran):
                count = len(lines[name])
                missed_rows.append(f"{group:10} {100 * (count - len(missed)) / count:5.1f} % {count - len(missed):5} of {count:5}  {name}"
                                   f"  missed: {ranges(missed)}")
    print("| group | files | lines | reached | share |", "|---|---|---|---|---|", *rows, sep="\n")
    print("\nBy file, those with lines that were not reached:", *missed_rows, sep="\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("group", nargs="*", choices=[*SOURCES, []])
    args = parser.parse_args()
    groups = args.group or list(SOURCES)
    BUILD.mkdir(parents=True, exist_ok=True)
    Compilation(args.release.resolve()).write_ninja(groups)
    subprocess.run(["ninja", "-C", BUILD, "-j", args.jobs], check=True, stdout=sys.stderr)
    for counts in BUILD.rglob("*.gcda"):
        counts.unlink()
    passed = run_tests(groups)
    print_tables(groups)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

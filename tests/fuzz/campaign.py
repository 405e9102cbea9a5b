#!/usr/bin/env python3
"""Fuzz targets for a long time on many processors: so many executions, or so much processor time, of each.

    tests/fuzz/campaign.py [--seconds 3600] [--jobs 2] [--executions 10000000] [--cpu-seconds 3600] [--binaries build/fuzz]
                           [--corpus tests/fuzz/corpus] [--before TABLE] --out OUT [NAME ...]

NAME_fuzz.cc was built before (`run.sh NAME build`, or bundle.sh for another machine). Processes run a slice of time each. Every
target gets two minutes first; then the next slice goes to the one that lacks least, so that as many as possible are done when
time is over, and a target may have several processes. Inputs that a slice finds are there for the next. OUT/table.md has a line for each target, written anew after each
slice; OUT/findings what made a target end, with the process's last words. --before: a table of an earlier campaign, whose
executions and seconds count (a run that is cut off goes on). Exits with 1 where there are findings.
"""
import argparse
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIRST_SLICE_S, SLICE_S, LEAST_S = 12, 60, 120
FINDINGS_MAX = 3  # a target that goes on failing has had its say


class Target:
    def __init__(self, name, args, work):
        self.name, self.goal, self.cpu_goal = name, args.executions, args.cpu_seconds
        self.executions, self.cpu, self.findings, self.running = 0, 0.0, 0, 0
        self.inputs = work / name
        self.inputs.mkdir()

    def lacks(self):
        """Processor seconds until it is done, counting what runs now."""
        rate = max(self.executions, 1) / max(self.cpu, 0.01)
        return min((self.goal - self.executions) / rate, self.cpu_goal - self.cpu) - self.running * SLICE_S

    def had(self):
        return self.cpu + self.running * SLICE_S

    def done(self):
        return self.executions >= self.goal or self.cpu >= self.cpu_goal or self.findings >= FINDINGS_MAX


class Slice:
    def __init__(self, target, args, seconds, environment, prefix):
        self.target, self.folder = target, pathlib.Path(tempfile.mkdtemp(dir=target.inputs.parent, prefix="run-"))
        self.log = self.folder / "log"
        command = [*prefix, str(args.binaries / target.name / "fuzz"), f"-max_total_time={int(seconds)}",
                   f"-runs={target.goal - target.executions}", f"-seed={random.randrange(1, 2**31)}", "-max_len=4096",
                   "-rss_limit_mb=2048", "-timeout=10", "-print_final_stats=1", f"-artifact_prefix={self.folder}/",
                   str(target.inputs), str(args.corpus / target.name)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)
        target.running += 1

    def ended(self):
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)
        target = self.target
        target.running -= 1
        target.cpu += usage.ru_utime + usage.ru_stime
        text = self.log.read_text(errors="replace")
        if counts := re.findall(r"stat::number_of_executed_units: (\d+)", text):
            target.executions += int(counts[-1])
        return True

    def keep_findings(self, out):
        files = [path for path in self.folder.iterdir() if path.name.startswith(("crash-", "leak-", "timeout-", "oom-"))]
        if not files and self.process.returncode == 0:
            return
        self.target.findings += 1
        kept = out / "findings" / f"{self.target.name}-{self.target.findings}"
        kept.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, kept)
        (kept / "log").write_text(self.log.read_text(errors="replace")[-20000:])


def surroundings(args, targets, work):
    """Words before each command, and its environment: what the machine allows."""
    # Sanitizers of older compilers do not start where addresses are random in too many bits.
    prefix = ["setarch", "-R"]
    try:
        if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
            prefix = []
    except OSError:
        prefix = []
    # Stacks of allocations take up to a third of the time; a finding's input gives them again without this.
    environment = {"ASAN_OPTIONS": "malloc_context_size=0:quarantine_size_mb=16", **os.environ}
    first = subprocess.run([*prefix, str(args.binaries / targets[0].name / "fuzz"), "-runs=1"], capture_output=True, text=True,
                           env=environment, cwd=work)
    if "LeakSanitizer has encountered a fatal error" in first.stderr:
        environment["ASAN_OPTIONS"] += ":detect_leaks=0"
        print("leaks are not looked for: this machine does not let LeakSanitizer stop threads", flush=True)
    elif first.returncode != 0:
        sys.exit(f"campaign.py: {targets[0].name} does not run here:\n{first.stderr[-2000:]}")
    return prefix, environment


def write_table(targets, out):
    lines = ["| target | executions | CPU seconds | findings | goal |", "|---|---|---|---|---|"]
    for target in targets:
        goal = "reached" if target.done() and not target.findings else ""
        lines.append(f"| `{target.name}` | {target.executions:,} | {target.cpu:.0f} | {target.findings} | {goal} |")
    (out / "table.new").write_text("\n".join(lines) + "\n")
    (out / "table.new").rename(out / "table.md")


def read_table(path, targets):
    by_name = {target.name: target for target in targets}
    for name, executions, cpu in re.findall(r"^\| `(\w+)` \| ([\d,]+) \| (\d+) \|", path.read_text(), re.MULTILINE):
        if name in by_name:
            by_name[name].executions, by_name[name].cpu = int(executions.replace(",", "")), float(cpu)


def next_target(targets):
    """Whoever had least of the time that all get first; then whoever lacks least."""
    open_targets = [target for target in targets if not target.done()
                    and not (target.findings and target.findings + target.running >= FINDINGS_MAX)]
    new = [target for target in open_targets if target.had() < LEAST_S and (target.executions or not target.running)]
    if new:
        return min(new, key=Target.had)
    return min((target for target in open_targets if target.lacks() > 0), key=Target.lacks, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--executions", type=int, default=10_000_000)
    parser.add_argument("--cpu-seconds", type=float, default=3600)
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build/fuzz")
    parser.add_argument("--corpus", type=pathlib.Path, default=ROOT / "tests/fuzz/corpus")
    parser.add_argument("--before", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("name", nargs="*", help="all that are built, if absent")
    args = parser.parse_args()
    args.binaries, args.corpus, args.out = (path.resolve() for path in (args.binaries, args.corpus, args.out))
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.name or sorted(path.parent.name for path in args.binaries.glob("*/fuzz"))
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="winnow-fuzz-") as folder:
        work = pathlib.Path(folder)
        targets = [Target(name, args, work) for name in names]
        if args.before:
            read_table(args.before, targets)
        prefix, environment = surroundings(args, targets, work)
        slices = []
        while True:
            while len(slices) < args.jobs and (left := end - time.monotonic()) > 2:
                if (target := next_target(targets)) is None:
                    break
                seconds = min(left, FIRST_SLICE_S if target.executions == 0 else SLICE_S)
                slices.append(Slice(target, args, seconds, environment, prefix))
            if not slices:
                break
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            for ended in [one for one in slices if one.ended()]:
                slices.remove(ended)
                ended.keep_findings(args.out)
                shutil.rmtree(ended.folder)
                write_table(targets, args.out)
        write_table(targets, args.out)
    print((args.out / "table.md").read_text(), end="")
    sys.exit(1 if any(target.findings for target in targets) else 0)


if __name__ == "__main__":
    main()

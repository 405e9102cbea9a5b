#!/usr/bin/python3
"""tests/fuzz/campaign.py with programs in the place of fuzz targets: executions are summed over slices, findings are kept, and
what an earlier campaign did counts.
"""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
# Takes a little of the processor, as a slice does, and says how much was run. `-runs=1` is the question whether it runs at all.
SOUND = """#!/bin/sh
case "$*" in "-runs=1") exit 0 ;; esac
i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done
echo "stat::number_of_executed_units: 400"
"""
BROKEN = """#!/bin/sh
case "$*" in "-runs=1") exit 0 ;; esac
for word in "$@"; do case $word in -artifact_prefix=*) echo input > "${word#*=}crash-1" ;; esac; done
echo "stat::number_of_executed_units: 7"
exit 77
"""
# Ends as one whose start fails: no statistics, no input.
MUTE = """#!/bin/sh
case "$*" in "-runs=1") exit 0 ;; esac
exit 1
"""


class Campaign(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="winnow-campaign-")
        self.root = pathlib.Path(self.folder.name)
        self.addCleanup(self.folder.cleanup)

    def run_with(self, programs, *flags):
        for name, text in programs.items():
            program = self.root / "bin" / name / "fuzz"
            program.parent.mkdir(parents=True)
            program.write_text(text)
            program.chmod(0o755)
            (self.root / "corpus" / name).mkdir(parents=True)
        result = subprocess.run([sys.executable, SOURCE / "tests/fuzz/campaign.py", "--binaries", self.root / "bin", "--corpus",
                                 self.root / "corpus", "--out", self.root / "out", "--seconds", "60", *flags],
                                capture_output=True, text=True)
        rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()[2:]]
        return result, {row[0].strip("`"): row[1:] for row in rows}

    def test_executions_are_summed_until_there_are_enough(self):
        result, rows = self.run_with({"sound": SOUND}, "--executions", "1000", "--jobs", "2")
        self.assertEqual(result.returncode, 0, result.stderr)
        executions = int(rows["sound"][0].replace(",", ""))
        self.assertIn(executions, (1200, 1600))  # one more slice may have been under way
        self.assertEqual(rows["sound"][2:], ["0", "reached"])

    def test_findings_are_kept_and_the_others_go_on(self):
        result, rows = self.run_with({"broken": BROKEN, "mute": MUTE, "sound": SOUND}, "--executions", "1000", "--jobs", "2")
        self.assertEqual(result.returncode, 1)
        self.assertEqual([rows["broken"][0], rows["broken"][2]], ["21", "3"])
        self.assertEqual([rows["mute"][0], rows["mute"][2]], ["0", "3"])
        self.assertEqual(rows["sound"][2:], ["0", "reached"])
        self.assertEqual((self.root / "out/findings/broken-1/crash-1").read_text(), "input\n")
        self.assertIn("number_of_executed_units: 7", (self.root / "out/findings/broken-1/log").read_text())

    def test_what_was_done_before_counts(self):
        before = self.root / "before.md"
        before.write_text("| target | executions | CPU seconds | findings | goal |\n|---|---|---|---|---|\n"
                          "| `sound` | 1,200 | 10 | 0 | reached |\n| `other` | 700 | 10 | 0 |  |\n")
        result, rows = self.run_with({"sound": SOUND, "other": SOUND}, "--executions", "1000", "--jobs", "1", "--before", before)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(rows["sound"][0], "1,200")
        self.assertEqual(rows["other"][0], "1,100")


if __name__ == "__main__":
    unittest.main(verbosity=2)

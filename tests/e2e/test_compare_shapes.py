#!/usr/bin/python3
"""scripts/compare_shapes.py says of two ways to compute whether they agree, with models that the real program makes and reads."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(os.environ["WINNOW_SOURCE_DIR"]) / "scripts/compare_shapes.py"
WINNOW = os.environ["WINNOW_BIN"]

# winnow, whose `bench exact` finds one answer less that is equal.
LIAR = """#!{python}
import json, pathlib, subprocess, sys
code = subprocess.run(["{winnow}", *sys.argv[1:]]).returncode
if sys.argv[1:3] == ["bench", "exact"]:
    out = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
    said = json.loads(out.read_text())
    said["exact"][-1]["equal"] -= 1
    out.write_text(json.dumps(said))
sys.exit(code)
"""


class CompareShapes(unittest.TestCase):
    def compare(self, *flags, winnow=WINNOW):
        return subprocess.run([sys.executable, SCRIPT, "--winnow", winnow, "--left", "", "--shape", "smollm2-360m", "--window", "128",
                               *flags], capture_output=True, text=True)

    def test_a_way_agrees_with_itself(self):
        result = self.compare("--right", "", "--percent", "0", "--top1", "100")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertRegex(result.stdout, r"\nsmollm2-360m +\+0\.000 +100\.00 +\+0\.000 \w+ +12 of 12\n")

    def test_drafts_may_have_weights_of_their_own(self):
        result = self.compare("--right", "", "--draft-weights", "int4")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertRegex(result.stdout, r" 18 of 18\n")

    def test_what_differs_by_more_than_allowed_is_told(self):
        result = self.compare("--right", "--kv-dtype int8", "--percent", "0.000001", "--top1", "50")
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertRegex(result.stdout, r"12 of 12  <- not so\n")

    def test_an_answer_that_is_not_exact_is_told(self):
        with tempfile.TemporaryDirectory() as name:
            liar = pathlib.Path(name) / "winnow"
            liar.write_text(LIAR.format(python=sys.executable, winnow=WINNOW))
            liar.chmod(0o755)
            result = self.compare("--right", "", winnow=liar)
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertRegex(result.stdout, r"11 of 12  <- not so\n")

    def test_what_cannot_be_compared_is_another_failure(self):
        result = self.compare("--right", "--kv-dtype int3")
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertRegex(result.stdout, r"eval .* exited with 2: .*int3.*  <- not so")


if __name__ == "__main__":
    unittest.main()

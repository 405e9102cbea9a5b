#!/usr/bin/env python3
"""promtool's word on monitoring: each alert fires where it should and nowhere else, and a server's metrics are as Prometheus likes them,
but for vLLM's names with a colon. WINNOW_BIN is the program. Without promtool (Debian's prometheus has it; or PROMTOOL=FILE) it is left
out: exit code 77, which CTest shows as skipped."""
import os
import shutil
import subprocess
import sys
import unittest
import urllib.request

import manifests

sys.path.insert(0, str(manifests.SOURCE / "tests/e2e"))
import harness  # noqa: E402

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
FOLDER = manifests.DEPLOY / "monitoring"


class Alerts(unittest.TestCase):
    def test_rules_and_their_cases(self):
        for command in (["check", "rules", FOLDER / "alerts.yaml"], ["test", "rules", FOLDER / "alerts_test.yaml"]):
            done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Metrics(unittest.TestCase):
    def complaints(self, text):
        done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True)
        self.assertIn(done.returncode, (0, 3), done.stderr)  # 3: there are complaints
        return [line for line in done.stderr.splitlines() if line]

    def test_a_complaint_is_seen(self):
        self.assertTrue(self.complaints("# HELP requests Requests.\n# TYPE requests counter\nrequests 1\n"))
        self.assertTrue(self.complaints("# TYPE requests_total counter\nrequests_total 1\n"))

    def test_of_a_server_it_dislikes_the_colons_alone(self):
        with harness.Server("--index", "lsh:128") as server:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics", timeout=harness.PATIENCE) as page:
                texts = [server.metrics_text(), page.read().decode()]
        for text in texts:
            colons = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE vllm:")}
            self.assertGreater(len(colons), 10)
            self.assertEqual(set(self.complaints(text)), {f"{name} metric names should not contain ':'" for name in colons})


if __name__ == "__main__":
    if not PROMTOOL:
        print("LEFT OUT: promtool is not there; Debian's package prometheus has it")
        sys.exit(77)
    harness.main()

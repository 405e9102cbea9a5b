#!/usr/bin/python3
"""The packages openai and anthropic against a server: tests/differential/openai_differential.py, which compares texts with gRPC's, in
their own environment. scripts/sdks.sh fetches them from PyPI; without that the test is skipped (77), which is no pass.
"""
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, SOURCE, Server, main  # noqa: E402

SKIPPED = 77


def python():
    found = subprocess.run([SOURCE / "scripts/sdks.sh", "--cached"], capture_output=True, text=True)
    return found.stdout.splitlines()[-1] if found.returncode == 0 else None


class Packages(unittest.TestCase):
    def test_each_thing_that_is_tried_is_right(self):
        with Server("--model-name", "needle", "--tool-parser", "hermes") as server:
            tried = subprocess.run([python(), SOURCE / "tests/differential/openai_differential.py", "--http", f"http://127.0.0.1:{server.http_port}",
                                    "--grpc", server.address, "--winnow", BIN, "--model", "needle"], capture_output=True, text=True)
            print(tried.stdout, end="")
            self.assertEqual(tried.returncode, 0, tried.stdout + tried.stderr)
            lines = tried.stdout.splitlines()
            self.assertEqual([line for line in lines if not line.startswith("ok    ")], [])
            for package in ("chat", "completions", "responses", "structured", "tools", "error", "messages"):
                self.assertTrue(any(line.startswith(f"ok    {package}") for line in lines), package)
            self.assertEqual(server.terminate(), 0)


if __name__ == "__main__":
    if python() is None:
        print("skipped: scripts/sdks.sh fetches the packages")
        sys.exit(SKIPPED)
    main()

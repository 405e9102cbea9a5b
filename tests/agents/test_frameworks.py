#!/usr/bin/python3
"""langchain-openai, instructor, pydantic-ai-slim and llm of PyPI against a server: tests/agents/frameworks.py in their own environment.
scripts/clients.sh frameworks fetches them; without that the test is skipped (77), which is no pass.
"""
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import SOURCE, Server, main  # noqa: E402

SKIPPED = 77


def python():
    found = subprocess.run([SOURCE / "scripts/clients.sh", "frameworks", "--cached"], capture_output=True, text=True)
    return found.stdout.splitlines()[-1] if found.returncode == 0 else None


class Frameworks(unittest.TestCase):
    def test_each_thing_that_is_tried_is_right(self):
        with Server("--model-name", "needle", "--tool-parser", "hermes") as server:
            tried = subprocess.run([python(), SOURCE / "tests/agents/frameworks.py", f"http://127.0.0.1:{server.http_port}", "needle"],
                                   capture_output=True, text=True)
            print(tried.stdout, end="")
            self.assertEqual(tried.returncode, 0, tried.stdout + tried.stderr)
            lines = tried.stdout.splitlines()[1:]
            self.assertEqual([line for line in lines if not line.startswith("ok    ")], [])
            for package in ("langchain", "instructor", "pydantic-ai", "llm"):
                self.assertTrue(any(line.startswith(f"ok    {package}") for line in lines), package)
            self.assertEqual(server.terminate(), 0)


if __name__ == "__main__":
    if python() is None:
        print("skipped: scripts/clients.sh frameworks fetches the packages")
        sys.exit(SKIPPED)
    main()

#!/usr/bin/python3
"""scripts/compare_servers.py says of two servers' answers what they are, with a program in winnow's place that gives them."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(os.environ["WINNOW_SOURCE_DIR"]) / "scripts/compare_servers.py"

# Answers with what was prepared for --server, and keeps the chats that it was given.
PROGRAM = """#!{python}
import json, pathlib, sys
option = lambda name: sys.argv[sys.argv.index(name) + 1]
here = pathlib.Path(__file__).parent
with open(here / "chats", "a") as chats:
    print(json.load(open(option("--chat-file")))[0]["content"], file=chats)
with open(here / "policies", "a") as policies:
    print(option("--policy"), file=policies)
answer = json.load(open(here / option("--server")))
if answer is None:
    sys.exit("no such server")
print(json.dumps(answer))
"""


def token(id, logprob, others=()):
    return {"id": id, "logprob": logprob, "top": [{"id": id, "logprob": logprob}] + [{"id": i, "logprob": l} for i, l in others]}


def answer(*tokens):
    return {"logprobs": list(tokens), "token_ids": [t["id"] for t in tokens], "usage": {"prompt_tokens": 7}}


class CompareServers(unittest.TestCase):
    def compare(self, left, right, *flags, document=b"document"):
        with tempfile.TemporaryDirectory() as name:
            directory = pathlib.Path(name)
            program = directory / "winnow"
            program.write_text(PROGRAM.format(python=sys.executable))
            program.chmod(0o755)
            for server, given in (("left", left), ("right", right)):
                (directory / server).write_text(json.dumps(given))
            (directory / "document").write_bytes(document)
            result = subprocess.run([sys.executable, SCRIPT, "--winnow", program, "--server", "left", "--server", "right", "--document",
                                     directory / "document", "--question", "Why?", "--policy", "dense", *flags],
                                    capture_output=True, text=True)
            self.chats = (directory / "chats").read_text()
            self.policies = (directory / "policies").read_text().split()
            return result

    def test_the_same_answers(self):
        given = answer(token(1, -0.1), token(2, -0.2))
        result = self.compare(given, given)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("1 answers are the same, 0 part", result.stdout)
        self.assertEqual(self.chats, "document\nWhy?\n" * 2)

    def test_two_tokens_that_are_nearly_equal_in_both(self):
        result = self.compare(answer(token(1, -0.7, [(2, -0.71)])), answer(token(2, -0.69, [(1, -0.72)])))
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertIn("at token 0, gaps 0.0100 and 0.0300", result.stdout)
        self.assertIn("widest gap of those is 0.0300", result.stdout)
        result = self.compare(answer(token(1, -0.7, [(2, -0.71)])), answer(token(2, -0.69, [(1, -0.72)])), "--gap", "0.02")
        self.assertEqual(result.returncode, 2, result.stdout)

    def test_a_token_that_one_of_them_is_sure_of(self):
        left = answer(token(1, -0.7, [(2, -0.701)]))
        for right in (answer(token(2, -0.01, [(1, -5.0)])), answer(token(2, -0.01, [(3, -5.0)]))):
            self.assertEqual(self.compare(left, right).returncode, 2)

    def test_an_answer_that_ends_before_the_other_or_says_nothing(self):
        whole = answer(token(1, -0.1), token(2, -0.2))
        for left, right in ((whole, answer(token(1, -0.1))), (answer(), whole), (answer(), answer())):
            self.assertEqual(self.compare(left, right).returncode, 2)

    def test_a_server_that_does_not_answer(self):
        result = self.compare(answer(token(1, -0.1)), None)
        self.assertEqual(result.returncode, 2)
        self.assertIn("no such server", result.stderr)

    def test_the_second_server_is_asked_under_the_policy_that_is_to_be_compared_with(self):
        given = answer(token(1, -0.1))
        self.compare(given, given)
        self.assertEqual(self.policies, ["dense", "dense"])
        self.compare(given, given, "--against", "window")
        self.assertEqual(self.policies, ["dense", "window"])

    def test_digits_of_log_probabilities_count_where_they_are_asked_for(self):
        left, right = answer(token(1, -0.1)), answer(token(1, -0.1000001))
        self.assertEqual(self.compare(left, right).returncode, 0)
        result = self.compare(left, right, "--digits")
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn("log-probabilities differ", result.stdout)
        self.assertIn("0 answers are the same, 1 part", result.stdout)
        self.assertEqual(self.compare(left, left, "--digits").returncode, 0)

    def test_lengths_are_bytes(self):
        given = answer(token(1, -0.1))
        result = self.compare(given, given, "--bytes", "4", "--bytes", "3", document="aé€b".encode())
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.chats, "aé\nWhy?\n" * 4)


if __name__ == "__main__":
    unittest.main()

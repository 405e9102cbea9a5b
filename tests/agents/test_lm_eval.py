#!/usr/bin/python3
"""PyPI's lm-eval against a server: its log-likelihoods, with several prompts in a request and one, beside those that the server gives
token by token. scripts/clients.sh lm-eval fetches it; without that the test is skipped (77), which is no pass.
"""
import http.client
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import PATIENCE, SOURCE, Server, main  # noqa: E402

SKIPPED = 77
FOLDER = SOURCE / "tests/agents/lm_eval"


def python():
    found = subprocess.run([SOURCE / "scripts/clients.sh", "lm-eval", "--cached"], capture_output=True, text=True)
    return found.stdout.splitlines()[-1] if found.returncode == 0 else None


class LmEval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--model-name", "needle")
        cls.addClassCleanup(cls.server.close)

    def post(self, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=PATIENCE)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        self.assertEqual(response.status, 200, answer)
        return answer

    def tokens(self, text):
        return self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def likelihood(self, ids, begin):
        """The log-likelihood of ids[begin:] after those before, and whether each is the likeliest, of one request for each token: it is made to
        be drawn, and its log-probability is the model's own."""
        total, greedy = 0.0, True
        for i in range(begin, len(ids)):
            drawn = self.post("/v1/completions", {"prompt": ids[:i], "max_tokens": 1, "logprobs": 1, "logit_bias": {str(ids[i]): 100}, "temperature": 0})
            scores = drawn["choices"][0]["logprobs"]
            total += scores["token_logprobs"][0]
            greedy = greedy and scores["token_logprobs"][0] == max(scores["top_logprobs"][0].values())
        return total, greedy

    def evaluate(self, batch_size):
        with tempfile.TemporaryDirectory(prefix="winnow-lm-eval-") as home:
            done = subprocess.run(
                [python(), FOLDER / "run.py", f"http://127.0.0.1:{self.server.http_port}/v1/completions", "needle", "0", str(batch_size)],
                cwd=FOLDER, capture_output=True, text=True,
                env={**os.environ, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return json.loads(done.stdout.splitlines()[-1])

    def test_its_loglikelihoods_are_the_models(self):
        found = self.evaluate(batch_size=5)
        print("lm-eval", found["version"], json.dumps(found["results"]))
        right = 0
        for sample in found["samples"]["winnow_facts"]:
            doc = sample["doc"]
            context = self.tokens(doc["question"])
            likelihoods = []
            for choice, (got,) in zip(doc["choices"], sample["resps"], strict=True):
                whole = self.tokens(f"{doc['question']} {choice}")
                want, greedy = self.likelihood(whole, len(context))
                self.assertAlmostEqual(float(got[0]), want, places=4, msg=(doc["question"], choice))
                self.assertEqual(str(got[1]), str(greedy), (doc["question"], choice))
                likelihoods.append(want)
            right += likelihoods.index(max(likelihoods)) == doc["answer"]
        facts = found["results"]["winnow_facts"]
        self.assertAlmostEqual(facts["acc,none"], right / len(found["samples"]["winnow_facts"]))
        total, words = 0.0, 0
        for sample in found["samples"]["winnow_story"]:
            text = sample["doc"]["text"]
            want, _ = self.likelihood([0, *self.tokens(text)], 1)
            total += want
            words += len(text.split())
        self.assertAlmostEqual(found["results"]["winnow_story"]["word_perplexity,none"] / math.exp(-total / words), 1, places=4)
        for sample in found["samples"]["winnow_words"]:
            alone = self.post("/v1/completions", {"prompt": sample["doc"]["question"], "max_tokens": 8, "temperature": 0, "stop": ["\n", "<|endoftext|>"],
                                                  "add_special_tokens": False})
            self.assertEqual(sample["resps"][0][0], alone["choices"][0]["text"], sample["doc"])
        self.assertEqual(self.server.terminate(), 0)


if __name__ == "__main__":
    if python() is None:
        print("skipped: scripts/clients.sh lm-eval fetches it")
        sys.exit(SKIPPED)
    main()

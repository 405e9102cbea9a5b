#!/usr/bin/python3
"""clients/python against the program: both clients, errors, retries, examples, and that the messages are proto/'s."""
import asyncio
import hashlib
import os
import subprocess
import sys
import threading
import unittest

import grpc

from harness import PATIENCE, SOURCE, Server, eventually, main, temporary_directory

CLIENT = SOURCE / "clients/python"
sys.path.insert(0, str(CLIENT))
from winnow_client import AsyncClient, Client, RetryPolicy, WinnowError  # noqa: E402
from winnow_client import winnow_inference_pb2 as pb  # noqa: E402

ONCE = RetryPolicy(attempts=1)


class Clients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        self.client = Client(self.server.address, timeout=PATIENCE)
        self.addCleanup(self.client.close)

    def test_streams_join_to_the_answer_and_both_clients_say_the_same(self):
        options = dict(max_tokens=12, ignore_eos=True, top_logprobs=2)
        answer = self.client.generate("Once upon a time", **options)
        pieces = list(self.client.stream("Once upon a time", **options))
        self.assertEqual("".join(p.text for p in pieces), answer.text)
        self.assertEqual(len(answer.choices[0].tokens), 12)
        self.assertEqual(len(answer.choices[0].tokens[0].top), 2)
        self.assertEqual((answer.choices[0].finish, answer.usage.generated_tokens), ("MAX_TOKENS", 12))

        async def ask():
            async with AsyncClient(self.server.address, timeout=PATIENCE) as client:
                answer = await client.generate("Once upon a time", **options)
                ids = await client.tokenize("Once upon")
                return answer, ids, await client.detokenize(ids), (await client.model()).name
        other, ids, text, name = asyncio.run(ask())
        self.assertEqual([(c.text, c.tokens, c.finish) for c in other.choices], [(c.text, c.tokens, c.finish) for c in answer.choices])
        self.assertEqual((ids, text), (self.client.tokenize("Once upon"), self.client.detokenize(ids)))
        self.assertEqual((name, text), (self.client.model().name, "Once upon"))

    def test_prompts_of_every_kind_and_choices(self):
        ids = self.client.tokenize("Once upon a time")
        self.assertEqual(self.client.generate(ids, max_tokens=4).text, self.client.generate("Once upon a time", max_tokens=4).text)
        both = self.client.generate(messages=[("user", "a"), {"role": "assistant", "content": "b"}, ("user", "c")], max_tokens=3, n=2,
                                    ignore_eos=True)
        self.assertEqual([len(choice.tokens) for choice in both.choices], [3, 3])
        for wrong in (dict(), dict(prompt="a", messages=[("user", "b")]), dict(prompt="a", max_tokns=1)):
            with self.assertRaises(TypeError):
                self.client.generate(**wrong)

    def test_a_prompt_is_scored(self):
        ids = self.client.tokenize("Once upon a time")
        answer = self.client.generate(ids, max_tokens=2, ignore_eos=True, top_logprobs=1, prompt_logprobs=3, n=2)
        self.assertEqual([token.id for token in answer.prompt_tokens], ids)
        first, *others = answer.prompt_tokens
        self.assertEqual((first.logprob, first.rank, first.top), (None, 0, []))
        for i, token in enumerate(others, 1):
            # The token that the prompt up to there goes on with.
            drawn = self.client.generate(ids[:i], max_tokens=1, ignore_eos=True, top_logprobs=3).choices[0].tokens[0]
            self.assertEqual(token.top, drawn.top)
            self.assertEqual(token.rank <= 3, token.id in [top[0] for top in token.top])
            if token.rank <= 3:
                self.assertEqual(token.top[token.rank - 1][:2], (token.id, token.logprob))
        self.assertEqual([len(choice.tokens) for choice in answer.choices], [2, 2])
        self.assertEqual(self.client.generate(ids, max_tokens=1).prompt_tokens, [])
        with self.assertRaises(WinnowError) as caught:
            self.client.generate(ids, prompt_logprobs=21)
        self.assertEqual(caught.exception.violations[0][0], "prompt_logprobs")

    def test_errors_say_what_the_server_says(self):
        with self.assertRaises(WinnowError) as caught:
            self.client.generate("x", temperature=100.00001)
        error = caught.exception
        self.assertEqual((error.code, error.reason), (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"))
        self.assertEqual(error.violations, [("sampling.temperature", "must be in [0, 100], is 100.00001")])

    def test_leaving_a_stream_cancels_it(self):
        for _ in self.client.stream("x", max_tokens=20000, ignore_eos=True):
            break
        eventually(lambda: self.server.metric("winnow_requests_running") == 0, "the end of it")

    def test_the_messages_are_those_of_proto(self):
        with temporary_directory() as directory:
            subprocess.run([CLIENT / "generate.sh", directory], check=True)
            for path in directory.iterdir():
                with self.subTest(file=path.name):
                    self.assertEqual(path.read_text(), (CLIENT / "winnow_client" / path.name).read_text(), "run clients/python/generate.sh")
        self.assertEqual(pb.DESCRIPTOR.package, "winnow.v1")

    def test_examples(self):
        environment = {**os.environ, "PYTHONPATH": str(CLIENT)}
        run = lambda name, *arguments: subprocess.run(  # noqa: E731
            [sys.executable, CLIENT / "examples" / name, self.server.address, *arguments], env=environment, capture_output=True,
            text=True, timeout=PATIENCE)
        said = run("stream.py", "Once upon a time")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("tokens]", said.stdout)
        with temporary_directory() as directory:
            (directory / "document").write_text("The sky is blue. " * 20)
            said = run("many.py", directory / "document", "What is blue?", "What is not?")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertEqual(said.stdout.count(" -> '"), 2)


class Retries(unittest.TestCase):
    def test_a_full_queue_is_waited_for(self):
        with Server("--max-running", 1, "--queue-requests", 1, "--prefix-cache", "off") as server:
            def hold():
                try:
                    for _ in held.stream("x", max_tokens=30000, ignore_eos=True):
                        if done.is_set():
                            return
                except WinnowError:
                    pass
            done, held = threading.Event(), Client(server.address, retry=ONCE)
            threads = [threading.Thread(target=hold, daemon=True) for _ in range(2)]
            threads[0].start()
            eventually(lambda: server.metric("winnow_requests_running") == 1, "one runs")
            threads[1].start()
            eventually(lambda: server.metric("winnow_requests_waiting") == 1, "one waits")
            with self.assertRaises(WinnowError) as caught, Client(server.address, retry=ONCE) as client:
                client.generate("x", max_tokens=1)
            self.assertEqual(caught.exception.reason, "QUEUE_FULL")
            self.assertGreater(caught.exception.retry_after, 0)
            threading.Timer(0.3, done.set).start()
            with Client(server.address, retry=RetryPolicy(attempts=50, longest_pause=0.2), timeout=PATIENCE) as client:
                self.assertEqual(len(client.generate("x", max_tokens=2, ignore_eos=True).choices[0].tokens), 2)
            # An answer that takes seconds: one of a token can be there before the clock of a millisecond rings.
            with Client(server.address, timeout=0.2, retry=RetryPolicy(attempts=50)) as client, self.assertRaises(WinnowError) as caught:
                client.generate("x", max_tokens=30000, ignore_eos=True)
            self.assertEqual(caught.exception.code, grpc.StatusCode.DEADLINE_EXCEEDED)

    def test_a_server_that_is_not_there_yet(self):
        attempts = []

        class Counting(RetryPolicy):
            def pause(self, error, attempt):
                attempts.append(error.code)
                return super().pause(error, attempt)

        with Client("127.0.0.1:1", retry=Counting(attempts=3, first_pause=0.01)) as client, self.assertRaises(WinnowError):
            client.model()
        self.assertEqual(attempts, [grpc.StatusCode.UNAVAILABLE] * 3)

    def test_keys(self):
        with temporary_directory() as directory:
            (directory / "keys").write_text(f"alice {hashlib.sha256(b'a-key').hexdigest()}\n")
            with Server("--api-keys", directory / "keys") as server:
                with Client(server.address, api_key="a-key", tenant="alice") as client:
                    self.assertTrue(client.generate("x", max_tokens=1).choices)
                with Client(server.address) as client, self.assertRaises(WinnowError) as caught:
                    client.model()
                self.assertEqual(caught.exception.reason, "INVALID_API_KEY")


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""The program as its users see it: serve, generate, healthcheck, signals, logs, metrics."""
import json
import os
import re
import signal
import subprocess
import threading
import time
import unittest
import urllib.request

import grpc

from harness import (BIN, MODEL, PATIENCE, Api, Server, counting_request, details_of, eventually, health, inference, main, run,
                     temporary_directory, token_ids)


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def generate(self, *args, **kwargs):
        return run("generate", "--server", self.server.address, *args, **kwargs)

    def test_healthcheck_says_serving(self):
        for service in ("", "winnow.v1.InferenceService"):
            result = run("healthcheck", "--server", self.server.address, "--service", service)
            self.assertEqual((result.returncode, result.stdout), (0, "SERVING\n"), result.stderr)
        result = run("healthcheck", "--server", self.server.address, "--service", "no.such.Service")
        self.assertEqual(result.returncode, 1)

    def test_json_has_text_ids_and_the_whole_usage(self):
        result = self.generate("--prompt", "Once upon a time", "--max-tokens", 16, "--ignore-eos", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        reply = json.loads(result.stdout)
        self.assertEqual(reply["finish_reason"], "max_tokens")
        self.assertEqual(len(reply["token_ids"]), 16)
        usage = reply["usage"]
        self.assertEqual(usage["generated_tokens"], 16)
        self.assertGreater(usage["prompt_tokens"], 0)
        self.assertEqual(usage["cached_tokens"], 0)
        self.assertEqual(usage["kv_read_bytes"], {"fast": usage["kv_dense_bytes"], "host": 0, "disk": 0})
        self.assertGreater(usage["attended_rows"], 0)
        self.assertEqual(usage["attended_rows"], usage["dense_rows"])
        self.assertEqual(usage["retrieval"], {"candidate_rows": 0, "selected_rows": 0, "kept": None, "probes": 0, "coverage": None,
                                              "iou": None, "tail_estimates": 0, "tail_mass": None, "widened_tokens": 0,
                                              "floor_dense_tokens": 0})
        self.assertGreater(usage["time_to_first_token_seconds"], 0)
        self.assertGreaterEqual(usage["total_seconds"], usage["time_to_first_token_seconds"])
        self.assertGreaterEqual(usage["queue_seconds"], 0)

    def test_text_streams_to_standard_output(self):
        plain = self.generate("--prompt", "Once upon a time", "--max-tokens", 16, "--ignore-eos")
        reply = self.generate("--prompt", "Once upon a time", "--max-tokens", 16, "--ignore-eos", "--json")
        self.assertEqual(plain.returncode, 0, plain.stderr)
        reply = json.loads(reply.stdout)
        self.assertEqual(plain.stdout, reply["text"] + "\n")
        dense = reply["usage"]["kv_dense_bytes"]
        self.assertEqual(plain.stderr, f"KV read: 100.0 % ({dense} of {dense} bytes)\n")

    def test_prompt_from_file_standard_input_and_tokens_are_the_same(self):
        with temporary_directory() as directory:
            path = directory / "prompt.txt"
            path.write_text("A story")
            one = self.generate("--prompt", "A story", "--max-tokens", 8, "--json")
            two = self.generate("--prompt-file", path, "--max-tokens", 8, "--json")
            three = self.generate("--prompt-file", "-", "--max-tokens", 8, "--json", input="A story")
        api = Api(self.server.address)
        ids = api.tokenize(inference.TokenizeRequest(text=inference.TextPrompt(text="A story"))).ids
        four = self.generate("--tokens", ",".join(map(str, ids)), "--max-tokens", 8, "--json")
        texts = {json.loads(r.stdout)["text"] for r in (one, two, three, four)}
        self.assertEqual(len(texts), 1)

    def test_a_prompt_s_scores_are_those_that_its_tokens_had_when_they_were_drawn(self):
        api = Api(self.server.address)
        ids = list(api.tokenize(inference.TokenizeRequest(text=inference.TextPrompt(text="A story"))).ids)
        ask = ["--max-tokens", 6, "--ignore-eos", "--json"]
        of = lambda tokens, *flags: json.loads(self.generate("--tokens", ",".join(map(str, tokens)), *ask, *flags).stdout)
        drawn = of(ids, "--top-logprobs", 2)
        self.assertNotIn("prompt_logprobs", drawn)
        scored = of(ids + drawn["token_ids"], "--prompt-logprobs", 2)
        self.assertNotIn("logprobs", scored)
        scores = scored["prompt_logprobs"]
        self.assertEqual([score["id"] for score in scores], ids + drawn["token_ids"])
        self.assertEqual(scores[0], {"id": ids[0]})
        self.assertEqual(scores[len(ids):], [{"id": token["id"], "logprob": token["logprob"], "rank": 1, "top": token["top"]}
                                             for token in drawn["logprobs"]])
        both = of(ids, "--prompt-logprobs", 0, "--n", 2)["choices"]
        self.assertEqual([score.get("top") for score in both[0]["prompt_logprobs"]], [None] + [[]] * (len(ids) - 1))
        self.assertNotIn("prompt_logprobs", both[1])

    def test_chat_file_takes_a_list_and_an_object(self):
        messages = [{"role": "user", "content": "What is the code?"}]
        with temporary_directory() as directory:
            path = directory / "chat.json"
            answers = []
            for content in (messages, {"messages": messages}):
                path.write_text(json.dumps(content))
                result = self.generate("--chat-file", path, "--max-tokens", 8, "--json")
                self.assertEqual(result.returncode, 0, result.stderr)
                answers.append(json.loads(result.stdout)["token_ids"])
            self.assertEqual(answers[0], answers[1])
            for bad in ("nonsense", '{"messages": 3}', '[{"role": "user"}]', '[{"role": "user", "content": 3}]',
                        '[{"role": "user", "content": "x", "tool": 1}]'):
                path.write_text(bad)
                self.assertEqual(self.generate("--chat-file", path).returncode, 2, bad)

    def test_a_seed_repeats_and_sampling_differs(self):
        sample = ["--prompt", "Once", "--max-tokens", 24, "--ignore-eos", "--temperature", 1.5, "--json"]
        ids = lambda *extra: json.loads(self.generate(*sample, *extra).stdout)["token_ids"]
        self.assertEqual(ids("--seed", 5), ids("--seed", 5))
        self.assertNotEqual(ids("--seed", 5), ids("--seed", 6))
        self.assertNotEqual(ids(), ids())

    def test_stop_strings_are_taken_as_they_are(self):
        """In brackets, too: "[/INST]" is a stop string that people use, and to the flags' parser a list."""
        ask = ["--prompt", "Once upon a time", "--max-tokens", 16, "--ignore-eos", "--json"]
        text = json.loads(self.generate(*ask).stdout)["text"]
        part = next(word for word in text.split() if word.isalpha())
        stopped = json.loads(self.generate(*ask, "--stop", "no such text", "--stop", part).stdout)
        self.assertEqual((stopped["finish_reason"], stopped.get("stop_string")), ("stop_string", part))
        self.assertEqual(stopped["text"], text[:text.index(part)])
        self.assertEqual(json.loads(self.generate(*ask, "--stop", f"[{part}]").stdout)["text"], text)

    def test_errors_go_to_standard_error_with_details(self):
        result = self.generate("--prompt", "x", "--top-p", 7, "--max-tokens", 0)
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stdout.strip(), "")
        self.assertIn("INVALID_ARGUMENT", result.stderr)
        self.assertIn("sampling.top_p: must be in (0, 1]", result.stderr)
        self.assertIn("stopping.max_tokens: must be in", result.stderr)
        self.assertIn("reason: INVALID_FIELD", result.stderr)

    def test_each_failure_has_its_exit_code(self):
        self.assertEqual(self.generate().returncode, 2)
        self.assertEqual(self.generate("--prompt", "x", "--prompt-file", "y").returncode, 2)
        self.assertEqual(self.generate("--prompt-file", "/no/such/file").returncode, 2)
        self.assertEqual(self.generate("--prompt-file", "/tmp").returncode, 2)
        self.assertEqual(self.generate("--prompt", "x", "--timeout", "soon").returncode, 2)
        for flags in (["--prompt", ""], ["--prompt", "x", "--seed", ""], ["--prompt", "x", "--max-tokens", ""],
                      ["--prompt", "x", "--top-logprobs", 2], ["--prompt", "x", "--prompt-logprobs", 2]):
            result = self.generate(*flags)
            self.assertEqual(result.returncode, 2, (flags, result.stderr))
            self.assertIn(flags[-2] + ":", result.stderr)
        many = self.generate("--prompt", "x", "--n", 2**31 - 1)
        self.assertEqual(many.returncode, 1, many.stderr)
        self.assertIn("n: must be in [1, 16]", many.stderr)
        self.assertEqual(run("generate", "--server", "127.0.0.1:1", "--prompt", "x").returncode, 3)
        self.assertEqual(run("healthcheck", "--server", "127.0.0.1:1").returncode, 3)
        slow = self.generate("--prompt", "x", "--max-tokens", 20000, "--ignore-eos", "--timeout", "300ms")
        self.assertEqual(slow.returncode, 4, slow.stderr)

    def test_long_invalid_and_unsupported_requests_name_the_field(self):
        api = Api(self.server.address)
        cases = [
            (counting_request("word " * 100000, 1), "text.text"),
            (counting_request("word " * 60000, 1), "text.text"),
            (counting_request("x", 40000), "stopping.max_tokens"),
            (counting_request("x", 1, n=99), "n"),
            (counting_request("x", 1, policy="quest:pages=64"), "policy"),
            (counting_request("x", 1, sampling=inference.SamplingOptions(temperature=float("nan"))),
             "sampling.temperature"),
            (inference.GenerateRequest(tokens=inference.TokenPrompt(ids=[1, 4096])), "tokens.ids[1]"),
        ]
        for request, field in cases:
            with self.assertRaises(grpc.RpcError) as caught:
                list(api.generate(request, timeout=PATIENCE))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT, field)
            details = details_of(caught.exception)
            self.assertEqual(details["BadRequest"].field_violations[0].field, field)
            self.assertEqual(details["ErrorInfo"].domain, "winnow")

    def test_one_bad_request_does_not_disturb_another(self):
        api = Api(self.server.address)
        alone = token_ids(api.generate(counting_request("Once upon a time", 60), timeout=PATIENCE))
        stream = api.generate(counting_request("Once upon a time", 60), timeout=PATIENCE)
        got = token_ids([next(stream)])
        for _ in range(20):
            with self.assertRaises(grpc.RpcError):
                list(api.generate(counting_request("", 1)))
        self.assertEqual(got + token_ids(stream), alone)

    def test_client_that_vanishes_frees_its_blocks(self):
        client = subprocess.Popen([BIN, "generate", "--server", self.server.address, "--prompt", "A story",
                                   "--max-tokens", "20000", "--ignore-eos"], stdout=subprocess.PIPE)
        self.addCleanup(client.stdout.close)
        client.stdout.read(1)
        eventually(lambda: self.server.metric("winnow_kv_blocks_used") > 0, "blocks in use")
        client.kill()
        client.wait()
        eventually(lambda: self.server.metric("winnow_kv_blocks_used") == 0, "blocks free")

    def test_reader_that_closes_the_pipe_stops_the_work(self):
        shell = f"'{BIN}' generate --server {self.server.address} --prompt 'A story' --max-tokens 20000 --ignore-eos"
        subprocess.run(["bash", "-c", shell + " | head -c 1"], check=True, capture_output=True, timeout=PATIENCE)
        eventually(lambda: self.server.metric("winnow_kv_blocks_used") == 0, "blocks free")

    def test_scores_of_a_prompt_come_in_messages_of_bounded_size(self):
        ids = [7 * i % 500 for i in range(1200)]
        request = inference.GenerateRequest(tokens=inference.TokenPrompt(ids=ids), stopping=inference.StoppingOptions(max_tokens=2, ignore_eos=True), prompt_logprobs=20)
        in_small_steps = [token for r in Api(self.server.address).generate(request, timeout=PATIENCE) for token in r.prompt_tokens]
        with Server("--step-tokens", 2048) as server:
            answer = list(Api(server.address).generate(request, timeout=PATIENCE))
        # 8,192 log-probabilities, and the rest of a token's; the first token has none.
        self.assertEqual([len(r.prompt_tokens) for r in answer if r.prompt_tokens], [392, 391, 391, 26])
        tokens = [token for r in answer for token in r.prompt_tokens]
        self.assertEqual([token.id for token in tokens], ids)
        self.assertEqual([token.SerializeToString() for token in tokens], [token.SerializeToString() for token in in_small_steps])

    def test_get_model_describes_what_is_served(self):
        model = Api(self.server.address).get_model(inference.GetModelRequest())
        self.assertEqual((model.name, model.vocab_size, model.max_context), ("needle-5m", 4096, 32768))
        self.assertEqual(list(model.policies)[:5], ["dense", "window", "oracle", "quest", "lsh"])
        self.assertEqual(model.default_policy, "dense")
        self.assertEqual(model.default_sampling.temperature, 0)
        self.assertTrue(model.chat_template)

    def test_only_three_ports_listen_and_only_on_loopback(self):
        inodes = set()
        for fd in os.listdir(f"/proc/{self.server.process.pid}/fd"):
            try:
                match = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{self.server.process.pid}/fd/{fd}"))
            except FileNotFoundError:  # closed since it was listed: another test's connection
                continue
            if match:
                inodes.add(match.group(1))
        listening = set()
        for table in ("tcp", "tcp6"):
            with open(f"/proc/net/{table}") as lines:
                for line in list(lines)[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and fields[9] in inodes:
                        host, port = fields[1].split(":")
                        listening.add((host[-8:], int(port, 16)))
        self.assertEqual({port for _, port in listening},
                         {self.server.port, self.server.metrics_port, self.server.http_port})
        self.assertEqual({host for host, _ in listening}, {"0100007F"})  # 127.0.0.1


class Observed(unittest.TestCase):
    def test_metrics_count_what_happened(self):
        with Server() as server:
            before = server.metrics_text()
            for series in ('winnow_requests_total{outcome="ok"}', "winnow_generated_tokens_total",
                           'winnow_kv_read_bytes_total{tier="disk"}', "winnow_preemptions_total"):
                self.assertIn(f"\n{series} 0", before)
            api = Api(server.address)
            list(api.generate(counting_request("Once upon a time", 20), timeout=PATIENCE))
            with self.assertRaises(grpc.RpcError):
                list(api.generate(counting_request("", 1)))
            self.assertEqual(server.metric('winnow_requests_total{outcome="ok"}'), 1)
            self.assertEqual(server.metric('winnow_requests_total{outcome="invalid"}'), 1)
            self.assertEqual(server.metric("winnow_generated_tokens_total"), 20)
            self.assertEqual(server.metric("winnow_time_to_first_token_seconds_count"), 1)
            self.assertEqual(server.metric("winnow_inter_token_seconds_count"), 19)
            self.assertEqual(server.metric('winnow_sequences_finished_total{reason="max_tokens"}'), 1)
            self.assertEqual(server.metric('winnow_kv_read_bytes_total{tier="fast"}'),
                             server.metric("winnow_kv_dense_bytes_total"))
            self.assertGreater(server.metric("winnow_kv_dense_bytes_total"), 0)
            # Told by a thread of its own, and of a heartbeat that an idle engine renews by itself.
            eventually(lambda: server.metric("winnow_serving") == 1, "serving")
            eventually(lambda: server.metric("winnow_engine_heartbeat_age_seconds") < 10, "a heartbeat")
            self.assertEqual(server.terminate(), 0)

    def test_log_is_json_lines_without_prompts(self):
        secret = "xyzzy plugh"
        with Server("--log-level", "debug") as server:
            api = Api(server.address)
            answer = "".join(r.text for r in api.generate(counting_request(secret, 30), timeout=PATIENCE))
            for bad in (counting_request(secret, 1, policy=secret), counting_request(secret, 0)):
                with self.assertRaises(grpc.RpcError):
                    list(api.generate(bad))
            self.assertEqual(server.terminate(), 0)
            events = server.events()  # fails on a line that is not JSON
            log = server.log()
        self.assertNotIn("xyzzy", log)
        self.assertNotIn("plugh", log)
        self.assertNotIn(json.dumps(answer)[1:-1], log)
        requests = [e for e in events if e["event"] == "request"]
        self.assertEqual([e["status"] for e in requests], ["OK", "INVALID_ARGUMENT", "INVALID_ARGUMENT"])
        self.assertEqual(requests[0]["generated_tokens"], 30)
        sizes = next(e for e in events if e["event"] == "sizes")
        for key in ("dtype", "backend", "kv_pool_bytes", "kv_blocks", "max_context", "queue_requests", "queue_tokens"):
            self.assertIn(key, sizes)
        retrieval = next(e for e in events if e["event"] == "retrieval")
        self.assertIn("lsh:128 ", retrieval["indexes"])
        self.assertGreater(retrieval["index_bytes"], 0)
        self.assertIn("tokens", next(e for e in events if e["event"] == "retrieval_from"))

    def test_health_watch_hears_of_the_drain_while_a_stream_still_runs(self):
        with Server("--drain-grace", "10m") as server:
            api = Api(server.address)
            statuses = []
            changed = threading.Event()

            def watch():
                try:
                    for response in api.watch(health.HealthCheckRequest()):
                        statuses.append((response.status, time.monotonic()))
                        if response.status == 2:
                            changed.set()
                except grpc.RpcError:
                    pass

            thread = threading.Thread(target=watch)
            thread.start()
            eventually(lambda: statuses, "a first status")
            self.assertEqual(statuses[0][0], 1)
            stream = api.generate(counting_request("A story", 30000), timeout=PATIENCE)
            tokens = len(next(stream).tokens)
            sent = time.monotonic()
            server.signal(signal.SIGTERM)
            self.assertTrue(changed.wait(PATIENCE))
            print(f"NOT_SERVING {1000 * (statuses[-1][1] - sent):.1f} ms after SIGTERM")
            # That it came early is shown by order, on a machine of any speed: the stream goes on beyond what there was.
            there = server.metric("winnow_generated_tokens_total")
            self.assertLess(there, 30000)
            while tokens <= there:
                tokens += len(next(stream).tokens)
            self.assertIsNone(server.process.poll())
            stream.cancel()
            self.assertEqual(server.wait(), 0)
            thread.join()


class Signals(unittest.TestCase):
    def test_until_routers_know_a_server_that_goes_serves_new_calls(self):
        with Server("--drain-delay", "10m") as server:
            api = Api(server.address)
            alone = token_ids(api.generate(counting_request("A story", 20), timeout=PATIENCE))
            server.signal(signal.SIGTERM)
            eventually(lambda: not api.serving(), "health says NOT_SERVING")
            self.assertEqual(token_ids(api.generate(counting_request("A story", 20), timeout=PATIENCE)), alone)
            with self.assertRaises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/health", timeout=PATIENCE)
            self.assertEqual(raised.exception.code, 503)
            raised.exception.close()
            self.assertIsNone(server.process.poll())
            server.signal(signal.SIGTERM)
            self.assertEqual(server.wait(), 128 + signal.SIGTERM)

    def test_sigterm_finishes_streams_and_refuses_new_calls(self):
        with Server("--drain-grace", "10m", "--slow-reader-timeout", "10m") as server:
            api = Api(server.address)
            alone = token_ids(api.generate(counting_request("A story", 1500), timeout=PATIENCE))
            # Log-probabilities make it larger than all that lies between engine and reader, so that it cannot end before
            # it is read, however long the rest takes.
            slow = Api(server.address, options=[("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)])
            stream = slow.generate(counting_request("A story", 1500, top_logprobs=20), timeout=PATIENCE)
            got = token_ids([next(stream)])
            server.signal(signal.SIGTERM)
            eventually(lambda: not api.serving(), "NOT_SERVING")
            with self.assertRaises(grpc.RpcError) as caught:
                list(api.generate(counting_request("Too late", 1)))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(details_of(caught.exception)["ErrorInfo"].reason, "DRAINING")
            self.assertEqual(got + token_ids(stream), alone)
            self.assertEqual(server.wait(), 0)

    def test_grace_ends_streams_unavailable_and_the_exit_is_clean(self):
        with Server("--drain-grace", "200ms") as server:
            api = Api(server.address)
            stream = api.generate(counting_request("A story", 30000), timeout=PATIENCE)
            next(stream)
            server.signal(signal.SIGTERM)
            with self.assertRaises(grpc.RpcError) as caught:
                list(stream)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(server.wait(), 0)

    def test_second_signal_exits_at_once(self):
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            with Server("--drain-grace", "10m", "--slow-reader-timeout", "10m") as server:
                api = Api(server.address)
                stream = api.generate(counting_request("A story", 30000), timeout=PATIENCE)
                next(stream)
                server.signal(signal.SIGTERM)
                eventually(lambda: any(e["event"] == "drain_begins" for e in server.events()), "a drain")
                server.signal(number)
                self.assertEqual(server.wait(), code)

    def test_a_signal_while_the_model_is_loaded_ends_the_process(self):
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            process = subprocess.Popen([BIN, "serve", "--model", MODEL, "--listen", "127.0.0.1:0", "--metrics", "off", "--http", "off",
                                        "--crossover-cache", "none"], stderr=subprocess.PIPE, text=True)
            self.assertIn("event=starting", process.stderr.readline())
            process.send_signal(number)
            log = process.communicate(timeout=PATIENCE)[1]
            # Or it was loaded already, and drained.
            self.assertEqual(process.returncode, 0 if "event=listening" in log else code, log)

    def test_sigint_drains_too(self):
        with Server() as server:
            server.signal(signal.SIGINT)
            self.assertEqual(server.wait(), 0)

    def test_sighup_and_sigpipe_do_no_harm(self):
        with Server() as server:
            api = Api(server.address)
            server.signal(signal.SIGPIPE)
            server.signal(signal.SIGHUP)
            eventually(lambda: any(e["event"] == "reload" and "nothing to read" in e["text"] for e in server.events()), "SIGHUP in the log")
            list(api.generate(counting_request("Still there", 3), timeout=PATIENCE))
            self.assertEqual(server.terminate(), 0)

    def test_stopped_process_goes_on_without_mass_expiry(self):
        with Server() as server:
            api = Api(server.address)
            stream = api.generate(counting_request("A story", 300), timeout=PATIENCE)
            got = token_ids([next(stream)])
            server.signal(signal.SIGSTOP)
            time.sleep(1)  # the pause itself is what is tested
            server.signal(signal.SIGCONT)
            self.assertEqual(len(got) + len(token_ids(stream)), 300)
            self.assertEqual(server.terminate(), 0)


class Traces(unittest.TestCase):
    def test_a_callers_trace_is_in_the_log_and_in_the_answer(self):
        good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        with Server() as server:
            api = Api(server.address)
            for metadata, trace in (([("traceparent", good)], good), ([("traceparent", good.upper())], None), ([], None),
                                    ([("traceparent", good), ("traceparent", good)], None)):
                call = api.generate(counting_request("x", 1), metadata=metadata)
                self.assertEqual(dict(call.initial_metadata()).get("traceparent"), trace)
                list(call)
                request = [e for e in server.events() if e["event"] == "request"][-1]
                self.assertEqual((request["trace_id"], request["parent_span_id"]), tuple(good.split("-")[1:3]) if trace else ("", ""))


if __name__ == "__main__":
    main()

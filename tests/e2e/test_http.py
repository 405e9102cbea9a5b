"""The HTTP port, as its clients see it: from Python's standard library, and over raw sockets."""
import concurrent.futures
import contextlib
import http.client
import json
import signal
import socket
import ssl
import struct
import subprocess
import time
import unittest

from harness import (MODEL, PATIENCE, Api, Server, counting_request, eventually, inference, main, run,
                     temporary_directory)

CHAT = [{"role": "user", "content": "What is the code?"}]


def connect(server):
    return http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE)


def connect_slowly(server):
    """A client whose own buffer is small: what it does not read is soon more than lies between it and the engine."""
    connection = connect(server)
    connection.sock = socket.socket()
    connection.sock.settimeout(PATIENCE)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.connect(("127.0.0.1", server.http_port))
    return connection


def ask(server, method, path, body=None, headers=None, connection=None):
    """The status, the headers and the body, as JSON where it is JSON."""
    own = connection or connect(server)
    data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
    own.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    response = own.getresponse()
    text = response.read()
    if connection is None:
        own.close()
    if response.headers.get_content_type() == "application/json":
        return response.status, response.headers, json.loads(text)
    return response.status, response.headers, text.decode()


def post(server, path, body, **headers):
    return ask(server, "POST", path, body, headers)


def events(server, path, body):
    """The data of a stream's events; the last one is "[DONE]"."""
    connection = connect(server)
    connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, (response.status, response.read())
    assert response.headers["Content-Type"].startswith("text/event-stream")
    lines = response.read().decode().split("\n\n")
    connection.close()
    assert lines[-1] == ""
    return [line.removeprefix("data: ") for line in lines[:-1] if not line.startswith(":")]


def chunks(server, path, body):
    data = events(server, path, body)
    assert data[-1] == "[DONE]", data[-1]
    return [json.loads(line) for line in data[:-1]]


def raw(server, data):
    """What comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE) as connection:
        got = b""
        # The server may have answered, waited for the rest for a while and closed, before all is sent.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                got += piece
        return got


def request_bytes(body, path="/v1/completions", headers=""):
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


def counting(text="A story", tokens=8, **fields):
    return {"prompt": text, "max_tokens": tokens, "ignore_eos": True, **fields}


class Routes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--model-name", "needle")
        cls.addClassCleanup(cls.server.close)
        cls.api = Api(cls.server.address)

    def grpc_text(self, request):
        return "".join(r.text for r in self.api.generate(request, timeout=PATIENCE))

    def grpc_chat(self, tokens=8, **fields):
        return inference.GenerateRequest(
            chat=inference.ChatPrompt(messages=[inference.ChatMessage(**m) for m in CHAT]),
            stopping=inference.StoppingOptions(max_tokens=tokens, ignore_eos=True), **fields)

    def test_health_version_models_and_metrics(self):
        status, headers, body = ask(self.server, "GET", "/health")
        self.assertEqual((status, body), (200, {"status": "ok"}))
        self.assertEqual(ask(self.server, "GET", "/ping")[::2], (200, {"status": "ok"}))
        self.assertEqual(headers["Content-Length"], str(len('{"status":"ok"}')))
        self.assertRegex(ask(self.server, "GET", "/version")[2]["version"], r"^\d+\.\d+\.\d+$")
        models = ask(self.server, "GET", "/v1/models")[2]
        self.assertEqual([m["id"] for m in models["data"]], ["needle"])
        self.assertEqual(ask(self.server, "GET", "/v1/models/needle")[2], models["data"][0])
        status, _, body = ask(self.server, "GET", "/v1/models/other")
        self.assertEqual((status, body["error"]["code"]), (404, "model_not_found"))
        info = ask(self.server, "GET", "/tokenizer_info")[2]
        self.assertEqual(info["model_max_length"], models["data"][0]["max_model_len"])
        self.assertTrue(info["eos_token"])
        page = ask(self.server, "GET", "/metrics")[2]
        for series in ('vllm:num_requests_waiting{model_name="needle"} 0', 'vllm:num_requests_running{model_name="needle"} 0',
                       'vllm:kv_cache_usage_perc{model_name="needle"} 0', "vllm:lora_requests_info{", "winnow_serving 1",
                       'vllm:cache_config_info{block_size="64",num_gpu_blocks="', "winnow_http_connections ",
                       "winnow_time_to_first_token_seconds_count", "process_resident_memory_bytes"):
            self.assertIn("\n" + series, page)
        connection = connect(self.server)
        connection.request("HEAD", "/health")
        response = connection.getresponse()
        self.assertEqual((response.status, response.read()), (200, b""))
        connection.close()

    def test_chat_has_grpcs_text(self):
        want = self.grpc_text(self.grpc_chat())
        body = {"model": "needle", "messages": CHAT, "max_completion_tokens": 8, "max_tokens": 1, "ignore_eos": True}
        status, headers, answer = post(self.server, "/v1/chat/completions", body)
        self.assertEqual(status, 200, answer)
        self.assertTrue(answer["id"].startswith("chatcmpl-"))
        self.assertEqual((answer["object"], answer["model"]), ("chat.completion", "needle"))
        self.assertEqual(answer["choices"], [{
            "index": 0, "message": {"role": "assistant", "content": want, "refusal": None}, "logprobs": None,
            "finish_reason": "length", "stop_reason": None}])
        usage = answer["usage"]
        self.assertEqual(usage["completion_tokens"], 8)
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + 8)
        self.assertEqual(headers["X-Request-Id"], headers["X-Winnow-Request-Id"])
        # Parts are joined by line feeds, and "developer" is the system's other name.
        parts = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the code?"}]}]
        joined = [{"role": "user", "content": "What is\nthe code?"}]
        texts = [post(self.server, "/v1/chat/completions", {**body, "messages": m})[2]["choices"][0]["message"]
                 for m in (parts, joined)]
        self.assertEqual(texts[0], texts[1])

    def test_completion_has_grpcs_text_for_text_and_for_ids(self):
        want = self.grpc_text(counting_request("A story", 8))
        status, _, answer = post(self.server, "/v1/completions", counting())
        self.assertEqual((status, answer["object"]), (200, "text_completion"))
        self.assertEqual(answer["choices"][0]["text"], want)
        ids = list(self.api.tokenize(inference.TokenizeRequest(text=inference.TextPrompt(text="A story"))).ids)
        for prompt in (ids, [ids], ["A story"]):
            self.assertEqual(post(self.server, "/v1/completions", counting(prompt))[2]["choices"][0]["text"], want)

    def test_streams_say_the_same_in_pieces(self):
        whole = post(self.server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 8, "ignore_eos": True})[2]
        got = chunks(self.server, "/v1/chat/completions", {
            "messages": CHAT, "max_tokens": 8, "ignore_eos": True, "stream_options": {"include_usage": True}})
        self.assertEqual(got[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        self.assertEqual("".join(c["choices"][0]["delta"].get("content", "") for c in got[:-1]),
                         whole["choices"][0]["message"]["content"])
        # The reason has a chunk of its own, then comes the usage, alone.
        self.assertEqual((got[-2]["choices"][0]["delta"], got[-2]["choices"][0]["finish_reason"]), ({}, "length"))
        self.assertTrue(all(c["choices"][0]["finish_reason"] is None for c in got[:-2]))
        self.assertEqual(got[-1]["choices"], [])
        self.assertTrue(all(c["usage"] is None for c in got[:-1]))
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            self.assertEqual(got[-1]["usage"][key], whole["usage"][key])
        self.assertEqual({c["object"] for c in got}, {"chat.completion.chunk"})
        self.assertEqual(len({c["id"] for c in got}), 1)
        plain = chunks(self.server, "/v1/completions", counting())
        self.assertEqual("".join(c["choices"][0]["text"] for c in plain), self.grpc_text(counting_request("A story", 8)))
        self.assertTrue(all("usage" not in c for c in plain))
        live = chunks(self.server, "/v1/completions", counting(stream_options={"continuous_usage_stats": True}))
        self.assertEqual(live[-1]["usage"]["completion_tokens"], 8)
        self.assertGreater(live[0]["usage"]["prompt_tokens"], 0)

    def test_choices_are_told_apart(self):
        ask_for = {"n": 3, "seed": 7, "temperature": 1.3}
        request = counting_request("A story", 8, n=3)
        request.sampling.temperature, request.sampling.seed = 1.3, 7
        want = ["", "", ""]
        for response in self.api.generate(request, timeout=PATIENCE):
            want[response.choice] += response.text
        answer = post(self.server, "/v1/completions", counting(**ask_for))[2]
        self.assertEqual([c["text"] for c in answer["choices"]], want)
        self.assertEqual([c["index"] for c in answer["choices"]], [0, 1, 2])
        self.assertEqual(answer["usage"]["completion_tokens"], 24)
        streamed = ["", "", ""]
        for chunk in chunks(self.server, "/v1/completions", counting(**ask_for)):
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        self.assertEqual(streamed, want)

    def test_logprobs(self):
        request = counting_request("A story", 6, top_logprobs=3)
        tokens = [t for r in self.api.generate(request, timeout=PATIENCE) for t in r.tokens]
        chat = post(self.server, "/v1/chat/completions", {
            "messages": CHAT, "max_tokens": 6, "ignore_eos": True, "logprobs": True, "top_logprobs": 3})[2]
        content = chat["choices"][0]["logprobs"]["content"]
        self.assertEqual(len(content), 6)
        self.assertEqual("".join(c["token"] for c in content), chat["choices"][0]["message"]["content"])
        for token in content:
            self.assertEqual(len(token["top_logprobs"]), 3)
            self.assertEqual(token["top_logprobs"][0]["token"], token["token"])  # greedy
            self.assertEqual(bytes(token["bytes"]).decode(), token["token"])
            self.assertLessEqual(token["logprob"], 0)
        old = post(self.server, "/v1/completions", counting(tokens=6, logprobs=3))[2]["choices"][0]["logprobs"]
        self.assertEqual(old["token_logprobs"], [t.logprob for t in tokens])
        self.assertEqual([len(t) for t in old["top_logprobs"]], [3] * 6)
        self.assertEqual(old["text_offset"][0], 0)
        self.assertEqual(old["text_offset"][-1], len("".join(old["tokens"][:-1])))
        streamed = [c["choices"][0]["logprobs"] for c in chunks(self.server, "/v1/completions", counting(tokens=6, logprobs=3))]
        self.assertEqual([p for s in streamed if s for p in s["token_logprobs"]], old["token_logprobs"])
        none = post(self.server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "logprobs": True})[2]
        self.assertEqual(none["choices"][0]["logprobs"]["content"][0]["top_logprobs"], [])

    def complete(self, prompt, **fields):
        status, _, answer = post(self.server, "/v1/completions", {"prompt": prompt, **fields})
        self.assertEqual(status, 200, answer)
        return answer

    def test_a_prompt_that_is_echoed_is_scored(self):
        request = counting_request("A story", 40, top_logprobs=3)
        request.text.add_special_tokens = False
        drawn = [t for r in self.api.generate(request, timeout=PATIENCE) for t in r.tokens]
        start = ask(self.server, "POST", "/tokenize", {"prompt": "A story", "add_special_tokens": False})[2]["tokens"]
        ids = start + [t.id for t in drawn]
        answer = self.complete(ids, echo=True, logprobs=3, max_tokens=0, min_tokens=1)
        choice, scores = answer["choices"][0], answer["choices"][0]["logprobs"]
        self.assertEqual({len(scores[key]) for key in scores}, {len(ids)})
        self.assertEqual((scores["token_logprobs"][0], scores["top_logprobs"][0], scores["text_offset"][0]), (None, None, 0))
        self.assertEqual(scores["token_logprobs"][len(start):], [t.logprob for t in drawn])
        self.assertEqual((choice["text"], choice["finish_reason"], choice["stop_reason"]), ("".join(scores["tokens"]), "length", None))
        usage = answer["usage"]
        self.assertEqual((usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]), (len(ids), 0, len(ids)))
        self.assertEqual(usage["winnow"]["attended_rows"], 0, "nothing was decoded for it")
        # At any place they are those of a prompt that ends there, and so of tokens that nobody drew.
        backwards = ids[::-1]
        # Penalties are for what was drawn before, which is nothing.
        answer = self.complete(backwards, echo=True, logprobs=3, max_tokens=1, presence_penalty=50)
        self.assertEqual((answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]), (len(ids), 1))
        scores = answer["choices"][0]["logprobs"]
        # The token itself is among the likely ones, though it seldom is one.
        for token, value, top in list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))[1:]:
            self.assertEqual(top[token], value)
        self.assertEqual({len(top) for top in scores["top_logprobs"][1:]}, {3, 4})
        self.assertEqual(len(scores["tokens"]), len(ids) + 1)
        for end in (1, 2, 7, len(ids)):
            one = self.complete(backwards[:end], logprobs=3, max_tokens=1)["choices"][0]["logprobs"]
            own = one["top_logprobs"][0]
            self.assertEqual({token: value for token, value in scores["top_logprobs"][end].items() if token in own}, own)
        self.assertEqual((one["tokens"][0], one["token_logprobs"][0]), (scores["tokens"][-1], scores["token_logprobs"][-1]))
        # Under a policy that is verified, in two choices, and as a text.
        for policy in ("window:from=0,verify=4", "window:from=0,verify=auto,lookup=on"):
            checked = self.complete(backwards, echo=True, logprobs=3, max_tokens=1, n=2, winnow={"policy": policy})["choices"]
            self.assertEqual([c["logprobs"] for c in checked], [scores] * 2, policy)
        text = self.complete("A story about", echo=True, logprobs=0, max_tokens=1, add_special_tokens=False)["choices"][0]
        self.assertEqual(text["text"], "".join(text["logprobs"]["tokens"]))
        self.assertTrue(text["text"].startswith("A story about") and text["text"] != "A story about")

    def test_scores_and_answers_are_those_of_requests_of_their_own(self):
        text = "Once upon a time there was a code, and the code was " + "7" * 80
        prompts = [text, "x"]
        body = {"max_tokens": 9, "ignore_eos": True, "temperature": 1, "seed": 3, "n": 2, "frequency_penalty": 0.5, "logprobs": 2}
        plain = self.complete(prompts, **body)["choices"]
        for beside in ({}, {"stop": [plain[0]["text"][3:6]]}):
            plain = self.complete(prompts, **body, **beside)["choices"]
            scored = self.complete(prompts, echo=True, **body, **beside)
            alone = [self.complete(prompt, echo=True, logprobs=2, max_tokens=0)["choices"][0] for prompt in prompts]
            for i, choice in enumerate(scored["choices"]):
                own, prompt = plain[i], alone[i // 2]
                self.assertEqual((choice["text"], choice["finish_reason"], choice["stop_reason"]),
                                 (prompt["text"] + own["text"], own["finish_reason"], own["stop_reason"]))
                for key in ("tokens", "token_logprobs", "top_logprobs"):
                    self.assertEqual(choice["logprobs"][key], prompt["logprobs"][key] + own["logprobs"][key], key)
                begin = len("".join(prompt["logprobs"]["tokens"]))
                self.assertEqual(choice["logprobs"]["text_offset"],
                                 prompt["logprobs"]["text_offset"] + [begin + offset for offset in own["logprobs"]["text_offset"]])
            # Its prompts were cached by the plain ones, and are by it.
            self.assertEqual(scored["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertGreaterEqual(self.complete(text, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"], 64)

    def test_prompt_logprobs_as_vllm_has_them(self):
        ids = ask(self.server, "POST", "/tokenize", {"prompt": "Once upon a time there was"})[2]["tokens"]
        echoed = self.complete(ids, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
        texts = echoed["tokens"]
        for count in (0, 4):
            answer = self.complete(ids, prompt_logprobs=count, max_tokens=2, ignore_eos=True, n=2)
            lists = [choice["prompt_logprobs"] for choice in answer["choices"]]
            self.assertEqual(lists[0], lists[1])
            self.assertEqual((len(lists[0]), lists[0][0]), (len(ids), None))
            self.assertEqual([choice["logprobs"] for choice in answer["choices"]], [None, None])
            for i, scores in list(enumerate(lists[0]))[1:]:
                own = scores[str(ids[i])]
                self.assertEqual(own, {"logprob": echoed["token_logprobs"][i], "rank": own["rank"], "decoded_token": texts[i]})
                self.assertEqual(list(scores)[0], str(ids[i]), "the prompt's own token comes first")
                ranks = sorted(score["rank"] for score in scores.values())
                self.assertEqual(ranks, sorted({*range(1, count + 1), own["rank"]}))
                ordered = sorted(scores.values(), key=lambda score: score["rank"])
                self.assertEqual(ordered, sorted(ordered, key=lambda score: -score["logprob"]))
                if count > 0:
                    after = self.complete(ids[:i], max_tokens=1, logprobs=0, ignore_eos=True)["choices"][0]["logprobs"]
                    self.assertEqual((ordered[0]["decoded_token"], ordered[0]["logprob"]), (after["tokens"][0], after["token_logprobs"][0]))
        both = self.complete(ids, prompt_logprobs=1, echo=True, logprobs=3, max_tokens=1)["choices"][0]
        self.assertEqual({len(top) for top in both["logprobs"]["top_logprobs"][1:]} - {3, 4}, set())
        self.assertEqual({len(scores) for scores in both["prompt_logprobs"][1:]} - {1, 2}, set())
        status, _, chat = post(self.server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "n": 2, "prompt_logprobs": 1})
        self.assertEqual(status, 200, chat)
        rendered = ask(self.server, "POST", "/v1/chat/completions/render", {"messages": CHAT})[2]["token_ids"]
        self.assertEqual([list(scores)[0] if scores else None for scores in chat["prompt_logprobs"]], [None, *map(str, rendered[1:])])
        self.assertEqual([scores[str(i)]["logprob"] for i, scores in zip(rendered[1:], chat["prompt_logprobs"][1:], strict=True)],
                         self.complete(rendered, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"][1:])
        self.assertNotIn("prompt_logprobs", chat["choices"][0])
        self.assertNotIn("prompt_logprobs", self.complete(ids, max_tokens=1)["choices"][0])

    def test_a_scored_prompt_may_have_end_tokens(self):
        ids = ask(self.server, "POST", "/v1/chat/completions/render", {"messages": CHAT * 2})[2]["token_ids"]
        end = "<|end|>"  # of a turn
        scores = self.complete(ids, echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]
        self.assertEqual(len(scores["tokens"]), len(ids))
        self.assertIn(end, scores["tokens"][:-1])
        # One token: there is nothing to score. One that ends the answer ends it.
        self.assertEqual(self.complete(ids[:1], echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"], [None])
        end_id = ids[scores["tokens"].index(end)]
        ended = self.complete(ids, echo=True, logprobs=1, max_tokens=1, logit_bias={str(end_id): 100})["choices"][0]
        self.assertEqual((ended["finish_reason"], ended["logprobs"]["tokens"][-1], ended["stop_reason"]), ("stop", end, None))
        self.assertEqual(ended["text"], "".join(scores["tokens"]))

    def test_echo_without_logprobs_repeats_the_prompt(self):
        for prompt in ("A story", ask(self.server, "POST", "/tokenize", {"prompt": "A story", "add_special_tokens": False})[2]["tokens"]):
            alone = self.complete(prompt, max_tokens=6, ignore_eos=True)["choices"][0]["text"]
            body = {"max_tokens": 6, "ignore_eos": True, "echo": True, "n": 2}
            self.assertEqual([c["text"] for c in self.complete(prompt, **body)["choices"]], ["A story" + alone] * 2)
            streamed = ["", ""]
            for chunk in chunks(self.server, "/v1/completions", {"prompt": prompt, **body}):
                streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
            self.assertEqual(streamed, ["A story" + alone] * 2)
        none = self.complete("A story", max_tokens=0, echo=True)
        self.assertEqual((none["choices"][0]["text"], none["choices"][0]["logprobs"], none["usage"]["completion_tokens"]), ("A story", None, 0))

    def test_several_prompts(self):
        prompts = ["A story", "The code is", "Once upon a time there was", "x"]
        body = {"max_tokens": 7, "ignore_eos": True, "logprobs": 2, "n": 2, "temperature": 1, "seed": 7}
        alone = [self.complete(prompt, **body) for prompt in prompts]
        answer = self.complete(prompts, **body)
        want = [choice for one in alone for choice in one["choices"]]
        self.assertEqual([c["index"] for c in answer["choices"]], list(range(8)))
        for got, own in zip(answer["choices"], want, strict=True):
            self.assertEqual({**got, "index": 0}, {**own, "index": 0})
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            self.assertEqual(answer["usage"][key], sum(one["usage"][key] for one in alone), key)
        self.assertEqual(answer["usage"]["winnow"]["dense_rows"], sum(one["usage"]["winnow"]["dense_rows"] for one in alone))
        streamed = [""] * 8
        data = chunks(self.server, "/v1/completions", {"prompt": prompts, **body, "stream_options": {"include_usage": True}})
        for chunk in data[:-1]:
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        self.assertEqual(streamed, [own["text"] for own in want])
        self.assertEqual(data[-1]["usage"]["total_tokens"], answer["usage"]["total_tokens"])
        scored = self.complete(prompts[:2], max_tokens=0, echo=True, logprobs=0)
        self.assertEqual([c["text"] for c in scored["choices"]], prompts[:2])
        self.assertEqual(scored["usage"]["total_tokens"], scored["usage"]["prompt_tokens"])
        # One that is refused refuses all of them, and ends the others.
        status, _, refused = post(self.server, "/v1/completions", {"prompt": ["A story", "word " * 100000], "max_tokens": 3000, "ignore_eos": True})
        self.assertEqual((status, refused["error"]["code"]), (400, "context_length_exceeded"), refused)
        eventually(lambda: "\nwinnow_requests_running 0\n" in self.server.metrics_text(), "the prompts that were good are not run")

    def test_stop_and_bias(self):
        text = post(self.server, "/v1/completions", counting("Once upon a time", 16))[2]["choices"][0]["text"]
        part = next(word for word in text.split() if word.isalpha())
        for stop in (part, ["no such text", part]):
            choice = post(self.server, "/v1/completions", counting("Once upon a time", 16, stop=stop))[2]["choices"][0]
            self.assertEqual((choice["text"], choice["finish_reason"], choice["stop_reason"]),
                             (text[:text.index(part)], "stop", part))
        ids = list(self.api.tokenize(inference.TokenizeRequest(text=inference.TextPrompt(
            text="x", add_special_tokens=False))).ids)
        biased = post(self.server, "/v1/completions", counting(logit_bias={str(ids[0]): 100}, tokens=3))[2]
        self.assertEqual(biased["choices"][0]["text"], "xxx")
        stopped = post(self.server, "/v1/completions",
                       counting(logit_bias={str(ids[0]): 100}, tokens=3, stop_token_ids=[ids[0]]))[2]
        self.assertEqual((stopped["choices"][0]["finish_reason"], stopped["choices"][0]["stop_reason"]), ("stop", ids[0]))

    def test_usage_tells_what_was_cached_and_what_was_read(self):
        prompt = "Once upon a time there was a fox. " * 40
        first = post(self.server, "/v1/completions", counting(prompt, 20, winnow={"policy": "window:from=0"}),
                     **{"X-Winnow-Tenant": "reads"})[2]["usage"]
        again = post(self.server, "/v1/completions", counting(prompt, 20, winnow={"policy": "dense"}),
                     **{"X-Winnow-Tenant": "reads"})[2]["usage"]
        self.assertEqual(first["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertGreater(again["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertLess(first["winnow"]["kv_read_bytes"]["fast"], first["winnow"]["kv_dense_bytes"])
        self.assertEqual(again["winnow"]["kv_read_bytes"]["fast"], again["winnow"]["kv_dense_bytes"])
        extra = post(self.server, "/v1/completions",
                     counting(prompt, 20, vllm_xargs={"winnow_policy": "window:from=0"}))[2]["usage"]
        self.assertEqual(extra["winnow"]["kv_read_bytes"], first["winnow"]["kv_read_bytes"])
        self.assertEqual((first["winnow"]["policy"], first["winnow"]["exactness"]), ("window:from=0", "fast"))
        for fields in ({"winnow": {"policy": "window:from=0", "exactness": "exact"}},
                       {"vllm_xargs": {"winnow_policy": "window:from=0", "winnow_exactness": "exact"}}):
            exact = post(self.server, "/v1/completions", counting(prompt, 20, **fields))[2]["usage"]["winnow"]
            self.assertEqual((exact["policy"], exact["exactness"]), ("window:from=0,verify=auto", "exact"))
        # `auto` drafts where that has paid; a length is what is drafted.
        exact = post(self.server, "/v1/completions", counting(
            prompt, 20, winnow={"policy": "window:from=0,verify=8", "exactness": "exact"}))[2]["usage"]["winnow"]
        self.assertEqual((exact["policy"], exact["exactness"]), ("window:from=0,verify=8", "exact"))
        self.assertEqual(len(exact["verified_at"]), len(exact["accepted_at"]))
        self.assertGreater(exact["verified_at"][0], 0)
        self.assertGreater(exact["draft_read_bytes"]["fast"], 0)
        self.assertGreater(exact["verify_read_bytes"]["fast"], 0)

    def test_what_is_not_served_is_refused_by_name(self):
        cases = [
            ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 2}, "top_p"),
            ({"n": 99}, "n"), ({"n": 1.5}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 2**40}, "max_tokens"),
            ({"stop": 3}, "stop"), ({"stop": [3]}, "stop[0]"), ({"stop": ["x"] * 99}, "stop"),
            ({"logit_bias": {"x": 1}}, "logit_bias[x]"), ({"logit_bias": {"99999999": 1}}, "logit_bias[99999999]"),
            ({"seed": 0.5}, "seed"), ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
            ({"chat_template": "{{ x }}"}, "chat_template"), ({"tools": [{"type": "function"}]}, "tools[0]"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"), ({"response_format": {"type": "xml"}}, "response_format.type"),
            ({"messages": []}, "messages"), ({"messages": "x"}, "messages"), ({"messages": ["x"]}, "messages[0]"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
             "messages[0].content[0].type"),
            ({"winnow": {"policy": "quest:pages=3"}}, "winnow.policy"), ({"winnow": {"polcy": "dense"}}, "winnow.polcy"),
            ({"winnow": {"exactness": "nearly"}}, "winnow.exactness"),
            ({"winnow": {"policy": "window:verify=8", "exactness": "fast"}}, "winnow.exactness"),
            ({"winnow": {"exactness": "exact"}, "vllm_xargs": {"winnow_exactness": "fast"}}, "vllm_xargs.winnow_exactness"),
            ({"vllm_xargs": {"winnow_polcy": "dense"}}, "vllm_xargs.winnow_polcy"), ({"vllm_xargs": {"no_repeat_ngram": 3}}, "vllm_xargs.no_repeat_ngram"),
            ({"vllm_xargs": {"winnow_cache_priority": 7}}, "winnow.cache.priority"),
            ({"winnow": {"cache": {"use": 1}}}, "winnow.cache.use"), ({"winnow": {"cache": {"priority": 7}}}, "winnow.cache.priority"),
            ({"winnow": {"cache": {"ttl_seconds": -1}}}, "winnow.cache.ttl_seconds"), ({"winnow": {"cache": {"ttl": 1}}}, "winnow.cache.ttl"),
            ({"winnow": {"cache": {"store": False, "priority": 3}}}, "winnow.cache.store"), ({"winnow": {"cache": True}}, "winnow.cache"),
            ({"winnow": {"cache": {"salt": "x"}}, "cache_salt": "y"}, "cache_salt"),
            ({"cache_salt": "s" * 1025}, "winnow.cache.salt"), ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"echo": True}, "echo"), ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
            ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"prompt_logprobs": "all"}, "prompt_logprobs"), ({"thinking_token_budget": 8}, "thinking_token_budget"),
            ({"logprob_token_ids": [1]}, "logprob_token_ids"), ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"), ({"max_tokens": 50000}, "max_tokens"),
            ({"logprobs": True, "top_logprobs": 20, "max_tokens": 30000, "n": 16}, "top_logprobs"),
        ]
        for fields, param in cases:
            status, _, answer = post(self.server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **fields})
            self.assertEqual((status, answer["error"]["type"], answer["error"]["param"]),
                             (400, "invalid_request_error", param), (fields, answer))
            self.assertIn(param, answer["error"]["message"])
        for field in ("tools", "functions", "stop", "temperature", "response_format", "logit_bias", "winnow", "stream_options"):
            self.assertEqual(post(self.server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, field: None})[0], 200)
        ignored = {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
                   "parallel_tool_calls": True, "no_such_field": [1], "tools": [], "response_format": {"type": "text"}}
        self.assertEqual(post(self.server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **ignored})[0], 200)
        self.assertEqual(post(self.server, "/v1/chat/completions", {"messages": CHAT, "model": "gpt"})[0], 404)
        self.assertEqual(post(self.server, "/v1/completions", {"prompt": ["a"] * 129})[2]["error"]["param"], "prompt")
        self.assertEqual(post(self.server, "/v1/completions", {"prompt": ["a", {}]})[2]["error"]["param"], "prompt")
        for fields, param in (({"max_tokens": 1, "stream": True}, "stream"), ({"max_tokens": -1}, "max_tokens"),
                              ({"max_tokens": 1, "prompt": [1, -4]}, "prompt[1]"),
                              ({"max_tokens": 0, "logprobs": 21}, "logprobs"), ({"max_tokens": 0, "logprobs": -1}, "logprobs"),
                              ({"max_tokens": 0, "prompt_logprobs": 21}, "prompt_logprobs"),
                              ({"max_tokens": 0, "prompt_logprobs": 20, "prompt": ["a"] * 127 + ["word " * 500]}, "prompt_logprobs"),
                              ({"max_tokens": 0, "prompt_logprobs": 20, "prompt": "word " * 3300, "n": 16}, "prompt_logprobs"),
                              ({"max_tokens": 0, "logprobs": 20, "prompt": ["a"] * 127 + ["word " * 500]}, "logprobs")):
            status, _, answer = post(self.server, "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, **fields})
            self.assertEqual((status, answer["error"]["param"]), (400, param), (fields, answer))
        self.assertEqual(post(self.server, "/v1/completions", {"prompt": [1, -4]})[2]["error"]["param"], "prompt[1]")
        self.assertIn("did you mean policy",
                      post(self.server, "/v1/completions", counting(winnow={"polcy": "dense"}))[2]["error"]["message"])

    def test_bad_bodies_are_400(self):
        deep = b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}"
        for body in (b"", b"nonsense", b"[]", b"3", b'{"prompt": "x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
                     b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x\0"}', deep):
            status, _, answer = post(self.server, "/v1/completions", body)
            self.assertEqual((status, answer["error"]["type"]), (400, "invalid_request_error"), body[:40])
        status, _, answer = post(self.server, "/v1/completions", {"prompt": "word " * 60000, "max_tokens": 1})
        self.assertEqual((status, answer["error"]["param"]), (400, "prompt"), answer)

    def test_routes_and_methods(self):
        self.assertEqual(ask(self.server, "GET", "/no/such/route")[0], 404)
        self.assertEqual(ask(self.server, "GET", "/../etc/passwd")[0], 404)
        status, headers, _ = ask(self.server, "GET", "/v1/completions")
        self.assertEqual((status, headers["Allow"]), (405, "POST"))
        self.assertEqual(ask(self.server, "GET", "/health?probe=1")[0], 200)

    def test_a_connection_serves_one_request_after_another(self):
        connection = connect(self.server)
        for _ in range(3):
            self.assertEqual(ask(self.server, "POST", "/v1/completions", counting(tokens=2), connection=connection)[0], 200)
            self.assertEqual(ask(self.server, "GET", "/health", connection=connection)[0], 200)
            # An error of the request is none of the connection.
            self.assertEqual(ask(self.server, "POST", "/v1/completions", {}, connection=connection)[0], 400)
            local = connection.sock.getsockname()
            status, headers, _ = ask(self.server, "GET", "/no/such/route", connection=connection)
            self.assertEqual((status, headers["Connection"]), (404, "keep-alive"))
            self.assertEqual(ask(self.server, "GET", "/health", connection=connection)[0], 200)
            self.assertEqual(connection.sock.getsockname(), local)
        connection.close()

    def test_pipelined_requests_are_answered_in_order(self):
        many = b"".join(request_bytes(json.dumps(counting(tokens=t)).encode()) for t in (3, 1, 2))
        got = raw(self.server, many + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").decode()
        self.assertEqual(got.count("HTTP/1.1 200 OK"), 4)
        bodies = [json.loads(line) for line in got.splitlines() if line.startswith("{")
                  for line in [line.partition("HTTP/1.1")[0]]]
        self.assertEqual([b["usage"]["completion_tokens"] for b in bodies if "usage" in b], [3, 1, 2])

    def test_request_ids(self):
        headers = post(self.server, "/v1/completions", counting(tokens=1), **{"X-Request-Id": "mine-1"})[1]
        self.assertEqual(headers["X-Request-Id"], "mine-1")
        self.assertNotEqual(headers["X-Winnow-Request-Id"], "mine-1")
        headers = post(self.server, "/v1/completions", counting(tokens=1), **{"X-Request-Id": "a b\tc"})[1]
        self.assertEqual(headers["X-Request-Id"], headers["X-Winnow-Request-Id"])
        eventually(lambda: any(e.get("client_id") == "mine-1" for e in self.server.events()), "the id in the log")

    def test_tenants_are_checked(self):
        status, _, answer = post(self.server, "/v1/completions", counting(), **{"X-Winnow-Tenant": "a b"})
        self.assertEqual((status, answer["error"]["code"]), (400, "invalid_metadata"))

    def test_tokens_and_back(self):
        want = list(self.api.tokenize(inference.TokenizeRequest(text=inference.TextPrompt(text="A story"))).ids)
        status, _, answer = post(self.server, "/tokenize", {"prompt": "A story", "return_token_strs": True})
        self.assertEqual((status, answer["tokens"], answer["count"]), (200, want, len(want)))
        self.assertEqual(len(answer["token_strs"]), len(want))
        bare = post(self.server, "/tokenize", {"prompt": "A story", "add_special_tokens": False})[2]["tokens"]
        self.assertEqual(post(self.server, "/detokenize", {"tokens": bare})[2], {"prompt": "A story"})
        chat = list(self.api.tokenize(inference.TokenizeRequest(chat=self.grpc_chat().chat)).ids)
        self.assertEqual(post(self.server, "/tokenize", {"messages": CHAT})[2]["tokens"], chat)
        counted = {"model": "needle", "messages": CHAT, "max_tokens": 1}
        self.assertEqual(post(self.server, "/v1/chat/completions/input_tokens", counted)[2],
                         {"input_tokens": post(self.server, "/v1/chat/completions", counted)[2]["usage"]["prompt_tokens"]})
        asked = {"model": "needle", "input": "How many?", "instructions": "Count."}
        self.assertEqual(post(self.server, "/v1/responses/input_tokens", asked)[2],
                         {"object": "response.input_tokens", "input_tokens": post(self.server, "/v1/responses", asked)[2]["usage"]["input_tokens"]})
        for path, body, field in (("/v1/chat/completions/input_tokens", {"messages": []}, "messages"),
                                  ("/v1/responses/input_tokens", {"input": 3}, "input")):
            status, _, error = post(self.server, path, body)
            self.assertEqual((status, error["error"]["param"]), (400, field))
        self.assertEqual(post(self.server, "/v1/chat/completions/render", {"model": "needle", "messages": CHAT})[2],
                         {"token_ids": chat, "features": None})
        self.assertEqual(post(self.server, "/v1/completions/render", {"prompt": ["A story", want, "x"]})[2][:2],
                         [{"token_ids": want}, {"token_ids": want}])
        self.assertEqual(post(self.server, "/v1/completions/render", {"prompt": "A story"})[2], [{"token_ids": want}])
        for path, body, param in (("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": ""}, "prompt"),
                                  ("/detokenize", {"tokens": [99999999]}, "tokens[0]"), ("/detokenize", {"tokens": "x"}, "tokens"),
                                  ("/v1/chat/completions/render", {"messages": []}, "messages")):
            answer = post(self.server, path, body)
            self.assertEqual((answer[0], answer[2]["error"]["param"]), (400, param), answer)

    def test_messages(self):
        body = {"model": "needle", "max_tokens": 8, "system": [{"type": "text", "text": "Be brief."}], "messages": CHAT}
        want = self.grpc_text(inference.GenerateRequest(
            chat=inference.ChatPrompt(messages=[inference.ChatMessage(role="system", content="Be brief."),
                                                inference.ChatMessage(**CHAT[0])]),
            stopping=inference.StoppingOptions(max_tokens=8)))
        status, _, answer = post(self.server, "/v1/messages", body, **{"X-Api-Key": "any", "anthropic-version": "2023-06-01"})
        self.assertEqual((status, answer["type"], answer["role"], answer["content"]),
                         (200, "message", "assistant", [{"type": "text", "text": want}]))
        self.assertIn(answer["stop_reason"], ("max_tokens", "end_turn"))
        # A billing header in front changes neither the answer nor what is found in the cache.
        billed = {**body, "system": [{"type": "text", "text": "x-anthropic-billing-header: n=1"}, *body["system"]]}
        again = post(self.server, "/v1/messages", billed)[2]
        self.assertEqual(again["content"], answer["content"])
        total = lambda usage: usage["input_tokens"] + usage["cache_read_input_tokens"]
        self.assertEqual(total(again["usage"]), total(answer["usage"]))
        count = post(self.server, "/v1/messages/count_tokens", body)[2]
        self.assertEqual(count, {"input_tokens": total(answer["usage"])})
        data = [json.loads(line.partition("data: ")[2]) for line in events(self.server, "/v1/messages", body)]
        self.assertEqual([e["type"] for e in data if e["type"] != "content_block_delta"],
                         ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"])
        self.assertEqual("".join(e["delta"]["text"] for e in data if e["type"] == "content_block_delta"), want)
        self.assertEqual(data[0]["message"]["usage"]["input_tokens"], count["input_tokens"])
        self.assertEqual(data[-2]["usage"]["output_tokens"], answer["usage"]["output_tokens"])
        part = next(word for word in want.split() if word.isalpha())
        stopped = post(self.server, "/v1/messages", {**body, "stop_sequences": [part]})[2]
        self.assertEqual((stopped["stop_reason"], stopped["stop_sequence"]), ("stop_sequence", part))
        status, _, wrong = post(self.server, "/v1/messages", {**body, "messages": [{"role": "wizard", "content": "x"}]})
        self.assertEqual((status, wrong["type"], wrong["error"]["type"]), (400, "error", "invalid_request_error"))
        self.assertIn("messages[0].role", wrong["error"]["message"])
        self.assertEqual(post(self.server, "/v1/messages", {**body, "model": "x"})[2]["error"]["type"], "not_found_error")

    def test_responses(self):
        body = {"model": "needle", "input": CHAT[0]["content"], "max_output_tokens": 8, "store": False, "include": []}
        want = self.grpc_text(inference.GenerateRequest(chat=self.grpc_chat().chat,
                                                        stopping=inference.StoppingOptions(max_tokens=8)))
        status, _, answer = post(self.server, "/v1/responses", body)
        self.assertEqual((status, answer["object"], answer["output"][0]["content"][0]["text"]), (200, "response", want))
        self.assertIn(answer["status"], ("completed", "incomplete"))
        self.assertIs(answer["background"], False)
        data = [json.loads(line.partition("data: ")[2]) for line in events(self.server, "/v1/responses", body)]
        self.assertEqual([e["type"] for e in data if e["type"] != "response.output_text.delta"], [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response." + answer["status"]])
        self.assertEqual([e["sequence_number"] for e in data], list(range(len(data))))
        self.assertEqual("".join(e["delta"] for e in data if e["type"] == "response.output_text.delta"), want)
        self.assertEqual(data[-1]["response"]["usage"]["output_tokens"], answer["usage"]["output_tokens"])
        self.assertEqual(post(self.server, "/v1/responses", {**body, "previous_response_id": "r"})[2]["error"]["param"],
                         "previous_response_id")
        self.assertEqual(post(self.server, "/v1/responses", {**body, "input": [], "max_output_tokens": 1})[0], 200)


class Keys(unittest.TestCase):
    def test_every_route_but_health_wants_a_key_and_its_name_is_the_tenant(self):
        import hashlib
        with temporary_directory() as directory:
            path = directory / "keys"
            path.write_text("".join(f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n"
                                    for name, key in (("alice", "a-key"), ("bob", "b-key"))))
            with Server("--api-keys", path) as server:
                self.assertEqual(ask(server, "GET", "/health")[0], 200)
                for method, route in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/ping"), ("GET", "/none"),
                                      ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/v1/messages")):
                    for headers in ({}, {"Authorization": "Bearer c-key"}, {"Authorization": "a-key"}, {"X-Api-Key": ""}):
                        status, _, body = ask(server, method, route, "{}" if method == "POST" else None, headers)
                        self.assertEqual((status, body["error"]["type"]), (401, "authentication_error"), (route, headers))
                prompt = "Once upon a time there was a fox. " * 40
                cached = lambda **headers: post(server, "/v1/completions", counting(prompt, 2), **headers)[2]["usage"][
                    "prompt_tokens_details"]["cached_tokens"]
                self.assertEqual(cached(Authorization="Bearer a-key"), 0)
                self.assertEqual(cached(Authorization="bearer b-key"), 0)  # another tenant
                self.assertGreater(cached(**{"X-Api-Key": "a-key"}), 0)
                status, _, body = post(server, "/v1/completions", counting(), Authorization="Bearer a-key",
                                       **{"X-Winnow-Tenant": "bob"})
                self.assertEqual((status, body["error"]["code"]), (403, "tenant_mismatch"))
                path.write_text(f"carol {hashlib.sha256(b'c-key').hexdigest()}\n")
                eventually(lambda: ask(server, "GET", "/version", headers={"X-Api-Key": "c-key"})[0] == 200, "the new key")
                self.assertEqual(ask(server, "GET", "/version", headers={"X-Api-Key": "a-key"})[0], 401)


class Hostile(unittest.TestCase):
    """Whatever one client does, others are served: each test ends with a request that must succeed."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server("--http-read-timeout", "2s", "--slow-reader-timeout", "2s")
        cls.addClassCleanup(cls.server.close)

    def tearDown(self):
        began = time.monotonic()
        # What was cancelled leaves the queue with the engine's next step: until then it may still be full.
        eventually(lambda: post(self.server, "/v1/completions", counting(tokens=2))[0] == 200, "others are served")
        self.assertIsNone(self.server.process.poll())
        eventually(lambda: self.server.metric("winnow_requests_running") == 0, "nothing runs")
        self.assertLess(time.monotonic() - began, PATIENCE)

    def outcome(self, name):
        return self.server.metric(f'winnow_requests_total{{outcome="{name}"}}')

    def half_sent(self, server):
        """Connections that have sent a part of a request."""
        halves = [b"GET /heal", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
                  b"GET /metrics HTTP/1.1\r\nHost:"] * 10
        sockets = [socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE) for _ in halves]
        for connection, data in zip(sockets, halves):
            self.addCleanup(connection.close)
            connection.sendall(data)
        return sockets

    def test_half_sent_requests_are_closed(self):
        for connection in self.half_sent(self.server):
            self.assertEqual(connection.recv(1000), b"")

    def test_half_sent_requests_hold_up_nobody(self):
        with Server("--http-read-timeout", "10m") as server:  # for longer than this waits for an answer
            self.half_sent(server)
            for _ in range(3):
                self.assertEqual(ask(server, "GET", "/metrics")[0], 200)

    def test_what_is_too_large_is_refused_before_it_is_read(self):
        self.assertTrue(raw(self.server, b"GET /health HTTP/1.1\r\nX: " + b"x" * 1000000).startswith(b"HTTP/1.1 431 "))
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1073741824\r\n\r\n"
        self.assertTrue(raw(self.server, head + b"x" * 1000000).startswith(b"HTTP/1.1 413 "))
        endless = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 200
        self.assertTrue(raw(self.server, endless).startswith(b"HTTP/1.1 413 "))
        for length in (b"-1", b"x", b"1e3", b"99999999999999999999"):
            got = raw(self.server, b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n{}")
            self.assertTrue(got.startswith(b"HTTP/1.1 400 "), (length, got))

    def test_disconnects_at_once_are_all_cancelled(self):
        cancelled_before, rejected_before = self.outcome("cancelled"), self.outcome("rejected")
        http_before = self.server.metric("winnow_http_connections")
        body = json.dumps(counting(tokens=20000, stream=True)).encode()
        quiet = json.dumps(counting(tokens=20000)).encode()
        sockets = []
        for i in range(300):
            connection = socket.create_connection(("127.0.0.1", self.server.http_port), timeout=PATIENCE)
            connection.sendall(request_bytes(body if i % 2 else quiet))
            sockets.append(connection)
        cancelled = lambda: self.outcome("cancelled") - cancelled_before
        rejected = lambda: self.outcome("rejected") - rejected_before

        def accepted():
            # Both from one page: between two, one request may go from waiting to running.
            values = dict(line.rpartition(" ")[::2] for line in self.server.metrics_text().splitlines())
            return float(values["winnow_requests_running"]) + float(values["winnow_requests_waiting"])

        eventually(lambda: accepted() + rejected() >= 300, "all are in")
        for i, connection in enumerate(sockets):
            if i % 3 == 0:  # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        eventually(lambda: cancelled() >= 300 - rejected(), "all are cancelled")
        self.assertEqual(cancelled(), 300 - rejected())
        self.assertEqual(self.outcome("invalid"), 0)
        eventually(lambda: self.server.metric("winnow_http_connections") <= http_before, "connections are gone")

    def test_a_slow_reader_loses_its_request_alone(self):
        before = self.outcome("slow_reader")
        connection = connect_slowly(self.server)
        connection.request("POST", "/v1/completions", json.dumps(counting(tokens=20000, stream=True, logprobs=20)))
        eventually(lambda: self.server.metric("winnow_requests_running") == 1, "it runs")
        self.assertEqual(post(self.server, "/v1/completions", counting(tokens=4))[0], 200)
        eventually(lambda: self.outcome("slow_reader") == before + 1, "it is given up")
        connection.close()

    def test_many_disconnected_while_they_send(self):
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", self.server.http_port)) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{\"prompt\"")

    def test_pings_keep_a_waiting_stream_open(self):
        with Server("--max-running", 1, "--http-ping-interval", "20ms") as server:
            runs, waits = connect(server), connect(server)
            for connection, metric in ((runs, "winnow_requests_running"), (waits, "winnow_requests_waiting")):
                connection.request("POST", "/v1/completions", json.dumps(counting(tokens=20000 if connection is runs else 1, stream=True)))
                eventually(lambda: server.metric(metric) == 1, metric)  # noqa: B023
            response = waits.getresponse()
            self.assertEqual(response.read(4), b": \n\n")
            runs.close()
            self.assertTrue(response.read().endswith(b"data: [DONE]\n\n"))
            waits.close()


class Limits(unittest.TestCase):
    def test_idle_connections_beyond_all_limits_keep_nobody_out(self):
        """1,100 idle connections with a soft limit of 1,024 descriptors, and again with a cap of 50 connections."""
        for flags in (["--http-connections", 4096], ["--http-connections", 50]):
            with Server(*flags) as server:
                sockets = []
                for _ in range(1100):
                    sockets.append(socket.create_connection(("127.0.0.1", server.http_port), timeout=PATIENCE))
                eventually(lambda: server.metric("winnow_http_connections_accepted_total") >= 1100, "all were taken")
                self.assertLessEqual(server.metric("winnow_http_connections"), flags[1])
                self.assertEqual(post(server, "/v1/completions", counting(tokens=2))[0], 200)
                for connection in sockets:
                    connection.close()
                self.assertEqual(post(server, "/v1/completions", counting(tokens=2))[0], 200)
                self.assertEqual(Api(server.address).serving(), True)

    def test_overload_is_told_when_to_come_back(self):
        with Server("--queue-requests", 2, "--max-running", 2) as server:
            body = counting(tokens=300)
            with concurrent.futures.ThreadPoolExecutor(30) as pool:
                answers = list(pool.map(lambda _: post(server, "/v1/completions", body), range(30)))
            refused = [a for a in answers if a[0] == 429]
            self.assertEqual({a[0] for a in answers}, {200, 429})
            for _, headers, body in refused:
                self.assertGreaterEqual(int(headers["Retry-After"]), 1)
                self.assertGreaterEqual(int(headers["Retry-After-Ms"]), 1)
                self.assertEqual((body["error"]["type"], body["error"]["code"]), ("rate_limit_error", "queue_full"))

    def test_a_full_queue_refuses_without_reading_what_is_asked(self):
        with Server("--queue-requests", 1, "--max-running", 1) as server:
            streams = [connect(server) for _ in range(2)]
            for stream, metric in zip(streams, ("winnow_requests_running", "winnow_requests_waiting")):
                stream.request("POST", "/v1/completions", json.dumps(counting(tokens=8000, stream=True)))
                eventually(lambda: server.metric(metric) == 1, metric)  # noqa: B023
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
                status, headers, body = post(server, path, "{")
                self.assertEqual((status, body["error"]["type"]), (429, "rate_limit_error"), path)
                self.assertIn("Retry-After", headers)
            for stream in streams:
                stream.close()
            eventually(lambda: post(server, "/v1/completions", "{")[0] == 400, "there is room again")

    def test_a_drain_refuses_what_is_new_and_finishes_what_runs(self):
        with Server("--drain-grace", "10m", "--slow-reader-timeout", "10m") as server:
            # With log-probabilities it is too much to end before it is read.
            connection = connect_slowly(server)
            connection.request("POST", "/v1/completions", json.dumps(counting(tokens=1500, stream=True, logprobs=20)))
            response = connection.getresponse()
            first = response.read(1)
            idle = connect(server)
            self.assertEqual(ask(server, "GET", "/health", connection=idle)[0], 200)
            server.signal(signal.SIGTERM)
            eventually(lambda: any(e["event"] == "drain_begins" for e in server.events()), "the drain begins")
            status, _, body = ask(server, "GET", "/health")
            self.assertEqual((status, body), (503, {"status": "draining"}))
            status, headers, body = ask(server, "POST", "/v1/completions", counting(), connection=idle)
            self.assertEqual((status, body["error"]["code"], headers["Connection"]), (503, "draining", "close"))
            self.assertGreaterEqual(int(headers["Retry-After"]), 1)
            # Counted as over gRPC, and nothing that would not be counted there.
            refused = 'winnow_requests_total{outcome="unavailable"}'
            self.assertEqual(server.metric(refused), 1)
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
                self.assertEqual(post(server, path, {})[0], 503, path)
            self.assertEqual(ask(server, "PUT", "/v1/prefixes/x", {})[0], 503)
            self.assertEqual(server.metric(refused), 5)
            for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/v1/prefixes")):
                self.assertEqual(ask(server, method, path, {} if method == "POST" else None)[0], 503, path)
            self.assertEqual(server.metric(refused), 5)
            told = [e for e in server.events() if e["event"] == "request" and e.get("reason") == "DRAINING"]
            self.assertEqual([e["transport"] for e in told], ["http"] * 5)
            self.assertEqual(ask(server, "GET", "/v1/models")[0], 503)
            self.assertTrue((first + response.read()).endswith(b"data: [DONE]\n\n"))
            self.assertEqual(server.wait(), 0)

    def test_tls_is_grpcs(self):
        with temporary_directory() as directory:
            subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                            "-subj", "/CN=carol", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2",
                            "-keyout", directory / "key", "-out", directory / "cert"], check=True, capture_output=True)
            tls = ["--tls-cert", directory / "cert", "--tls-key", directory / "key"]
            trust = ssl.create_default_context(cafile=directory / "cert")
            # Its own authority, so one certificate does for both sides.
            with Server(*tls, "--tls-client-ca", directory / "cert") as server:
                with self.assertRaises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
                    bare = http.client.HTTPSConnection("127.0.0.1", server.http_port, timeout=PATIENCE, context=trust)
                    ask(server, "GET", "/health", connection=bare)
                self.assertNotIn(b"200 OK", raw(server, b"GET /health HTTP/1.1\r\n\r\n"))
                trust.load_cert_chain(directory / "cert", directory / "key")
                own = http.client.HTTPSConnection("127.0.0.1", server.http_port, timeout=PATIENCE, context=trust)
                self.assertEqual(ask(server, "GET", "/health", connection=own)[0], 200)
                status, _, body = ask(server, "POST", "/v1/completions", counting(tokens=2), {"X-Winnow-Tenant": "bob"}, own)
                self.assertEqual((status, body["error"]["code"]), (403, "tenant_mismatch"))
                self.assertEqual(ask(server, "POST", "/v1/completions", counting(tokens=2), connection=own)[0], 200)
                eventually(lambda: any(e.get("tenant") == "carol" for e in server.events()), "the tenant in the log")

    def test_the_network_needs_tls_or_insecure(self):
        result = run("serve", "--model", MODEL, "--check-config", "--http", "0.0.0.0:0")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--http 0.0.0.0:0 can be reached from the network", result.stderr)


if __name__ == "__main__":
    main()

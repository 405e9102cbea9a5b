"""Structured output and tools, as clients of HTTP and gRPC see them. The small model knows nothing of either: what it
says follows its grammar, or is no call. A model's own calls are the parsers' (tests/unit/server/answer_parser_test.cc)."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import unittest

import grpc
from harness import BIN, MODEL, PATIENCE, Api, Server, inference, main
from test_http import events, post

# In the manner of Hermes; the project's model has a template that knows no tools.
TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.name or "" }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

CHAT = [{"role": "user", "content": "What is the weather?"}]
COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
           "required": ["colour", "n"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["north", "south"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["zone", "days"], "additionalProperties": False}}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def good_colour(value):
    return (list(value) == ["colour", "n"] and value["colour"] in ("red", "green", "blue") and isinstance(value["n"], int)
            and 0 <= value["n"] <= 99)


def good_weather(value):
    return list(value) == ["zone", "days"] and value["zone"] in ("north", "south") and 1 <= value["days"] <= 7


class ToolsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="winnow-e2e-")
        cls.model = os.path.join(cls.directory.name, "hermes")
        shutil.copytree(MODEL, cls.model)
        with open(os.path.join(cls.model, "chat_template.jinja"), "w") as file:
            file.write(TEMPLATE)
        cls.server = Server("--default-max-tokens", 400, model=cls.model)
        cls.api = Api(cls.server.address)
        model = cls.api.get_model(inference.GetModelRequest())
        cls.served = model.structured_output

    @classmethod
    def tearDownClass(cls):
        cls.server.close()
        cls.directory.cleanup()

    def setUp(self):
        if not self.served:
            self.refused("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, "xgrammar")
            self.skipTest("built without xgrammar: scripts/fetch_xgrammar.sh says why")

    def chat(self, **fields):
        status, _, answer = post(self.server, "/v1/chat/completions", {"messages": CHAT, **fields})
        self.assertEqual(status, 200, answer)
        return answer

    def refused(self, path, body, *words):
        status, _, answer = post(self.server, path, body)
        self.assertEqual(status, 400, answer)
        message = json.dumps(answer)
        for word in words:
            self.assertIn(word, message)
        return answer

    def test_every_answer_is_of_the_schema(self):
        kind = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOURS, "strict": True}}
        texts = set()
        for seed in range(12):
            answer = self.chat(response_format=kind, temperature=1.5, seed=seed, n=2, logprobs=True, top_logprobs=1)
            for choice in answer["choices"]:
                self.assertEqual(choice["finish_reason"], "stop")
                self.assertTrue(good_colour(json.loads(choice["message"]["content"])), choice)
                texts.add(choice["message"]["content"])
                # The model's, whatever the grammar says.
                self.assertTrue(any(t["top_logprobs"][0]["token"] != t["token"] for t in choice["logprobs"]["content"]))
        self.assertGreater(len(texts), 6)

    def test_every_way_to_ask_for_structure(self):
        for fields, pattern in (
                ({"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}, "[ab]{3}-[0-9]"),
                ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
                ({"structured_outputs": {"choice": ["left, \"now\"", "right"]}}, "left, \"now\"|right"),
                ({"guided_choice": ["one", "two"]}, "one|two"),
                ({"structured_outputs": {"grammar": "root ::= \"a\" (\"b\" | \"c\") \"d\""}}, "a[bc]d"),
                ({"regex": "(yes|no)!", "ebnf": "", "grammar": None}, "(yes|no)!"),
                ({"ebnf": "root ::= \"a\" (\"b\" | \"c\") \"d\""}, "a[bc]d"),
                ({"grammar": "root ::= [ab] \"-\" [0-9]"}, "[ab]-[0-9]"),
                ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "it"}}}}, "it")):
            text = self.chat(**fields)["choices"][0]["message"]["content"]
            self.assertRegex(text, f"^({pattern})$", fields)
        for fields in ({"structured_outputs": {"json": COLOURS}}, {"structured_outputs": {"json": json.dumps(COLOURS)}}, {"guided_json": COLOURS},
                       {"json_schema": COLOURS}, {"json_schema": json.dumps(COLOURS)}):
            self.assertTrue(good_colour(json.loads(self.chat(**fields)["choices"][0]["message"]["content"])), fields)
        # A text to complete, and the Responses.
        status, _, answer = post(self.server, "/v1/completions", {"prompt": "A colour:", "guided_choice": ["red", "blue"]})
        self.assertEqual((status, answer["choices"][0]["text"] in ("red", "blue")), (200, True), answer)
        status, _, answer = post(self.server, "/v1/responses", {"input": "A colour", "text": {"format": {
            "type": "json_schema", "name": "colour", "schema": COLOURS, "strict": True}}})
        self.assertEqual(status, 200, answer)
        self.assertTrue(good_colour(json.loads(answer["output"][0]["content"][0]["text"])))
        # Any object begins as one; a small model need not come to its end.
        text = self.chat(response_format={"type": "json_object"}, max_tokens=20)["choices"][0]["message"]["content"]
        self.assertTrue(text.startswith("{"), text)

    def test_verified_answers_are_the_dense_ones(self):
        drafted = accepted = 0
        for seed in range(6):
            def ask(policy):
                request = inference.GenerateRequest(
                    text=inference.TextPrompt(text="Once upon a time there was a fox. " * 8 + "A colour"), n=2, top_logprobs=2,
                    sampling=inference.SamplingOptions(temperature=0.3 * seed, seed=seed),
                    stopping=inference.StoppingOptions(max_tokens=60), policy=policy,
                    structured_output=inference.StructuredOutput(json_schema=json.dumps(COLOURS)))
                said = {}
                for message in self.api.generate(request):
                    said.setdefault(message.choice, []).extend(
                        (token.id, token.logprob, [(top.id, top.logprob) for top in token.top]) for token in message.tokens)
                    if message.HasField("finish"):
                        drafts = message.finish.usage.drafts
                return said, drafts
            dense = ask("dense")[0]
            for policy in ("window:sink=1,window=8,dense_layers=0,from=0,verify=4", "dense:lookup=on,verify=auto"):
                said, drafts = ask(policy)
                self.assertEqual(said, dense, (seed, policy))
                drafted, accepted = drafted + drafts.verified_tokens, accepted + drafts.accepted_tokens
        self.assertGreater(drafted, accepted)
        self.assertGreater(accepted, 0)

    def test_grpc(self):
        request = inference.GenerateRequest(
            text=inference.TextPrompt(text="A colour"), sampling=inference.SamplingOptions(temperature=1, seed=3), n=3,
            stopping=inference.StoppingOptions(max_tokens=300),
            structured_output=inference.StructuredOutput(json_schema=json.dumps(COLOURS)))
        texts = {}
        for message in self.api.generate(request):
            texts[message.choice] = texts.get(message.choice, "") + message.text
        self.assertEqual(len(texts), 3)
        for text in texts.values():
            self.assertTrue(good_colour(json.loads(text)), text)
        request.structured_output.regex = "(a"
        with self.assertRaises(grpc.RpcError) as caught:
            list(self.api.generate(request))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("structured_output", caught.exception.details())
        request.structured_output.choice.texts.append("x")
        request.stopping.ignore_eos = True
        with self.assertRaises(grpc.RpcError) as caught:
            list(self.api.generate(request))
        self.assertIn("ignore_eos", caught.exception.details())

    def test_constraints_are_counted_by_kind(self):
        asked = {
            "json_schema": {"structured_outputs": {"json": COLOURS}},
            "json_object": {"response_format": {"type": "json_object"}},
            "regex": {"structured_outputs": {"regex": "[ab]{3}"}},
            "choice": {"structured_outputs": {"choice": ["left", "right"]}},
            "grammar": {"structured_outputs": {"grammar": "root ::= \"a\""}},
            "structural_tag": {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "it"}}}}}

        def counted():
            of = {kind: self.server.metric(f'winnow_structured_requests_total{{kind="{kind}"}}') for kind in asked}
            return of, self.server.metric("winnow_structured_compile_seconds_count")

        for kind, fields in {"": {"max_tokens": 1}, **asked}.items():
            with self.subTest(kind=kind):
                (before, compiled), _ = counted(), self.chat(**fields)
                after, compiled_now = counted()
                self.assertEqual({name: after[name] - before[name] for name in asked}, {name: float(name == kind) for name in asked})
                self.assertEqual(compiled_now - compiled, float(kind != ""))
        before, _ = counted()
        self.chat(tools=[WEATHER], tool_choice="required")
        self.assertEqual(counted()[0]["structural_tag"] - before["structural_tag"], 1)

    def test_stop_strings_and_max_tokens_end_a_structured_answer_as_any_other(self):
        answer = self.chat(structured_outputs={"regex": "(abc ){20}"}, stop=["c "])
        self.assertEqual((answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"],
                          answer["choices"][0]["stop_reason"]), ("ab", "stop", "c "))
        answer = self.chat(structured_outputs={"regex": "(abc ){20}"}, max_tokens=2)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")

    def test_hostile_and_impossible_structures_are_refused_while_others_are_served(self):
        schema = lambda schema: {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        nested = {"type": "string"}
        for _ in range(70):
            nested = {"type": "array", "items": nested}
        path = "/v1/chat/completions"
        self.refused(path, schema(nested), "nested deeper")
        self.refused(path, schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}), "response_format", "uniqueItems")
        self.refused(path, schema({"properties": {"a": {"minLength": 2}}}), "#/properties/a", "minLength")
        self.refused(path, schema({"type": "object", "properties": {f"p{i}": {} for i in range(600)}}), "members")
        self.refused(path, {"messages": CHAT, "guided_regex": "a" * 20000}, "guided_regex", "bytes")
        self.refused(path, {"messages": CHAT, "guided_regex": "a", "response_format": {"type": "json_object"}}, "contradicts")
        self.refused(path, {"messages": CHAT, "regex": "a", "ebnf": "root ::= \"a\""}, "ebnf", "contradicts")
        self.refused(path, {"messages": CHAT, "grammar": {"type": "regex", "value": "a"}}, "grammar", "must be a string")
        self.refused(path, {"messages": CHAT, "structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "whitespace_pattern")
        self.refused(path, {"messages": CHAT, "guided_regex": "a", "min_tokens": 3}, "min_tokens")
        # One that takes long keeps nobody else from a plain answer.
        slow = threading.Thread(target=lambda: post(self.server, path, {"messages": CHAT, "max_tokens": 1, "guided_regex":
                                                                        "(((a|b|c)*[d-z]{1,900}){1,900}x){1,900}"}))
        slow.start()
        answered = 0
        while slow.is_alive():
            self.chat(max_tokens=4)
            answered += 1
        self.assertGreater(answered, 2)  # one that had to wait for it would be the last
        self.assertEqual(self.chat(guided_choice=["after"])["choices"][0]["message"]["content"], "after")

    def test_the_chat_command_keeps_its_history_and_shows_what_was_read(self):
        lines = "\n".join(["My name is Ann.", "/policy window", "And yours?", "/policy nonsense", "Hm?", "/undo", "/history", "/policy dense", "Again?"])
        chat = subprocess.run([BIN, "chat", "--server", self.server.address, "--system", "Be brief.", "--max-tokens", "8"],
                              input=lines, capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(chat.returncode, 0, chat.stderr)
        usage = [[int(n) for n in re.findall(r"\d+", line)[:2]] for line in chat.stderr.splitlines() if " tokens, " in line]
        self.assertEqual(len(usage), 3, chat.stderr)
        self.assertGreater(usage[1][0], usage[0][0] + 8)  # the second prompt has the first question and its answer
        self.assertRegex(chat.stderr, r"; window \(fast\) read ")
        self.assertIn("winnow chat: INVALID_ARGUMENT", chat.stderr)
        # One pair is forgotten, and what was refused never was part of it.
        self.assertIn("user: My name is Ann.", chat.stderr)
        self.assertNotIn("user: And yours?", chat.stderr)
        self.assertNotIn("user: Hm?", chat.stderr)

    # ---- tools ----

    def test_required_and_named_tools_are_called(self):
        seen = set()
        for seed in range(8):
            answer = self.chat(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, temperature=1.2, seed=seed)
            choice = answer["choices"][0]
            self.assertEqual((choice["finish_reason"], choice["message"]["content"]), ("tool_calls", None), answer)
            self.assertEqual(len(choice["message"]["tool_calls"]), 1)
            call = choice["message"]["tool_calls"][0]
            self.assertEqual(call["type"], "function")
            self.assertRegex(call["id"], "^[A-Za-z0-9]{9}$")
            arguments = json.loads(call["function"]["arguments"])
            self.assertTrue(good_weather(arguments) if call["function"]["name"] == "get_weather" else arguments == {}, call)
            seen.add(call["function"]["name"])
        self.assertEqual(seen, {"get_weather", "get_time"})
        answer = self.chat(tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "get_weather"}})
        call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        self.assertEqual((call["name"], good_weather(json.loads(call["arguments"]))), ("get_weather", True))

    def test_streams_give_a_name_once_and_arguments_in_pieces(self):
        # Arguments of more tokens than are kept for a reader, so that however late it reads they are several pieces.
        zones = {"type": "array", "items": {"enum": ["north", "south"]}, "minItems": 200, "maxItems": 200}
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object", "properties": {"zones": zones}, "required": ["zones"], "additionalProperties": False}}}
        data = events(self.server, "/v1/chat/completions", {"messages": CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 4000,
                                                            "parallel_tool_calls": False, "stream_options": {"include_usage": True}})
        self.assertEqual(data[-1], "[DONE]")
        deltas = [c["choices"][0] for c in map(json.loads, data[:-2])]
        calls = [d["delta"]["tool_calls"][0] for d in deltas if d["delta"].get("tool_calls")]
        self.assertEqual([c["function"]["name"] for c in calls if "name" in c["function"]], ["get_weather"])
        self.assertTrue(all(c["index"] == 0 for c in calls))
        self.assertEqual(["id" in c for c in calls], [True] + [False] * (len(calls) - 1))
        self.assertGreater(len(calls), 1)
        said = json.loads("".join(c["function"]["arguments"] for c in calls))
        self.assertEqual((len(said["zones"]), set(said["zones"]) - {"north", "south"}), (200, set()))
        self.assertEqual(deltas[-1]["finish_reason"], "tool_calls")
        self.assertFalse(any(d["delta"].get("content") for d in deltas))
        self.assertGreater(json.loads(data[-2])["usage"]["completion_tokens"], 256)

    def test_earlier_calls_and_results_reach_the_template(self):
        turns = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {
                    "name": "get_weather", "arguments": "{\"zone\": \"north\", \"days\": 2, \"a\": {\"b\": 1}}"}}]},
                 {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}]
        want = ("<|system|>\n" + json.dumps(WEATHER) + "\n<|end|>\n<|user|>\nWhat is the weather?<|end|>\n<|assistant|>\n<tool_call>\n"
                "{\"name\": \"get_weather\", \"arguments\": {\"zone\": \"north\", \"days\": 2, \"a\": {\"b\": 1}}}\n</tool_call><|end|>\n"
                "<|tool|>get_weather\nrain<|end|>\n<|assistant|>\n")

        def rendered(body):
            status, _, answer = post(self.server, "/v1/chat/completions/render", body)
            self.assertEqual(status, 200, answer)
            return post(self.server, "/detokenize", {"tokens": answer["token_ids"]})[2]["prompt"]

        self.assertTrue(rendered({"messages": turns, "tools": [WEATHER]}).endswith(want), rendered({"messages": turns, "tools": [WEATHER]}))
        self.assertNotIn("get_weather\"", rendered({"messages": CHAT, "tools": [WEATHER], "tool_choice": "none"}))
        # Anthropic's form of the same conversation is the same prompt.
        own = WEATHER["function"]
        status, _, counted = post(self.server, "/v1/messages/count_tokens", {
            "tools": [{"name": own["name"], "description": own["description"], "input_schema": own["parameters"]}],
            "messages": [*CHAT, {"role": "assistant", "content": [{"type": "tool_use", "id": "abcdefghi", "name": "get_weather",
                                                                   "input": {"zone": "north", "days": 2, "a": {"b": 1}}}]},
                         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": [{"type": "text", "text": "rain"}]}]}]})
        self.assertEqual(status, 200, counted)
        whole = post(self.server, "/tokenize", {"messages": turns, "tools": [WEATHER]})[2]
        self.assertEqual(counted["input_tokens"], whole["count"])
        self.refused("/v1/chat/completions", {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}, *CHAT]}, "arguments")

    def test_what_cannot_be_done_with_tools_is_refused_by_name(self):
        path = "/v1/chat/completions"
        self.refused(path, {"messages": CHAT, "tool_choice": "required"}, "tool_choice")
        self.refused(path, {"messages": CHAT, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "among")
        self.refused(path, {"messages": CHAT, "tools": [WEATHER, WEATHER]}, "twice")
        self.refused(path, {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name")
        self.refused(path, {"messages": CHAT, "tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice")
        self.refused("/v1/completions", {"prompt": "x", "tools": [WEATHER]}, "tools")
        with Server("--tool-parser", "none", model=self.model) as server:
            status, _, answer = post(server, path, {"messages": CHAT, "tools": [WEATHER]})
            self.assertEqual((status, answer["error"]["param"]), (400, "tools"), answer)

    def test_responses(self):
        tool = {"type": "function", **WEATHER["function"], "strict": True}
        body = {"input": "The weather?", "tools": [tool, {"type": "web_search"}], "tool_choice": "required", "parallel_tool_calls": False}
        status, _, answer = post(self.server, "/v1/responses", body)
        self.assertEqual(status, 200, answer)
        call, = answer["output"]
        self.assertEqual((call["type"], call["name"], good_weather(json.loads(call["arguments"]))), ("function_call", "get_weather", True))
        self.assertEqual(answer["tools"][0]["name"], "get_weather")
        again = {"input": [{"role": "user", "content": "The weather?"}, call,
                           {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}], "tools": [tool], "max_output_tokens": 4}
        status, _, answer = post(self.server, "/v1/responses", again)
        self.assertEqual(status, 200, answer)
        lines = events(self.server, "/v1/responses", body)
        got = [json.loads(line.split("\ndata: ", 1)[1]) for line in lines]
        kinds = [e["type"] for e in got]
        self.assertEqual(kinds[:3], ["response.created", "response.in_progress", "response.output_item.added"])
        self.assertEqual(kinds[-3:], ["response.function_call_arguments.done", "response.output_item.done", "response.completed"])
        self.assertEqual([e["sequence_number"] for e in got], list(range(len(got))))
        arguments = "".join(e["delta"] for e in got if e["type"] == "response.function_call_arguments.delta")
        self.assertEqual(arguments, got[-1]["response"]["output"][0]["arguments"])
        self.assertTrue(good_weather(json.loads(arguments)))

    def test_messages(self):
        own = WEATHER["function"]
        body = {"max_tokens": 300, "messages": CHAT, "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
                "tools": [{"name": own["name"], "input_schema": own["parameters"]}]}
        status, _, answer = post(self.server, "/v1/messages", body)
        self.assertEqual((status, answer["stop_reason"]), (200, "tool_use"), answer)
        block, = answer["content"]
        self.assertEqual((block["type"], block["name"], good_weather(block["input"])), ("tool_use", "get_weather", True))
        lines = events(self.server, "/v1/messages", body)
        got = [json.loads(line.split("\ndata: ", 1)[1]) for line in lines]
        self.assertEqual([e["type"] for e in got if e["type"] != "content_block_delta"],
                         ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"])
        self.assertEqual((got[1]["content_block"]["name"], got[1]["content_block"]["input"]), ("get_weather", {}))
        text = "".join(e["delta"]["partial_json"] for e in got if e["type"] == "content_block_delta")
        self.assertTrue(good_weather(json.loads(text)))
        self.assertEqual(got[-2]["delta"]["stop_reason"], "tool_use")
        self.refused("/v1/messages", {**body, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124")
        # One that Anthropic's servers would run is passed over: the others stay.
        searching = {**body, "tools": [*body["tools"], {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}
        count = lambda asked: post(self.server, "/v1/messages/count_tokens", asked)[2]["input_tokens"]
        self.assertEqual(count(searching), count(body))


if __name__ == "__main__":
    main()

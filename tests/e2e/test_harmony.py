"""OpenAI's Harmony format (gpt-oss), as clients of HTTP and gRPC see it. The small model has another vocabulary, whose control tokens are renamed
here, and knows nothing of channels: its answers follow grammars, which name them token by token. What a model writes of its own
accord is the parser's (tests/unit/server/answer_parser_test.cc)."""
import json
import os
import shutil
import tempfile
import unittest

from harness import MODEL, SOURCE, Api, Server, inference, main
from test_http import chunks, events, post
from test_tools import CHAT, COLOURS, TIME, WEATHER, good_colour, good_weather

# Ids stay. "<|end_of_text|>" is the model's own end; "<|call|>" is one as the format has it.
RENAMED = {"<|system|>": "<|start|>", "<|user|>": "<|channel|>", "<|assistant|>": "<|message|>", "<|pad|>": "<|constrain|>", "<|reserved_0|>": "<|call|>"}
START, CHANNEL, MESSAGE, END, CALL = 3, 4, 5, 2, 7
MARKERS = ("<|", "|>", "\xfe", "\xff", "\ufffd")
FINAL = [{"type": "token", "token": CHANNEL}, {"type": "const_string", "value": "final"}, {"type": "token", "token": MESSAGE}]


def says(*parts):
    """The form of an answer that is this text."""
    elements = [part if isinstance(part, dict) else {"type": "const_string", "value": part} for part in parts]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


class HarmonyTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="winnow-e2e-")
        cls.addClassCleanup(directory.cleanup)
        cls.model = os.path.join(directory.name, "harmony")
        shutil.copytree(MODEL, cls.model)
        path = os.path.join(cls.model, "tokenizer.json")
        with open(path) as file:
            text = file.read()
        for name, other in RENAMED.items():
            text = text.replace(name, other)
        with open(path, "w") as file:
            file.write(text)
        # The model's own format ends a turn with "<|end|>".
        with open(os.path.join(cls.model, "generation_config.json"), "w") as file:
            json.dump({"eos_token_id": 1}, file)
        shutil.copy(SOURCE / "tests/golden/chat/gpt_oss.jinja", os.path.join(cls.model, "chat_template.jinja"))
        cls.server = Server("--default-max-tokens", 400, model=cls.model)
        cls.addClassCleanup(cls.server.close)
        cls.api = Api(cls.server.address)
        cls.described = cls.api.get_model(inference.GetModelRequest())
        # Tokens by which a header may begin that names the reasoning.
        vocabulary = json.loads(text)["model"]["vocab"]
        cls.thinks = [id for token, id in vocabulary.items() if token and "analysis".startswith(token)]

    def setUp(self):
        if not self.described.structured_output:
            self.skipTest("built without xgrammar: scripts/fetch_xgrammar.sh says why")

    def post(self, path, body):
        status, _, answer = post(self.server, path, body)
        self.assertEqual(status, 200, answer)
        return answer

    def chat(self, **fields):
        return self.post("/v1/chat/completions", {"messages": CHAT, **fields})

    def rendered(self, **fields):
        answer = self.post("/v1/chat/completions/render", {"messages": CHAT, **fields})
        return post(self.server, "/detokenize", {"tokens": answer["token_ids"]})[2]["prompt"]

    def refused(self, path, body, *words):
        status, _, answer = post(self.server, path, body)
        self.assertEqual(status, 400, answer)
        for word in words:
            self.assertIn(word, json.dumps(answer))

    def hides(self, value):
        text = json.dumps(value, ensure_ascii=False)
        for mark in (*MARKERS, "functions", "commentary"):
            self.assertNotIn(mark, text)

    def without_thoughts(self):
        return {str(id): -100 for id in self.thinks}

    # ---- answers ----

    def test_the_format_is_found_and_its_ends_are_the_models(self):
        self.assertEqual(list(self.described.eos_token_ids), [1, CALL])

    def test_content_is_that_of_the_final_message(self):
        answer = self.chat(response_format=says("It is <|end|>, so to say."), logit_bias=self.without_thoughts())
        message = answer["choices"][0]["message"]
        # Text that only reads like a marker is text.
        self.assertEqual((message["content"], answer["choices"][0]["finish_reason"]), ("It is <|end|>, so to say.", "stop"))
        self.assertNotIn("reasoning", message)
        data = chunks(self.server, "/v1/chat/completions", {"messages": CHAT, "response_format": says("It is it."),
                                                            "logit_bias": self.without_thoughts()})
        self.assertEqual("".join(c["choices"][0]["delta"].get("content", "") for c in data), "It is it.")
        self.hides(data)

    def test_reasoning_comes_apart(self):
        # Some answers begin with a thought, and some of these come to its end.
        thought, bias = set(), {str(END): 8, **{str(id): 2 for id in self.thinks}}
        for seed in range(16):
            fields = {"temperature": 1.5, "seed": seed, "logit_bias": bias, "max_tokens": 300,
                      "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOURS}}}
            answer = self.chat(**fields)
            choice = answer["choices"][0]
            if choice["finish_reason"] == "length":
                continue
            self.assertTrue(good_colour(json.loads(choice["message"]["content"])), choice)
            reasoning = choice["message"].get("reasoning_content", "")
            self.assertEqual(choice["message"].get("reasoning", ""), reasoning)
            if not reasoning:
                continue
            thought.add(reasoning)
            self.assertGreater(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0)
            data = chunks(self.server, "/v1/chat/completions", {"messages": CHAT, **fields})
            deltas = [c["choices"][0]["delta"] for c in data]
            self.assertEqual("".join(d.get("reasoning_content", "") for d in deltas), reasoning)
            self.assertEqual("".join(d.get("content", "") for d in deltas), choice["message"]["content"])
            asked = {"messages": CHAT, "max_tokens": 300, "temperature": 1.5, "seed": seed, "logit_bias": bias,
                     "output_format": {"type": "json_schema", "schema": COLOURS}}
            blocks = self.post("/v1/messages", {**asked, "thinking": {"type": "enabled", "budget_tokens": 100}})["content"]
            self.assertEqual([(b["type"], b.get("thinking", b.get("text"))) for b in blocks],
                             [("thinking", reasoning), ("text", choice["message"]["content"])])
            self.assertEqual([b["type"] for b in self.post("/v1/messages", asked)["content"]], ["text"])
            items = self.post("/v1/responses", {"input": CHAT[0]["content"], "max_output_tokens": 300, "temperature": 1.5, "seed": seed,
                                                "logit_bias": bias, "text": {"format": {"type": "json_schema", "name": "c", "schema": COLOURS}}})
            self.assertEqual([(i["type"], i["content"][0]["text"]) for i in items["output"]],
                             [("reasoning", reasoning), ("message", choice["message"]["content"])])
        self.assertGreater(len(thought), 1, "answers that think")

    def test_required_and_named_tools_are_called(self):
        seen = set()
        for seed in range(8):
            answer = self.chat(tools=[WEATHER, TIME], tool_choice="required", temperature=1.2, seed=seed,
                               logit_bias={**self.without_thoughts(), str(END): 5})
            choice = answer["choices"][0]
            self.assertEqual(choice["finish_reason"], "tool_calls", answer)
            call, = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            self.assertTrue(good_weather(arguments) if call["function"]["name"] == "get_weather" else arguments == {}, call)
            seen.add(call["function"]["name"])
            self.assertNotIn("<|", json.dumps(choice))
        self.assertEqual(seen, {"get_weather", "get_time"})
        named = {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "parallel_tool_calls": False,
                 "logit_bias": {**self.without_thoughts(), str(MESSAGE): -100}}
        data = chunks(self.server, "/v1/chat/completions", {"messages": CHAT, **named})
        calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in data if c["choices"][0]["delta"].get("tool_calls")]
        self.assertEqual([c["function"]["name"] for c in calls if "name" in c["function"]], ["get_weather"])
        self.assertTrue(good_weather(json.loads("".join(c["function"]["arguments"] for c in calls))))
        self.assertEqual(data[-1]["choices"][0]["finish_reason"], "tool_calls")
        self.assertNotIn("<|", json.dumps(data))

    def test_calls_of_the_other_apis(self):
        own = WEATHER["function"]
        bias = {**self.without_thoughts(), str(MESSAGE): -100}
        body = {"max_tokens": 300, "messages": CHAT, "tool_choice": {"type": "any"}, "logit_bias": bias,
                "tools": [{"name": own["name"], "input_schema": own["parameters"]}]}
        answer = self.post("/v1/messages", body)
        block, = answer["content"]
        self.assertEqual((block["type"], block["name"], good_weather(block["input"]), answer["stop_reason"]), ("tool_use", "get_weather", True, "tool_use"))
        got = [json.loads(line.split("\ndata: ", 1)[1]) for line in events(self.server, "/v1/messages", body)]
        self.assertEqual([e["type"] for e in got if e["type"] != "content_block_delta"],
                         ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"])
        self.hides(got)
        body = {"input": "The weather?", "tools": [{"type": "function", **own}], "tool_choice": "required", "logit_bias": bias}
        call, = self.post("/v1/responses", body)["output"]
        self.assertEqual((call["type"], call["name"], good_weather(json.loads(call["arguments"]))), ("function_call", "get_weather", True))
        got = [json.loads(line.split("\ndata: ", 1)[1]) for line in events(self.server, "/v1/responses", body)]
        self.assertEqual(got[-1]["type"], "response.completed")
        self.assertTrue(good_weather(json.loads(got[-1]["response"]["output"][0]["arguments"])))

    def test_strict_arguments_are_kept_where_the_model_may_call_or_not(self):
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        for seed in range(6):
            choice = self.chat(tools=[strict, TIME], temperature=1.5, seed=seed, max_tokens=200, logit_bias={str(END): 5})["choices"][0]
            self.assertNotIn("<|", json.dumps(choice["message"]))
            for call in choice["message"].get("tool_calls", []):
                if choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather":
                    self.assertTrue(good_weather(json.loads(call["function"]["arguments"])))

    def test_stop_strings_are_of_what_the_model_says_not_of_its_headers(self):
        fields = {"response_format": says("It is over, finally."), "logit_bias": self.without_thoughts()}
        choice = self.chat(**fields, stop=["channel", "assistant", "message"])["choices"][0]
        self.assertEqual((choice["message"]["content"], choice["stop_reason"]), ("It is over, finally.", None))
        choice = self.chat(**fields, stop=["final"])["choices"][0]
        self.assertEqual((choice["message"]["content"], choice["stop_reason"]), ("It is over, ", "final"))

    def test_texts_that_are_asked_for_raw_are_as_ever(self):
        form = says(*FINAL, "It is it.")
        body = {"prompt": "Say it.", "response_format": form}
        self.assertEqual(self.post("/v1/completions", body)["choices"][0]["text"], "finalIt is it.")
        self.assertEqual(self.post("/v1/completions", {**body, "skip_special_tokens": False})["choices"][0]["text"],
                         "<|channel|>final<|message|>It is it.")
        for shows, want in ((False, "finalIt is it."), (True, "<|channel|>final<|message|>It is it.")):
            request = inference.GenerateRequest(
                chat=inference.ChatPrompt(messages=[inference.ChatMessage(role="user", content="Say it.")]), show_special_tokens=shows,
                stopping=inference.StoppingOptions(max_tokens=100),
                structured_output=inference.StructuredOutput(structural_tag=json.dumps(form)))
            self.assertEqual("".join(message.text for message in self.api.generate(request)), want)

    # ---- prompts ----

    def test_efforts_reach_the_prompt(self):
        for fields, want in (({}, "medium"), ({"reasoning_effort": "high"}, "high"), ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low")):
            prompt = self.rendered(**fields)
            self.assertIn(f"Reasoning: {want}\n", prompt)
            self.assertTrue(prompt.startswith("<|start|>system<|message|>You are ChatGPT"), prompt)
            self.assertTrue(prompt.endswith("<|start|>user<|message|>What is the weather?<|end|><|start|>assistant"), prompt)
        self.assertIn("You are a test.\n", self.rendered(chat_template_kwargs={"model_identity": "You are a test."}))
        path = "/v1/chat/completions"
        self.refused(path, {"messages": CHAT, "reasoning_effort": "minimal"}, "reasoning_effort", "low, medium and high")
        self.refused(path, {"messages": CHAT, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "contradicts")
        self.refused("/v1/responses", {"input": "x", "reasoning": {"effort": "none"}}, "reasoning.effort")
        counts = [self.post("/v1/responses/input_tokens", {"input": "x", "reasoning": {"effort": effort}})["input_tokens"] for effort in ("low", "high")]
        self.assertEqual(len(counts), 2)

    def test_earlier_turns_reach_the_prompt_whole(self):
        call = lambda id, name, arguments: {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        turns = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, *CHAT,
                 {"role": "assistant", "content": "I look.", "reasoning_content": "Two of them.", "tool_calls": [
                     call("a", "get_weather", {"zone": "north", "days": 2}), call("b", "get_time", {})]},
                 {"role": "tool", "tool_call_id": "b", "content": "noon"}, {"role": "tool", "tool_call_id": "a", "content": "\"rain\""},
                 {"role": "system", "content": "Hurry."}]
        prompt = self.rendered(messages=turns, tools=[WEATHER, TIME])
        want = ("<|start|>user<|message|>What is the weather?<|end|><|start|>assistant<|channel|>analysis<|message|>Two of them.\n\nI look.<|end|>"
                "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{\"zone\": \"north\", \"days\": 2}<|call|>"
                "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>\"\\\"rain\\\"\"<|end|>"
                "<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>"
                "<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>\"noon\"<|end|>"
                "<|start|>user<|message|>Hurry.<|end|><|start|>assistant")
        self.assertTrue(prompt.endswith(want), prompt)
        self.assertIn("# Instructions\n\nBe brief.\n\nBe kind.\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n// The weather\ntype get_weather = (_: {\n"
                      "zone: any,\ndays: number,\n}) => any;\n\n// \ntype get_time = () => any;\n\n", prompt)
        # Responses and Messages make the same prompt of the same conversation.
        own = lambda tool: {"name": tool["function"]["name"], **({"description": tool["function"]["description"]} if tool is WEATHER else {})}
        count = self.post("/tokenize", {"messages": turns[:1] + turns[2:6], "tools": [WEATHER, TIME]})["count"]
        items = [{"role": "user", "content": CHAT[0]["content"]},
                 {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Two of them."}]},
                 {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                 {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{\"zone\": \"north\", \"days\": 2}"},
                 {"type": "function_call", "call_id": "b", "name": "get_time", "arguments": "{}"},
                 {"type": "function_call_output", "call_id": "b", "output": "noon"}, {"type": "function_call_output", "call_id": "a", "output": "\"rain\""}]
        tools = [{"type": "function", **own(tool), "parameters": tool["function"]["parameters"]} for tool in (WEATHER, TIME)]
        self.assertEqual(self.post("/v1/responses/input_tokens", {"instructions": "Be brief.", "input": items, "tools": tools})["input_tokens"], count)
        blocks = [{"type": "thinking", "thinking": "Two of them.", "signature": ""}, {"type": "text", "text": "I look."},
                  {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"zone": "north", "days": 2}},
                  {"type": "tool_use", "id": "b", "name": "get_time", "input": {}}]
        results = [{"type": "tool_result", "tool_use_id": "b", "content": "noon"}, {"type": "tool_result", "tool_use_id": "a", "content": "\"rain\""}]
        asked = {"system": "Be brief.", "messages": [*CHAT, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}],
                 "tools": [{**own(tool), "input_schema": tool["function"]["parameters"]} for tool in (WEATHER, TIME)]}
        self.assertEqual(self.post("/v1/messages/count_tokens", asked)["input_tokens"], count)

    def test_what_cannot_be_is_refused_by_name(self):
        path = "/v1/chat/completions"
        self.refused(path, {"messages": CHAT, "tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice")
        self.refused(path, {"messages": CHAT, "response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, "format")
        self.refused(path, {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
                     "response_format", "not")
        self.assertNotIn("namespace functions", self.rendered(tools=[WEATHER], tool_choice="none"))
        for flags, word in ((("--tool-parser", "hermes", "--reasoning-parser", "harmony"), "hermes"), (("--reasoning-parser", "think"), "harmony")):
            with self.assertRaisesRegex(RuntimeError, word):
                Server(*flags, model=self.model)
        with self.assertRaisesRegex(RuntimeError, "control token"):
            Server("--tool-parser", "harmony")
        with Server("--tool-parser", "none", model=self.model) as server:
            status, _, answer = post(server, path, {"messages": CHAT, "tools": [WEATHER]})
            self.assertEqual((status, answer["error"]["param"]), (400, "tools"), answer)


if __name__ == "__main__":
    main()

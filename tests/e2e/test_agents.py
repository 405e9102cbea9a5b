#!/usr/bin/python3
"""Requests in the shape in which coding agents send them, replayed: Codex on /v1/responses, Claude Code on /v1/messages. agents/ has the bodies,
written after what others recorded of them (field by field, the texts are our own). Every event is checked in its order, and each follow-up finds the prompt
before it, whatever the client changes from request to request."""
import http.client
import json
import os
import shutil
import tempfile
import unittest

from harness import MODEL, PATIENCE, SOURCE, Server, main
from test_http import post
from test_tools import TEMPLATE

AGENTS = SOURCE / "tests/e2e/agents"
SMALL = 512  # tokens of a context that agents run out of
CODEX_HEADERS = {"content-type": "application/json", "accept": "text/event-stream", "originator": "codex_cli_rs", "user-agent": "codex_cli_rs/0.1",
                 "authorization": "Bearer none", "conversation_id": "019a", "session_id": "019a"}
CLAUDE_HEADERS = {"content-type": "application/json", "accept": "application/json", "x-api-key": "none", "anthropic-version": "2023-06-01",
                  "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "x-app": "cli", "user-agent": "claude-cli/2.1.0 (external, cli)"}


def body(name):
    return json.loads((AGENTS / f"{name}.json").read_text())


class AgentsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="winnow-e2e-")
        cls.addClassCleanup(cls.directory.cleanup)
        model = os.path.join(cls.directory.name, "hermes")
        shutil.copytree(MODEL, model)
        with open(os.path.join(model, "chat_template.jinja"), "w") as file:
            file.write(TEMPLATE)
        cls.server = Server("--default-max-tokens", 24, "--model-name", "coder", model=model)
        cls.addClassCleanup(cls.server.close)
        cls.small = Server("--max-context", SMALL, "--model-name", "coder", model=model)
        cls.addClassCleanup(cls.small.close)

    def stream(self, path, request, headers, server=None):
        """(event, data) of each event; comments are left out."""
        connection = http.client.HTTPConnection("127.0.0.1", (server or self.server).http_port, timeout=PATIENCE)
        self.addCleanup(connection.close)
        connection.request("POST", path, json.dumps(request), headers)
        response = connection.getresponse()
        text = response.read().decode()
        self.assertEqual((response.status, response.getheader("content-type").split(";")[0]), (200, "text/event-stream"), text)
        self.assertTrue(text.endswith("\n\n"))
        out = []
        for part in text[:-2].split("\n\n"):
            if part.startswith(":"):
                continue
            event, data = part.split("\n")
            self.assertTrue(event.startswith("event: ") and data.startswith("data: "), part)
            out.append((event[len("event: "):], json.loads(data[len("data: "):])))
            self.assertEqual(out[-1][0], out[-1][1]["type"])
        return out

    # ---- Codex ----

    def codex(self, name):
        """The response of the last event; all events are checked on the way."""
        events = self.stream("/v1/responses", body(name), CODEX_HEADERS)
        datas = [data for _, data in events]
        self.assertEqual([d["sequence_number"] for d in datas], list(range(len(datas))))
        self.assertEqual([kind for kind, _ in events[:2]], ["response.created", "response.in_progress"])
        response_id = datas[0]["response"]["id"]
        for data in datas[:2]:
            self.assertEqual((data["response"]["id"], data["response"]["status"], data["response"]["output"]), (response_id, "in_progress", []))
        last = datas[-1]["response"]
        self.assertEqual(last["id"], response_id)
        self.assertEqual(events[-1][0], {"completed": "response.completed", "incomplete": "response.incomplete"}[last["status"]])
        at, items = 2, []
        while at < len(events) - 1:
            self.assertEqual(events[at][0], "response.output_item.added")
            item = datas[at]["item"]
            self.assertEqual((datas[at]["output_index"], item["type"], item["status"]), (len(items), "message", "in_progress"))
            self.assertEqual(events[at + 1][0], "response.content_part.added")
            at += 2
            text = ""
            while events[at][0] == "response.output_text.delta":
                self.assertEqual((datas[at]["item_id"], datas[at]["output_index"], datas[at]["content_index"]), (item["id"], len(items), 0))
                text += datas[at]["delta"]
                at += 1
            self.assertEqual([kind for kind, _ in events[at:at + 3]],
                             ["response.output_text.done", "response.content_part.done", "response.output_item.done"])
            self.assertEqual((datas[at]["text"], datas[at + 1]["part"]["text"], datas[at + 2]["item"]["content"][0]["text"]), (text,) * 3)
            items.append(datas[at + 2]["item"])
            at += 3
        self.assertEqual(last["output"], items)
        self.assertEqual(len(items), 1)
        usage = last["usage"]
        self.assertEqual(usage["input_tokens"] + usage["output_tokens"], usage["total_tokens"])
        self.assertIn("reasoning_tokens", usage["output_tokens_details"])
        return last

    def test_codex(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=PATIENCE)
        connection.request("GET", "/v1/models?client_version=0.1", headers=CODEX_HEADERS)
        models = json.loads(connection.getresponse().read())
        connection.close()
        self.assertEqual(len(models["data"]), 1)
        # Codex (codex-rs, ModelsResponse) fails without the list, and on entries that lack one of their required fields.
        self.assertEqual(models["models"], [])
        probe = self.codex("codex_1_probe")
        self.assertEqual(probe["usage"]["output_tokens"], 1)
        before = self.codex("codex_2_question")["usage"]
        for name in ("codex_3_tool_result", "codex_4_follow_up"):
            usage = self.codex(name)["usage"]
            self.assertGreater(usage["input_tokens"], before["input_tokens"])
            # But for the answer's opening and a block that was not full.
            self.assertGreater(usage["input_tokens_details"]["cached_tokens"], before["input_tokens"] - 80, name)
            before = usage

    def test_what_codex_0_163_sends(self):
        """No `instructions` but developers' messages, items with ids, functions in a namespace, and metadata that are new with each turn."""
        said = lambda role, text, name: {"type": "message", "id": f"msg_{name}", "role": role, "content": [{"type": "input_text", "text": text}]}
        command = {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False, "parameters": {
            "type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False}}
        request = {
            "model": "coder", "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "01a2",
            "tools": [command, {"type": "namespace", "name": "agents", "description": "Others.", "tools": [{**command, "name": "ask"}]},
                      {"type": "web_search", "external_web_access": False}],
            "input": [said("developer", "You work in a terminal, with care. " * 20, "1"), said("developer", "<permissions>none</permissions>", "2"),
                      said("user", "<environment>\n  <cwd>/work</cwd>\n</environment>", "3"), said("user", "Which files are here?", "4")]}
        usages = []
        for turn in range(2):
            metadata = {"turn": json.dumps({"turn_id": f"t{turn}", "started_at": 1795635470249 + turn}), "turn_id": f"t{turn}"}
            last = self.stream("/v1/responses", {**request, "client_metadata": metadata}, CODEX_HEADERS)[-1]
            self.assertIn(last[0], ("response.completed", "response.incomplete"))
            usages.append(last[1]["response"]["usage"])
            request["input"] += [*last[1]["response"]["output"], said("user", "And now?", "5")]
        self.assertEqual(usages[0]["input_tokens_details"]["cached_tokens"], 0)
        self.assertGreater(usages[1]["input_tokens_details"]["cached_tokens"], usages[0]["input_tokens"] - 80)

    def test_codex_learns_from_the_stream_that_its_context_is_full(self):
        # Codex shows a status 400 as it is, and makes room only after this event.
        request = {"model": "coder", "input": "word " * 2 * SMALL}
        events = self.stream("/v1/responses", {**request, "stream": True}, CODEX_HEADERS, self.small)
        self.assertEqual([kind for kind, _ in events], ["response.created", "response.failed"])
        self.assertEqual([data["sequence_number"] for _, data in events], [0, 1])
        self.assertEqual((events[0][1]["response"]["status"], events[0][1]["response"]["error"]), ("in_progress", None))
        failed = events[1][1]["response"]
        self.assertEqual((failed["status"], failed["error"]["code"]), ("failed", "context_length_exceeded"))
        self.assertRegex(failed["error"]["message"], f"^input: prompt is too long: [0-9]+ tokens > {SMALL - 1} maximum")
        self.assertEqual(failed["id"], events[0][1]["response"]["id"])
        # An answer that is not streamed has the status 400; so has a stream with any other error.
        status, _, answer = post(self.small, "/v1/responses", request)
        self.assertEqual((status, answer["error"]["code"], answer["error"]["param"]), (400, "context_length_exceeded", "input"))
        for wrong in ({"temperature": -1}, {"max_output_tokens": SMALL}):
            status, _, answer = post(self.small, "/v1/responses", {"input": "word", "stream": True, **wrong})
            self.assertEqual((status, answer["error"]["code"]), (400, "invalid_field"), wrong)

    # ---- Claude Code ----

    def test_a_prompt_that_is_too_long_is_called_so(self):
        # Words that Claude Code reads numbers from, and OpenAI's code and words for the same.
        said = f"prompt is too long: [0-9]+ tokens > {SMALL - 1} maximum \\(the model's maximum context length is {SMALL} tokens, one of them the answer's\\)"
        chat = [{"role": "user", "content": "word " * 2 * SMALL}]
        for stream in (False, True):
            status, _, answer = post(self.small, "/v1/messages", {"model": "coder", "max_tokens": 4, "messages": chat, "stream": stream})
            self.assertEqual((status, answer["error"]["type"]), (400, "invalid_request_error"))
            self.assertRegex(answer["error"]["message"], said)
            for path, prompt in (("/v1/chat/completions", {"messages": chat}), ("/v1/completions", {"prompt": chat[0]["content"]})):
                status, _, answer = post(self.small, path, {**prompt, "stream": stream})
                self.assertEqual((status, answer["error"]["code"]), (400, "context_length_exceeded"))
                self.assertRegex(answer["error"]["message"], said)
        # So many bytes that nobody counts their tokens.
        chat[0]["content"] *= 100
        status, _, answer = post(self.small, "/v1/messages", {"model": "coder", "max_tokens": 4, "messages": chat})
        self.assertEqual((status, answer["error"]["type"]), (400, "invalid_request_error"))
        self.assertIn("prompt is too long: 5", answer["error"]["message"])
        status, _, answer = post(self.small, "/v1/chat/completions", {"messages": chat})
        self.assertEqual((status, answer["error"]["code"], answer["error"]["param"]), (400, "context_length_exceeded", "messages"))

    def test_claude_code_asks_for_more_tokens_than_the_context_has(self):
        # It always asks for 32,000 or more.
        request = {"model": "coder", "messages": [{"role": "user", "content": "word " * (SMALL // 2)}]}
        for room in (32000, SMALL, SMALL - 1):
            status, _, answer = post(self.small, "/v1/messages", {**request, "max_tokens": room})
            self.assertEqual(status, 200, answer)
            usage = answer["usage"]
            tokens = sum(usage[kind] for kind in ("input_tokens", "cache_read_input_tokens", "output_tokens"))
            if answer["stop_reason"] == "end_turn":
                self.assertLess(tokens, SMALL)
            else:
                self.assertEqual((answer["stop_reason"], tokens), ("model_context_window_exceeded", SMALL))
        events = self.stream("/v1/messages", {**request, "max_tokens": 32000, "stream": True}, CLAUDE_HEADERS, self.small)
        self.assertEqual(events[-2][1]["delta"]["stop_reason"], answer["stop_reason"])
        # A bound that came before the context's end is the client's own.
        status, _, answer = post(self.small, "/v1/messages", {**request, "max_tokens": 2})
        self.assertEqual((status, answer["stop_reason"]), (200, "max_tokens"))
        status, _, answer = post(self.small, "/v1/messages", {**request, "max_tokens": 0})
        self.assertEqual(status, 400)
        # OpenAI's clients are refused, as by others.
        self.assertEqual(post(self.small, "/v1/chat/completions", {**request, "max_tokens": SMALL - 1})[0], 400)

    def test_what_claude_code_2_1_332_sends(self):
        """A system message behind the user's, thinking as the model likes, and options of what Anthropic keeps of a conversation."""
        request = {
            "model": "coder", "max_tokens": 32000, "stream": True, "thinking": {"type": "adaptive", "display": "updates"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "high"},
            "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.1c9; cc_entrypoint=sdk-cli;"},
                       {"type": "text", "text": "You work in a terminal, with care. " * 20, "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nNothing.\n</system-reminder>\n"},
                                                      {"type": "text", "text": "Say a colour."}]},
                         {"role": "system", "content": [{"type": "text", "text": "# Environment\nA folder.", "cache_control": {"type": "ephemeral"}}]}],
            "stop_sequences": ["e"]}
        before = None
        for turn in range(2):
            request["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.332.{turn}; cc_entrypoint=sdk-cli;"
            events = self.stream("/v1/messages?beta=true", request, CLAUDE_HEADERS)
            usage = events[-2][1]["usage"]
            size = usage["input_tokens"] + usage["cache_read_input_tokens"]
            if before is not None:
                self.assertGreater(usage["cache_read_input_tokens"], before - 80)
            before = size
            text = "".join(data["delta"]["text"] for kind, data in events if kind == "content_block_delta")
            request["messages"][1]["content"] = "# Environment\nA folder."  # a text from the second turn on
            request["messages"] += [{"role": "assistant", "content": [{"type": "text", "text": text or "Red."}]}, {"role": "user", "content": "Another."}]

    def test_claude_code_fills_a_form(self):
        form = {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"enum": ["a", "b"]}}, "required": ["title"], "additionalProperties": False}}
        request = {"model": "coder", "max_tokens": 100, "messages": [{"role": "user", "content": "A title."}]}
        for field in ({"output_config": {"effort": "low", "format": form}}, {"output_format": form}):
            status, _, answer = post(self.server, "/v1/messages", {**request, **field})
            self.assertEqual((status, answer["stop_reason"]), (200, "end_turn"), answer)
            self.assertIn(json.loads(answer["content"][0]["text"]), ({"title": "a"}, {"title": "b"}))
        form["schema"]["properties"]["title"] = {"not": {}}
        status, _, answer = post(self.server, "/v1/messages", {**request, "output_config": {"format": form}})
        self.assertEqual(status, 400)
        self.assertIn("output_config.format.schema", answer["error"]["message"])

    def test_claude_code_searches_for_tools(self):
        """Tools that are held back until the model asks for them: their definitions are part of the search's result, so that the
        prompt begins as before."""
        search = {"name": "ToolSearch", "description": "Finds tools by name.", "input_schema": {
            "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}
        fetch = {"name": "WebFetch", "description": "Reads a page.", "defer_loading": True, "input_schema": {
            "type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}}
        reserved = {"name": "Reserved", "description": "Never call this.", "defer_loading": True, "input_schema": {"type": "object"}}
        question = [{"role": "user", "content": [{"type": "text", "text": "Read the page of the project. " * 30}]}]
        request = {"model": "coder", "max_tokens": 24, "tools": [search, reserved], "messages": question}
        count = lambda body: post(self.server, "/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})[2]["input_tokens"]
        self.assertEqual(count(request), count({**request, "tools": [search]}))
        self.assertEqual(count(request), count({**request, "tools": [search, fetch, reserved]}))
        self.assertEqual(post(self.server, "/v1/messages", request)[0], 200)
        result = lambda content: [*question, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "call1", "name": "ToolSearch", "input": {"query": "select:WebFetch"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call1", "content": content}]}]
        found = {**request, "tools": [search, fetch, reserved], "messages": result([{"type": "tool_reference", "tool_name": "WebFetch"}])}
        status, _, answer = post(self.server, "/v1/messages", found)
        self.assertEqual(status, 200, answer)
        self.assertGreater(answer["usage"]["cache_read_input_tokens"], count(request) - 80)
        shown = '{"type":"function","function":{"name":"WebFetch","description":"Reads a page.","parameters":{"type":"object","properties":{"url":{"type":"string"}},"required":["url"]}}}'
        self.assertEqual(count(found), count({**found, "messages": result(shown)}))
        # It can be called from then on, and what was not found cannot.
        found["tool_choice"] = {"type": "any"}
        for seed in range(4):
            status, _, answer = post(self.server, "/v1/messages", {**found, "max_tokens": 400, "temperature": 1.0, "seed": seed})
            self.assertEqual(status, 200, answer)
            self.assertIn(answer["content"][0].get("name"), ("ToolSearch", "WebFetch"))
        found["tool_choice"] = {"type": "tool", "name": "WebFetch"}
        status, _, answer = post(self.server, "/v1/messages", {**found, "max_tokens": 400})
        self.assertEqual((status, answer["content"][0].get("name")), (200, "WebFetch"), answer)
        found["messages"] = result([{"type": "tool_reference", "tool_name": "Other"}])
        status, _, answer = post(self.server, "/v1/messages", found)
        self.assertEqual((status, answer["error"]["message"]),
                         (400, 'messages[2].content[0].content[0].tool_name: names "Other", which is not among the tools'))

    def claude(self, name):
        """The usage of all events together; they are checked on the way."""
        events = self.stream("/v1/messages?beta=true", body(name), CLAUDE_HEADERS)
        kinds = [kind for kind, _ in events if kind != "ping"]
        datas = [data for kind, data in events if kind != "ping"]
        self.assertEqual((kinds[0], kinds[1], kinds[-3:]), ("message_start", "content_block_start",
                                                           ["content_block_stop", "message_delta", "message_stop"]))
        self.assertEqual(set(kinds[2:-3]), {"content_block_delta"})
        message = datas[0]["message"]
        self.assertEqual((message["type"], message["role"], message["content"], message["stop_reason"], message["stop_sequence"]),
                         ("message", "assistant", [], None, None))
        self.assertEqual((datas[1]["index"], datas[1]["content_block"]), (0, {"type": "text", "text": ""}))
        for data in datas[2:-3]:
            self.assertEqual((data["index"], data["delta"]["type"]), (0, "text_delta"))
        self.assertEqual(datas[-3]["index"], 0)
        self.assertIn(datas[-2]["delta"]["stop_reason"], ("end_turn", "max_tokens"))
        self.assertIsNone(datas[-2]["delta"]["stop_sequence"])
        usage = {**message["usage"], **datas[-2]["usage"]}
        self.assertTrue(0 < usage["output_tokens"] <= 48)
        return usage

    def test_claude_code(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=PATIENCE)
        connection.request("POST", "/v1/messages/count_tokens?beta=true", json.dumps(body("claude_count")), CLAUDE_HEADERS)
        counted = json.loads(connection.getresponse().read())["input_tokens"]
        connection.close()
        size = lambda usage: usage["input_tokens"] + usage["cache_read_input_tokens"]
        usage = self.claude("claude_1_question")
        self.assertEqual(size(usage), counted)  # which has neither billing header nor token counter
        for name in ("claude_2_tool_result", "claude_3_follow_up"):
            before, usage = size(usage), self.claude(name)
            self.assertGreater(size(usage), before)
            self.assertGreater(usage["cache_read_input_tokens"], before - 80, name)


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""Codex and Claude Code themselves against a server, without a terminal: a turn with a call of a tool, a turn that goes on from it, a prompt
that is longer than the context. scripts/agents.sh fetches them from PyPI; without that the tests are skipped (77), which is no pass. Nothing
leaves loopback.

The small model knows nothing of tools, and its answers would be noise of any length. So a relay stands between client and server and asks, beside
what the client asks, for the call of one tool with arguments that are fixed (by `tool_choice` and the tool's schema), and for an answer of a fixed form.
Both are winnow's grammars: calls, texts and every event are made by the server, and what the client sent is passed on.
"""
import http.client
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import MODEL, PATIENCE, SOURCE, Server, main  # noqa: E402
from test_tools import TEMPLATE  # noqa: E402

SKIPPED = 77
CONTEXT = 65536  # the clients' own prompts have 8,000 to 27,000 of the small model's tokens
BLOCK = 64
MARK = "the-tool-ran"
ANSWER = {"type": "object", "properties": {"said": {"const": "Done."}}, "required": ["said"], "additionalProperties": False}


def programs():
    found = subprocess.run([SOURCE / "scripts/agents.sh", "--cached"], capture_output=True, text=True)
    return found.stdout.splitlines()[-2:] if found.returncode == 0 else None


class Exchange:
    def __init__(self, path, request):
        self.path, self.request, self.status, self.text = path, request, None, ""

    def events(self):
        return [json.loads(line[len("data: "):]) for line in self.text.splitlines() if line.startswith("data: ")]


class Relay:
    """Passes requests on, and remembers them and their answers. `tool` and `arguments`: what must be called once in a conversation."""

    def __init__(self, port):
        self.exchanges, self.tool, self.arguments = [], None, None
        relay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                exchange = Exchange(self.path.partition("?")[0], json.loads(body) if body else None)
                relay.exchanges.append(exchange)
                if body:
                    body = json.dumps(relay.asked(exchange)).encode()
                own = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
                own.request(self.command, self.path, body or None,
                            {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "content-length")})
                response = own.getresponse()
                exchange.status = response.status
                self.send_response(response.status)
                self.send_header("Content-Type", response.getheader("Content-Type", "text/plain"))
                self.send_header("Connection", "close")
                self.end_headers()
                while piece := response.read1(65536):
                    exchange.text += piece.decode()
                    self.wfile.write(piece)
                    self.wfile.flush()
                own.close()
                self.close_connection = True

            do_GET = do_POST = do_HEAD = pass_on

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def asked(self, exchange):
        request = json.loads(json.dumps(exchange.request))
        responses = exchange.path.endswith("/responses")
        if not responses and exchange.path != "/v1/messages":
            return request
        if responses:
            called = any(item["type"] == "function_call" for item in request["input"])
        else:
            called = any(block["type"] == "tool_use" for message in request["messages"] if isinstance(message["content"], list) for block in message["content"])
        for tool in request.get("tools", []):
            if self.tool and tool.get("name") == self.tool:  # in every request: the prompt begins with it
                tool["parameters" if responses else "input_schema"] = {
                    "type": "object", "properties": {name: {"type": "string", "const": value} for name, value in self.arguments.items()},
                    "required": list(self.arguments), "additionalProperties": False}
        if self.tool and not called:
            request["tool_choice"] = {"type": "function", "name": self.tool} if responses else {"type": "tool", "name": self.tool}
        elif responses:
            request["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}}
        else:
            request["output_config"] = {**request.get("output_config", {}), "format": {"type": "json_schema", "schema": ANSWER}}
        return request

    def of(self, path):
        return [exchange for exchange in self.exchanges if exchange.path == path]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class CodingAgents(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.codex, cls.claude = programs()
        cls.directory = tempfile.TemporaryDirectory(prefix="winnow-agents-")
        cls.addClassCleanup(cls.directory.cleanup)
        model = os.path.join(cls.directory.name, "hermes")
        shutil.copytree(MODEL, model)
        pathlib.Path(model, "chat_template.jinja").write_text(TEMPLATE)
        config = pathlib.Path(model, "config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
        flags = ("--model-name", "coder", "--block-tokens", BLOCK)
        cls.server = Server(*flags, "--default-max-tokens", CONTEXT, model=model)
        cls.addClassCleanup(cls.server.close)
        cls.small = Server(*flags, "--max-context", 4096, model=model)
        cls.addClassCleanup(cls.small.close)

    def setUp(self):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="home-", dir=self.directory.name))
        (self.home / "work").mkdir()

    def relay(self, server):
        relay = Relay(server.http_port)
        self.addCleanup(relay.close)
        return relay

    def run_client(self, command, environment):
        """The exit code, and the JSON that it printed, a line each."""
        done = subprocess.run(list(map(str, command)), cwd=self.home / "work", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=4 * PATIENCE,
                              env={"PATH": "/usr/bin:/bin", "HOME": str(self.home), **environment})
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.assertTrue(events, done.stderr[-2000:])
        return done.returncode, events

    def run_codex(self, relay, *words):
        (self.home / ".codex").mkdir(exist_ok=True)
        (self.home / ".codex/config.toml").write_text(f"""model = "coder"
model_provider = "winnow"
model_context_window = {CONTEXT}

[model_providers.winnow]
name = "winnow"
base_url = "http://127.0.0.1:{relay.port}/v1"
wire_api = "responses"
""")
        return self.run_client([self.codex, "exec", "--json", "--skip-git-repo-check", *words], {})

    def run_claude(self, relay, *words):
        return self.run_client([self.claude, "-p", "--output-format", "stream-json", "--verbose", *words], {
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{relay.port}", "ANTHROPIC_AUTH_TOKEN": "any", "ANTHROPIC_MODEL": "coder",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "coder", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})

    # ---- Codex ----

    def codex_usage(self, exchange):
        last = exchange.events()[-1]
        self.assertEqual(last["type"], "response.completed")
        usage = last["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]

    def test_codex(self):
        relay = self.relay(self.server)
        relay.tool, relay.arguments = "exec_command", {"cmd": f"echo {MARK}"}
        code, events = self.run_codex(relay, "Run the tool.")
        self.assertEqual((code, events[-1]["type"]), (0, "turn.completed"), events)
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        ran = [item for item in items if item["type"] == "command_execution"]
        self.assertEqual([(item["aggregated_output"], item["exit_code"]) for item in ran], [(f"{MARK}\n", 0)])
        self.assertEqual(json.loads(items[-1]["text"]), {"said": "Done."})
        sent = relay.of("/v1/responses")
        self.assertEqual([exchange.status for exchange in sent], [200, 200])
        kinds = [event["type"] for event in sent[0].events()]
        self.assertIn("response.function_call_arguments.done", kinds)
        self.assertEqual({item["type"] for item in sent[1].request["input"]}, {"message", "function_call", "function_call_output"})
        (first, _), (second, cached) = map(self.codex_usage, sent)
        self.assertGreater(second, first)
        self.assertGreater(cached, first - 2 * BLOCK)

        code, events = self.run_codex(relay, "resume", "--last", "Say it again.")
        self.assertEqual((code, events[-1]["type"]), (0, "turn.completed"), events)
        sent = relay.of("/v1/responses")
        self.assertEqual(len(sent), 3)
        third, cached = self.codex_usage(sent[2])
        self.assertGreater(third, second)
        self.assertGreater(cached, second - 2 * BLOCK)
        self.assertGreaterEqual(events[-1]["usage"]["cached_input_tokens"], cached)

    def test_codex_is_told_that_its_context_is_full(self):
        relay = self.relay(self.small)
        code, events = self.run_codex(relay, "Hello.")
        self.assertEqual((code, events[-1]["type"]), (1, "turn.failed"), events)
        self.assertIn("ran out of room in the model's context window", events[-1]["error"]["message"])

    # ---- Claude Code ----

    def claude_usage(self, exchange):
        events = [event for event in exchange.events() if event["type"] != "ping"]  # which come while a long prompt is read
        self.assertEqual((events[0]["type"], events[-1]["type"]), ("message_start", "message_stop"))
        usage = events[-2]["usage"]
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]

    def check_claude(self, code, events):
        result = events[-1]
        self.assertEqual((code, result["type"], result["subtype"], result["is_error"]), (0, "result", "success", False), result)
        self.assertEqual(json.loads(result["result"]), {"said": "Done."})
        return result

    def test_claude_code(self):
        relay = self.relay(self.server)
        relay.tool, relay.arguments = "Bash", {"command": f"echo {MARK}", "description": "Runs the tool"}
        code, events = self.run_claude(relay, "--allowedTools", "Bash", "--", "Run the tool.")
        self.check_claude(code, events)
        results = [block for event in events if event["type"] == "user" for block in event["message"]["content"]]
        self.assertEqual([(block["type"], block["content"], block["is_error"]) for block in results], [("tool_result", MARK, False)])
        sent = relay.of("/v1/messages")
        self.assertEqual([exchange.status for exchange in sent], [200, 200])
        self.assertTrue(sent[0].request["system"][0]["text"].startswith("x-anthropic-billing-header:"))
        (first, _), (second, cached) = map(self.claude_usage, sent)
        self.assertGreater(second, first)
        self.assertGreater(cached, first - 2 * BLOCK)

        result = self.check_claude(*self.run_claude(relay, "--continue", "--", "Say it again."))
        sent = relay.of("/v1/messages")
        self.assertEqual([exchange.status for exchange in sent], [200] * 3)
        third, cached = self.claude_usage(sent[2])
        self.assertGreater(third, second)
        self.assertGreater(cached, second - 2 * BLOCK)
        self.assertEqual(result["usage"]["cache_read_input_tokens"], cached)

    def test_claude_code_searches_for_tools(self):
        relay = self.relay(self.server)
        relay.tool, relay.arguments = "ToolSearch", {"query": "select:WebFetch"}
        code, events = self.run_claude(relay, "--", "Search.")
        self.check_claude(code, events)
        sent = relay.of("/v1/messages")
        # No second try without the search, which would read all definitions anew.
        self.assertEqual([exchange.status for exchange in sent], [200, 200])
        self.assertIn({"type": "tool_reference", "tool_name": "WebFetch"}, sent[1].request["messages"][-1]["content"][0]["content"])
        (first, _), (_, cached) = map(self.claude_usage, sent)
        self.assertGreater(cached, first - 2 * BLOCK)

    def test_claude_code_counts_tokens(self):
        relay = self.relay(self.server)
        code, events = self.run_claude(relay, "--", "/context")
        self.assertEqual((code, events[-1]["is_error"]), (0, False), events[-1])
        counts = relay.of("/v1/messages/count_tokens")
        self.assertGreater(len(counts), 5)
        for exchange in counts:
            self.assertEqual(exchange.status, 200, exchange.text)
            self.assertGreater(json.loads(exchange.text)["input_tokens"], 0)

    def test_claude_code_is_told_that_its_prompt_is_too_long(self):
        relay = self.relay(self.small)
        code, events = self.run_claude(relay, "--", "Hello.")
        self.assertEqual((code, events[-1]["terminal_reason"]), (1, "prompt_too_long"), events[-1])


if __name__ == "__main__":
    if programs() is None:
        print("Skipped: Codex and Claude Code are not there, scripts/agents.sh fetches them from PyPI.", flush=True)
        sys.exit(SKIPPED)
    main()

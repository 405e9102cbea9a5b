#!/usr/bin/python3
"""Tenants over gRPC and HTTP: keys, quotas, weights, and fairness beside one that floods."""
import hashlib
import http.client
import json
import signal
import threading
import time
import unittest

import grpc

import harness
from harness import Api, Server, counting_request, details_of, eventually, inference, main, run, temporary_directory

PROMPT = "Once upon a time there was a fox. " * 40


def hashed(**keys):
    return "".join(f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in keys.items())


def generate(api, tokens=1, text="Count: one two three", timeout=harness.PATIENCE, **metadata):
    pairs = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return list(api.generate(counting_request(text, tokens), metadata=pairs, timeout=timeout))


def post(server, body, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=harness.PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(body), {k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, dict(response.getheaders()), answer


class Keys(unittest.TestCase):
    def refused(self, code, reason, call):
        with self.assertRaises(grpc.RpcError) as caught:
            call()
        self.assertEqual(caught.exception.code(), code)
        self.assertEqual(details_of(caught.exception)["ErrorInfo"].reason, reason)

    def test_every_call_but_health_wants_a_key_and_its_name_is_the_tenant(self):
        with temporary_directory() as directory:
            keys = directory / "keys"
            keys.write_text(hashed(alice="a-key", bob="b-key"))
            with Server("--api-keys", keys) as server:
                api = Api(server.address)
                self.assertTrue(api.serving())
                calls = [lambda metadata: list(api.generate(counting_request("x", 1), metadata=metadata)),
                         lambda metadata: api.tokenize(inference.TokenizeRequest(text=inference.TextPrompt(text="x")), metadata=metadata),
                         lambda metadata: api.get_model(inference.GetModelRequest(), metadata=metadata)]
                for call in calls:
                    for metadata in ([], [("authorization", "Bearer c-key")], [("authorization", "a-key")], [("x-api-key", "")]):
                        self.refused(grpc.StatusCode.UNAUTHENTICATED, "INVALID_API_KEY", lambda: call(metadata))
                    call([("authorization", "Bearer a-key")])
                    call([("x-api-key", "b-key")])
                cached = lambda **metadata: generate(api, 2, PROMPT, **metadata)[-1].finish.usage.cached_tokens
                self.assertEqual(cached(authorization="Bearer a-key"), 0)
                self.assertEqual(cached(authorization="bearer b-key"), 0)  # another tenant
                self.assertGreater(cached(x_api_key="a-key"), 0)
                # The same tenant over HTTP.
                answer = post(server, {"prompt": PROMPT, "max_tokens": 2}, x_api_key="a-key")[2]
                self.assertGreater(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
                self.refused(grpc.StatusCode.PERMISSION_DENIED, "TENANT_MISMATCH",
                             lambda: generate(api, authorization="Bearer a-key", x_winnow_tenant="bob"))
                self.assertIn("alice", {e.get("tenant") for e in server.events() if e["event"] == "request"})
                (directory / "key").write_text("a-key\n")
                said = run("generate", "--server", server.address, "--prompt", "x", "--max-tokens", 2, "--api-key-file", directory / "key")
                self.assertEqual(said.returncode, 0, said.stderr)
                keys.write_text("not a line of keys\n")  # leaves what there was

                def refused_and_serves_on():
                    generate(api, x_api_key="a-key")
                    return any(e["event"] == "api_keys" and e["level"] == "warn" for e in server.events())
                eventually(refused_and_serves_on, "the broken file is read and left")
                keys.write_text(hashed(carol="c-key"))
                server.signal(signal.SIGHUP)
                eventually(lambda: any(e["event"] == "reload" for e in server.events()), "SIGHUP reads the keys, though nobody asks")
                line, = [e for e in server.events() if e["event"] == "reload"]
                self.assertEqual((line["what"], line["level"]), ("--api-keys", "info"))

                def known(key):
                    try:
                        generate(api, x_api_key=key)
                    except grpc.RpcError:
                        return False
                    return True
                self.assertTrue(known("c-key"))
                self.assertFalse(known("a-key"))
                keys.write_text("still no line of keys\n")
                server.signal(signal.SIGHUP)
                eventually(lambda: any(e["event"] == "reload" and e["level"] == "warn" and ":1: must be a name" in e["message"]
                                       for e in server.events()), "SIGHUP says what is wrong")
                self.assertTrue(known("c-key"))


class Quotas(unittest.TestCase):
    FILE = """
default: {requests: 50}
tenants:
  few: {requests: 2}
  short: {waiting_tokens: 300}
  small: {running_tokens: 500}
"""

    def held(self, api, tokens, text, tenant, count):
        """Calls that stay open."""
        calls = [api.generate(counting_request(text, tokens), metadata=[("x-winnow-tenant", tenant)]) for _ in range(count)]
        for call in calls:
            threading.Thread(target=lambda call=call: [None for _ in self.quiet(call)], daemon=True).start()
        return calls

    def quiet(self, call):
        try:
            yield from call
        except grpc.RpcError:
            pass

    def over(self, server, api, tenant, quota, body, request):
        with self.assertRaises(grpc.RpcError) as caught:
            list(api.generate(request, metadata=[("x-winnow-tenant", tenant)], timeout=harness.PATIENCE))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
        details = details_of(caught.exception)
        self.assertEqual(details["ErrorInfo"].reason, "QUOTA_EXCEEDED")
        self.assertIn("RetryInfo", details)
        self.assertIn(f"quota of {quota}", caught.exception.details())
        status, headers, answer = post(server, body, x_winnow_tenant=tenant)
        self.assertEqual((status, answer["error"]["code"]), (429, "quota_exceeded"))
        self.assertIn(f"quota of {quota}", answer["error"]["message"])
        self.assertGreaterEqual(int(headers["Retry-After"]), 1)

    def told(self, server, api, level, text):
        """The file is looked at by whoever asks, once a second at most."""
        def found():
            generate(api, 1, x_winnow_tenant="another")
            return any(e["event"] == "tenants" and e["level"] == level and text in e.get("message", "") for e in server.events())
        eventually(found, f"a line about the file: {level} {text}")

    def test_each_quota_is_kept_and_named(self):
        with temporary_directory() as directory:
            path = directory / "tenants.yaml"
            path.write_text(self.FILE)
            with Server("--tenants", path, "--max-running", 2, "--prefix-cache", "off") as server:
                api = Api(server.address)
                running = lambda: server.metric("winnow_requests_running")
                # small: 500 tokens of prompt and answer together.
                self.over(server, api, "small", "running_tokens", {"prompt": "x", "max_tokens": 600}, counting_request("x", 600))
                generate(api, 4, x_winnow_tenant="small")
                # few: two calls.
                calls = self.held(api, 20000, "x", "few", 2)
                eventually(lambda: running() == 2, "both run")
                self.over(server, api, "few", "requests", {"prompt": "x", "max_tokens": 1}, counting_request("x", 1))
                # short: what waits behind those two.
                calls += self.held(api, 1, "word " * 200, "short", 1)
                eventually(lambda: server.metric("winnow_requests_waiting") == 1, "one waits")
                self.over(server, api, "short", "waiting_tokens", {"prompt": "word " * 200, "max_tokens": 1},
                          counting_request("word " * 200, 1))
                calls += self.held(api, 1, "word " * 200, "another", 1)  # has no such quota
                eventually(lambda: server.metric("winnow_requests_waiting") == 2, "the other waits")
                for call in calls:
                    call.cancel()
                # Held quota is given back.
                eventually(lambda: running() == 0, "the end of all")
                eventually(lambda: server.metric("winnow_requests_waiting") == 0, "none waits")
                for tenant in ("few", "short", "small"):
                    generate(api, 2, x_winnow_tenant=tenant)
                path.write_text("tenants:\n  few: {reqests: 1}\n")
                self.told(server, api, "warn", "did you mean requests?")
                path.write_text("tenants:\n  small: {running_tokens: 5000}\n")
                self.told(server, api, "info", "")
                generate(api, 600, x_winnow_tenant="small")

    def test_a_bad_file_is_named_with_its_line(self):
        for text, message in (("tenants:\n  a: {weight: 0}\n", ":2: weight: must be a number in [0.01, 1000]"),
                              ("tenents: {}\n", ":1: unknown key tenents: did you mean tenants?"),
                              ("tenants:\n  a/b: {}\n", ":2: a tenant's name"),
                              ("tenants: [", ":"), ("default: {requests: -1}\n", ":1: requests: must be an integer")):
            with temporary_directory() as directory:
                (directory / "t").write_text(text)
                with self.assertRaises(RuntimeError) as caught:
                    Server("--tenants", directory / "t")
                self.assertIn("(2)", str(caught.exception))
                self.assertIn(f"t{message}", str(caught.exception).replace("\\\\", ""))


CACHED = {"/v1/completions": lambda a: a["usage"]["prompt_tokens_details"]["cached_tokens"],
          "/v1/chat/completions": lambda a: a["usage"]["prompt_tokens_details"]["cached_tokens"],
          "/v1/responses": lambda a: a["usage"]["input_tokens_details"]["cached_tokens"],
          "/v1/messages": lambda a: a["usage"]["cache_read_input_tokens"]}


def bodies_of(text):
    """A request of each route that generates."""
    chat = [{"role": "user", "content": text}]
    return {"/v1/completions": {"prompt": text, "max_tokens": 1}, "/v1/chat/completions": {"messages": chat, "max_tokens": 1},
            "/v1/responses": {"input": text, "max_output_tokens": 1}, "/v1/messages": {"messages": chat, "max_tokens": 1}}


def ask(server, method, path, body=None, expected=200, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=harness.PATIENCE)
    connection.request(method, path, body and json.dumps(body), {k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.status != expected:
        raise AssertionError(f"{method} {path}: {response.status} {text}")
    return json.loads(text) if "json" in response.getheader("content-type", "") else text


def cached_everywhere(server, text, **headers):
    """Tokens that were found, by way in: gRPC's Generate and every route. Each way has a text of its own,
    because chats of two routes are the same prompt."""
    api = Api(server.address)
    found = {"Generate": generate(api, text=f"Generate {text}", **headers)[-1].finish.usage.cached_tokens}
    for path, body in bodies_of("%s").items():
        body = json.loads(json.dumps(body).replace("%s", f"{path} {text}"))
        found[path] = CACHED[path](ask(server, "POST", path, body, **headers))
    return found


class Isolation(unittest.TestCase):
    """A tenant's prompts and names are invisible to another in everything that the server answers."""

    def test_what_one_tenant_asked_no_other_finds(self):
        word = "tamarisk"  # no number: a port, a size or a time in the log may have any digits
        marker = f"The safe behind the picture opens with {word}. " * 40
        with Server() as server:
            api = Api(server.address)
            self.assertEqual(generate(api, text=marker, x_winnow_tenant="a")[-1].finish.usage.cached_tokens, 0)
            self.assertGreater(generate(api, text=marker, x_winnow_tenant="a")[-1].finish.usage.cached_tokens, 0)
            for tenant in ({"x_winnow_tenant": "b"}, {}):
                self.assertEqual(generate(api, text=marker, **tenant)[-1].finish.usage.cached_tokens, 0, tenant)
            bodies = bodies_of(marker)
            ask_as = lambda method, path, body=None, tenant=None: ask(server, method, path, body, **({"x_winnow_tenant": tenant} if tenant else {}))
            for path, body in bodies.items():
                for tenant in ("c", "c"):  # and then its own is found
                    ask_as("POST", path, body, tenant)
                self.assertGreater(CACHED[path](ask_as("POST", path, body, "c")), 0, path)
            for n, (path, body) in enumerate(bodies.items()):
                # A tenant of its own for each route: chats of two routes are the same prompt.
                self.assertEqual(CACHED[path](ask_as("POST", path, body, f"d{n}")), 0, path)
            # Nor does a page have what it said.
            for path in ("/metrics", "/version", "/health", "/v1/models", "/status"):
                self.assertNotIn(word, json.dumps(ask_as("GET", path, tenant="b")), path)
            self.assertNotIn(word, server.log())


class TrustDomains(unittest.TestCase):
    """Tenants that name the same domain share KV and nothing else; everybody else shares with nobody."""
    FILE = """
tenants:
  alice: {trust_domain: team}
  bob: {trust_domain: team, requests: 1}
  carol: {trust_domain: others}
  dave: {requests: 50}
"""
    NAMES = ("alice", "bob", "carol", "dave", "erin")

    def setUp(self):
        self.directory = self.enterContext(temporary_directory())
        self.tenants, self.keys = self.directory / "tenants", self.directory / "keys"
        self.tenants.write_text(self.FILE)
        self.keys.write_text(hashed(**{name: f"{name}-key" for name in self.NAMES}))

    def enterContext(self, context):  # of unittest from Python 3.11 on
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def flags(self):
        return "--api-keys", self.keys, "--tenants", self.tenants

    def test_a_domain_shares_in_every_way_and_others_in_none(self):
        text = "The vault of the third floor opens with 8215. " * 40
        key = lambda name: {"x_api_key": f"{name}-key"}
        with Server(*self.flags()) as server:
            self.assertEqual(set(cached_everywhere(server, text, **key("alice")).values()), {0})
            for name in ("carol", "dave", "erin"):
                self.assertEqual(set(cached_everywhere(server, text, **key(name)).values()), {0}, name)
            for way, found in cached_everywhere(server, text, **key("bob")).items():
                self.assertGreater(found, 0, way)
            # Names stay each tenant's own; the KV behind them is the domain's.
            put = ask(server, "PUT", "/v1/prefixes/vault", {"prompt": "Named. " + text}, **key("alice"))
            names = lambda name: [p["name"] for p in ask(server, "GET", "/v1/prefixes", **key(name))["data"]]
            self.assertEqual([names(name) for name in self.NAMES], [["vault"], [], [], [], []])
            for method in ("GET", "DELETE"):
                ask(server, method, "/v1/prefixes/vault", expected=404, **key("bob"))
            cached = lambda name: CACHED["/v1/completions"](
                ask(server, "POST", "/v1/completions", {"prompt": "Named. " + text + "And then?", "max_tokens": 1}, **key(name)))
            self.assertGreaterEqual(cached("bob"), put["tokens"] - 64)
            self.assertEqual(cached("carol"), 0)
            ask(server, "PUT", "/v1/prefixes/mine", {"prompt": "Named. " + text}, **key("bob"))
            ask(server, "DELETE", "/v1/prefixes/vault", **key("alice"))
            self.assertGreater(cached("alice"), 0)  # bob's name has it
            # So do quotas and usage.
            api = Api(server.address)
            held = api.generate(counting_request("x", 20000), metadata=[("x-api-key", "bob-key")])
            next(iter(held))
            with self.assertRaises(grpc.RpcError) as caught:
                generate(api, **key("bob"))
            self.assertIn("quota of requests", caught.exception.details())
            generate(api, **key("alice"))
            held.cancel()
            self.assertEqual({e["tenant"] for e in server.events() if e["event"] == "request"}, set(self.NAMES))

    def test_a_domain_holds_over_a_restart_and_who_leaves_it_finds_nothing(self):
        text = "The vault of the fourth floor opens with 8216. " * 40
        cached = lambda server, name: generate(Api(server.address), text=text, x_api_key=f"{name}-key")[-1].finish.usage.cached_tokens
        store = ("--disk-bytes", "256MiB", "--store-dir", self.directory / "store")
        with Server(*self.flags(), *store) as server:
            self.assertEqual(cached(server, "alice"), 0)
            self.assertEqual(server.terminate(), 0)
        with Server(*self.flags(), *store) as server:
            self.assertEqual([cached(server, name) for name in ("carol", "dave", "erin")], [0, 0, 0])
            self.assertGreater(cached(server, "bob"), 0)
            self.tenants.write_text(self.FILE.replace("alice: {trust_domain: team}", "alice: {}"))
            server.signal(signal.SIGHUP)
            eventually(lambda: any(e["event"] == "reload" and e["what"] == "--tenants" for e in server.events()), "the file is read again")
            self.assertEqual(cached(server, "alice"), 0)
            self.assertGreater(cached(server, "bob"), 0)
            self.assertEqual(server.terminate(), 0)

    def test_check_config_refuses_what_cannot_be(self):
        for domain, text in (("a/b", "trust_domain: must be 1 to 64"), ("''", "trust_domain: must be"), ("x" * 65, "trust_domain: must be")):
            self.tenants.write_text(f"tenants:\n  alice: {{trust_domain: {domain}}}\n")
            result = run("serve", "--model", "x", "--check-config", "--tenants", self.tenants)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn(f"tenants:2: {text}", result.stderr)
        self.tenants.write_text(self.FILE)
        good = run("serve", "--model", "x", "--check-config", "--tenants", self.tenants)
        self.assertEqual(good.returncode, 0, good.stderr)
        self.assertTrue(good.stderr.endswith("The configuration is good.\n"), good.stderr)
        missing = run("serve", "--model", "x", "--check-config", "--tenants", self.directory / "missing")
        self.assertEqual(missing.returncode, 2)
        wrong = run("serve", "--model", "x", "--check-config", "--anonymous-prefixes", "some")
        self.assertEqual(wrong.returncode, 2)
        self.assertIn("must be one of auto|shared|none", wrong.stderr)


class Anonymous(unittest.TestCase):
    """Callers without a key, a certificate or x-winnow-tenant, as they are behind a gateway that drops tenants."""
    TEXT = "The vault of the second floor opens with 8214. " * 40

    def shared(self, server, **headers):
        """Whether a repeated prompt is found; in every way or in none."""
        mark = f"{headers} {self.id()} "
        self.assertEqual(set(cached_everywhere(server, mark + self.TEXT, **headers).values()), {0})
        found = cached_everywhere(server, mark + self.TEXT, **headers)
        some = {way: tokens > 0 for way, tokens in found.items()}
        self.assertEqual(len(set(some.values())), 1, found)
        return all(some.values())

    def test_one_user_on_one_machine_shares_unless_a_proxy_stands_between(self):
        with Server() as server:
            self.assertTrue(self.shared(server))
            for header in ("forwarded", "x_forwarded_for", "x_real_ip", "via"):
                self.assertFalse(self.shared(server, **{header: "198.51.100.7"}), header)
            ask(server, "PUT", "/v1/prefixes/p", {"prompt": self.TEXT})
            self.assertEqual(ask(server, "PUT", "/v1/prefixes/q", {"prompt": self.TEXT}, expected=403, via="1.1 gateway")["error"]["code"],
                             "tenant_required")
        with Server("--anonymous-prefixes", "shared") as server:
            self.assertTrue(self.shared(server, via="1.1 gateway"))

    def test_where_several_may_ask_nothing_is_shared(self):
        with temporary_directory() as directory:
            (directory / "tenants").write_text("tenants: {a: {}}\n")
            for flags in (("--tenants", directory / "tenants"), ("--kv-events", "on"), ("--anonymous-prefixes", "none")):
                with Server(*flags) as server:
                    self.assertFalse(self.shared(server), flags)
                    self.assertTrue(self.shared(server, x_winnow_tenant="a"), flags)
            with Server("--tenants", directory / "tenants", "--anonymous-prefixes", "shared") as server:
                self.assertTrue(self.shared(server))

    def test_nothing_is_kept_and_answers_are_the_same(self):
        """Neither in the store, nor under a name; a request's own choices share their prompt."""
        with temporary_directory() as directory:
            store = ("--disk-bytes", "256MiB", "--store-dir", directory / "store")
            with Server(*store) as server:
                expected = "".join(r.text for r in generate(Api(server.address), 8, self.TEXT))
                self.assertEqual(server.terminate(), 0)
            # One at a time: the second choice begins when the first has ended.
            with Server(*store, "--anonymous-prefixes", "none", "--max-running", "1") as server:
                api = Api(server.address)
                for _ in range(2):
                    answer = generate(api, 8, self.TEXT)
                    self.assertEqual(("".join(r.text for r in answer), answer[-1].finish.usage.cached_tokens), (expected, 0))
                both = list(api.generate(counting_request("Twice. " + self.TEXT, 1, n=2), timeout=harness.PATIENCE))
                self.assertGreater(max(r.finish.usage.cached_tokens for r in both if r.HasField("finish")), 0)
                for method, body in (("PUT", {"prompt": self.TEXT}), ("GET", None), ("PATCH", {"pinned": True}), ("DELETE", None)):
                    said = ask(server, method, "/v1/prefixes/p", body, expected=403)
                    self.assertEqual(said["error"]["code"], "tenant_required")
                ask(server, "GET", "/v1/prefixes", expected=403)
                ask(server, "PUT", "/v1/prefixes/p", {"prompt": "Named. " + self.TEXT}, x_winnow_tenant="a")
                self.assertEqual(server.terminate(), 0)
            with Server(*store, "--anonymous-prefixes", "shared") as server:
                api = Api(server.address)
                # The first server's, which shared, and nothing of the second's.
                self.assertGreater(generate(api, text=self.TEXT)[-1].finish.usage.cached_tokens, 0)
                self.assertEqual(generate(api, text="Twice. " + self.TEXT)[-1].finish.usage.cached_tokens, 0)


class Shares(unittest.TestCase):
    """Tenants that ask all the time, over HTTP: each connection asks again as soon as it was answered or refused. How long that lasts is
    counted in answers, of which a busy machine gives fewer in a second."""
    FLAGS = ("--max-running", "4", "--queue-requests", "16", "--prefix-cache", "off")
    ANSWERS = 1000

    def load(self, server, calls_of):
        served = dict.fromkeys(calls_of, 0)
        lock = threading.Lock()

        def one(tenant):
            connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=harness.PATIENCE)
            body = json.dumps({"prompt": "Count: one two three", "max_tokens": 16, "ignore_eos": True})
            while sum(served.values()) < 16 * self.ANSWERS:
                connection.request("POST", "/v1/completions", body, {"x-winnow-tenant": tenant})
                response = connection.getresponse()
                answer = json.loads(response.read())
                if response.status == 200:
                    with lock:
                        if sum(served.values()) < 16 * self.ANSWERS:
                            served[tenant] += answer["usage"]["completion_tokens"]
                elif response.status == 429:
                    time.sleep(0.01)
            connection.close()

        threads = [threading.Thread(target=one, args=(tenant,)) for tenant, calls in calls_of.items() for _ in range(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return served

    def test_one_of_five_floods(self):
        with Server(*self.FLAGS) as server:
            served = self.load(server, {"flood": 40, "a": 4, "b": 4, "c": 4, "d": 4})
            jain = sum(served.values()) ** 2 / (5 * sum(t * t for t in served.values()))
            print(f"Jain's index {jain:.3f}, served {served}", flush=True)
            if not harness.SANITIZED:
                self.assertGreaterEqual(jain, 0.95)
            self.assertGreater(min(served.values()), 0)

    def test_weights(self):
        with temporary_directory() as directory:
            (directory / "t").write_text("tenants: {double: {weight: 2}, half: {weight: 0.5}}\n")
            with Server(*self.FLAGS, "--tenants", directory / "t") as server:
                served = self.load(server, {"double": 8, "one": 8, "half": 8})
                print(f"weights 2, 1, 0.5: served {served}", flush=True)
                if not harness.SANITIZED:
                    self.assertAlmostEqual(served["double"] / served["one"], 2, delta=0.5)
                    self.assertAlmostEqual(served["one"] / served["half"], 2, delta=0.6)
                self.assertGreater(served["double"], served["half"])


if __name__ == "__main__":
    main()

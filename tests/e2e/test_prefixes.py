#!/usr/bin/python3
"""Named prefixes over gRPC (through clients/python) and over HTTP, and AdminService: names, pins, times, restarts, tenants; state, log
level, drain."""
import asyncio
import hashlib
import http.client
import json
import re
import signal
import sys
import unittest

import grpc

from harness import PATIENCE, SOURCE, Server, eventually, main, run, temporary_directory

sys.path.insert(0, str(SOURCE / "clients/python"))
from winnow_client import Admin, AsyncAdmin, AsyncClient, Client, RetryPolicy, WinnowError  # noqa: E402
from winnow_client import winnow_prefix_pb2 as prefix_pb  # noqa: E402

TEXT = "The keeper of the lighthouse wrote down every ship. " * 30
OTHER = "A recipe for bread needs flour, water, salt and time. " * 30


def cached(client, text):
    return client.generate(text + "What then?", max_tokens=1).usage.cached_tokens


def admin_address(server):
    port = next(e for e in server.events() if e["event"] == "listening")["admin_port"]
    return f"127.0.0.1:{port}"


class Refusals:
    def refused(self, code, reason, call):
        with self.assertRaises(WinnowError) as caught:
            call()
        self.assertEqual((caught.exception.code.name, caught.exception.reason), (code, reason))
        return caught.exception


class Prefixes(Refusals, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def client(self, tenant):
        client = Client(self.server.address, tenant=tenant, retry=RetryPolicy(attempts=1))
        self.addCleanup(client.close)
        return client

    def test_a_prefix_is_there_before_the_first_request(self):
        client = self.client("first")
        answer = client.put_prefix("doc", TEXT, pinned=True, ttl_seconds=3600)
        prefix = answer.prefix
        self.assertEqual(answer.usage.cached_tokens, 0)
        self.assertEqual((prefix.name, prefix.pinned), ("doc", True))
        self.assertTrue(0 < prefix.tokens <= answer.usage.prompt_tokens < prefix.tokens + 256)
        self.assertTrue(3590 < prefix.expires_in_seconds <= 3600)
        self.assertGreaterEqual(cached(client, TEXT), prefix.tokens - prefix.tokens // prefix.blocks)
        def looked():
            seen, = client.list_prefixes()
            return seen.HasField("fast_blocks") and seen.fast_blocks == seen.blocks == prefix.blocks
        eventually(looked, "the sweep has seen all blocks in fast memory")

    def test_chats_leave_the_answer_open(self):
        client = self.client("chat")
        messages = [("system", TEXT)]
        tokens = client.put_prefix("chat", messages=messages).usage.prompt_tokens
        self.assertEqual(client.tokenize(messages=messages + [("user", "Hello")])[:tokens - 1][:64],
                         client.tokenize(messages=messages)[:64])
        answer = client.generate(messages=messages + [("user", "Hello")], max_tokens=1)
        self.assertGreater(answer.usage.cached_tokens, tokens - 64)

    def test_names_are_replaced_changed_and_deleted(self):
        client = self.client("names")
        client.put_prefix("b", TEXT)
        client.put_prefix("a", list(range(5, 200)))
        self.assertEqual([p.name for p in client.list_prefixes()], ["a", "b"])
        self.assertEqual([p.name for p in client.list_prefixes("b")], ["b"])
        blocks = client.list_prefixes("a")[0].blocks
        client.put_prefix("a", list(range(5, 100)))
        self.assertLess(client.list_prefixes("a")[0].blocks, blocks)
        self.assertTrue(client.pin_prefix("a").pinned)
        changed = client.pin_prefix("a", None, ttl_seconds=100)
        self.assertTrue(changed.pinned)
        self.assertTrue(90 < changed.expires_in_seconds <= 100)
        self.assertFalse(client.pin_prefix("a", False, ttl_seconds=0).HasField("expires_in_seconds"))
        self.assertGreater(cached(client, TEXT), 0)
        client.delete_prefix("b")
        self.assertEqual(cached(client, TEXT), 0)  # its KV went, too
        self.refused("NOT_FOUND", "PREFIX_NOT_FOUND", lambda: client.delete_prefix("b"))
        self.refused("NOT_FOUND", "PREFIX_NOT_FOUND", lambda: client.pin_prefix("b"))

    def test_a_shorter_prefix_survives_a_longer_one(self):
        client = self.client("nested")
        client.put_prefix("long", TEXT + OTHER)
        short = client.put_prefix("short", TEXT)
        self.assertGreater(short.usage.cached_tokens, 0)
        client.delete_prefix("long")
        self.assertGreaterEqual(cached(client, TEXT) + 2 * short.prefix.tokens // short.prefix.blocks, short.prefix.tokens)
        self.assertLess(cached(client, TEXT + OTHER), short.prefix.tokens + 1)

    def test_names_end_in_time(self):
        client = self.client("times")
        client.put_prefix("brief", TEXT, ttl_seconds=1)
        eventually(lambda: not client.list_prefixes(), "it expires")

    def test_what_is_wrong_is_named(self):
        client = self.client("wrong")
        for name in ("", "a/b", "x" * 129, "\u00e4"):
            error = self.refused("INVALID_ARGUMENT", "INVALID_FIELD", lambda: client.put_prefix(name, TEXT))
            self.assertEqual(error.violations[0][0], "name")
        for ttl in (-1, 31536001):
            self.refused("INVALID_ARGUMENT", "INVALID_FIELD", lambda: client.put_prefix("x", TEXT, ttl_seconds=ttl))
        self.refused("INVALID_ARGUMENT", "INVALID_FIELD", lambda: client.put_prefix("x", "Short."))
        self.refused("INVALID_ARGUMENT", "INVALID_FIELD", lambda: client.put_prefix("x", [1 << 30] * 64))
        self.refused("INVALID_ARGUMENT", "INVALID_FIELD", lambda: client._unary(client._put_prefix, prefix_pb.PutPrefixRequest(name="x")))
        self.assertEqual(client.list_prefixes(), [])

    def test_a_tenant_has_a_bound(self):
        client = self.client("many")
        for i in range(256):
            client.put_prefix(f"p{i}", list(range(5, 70)))
        self.refused("RESOURCE_EXHAUSTED", "TOO_MANY_PREFIXES", lambda: client.put_prefix("p256", list(range(5, 70))))
        client.put_prefix("p0", list(range(6, 71)))  # in place of another
        self.assertEqual(len(client.list_prefixes()), 256)

    def test_another_tenant_sees_and_changes_nothing(self):
        mine, other = self.client("mine"), self.client("other")
        mine.put_prefix("secret", TEXT, pinned=True)
        self.assertEqual(other.list_prefixes(), [])
        self.assertEqual(other.list_prefixes("secret"), [])
        for call in (lambda: other.pin_prefix("secret", False), lambda: other.delete_prefix("secret")):
            self.refused("NOT_FOUND", "PREFIX_NOT_FOUND", call)
        self.assertEqual(cached(other, TEXT), 0)
        other.put_prefix("secret", OTHER)
        other.delete_prefix("secret")
        seen, = mine.list_prefixes()
        self.assertEqual((seen.name, seen.pinned), ("secret", True))
        self.assertGreater(cached(mine, TEXT), 0)

    def test_a_call_that_is_cancelled_names_nothing(self):
        client = self.client("gone")
        request = prefix_pb.PutPrefixRequest(name="gone")
        request.text.text = TEXT * 20
        call = client._put_prefix.future(request, metadata=client._metadata)
        call.cancel()
        with self.assertRaises(grpc.FutureCancelledError):
            call.result()
        metadata = [("x-winnow-tenant", "gone")]
        with self.assertRaises(grpc.RpcError) as caught:
            client._put_prefix(request, metadata=metadata, timeout=0.001)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
        self.assertEqual(client.list_prefixes(), [])

    def test_the_async_client_has_the_same(self):
        async def everything():
            async with AsyncClient(self.server.address, tenant="async") as client:
                await client.put_prefix("doc", TEXT, pinned=True)
                self.assertFalse((await client.pin_prefix("doc", False)).pinned)
                self.assertEqual([p.name for p in await client.list_prefixes()], ["doc"])
                await client.delete_prefix("doc")
                self.assertEqual(await client.list_prefixes(), [])
        asyncio.run(everything())


class OverHttp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def ask(self, method, path="", body=None, tenant="http", server=None, status=200, **headers):
        own = http.client.HTTPConnection("127.0.0.1", (server or self.server).http_port, timeout=PATIENCE)
        try:
            own.request(method, "/v1/prefixes" + path, body if body is None or isinstance(body, str) else json.dumps(body),
                        {**({"x-winnow-tenant": tenant} if tenant else {}), **headers})
            response = own.getresponse()
            text = response.read()
            self.assertEqual(response.status, status, text)
            return json.loads(text) if text else response.headers
        finally:
            own.close()

    def error(self, *args, **kwargs):
        error = self.ask(*args, **kwargs)["error"]
        return error["code"], error["param"]

    def names(self, tenant="http"):
        answer = self.ask("GET", tenant=tenant)
        self.assertEqual(answer["object"], "list")
        return [prefix["name"] for prefix in answer["data"]]

    def test_a_name_is_one_over_both_ports(self):
        put = self.ask("PUT", "/doc", {"prompt": TEXT, "pinned": True, "ttl_seconds": 3600}, tenant="both")
        self.assertEqual((put["object"], put["name"], put["pinned"]), ("prefix", "doc", True))
        self.assertEqual(put["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertTrue(0 < put["tokens"] <= put["usage"]["prompt_tokens"] < put["tokens"] + 256)
        with Client(self.server.address, tenant="both") as client:
            seen, = client.list_prefixes()
            self.assertEqual((seen.name, seen.tokens, seen.blocks, seen.pinned), ("doc", put["tokens"], put["blocks"], True))
            self.assertTrue(3590 < seen.expires_in_seconds <= 3600)
            self.assertGreaterEqual(cached(client, TEXT), put["tokens"] - put["tokens"] // put["blocks"])
            eventually(lambda: self.ask("GET", "/doc", tenant="both")["fast_blocks"] == put["blocks"], "the sweep has looked")
            changed = self.ask("PATCH", "/doc", {"pinned": False, "ttl_seconds": 0}, tenant="both")
            self.assertEqual((changed["pinned"], changed["expires_in_seconds"]), (False, None))
            self.assertTrue(self.ask("PATCH", "/doc", {"pinned": True}, tenant="both")["pinned"])
            brief = self.ask("PATCH", "/doc", {"ttl_seconds": 100}, tenant="both")
            self.assertTrue(brief["pinned"] and 90 < brief["expires_in_seconds"] <= 100)
            self.assertEqual(self.ask("DELETE", "/doc", tenant="both"),
                             {"object": "prefix.deleted", "name": "doc", "deleted": True})
            self.assertEqual(client.list_prefixes(), [])
            self.assertEqual(cached(client, TEXT), 0)
            # As gRPC makes it: the same tokens, whichever port names them.
            for body, prompt in (({"prompt": list(range(5, 200))}, {"prompt": list(range(5, 200))}),
                                 ({"messages": [{"role": "system", "content": TEXT}]}, {"messages": [("system", TEXT)]})):
                over_http = self.ask("PUT", "/same", body, tenant="both")
                over_grpc = client.put_prefix("same", **prompt)
                self.assertEqual(over_http["usage"]["prompt_tokens"], over_grpc.usage.prompt_tokens)
                self.assertEqual(over_grpc.usage.cached_tokens // 64 * 64, over_grpc.usage.cached_tokens)
                self.assertGreater(over_grpc.usage.cached_tokens, 0)

    def test_a_large_body_is_read_by_another_thread(self):
        words = "word " * 8000  # more than is read on an I/O thread
        for body in ({"prompt": words}, {"messages": [{"role": "user", "content": words}]}):
            self.assertGreater(self.ask("PUT", "/long", body, tenant="large")["tokens"], 7000)
        for body, param in (({"prompt": words * 10}, "prompt"), ({"messages": [{"role": "user", "content": words * 10}]}, "messages")):
            self.assertEqual(self.error("PUT", "/longer", body, tenant="large", status=400), ("context_length_exceeded", param))
        self.assertEqual(self.names("large"), ["long"])

    def test_names_end_in_time(self):
        self.ask("PUT", "/brief", {"prompt": TEXT, "ttl_seconds": 1}, tenant="times")
        eventually(lambda: not self.names("times"), "it expires")

    def test_what_is_wrong_is_named(self):
        for name in ("/", "/a%2Fb", "/a/b", "/" + "x" * 129):
            self.assertEqual(self.error("PUT", name, {"prompt": TEXT}, status=400), ("invalid_field", "name"))
            self.assertEqual(self.error("PATCH", name, {"pinned": True}, status=400), ("invalid_field", "name"))
            self.assertEqual(self.error("DELETE", name, status=400), ("invalid_field", "name"))
        self.assertEqual(self.error("GET", "/a%2Fb", status=400), ("invalid_field", "name"))
        self.assertEqual(self.error("GET", "/", status=404)[0], "prefix_not_found")
        for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"pinned": True})):
            self.assertEqual(self.error(method, "/nobody", body, status=404)[0], "prefix_not_found")
        for body, param in (({}, "prompt"), ({"prompt": TEXT, "pined": True}, "pined"), ({"prompt": 3}, "prompt"),
                            ({"prompt": TEXT, "ttl_seconds": -1}, "ttl_seconds"), ({"prompt": TEXT, "ttl_seconds": 31536001}, "ttl_seconds"),
                            ({"prompt": TEXT, "ttl_seconds": 1.5}, "ttl_seconds"), ({"prompt": TEXT, "pinned": "yes"}, "pinned"),
                            ({"prompt": "Short."}, "prompt"), ({"prompt": [1 << 30] * 64}, "prompt[0]"), ({"messages": []}, "messages"),
                            ({"prompt": TEXT, "messages": [{"role": "user", "content": "x"}]}, "prompt")):
            self.assertEqual(self.error("PUT", "/x", body, status=400), ("invalid_field", param), body)
        for body, param in (({}, "pinned"), ({"pinned": 1}, "pinned"), ({"prompt": "x"}, "prompt"), ({"ttl_seconds": -1}, "ttl_seconds")):
            self.assertEqual(self.error("PATCH", "/x", body, status=400), ("invalid_field", param), body)
        for body in ("", "[]", "{", "\"x\""):
            self.assertEqual(self.error("PUT", "/x", body, status=400)[0], "invalid_encoding")
            self.assertEqual(self.error("PATCH", "/x", body, status=400)[0], "invalid_encoding")
        self.assertEqual(self.error("PUT", "/x", {"prompt": TEXT, "model": "another"}, status=404)[0], "model_not_found")
        for method, path, allowed in (("POST", "/x", {"GET", "PUT", "PATCH", "DELETE"}), ("PUT", "", {"GET"})):
            own = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=PATIENCE)
            own.request(method, "/v1/prefixes" + path, "{}")
            response = own.getresponse()
            self.assertEqual((response.status, set(response.headers["Allow"].split(", "))), (405, allowed))
            own.close()
        self.assertEqual(self.names(), [])

    def test_another_tenant_sees_and_changes_nothing(self):
        self.ask("PUT", "/secret", {"prompt": TEXT}, tenant="mine")
        self.assertEqual(self.names("other"), [])
        for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"pinned": True})):
            self.assertEqual(self.error(method, "/secret", body, tenant="other", status=404)[0], "prefix_not_found")
        put = self.ask("PUT", "/secret", {"prompt": TEXT}, tenant="other")
        self.assertEqual(put["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.ask("DELETE", "/secret", tenant="other")
        self.assertEqual(self.names("mine"), ["secret"])
        self.assertEqual(self.error("GET", "", tenant="not a tenant\u00e9", status=400)[0], "invalid_metadata")

    def test_a_client_that_goes_away_names_nothing(self):
        for _ in range(20):
            own = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=PATIENCE)
            own.request("PUT", "/v1/prefixes/gone", json.dumps({"prompt": TEXT * 4}), {"x-winnow-tenant": "gone"})
            own.close()
        # What was done before its client went may have its name; then nothing is open, and the server goes on.
        with Client(self.server.address, tenant="gone") as client:
            client.generate("x", max_tokens=1)
            eventually(lambda: self.server.metric("winnow_requests_running") == 0, "nothing runs")
            self.assertIn(self.names("gone"), ([], ["gone"]))
            self.assertGreater(client.put_prefix("gone", TEXT).prefix.tokens, 0)

    def test_every_route_wants_a_key_and_its_name_is_the_tenant(self):
        with temporary_directory() as directory:
            keys = directory / "keys"
            keys.write_text("".join(f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in (("alice", "a-key"), ("bob", "b-key"))))
            with Server("--api-keys", keys) as server:
                def ask(*args, key=None, **kwargs):
                    return self.ask(*args, server=server, **{"tenant": None, **kwargs, **({"Authorization": f"Bearer {key}"} if key else {})})
                calls = (("GET", "", None), ("GET", "/x", None), ("PUT", "/x", {"prompt": TEXT}), ("PATCH", "/x", {"pinned": True}), ("DELETE", "/x", None))
                for key in (None, "c-key"):
                    for call in calls:
                        self.assertEqual(ask(*call, key=key, status=401)["error"]["code"], "invalid_api_key")
                ask("PUT", "/x", {"prompt": TEXT}, key="a-key")
                self.assertEqual([p["name"] for p in ask("GET", key="a-key")["data"]], ["x"])
                self.assertEqual(ask("GET", key="b-key")["data"], [])
                for call in calls:
                    self.assertEqual(ask(*call, key="b-key", tenant="alice", status=403)["error"]["code"], "tenant_mismatch")
                self.assertEqual(server.terminate(), 0)

    def test_quotas_hold(self):
        with temporary_directory() as directory:
            tenants = directory / "tenants"
            tenants.write_text("tenants:\n  small: {running_tokens: 50}\n")
            with Server("--tenants", tenants) as server:
                self.assertEqual(self.ask("PUT", "/x", {"prompt": TEXT}, tenant="small", server=server, status=429)["error"]["code"], "quota_exceeded")
                self.ask("PUT", "/x", {"prompt": TEXT}, tenant="large", server=server)


class CacheOptions(Refusals, unittest.TestCase):
    """What a request says about the prefix cache, over gRPC and HTTP."""

    def over_grpc(self, server, text, **cache):
        with Client(server.address, tenant="t", retry=RetryPolicy(attempts=1)) as client:
            return client.generate(text, max_tokens=1, **{f"cache_{name}": value for name, value in cache.items()}).usage.cached_tokens

    def over_http(self, server, text, **cache):
        own = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE)
        own.request("POST", "/v1/completions", json.dumps({"prompt": text, "max_tokens": 1, "winnow": {"cache": cache}}),
                    {"x-winnow-tenant": "t"})
        response = own.getresponse()
        answer = json.loads(response.read())
        own.close()
        self.assertEqual(response.status, 200, answer)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def test_each_is_honoured(self):
        for i, ask in enumerate((self.over_grpc, self.over_http)):
            with self.subTest(transport=ask.__name__), Server() as server:
                text, other, salted = TEXT, OTHER, TEXT + OTHER
                self.assertEqual(ask(server, text, store=False), 0)
                self.assertEqual(ask(server, text), 0, "it left nothing")
                found = ask(server, text)
                self.assertGreater(found, 0)
                self.assertEqual(ask(server, text, use=False), 0)
                self.assertEqual(ask(server, text, store=False), found)
                self.assertEqual(ask(server, salted + "x", salt="a"), 0)
                self.assertEqual(ask(server, salted + "x", salt="b"), 0)
                self.assertGreater(ask(server, salted + "x", salt="a"), 0)
                self.assertEqual(ask(server, other, ttl_seconds=1, priority=6), 0)
                # Looks do not keep it: they leave nothing.
                eventually(lambda: ask(server, other, store=False) == 0, "its time is over")  # noqa: B023
                self.assertEqual(ask(server, text), found)

    def test_what_contradicts_is_refused(self):
        with Server() as server, Client(server.address, retry=RetryPolicy(attempts=1)) as client:
            for options, field in (({"cache_priority": 7}, "cache.priority"), ({"cache_ttl_seconds": -1}, "cache.ttl_seconds"),
                                   ({"cache_store": False, "cache_ttl_seconds": 5}, "cache.store"), ({"cache_salt": "s" * 1025}, "cache.salt")):
                error = self.refused("INVALID_ARGUMENT", "INVALID_FIELD", lambda: client.generate("x", **options))  # noqa: B023
                self.assertEqual(error.violations[0][0], field)
            with self.assertRaises(TypeError):
                client.generate("x", cache_prio=1)
            result = run("generate", "--server", server.address, "--prompt", TEXT, "--max-tokens", 1, "--json", "--no-cache-store")
            self.assertEqual(result.returncode, 0, result.stderr)
            for flags, cached in (((), False), ((), True), (("--no-cache-use",), False), (("--cache-salt", "x"), False), (("--cache-salt", "x"), True),
                                  (("--cache-ttl", 60, "--cache-priority", 1), True)):
                result = run("generate", "--server", server.address, "--prompt", TEXT, "--max-tokens", 1, "--json", *flags)
                self.assertEqual(json.loads(result.stdout)["usage"]["cached_tokens"] > 0, cached, flags)
            result = run("generate", "--server", server.address, "--prompt", TEXT, "--max-tokens", 1, "--no-cache-store", "--cache-ttl", 5)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("cache.store", result.stderr)

    def test_chat_says_them_with_every_question(self):
        with Server() as server:
            def first_answer(*flags):
                talk = run("chat", "--server", server.address, "--max-tokens", 1, "--system", TEXT, *flags, input="Hello\n")
                self.assertEqual(talk.returncode, 0, talk.stderr)
                return int(re.search(r"\[\d+ tokens, (\d+) of them cached", talk.stderr)[1])

            self.assertEqual(first_answer("--no-cache-store"), 0)
            self.assertEqual(first_answer(), 0, "it left nothing")
            self.assertGreater(first_answer(), 0)
            self.assertEqual(first_answer("--no-cache-use"), 0)
            self.assertEqual(first_answer("--cache-salt", "x"), 0)
            self.assertGreater(first_answer("--cache-salt", "x"), 0)
            for flags, field in ((("--cache-priority", 7), "cache.priority"), (("--no-cache-store", "--cache-ttl", 5), "cache.store")):
                talk = run("chat", "--server", server.address, *flags, input="Hello\n")
                self.assertEqual(talk.returncode, 1, talk.stderr)
                self.assertIn(field, talk.stderr)

    def test_they_hold_over_restarts(self):
        with temporary_directory() as directory:
            flags = ("--store-dir", directory / "store", "--disk-bytes", "256MiB")
            brief, long, private = "Brief. " + TEXT, "Long. " + TEXT, "Private. " + OTHER
            with Server(*flags) as server, Client(server.address, tenant="t") as client:
                self.over_grpc(server, private, store=False)
                self.over_grpc(server, brief, ttl_seconds=2)
                self.over_grpc(server, long, ttl_seconds=1000, priority=5)
                prefix = client.put_prefix("kept", TEXT).prefix
                eventually(lambda: client.list_prefixes()[0].stored_blocks == prefix.blocks, "the store has it, and what came before")
                self.assertEqual(server.terminate(), 0)
            stat = json.loads(run("store", "stat", "--store", directory / "store", "--json").stdout)
            self.assertGreater(stat["blocks_by_priority"][5], 0)
            self.assertGreaterEqual(stat["expiring_blocks"], stat["blocks_by_priority"][5])
            self.assertEqual(sum(stat["blocks_by_priority"]), stat["blocks"])
            with Server(*flags) as server:
                self.assertEqual(self.over_grpc(server, private), 0)
                eventually(lambda: self.over_grpc(server, brief, store=False) == 0, "its time is over, which went on meanwhile")
                self.assertGreater(self.over_grpc(server, long, store=False), 0)
                self.assertGreater(self.over_grpc(server, TEXT), 0)


class Off(Refusals, unittest.TestCase):
    def test_without_a_prefix_cache_there_are_no_names(self):
        with Server("--prefix-cache", "off") as server, Client(server.address) as client:
            for method, path, body in (("GET", "", None), ("PUT", "/x", {"prompt": TEXT}), ("PATCH", "/x", {"pinned": True}), ("DELETE", "/x", None)):
                own = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE)
                own.request(method, "/v1/prefixes" + path, body and json.dumps(body))
                response = own.getresponse()
                self.assertEqual((response.status, json.loads(response.read())["error"]["code"]), (400, "prefix_cache_off"))
                own.close()
            for call in (lambda: client.put_prefix("x", TEXT), client.list_prefixes, lambda: client.pin_prefix("x"),
                         lambda: client.delete_prefix("x")):
                self.refused("FAILED_PRECONDITION", "PREFIX_CACHE_OFF", call)


class Restarts(unittest.TestCase):
    def stored(self, client, name, pinned=True):
        def all_of_it():
            seen, = client.list_prefixes(name)
            return seen.stored_blocks == seen.blocks and (not pinned or seen.pinned_blocks == seen.blocks)
        eventually(all_of_it, f"{name} is in the store")

    def test_names_and_pins_outlive_the_process_however_it_ends(self):
        with temporary_directory() as directory:
            flags = ("--disk-bytes", "256MiB", "--store-dir", directory / "store", "--admin-listen", "127.0.0.1:0")
            with Server(*flags) as server, Client(server.address, tenant="a") as client:
                tokens = client.put_prefix("kept", TEXT, pinned=True).prefix.tokens
                client.put_prefix("timed", OTHER, ttl_seconds=3600)
                client.put_prefix("brief", list(range(5, 100)), ttl_seconds=1)
                client.put_prefix("deleted", TEXT + "More of it. " * 20, pinned=True)
                client.delete_prefix("deleted")
                self.stored(client, "kept")
                self.stored(client, "timed", pinned=False)
                server.signal(signal.SIGKILL)
                server.wait()
            with Server(*flags) as server, Client(server.address, tenant="a") as client:
                eventually(lambda: [p.name for p in client.list_prefixes()] == ["kept", "timed"], "the brief one is over")
                kept, timed = client.list_prefixes()
                self.assertEqual((kept.tokens, kept.pinned, kept.HasField("expires_in_seconds")), (tokens, True, False))
                self.assertTrue(3000 < timed.expires_in_seconds < 3600)
                self.stored(client, "kept")
                usage = client.generate(TEXT + "What then?", max_tokens=1).usage
                self.assertGreater(usage.cached_tokens, tokens - 64)
                client.delete_prefix("kept")
                self.assertEqual(server.terminate(), 0)
            with Server(*flags) as server, Client(server.address, tenant="a") as client:
                self.assertEqual([p.name for p in client.list_prefixes()], ["timed"])
                self.assertEqual(cached(client, TEXT), 0)
                with Admin(admin_address(server)) as admin:
                    self.assertEqual(admin.state().store.pinned_bytes, 0)
                self.assertEqual(server.terminate(), 0)
            # A file that is damaged is put aside, and pins that nobody has a name for are given free.
            names = directory / "store" / "prefixes"
            names.write_bytes(names.read_bytes().replace(b"timed", b"tamed"))
            with Server(*flags) as server, Client(server.address, tenant="a") as client:
                self.assertEqual(client.list_prefixes(), [])
                self.assertIn("warn", {e["level"] for e in server.events() if e["event"] == "prefixes"})
                self.assertTrue((directory / "store" / "prefixes.aside").exists())


class Administration(Refusals, unittest.TestCase):
    def test_state_log_level_and_drain(self):
        with Server("--admin-listen", "127.0.0.1:0", "--host-bytes", "256MiB") as server:
            address = admin_address(server)
            with Admin(address) as admin, Client(server.address) as client:
                client.put_prefix("x", TEXT, pinned=True)
                eventually(lambda: admin.state().calls == 0, "the call is closed")  # a moment after its answer
                state = admin.state()
                self.assertEqual((state.calls, state.running, state.draining, state.failed), (0, 0, False, False))
                self.assertEqual((state.named_prefixes, state.pinned_prefixes, state.log_level), (1, 1, "info"))
                self.assertGreater(state.kv_blocks, state.kv_blocks_idle)
                self.assertGreater(state.kv_blocks_idle, 0)
                self.assertLess(state.heartbeat_age_seconds, 60)
                self.assertEqual(state.store.state, "ok")
                self.assertGreater(state.store.capacity_bytes, 0)
                self.assertEqual(state.model, "needle-5m")
                self.assertEqual(admin.set_log_level("error"), "info")
                client.generate("x", max_tokens=1)
                self.assertEqual(admin.set_log_level("info"), "error")
                self.refused("INVALID_ARGUMENT", "INVALID_FIELD", lambda: admin.set_log_level("loud"))
                self.assertFalse([e for e in server.events() if e["event"] == "request" and e["prompt_tokens"] < 5])
                async def from_asyncio():
                    async with AsyncAdmin(address) as other:
                        return (await other.state()).log_level
                self.assertEqual(asyncio.run(from_asyncio()), "info")
                admin.drain()
            self.assertEqual(server.wait(), 0)
            self.assertIn("admin", {e.get("by") for e in server.events() if e["event"] == "drain_begins"})

    def test_it_is_off_on_the_other_ports_and_wants_the_operators_key(self):
        with temporary_directory() as directory:
            keys = directory / "keys"
            keys.write_text("".join(f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n"
                                    for name, key in (("admin", "root"), ("alice", "a-key"))))
            with Server("--admin-listen", "localhost:0", "--api-keys", keys) as server:
                address = admin_address(server)
                for key, code, reason in ((None, "UNAUTHENTICATED", "INVALID_API_KEY"), ("nobody", "UNAUTHENTICATED", "INVALID_API_KEY"),
                                          ("a-key", "PERMISSION_DENIED", "NOT_ADMIN")):
                    with Admin(address, api_key=key) as admin:
                        for call in (admin.state, admin.drain, lambda: admin.set_log_level("debug")):
                            self.refused(code, reason, call)
                with Admin(address, api_key="root") as admin:
                    self.assertFalse(admin.state().draining)
                # Neither service is on the other's port.
                with Admin(server.address, api_key="root") as admin, Client(address, api_key="root") as client:
                    self.refused("UNIMPLEMENTED", "", admin.state)
                    self.refused("UNIMPLEMENTED", "", client.list_prefixes)
                    self.refused("UNIMPLEMENTED", "", client.model)


if __name__ == "__main__":
    main()

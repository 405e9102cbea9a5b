#!/usr/bin/python3
"""PrefixService and AdminService of the real program, through clients/python: names, pins, times, restarts, tenants; state, log level,
drain."""
import asyncio
import hashlib
import signal
import sys
import unittest

import grpc

from harness import SOURCE, Server, eventually, main, temporary_directory

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


class Off(Refusals, unittest.TestCase):
    def test_without_a_prefix_cache_there_are_no_names(self):
        with Server("--prefix-cache", "off") as server, Client(server.address) as client:
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

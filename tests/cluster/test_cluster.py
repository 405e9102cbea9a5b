"""Several servers behind a router: PyPI's smg (scripts/smg.sh) before one of them, and before three.

What is claimed: all routes of the router answer; follow-ups of a chat go to the server that holds its prefix; where a
server is killed under load nothing is lost but what was in flight on it; a server that is added takes part.
"""
import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from harness import PATIENCE, SOURCE, Server, eventually, main  # noqa: E402

sys.path.append(str(SOURCE / "loadtest"))
from ports import unused_port  # noqa: E402

FLAGS = ("--kv-events", "on", "--anonymous-prefixes", "shared", "--max-context", "8192", "--kv-bytes", "64MiB", "--max-running", "8", "--threads", "1",
         "--index", "none", "--retrieval-from", "0", "--model-name", "needle")
WORDS = ("river mountain engine letter garden window station market harbor forest bridge castle village meadow island "
         "valley tower kitchen library museum").split()


def find_smg():
    found = subprocess.run([SOURCE / "scripts/smg.sh", "--cached"], capture_output=True, text=True)
    return found.stdout.splitlines()[-1] if found.returncode == 0 else None


class Router:
    """smg before `servers`. It cannot choose its ports itself."""

    def __init__(self, servers, policy="cache_aware"):
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = tempfile.TemporaryDirectory(prefix="winnow-cluster-")
        self.log_path = os.path.join(self.directory.name, "log")
        command = [find_smg(), "launch", "--host", "127.0.0.1", "--port", self.port, "--policy", policy,
                   "--prometheus-port", unused_port(), "--health-check-interval-secs", 1, "--health-failure-threshold", 1,
                   "--health-success-threshold", 1, "--worker-urls", *(f"grpc://{s.address}" for s in servers)]
        environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, env=environment,
                                            cwd=self.directory.name)
        try:
            eventually(lambda: self.process.poll() is not None or len(self.ready()) == len(servers),
                       "the router knows its servers")
            eventually(self.answers, "the router answers")
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.directory.cleanup()

    def log(self):
        return pathlib.Path(self.log_path).read_text(errors="replace")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as page:
            return json.load(page)

    def post(self, path, body, timeout=PATIENCE):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as page:
            return page.read().decode()

    def workers(self):
        try:
            return self.get("/workers")["workers"]
        except (OSError, ValueError):
            return []  # it does not listen yet

    def ready(self):
        return [worker["url"] for worker in self.workers() if worker["is_healthy"]]

    def answers(self):
        """It has the tokenizer as well, which it asks a server for."""
        try:
            return json.loads(self.post("/v1/completions", {"model": "needle", "prompt": "a", "max_tokens": 1}))
        except (OSError, ValueError):
            time.sleep(0.05)
            return None


def chat_body(messages, tokens=8, **fields):
    return {"model": "needle", "messages": messages, "max_tokens": tokens, "temperature": 0, **fields}


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


class Chat:
    """A conversation about a text of its own."""

    def __init__(self, number):
        words = " ".join(WORDS[(i * (number + 3) + i * i // 7) % len(WORDS)] for i in range(220))
        self.messages = [{"role": "user", "content": f"Chat {number}. {words}"}]
        self.turns = []  # the router's name of each answer

    def turn(self, router, stream=False):
        answer = router.post("/v1/chat/completions", chat_body(self.messages, stream=stream))
        if stream:
            # The router cannot make good a stream whose server went: no end, or an error before it.
            events = events_of(answer)
            if not answer.rstrip().endswith("data: [DONE]") or any("error" in event for event in events):
                raise ValueError(f"a stream was cut: {answer[-200:]}")
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
            self.turns.append(events[0]["id"])
        else:
            body = json.loads(answer)
            text = body["choices"][0]["message"]["content"]
            self.turns.append(body["id"])
        self.messages += [{"role": "assistant", "content": text or "."},
                          {"role": "user", "content": f"And then, number {len(self.turns)}?"}]


class Load:
    """Clients that chat, half of them streaming, until the end of the `with`."""
    CLIENTS = 6

    def __init__(self, router):
        self.router, self.over, self.lock = router, threading.Event(), threading.Lock()
        self.calls = []  # (begin, end, the router's name of the answer or None, error or None)
        self.threads = [threading.Thread(target=self.run, args=(number,)) for number in range(self.CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()

    def run(self, number):
        chat, chats = None, 0
        while not self.over.is_set():
            if chat is None or len(chat.turns) == 4:
                chat, chats = Chat(1000 * (number + 1) + chats), chats + 1
            begin, error = time.monotonic(), None
            try:
                chat.turn(self.router, stream=number % 2 == 0)
            except (OSError, ValueError) as problem:
                error = f"{problem}: {problem.read().decode()}" if hasattr(problem, "read") else str(problem)
            with self.lock:
                self.calls.append((begin, time.monotonic(), None if error else chat.turns[-1], error))
            if error:
                chat = None

    def good(self):
        with self.lock:
            return sum(error is None for *_, error in self.calls)

    def failed(self):
        return [call for call in self.calls if call[3]]

    def wait_for(self, more):
        """Until so many more calls are answered."""
        enough = self.good() + more
        eventually(lambda: self.good() >= enough, "clients are answered")


def requests_of(servers):
    """What each server's log says of its calls, by the router's name of them."""
    found = collections.defaultdict(list)
    for server in servers:
        for event in server.events():
            if event["event"] == "request":
                found[event["client_id"]].append((server.address, event))
    return found


class OneServer(unittest.TestCase):
    def test_all_routes_answer_as_the_server_itself_does(self):
        with Server(*FLAGS) as server, Router([server]) as router:
            own = f"http://127.0.0.1:{server.http_port}"
            messages = [{"role": "user", "content": "Tell me of the river."}]

            def direct(path, body):
                request = urllib.request.Request(own + path, json.dumps(body).encode(),
                                                 {"Content-Type": "application/json"})
                return json.load(urllib.request.urlopen(request, timeout=PATIENCE))

            expected = direct("/v1/chat/completions", chat_body(messages))["choices"][0]["message"]["content"]
            self.assertTrue(expected)
            chat = json.loads(router.post("/v1/chat/completions", chat_body(messages)))
            self.assertEqual(chat["choices"][0]["message"]["content"], expected)
            self.assertEqual(chat["choices"][0]["finish_reason"], "length")
            self.assertEqual(chat["usage"]["completion_tokens"], 8)

            stream = events_of(router.post("/v1/chat/completions", chat_body(
                messages, stream=True, stream_options={"include_usage": True})))
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in stream if e["choices"])
            self.assertEqual(text, expected)
            self.assertEqual(stream[-1]["usage"]["completion_tokens"], 8)

            responses = json.loads(router.post("/v1/responses", {
                "model": "needle", "input": messages, "max_output_tokens": 16, "temperature": 0}))
            self.assertTrue(responses["output"][0]["content"][0]["text"].startswith(expected.rstrip("\ufffd")))
            claude = json.loads(router.post("/v1/messages", {
                "model": "needle", "messages": messages, "max_tokens": 8, "temperature": 0}))
            self.assertEqual(claude["content"][0]["text"], expected)
            completion = json.loads(router.post("/v1/completions", {
                "model": "needle", "prompt": "The river", "max_tokens": 8, "temperature": 0}))
            self.assertEqual(completion["usage"]["completion_tokens"], 8)
            self.assertTrue(completion["choices"][0]["text"])
            # A client that goes away ends its call here, too.
            with socket.create_connection(("127.0.0.1", router.port), timeout=PATIENCE) as client:
                body = json.dumps(chat_body(messages, tokens=7000, stream=True, ignore_eos=True)).encode()
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                               b"Content-Length: %d\r\n\r\n" % len(body) + body)
                client.recv(100)
                eventually(lambda: server.metric("winnow_requests_running") == 1, "the long call runs")
            eventually(lambda: server.metric("winnow_requests_running") == 0, "the long call ends")
            with self.assertRaises(urllib.error.HTTPError) as raised:
                router.post("/v1/chat/completions", chat_body(messages, tokens=100_000))
            self.assertEqual(raised.exception.code, 400)
            self.assertIn("max_tokens", raised.exception.read().decode())


class ThreeServers(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.servers = [self.stack.enter_context(Server(*FLAGS)) for _ in range(3)]
        self.router = self.stack.enter_context(Router(self.servers))

    def tearDown(self):
        self.stack.close()

    def join(self, server):
        """One more server, which the router has begun to use."""
        self.servers.append(self.stack.enter_context(server))
        self.router.post("/workers", {"url": f"grpc://{server.address}"})
        eventually(lambda: f"grpc://{server.address}" in self.router.ready(), "the router knows the new server")
        return server

    def share_at_home(self, router, first):
        """Of follow-ups, those that went to the server of the turn before, and found all of its blocks there."""
        chats = [Chat(number) for number in range(first, first + 20)]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for _ in range(4):  # the turns of different chats are mixed
                list(pool.map(lambda chat: chat.turn(router), chats))
        requests = requests_of(self.servers)
        follow_ups = home = 0
        used = set()
        for chat in chats:
            places = []
            for name in chat.turns:
                self.assertEqual(len(requests[name]), 1, "an answer was made twice")
                places.append(requests[name][0])
            used.add(places[0][0])
            for (before, _), (now, event) in zip(places, places[1:]):
                follow_ups += 1
                # All of the prompt but what is new, in blocks of 64 tokens.
                home += now == before and event["cached_tokens"] >= event["prompt_tokens"] - 64 - 40
        print(f"{home} of {follow_ups} follow-ups found their prefix; {len(used)} servers were used", flush=True)
        self.assertEqual(len(used), 3)
        return home / follow_ups

    def test_follow_ups_go_to_the_server_that_holds_their_prefix(self):
        self.assertGreaterEqual(self.share_at_home(self.router, 0), 0.95)
        # By chance it is a third: the measure tells both apart.
        with Router(self.servers, policy="round_robin") as by_turns:
            self.assertLess(self.share_at_home(by_turns, 40), 0.6)

    def test_a_server_is_killed_under_load_and_another_one_added(self):
        with Load(self.router) as load:
            load.wait_for(40)
            victim = self.servers[2]
            victim.process.kill()
            killed = time.monotonic()
            victim.process.wait()
            load.wait_for(60)
            joined = time.monotonic()
            added = self.join(Server(*FLAGS))
            eventually(lambda: added.metric("winnow_sequences_accepted_total") > 5, "the new server takes part")
        # Only what was in flight when the server went, and no more than it can have had.
        for begin, end, _, error in load.failed():
            self.assertLess(begin, killed, error)
            self.assertGreater(end, killed, error)
        self.assertLessEqual(len(load.failed()), load.CLIENTS)
        first_good = min(end for begin, end, _, error in load.calls if begin > killed and not error)
        self.assertLess(first_good - killed, 5)
        rates = [sum(1 for _, end, _, error in load.calls if not error and begin <= end < to) / (to - begin)
                 for begin, to in ((killed - 1, killed), (killed, joined))]
        print(f"{len(load.calls)} calls, {len(load.failed())} failed; answers/s before the kill and after it: "
              f"{rates[0]:.0f}, {rates[1]:.0f}; the first call that began after it ended after {first_good - killed:.2f} s",
              flush=True)
        self.expect_single_answers([server for server in self.servers if server is not victim])

    def test_a_server_is_drained_under_load(self):
        # The router asks for the servers' health each second. Until it knows, this one serves.
        leaving = self.join(Server(*FLAGS, "--drain-delay", "10s"))
        with Load(self.router) as load:
            load.wait_for(40)
            self.assertGreater(leaving.metric("winnow_sequences_accepted_total"), 0)
            leaving.signal(15)
            self.assertEqual(leaving.wait(), 0)
            load.wait_for(40)
        print(f"{len(load.calls)} calls, {len(load.failed())} failed", flush=True)
        self.assertEqual(load.failed(), [])
        self.expect_single_answers(self.servers)

    def expect_single_answers(self, servers):
        """Nobody was answered twice: the router's name of a call is one server's."""
        for name, places in requests_of(servers).items():
            good = [event for _, event in places if event["status"] == "OK"]
            self.assertLessEqual(len(good), 1, name)


if __name__ == "__main__":
    if find_smg() is None:
        print("Skipped: SMG is not there, scripts/smg.sh fetches it from PyPI.", flush=True)
        sys.exit(77)
    main()

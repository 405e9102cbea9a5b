#!/usr/bin/env python3
"""A server under load, Prometheus scraping it, and every query of every panel asked:

    deploy/live.py [--seconds 60] [--prometheus FILE] [--json FILE]

Each must succeed and return data that is finite. Then faults are injected, and the panels and alerts that are for them must move from zero:

    bits of the store's files are flipped     Reads: Trouble, and the alert WinnowStoreCorrupt
    the store's files are cut off             Reads: State, and the alert WinnowStoreErrors
    more comes in than the queue takes        Overview: Refused for want of room
    requests of which only half is sent       Overview: HTTP trouble
    a gRPC header of 1 GiB                    Overview: gRPC trouble
    SIGTERM while clients go on asking        Overview: Draining or failed, Failed by the server

Prometheus is Debian's package prometheus, or --prometheus. The model is models/needle-5m, with TLS, KV over a disk tier, prefetch, and
policies of every kind. Exit code 1 where something did not return data or did not move.
"""
import argparse
import contextlib
import http.client
import json
import math
import pathlib
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import grpc
import yaml

SOURCE = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SOURCE / "tests/e2e"), str(SOURCE / "loadtest")]
import harness  # noqa: E402
from ports import unused_port  # noqa: E402

WINDOW = "20s"
READ_TIMEOUT = "5s"  # of the server's HTTP port
REFUSED_PAUSE = 0.1  # seconds until a client that was refused asks again
POLICIES = ["dense", "lsh:k=2%,from=0", "lsh:k=2%,p=0.9,from=0", "lsh:k=2%,completion=on,from=0", "lsh:k=4%,suffix=64,from=0",
            "lsh:k=1%,floor=0.99,from=0", "lsh:k=2%,from=0,verify=4"]


# Forms that the answers of some requests keep.
FORMS = [{}, {}, {"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}}, {"structured_outputs": {"choice": ["red", "blue"]}}]


class Prometheus:
    def __init__(self, program, directory, target):
        self.port = unused_port()
        rules = yaml.safe_load((SOURCE / "deploy/monitoring/alerts.yaml").read_text())
        (directory / "alerts.yaml").write_text(yaml.safe_dump(rules))
        (directory / "prometheus.yml").write_text(yaml.safe_dump({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["alerts.yaml"],
            "scrape_configs": [{"job_name": "winnow", "static_configs": [{"targets": [target]}]}]}))
        self.log = open(directory / "prometheus.log", "w")
        self.process = subprocess.Popen([program, f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'tsdb'}",
                                         f"--web.listen-address=127.0.0.1:{self.port}"], stdout=self.log, stderr=self.log)
        harness.eventually(self.ready, "Prometheus")

    def get(self, path, **query):
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def ready(self):
        try:
            return self.get("/api/v1/query", query="1")["result"]
        except (OSError, urllib.error.HTTPError):
            return False

    def points(self, query, range_s=None):
        """{series: finite values} of an instant, or of the last `range_s` seconds."""
        query = query.replace("$__rate_interval", WINDOW).replace("$job", "winnow").replace("$instance", ".*")
        now = time.time()
        data = (self.get("/api/v1/query", query=query, time=now) if range_s is None else
                self.get("/api/v1/query_range", query=query, start=now - range_s, end=now, step=2))
        found = {}
        for series in data["result"]:
            values = [series["value"]] if "value" in series else series["values"]
            finite = [float(value) for _, value in values if math.isfinite(float(value))]
            if finite:
                found[json.dumps(series["metric"], sort_keys=True)] = finite
        return found

    def firing(self):
        return {alert["labels"]["alertname"] for alert in self.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"}

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Load:
    """Clients that ask about a few documents, under all policies, until they are stopped."""

    def __init__(self, server, clients, seed):
        self.server, self.random = server, random.Random(seed)
        self.documents = [" ".join(self.random.choice("red blue green tall old new dog cat house river stone bird runs sleeps sees and the".split())
                                   for _ in range(words)) for words in (600, 1200, *[3000] * 14)]  # more KV than --kv-bytes
        self.stop, self.answers, self.errors = threading.Event(), 0, []
        self.context = ssl._create_unverified_context()
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def open(self, body):
        request = urllib.request.Request(f"https://127.0.0.1:{self.server.http_port}/v1/completions", json.dumps(body).encode())
        return urllib.request.urlopen(request, timeout=120, context=self.context)

    def ask(self, body):
        with self.open(body) as answer:
            return json.load(answer)

    def run(self, client):
        turn = client
        while not self.stop.is_set():
            turn += 1
            try:
                self.ask({"prompt": self.random.choice(self.documents) + f" Question {self.random.randrange(50)}?", "max_tokens": 24,
                          "winnow": {"policy": POLICIES[turn % len(POLICIES)]}, **self.random.choice(FORMS)})
                self.answers += 1
            except urllib.error.HTTPError as error:
                self.errors.append(f"{error.code} {error.read()[:200]}")
                self.stop.wait(REFUSED_PAUSE)
            except OSError as error:
                self.errors.append(repr(error))
                self.stop.wait(REFUSED_PAUSE)

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def make_certificate(directory):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", directory / "key.pem", "-out", directory / "cert.pem", "-days",
                    "90", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)


def came(condition, seconds):
    """The condition's last value: a true one as soon as there is one, or what it is after so many seconds."""
    end, value = time.monotonic() + seconds, None

    def look():
        nonlocal value
        value = condition()
        return value or time.monotonic() > end

    harness.eventually(look, "the condition, or its end")
    return value


def check_panels(prometheus):
    """(failures, rows) of all panels of both dashboards. What counts only some requests has data within a minute of them."""
    failures, rows = [], []
    end = time.monotonic() + 60
    for path in sorted((SOURCE / "deploy/monitoring/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] == "row":
                continue
            counts, values = [], []
            for target in panel["targets"]:
                range_s = None if target["instant"] else 20
                points = came(lambda: prometheus.points(target["expr"], range_s), end - time.monotonic())
                counts.append(len(points))
                values += [series[-1] for series in points.values()]
                if not points:
                    failures.append(f"{path.stem}: {panel['title']}: no finite data: {target['expr']}")
            rows.append({"dashboard": path.stem, "panel": panel["title"], "series": counts, "last": values})
    return failures, rows


def value_of(prometheus, dashboard, title, line):
    """The highest of the latest values of a panel's line."""
    panels = json.loads((SOURCE / f"deploy/monitoring/dashboards/{dashboard}.json").read_text())["panels"]
    targets = next(p for p in panels if p["title"] == title)["targets"]
    expr = next(target["expr"] for target in targets if target["legendFormat"].startswith(line))
    return max((series[-1] for series in prometheus.points(expr).values()), default=0)


def damage(store, how):
    """Whether `how(path)` was done to any of the store's segments, which come and go meanwhile."""
    done = 0
    for path in store.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and "index" not in path.relative_to(store).parts and path.stat().st_size >= 65536:
                how(path)
                done += 1
    return done > 0


def flip_bits(path):
    """In every second page, so that records of other pages are still found."""
    with open(path, "r+b") as file:
        for offset in range(8192 + 100, path.stat().st_size, 8192):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0x40]))


def cut_off(path):
    with open(path, "r+b") as file:
        file.truncate(0)


def inject(prometheus, server, load, store, certificate):
    failures = []

    def moves(what, condition):
        if came(condition, 90):
            print(f"    moved: {what}")
        else:
            failures.append(f"did not move: {what}")
            print(f"    did NOT move: {what}")

    @contextlib.contextmanager
    def fault(what, *lines):
        """Injected within the `with`: then these lines of panels move, which were at zero before. (dashboard, panel, legend's beginning)"""
        print(what)
        for line in lines:
            if value_of(prometheus, *line) != 0:
                failures.append(f"not at zero before its fault: {', '.join(line)}")
        yield
        for line in lines:
            moves(", ".join(line), lambda: value_of(prometheus, *line) > 0)

    with fault("Bits of the store's files are flipped", ("reads", "Trouble", "damaged")):
        assert damage(store, flip_bits)
    moves("alert WinnowStoreCorrupt", lambda: "WinnowStoreCorrupt" in prometheus.firing())
    with fault("The store's files are cut off", ("reads", "State", "")):
        assert damage(store, cut_off)
    moves("alert WinnowStoreErrors", lambda: "WinnowStoreErrors" in prometheus.firing())
    with fault("More comes in than the queue takes", ("overview", "Refused for want of room", "")):
        flood = [threading.Thread(target=quiet, args=(load, {"prompt": load.documents[0], "max_tokens": 8})) for _ in range(40)]
        for thread in flood:
            thread.start()
    for thread in flood:
        thread.join()
    with contextlib.ExitStack() as held, fault("Requests of which only half is sent", ("overview", "HTTP trouble", "too slow")):
        for _ in range(8):
            plain = held.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
            held.enter_context(load.context.wrap_socket(plain)).sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
    with fault("A gRPC header of 1 GiB", ("overview", "gRPC trouble", "closed")):
        subprocess.run([sys.executable, SOURCE / "tests/e2e/http2_attacks.py", "announced_header", "--port", str(server.port), "--seconds", "2",
                        "--connections", "1", "--tls"], check=True, capture_output=True)
    # A long answer that has begun keeps the server going for its grace, while it refuses what comes in.
    begun = threading.Event()
    long = threading.Thread(target=long_answer, args=(load, begun))
    long.start()
    assert begun.wait(harness.PATIENCE)
    with asking_over_grpc(server, certificate), fault("SIGTERM while clients go on asking", ("overview", "Draining or failed", "draining"),
                                                      ("overview", "Failed by the server", "")):
        server.signal(signal.SIGTERM)
    server.signal(signal.SIGTERM)  # a second one ends it
    long.join()
    return failures


def quiet(load, body):
    try:
        load.ask(body)
    except OSError:
        pass


@contextlib.contextmanager
def asking_over_grpc(server, certificate):
    """Small calls on one connection. What a server that drains refuses over gRPC is counted; what its HTTP port refuses then is not."""
    api = harness.Api(f"localhost:{server.port}", grpc.ssl_channel_credentials(certificate.read_bytes()))
    assert api.serving()
    stop = threading.Event()

    def ask():
        while not stop.wait(REFUSED_PAUSE):
            with contextlib.suppress(grpc.RpcError):
                list(api.generate(harness.counting_request("Still there?", 1), timeout=10))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        api.channel.close()


def long_answer(load, begun):
    try:
        with load.open({"prompt": "Once", "max_tokens": 6000, "ignore_eos": True, "stream": True}) as answer:
            for _ in answer:
                begun.set()
    except (OSError, http.client.HTTPException):
        pass  # the server ended before it


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--prometheus", default=shutil.which("prometheus"))
    parser.add_argument("--json")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not args.prometheus:
        sys.exit("live.py: Prometheus is not there: Debian's package prometheus, or --prometheus FILE")
    with tempfile.TemporaryDirectory(prefix="winnow-live-") as directory, contextlib.ExitStack() as stack:
        directory = pathlib.Path(directory)
        make_certificate(directory)
        store = directory / "store"
        server = stack.enter_context(harness.Server(
            "--tls-cert", directory / "cert.pem", "--tls-key", directory / "key.pem", "--index", "lsh:128,int4", "--probe-interval", "4", "--kv-bytes",
            "24MiB", "--disk-bytes", "256MiB", "--store-dir", store, "--prefetch", "on", "--row-cache-bytes", "1MiB", "--max-running", "4", "--max-context", "6144",
            "--queue-requests", "8", "--http-read-timeout", READ_TIMEOUT, "--drain-grace", "60s"))
        prometheus = Prometheus(args.prometheus, directory, f"127.0.0.1:{server.metrics_port}")
        stack.callback(prometheus.close)
        load = Load(server, 3, args.seed)
        stack.callback(load.end)
        print(f"Load for {args.seconds} s")
        load.stop.wait(args.seconds)
        failures, rows = check_panels(prometheus)
        width = max(len(row["panel"]) for row in rows)
        for row in rows:
            shown = ", ".join(f"{value:.4g}" for value in row["last"][:4])
            print(f"    {row['dashboard']:9} {row['panel']:{width}} {sum(row['series']):3} series  {shown}")
        before = load.errors[:]
        failures += inject(prometheus, server, load, store, directory / "cert.pem")
        load.end()
        print(f"{load.answers} answers, {len(before)} errors before the faults; {len(rows)} panels, {sum(len(r['series']) for r in rows)} queries")
        failures += [f"error: {error}" for error in before[:5]]
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps({"panels": rows, "failures": failures}, indent=1))
        if failures:
            sys.exit("\n".join(failures))
        print("Every query of every panel returned data, and what should move moved.")


if __name__ == "__main__":
    main()

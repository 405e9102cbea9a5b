"""Starts the real program, and talks to it as its users do. Shared by the end-to-end tests.

WINNOW_BIN is the program, WINNOW_SOURCE_DIR the project's root; CTest sets both. Everything listens on loopback, on
ports that the system chooses.
"""
import contextlib
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import urllib.request

import grpc

SOURCE = pathlib.Path(os.environ.get("WINNOW_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BIN = os.environ.get("WINNOW_BIN", str(SOURCE / "build/release/winnow"))
MODEL = str(SOURCE / "models/needle-5m")
# A sanitizer makes everything slower; no test's verdict should hang on that.
PATIENCE = 120
# Bounds of time and memory, and shares of work within seconds, mean nothing there.
SANITIZED = any(f"/build/{preset}/" in BIN for preset in ("check", "tsan"))
# Some tests hold more connections than a user's usual soft limit of 1,024 descriptors.
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
# Where servers remember what they measured at start: one for all of a test program, and gone with it.
CACHE = tempfile.TemporaryDirectory(prefix="winnow-e2e-cache-")


def load_protos():
    """The API's Python messages, made by protoc in a temporary directory."""
    with tempfile.TemporaryDirectory() as out:
        protos = ["winnow/v1/inference.proto", "google/rpc/status.proto", "google/rpc/error_details.proto",
                  "grpc/health/v1/health.proto"]
        subprocess.run(["protoc", "-I", SOURCE / "proto", f"--python_out={out}", *protos], check=True)
        # Under names of their own: `grpc` and `google` are packages of libraries.
        pool_modules = {}
        for proto in protos:
            path = pathlib.Path(out, proto.replace(".proto", "_pb2.py"))
            namespace = {"__name__": "winnow_e2e_" + path.stem}
            exec(compile(path.read_text(), str(path), "exec"), namespace)  # our own protoc's output
            pool_modules[path.stem] = type("Messages", (), {k: v for k, v in namespace.items() if k[0] != "_"})
    return (pool_modules["inference_pb2"], pool_modules["status_pb2"], pool_modules["error_details_pb2"],
            pool_modules["health_pb2"])


inference, rpc_status, error_details, health = load_protos()


class Api:
    """A channel and the methods."""

    def __init__(self, address, credentials=None, options=()):
        self.channel = (grpc.secure_channel(address, credentials, options) if credentials else
                        grpc.insecure_channel(address, options))
        service = "/winnow.v1.InferenceService/"
        serialize = lambda message: message.SerializeToString()
        self.generate = self.channel.unary_stream(service + "Generate", serialize,
                                                  inference.GenerateResponse.FromString)
        self.tokenize = self.channel.unary_unary(service + "Tokenize", serialize,
                                                 inference.TokenizeResponse.FromString)
        self.detokenize = self.channel.unary_unary(service + "Detokenize", serialize,
                                                   inference.DetokenizeResponse.FromString)
        self.get_model = self.channel.unary_unary(service + "GetModel", serialize,
                                                  inference.GetModelResponse.FromString)
        self.check = self.channel.unary_unary("/grpc.health.v1.Health/Check", serialize,
                                              health.HealthCheckResponse.FromString)
        self.watch = self.channel.unary_stream("/grpc.health.v1.Health/Watch", serialize,
                                               health.HealthCheckResponse.FromString)

    def serving(self, service=""):
        return self.check(health.HealthCheckRequest(service=service), timeout=PATIENCE).status == 1


def counting_request(text, tokens, **fields):
    """A request that generates exactly `tokens` tokens."""
    return inference.GenerateRequest(
        text=inference.TextPrompt(text=text),
        stopping=inference.StoppingOptions(max_tokens=tokens, ignore_eos=True), **fields)


def token_ids(responses):
    return [token.id for response in responses for token in response.tokens]


def details_of(error):
    """The google.rpc details of a grpc.RpcError, by message name."""
    trailers = dict(error.trailing_metadata() or ())
    status = rpc_status.Status.FromString(trailers["grpc-status-details-bin"])
    found = {"status": status}
    for any_message in status.details:
        for kind in (error_details.ErrorInfo, error_details.BadRequest, error_details.RetryInfo):
            message = kind()
            if any_message.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


def run(*args, **kwargs):
    kwargs.setdefault("timeout", PATIENCE)
    return subprocess.run([BIN, *map(str, args)], capture_output=True, text=True, **kwargs)


class Server:
    """`winnow serve` with the small model. Use as a context manager: whatever happens, it is stopped."""

    def __init__(self, *flags, model=MODEL, env=None, descriptors=None, program=None, pipe=None):
        """`descriptors`: soft and hard limit of the process. `program`: another one that has the command. `pipe`: reader and writer of its
        log, which is read until it listens."""
        self.directory = tempfile.mkdtemp(prefix="winnow-e2e-")
        self.log_path = os.path.join(self.directory, "log")
        port_file = os.path.join(self.directory, "port")
        # prlimit, because for a preexec_fn Python forks, and before a fork gRPC waits for its threads to be idle: it has waited forever.
        limited = ["prlimit", "--nofile={}:{}".format(*descriptors)] if descriptors else []
        self.command = [*limited, program or BIN, "serve", "--model", model, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--http", "127.0.0.1:0",
                        "--port-file", port_file, "--log-format", "json", *map(str, flags)]
        # CTest sets TSAN_OPTIONS; by hand it is this. Without ThreadSanitizer it means nothing.
        environment = {"TSAN_OPTIONS": f"suppressions={SOURCE}/tests/tsan/suppressions.txt:exitcode=66", **os.environ,
                       "XDG_CACHE_HOME": CACHE.name, **(env or {})}
        with open(self.log_path, "w") as log:
            stderr = log if pipe is None else pipe[1]
            self.process = subprocess.Popen(self.command, stderr=stderr, stdout=log, env=environment)
        end = time.monotonic() + PATIENCE
        while not os.path.exists(port_file):
            if self.process.poll() is not None or time.monotonic() > end:
                log_text = self.log()
                self.close()
                raise RuntimeError(f"the server did not start ({self.process.returncode}):\n{log_text}")
            time.sleep(0.01)
        if pipe is not None:
            text = b""
            while b'"listening"' not in text or not text.endswith(b"\n"):
                text += os.read(pipe[0], 4096)
            pathlib.Path(self.log_path).write_bytes(text)
        self.port = int(pathlib.Path(port_file).read_text())
        self.address = f"127.0.0.1:{self.port}"
        listening = next(e for e in self.events() if e["event"] == "listening")
        self.metrics_port, self.http_port = listening["metrics_port"], listening["http_port"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self):
        # A thread of the server's writes it (server/line_queue.h): when that has nothing to write.
        eventually(lambda: not self.writes_log(), "all of the log is written")
        return pathlib.Path(self.log_path).read_text()

    def writes_log(self):
        if self.process.poll() is not None:
            return False
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since it was listed
                name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
                if name == "log" and fields.split()[0] != "S":
                    return True
        return False

    def events(self):
        """The log's lines. One that is not JSON is a failure (or a sanitizer's report)."""
        lines = self.log().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n") and self.process.poll() is None:
            lines.pop()  # it is being written
        return [json.loads(line) for line in lines]

    def metrics_text(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=PATIENCE) as page:
            return page.read().decode()

    def metric(self, series):
        for line in self.metrics_text().splitlines():
            if line.rpartition(" ")[0] == series:
                return float(line.rpartition(" ")[2])
        raise KeyError(series)

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        return self.process.wait(timeout=PATIENCE)

    def terminate(self):
        self.signal(signal.SIGTERM)
        return self.wait()


def eventually(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.01)


@contextlib.contextmanager
def temporary_directory():
    with tempfile.TemporaryDirectory(prefix="winnow-e2e-") as path:
        yield pathlib.Path(path)


def main():
    print("seed", SEED, flush=True)
    unittest.main(verbosity=2)


SEED = int(os.environ.get("WINNOW_TEST_SEED", int.from_bytes(os.urandom(4), "little")))

#!/usr/bin/env python3
"""What only a machine with a GPU can show, each by one command:

  scripts/gpu.py test [--gtest_filter=...]      every kernel and the backend against their references, fresh random inputs
  scripts/gpu.py sanitize [TOOL ...] [--gtest_filter=...]   the same under compute-sanitizer: memcheck, racecheck and
                                                synccheck, or those named
  scripts/gpu.py bench [--filter NAME] [...]    each kernel's time, and its share of the card's limit measured in the same run
  scripts/gpu.py steps                          the table of decode steps in docs/results/kernels.md
  scripts/gpu.py timeline [FLAG ...]            where a layer of a decode step spends its time (docs/results/kernels.md), with the
                                                program of scripts/build.sh timeline, or WINNOW_BIN
  scripts/gpu.py tokens [FLAG ...]              greedy tokens of `serve --device cuda FLAG...` against those of --device cpu
  scripts/gpu.py rounding                       the same of --device cpu --isa avx2 against --isa avx512: how far answers part
                                                where nothing but rounding differs, and no GPU has a hand in it
  scripts/gpu.py graphs [FLAG ...]              the same of `serve --device cuda FLAG...` with CUDA graphs against one without
  scripts/gpu.py pinned --host-bytes BYTES [FLAG ...]   the same with KV in pinned memory against KV on the device
  scripts/gpu.py exact [FLAG ...]               answers of `serve --device cuda FLAG...` under verify= against its dense ones: every
                                                token and every digit of the log-probabilities
  scripts/gpu.py resume [FLAG ...]              the same of `serve --device cuda FLAG...` with a store on disk, that computes,
                                                resumes lazily after a restart, and eagerly, against one without; and what
                                                was read
  scripts/gpu.py spill --host-bytes BYTES [FLAG ...]   the same with KV that is more than BYTES of the host hold, most of it
                                                on disk
  scripts/gpu.py shapes [--shape NAME] [--draft-weights FORM] [FLAG ...]   models of well-known shapes with random weights:
                                                perplexity of --device cuda FLAG... beside that of --device cpu, and exact
                                                answers (scripts/compare_shapes.py)
  scripts/gpu.py fault                          an illegal instruction, and a write to nobody's memory, on the GPU under a
                                                server that answers: its stream ends with UNAVAILABLE, it exits with 70, its
                                                store is whole

The first three need nvcc and GoogleTest and no more (build/cuda-alone); the others the whole program: `scripts/build.sh
cuda`, or WINNOW_BIN. WINNOW_CUDA_BIN is a folder with winnow_cuda_test, winnow_cuda_bench and libwinnow_cuda_fault.so that
were built elsewhere: nothing is built then. WINNOW_MODEL is the model that servers serve (default models/needle-5m),
WINNOW_SEED the seed of the document that they are asked about, a new one where it is not set, WINNOW_BYTES how much of it
(default 8000,30000,90000; a model whose context is short takes less). A FLAG --kv-dtype is given to both sides
of a comparison. Exits with 0 where all is well, with 1 where something fails, with 2 for wrong arguments; after a
comparison as compare_servers.py or compare_shapes.py.
"""
import datetime
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHAPE = "loadtest/shapes/llama-3.1-8b.json"
EVERY_POLICY = ["dense", "window", "oracle:k=2%", "quest:k=2%", "lsh:k=2%", "hata:k=2%", "spotlight:k=2%",
                "hashattention:k=2%", "spotlight:k=2%,p=0.95", "lsh:k=2%,completion=on", "spotlight:k=2%,completion=on",
                "pca:k=2%", "pca:k=2%,tail=off", "pca:k=2%,p=0.95"]
# Those first that read least of what is stored: whatever has been read stays.
RESUME_POLICIES = ["window:suffix=100", "lsh:k=2%,suffix=100", "spotlight:k=2%,suffix=100", "pca:k=2%,suffix=100",
                   *EVERY_POLICY[1:], "dense"]
# Answers under these are those of dense attention, bit for bit.
VERIFIED_POLICIES = ["pca:k=2%,verify=8", "pca:k=2%,verify=auto", "pca:k=2%,tail=off,verify=3", "lsh:k=2%,verify=8",
                     "pca:k=2%,lookup=on,verify=auto", "dense:lookup=on,verify=8"]
STORE_METRICS = re.compile(
    r"winnow_(prompt_tokens|cached_tokens|kv_losses|kv_layer_blocks|kv_read_bytes|kv_tier_wait|store_(state|blocks|device))")
SANITIZERS = ["memcheck", "racecheck", "synccheck"]
# With an artifact in the model's directory `--index auto` keeps what that has learned, and no transform codes.
EVERY_INDEX = "quest,lsh,hata,spotlight,hashattention,int4,pca"
GIVE_UP_S = 600  # for a server to be ready, or to end


class Failure(Exception):
    """Something that was to hold does not; the message says what."""


def run(*command, **options):
    """Runs a command from the project's root; Failure where it exits with anything but 0."""
    result = subprocess.run([str(word) for word in command], cwd=ROOT, **options)
    if result.returncode != 0:
        raise Failure(f"{pathlib.Path(str(command[0])).name} exited with {result.returncode}")
    return result


def query_card(what):
    """nvidia-smi's answer about the cards that are here."""
    try:
        result = subprocess.run(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"], capture_output=True, text=True)
    except OSError as error:
        raise Failure(f"no GPU here that a driver knows of: {error}") from error
    if result.returncode != 0:
        raise Failure(f"no GPU here that a driver knows of: {(result.stdout + result.stderr).strip() or 'nvidia-smi failed'}")
    return result.stdout.strip()


def architectures(capabilities):
    """CMake's list for compute capabilities, one a line. Of 9.0 everything that it has (wgmma.cuh)."""
    digits = sorted({line.strip().replace(".", "") for line in capabilities.splitlines() if line.strip()})
    return ";".join("90a" if digit == "90" else digit for digit in digits)


def cuda_bin():
    """The folder with the CUDA tests and benchmark, built for the card that is here."""
    if os.environ.get("WINNOW_CUDA_BIN"):
        return pathlib.Path(os.environ["WINNOW_CUDA_BIN"]).resolve()
    archs = architectures(query_card("compute_cap"))
    run("cmake", "-S", "kernels/cuda", "-B", "build/cuda-alone", f"-DCMAKE_CUDA_ARCHITECTURES={archs}", stdout=sys.stderr)
    run("cmake", "--build", "build/cuda-alone", "-j", os.cpu_count(), stdout=sys.stderr)
    return ROOT / "build/cuda-alone"


def winnow_bin(preset="cuda"):
    return pathlib.Path(os.environ.get("WINNOW_BIN") or ROOT / "build" / preset / "winnow").resolve()


def document_sizes():
    """How many bytes of its document a question is asked about."""
    return [int(size) for size in os.environ.get("WINNOW_BYTES", "8000,30000,90000").split(",")]


class Servers:
    """Servers that are asked the same about one document. A context: they end with it, and its files go."""

    def __init__(self):
        self.winnow = winnow_bin()
        self._processes = {}

    def __enter__(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="winnow-gpu-"))
        try:
            seed = os.environ.get("WINNOW_SEED") or str(random.SystemRandom().randrange(2**32))
            print(f"a document of seed {seed}", flush=True)
            run(sys.executable, "scripts/make_document.py", "--seed", seed, "--bytes", max(document_sizes()), "--out", self.work)
            with open(self.work / "questions.jsonl") as lines:
                self.question = json.loads(lines.readline())["question"]
        except BaseException:
            shutil.rmtree(self.work)
            raise
        return self

    def __exit__(self, *_):
        for process in self._processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self.work)

    def log(self, name):
        return (self.work / f"{name}.log").read_text(errors="replace")

    def start(self, name, *flags, environment=None):
        """Starts a server and waits until it is ready. Failure, with its log, where it ends before."""
        port_file = self.work / name
        model = os.environ.get("WINNOW_MODEL", "models/needle-5m")
        indexes = ["--index", EVERY_INDEX] if (ROOT / model / "winnow-artifact.safetensors").exists() else []
        with open(self.work / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [str(self.winnow), "serve", "--model", model, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--http",
                 "127.0.0.1:0", "--retrieval-from", "0", *indexes,
                 "--port-file", str(port_file), *map(str, flags)],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})})
        self._processes[name] = process
        limit = time.monotonic() + GIVE_UP_S
        while not (port_file.exists() and port_file.stat().st_size > 0):
            if process.poll() is not None or time.monotonic() > limit:
                sys.stderr.write(self.log(name))
                raise Failure(f"the server {name} did not start")
            time.sleep(0.05)

    def address(self, name):
        return "127.0.0.1:" + (self.work / name).read_text().strip()

    def wait(self, name):
        """The exit code of a server that ends by itself."""
        code = self._processes[name].wait(timeout=GIVE_UP_S)
        del self._processes[name]
        (self.work / name).unlink()
        return code

    def stop(self, name):
        self._processes[name].terminate()
        code = self.wait(name)
        if code != 0:
            sys.stderr.write(self.log(name))
            raise Failure(f"the server {name} exited with {code}")

    def metrics(self, name):
        port = re.search(r"metrics_port=(\d+)", self.log(name)).group(1)
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()

    def compare(self, left, right, policies, flags=()):
        """The exit code of compare_servers.py, called with more `flags`: 0 where all greedy tokens are the same, 1 where some part
        at near ties, 2 else."""
        command = [sys.executable, "scripts/compare_servers.py", "--winnow", self.winnow, "--server", self.address(left),
                   "--server", self.address(right), "--document", self.work / "document.txt", *flags]
        for size in document_sizes():
            command += ["--bytes", size]
        command += ["--question", self.question]
        for policy in policies:
            command += ["--policy", policy]
        return subprocess.run([str(word) for word in command], cwd=ROOT).returncode


# ---- the commands: each gets its arguments and returns the exit code ----


def command_test(arguments):
    run(cuda_bin() / "winnow_cuda_test", *arguments)
    return 0


def sanitizer_runs(arguments):
    """The tools to run, and the test's flags."""
    tools = [word for word in arguments if not word.startswith("--")]
    return tools or SANITIZERS, [word for word in arguments if word.startswith("--")]


def command_sanitize(arguments):
    binary = cuda_bin() / "winnow_cuda_test"
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    sanitizer = shutil.which("compute-sanitizer") or f"{home}/bin/compute-sanitizer"
    tools, flags = sanitizer_runs(arguments)
    for tool in tools:
        print(f"==> {tool}", flush=True)
        # racecheck looks at shared memory only and is by far the slowest. Errors that the runtime returns are left to the
        # tests, some of which ask for more memory than there is.
        run(sanitizer, "--tool", tool, "--error-exitcode", 1, "--report-api-errors", "no", binary, "--gtest_brief=1", *flags)
    return 0


def command_bench(arguments):
    run(cuda_bin() / "winnow_cuda_bench", *arguments)
    return 0


def command_steps(arguments):
    decode = [winnow_bin(), "bench", "decode", "--like", SHAPE, "--device", "cuda"]
    run(*decode, "--contexts", "8192,32768,131072", "--policy", "dense", "--policy", "window", "--policy", "lsh:k=16,from=0",
        "--policy", "lsh:k=2048,from=0", *arguments)
    for batch in (8, 24):
        run(*decode, "--contexts", 32768, "--batch", batch, "--policy", "dense", "--policy", "lsh:k=512,from=0", *arguments)
    return 0


def command_timeline(arguments):
    winnow = winnow_bin("timeline")
    with tempfile.NamedTemporaryFile(prefix="winnow-timeline-") as marks:
        run(winnow, "bench", "decode", "--like", SHAPE, "--device", "cuda", "--skip-dense", "--contexts", 131072, "--policy",
            "lsh:k=2048,from=0", *arguments, env={**os.environ, "WINNOW_TIMELINE": marks.name})
        if os.path.getsize(marks.name) == 0:
            raise Failure(f"the kernels of {winnow} write nothing down: scripts/build.sh timeline makes some that do")
        run(sys.executable, "scripts/timeline.py", marks.name)
    return 0


def kv_type(arguments):
    """--kv-dtype and its word, where they are among the flags of one server: the other, to be its equal, keeps the same."""
    for at, word in enumerate(arguments):
        if word.split("=")[0] == "--kv-dtype":
            return [word] if "=" in word else arguments[at:at + 2]
    return []


def compare_two(left, right):
    """Two servers, each (name, flags), under every policy."""
    with Servers() as servers:
        for name, flags in (left, right):
            servers.start(name, *flags)
        return servers.compare(left[0], right[0], EVERY_POLICY)


def command_tokens(arguments):
    return compare_two(("cpu", ["--device", "cpu", *kv_type(arguments)]), ("cuda", ["--device", "cuda", *arguments]))


def command_shapes(arguments):
    of_comparison = []
    while arguments[:1] in (["--shape"], ["--draft-weights"]):
        of_comparison += arguments[:2]
        arguments = arguments[2:]
    command = [sys.executable, "scripts/compare_shapes.py", "--winnow", winnow_bin(), *of_comparison, "--left",
               shlex.join(["--device", "cpu", *kv_type(arguments)]), "--right", shlex.join(["--device", "cuda", *arguments])]
    return subprocess.run([str(word) for word in command], cwd=ROOT).returncode


def command_rounding(arguments):
    # avx512 is refused where the processor has none: otherwise avx2 would be compared with itself.
    return compare_two(("avx512", ["--device", "cpu", "--isa", "avx512"]), ("avx2", ["--device", "cpu", "--isa", "avx2"]))


def command_graphs(arguments):
    return compare_two(("graphs", ["--device", "cuda", *arguments]),
                       ("plain", ["--device", "cuda", "--cuda-graphs", "off", *arguments]))


def command_pinned(arguments):
    check_host_bytes("pinned", arguments)
    return compare_two(("device", ["--device", "cuda", *kv_type(arguments)]), ("pinned", ["--device", "cuda", *arguments]))


def policies_of_exact(arguments):
    # Drafts with weights of their own need no policy that reads less.
    drafts = any(word.split("=")[0] == "--draft-weights" for word in arguments)
    return VERIFIED_POLICIES + (["dense:verify=4", "dense:verify=auto"] if drafts else [])


def command_exact(arguments):
    with Servers() as servers:
        servers.start("cuda", "--device", "cuda", *arguments)
        return servers.compare("cuda", "cuda", policies_of_exact(arguments), ["--against", "dense", "--digits"])


def check_host_bytes(command, arguments):
    if not any(word.split("=")[0] == "--host-bytes" for word in arguments):
        raise Failure(f"{command}: --host-bytes says how much KV the host holds")


def compare_with_store(memory_flags, store_flags):
    code = 0
    with Servers() as servers:
        store = servers.work / "kv"
        servers.start("memory", "--device", "cuda", *memory_flags)
        for resume in ("auto", "lazy", "eager"):  # the first finds an empty store
            servers.start("store", "--device", "cuda", *store_flags, "--disk-bytes", "8GiB", "--store-dir", store, "--resume",
                          resume)
            stored = sum(file.stat().st_size for file in store.rglob("*") if file.is_file()) >> 20
            print(f"==> --resume {resume}, {stored} MiB in the store", flush=True)
            code = servers.compare("memory", "store", RESUME_POLICIES) or code
            print("\n".join(line for line in servers.metrics("store").splitlines() if STORE_METRICS.match(line)), flush=True)
            servers.stop("store")
    return code


def command_resume(arguments):
    return compare_with_store(arguments, arguments)


def command_spill(arguments):
    check_host_bytes("spill", arguments)
    return compare_with_store(kv_type(arguments), ["--spill", "on", *arguments])


class Faults:
    """A server that is asked, and broken meanwhile."""

    def __init__(self, servers):
        self.servers = servers
        self.library = cuda_bin() / "libwinnow_cuda_fault.so"
        self.store = ["--disk-bytes", "4GiB", "--store-dir", servers.work / "kv"]
        self.chat = servers.work / "chat.json"
        document = (servers.work / "document.txt").read_text()[:30000]
        self.chat.write_text(json.dumps([{"role": "user", "content": document + servers.question}]))

    def generate(self, name, tokens):
        return [str(self.servers.winnow), "generate", "--server", self.servers.address(name), "--chat-file", str(self.chat),
                "--temperature", "0", "--ignore-eos", "--policy", "lsh:k=2%,suffix=64", "--max-tokens", str(tokens)]

    def ask(self, name):
        return run(*self.generate(name, 64), stdout=subprocess.PIPE).stdout

    def inject(self, word):
        """Breaks a server that has begun to answer; its stream and its exit code must say so."""
        fifo = self.servers.work / f"word-{word}"
        os.mkfifo(fifo)
        self.servers.start("broken", "--device", "cuda", *self.store,
                           environment={"WINNOW_CUDA_FAULT_FIFO": str(fifo), "LD_PRELOAD": str(self.library)})
        with subprocess.Popen(self.generate("broken", 10000), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
            asking.stdout.read(20)  # it answers
            fifo.write_text(word + "\n")
            _, error = asking.communicate()
        exited = self.servers.wait("broken")
        said = error.decode(errors="replace")
        print(f"==> {word}: generate ended with {asking.returncode} ({' '.join(said.split())}), the server with {exited}")
        print("\n".join(line for line in self.servers.log("broken").splitlines() if re.search("cuda fault|CUDA", line)), flush=True)
        if asking.returncode == 0 or "UNAVAILABLE" not in said:
            raise Failure(f"{word}: the stream did not end with UNAVAILABLE")
        if exited != 70:
            raise Failure(f"{word}: the server exited with {exited}, not 70")


def command_fault(arguments):
    with Servers() as servers:
        faults = Faults(servers)
        servers.start("whole", "--device", "cuda")
        expected = faults.ask("whole")
        servers.stop("whole")
        for word in ("trap", "address"):
            faults.inject(word)
            run(servers.winnow, "store", "verify", "--dir", servers.work / "kv")
            servers.start("again", "--device", "cuda", *faults.store)
            if faults.ask("again") != expected:
                raise Failure(f"{word}: started again, another answer")
            print("started again: the same answer", flush=True)
            servers.stop("again")
    return 0


COMMANDS = {name.removeprefix("command_"): function for name, function in list(globals().items())
            if name.startswith("command_")}
WITHOUT_ARGUMENTS = ("rounding", "fault")


def main(arguments):
    if not arguments or arguments[0] not in COMMANDS:
        sys.stderr.write(__doc__.split("\n\n")[1] + "\n")
        return 2
    name, *rest = arguments
    if rest and name in WITHOUT_ARGUMENTS:
        print(f"gpu.py: {name} takes no arguments: {' '.join(rest)}", file=sys.stderr)
        return 2
    try:
        print(f"{query_card('name,driver_version,compute_cap')}, {datetime.date.today()}", flush=True)
        return COMMANDS[name](rest)
    except Failure as failure:
        print(f"gpu.py: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Tools that people know, guidellm and aiperf, against winnow's HTTP port: dense attention and retrieval, with and without the prefix
cache, one after the other in one run.

    loadtest/http_tools.py sweep  --model FILE --out DIR [--seconds 20] [--steps 5]      guidellm finds the rates from one client to saturation
    loadtest/http_tools.py agents --model FILE --out DIR [--seconds 60] [--scale 1/25]   aiperf's agentic coding sessions

Words behind -- are flags of the servers: `… -- --threads 8`.

Each configuration has its server. Beside what the tool measured stands what the server counted meanwhile: prompt tokens from the cache, and KV bytes
read of what dense attention reads. DIR gets the tools' own reports, and results.json with the commands and the machine's load;
stdout gets a table in Markdown. Prompts and answers are made of random words by the tools. The model is a GGUF file or a Hugging Face
directory (for its tokenizer); the tools come from loadtest/tools.sh. Needs the winnow program (WINNOW_BIN).
"""
import argparse
import fractions
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request

import load_report
import own_server
import workload

SOURCE = pathlib.Path(__file__).resolve().parents[1]
NAME = "winnow/measured"  # of model and tokenizer, as the tools see them
REVISION = "0" * 40


def tokenizer_cache(model, folder):
    """Makes a Hugging Face cache with the model's tokenizer in it, and nothing else, and returns the tokenizer's folder. Without a network aiperf
    takes only the name of what lies in a cache, and guidellm only a folder."""
    snapshot = folder / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    (snapshot.parents[1] / "refs").mkdir(exist_ok=True)
    (snapshot.parents[1] / "refs/main").write_text(REVISION)
    model = pathlib.Path(model)
    if model.is_dir():
        for file in model.glob("*token*"):
            shutil.copy(file, snapshot)
        if (model / "config.json").exists():
            shutil.copy(model / "config.json", snapshot)
        return snapshot
    # transformers and gguf, which read a GGUF file's tokenizer, are in guidellm's environment.
    script = "import sys; from transformers import AutoTokenizer; AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2]).save_pretrained(sys.argv[3])"
    subprocess.run([pathlib.Path(tool("guidellm")).parent / "python", "-c", script, model.parent, model.name, snapshot], check=True)
    return snapshot


def tool(name):
    return subprocess.run([SOURCE / "loadtest/tools.sh", name], check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def configurations(policy):
    for attention, flags in (("dense", []), (policy, ["--policy", policy])):
        for cache in ("on", "off"):
            yield attention, cache, [*flags, "--prefix-cache", cache]


def counters(metrics_port):
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30) as page:
        text = page.read().decode()
    value = lambda series: float(re.search(rf"^{re.escape(series)} (\S+)$", text, re.M)[1])
    return {"prompt": value("winnow_prompt_tokens_total"), "cached": value("winnow_cached_tokens_total"), "generated": value("winnow_generated_tokens_total"),
            "read": value('winnow_kv_read_bytes_total{tier="fast"}'), "dense": value("winnow_kv_dense_bytes_total")}


def run_tool(command, environment, log, limit):
    """Runs a tool, with all processes that it starts, for at most `limit` seconds. Ends the program with the log's end where the tool fails."""
    with open(log, "w") as out:
        process = subprocess.Popen([str(word) for word in command], env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = f"none after {limit} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what it may have left behind
            except ProcessLookupError:
                pass
            process.wait()
    if code != 0:
        sys.exit(f"{shlex.join(str(word) for word in command)}\nended with {code}:\n" + "\n".join(pathlib.Path(log).read_text().splitlines()[-30:]))


class Sweep:
    """guidellm: one request at a time, then as many as it takes, then rates between the two."""
    COLUMNS = ("strategy", "requests/s", "tokens/s", "first token p50 / p95", "between tokens p50 / p95", "failed")

    def __init__(self, args):
        self.args, self.program = args, tool("guidellm")

    def command(self, http_port, tokenizer, out):
        a = self.args
        return [self.program, "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{http_port},model={NAME},request_format=/v1/completions",
                "--profile", f"kind=sweep,sweep_size={a.steps},max_concurrency={a.concurrency}", "--constraint", f"kind=max_duration,seconds={a.seconds:g}",
                "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--data",
                f"kind=synthetic_text,prompt_tokens={a.prompt},output_tokens={a.answer},prefix_tokens={a.prefix},prefix_count=4",
                "--output", f"kind=json,path={out / 'guidellm.json'}", "--output", f"kind=html,path={out / 'guidellm.html'}", "--disable-console-interactive"]

    def limit(self):
        return 120 + 3 * self.args.seconds * self.args.steps

    def rows(self, out):
        report = json.loads((out / "guidellm.json").read_text())
        (out / "guidellm.json").unlink()  # every request with its texts: megabytes
        for benchmark in report["benchmarks"]:
            metrics, strategy = benchmark["metrics"], benchmark["config"]["strategy"]
            of = lambda name: metrics[name]["successful"]
            name = strategy["type_"] + (f" {strategy['rate']:.2f}/s" if strategy.get("rate") else "")
            # Without an answer guidellm says that answers took no time.
            seconds = lambda name: [of(name)["percentiles"][p] / 1000 for p in ("p50", "p95")] if metrics["request_totals"]["successful"] else None
            yield {"strategy": name, "requests/s": of("requests_per_second")["mean"], "tokens/s": of("output_tokens_per_second")["mean"],
                   "first token p50 / p95": seconds("time_to_first_token_ms"), "between tokens p50 / p95": seconds("inter_token_latency_ms"),
                   "failed": metrics["request_totals"]["errored"], "answered": metrics["request_totals"]["successful"]}


class Agents:
    """aiperf: sessions that its generator makes of workloads/coding_agents.json's numbers, scaled; gaps between turns a tenth of theirs."""
    COLUMNS = ("answered", "requests/s", "tokens/s", "first token p50 / p95", "between tokens p50 / p95", "failed")
    BLOCK = 64

    def __init__(self, args):
        self.args, self.program = args, tool("aiperf")
        folder = args.out / "sessions"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.generator_config(float(args.scale))))
        command = [self.program, "synthesize", "agentic-code", "--num-sessions", args.sessions, "--seed", 1, "--config", folder / "config.json", "--output", folder]
        run_tool(command, os.environ, folder / "log", 300)
        self.dataset, = folder.glob("*/dataset.jsonl")

    @classmethod
    def generator_config(cls, scale, delays=0.1):
        """aiperf's configuration, of the numbers of workloads/coding_agents.json."""
        raw = json.loads((SOURCE / "loadtest/workloads/coding_agents.json").read_text())
        workload.parse(raw)
        tokens = lambda value: max(round(value * scale), 1)
        own = raw["own_tokens"]
        gaps = [{"mean": 1000 * delays * part["lognormal"]["mean"], "median": 1000 * delays * part["lognormal"]["median"], "max": 1000 * delays * part["max"]}
                for _, part in raw["think_seconds"]["mix"]]
        return {"new_tokens_per_turn": {"mean": tokens(raw["new_tokens"]), "median": tokens(raw["new_tokens"])},
                "generation_length": {"mean": tokens(raw["answer_tokens"]), "median": tokens(raw["answer_tokens"])},
                "inter_turn_delay": {"agentic_fraction": raw["think_seconds"]["mix"][0][0], "agentic_delay": gaps[0], "human_delay": gaps[1], "max": None},
                "reset": {"base_probability": 0.0, "context_scaling": 1.0}, "max_prompt_tokens": tokens(raw["max_context"]), "block_size": cls.BLOCK,
                "cache": {"layer1_tokens": tokens(raw["shared"][0]["tokens"]) // cls.BLOCK * cls.BLOCK, "layer1_5_tokens": 0,
                          "layer1_5_groups": {"num_groups": 1, "zipf_alpha": 0.6},
                          "layer2": {"mean": tokens(own["lognormal"]["mean"]), "median": tokens(own["lognormal"]["median"]), "max": tokens(own["max"])}}}

    def command(self, http_port, tokenizer, out):
        a = self.args
        return [self.program, "profile", "--model", NAME, "--url", f"http://127.0.0.1:{http_port}", "--endpoint-type", "chat", "--streaming", "--tokenizer", NAME,
                "--input-file", self.dataset, "--custom-dataset-type", "mooncake-trace", "--no-fixed-schedule", "--isl-block-size", self.BLOCK,
                "--concurrency", a.concurrency, "--num-sessions", a.sessions, "--benchmark-duration", f"{a.seconds:g}", "--ui", "none", "--no-server-metrics",
                "--no-gpu-telemetry", "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--output-artifact-dir", out]

    def limit(self):
        return 240 + 2 * self.args.seconds

    def rows(self, out):
        report = json.loads((out / "profile_export_aiperf.json").read_text())
        seconds = lambda name: [report[name][p] / 1000 for p in ("p50", "p95")]
        yield {"answered": report["request_count"]["avg"], "requests/s": report["request_throughput"]["avg"], "tokens/s": report["output_token_throughput"]["avg"],
               "first token p50 / p95": seconds("time_to_first_token"), "between tokens p50 / p95": seconds("inter_token_latency"),
               "failed": report["completed_request_count"]["avg"] - report["request_count"]["avg"]}


def measure(args):
    driver = {"sweep": Sweep, "agents": Agents}[args.what](args)
    tokenizer = tokenizer_cache(args.model, (args.out / "tokenizer").resolve())
    environment = {**os.environ, "HF_HOME": str(args.out.resolve() / "tokenizer"), "HF_HUB_OFFLINE": "1"}
    results = []
    for number, (attention, cache, flags) in enumerate(configurations(args.policy)):
        out = args.out / f"{args.what}-{number}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        with own_server.own_server("--model", args.model, "--model-name", NAME, *flags, *args.flags) as server:
            command = driver.command(server.http_port, tokenizer, out)
            load_before = os.getloadavg()
            run_tool(command, environment, out / "log", driver.limit())
            counted = counters(server.metrics_port)
        share = lambda part, whole: counted[part] / counted[whole] if counted[whole] else None
        results.append({"attention": attention, "prefix_cache": cache, "server_flags": flags + args.flags, "command": shlex.join(str(word) for word in command),
                        "cached_share": share("cached", "prompt"), "kv_read_share": share("read", "dense"),
                        "load_average": [round(value, 2) for value in (load_before[0], os.getloadavg()[0])], "rows": list(driver.rows(out))})
        print(f"measured: {attention}, prefix cache {cache}", file=sys.stderr, flush=True)
    return driver, results


def cell(value):
    if value is None:
        return "–"
    if isinstance(value, list):
        return " / ".join(load_report.seconds_text(one) for one in value)
    return f"{value:.2f}" if isinstance(value, float) and value != int(value) else f"{value:.0f}" if isinstance(value, (int, float)) else str(value)


def table(columns, results):
    lines = ["| attention | prefix cache | " + " | ".join(columns) + " | prompts from the cache | KV read |", "|" + "---|" * (len(columns) + 4)]
    for result in results:
        for row in result["rows"]:
            lines.append(f"| {result['attention']} | {result['prefix_cache']} | " + " | ".join(cell(row[column]) for column in columns) +
                         f" | {load_report.share_text(result['cached_share'])} | {load_report.share_text(result['kv_read_share'])} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "agents"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--policy", default="pca:k=2%", help="of retrieval (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time, at most (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of a sweep (default %(default)s)")
    parser.add_argument("--prefix", type=int, default=1024, help="of a sweep: tokens of the four beginnings of prompts (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="of a sweep: tokens that follow (default %(default)s)")
    parser.add_argument("--answer", type=int, default=32, help="of a sweep: tokens of each answer (default %(default)s)")
    parser.add_argument("--sessions", type=int, default=6, help="of agents (default %(default)s)")
    parser.add_argument("--scale", type=fractions.Fraction, default=fractions.Fraction(1, 25), help="of agents: times each length (default %(default)s)")
    # argparse gives no word to a second positional once options stood between the two.
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[:own.index("--")], own[own.index("--") + 1:]
    args = parser.parse_args(own, argparse.Namespace(flags=flags))
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"command": shlex.join(["loadtest/http_tools.py", *sys.argv[1:]]), "machine": load_report.machine(), "model": pathlib.Path(args.model).name}
    driver, report["results"] = measure(args)
    (args.out / f"{args.what}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(driver.COLUMNS, report["results"]))


if __name__ == "__main__":
    main()

"""The arithmetic of load tests: records of requests in, a report out, as JSON and as one HTML file.

A report is plain data, so that it can be written, read again and compared. Times are in seconds. The time to the first token counts
from the moment at which a request was due, not from when the client got round to sending it: a client that falls behind must
not make the server look fast.
"""
import dataclasses
import html
import io
import json
import math
import os
import platform
from typing import Dict, List, Optional

OK, CANCELLED = "ok", "cancelled"
PERCENTILES = (50, 90, 95, 99)


@dataclasses.dataclass
class Record:
    """A request. Times are seconds since the run began; `gaps` are those between its tokens (0 between tokens that came together)."""
    conversation: int
    turn: int
    due: float
    sent: float
    first: Optional[float] = None
    last: Optional[float] = None
    end: float = 0.0
    tokens: int = 0
    gaps: List[float] = dataclasses.field(default_factory=list)
    status: str = OK  # OK, CANCELLED (by the client, as the workload says), or why it failed
    usage: Optional[Dict] = None  # what the server says; None where the stream did not end by itself

    @property
    def first_token_seconds(self):
        return None if self.first is None else self.first - self.due

    @property
    def per_token_seconds(self):
        """Mean time of a token after the first; None of fewer than two."""
        return None if self.tokens < 2 else (self.last - self.first) / (self.tokens - 1)


@dataclasses.dataclass(frozen=True)
class Slo:
    """A request holds it if it was answered, its first token came within `first` and the others within `token` each, on average.
    A run holds it if at least `share` of the requests do; those that the workload cancels count for neither."""
    first: float
    token: float
    share: float = 0.95

    @staticmethod
    def parse(text):
        values = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            try:
                values[name] = float(value)
            except ValueError:
                equals = ""
            if not equals or name not in ("first", "token", "share") or not 0 < values[name] < math.inf:
                raise ValueError(f"{part!r} is none of first=SECONDS, token=SECONDS, share=(0, 1]")
        if "first" not in values or "token" not in values or values.get("share", 1) > 1:
            raise ValueError(f"{text!r} must have first=SECONDS and token=SECONDS, and a share of at most 1")
        return Slo(**values)

    def held_by(self, record):
        if record.status != OK or record.first is None:
            return False
        return record.first_token_seconds <= self.first and (record.per_token_seconds is None or record.per_token_seconds <= self.token)


def percentile(ordered, share):
    """Of values in ascending order, on the line between the two nearest ones; `share` from 0 to 100."""
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def statistics(values):
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return {"count": 0}
    mean = math.fsum(ordered) / len(ordered)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    return {"count": len(ordered), "mean": mean, "std": spread, "min": ordered[0], "max": ordered[-1],
            **{f"p{share}": percentile(ordered, share) for share in PERCENTILES}}


def _share(part, whole):
    return part / whole if whole else None


def _reads(usages):
    """Bytes by tier beside what dense attention would have read, over answers whose usage came."""
    read = {tier: sum(usage["kv_read_bytes"][tier] for usage in usages) for tier in ("fast", "host", "disk")}
    dense = sum(usage["kv_dense_bytes"] for usage in usages)
    probes = sum(usage["retrieval"]["probes"] for usage in usages)
    covered = math.fsum(usage["retrieval"]["coverage"] * usage["retrieval"]["probes"] for usage in usages if usage["retrieval"]["coverage"] is not None)
    drafts = {name: sum(usage["drafts"][name] for usage in usages) for name in ("drafted_tokens", "verified_tokens", "accepted_tokens")}
    return {"kv_read_bytes": read, "kv_dense_bytes": dense, "read_share": _share(read["fast"], dense),
            "attended_rows": sum(usage["attended_rows"] for usage in usages), "dense_rows": sum(usage["dense_rows"] for usage in usages),
            "probes": probes, "coverage": _share(covered, probes),
            **drafts, "accepted_share": _share(drafts["accepted_tokens"], drafts["verified_tokens"])}


def summarise(records, slo=None):
    """The numbers of a run. `records`: at least one."""
    asked = [record for record in records if record.status != CANCELLED]
    answered = [record for record in asked if record.status == OK]
    usages = [record.usage for record in records if record.usage is not None]
    begin, end = min(record.due for record in records), max(record.end for record in records)
    seconds = max(end - begin, 1e-9)
    failures = {}
    for record in asked:
        if record.status != OK:
            failures[record.status] = failures.get(record.status, 0) + 1
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    tokens = sum(record.tokens for record in records)
    turns = sorted({record.turn for record in answered})
    report = {
        "requests": len(records), "answered": len(answered), "cancelled": len(records) - len(asked), "failed": failures, "seconds": seconds,
        "requests_per_second": len(records) / seconds, "tokens_per_second": tokens / seconds, "generated_tokens": tokens,
        "prompt_tokens": prompt, "cached_tokens": sum(usage["cached_tokens"] for usage in usages),
        "cached_share": _share(sum(usage["cached_tokens"] for usage in usages), prompt),
        "preemptions": sum(usage["preemptions"] for usage in usages),
        "first_token_seconds": statistics(record.first_token_seconds for record in answered),
        "per_token_seconds": statistics(record.per_token_seconds for record in answered),
        "inter_token_seconds": statistics(gap for record in answered for gap in record.gaps),
        "request_seconds": statistics(record.end - record.due for record in answered),
        "queue_seconds": statistics(usage["queue_seconds"] for usage in usages),
        "client_late_seconds": statistics(record.sent - record.due for record in records),
        "by_turn": [{"turn": turn, "requests": len(of := [r for r in answered if r.turn == turn]),
                     "first_token_p50_seconds": statistics(r.first_token_seconds for r in of).get("p50"),
                     "cached_share": _share(sum(r.usage["cached_tokens"] for r in of), sum(r.usage["prompt_tokens"] for r in of))} for turn in turns],
        "reads": _reads(usages),
    }
    if slo is not None:
        good = sum(slo.held_by(record) for record in asked)
        report["slo"] = {**dataclasses.asdict(slo), "good": good, "of": len(asked), "held_share": _share(good, len(asked)),
                         "goodput_per_second": good / seconds, "held": bool(asked) and good >= slo.share * len(asked)}
    return report


def search(holds, low, high, precision=1.1):
    """The largest rate that holds and the smallest that does not, by doubling from `low`, then halving the (geometric) distance until they
    are within `precision` of each other. `holds(rate)` measures. None in place of either: not even `low` holds, or `high` does. That
    what holds at a rate holds below it is taken for granted."""
    if not 0 < low <= high:
        raise ValueError(f"the rates {low:g} to {high:g} are no range")
    good, bad, rate = None, None, low
    while bad is None and good != high:
        if holds(rate):
            good, rate = rate, min(rate * 2, high)
        else:
            bad = rate
    while good is not None and bad is not None and bad / good > precision:
        middle = math.sqrt(good * bad)
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good, bad


def machine():
    model = next((line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {"processor": model, "processors": os.cpu_count(), "load_average_before": [round(value, 2) for value in os.getloadavg()]}


# --- HTML -----------------------------------------------------------------------------------------------------------------------

def seconds_text(value):
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def share_text(value):
    return "–" if value is None else f"{100 * value:.1f} %"


def bytes_text(value):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _table(head, rows):
    cells = lambda tag, row: "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)
    return f"<table><tr>{cells('th', head)}</tr>" + "".join(f"<tr>{cells('td', row)}</tr>" for row in rows) + "</table>"


def figure(draw, size=(5.6, 3.2)):
    """An SVG element of what draw(axes) draws; `size` in inches. Text stays text, and nothing depends on the day."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "winnow", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                                "axes.grid": True, "grid.alpha": 0.3}):
        drawn, axes = pyplot.subplots(figsize=size, layout="constrained")
        draw(axes)
        out = io.StringIO()
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(drawn)
    return "<svg" + out.getvalue().partition("<svg")[2]


def _distribution(title, values, limit=None):
    def draw(axes):
        ordered = sorted(value for value in values if value is not None)
        axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], drawstyle="steps-post", color="#00796b")
        if limit is not None:
            axes.axvline(limit, color="#c62828", linestyle="--", linewidth=1)
        axes.set(title=title, xlabel="seconds", ylabel="share of them that took no longer", ylim=(0, 1.02), xlim=(0, None))
    return figure(draw)


def _course(records):
    def draw(axes):
        begin = min(record.due for record in records)
        for status, colour in (("ok", "#00796b"), (CANCELLED, "#f9a825"), (None, "#c62828")):
            of = [r for r in records if r.status == status or (status is None and r.status not in (OK, CANCELLED))]
            if of:
                axes.scatter([r.due - begin for r in of], [r.end - r.due for r in of], s=10, color=colour, label=status or "failed")
        axes.set(title="Requests, by when they were due", xlabel="seconds since the run began", ylabel="seconds until the end", ylim=(0, None))
        axes.legend(frameon=False)
    return figure(draw)


def _bytes(reads):
    def draw(axes):
        names = ["dense would read", "attention read", "brought from host", "brought from disk"]
        sizes = [reads["kv_dense_bytes"], *(reads["kv_read_bytes"][tier] for tier in ("fast", "host", "disk"))]
        bars = axes.barh(names[::-1], [size / 2**30 for size in sizes[::-1]], color="#00796b")
        axes.bar_label(bars, [bytes_text(size) for size in sizes[::-1]], padding=3)
        axes.set(title="KV bytes of decode steps", xlabel="GiB")
        axes.margins(x=0.2)
    return figure(draw)


def _trials(trials):
    def draw(axes):
        axes.semilogx([t["rate"] for t in trials], [100 * t["slo"]["held_share"] for t in trials], "o", color="#00796b", base=2)
        axes.axhline(100 * trials[0]["slo"]["share"], color="#c62828", linestyle="--", linewidth=1)
        axes.set(title="Search", xlabel="conversations a second", ylabel="% of requests that hold the SLO", ylim=(0, 102))
    return figure(draw)


STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}
th:first-child,td:first-child{text-align:left}code{background:#f3f3f3;padding:.1rem .3rem;overflow-wrap:anywhere}
section{display:grid;grid-template-columns:repeat(auto-fit,minmax(22rem,1fr));gap:1rem}svg{width:100%;height:auto}"""


def page(report, records):
    """One HTML file without anything from outside. `report` is main()'s: the summary, and what was run on what."""
    summary = report["summary"]
    times = [(name, summary[key]) for name, key in (("time to first token", "first_token_seconds"), ("time per token after it, by answer", "per_token_seconds"),
                                                    ("between tokens", "inter_token_seconds"), ("whole request", "request_seconds"), ("in the queue", "queue_seconds"))]
    reads, slo = summary["reads"], summary.get("slo")
    lines = [("requests", f"{summary['requests']}: {summary['answered']} answered, {summary['cancelled']} cancelled by the client"
              + "".join(f", {count} {why}" for why, count in summary["failed"].items())),
             ("tokens a second, all clients together", f"{summary['tokens_per_second']:.1f}"), ("requests a second", f"{summary['requests_per_second']:.3f}"),
             ("prompt tokens, and share of them from a cache", f"{summary['prompt_tokens']}, {share_text(summary['cached_share'])}"),
             ("KV read of what dense attention reads", share_text(reads["read_share"])), ("coverage, measured on samples", share_text(reads["coverage"])),
             ("drafted, verified, accepted tokens", f"{reads['drafted_tokens']}, {reads['verified_tokens']}, {reads['accepted_tokens']}"),
             ("client later than due, at most", seconds_text(summary["client_late_seconds"]["max"]))]
    if slo:
        lines.insert(1, (f"first token within {seconds_text(slo['first'])}, others {seconds_text(slo['token'])}",
                         f"{share_text(slo['held_share'])} of {slo['of']}, {slo['goodput_per_second']:.3f} a second; {'held' if slo['held'] else 'missed'}"))
    plots = [_course(records), _bytes(reads)]
    answered = [record for record in records if record.status == OK]
    if answered:
        plots[:0] = [_distribution("Time to first token", [r.first_token_seconds for r in answered], slo and slo["first"])]
    if any(record.gaps for record in answered):
        plots[1:1] = [_distribution("Between tokens", [gap for r in answered for gap in r.gaps], slo and slo["token"])]
    if report.get("search"):
        plots.append(_trials(report["search"]["trials"]))
    body = [f"<h1>{html.escape(report['workload']['name'])}</h1><p>{html.escape(report['workload']['about'])}</p>",
            f"<p><code>{html.escape(report['command'])}</code></p>",
            _table(("", ""), lines),
            _table(("", "mean", *(f"p{share}" for share in PERCENTILES), "max"),
                   [(name, *(seconds_text(of.get(key)) for key in ("mean", *(f"p{share}" for share in PERCENTILES), "max"))) for name, of in times]),
            f"<section>{''.join(plots)}</section>",
            "<h2>By turn</h2>", _table(("turn", "answered", "first token, median", "prompt from a cache"),
                                       [(of["turn"] + 1, of["requests"], seconds_text(of["first_token_p50_seconds"]), share_text(of["cached_share"])) for of in summary["by_turn"]])]
    if report.get("search"):
        body += ["<h2>Search</h2>", _table(("conversations a second", "hold the SLO", "first token p95", "per token p95"),
                                           [(f"{t['rate']:.3f}", share_text(t["slo"]["held_share"]), seconds_text(t["first_token_seconds"].get("p95")),
                                             seconds_text(t["per_token_seconds"].get("p95"))) for t in report["search"]["trials"]])]
    body += ["<h2>Where and with what</h2>", f"<pre>{html.escape(json.dumps({k: report[k] for k in ('server', 'machine', 'workload')}, indent=1))}</pre>"]
    return (f"<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>{html.escape(report['workload']['name'])}"
            f"</title><style>{STYLE}</style>" + "\n".join(body) + "</html>\n")

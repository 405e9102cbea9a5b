"""Workloads: files that say who asks for how much, and when. Read, checked, and laid out as conversations.

    workload = load("loadtest/workloads/chats.json")           # WorkloadError names the field that is wrong
    conversations = lay_out(workload.scaled(1 / 8), seed=1)    # the same seed gives the same conversations

The format is described in workloads/README.md. Nothing here talks to a server. Lengths are in tokens, times in seconds.
"""
import dataclasses
import gzip
import json
import math
import pathlib
import random
from typing import List, Optional, Tuple

FORMAT = "winnow-workload/1"
ANSWER = "answer"


class WorkloadError(ValueError):
    """A file is not a workload. The text begins with the path of the field."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request. `segments` are (name, tokens) of the prompt: segments of one name have the same tokens, and ANSWER stands for the
    previous turn's answer as the server gave it."""
    segments: Tuple[Tuple[str, int], ...]
    answer_tokens: int
    think_seconds: float = 0.0  # since the end of the previous answer; the first turn comes at the conversation's arrival
    cancel_after_tokens: Optional[int] = None
    cancel_after_seconds: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Conversation:
    arrival: float
    turns: Tuple[Turn, ...]


def _fail(path, message):
    raise WorkloadError(f"{path}: {message}")


def _number(value, path, low=0.0, integer=False):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or (integer and value != int(value)):
        _fail(path, f"must be {'an integer' if integer else 'a number'}, and is {value!r}")
    if value < low:
        _fail(path, f"must be at least {low:g}, and is {value!r}")
    return value


def _object(value, path, required, optional=()):
    if not isinstance(value, dict):
        _fail(path, "must be an object")
    for key in value:
        if key not in required and key not in optional:
            _fail(f"{path}.{key}", "is not a field of the format")
    for key in required:
        if key not in value:
            _fail(f"{path}.{key}", "is missing")
    return value


class Distribution:
    """A number that is drawn: a constant, or an object with one of KINDS, and `min` and `max`, which cut what was drawn."""
    KINDS = ("uniform", "exponential", "lognormal", "mix")

    def __init__(self, value, path, low=0.0):
        self.kind, self.value, self.min, self.max = "constant", value, low, math.inf
        if not isinstance(value, dict):
            _number(value, path, low)
            return
        kinds = [kind for kind in self.KINDS if kind in value]
        if len(kinds) != 1:
            _fail(path, f"must be a number, or have exactly one of {', '.join(self.KINDS)}")
        self.kind = kinds[0]
        _object(value, path, (self.kind,), ("min", "max"))
        self.min = _number(value.get("min", low), f"{path}.min", low)
        self.max = _number(value["max"], f"{path}.max", self.min) if "max" in value else math.inf
        self.value = getattr(self, f"_check_{self.kind}")(value[self.kind], f"{path}.{self.kind}", low)

    @staticmethod
    def _check_uniform(value, path, low):
        if not isinstance(value, list) or len(value) != 2:
            _fail(path, "must be [low, high]")
        _number(value[0], f"{path}[0]", low)
        _number(value[1], f"{path}[1]", value[0])
        return value

    @staticmethod
    def _check_exponential(value, path, low):
        return _number(value, path, max(low, 1e-9))

    @staticmethod
    def _check_lognormal(value, path, low):
        _object(value, path, ("mean", "median"))
        _number(value["median"], f"{path}.median", 1e-9)
        _number(value["mean"], f"{path}.mean", value["median"])
        # The mean of exp(N(mu, s)) is exp(mu + s^2 / 2), its median exp(mu).
        return math.log(value["median"]), math.sqrt(2 * math.log(value["mean"] / value["median"]))

    @staticmethod
    def _check_mix(value, path, low):
        if not isinstance(value, list) or not value:
            _fail(path, "must be a list of [weight, number or distribution]")
        for i, part in enumerate(value):
            if not isinstance(part, list) or len(part) != 2:
                _fail(f"{path}[{i}]", "must be [weight, number or distribution]")
            _number(part[0], f"{path}[{i}][0]", 1e-9)
        return [(part[0], Distribution(part[1], f"{path}[{i}][1]", low)) for i, part in enumerate(value)]

    def draw(self, numbers):
        if self.kind == "constant":
            return self.value
        if self.kind == "uniform":
            drawn = numbers.uniform(*self.value)
        elif self.kind == "exponential":
            drawn = numbers.expovariate(1 / self.value)
        elif self.kind == "lognormal":
            drawn = numbers.lognormvariate(*self.value)
        else:
            drawn = numbers.choices([part for _, part in self.value], [weight for weight, _ in self.value])[0].draw(numbers)
        return min(max(drawn, self.min), self.max)

    def draw_tokens(self, numbers, scale, least=0):
        return max(round(self.draw(numbers) * scale), least)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Texts of which each conversation begins with one; `skew` 0: each as often, 1: as one over its rank."""
    count: int
    tokens: Distribution
    skew: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests as they came: (seconds, prompt tokens, answer tokens, ids of blocks)."""
    block_tokens: int
    requests: Tuple[Tuple[float, int, int, Tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Cancel:
    share: float
    unit: str  # "tokens" or "seconds"
    after: Distribution


@dataclasses.dataclass(frozen=True)
class Workload:
    name: str
    about: str
    source: str
    process: str = "trace"
    per_second: float = 1.0  # conversations; of a trace: how many times faster than it was
    count: int = 0
    shared: Tuple[Shared, ...] = ()
    own_tokens: Optional[Distribution] = None
    turns: Optional[Distribution] = None
    new_tokens: Optional[Distribution] = None
    answer_tokens: Optional[Distribution] = None
    think_seconds: Optional[Distribution] = None
    trace: Optional[Trace] = None
    cancel: Optional[Cancel] = None
    max_context: float = math.inf
    scale: float = 1.0

    def scaled(self, factor):
        """The same with every length times `factor`, --max-context too; at least one token each."""
        if not 0 < factor <= 64:
            raise WorkloadError(f"a scale of {factor} is not in (0, 64]")
        return dataclasses.replace(self, scale=self.scale * factor)

    def at_rate(self, per_second):
        if not 0 < per_second < math.inf:
            raise WorkloadError(f"a rate of {per_second} is not a positive number")
        return dataclasses.replace(self, per_second=per_second)

    def cut(self, conversations):
        """The first so many conversations (requests of a trace)."""
        if not 0 < conversations <= self.count:
            raise WorkloadError(f"{self.name} has {self.count} conversations, not {conversations}")
        return dataclasses.replace(self, count=conversations)


def _load_trace(raw, path, folder):
    _object(raw, path, ("file", "block_tokens"))
    block = int(_number(raw["block_tokens"], f"{path}.block_tokens", 1, integer=True))
    if not isinstance(raw["file"], str) or pathlib.PurePath(raw["file"]).name != raw["file"]:
        _fail(f"{path}.file", "must be the name of a file beside this one")
    file = folder / raw["file"]
    if not file.exists():
        _fail(f"{path}.file", f"{file} is not there")
    requests, last = [], 0.0
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{raw['file']}:{number}"
            try:
                one = json.loads(line)
            except ValueError as error:
                _fail(where, f"is not JSON ({error})")
            _object(one, where, ("timestamp", "input_length", "output_length", "hash_ids"))
            seconds = _number(one["timestamp"], f"{where}.timestamp", last * 1000) / 1000
            prompt = int(_number(one["input_length"], f"{where}.input_length", 1, integer=True))
            answer = int(_number(one["output_length"], f"{where}.output_length", 1, integer=True))
            ids = one["hash_ids"]
            if not isinstance(ids, list) or len(ids) != -(-prompt // block):
                _fail(f"{where}.hash_ids", f"must have {-(-prompt // block)} blocks of {block} tokens for a prompt of {prompt}")
            requests.append((seconds, prompt, answer, tuple(ids)))
            last = seconds
    if not requests:
        _fail(f"{path}.file", "has no requests")
    return Trace(block, tuple(requests))


def _load_cancel(raw, path):
    _object(raw, path, ("share",), ("after_tokens", "after_seconds"))
    share = _number(raw["share"], f"{path}.share")
    if share > 1:
        _fail(f"{path}.share", "must be at most 1")
    units = [unit for unit in ("tokens", "seconds") if f"after_{unit}" in raw]
    if len(units) != 1:
        _fail(path, "must have exactly one of after_tokens, after_seconds")
    return Cancel(share, units[0], Distribution(raw[f"after_{units[0]}"], f"{path}.after_{units[0]}", 1 if units[0] == "tokens" else 0))


def _load_shared(raw, path):
    if not isinstance(raw, list):
        _fail(path, "must be a list")
    pools = []
    for i, one in enumerate(raw):
        _object(one, f"{path}[{i}]", ("count", "tokens"), ("skew",))
        pools.append(Shared(int(_number(one["count"], f"{path}[{i}].count", 1, integer=True)), Distribution(one["tokens"], f"{path}[{i}].tokens", 1),
                            _number(one.get("skew", 0), f"{path}[{i}].skew")))
    return tuple(pools)


def parse(raw, name="workload", folder=pathlib.Path(".")):
    """The workload of a JSON object. Raises WorkloadError."""
    common, optional = ("format", "about", "source"), ("cancel", "max_context")
    drawn = ("conversations", "arrivals", "turns", "new_tokens", "answer_tokens")
    if not isinstance(raw, dict):
        _fail(name, "must be an object")
    if raw.get("format") != FORMAT:
        _fail(f"{name}.format", f"must be {FORMAT!r}, and is {raw.get('format')!r}")
    if "trace" in raw:
        _object(raw, name, (*common, "trace"), optional)
    else:
        _object(raw, name, (*common, *drawn), ("shared", "own_tokens", "think_seconds", *optional))
    for key in ("about", "source"):
        if not isinstance(raw[key], str) or not raw[key]:
            _fail(f"{name}.{key}", "must be a text")
    fields = {"name": name, "about": raw["about"], "source": raw["source"]}
    if "cancel" in raw:
        fields["cancel"] = _load_cancel(raw["cancel"], f"{name}.cancel")
    if "max_context" in raw:
        fields["max_context"] = int(_number(raw["max_context"], f"{name}.max_context", 2, integer=True))
    if "trace" in raw:
        trace = _load_trace(raw["trace"], f"{name}.trace", folder)
        return Workload(**fields, trace=trace, count=len(trace.requests))
    arrivals = _object(raw["arrivals"], f"{name}.arrivals", ("process",), ("per_second",))
    if arrivals["process"] not in ("poisson", "constant", "at_once"):
        _fail(f"{name}.arrivals.process", "must be poisson, constant or at_once")
    if (arrivals["process"] == "at_once") == ("per_second" in arrivals):
        _fail(f"{name}.arrivals.per_second", "belongs to poisson and constant, and only to them")
    return Workload(**fields, process=arrivals["process"], per_second=_number(arrivals.get("per_second", 1), f"{name}.arrivals.per_second", 1e-9),
                    count=int(_number(raw["conversations"], f"{name}.conversations", 1, integer=True)), shared=_load_shared(raw.get("shared", []), f"{name}.shared"),
                    **{key: Distribution(raw[key], f"{name}.{key}", 1) for key in ("turns", "new_tokens", "answer_tokens")},
                    **{key: Distribution(raw.get(key, 0), f"{name}.{key}") for key in ("own_tokens", "think_seconds")})


def load(path):
    path = pathlib.Path(path)
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path}: {error}") from error
    return parse(raw, path.stem, path.parent)


def _arrivals(workload, numbers):
    at = 0.0
    for i in range(workload.count):
        yield at
        if workload.process == "poisson":
            at += numbers.expovariate(workload.per_second)
        elif workload.process == "constant":
            at += 1 / workload.per_second


def _cancel_of(workload, numbers):
    if workload.cancel is None or numbers.random() >= workload.cancel.share:
        return {}
    after = workload.cancel.after.draw(numbers)
    return {"cancel_after_tokens": max(round(after), 1)} if workload.cancel.unit == "tokens" else {"cancel_after_seconds": after}


def _lay_out_trace(workload, seed, numbers):
    scale = workload.scale
    for i, (seconds, prompt, answer, ids) in enumerate(workload.trace.requests[:workload.count]):
        block = workload.trace.block_tokens
        sizes = [min(block, prompt - k * block) for k in range(len(ids))]
        # A block that is not whole is nobody else's start: its tokens are the first ones of the block of this id.
        segments = tuple((f"{seed}/block/{number}", max(round(size * scale), 1)) for number, size in zip(ids, sizes))
        turn = Turn(segments, max(round(answer * scale), 1), **_cancel_of(workload, numbers))
        if sum(size for _, size in segments) + turn.answer_tokens <= workload.max_context * scale:
            yield Conversation(seconds / workload.per_second, (turn,))


def _conversation(workload, seed, index, arrival, numbers, pools):
    scale = workload.scale
    segments = []
    for place, (pool, sizes) in enumerate(zip(workload.shared, pools)):
        weights = [1 / (rank + 1) ** pool.skew for rank in range(pool.count)]
        chosen = numbers.choices(range(pool.count), weights)[0]
        segments.append((f"{seed}/shared/{place}/{chosen}", sizes[chosen]))
    own = workload.own_tokens.draw_tokens(numbers, scale)
    if own:
        segments.append((f"{seed}/own/{index}", own))
    turns, context = [], sum(size for _, size in segments)
    for number in range(round(workload.turns.draw(numbers))):
        new, answer = (part.draw_tokens(numbers, scale, least=1) for part in (workload.new_tokens, workload.answer_tokens))
        if context + new + answer > workload.max_context * scale:
            break
        segments.append((f"{seed}/new/{index}/{number}", new))
        think = workload.think_seconds.draw(numbers) if number else 0.0
        turns.append(Turn(tuple(segments), answer, think, **_cancel_of(workload, numbers)))
        segments.append((ANSWER, answer))
        context += new + answer
    return Conversation(arrival, tuple(turns))


def lay_out(workload, seed) -> List[Conversation]:
    """The conversations, by arrival. Those whose first turn does not fit into max_context are left out; WorkloadError where none fits."""
    numbers = random.Random(seed)
    if workload.trace is not None:
        laid_out = list(_lay_out_trace(workload, seed, numbers))
    else:
        pools = [[pool.tokens.draw_tokens(numbers, workload.scale, least=1) for _ in range(pool.count)] for pool in workload.shared]
        laid_out = [_conversation(workload, seed, i, arrival, numbers, pools) for i, arrival in enumerate(_arrivals(workload, numbers))]
    laid_out = [one for one in laid_out if one.turns]
    if not laid_out:
        raise WorkloadError(f"{workload.name}: no conversation fits into max_context")
    return laid_out

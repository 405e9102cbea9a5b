#!/usr/bin/python3
"""Compatibility of the names that users, dashboards and scripts hold on to, beside those of proto/ (tests/proto).

    published.py check     every name of published.json is still there and of the same kind; new ones are no fault
    published.py update    accept the names as they are now: rewrite published.json

The names are those of the program: of the metrics their kinds and labels, of each command its options and what they take, the
attention policies and their options, and the fields of every route's `usage` with their types. Runs build/release/winnow
(or WINNOW_BIN) with the small model.
"""
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMITTED = pathlib.Path(__file__).with_name("published.json")
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "scripts")]
import harness  # noqa: E402
import reference_pages  # noqa: E402

PROMPT = "Once upon a time there was a fox. " * 20


def metrics_of(text):
    """{name: {"kind", "labels"}} of a scrape."""
    families = {name: {"kind": kind, "labels": {}} for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)}
    for name, series in re.findall(r"^([A-Za-z_:][A-Za-z0-9_:]*)\{(.*)\} ", text, re.M):
        family = name if name in families else re.sub(r"_(bucket|sum|count)$", "", name)
        for label in re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', series):
            families[family]["labels"][label] = "label"
    return families


def kind_of_value(value):
    """What an option takes: its choices, or the word for it without bounds and default; "" for a switch."""
    if "|" in value:
        return {choice: "choice" for choice in value.split("|")}
    return re.match(r"[^:=\s]*", value).group(0)


def options_of(binary):
    """{command: {option: what it takes}} of every command and subcommand."""
    out = {}

    def walk(*words):
        text = reference_pages.help_of(binary, *words)
        own, _, below = text.partition("Subcommands:")
        out[" ".join(("winnow", *words))] = {
            name: kind_of_value(value) for names, value, _ in reference_pages.options_of(own) for name in names.split(",") if name.startswith("-")}
        for name in re.findall(r"^  ([a-z][a-z-]*)\s{2,}\S", below, re.M):
            walk(*words, name)

    walk()
    return out


def policies_of(binary):
    """The names that the program lists when it is given one that it does not know."""
    def listed(policy, word):
        said = subprocess.run([binary, "serve", "--model", "x", "--check-config", "--policy", policy], capture_output=True, text=True)
        names = re.search(rf"; {word}: ([a-z_, ]+)", said.stderr)
        if said.returncode != 2 or names is None:
            sys.exit(f"published.py: the program lists no {word}: {said.stderr}")
        return dict.fromkeys(names.group(1).strip().split(", "), word)
    return {"policies": listed("zzzzzzzz", "policies"), "options": listed("lsh:zzzzzzzz=1", "options")}


def types_of(value):
    """The shape of a JSON value: objects by field; "null" is of no type."""
    if isinstance(value, dict):
        return {name: types_of(field) for name, field in value.items()}
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", str: "string", list: "array", type(None): "null"}[type(value)]


def usage_of(server):
    """{route: shape of its usage}."""
    import test_tenants
    routes = {f"POST {path}": ("POST", path, body) for path, body in test_tenants.bodies_of(PROMPT).items()}
    routes["PUT /v1/prefixes/NAME"] = ("PUT", "/v1/prefixes/published", {"prompt": PROMPT})
    return {route: types_of(test_tenants.ask(server, *call)["usage"]) for route, call in routes.items()}


def names_now():
    with harness.Server("--index", "lsh:128") as server:
        return {"metrics": metrics_of(server.metrics_text()), "options": options_of(harness.BIN), "policy": policies_of(harness.BIN),
                "usage": usage_of(server)}


def breaking_changes(old, new, where=""):
    """What was published and is gone, or of another kind."""
    faults = []
    for name, kind in old.items():
        path = f"{where}: {name}" if where else name
        if name not in new:
            faults.append(f"{path} is gone")
        elif isinstance(kind, dict) and isinstance(new[name], dict):
            faults += breaking_changes(kind, new[name], path)
        elif kind != new[name] and "null" not in (kind, new[name]):
            faults.append(f"{path} was {kind!r}, is {new[name]!r}")
    return faults


def main():
    if sys.argv[1:] not in (["check"], ["update"]):
        sys.exit(__doc__)
    now = names_now()
    if sys.argv[1] == "update":
        COMMITTED.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        return
    faults = breaking_changes(json.loads(COMMITTED.read_text()), now)
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The documents speak of what is there: links and anchors, commands and their flags, files of the project; each page is in the
site's menu; generated pages are current. WINNOW_BIN is the program. Needs PyYAML. The site itself: deploy/check.sh.
"""
import functools
import html
import json
import os
import re
import subprocess
import sys
import unittest

import yaml

import manifests

SOURCE = manifests.SOURCE
BIN = os.environ.get("WINNOW_BIN", str(SOURCE / "build/release/winnow"))
DOCS = SOURCE / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [SOURCE / name for name in ("README.md", "CONTRIBUTING.md")] + sorted(
    path for path in SOURCE.rglob("README.md") if path.parent != SOURCE and "build" not in path.parts and not any(part.startswith(".") for part in path.relative_to(SOURCE).parts))
# Flags of programs that are not the project's.
FOREIGN = {"docker", "smg", "kubectl", "apt-get", "curl", "git", "helm", "mkdocs", "pip", "ctest", "cmake", "cpack", "systemctl", "install", "python3", "nvidia-smi"}


def without_code(text):
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    text = re.sub(r"(?m)^(?:    |\t).*$", "", text)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path):
    """Anchors as GitHub and the site make them of headings."""
    found, seen = set(), {}
    for heading in re.findall(r"(?m)^#{1,6} (.*)$", re.sub(r"(?ms)^```.*?^```", "", path.read_text())):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        slug += f"-{seen[slug]}" if slug in seen else ""
        seen[slug.rsplit("-", 1)[0] if slug in found else slug] = seen.get(slug, 0) + 1
        found.add(slug)
    return found


@functools.lru_cache(None)
def help_of(*command):
    done = subprocess.run([BIN, *command, "--help"], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def commands(text):
    """Command lines of code blocks, continued lines joined, `A && B` and pipes apart."""
    blocks = re.findall(r"(?ms)^```[^\n]*\n(.*?)^```", text) + re.findall(r"(?m)(?:^    .*\n?)+", re.sub(r"(?ms)^```.*?^```", "", text))
    for block in blocks:
        block = re.sub(r"\\\n\s*", " ", block)
        for line in block.splitlines():
            yield from (part.strip() for part in re.split(r"&&|\|(?! *\w+\])", line.strip()))


class Links(unittest.TestCase):
    def test_links_lead_somewhere(self):
        checked = 0
        for path in PAGES + OTHERS:
            for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
                if re.match(r"[a-z]+:", target):
                    continue
                with self.subTest(page=str(path.relative_to(SOURCE)), link=target):
                    name, _, anchor = target.partition("#")
                    file = (path.parent / name).resolve() if name else path
                    self.assertTrue(file.exists())
                    if anchor and file.suffix == ".md":
                        self.assertIn(anchor, anchors(file))
                    checked += 1
        self.assertGreater(checked, 60)

    def test_each_page_is_in_the_menu(self):
        def pages(entry):
            if isinstance(entry, str):
                yield entry
            elif isinstance(entry, list):
                for one in entry:
                    yield from pages(one)
            else:
                for one in entry.values():
                    yield from pages(one)
        menu = list(pages(yaml.safe_load((SOURCE / "mkdocs.yml").read_text())["nav"]))
        self.assertEqual(len(menu), len(set(menu)))
        self.assertEqual(set(menu), {str(path.relative_to(DOCS)) for path in PAGES})


class Commands(unittest.TestCase):
    def test_commands_of_winnow_have_the_flags_that_they_are_given(self):
        checked = 0
        for path in PAGES + OTHERS:
            for command in commands(path.read_text()):
                match = re.match(r"(?:[A-Z_]+=\S+ )*(?:build/release/|build/cuda/|\./)?winnow ([a-z].*)$", command)
                if not match:
                    continue
                with self.subTest(page=str(path.relative_to(SOURCE)), command=command):
                    words = match.group(1).split()
                    sub = [words[0]]
                    text = help_of(*sub)
                    self.assertIsNotNone(text, "no such command")
                    if len(words) > 1 and re.search(rf"(?m)^  {re.escape(words[1])}\s", text.partition("Subcommands:")[2]):
                        sub.append(words[1])
                        text = help_of(*sub)
                    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", match.group(1)):
                        self.assertRegex(text, rf"(?<![\w-]){flag}(?![\w-])")
                    checked += 1
        self.assertGreater(checked, 25)

    def test_the_start_pages_commands_are_those_that_are_tried(self):
        """deploy/try_start.py runs them; here only that it finds each block of the page, and would run no other."""
        done = subprocess.run([sys.executable, SOURCE / "deploy/try_start.py", "--list"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        page = (SOURCE / "docs/start.md").read_text().partition("## On a GPU")[0]
        on_page = [line[4:] for line in page.splitlines() if line.startswith("    ")]
        self.assertEqual([re.sub(r"^[A-Z][a-z ]*: ", "", line) for line in done.stdout.splitlines()], on_page)
        self.assertGreater(len(on_page), 8)

    def test_scripts_that_are_named_are_there(self):
        checked = 0
        for path in PAGES + OTHERS:
            for name in re.findall(r"(?<![\w./-])((?:scripts|loadtest|tests|deploy|calibrate|docs|server|engine|kernels|storage|models)/[\w./-]+"
                                   r"\.(?:sh|py|cc|h|cu|cuh|md|json|yaml|cmake|proto))\b", path.read_text()):
                if "/X" in name:  # a name to be filled in
                    continue
                with self.subTest(page=str(path.relative_to(SOURCE)), file=name):
                    self.assertTrue((SOURCE / name).exists())
                    checked += 1
        self.assertGreater(checked, 40)

    def test_flags_in_the_text_are_options_of_something(self):
        """Wherever `--flag` stands: it is winnow's, or of a script of the project, or its line is about another program."""
        known = set()
        top = help_of()
        for command in re.findall(r"(?m)^  ([a-z][a-z-]*)\s{2,}", top.partition("Subcommands:")[2]):
            text = help_of(command)
            known |= set(re.findall(r"--[a-z][a-z0-9-]*", text))
            for nested in re.findall(r"(?m)^  ([a-z][a-z-]*)\s{2,}", text.partition("Subcommands:")[2]):
                known |= set(re.findall(r"--[a-z][a-z0-9-]*", help_of(command, nested)))
        for folder in ("scripts", "loadtest", "tests", "calibrate", "deploy", "kernels"):
            for path in (SOURCE / folder).rglob("*"):
                if path.suffix in (".py", ".sh", ".cc", ".cu") and "build" not in path.parts:
                    known |= set(re.findall(r"--[a-z][a-z0-9-]*", path.read_text(errors="replace")))
        known |= set(re.findall(r"--[a-z][a-z0-9-]*", (SOURCE / "demo.sh").read_text() + (SOURCE / "test.sh").read_text()))
        for path in PAGES + OTHERS:
            if path.name == "flags.md":
                continue
            text = re.sub(r"\\\n\s*", " ", path.read_text())
            for line in text.splitlines():
                if any(re.search(rf"\b{re.escape(word)}\b", line) for word in FOREIGN):
                    continue
                for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", line):
                    with self.subTest(page=str(path.relative_to(SOURCE)), flag=flag):
                        self.assertIn(flag, known)

    def test_environment_variables_are_options(self):
        options = set(re.findall(r"\[(WINNOW_[A-Z0-9_]+)\]", help_of("serve"))) | {"WINNOW_CONFIG", "WINNOW_KV_BYTES"}
        for path in [DOCS / name for name in ("start.md", "deploy.md", "cluster.md", "http.md")]:
            for name in re.findall(r"WINNOW_[A-Z0-9_]+", path.read_text()):
                self.assertIn(name, options, path)


class Http(unittest.TestCase):
    """docs/http.md is written by hand; routes and fields are those of the code."""

    def setUp(self):
        self.page = (DOCS / "http.md").read_text()

    def test_each_route_is_on_the_page(self):
        source = (SOURCE / "server/http/api.cc").read_text()
        named = {"kPrefixesPath": "/v1/prefixes", "kOnePrefix": "/v1/prefixes/NAME"}
        routes = {(method, named.get(path, path.strip('"'))) for method, path in re.findall(r'\{"([A-Z]+)", ("/[^"]*"|k\w+), &HttpApi::', source)}
        self.assertGreater(len(routes), 20)
        shown = set()
        for cell in re.findall(r"(?m)^\| (`(?:GET|POST|PUT)[^|]*) \|", self.page):
            methods = []
            for words in re.findall(r"`([^`]*)`", cell):
                *own, path = re.split(r",? ", words) if "/" in words else (words, "")
                methods += own if own else []
                if path:
                    shown |= {(method, path) for method in methods}
                    methods = methods if own == [] else own
        shown.discard(("GET", "/v1/models/NAME"))  # the code takes the name off before it looks
        self.assertEqual(routes, shown)

    def test_each_field_is_on_the_page(self):
        read, refused = set(), set()
        for name in ("openai_request", "responses", "prefix_request", "tools_request", "anthropic"):
            source = (SOURCE / f"server/http/{name}.cc").read_text()
            read |= set(re.findall(r'\bfields\.(?:Find|Bool|Int32|Seed|Number|String|Object|Array)\("(\w+)"\)', source))
            refused |= set(re.findall(r'\bfields\.Refuse\("(\w+)"', source))
            table = re.search(r"(?s) kRefused = \{\{(.*?)\}\};", source)
            refused |= set(re.findall(r'\{"(\w+)",', table.group(1))) if table else set()
        self.assertGreater(len(read), 50)
        self.assertGreater(len(refused), 20)
        pages = self.page + (DOCS / "prefixes.md").read_text()
        self.assertEqual([field for field in sorted(read | refused) if not re.search(rf"(?<![A-Za-z_]){field}(?![A-Za-z_])", pages)], [])


class Metrics(unittest.TestCase):
    # Other words that begin so: programs, Python's module, HTTP's extras, the artifact's key.
    OTHERS = {"winnow_baselines", "winnow_cuda_bench", "winnow_client", "winnow_policy", "winnow_exactness", "winnow_artifact"}

    def test_metrics_that_are_named_are_published(self):
        metrics, checked = json.loads((SOURCE / "tests/published/published.json").read_text())["metrics"], 0
        for path in [path for path in PAGES + OTHERS if path.name != "metrics.md"]:
            for name, star in re.findall(r"`(winnow_[a-z_]+)(\*?)(?:\{[^`]*\})?`", path.read_text()):
                if name in self.OTHERS:
                    continue
                with self.subTest(page=str(path.relative_to(SOURCE)), metric=name):
                    self.assertTrue(any(metric.startswith(name) for metric in metrics) if star else name in metrics)
                    checked += 1
        self.assertGreater(checked, 40)


class Policies(unittest.TestCase):
    def test_each_policy_and_option_is_on_the_page(self):
        page = (DOCS / "policies.md").read_text()
        named = json.loads((SOURCE / "tests/published/published.json").read_text())["policy"]
        for name in [*named["policies"], *named["options"]]:
            self.assertIn(f"`{name}`", page)

    def test_the_comments_of_the_api_name_each(self):
        proto = (SOURCE / "proto/winnow/v1/inference.proto").read_text()

        def comment_above(field, message):
            return re.search(rf"((?: *//.*\n)+) *string {field} = ", proto[proto.index(f"message {message} {{"):]).group(1)

        named = json.loads((SOURCE / "tests/published/published.json").read_text())["policy"]
        comment = comment_above("policy", "GenerateRequest")
        options = {option for words in re.findall(r"(?m)^ *//   (\w[\w, ]*?)  ", comment) for option in words.split(", ")}
        self.assertEqual(options, set(named["options"]))
        for name in named["policies"]:
            self.assertRegex(comment, rf'"{name}[":]')
        comment = comment_above("name", "RetrievalIndex")
        for name in set(named["policies"]) - {"dense", "window", "oracle"} | {"int4", "residual"}:
            self.assertIn(f'"{name}"', comment)


class Generated(unittest.TestCase):
    def test_the_page_of_the_api_is_current(self):
        sys.path.insert(0, str(SOURCE / "scripts"))
        import reference_pages
        self.assertEqual((DOCS / "api.md").read_text(), reference_pages.api_page(reference_pages.protos()), "run scripts/reference_pages.py --write")

    def test_the_page_of_the_api_has_all_of_it(self):
        """Found in the protos' text, where the page is made of what protoc makes of it."""
        def words_of(text):
            return " ".join(re.sub(r"[`|\\]|---", "", html.unescape(text.replace("<br>", " "))).split())

        page, checked, missing = (DOCS / "api.md").read_text(), 0, []
        plain = words_of(page)
        for path in (SOURCE / "proto/winnow").rglob("*.proto"):
            text = path.read_text()
            source = re.sub(r"//.*", "", text)
            wanted = [f"\n#### {name}\n" for name in re.findall(r"\b(?:message|enum) (\w+)", source)]
            wanted += [f".{name}\n\n" for name in re.findall(r"\brpc (\w+)", source)]
            wanted += [f"| `{name}` = {number} |" for name, number in re.findall(r"(\w+) = (\d+);", source)]
            missing += [mark for mark in wanted if mark not in page]
            for comment in re.findall(r"(?m)(?:^ *//.*\n)+", text):
                words = words_of(re.sub(r"(?m)^ *//", "", comment))
                if not words.startswith("Reserved for"):
                    wanted.append(words)
                    missing += [] if words in plain else [words]
            checked += len(wanted)
        self.assertEqual(missing, [])
        self.assertGreater(checked, 300)

    def test_the_page_of_options_is_current(self):
        sys.path.insert(0, str(SOURCE / "scripts"))
        import reference_pages
        self.assertEqual((DOCS / "flags.md").read_text(), reference_pages.flags_page(BIN), "run scripts/reference_pages.py --write")


if __name__ == "__main__":
    unittest.main(verbosity=2)

#!/usr/bin/env python3
"""Dashboards, alerts, runbooks and docs/metrics.md speak of metrics that a server has, and leave none out.

WINNOW_BIN is the program. Needs PyYAML. Whether alerts fire is promtool's to say: test_alerts.py.
"""
import hashlib
import json
import math
import re
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request

import yaml

import manifests

sys.path.insert(0, str(manifests.SOURCE / "tests/e2e"))
import harness  # noqa: E402

MONITORING = manifests.DEPLOY / "monitoring"
# Words of PromQL, and series that Prometheus makes itself.
WORDS = {"sum", "rate", "increase", "by", "le", "histogram_quantile", "count", "and", "or", "time", "up"}
# On no dashboard and in no alert, because others read them.
EXEMPT = {
    "winnow_kv_block_bytes": "the status page multiplies with it",
    "winnow_engine_steps_total": "the status page sees by it that a server was started anew",
    "winnow_sequences_accepted_total": "of runbooks",
    "winnow_sequences_rejected_total": "as winnow_requests_total{outcome=\"rejected\"}, of sequences",
    "winnow_http_connections_accepted_total": "of no concern while nothing is refused",
    "winnow_grpc_connections_accepted_total": "as for HTTP",
}


# Alerts whose limit is on no panel.
UNDRAWN = {"WinnowStoreErrors"}  # Trouble shows its metric in another window, and has another alert's limit


def rules():
    return [rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def dashboards():
    return {path.stem: json.loads(path.read_text()) for path in sorted((MONITORING / "dashboards").glob("*.json"))}


def panels():
    return [(name, panel) for name, dashboard in dashboards().items() for panel in dashboard["panels"] if panel["type"] != "row"]


def queries():
    """(where, PromQL) of everything that Prometheus is asked."""
    yield from ((f"alert {rule['alert']}", rule["expr"]) for rule in rules())
    yield from ((f"{name}: {panel['title']}", target["expr"]) for name, panel in panels() for target in panel["targets"])


def metrics_of(query):
    """Names of series in a query: its words less PromQL's own, labels and ranges."""
    query = re.sub(r"\{[^}]*\}", "", query)
    query = re.sub(r"\b(?:sum|count)\s+by\s+\([^)]*\)", "sum", query)
    query = re.sub(r"\[[^]]*\]", "", query)
    return {word for word in re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", query) if word not in WORDS and not re.fullmatch(r"e\d+", word)}


class Current(unittest.TestCase):
    def test_generated_files(self):
        for command in ([MONITORING / "generate.py", "--check"],
                        [manifests.DEPLOY / "kubernetes/overlays/io-uring/make_profile.py", "--check"]):
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_rule_has_the_alerts(self):
        rule = yaml.safe_load((manifests.DEPLOY / "kubernetes/overlays/monitoring/prometheusrule.yaml").read_text())
        self.assertEqual([r["alert"] for g in rule["spec"]["groups"] for r in g["rules"]], [r["alert"] for r in rules()])


class Alerts(unittest.TestCase):
    def test_each_has_a_runbook_and_the_runbooks_an_alert(self):
        names = {rule["alert"] for rule in rules()}
        self.assertEqual(names, {path.stem for path in (manifests.SOURCE / "docs/runbooks").glob("Winnow*.md")})
        index = (manifests.SOURCE / "docs/runbooks/index.md").read_text()
        for rule in rules():
            self.assertEqual(rule["annotations"]["runbook"], f"docs/runbooks/{rule['alert']}.md")
            self.assertIn(rule["labels"]["severity"], ("page", "ticket"))
            self.assertIn(f"({rule['alert']}.md)", index)

    def test_each_has_a_case_that_fires_and_one_that_does_not(self):
        cases = {}
        for test in yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]:
            for case in test["alert_rule_test"]:
                fires = bool(case.get("exp_alerts"))
                cases.setdefault(case["alertname"], set()).add(fires)
                if fires:  # and something beside it that does not, or it would fire always
                    instances = {match for series in test["input_series"] for match in re.findall(r'instance="(\w+)"', series["series"])}
                    self.assertGreater(len(instances), len(case["exp_alerts"]), case["alertname"])
        self.assertEqual(cases, {rule["alert"]: {True, False} for rule in rules()})


class Dashboards(unittest.TestCase):
    def test_form(self):
        uids = set()
        for name, dashboard in dashboards().items():
            uids.add(dashboard["uid"])
            self.assertFalse(dashboard["editable"])
            self.assertEqual([v["name"] for v in dashboard["templating"]["list"]], ["datasource", "job", "model", "instance"])
            ids = [panel["id"] for panel in dashboard["panels"]]
            self.assertEqual(len(ids), len(set(ids)))
        self.assertEqual(uids, {"winnow-overview", "winnow-reads"})
        for name, panel in panels():
            with self.subTest(dashboard=name, panel=panel["title"]):
                self.assertGreater(len(panel["description"]), 15)
                self.assertTrue(panel["fieldConfig"]["defaults"]["unit"])
                self.assertEqual(panel["datasource"]["uid"], "${datasource}")
                for target in panel["targets"]:
                    # A panel without the selection would average what is selected away.
                    selectors = re.findall(r"[a-z0-9_:]+\{([^}]*)\}", target["expr"])
                    self.assertEqual(len(selectors), len(re.findall(r"\b(?:winnow|process)_[a-z0-9_]+", target["expr"])), target["expr"])
                    for selector in selectors:
                        self.assertTrue(selector.startswith('job=~"$job",instance=~"$instance"'), selector)
                    for counter in re.findall(r"(\S*_total)\{", target["expr"]):
                        self.assertRegex(target["expr"], rf"(rate|increase)\({re.escape(counter.lstrip('('). split('(')[-1])}")

    def test_each_variable_chooses_what_panels_show(self):
        for name, dashboard in dashboards().items():
            variables = {v["name"]: v for v in dashboard["templating"]["list"] if v["type"] == "query"}
            expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
            for one in variables.values():
                self.assertEqual(one["definition"], one["query"]["query"])
            for chosen in variables:
                # Variables that have this one's choice in the list of their values; a wider All would undo it.
                narrowed = {chosen} | {other for other, v in variables.items() if f'=~"${chosen}"' in v["definition"] and "allValue" not in v}
                for expression in expressions:
                    with self.subTest(dashboard=name, variable=chosen, query=expression):
                        self.assertTrue(any(f'=~"${one}"' in expression for one in narrowed))

    def test_limits_of_alerts_are_drawn_on_a_panel_of_their_metric(self):
        drawn = [({step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]},
                  set().union(*(metrics_of(target["expr"]) for target in panel["targets"]))) for _, panel in panels()]
        checked = set()
        for rule in rules():
            end = re.search(r"[<>]=?([0-9.* ]+)$", rule["expr"])
            limit = math.prod(float(factor) for factor in end.group(1).split("*")) if end else 0
            if limit == 0 or rule["alert"] in UNDRAWN:
                continue
            checked.add(rule["alert"])
            self.assertTrue(any(limit in steps and metrics & metrics_of(rule["expr"]) for steps, metrics in drawn), rule["alert"])
        self.assertGreater(len(checked), 9)
        self.assertIn("WinnowCertificateExpires", checked)

    def test_panels_do_not_overlap(self):
        for dashboard in dashboards().values():
            taken = set()
            for panel in dashboard["panels"]:
                grid = panel["gridPos"]
                cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
                self.assertFalse(cells & taken, panel["title"])
                self.assertLessEqual(grid["x"] + grid["w"], 24)
                taken |= cells


class Live(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with harness.Server("--index", "lsh:128") as server:
            cls.text = server.metrics_text()
        cls.families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", cls.text, re.M))
        cls.series = {re.split(r"[ {]", line)[0] for line in cls.text.splitlines() if line and line[0] != "#"}

    def test_what_is_asked_for_is_there(self):
        asked = 0
        for where, query in queries():
            for metric in metrics_of(query):
                self.assertIn(metric, self.series, where)
                asked += 1
        self.assertGreater(asked, 100)

    def test_labels_that_are_asked_for_are_there(self):
        for where, query in queries():
            for metric, selector in re.findall(r"([a-z0-9_:]+)\{([^}]*)\}", query):
                for label, sign, value in re.findall(r'(\w+)(=~?)"([^"$]*)"', selector):
                    if label in ("job", "instance"):
                        continue
                    for one in value.split("|"):
                        self.assertRegex(self.text, rf'(?m)^{metric}\{{[^}}]*{label}="{one}"', where)

    def test_each_metric_is_on_a_dashboard_or_in_an_alert_or_exempt(self):
        used = set().union(*(metrics_of(query) for _, query in queries()))
        used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} | used
        own = {name for name in self.families if name.startswith("winnow_")}
        self.assertEqual(own - used, set(EXEMPT))

    def test_help_says_something(self):
        for name, text in re.findall(r"^# HELP (\S+) (.*)$", self.text, re.M):
            if not name.startswith("exposer_"):  # of a library
                self.assertGreater(len(text), 12, name)
                self.assertTrue(text.endswith("."), name)

    def test_the_reference_is_current(self):
        sys.path.insert(0, str(manifests.SOURCE / "scripts"))
        import reference_pages
        self.assertEqual((manifests.SOURCE / "docs/metrics.md").read_text(), reference_pages.metrics_page(self.text),
                         "run scripts/reference_pages.py --write")


class Prefixes(unittest.TestCase):
    def test_where_a_prefix_was_found_is_counted(self):
        def ask(running):
            body = json.dumps({"prompt": "The quick brown fox jumps over the lazy dog. " * 60, "max_tokens": 4}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{running.http_port}/v1/completions", body)
            with urllib.request.urlopen(request, timeout=harness.PATIENCE) as answer:
                return json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

        found = 'winnow_prefix_hit_tokens_total{from="%s"}'
        with harness.temporary_directory() as directory:
            flags = ["--kv-bytes", "24MiB", "--max-context", "4096", "--max-running", "4", "--disk-bytes", "64MiB", "--store-dir", directory / "store"]
            with harness.Server(*flags) as running:
                self.assertEqual(ask(running), 0)
                harness.eventually(lambda: running.metric("winnow_store_blocks") > 0, "a stored block")
                self.assertEqual(running.metric(found % "pool") + running.metric(found % "store"), 0)
                self.assertEqual(running.terminate(), 0)
            with harness.Server(*flags) as running:
                stored = ask(running)
                self.assertGreater(stored, 0)
                harness.eventually(lambda: running.metric(found % "store") == stored, "tokens found in the store")
                self.assertEqual(running.metric(found % "pool"), 0)
                again = ask(running)
                harness.eventually(lambda: running.metric(found % "pool") == again, "tokens found in the pool")
                self.assertEqual(running.metric(found % "store"), stored)


class Certificate(unittest.TestCase):
    def test_the_first_one_to_expire_is_told(self):
        with harness.temporary_directory() as directory:
            def make(name, days):
                subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", directory / f"{name}.key", "-out", directory / f"{name}.pem",
                                "-days", str(days), "-subj", "/CN=localhost"], check=True, capture_output=True)
                return (directory / f"{name}.pem").read_text()

            (directory / "chain.pem").write_text(make("server", 90) + make("authority", 30))
            with harness.Server("--tls-cert", directory / "chain.pem", "--tls-key", directory / "server.key") as running:
                left = running.metric("winnow_tls_certificate_expiry_timestamp_seconds") - time.time()
                self.assertAlmostEqual(left / 86400, 30, delta=0.01)
                (directory / "chain.pem").write_text((directory / "server.pem").read_text())
                left = running.metric("winnow_tls_certificate_expiry_timestamp_seconds") - time.time()
                self.assertAlmostEqual(left / 86400, 90, delta=0.01)


class TraceContext(unittest.TestCase):
    def test_a_callers_trace_is_in_the_log_and_in_the_answer(self):
        trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        with harness.Server() as running:
            answers = []
            for header in (f"00-{trace}-{span}-01", f"00-{trace}-{span}-0"):
                request = urllib.request.Request(f"http://127.0.0.1:{running.http_port}/v1/completions", b'{"prompt": "a", "max_tokens": 1}',
                                                 headers={"traceparent": header})
                with urllib.request.urlopen(request, timeout=harness.PATIENCE) as answer:
                    answers.append(answer.headers["traceparent"])
                    answer.read()
            lines = [event for event in running.events() if event["event"] == "request"]
        self.assertEqual(answers, [f"00-{trace}-{span}-01", None])
        self.assertEqual([(line["trace_id"], line["parent_span_id"]) for line in lines], [(trace, span), ("", "")])


class StatusPage(unittest.TestCase):
    def get(self, running, path, key=None):
        request = urllib.request.Request(f"http://127.0.0.1:{running.http_port}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            with urllib.request.urlopen(request, timeout=harness.PATIENCE) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def test_it_is_one_file_of_metrics_that_are_there(self):
        with harness.Server("--index", "lsh:128") as running:
            status, headers, text = self.get(running, "/status")
            series = {re.split(r" ", line)[0] for line in self.get(running, "/metrics")[2].splitlines() if line[:1] != "#"}
        self.assertEqual((status, headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        self.assertEqual(text, (manifests.SOURCE / "server/http/status_page.html").read_text())
        # Nothing of another host, and the browser holds it to that.
        text = text.replace("http://www.w3.org/2000/svg", "")  # a name
        self.assertEqual(re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", text), [])
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        self.assertIn("connect-src 'self'", headers["Content-Security-Policy"])
        self.assertIn('name="viewport"', text)
        names = {re.split(r"[ {]", one)[0] for one in series}
        asked = set(re.findall(r'\b((?:winnow|process)_[a-z_]+)\b', text)) - {"winnow_key"}
        self.assertGreater(len(asked), 30)
        for name in asked:
            self.assertTrue(name in names or name + "_count" in names, name)
        for quoted in re.findall(r"""['"`](winnow_[a-z_]+\{[a-z]+="[a-z]+"\})""", text):
            self.assertIn(quoted, series)

    def test_its_numbers_need_the_key(self):
        with harness.temporary_directory() as directory:
            (directory / "keys").write_text("alice " + hashlib.sha256(b"secret").hexdigest() + "\n")
            with harness.Server("--api-keys", directory / "keys") as running:
                status, _, text = self.get(running, "/status")
                self.assertEqual(status, 200)
                self.assertNotIn("needle", text)  # nothing of this server's
                self.assertEqual(self.get(running, "/metrics")[0], 401)
                self.assertEqual(self.get(running, "/v1/models")[0], 401)
                self.assertEqual(self.get(running, "/metrics", "secret")[0], 200)


if __name__ == "__main__":
    harness.main()

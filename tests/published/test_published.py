#!/usr/bin/python3
"""The names that are published are still there, and the check turns red for each that is not."""
import copy
import json
import unittest

import published


class Published(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.now = published.names_now()
        cls.committed = json.loads(published.COMMITTED.read_text())

    def test_nothing_that_was_published_is_gone(self):
        self.assertEqual(published.breaking_changes(self.committed, self.now), [],
                         "names are kept; where one has to go, say so in the release and run tests/published/published.py update")

    def test_each_kind_of_name_is_watched(self):
        """Names that must be in the list: an empty or shrunken one would pass everything."""
        for path in (("metrics", "winnow_requests_total", "labels", "outcome"), ("metrics", "winnow_kv_read_bytes_total", "labels", "tier"),
                     ("metrics", "vllm:num_requests_running", "kind"), ("options", "winnow serve", "--kv-bytes"),
                     ("options", "winnow serve", "--device", "cuda"), ("options", "winnow bench decode", "--json"),
                     ("policy", "policies", "pca"), ("policy", "options", "min_mass"),
                     ("usage", "POST /v1/chat/completions", "prompt_tokens_details", "cached_tokens"),
                     ("usage", "POST /v1/messages", "cache_read_input_tokens"), ("usage", "PUT /v1/prefixes/NAME", "prompt_tokens")):
            for names in (self.committed, self.now):
                for step in path:
                    self.assertIn(step, names, path)
                    names = names[step]
        for kind, least in (("metrics", 100), ("options", 15)):
            self.assertGreater(len(self.committed[kind]), least)

    def test_removals_and_changes_are_found_and_additions_are_not(self):
        def changed(names, path, value):
            """A copy in which the last step of the path has another value; None: is gone."""
            names = copy.deepcopy(names)
            at = names
            for step in path[:-1]:
                at = at[step]
            if value is None:
                del at[path[-1]]
            else:
                at[path[-1]] = value
            return names

        cases = [(("metrics", "winnow_requests_total"), None, "metrics: winnow_requests_total is gone"),
                 (("metrics", "winnow_requests_total", "kind"), "gauge", "metrics: winnow_requests_total: kind was 'counter', is 'gauge'"),
                 (("metrics", "winnow_requests_total", "labels", "outcome"), None, "metrics: winnow_requests_total: labels: outcome is gone"),
                 (("options", "winnow store verify"), None, "options: winnow store verify is gone"),
                 (("options", "winnow serve", "--kv-bytes"), None, "options: winnow serve: --kv-bytes is gone"),
                 (("options", "winnow serve", "--kv-bytes"), "INT", "options: winnow serve: --kv-bytes was 'BYTES', is 'INT'"),
                 (("options", "winnow serve", "--device", "cuda"), None, "options: winnow serve: --device: cuda is gone"),
                 (("options", "winnow serve", "--insecure"), "TEXT", "options: winnow serve: --insecure was '', is 'TEXT'"),
                 (("policy", "policies", "quest"), None, "policy: policies: quest is gone"),
                 (("policy", "options", "floor"), None, "policy: options: floor is gone"),
                 (("usage", "POST /v1/responses", "input_tokens_details", "cached_tokens"), None,
                  "usage: POST /v1/responses: input_tokens_details: cached_tokens is gone"),
                 (("usage", "POST /v1/completions", "prompt_tokens"), "string",
                  "usage: POST /v1/completions: prompt_tokens was 'number', is 'string'")]
        for path, value, fault in cases:
            self.assertEqual(published.breaking_changes(self.committed, changed(self.now, path, value)), [fault])
        more = self.now
        for path, value in ((("metrics", "winnow_new_total"), {"kind": "counter", "labels": {}}),
                            (("metrics", "winnow_requests_total", "labels", "new"), "label"), (("options", "winnow serve", "--new"), "BYTES"),
                            (("options", "winnow serve", "--device", "tpu"), "choice"), (("policy", "policies", "new"), "policies"),
                            (("usage", "POST /v1/completions", "new"), "number")):
            more = changed(more, path, value)
        self.assertEqual(published.breaking_changes(self.committed, more), [])

    def test_labels_options_and_shapes_are_read_as_they_are_written(self):
        text = ("# HELP a_seconds A.\n# TYPE a_seconds histogram\na_seconds_bucket{le=\"1\",tier=\"host, \\\"x=\\\"\"} 0\n"
                "# TYPE b gauge\nb 1\n")
        self.assertEqual(published.metrics_of(text), {"a_seconds": {"kind": "histogram", "labels": {"le": "label", "tier": "label"}},
                                                      "b": {"kind": "gauge", "labels": {}}})
        self.assertEqual(published.kind_of_value("UINT:UINT in [1 - 9]=3"), "UINT")
        self.assertEqual(published.kind_of_value("INT:POSITIVE=5"), "INT")
        self.assertEqual(published.kind_of_value(""), "")
        self.assertEqual(published.kind_of_value("on|off"), {"on": "choice", "off": "choice"})
        self.assertEqual(published.types_of({"a": 1, "b": {"c": 0.5, "d": None}, "e": [1], "f": True, "g": "x"}),
                         {"a": "number", "b": {"c": "number", "d": "null"}, "e": "array", "f": "boolean", "g": "string"})


if __name__ == "__main__":
    unittest.main(verbosity=2)

#!/usr/bin/python3
"""The API keeps its style and its promises, and the checks themselves find what they should."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

import proto_lint

HEADER = 'syntax = "proto3";\npackage winnow.v1;\n'
GOOD = HEADER + """
// A service.
service ThingService {
  // Gets it.
  rpc GetThing(GetThingRequest) returns (GetThingResponse);
}
message GetThingRequest { string thing_name = 1; }
message GetThingResponse { Kind kind = 1; oneof how { int32 a = 2; int32 b = 3; } Inner inner = 4; }
// A kind.
enum Kind {
  KIND_UNSPECIFIED = 0;
  // Small.
  KIND_SMALL = 1;
}
// Within.
message Inner { repeated int32 ids = 1; reserved 5; }
"""


def compile_text(text, path="winnow/v1/thing.proto"):
    with tempfile.TemporaryDirectory() as root:
        file = pathlib.Path(root, path)
        file.parent.mkdir(parents=True)
        file.write_text(text)
        return proto_lint.compile_protos(root)


class Style(unittest.TestCase):
    def faults(self, text, path="winnow/v1/thing.proto"):
        return proto_lint.Linter(compile_text(text, path)).faults

    def test_the_api_is_clean(self):
        check = subprocess.run([sys.executable, proto_lint.__file__, "check"], capture_output=True, text=True)
        self.assertEqual((check.returncode, check.stdout), (0, ""), check.stderr)

    def test_good_file_passes(self):
        self.assertEqual(self.faults(GOOD), [])

    def test_each_rule_finds_its_fault(self):
        cases = [
            ("package winnow.v1", "package winnow", "does not match the directory"),
            ("package winnow.v1", "package winnow", "version at the end"),
            ("ThingService", "Things", "ends with Service"),
            ("  // Gets it.\n", "", "ThingService.GetThing: has no comment"),
            ("// A kind.\n", "", "Kind: has no comment"),
            ("// Within.\n", "", "Inner: has no comment"),
            ("GetThingRequest", "ThingQuery", "has ThingQuery, not GetThingRequest"),
            ("returns (GetThingResponse)", "returns (GetThingRequest)", "not GetThingResponse"),
            ("thing_name", "thingName", "is not lower_snake_case"),
            ("Inner", "inner_part", "is not PascalCase"),
            ("KIND_UNSPECIFIED", "KIND_NONE", "has no KIND_UNSPECIFIED = 0"),
            ("KIND_SMALL", "SMALL", "does not begin with KIND_"),
            ("  // Small.\n", "", "Kind.KIND_SMALL: has no comment"),
            ('syntax = "proto3"', 'syntax = "proto2"', "is not proto3"),
        ]
        for old, new, fault in cases:
            text = GOOD.replace(old, new)
            if "proto2" in new:
                text = HEADER.replace("proto3", "proto2")
            self.assertTrue(any(fault in found for found in self.faults(text)), (fault, self.faults(text)))
        self.assertTrue(any("is not lower_snake_case" in f for f in self.faults(GOOD, "winnow/v1/Thing.proto")))
        shared = GOOD.replace("  // Gets it.", "  // Also.\n  rpc GetIt(GetThingRequest) returns (GetThingResponse);\n"
                              "  // Gets it.")
        self.assertTrue(any("shares GetThingRequest" in f for f in self.faults(shared)))


class Compatibility(unittest.TestCase):
    def changes(self, old, new):
        self.assertIn(old, GOOD)
        return proto_lint.breaking_changes(compile_text(GOOD), compile_text(GOOD.replace(old, new)))

    def test_additions_are_compatible(self):
        self.assertEqual(self.changes("repeated int32 ids = 1;", "repeated int32 ids = 1; string more = 2;"), [])
        self.assertEqual(self.changes("KIND_SMALL = 1;", "KIND_SMALL = 1; KIND_BIG = 2;"), [])

    def test_removal_with_reservation_is_compatible(self):
        self.assertEqual(self.changes("string thing_name = 1;", 'reserved 1; reserved "thing_name";'), [])

    def test_each_breaking_change_is_found(self):
        cases = [
            ("string thing_name = 1;", "", "is gone"),
            ("string thing_name = 1;", "reserved 1;", "not both reserved"),
            ("string thing_name", "string name", "name was"),
            ("string thing_name", "bytes thing_name", "type was"),
            ("string thing_name", "repeated string thing_name", "label was"),
            ("string thing_name", "optional string thing_name", "proto3_optional was"),
            ("string thing_name = 1", "string thing_name = 2", "is gone"),
            ("oneof how { int32 a = 2; int32 b = 3; }", "int32 a = 2; int32 b = 3;", "oneof"),
            ("reserved 5;", "int32 five = 5;", "reserved number 5 is used"),
            ("KIND_SMALL = 1", "KIND_SMALL = 2", "KIND_SMALL = 1 is gone"),
            ("KIND_SMALL", "KIND_TINY", "KIND_SMALL = 1 is gone"),
            ("returns (GetThingResponse)", "returns (stream GetThingResponse)", "streaming"),
            ("rpc GetThing(", "rpc FetchThing(", "GetThing is gone"),
            ("service ThingService", "service OtherService", "ThingService is gone"),
        ]
        for old, new, fault in cases:
            self.assertTrue(any(fault in found for found in self.changes(old, new)), (fault, self.changes(old, new)))


if __name__ == "__main__":
    unittest.main(verbosity=2)

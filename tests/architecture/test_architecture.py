#!/usr/bin/env python3
"""Who may include whom. A change that makes this test fail either belongs elsewhere, or changes the architecture: then the
tables below and docs/architecture.md change with it.

A room is a folder, or files of one (ROOMS) that are set apart from the rest. MAY_SEE says which other rooms a room may
include; the rooms must not form a cycle, nor may any files. OWNERS says which files alone see a library.
"""
import fnmatch
import os
import pathlib
import re
import unittest

SOURCE = pathlib.Path(os.environ.get("WINNOW_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
TOPS = ("kernels", "storage", "engine", "server", "bench")

# Files that are no part of their folder's room. The first pattern that fits counts.
ROOMS = {
    "engine/base/mutex.h": "engine/mutex",
    # What a step is: plain data that retrieval and the scheduler read, and the interface between them.
    "engine/retrieval/attention_policy.*": "engine/step", "engine/retrieval/exactness.*": "engine/step",
    "engine/retrieval/retrieval_state.*": "engine/step", "engine/model.h": "engine/step",
    "kernels/bench*": "kernels/bench",
    "server/main.cc": "program",
    # They build every part of `serve`, and take it down.
    "server/serve_command.cc": "server/wiring", "server/serve_parts.*": "server/wiring", "server/drain.*": "server/wiring",
    "engine/text/unicode/unicode_text.*": "engine/text/unicode", "engine/text/unicode/unicode_tables.*": "engine/text/unicode",
}

# Each room, and the rooms that it may include besides itself.
MAY_SEE = {
    "kernels": (),
    "kernels/cpu": ("kernels",),
    "kernels/cuda": ("kernels",),
    "kernels/bench": ("kernels", "kernels/cpu"),
    "storage": (),
    "engine/base": (),
    "engine/mutex": ("storage",),
    "engine/text/jinja": ("engine/base", "engine/text/unicode"),
    "engine/text/unicode": (),
    "engine/text": ("engine/base", "engine/text/jinja", "engine/text/unicode", "kernels"),
    "engine/model": ("engine/base", "kernels"),
    "engine/grammar": ("engine/base", "engine/mutex", "engine/text", "engine/text/unicode", "kernels"),
    "engine/step": ("engine/base", "engine/kv", "kernels"),
    "engine/kv": ("engine/base", "engine/mutex", "kernels", "storage"),
    "engine/retrieval": ("engine/base", "engine/step", "engine/kv", "engine/model", "kernels", "storage"),
    "engine/schedule": ("engine/base", "engine/mutex", "engine/step", "engine/kv", "engine/grammar", "engine/text", "kernels"),
    "engine": ("engine/base", "engine/step", "engine/kv", "engine/retrieval", "engine/text", "engine/text/unicode", "engine/model", "kernels"),
    "server": ("engine/base", "engine/mutex", "engine/step", "engine/kv", "engine/schedule", "engine", "engine/grammar", "engine/text", "engine/model", "kernels", "storage"),
    "server/parse": (),
    "server/http": ("server", "server/parse", "engine/base", "engine/kv", "engine/grammar", "engine/text", "kernels"),
    "server/vllm": ("server", "engine/base", "engine/mutex", "engine/kv", "engine/schedule", "kernels"),
    "server/wiring": ("server", "server/http", "server/vllm", "engine/base", "engine/kv", "engine/schedule", "engine", "kernels"),
    "bench": ("server", "engine/base", "engine/step", "engine/kv", "engine/schedule", "engine", "engine/text", "engine/text/unicode", "engine/model", "kernels", "kernels/bench", "storage"),
    "program": ("server", "bench"),
}

# Libraries that one place has to itself: the beginning of their includes, and the files that may have them.
OWNERS = {
    "liburing": ["storage/ring_uring.cc"],
    "rocksdb/": ["storage/index_rocksdb.cc"],
    "xxhash": ["storage/format.cc"],
    "oneapi/": ["bench/onednn.cc"],
    "boost/": ["server/http/*", "server/connection_guard.cc"],
    "prometheus/": ["server/metrics*"],
    "xgrammar/": ["engine/grammar/xgrammar.cc"],
    "zmq": ["server/kv_event_publisher.cc"],
    "grpc": ["server/*"],
    "yaml-cpp/": ["server/config*", "server/tenant_limits.cc"],
    "zlib": ["server/gzip_file.cc", "server/vllm/tokenizer_archive.cc"],
    "cuda": ["kernels/cuda/*"],
}

INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def sources(root=SOURCE):
    for top in TOPS:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in (".cc", ".h", ".cu", ".cuh"):
                yield path.relative_to(root).as_posix()


def room_of(path):
    for pattern, room in ROOMS.items():
        if fnmatch.fnmatchcase(path, pattern):
            return room
    return path.rsplit("/", 1)[0]


def includes(path, root=SOURCE):
    return [name for _, name in INCLUDE.findall((root / path).read_text())]


# Rooms that are no folder of their own, and the folder whose library has them.
PARTS = {"engine/mutex": "engine/base", "engine/step": "engine/retrieval"}


def engine_edges(cmake):
    """From CMakeLists.txt: folder of engine/ -> folders whose libraries its own is linked with."""
    rooms = re.findall(r"^engine_room\((\w+) (\S+)((?: [^)\s]+)*)\)", cmake, re.MULTILINE)
    folders = {f"winnow_{name}": folder for name, folder, _ in rooms} | {"winnow_kernels": "kernels", "winnow_storage": "storage"}
    return {folder: {folders[name] for name in libraries.split() if name.startswith("winnow_")} for _, folder, libraries in rooms}


def find_cycle(edges):
    """Some nodes that form a cycle, in order; none: []."""
    done, way = set(), []

    def visit(node):
        if node in way:
            return way[way.index(node):] + [node]
        if node in done:
            return []
        way.append(node)
        for other in edges.get(node, ()):
            if cycle := visit(other):
                return cycle
        way.pop()
        done.add(node)
        return []

    for node in edges:
        if cycle := visit(node):
            return cycle
    return []


def strangers(files):
    """Includes that the table does not allow; `files`: path -> includes."""
    wrong = []
    for path, names in files.items():
        room = room_of(path)
        if room not in MAY_SEE:
            wrong.append(f"{path}: the room {room} is not in MAY_SEE")
            continue
        for name in names:
            if name.split("/")[0] in TOPS and room_of(name) not in (room, *MAY_SEE[room]):
                wrong.append(f"{path} includes {name}: {room} may not see {room_of(name)}")
    return wrong


def trespassers(files):
    return [f"{path} includes {name}, which belongs to {', '.join(owners)}"
            for path, names in files.items() for name in names for library, owners in OWNERS.items()
            if name.startswith(library) and not any(fnmatch.fnmatchcase(path, owner) for owner in owners)]


def operations(text):
    """The virtual functions of a header, but for destructors: name -> number of parameters."""
    code = re.sub(r"//.*", "", text)
    found = {}
    for match in re.finditer(r"\bvirtual\s[^;{}()~]*?\b(\w+)\(", code):
        depth, commas, end = 1, 0, match.end()
        while depth > 0:
            depth += (code[end] in "(<") - (code[end] in ")>")
            commas += code[end] == "," and depth == 1
            end += 1
        found[match.group(1)] = commas + 1 if code[match.end():end - 1].strip() else 0
    return found


class Architecture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = {path: includes(path) for path in sources()}

    def test_the_tree_was_read(self):
        self.assertGreater(len(self.files), 300)
        self.assertIn("storage/segment_log.h", self.files["storage/entry_table.h"])

    def test_rooms_see_what_they_may(self):
        self.assertEqual(strangers(self.files), [])

    def test_rooms_form_no_cycle(self):
        self.assertEqual(find_cycle(MAY_SEE), [])

    def test_files_form_no_cycle(self):
        self.assertEqual(find_cycle({path: [name for name in names if name in self.files] for path, names in self.files.items()}), [])

    def test_libraries_have_one_owner(self):
        self.assertEqual(trespassers(self.files), [])

    def test_every_permission_is_used(self):
        used = {(room_of(path), room_of(name)) for path, names in self.files.items() for name in names
                if name.split("/")[0] in TOPS}
        unused = [f"{room} -> {other}" for room, others in MAY_SEE.items() for other in others if (room, other) not in used]
        self.assertEqual(unused, [])


class Libraries(unittest.TestCase):
    """CMake's edges between the folders of engine/ are those of MAY_SEE."""

    def test_edges(self):
        edges = engine_edges((SOURCE / "CMakeLists.txt").read_text())
        folders = {path.parent.relative_to(SOURCE).as_posix() for path in (SOURCE / "engine").rglob("*.cc")}
        self.assertEqual(set(edges), folders)
        seen = {folder: set() for folder in folders}
        for room, others in MAY_SEE.items():
            if (folder := PARTS.get(room, room)) in seen:
                seen[folder] |= {PARTS.get(other, other) for other in others} - {folder}
        self.assertEqual(edges, seen)


class Groups(unittest.TestCase):
    """The operations of a backend, in groups that can be learned one at a time."""

    def setUp(self):
        self.groups = {path.name: operations(path.read_text()) for path in sorted((SOURCE / "kernels").glob("*_ops.h"))}

    def test_backend_lists_every_group_and_adds_nothing(self):
        text = (SOURCE / "kernels/backend.h").read_text()
        bases = set(re.findall(r"public (\w+Ops)\b", text))
        self.assertEqual({name[:-2].replace("_", "") for name in self.groups}, {base.lower() for base in bases})
        for name in self.groups:
            self.assertRegex(text, rf"//   \w+Ops +{re.escape(name)} ")
        self.assertEqual(operations(text), {})

    def test_an_operation_is_in_one_group(self):
        names = [name for group in self.groups.values() for name in group]
        self.assertGreater(len(names), 40)
        self.assertEqual(len(names), len(set(names)))

    def test_parameters_are_few(self):
        self.assertEqual([f"{group}: {name} has {count}" for group, found in self.groups.items() for name, count in found.items() if count > 6], [])


class Page(unittest.TestCase):
    """docs/architecture.md names files that are there."""

    def test_files_exist(self):
        text = (SOURCE / "docs/architecture.md").read_text()
        named = re.findall(r"`([a-z][a-z0-9_/]*/[a-z0-9_./]+\.(?:cc|h|py|proto|md))`", text)
        self.assertGreater(len(named), 40)
        self.assertEqual([name for name in named if not (SOURCE / name).exists()], [])


class TheTestItself(unittest.TestCase):
    """It must be able to fail."""

    def test_a_stranger_is_seen(self):
        self.assertEqual(len(strangers({"storage/x.cc": ["engine/schedule/engine.h"]})), 1)
        self.assertEqual(len(strangers({"engine/x.cc": ["server/log.h"]})), 1)
        self.assertEqual(len(strangers({"server/x.cc": ["bench/runs.h"]})), 1)
        self.assertEqual(len(strangers({"engine/text/x.cc": ["engine/schedule/engine.h"]})), 1)
        self.assertEqual(len(strangers({"attic/x.cc": []})), 1)
        self.assertEqual(strangers({"engine/kv/x.cc": ["kernels/backend.h", "storage/block_store.h", "vector"]}), [])

    def test_a_trespasser_is_seen(self):
        self.assertEqual(len(trespassers({"server/main.cc": ["oneapi/dnnl/dnnl.hpp"]})), 1)
        self.assertEqual(len(trespassers({"engine/x.cc": ["grpcpp/grpcpp.h"]})), 1)

    def test_a_library_is_seen(self):
        self.assertEqual(engine_edges("engine_room(a engine/a winnow_kernels absl::x)\nengine_room(b engine winnow_a)\n"),
                         {"engine/a": {"kernels"}, "engine": {"engine/a"}})

    def test_operations_are_seen(self):
        self.assertEqual(operations("virtual ~A() = default;\nvirtual bool b() const { return c(1, 2); }  // virtual int d(int)\n"
                                    "virtual std::unique_ptr<E<int, int>> f(std::span<const G<int, int>> g,\n int* h) = 0;"), {"b": 0, "f": 2})

    def test_a_cycle_is_seen(self):
        self.assertEqual(find_cycle({"a": ["b"], "b": ["c"], "c": ["b"]}), ["b", "c", "b"])
        self.assertEqual(find_cycle({"a": ["b", "c"], "b": ["c"], "c": []}), [])


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/python3
"""Each row of the tables of faults names tests, and each of them exists: in docs/faults.md and tests/fault/README.md.

A name is `Suite.Test` of a unit test, `test_file.Class.test_method` or `test_file.Class` of an end-to-end test, `fuzz.target`, a target of CTest
(`e2e.tiers`), a file, or a method or suite alone. `…` and `*` stand for any text; a name that begins with `…` goes on with the suite before it.
"""
import fnmatch
import functools
import pathlib
import re
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
TABLES = (SOURCE / "docs/faults.md", SOURCE / "tests/fault/README.md")


@functools.cache
def unit_tests():
    """As Suite.Test."""
    found = set()
    for file in (SOURCE / "tests").rglob("*.cc"):
        text = file.read_text()
        for suite, test in re.findall(r"^\s*(?:TEST|TEST_F|TEST_P|TYPED_TEST)\(\s*(\w+),\s*(\w+)\)", text, re.MULTILINE):
            found.add(f"{suite}.{test}")
    return found


@functools.cache
def python_tests():
    """As test_file, test_file.Class and test_file.Class.test_method. Methods that a loop adds are those of the class without a name."""
    found = set()
    for file in (SOURCE / "tests").rglob("test_*.py"):
        found.add(file.stem)
        name = None
        for line in file.read_text().splitlines():
            if of_class := re.match(r"class (\w+)", line):
                name = f"{file.stem}.{of_class[1]}"
                found.add(name)
            elif method := re.match(r"    def (test_\w+)", line):
                found.add(f"{name}.{method[1]}")
            elif added := re.match(r"    setattr\((\w+), \"(test_)\" \+", line):
                found.add(f"{file.stem}.{added[1]}.{added[2]}*")
    return found


@functools.cache
def others():
    return ({f"fuzz.{file.name.removesuffix('_fuzz.cc')}" for file in (SOURCE / "tests/fuzz").glob("*_fuzz.cc")}
            | {f"e2e.{file.stem.removeprefix('test_')}" for file in (SOURCE / "tests/e2e").glob("test_*.py")}
            | {file.stem for file in (SOURCE / "tests/unit").rglob("*_test.cc")})


def rows(page):
    """Number, first cell and last one of each row of the tables that name tests; continued lines are none."""
    in_table = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("|"):
            in_table = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[|\- ]+", line):
            continue
        if cells[-1] == "test":
            in_table = True
        elif in_table:
            yield number, cells[0], cells[-1]


def exists(name, suite):
    """`suite`: of the name before it."""
    pattern = name.replace("…", "*")
    if pattern.startswith((".", "*")) and suite:
        pattern = f"{suite}.*{pattern.lstrip('*.')}"
    known = unit_tests() | python_tests() | others()
    if any(fnmatch.fnmatch(test, pattern) for test in known):
        return True
    if any(fnmatch.fnmatch(pattern, test) for test in python_tests() if test.endswith("*")):
        return True
    # A suite, a class or a method alone.
    if any(fnmatch.fnmatch(part, pattern) for test in known for part in test.split(".")):
        return True
    return re.fullmatch(r"[\w./]+", name) is not None and "/" in name and (SOURCE / name).is_file()


class FaultTables(unittest.TestCase):
    def test_each_row_names_tests_that_exist(self):
        for page in TABLES:
            count = 0
            for number, fault, cell in rows(page):
                count += 1
                where = f"{page.relative_to(SOURCE)}:{number} ({fault})"
                names = re.findall(r"`([^`]+)`", cell)
                self.assertTrue(names or cell in ("the same", "all of `StorageCrash`"), f"{where}: no test is named")
                suite = None
                for name in names:
                    if name.startswith(("winnow ", "WINNOW_")):  # a command
                        continue
                    self.assertTrue(exists(name, suite), f"{where}: there is no {name}")
                    if "." in name.strip(".…") and "/" not in name:
                        suite = name.split(".")[0]
            self.assertGreater(count, 20, page)

    def test_what_is_not_there_is_found(self):
        for name in ("NoSuchSuite.*", "EvictionOrderTest.NoSuchTest", "test_faults.NoSuchClass", "test_faults.Store.test_no_such", "fuzz.nothing",
                     "e2e.nothing", "loadtest/nothing.py"):
            self.assertFalse(exists(name, None), name)
        self.assertTrue(exists("EvictionOrderTest.No…", None))
        self.assertFalse(exists("…NoSuchTest", "EvictionOrderTest"))


if __name__ == "__main__":
    unittest.main()

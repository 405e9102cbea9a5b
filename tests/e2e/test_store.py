#!/usr/bin/python3
"""`winnow store`: stat, verify, repair and gc of a directory, as an operator meets them."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import unittest

from harness import BIN, main, run, temporary_directory

MAKE_STORE = os.environ.get("WINNOW_MAKE_STORE", str(pathlib.Path(BIN).parent / "winnow_make_store"))
BLOCKS, ERASED = 40, 4


class Store(unittest.TestCase):
    def setUp(self):
        context = temporary_directory()
        self.directory = context.__enter__() / "store"
        self.addCleanup(context.__exit__, None, None, None)

    def make(self):
        subprocess.run([MAKE_STORE, self.directory, str(BLOCKS), str(ERASED)], check=True, timeout=120)

    def store(self, command, *flags, code=0):
        result = run("store", command, "--dir", self.directory, *flags)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result

    def json(self, command, *flags, code=0):
        return json.loads(self.store(command, "--json", *flags, code=code).stdout)

    def segments(self):
        return sorted(self.directory.glob("seg-*.wseg"))

    def file_bytes(self):
        return sum(path.stat().st_size for path in self.segments())

    def contents(self):
        return {path: path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}

    def damage_first_block(self):
        data = bytearray(self.segments()[0].read_bytes())
        data[3 * 4096] ^= 1  # header page of the segment, header page of the block, its second page
        self.segments()[0].write_bytes(data)

    def test_stat_counts_and_writes_nothing(self):
        self.make()
        before = self.contents()
        stat = self.json("stat")
        self.assertEqual(stat["blocks"], BLOCKS - ERASED)
        self.assertEqual(stat["payload_bytes"], 20000 * (BLOCKS - ERASED))
        self.assertEqual(stat["file_bytes"], self.file_bytes())
        self.assertEqual(stat["segments"], len(self.segments()))
        self.assertEqual((stat["pinned_blocks"], stat["expiring_blocks"], stat["erasures"]), (1, 1, ERASED))
        self.assertEqual((stat["owner"], stat["index"], stat["erase_list"]), ("", "readable", "sound"))
        text = self.store("stat").stdout
        self.assertRegex(text, rf"(?m)^blocks +{BLOCKS - ERASED}, ")
        self.assertRegex(text, r"(?m)^owner +none$")
        self.assertEqual(self.contents(), before)

    def test_a_store_in_use_can_be_looked_at_and_nothing_else(self):
        with subprocess.Popen([MAKE_STORE, self.directory, str(BLOCKS), "0", "hold"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as owner:
            try:
                self.assertEqual(owner.stdout.readline(), "ready\n")
                stat = self.json("stat")
                self.assertEqual(stat["blocks"], BLOCKS)
                self.assertIn(f"pid {owner.pid}", stat["owner"])
                for command in ("verify", "repair", "gc"):
                    error = self.store(command, code=1).stderr
                    self.assertIn("in use by another process", error)
                    self.assertIn(f"pid {owner.pid}", error)
            finally:
                owner.stdin.close()
                owner.wait(timeout=60)
        self.assertEqual(owner.returncode, 0)
        self.assertTrue(self.json("verify")["sound"])

    def test_verify_finds_what_repair_forgets(self):
        self.make()
        report = self.json("verify")
        self.assertTrue(report["sound"])
        self.assertEqual(report["checked_blocks"], BLOCKS - ERASED)
        self.damage_first_block()
        before = self.contents()
        report = self.json("verify", code=1)
        self.assertFalse(report["sound"])
        self.assertEqual((report["corrupt_blocks"], report["checked_blocks"]), (1, BLOCKS - ERASED - 1))
        self.assertRegex(self.store("verify", code=1).stdout, r"(?m)^unsound +seg-0{15}1.wseg at 4096: ")
        self.assertEqual(self.contents(), before)
        report = self.json("repair")
        self.assertEqual((report["removed_blocks"], report["blocks"]), (1, BLOCKS - ERASED - 1))
        self.assertEqual(report["file_bytes"], self.file_bytes())
        self.assertTrue(self.json("verify")["sound"])
        self.assertEqual(self.json("repair")["removed_blocks"], 0)

    def test_repair_rebuilds_a_lost_index_without_what_was_erased(self):
        self.make()
        shutil.rmtree(self.directory / "index")
        self.assertNotEqual(self.json("stat")["index"], "readable")
        self.assertFalse(self.json("verify", code=1)["sound"])
        report = self.json("repair")
        self.assertTrue(report["recovery"]["index_rebuilt"])
        self.assertEqual(report["recovery"]["hidden_blocks"], ERASED)
        self.assertEqual(report["blocks"], BLOCKS - ERASED)
        self.assertTrue(self.json("verify")["sound"])

    def test_gc_gives_back_room(self):
        self.make()
        before = self.file_bytes()
        report = self.json("gc", "--min-live", "1")
        self.assertEqual(report["blocks"], BLOCKS - ERASED)
        self.assertLess(self.file_bytes(), before)
        self.assertEqual(report["file_bytes"], self.file_bytes())
        self.assertEqual(report["freed_bytes"], before - self.file_bytes())
        # The last blocks were erased: no page is filled with their byte any more.
        for path in self.segments():
            self.assertIsNone(re.search(bytes([BLOCKS - 1]) + b"{4096}", path.read_bytes()))
        self.assertTrue(self.json("verify")["sound"])
        self.assertRegex(self.store("gc").stdout, r"(?m)^left +36 blocks, ")

    def test_where_there_is_no_store_none_is_made(self):
        for command in ("stat", "verify", "repair", "gc"):
            self.store(command, code=2)
            self.assertFalse(self.directory.exists())
        self.directory.mkdir()
        for command in ("stat", "verify", "repair", "gc"):
            self.assertIn("holds no store", self.store(command, code=2).stderr)
            self.assertEqual(list(self.directory.iterdir()), [])
        self.assertEqual(run("store").returncode, 2)
        self.assertEqual(run("store", "stat").returncode, 2)
        self.assertIn("did you mean --json?", run("store", "stat", "--dir", "x", "--jsn").stderr)


if __name__ == "__main__":
    main()

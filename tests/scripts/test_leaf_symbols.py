#!/usr/bin/python3
"""Files compiled for an instruction set define no function that another file may define, too: of several copies the linker keeps one,
perhaps the one that this processor cannot run (kernels/README.md). WINNOW_KERNELS_LIBRARY is the library of the kernels.
"""
import os
import re
import subprocess
import unittest

LEAF = re.compile(r"(\w+_(?:avx2|avx512|amx)\.cc\.o):")
# Weak and unique definitions, but the compiler's reference to the personality of exceptions, which is data.
SHARED = re.compile(r" [WVu] (?!DW\.ref\.)(.+)")


class LeafSymbols(unittest.TestCase):
    def test_no_function_of_a_leaf_may_be_taken_for_anothers(self):
        listing = subprocess.run(["nm", "--demangle", "--print-file-name", os.environ["WINNOW_KERNELS_LIBRARY"]], capture_output=True, text=True,
                                 check=True).stdout
        leaves, shared = set(), []
        for line in listing.splitlines():
            if leaf := LEAF.search(line):
                leaves.add(leaf[1])
                if symbol := SHARED.search(line):
                    shared.append(f"{leaf[1]}: {symbol[1]}")
        self.assertGreater(len(leaves), 20, "leaves in the library")
        self.assertEqual([], shared)


if __name__ == "__main__":
    unittest.main()

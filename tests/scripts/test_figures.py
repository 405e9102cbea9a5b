#!/usr/bin/env python3
"""The pictures of README.md and docs/ are those that scripts/figures.py draws, and it counts bytes as one would by hand."""
import json
import os
import pathlib
import re
import sys
import unittest
import xml.etree.ElementTree

SOURCE = pathlib.Path(os.environ.get("WINNOW_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(SOURCE / "scripts"))
import figures  # noqa: E402


class Figures(unittest.TestCase):
    def need_matplotlib(self):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self.skipTest("Debian's python3-matplotlib is not there")

    def test_bytes_of_a_step_are_by_hand(self):
        shape = {"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "vocab_size": 5}
        read = figures.step_bytes(shape, 100, 7, dense_layers=1, code_bytes=2)
        # A layer: q and o 8 x 12 each, k and v 8 x 6 each, three of 8 x 10; and the output's 8 x 5. A row: K and V of 2 heads of 3, 2 bytes each.
        self.assertAlmostEqual(read["weights"] * 1e9, 2 * (4 * (2 * 96 + 2 * 48 + 240) + 40))
        self.assertAlmostEqual(read["kv"] * 1e9, 100 * 24 * 4)
        self.assertAlmostEqual(read["dense_layers"] * 1e9, 100 * 24)
        self.assertAlmostEqual(read["codes"] * 1e9, 100 * 2 * 2 * 3)
        self.assertAlmostEqual(read["rows"] * 1e9, 7 * 24 * 3)

    def test_the_picture_says_those_bytes(self):
        read = figures.step_bytes(json.loads((SOURCE / "loadtest/shapes/llama-3.1-8b.json").read_text()), 131072, 2048)
        picture = figures.step_picture()
        xml.etree.ElementTree.fromstring(picture)
        self.assertIn(f"{read['weights'] + read['kv']:.1f} GB read", picture)
        widths = {title.split(":")[0]: float(width) for width, title in re.findall(r'width="([\d.]+)" height="40.0"[^>]*><title>([^<]*)', picture)}
        self.assertAlmostEqual(widths["KV of 131,072 tokens"] / widths["weights"], read["kv"] / read["weights"], places=2)

    def test_the_table_names_the_best_of_a_line(self):
        lines = [line for line in figures.peers_table().splitlines() if line.startswith("| ")]
        self.assertIn("| 1 x 128K, ms a step | 8.41 | **4.71** | 8.92 | 12.2 |", "".join(lines))
        self.assertIn("| prompt of 8K, tokens/s | 27,600 |  | **38,500** | 25,100 |", "".join(lines))
        self.assertTrue(all(line.count("**") == 2 for line in lines[1:]))

    def test_the_points_of_quality_are_those_of_the_tables_beside_them(self):
        rows = [[cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in (SOURCE / "docs/quality.md").read_text().splitlines() if line.startswith("| ")]
        for policy, read, differs in figures.quality_points():
            shown = [(float(row[5]), float(row[3].partition(" ")[0].strip("*"))) for row in rows if row[0] == policy and " ± " in row[3]]
            self.assertTrue(any(abs(read - a) < 0.0006 and abs(100 * (1 - differs) - b) < 0.06 for a, b in shown), (policy, read, differs, shown))

    def test_the_plots_say_numbers_of_the_tables_beside_them(self):
        self.need_matplotlib()
        for plot, page in ((figures.attention_plot, "docs/retrieval.md"), (figures.tiers_plot, "docs/results/tiers.md")):
            tables = [cell for line in (SOURCE / page).read_text().splitlines() if line.startswith("| ") for cell in re.findall(r"[\d.]+", line)]
            shown = re.findall(r">([\d.]+)</text>", plot())
            labels = [number for number in shown if not re.fullmatch(r"10*|[2468]0", number)]
            self.assertGreater(len(labels), 4)
            for number in labels:
                self.assertTrue(any(f"{float(cell):.2g}" == f"{float(number):.2g}" for cell in tables if re.fullmatch(r"\d+(\.\d+)?", cell)), (page, number))

    def test_they_are_current(self):
        self.need_matplotlib()
        self.assertEqual(figures.stale(), [], "run scripts/figures.py --write")


if __name__ == "__main__":
    unittest.main(verbosity=2)

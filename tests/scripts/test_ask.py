#!/usr/bin/python3
"""The demo's judgement of an answer (scripts/ask.py): a fact is there as a word of its own, or the answer is wrong."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))

import ask


class Answers(unittest.TestCase):

    def test_a_fact_stands_alone(self):
        for text in ["7962277", "It equals 7962277.", "**7962277**", "(7962277)", "the value is\n7962277"]:
            self.assertTrue(ask.names(text, "7962277"), text)
        self.assertTrue(ask.names("Ada Lovelace's", "Ada Lovelace"))

    def test_one_with_a_digit_or_a_letter_more_is_another(self):
        for text in ["79622777", "It equals 17962277.", "7962277a", "", "796227"]:
            self.assertFalse(ask.names(text, "7962277"), text)

    def test_it_is_found_behind_one_that_is_not_alone(self):
        self.assertTrue(ask.names("not 79622777, but 7962277", "7962277"))


if __name__ == "__main__":
    unittest.main()

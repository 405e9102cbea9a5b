// Facts about code points in which the reference (the `tokenizers` library) and the Unicode
// libraries that winnow links differ, because each knows another version of Unicode. Found by
// comparing all 0x110000 code points; the tables are written by
// tests/differential/make_unicode_tables.py.
#ifndef WINNOW_ENGINE_TEXT_UNICODE_TABLES_H_
#define WINNOW_ENGINE_TEXT_UNICODE_TABLES_H_

#include <span>

namespace winnow::engine {

struct CodePointRange {
  char32_t first;
  char32_t last;  // inclusive
};

struct CategoryRange {
  char32_t first;
  char32_t last;     // inclusive
  char category[2];  // "Lo", "Nd", ...
};

// Each table is sorted and its ranges do not overlap.
std::span<const CategoryRange> CategoryChanges();      // since Unicode 14, up to the reference's 16
std::span<const CodePointRange> LateNumeric();         // numeric for `Digits` only
std::span<const CodePointRange> Inert();               // stand alone in NFC, NFD, NFKC, NFKD
std::span<const CodePointRange> InertCompatibility();  // stand alone in NFKC and NFKD only

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_UNICODE_TABLES_H_

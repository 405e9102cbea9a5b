// Case mappings of Python's str that utf8proc's functions do not give. The tables are written by
// tests/differential/make_case_tables.py.
#ifndef WINNOW_ENGINE_TEXT_JINJA_CASE_TABLES_H_
#define WINNOW_ENGINE_TEXT_JINJA_CASE_TABLES_H_

#include <span>

namespace winnow::engine::jinja {

struct CaseMapping {
  char32_t from;
  char32_t to[3];  // 0: no more
};

// Each table is sorted by `from`.
std::span<const CaseMapping> UpperMappings();
std::span<const CaseMapping> LowerMappings();
std::span<const CaseMapping> TitleMappings();

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_CASE_TABLES_H_

// NormalizeUnicode: utf8proc, held to what the reference's older data know.
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>

#include "engine/text/tokenizer_normalizer.h"
#include "engine/text/unicode/unicode_tables.h"
#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

bool InTable(std::span<const CodePointRange> table, char32_t code_point) {
  auto it =
      std::upper_bound(table.begin(), table.end(), code_point,
                       [](char32_t c, const CodePointRange& range) { return c < range.first; });
  return it != table.begin() && code_point <= std::prev(it)->last;
}

// Where text can be neither changed by nor reordered across: below this code point every character
// is its own normal form and starts anew.
constexpr char32_t FirstAffected(UnicodeForm form) {
  switch (form) {
    case UnicodeForm::kNfc:
      return 0x300;
    case UnicodeForm::kNfd:
      return 0xC0;
    default:
      return 0xA0;
  }
}

void AppendNormalized(std::string_view text, UnicodeForm form, std::string* out) {
  if (text.empty()) return;
  int options = UTF8PROC_STABLE;
  options |= form == UnicodeForm::kNfc || form == UnicodeForm::kNfkc ? UTF8PROC_COMPOSE
                                                                     : UTF8PROC_DECOMPOSE;
  if (form == UnicodeForm::kNfkc || form == UnicodeForm::kNfkd) options |= UTF8PROC_COMPAT;
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                             static_cast<utf8proc_ssize_t>(text.size()), &result,
                                             static_cast<utf8proc_option_t>(options));
  WINNOW_CHECK(size >= 0);  // fails for invalid UTF-8, refused at the door, and for want of memory
  out->append(reinterpret_cast<const char*>(result), static_cast<size_t>(size));
  std::free(result);
}

}  // namespace

std::string NormalizeUnicode(std::string_view text, UnicodeForm form) {
  const char32_t first_affected = FirstAffected(form);
  const bool compatibility = form == UnicodeForm::kNfkc || form == UnicodeForm::kNfkd;
  bool affected = false;
  std::string out;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    int length = 0;
    const char32_t c = DecodeCodePoint(text, at, &length);
    affected |= c >= first_affected;
    if (c >= 0x300 &&
        (InTable(Inert(), c) || (compatibility && InTable(InertCompatibility(), c)))) {
      AppendNormalized(text.substr(begin, at - begin), form, &out);
      out.append(text.substr(at, length));
      begin = at + length;
    }
    at += length;
  }
  if (!affected) return std::string(text);
  AppendNormalized(text.substr(begin), form, &out);
  return out;
}

}  // namespace winnow::engine

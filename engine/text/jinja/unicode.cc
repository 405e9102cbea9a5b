#include "engine/text/jinja/unicode.h"

#include <utf8proc.h>

#include <algorithm>

#include "engine/text/jinja/case_tables.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine::jinja {
namespace {

utf8proc_category_t CategoryOf(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

// Letters of no case of their own that have the property Other_Lowercase or Other_Uppercase.
bool IsOtherLower(char32_t c) {
  return c == 0xAA || c == 0xBA || (c >= 0x2B0 && c <= 0x2B8) || (c >= 0x2C0 && c <= 0x2C1) ||
         (c >= 0x2E0 && c <= 0x2E4) || c == 0x345 || c == 0x37A || (c >= 0x1D2C && c <= 0x1D6A) ||
         c == 0x1D78 || (c >= 0x1D9B && c <= 0x1DBF) || c == 0x2071 || c == 0x207F ||
         (c >= 0x2090 && c <= 0x209C) || (c >= 0x2170 && c <= 0x217F) ||
         (c >= 0x24D0 && c <= 0x24E9) || (c >= 0x2C7C && c <= 0x2C7D) ||
         (c >= 0xA69C && c <= 0xA69D) || c == 0xA770 || (c >= 0xA7F8 && c <= 0xA7F9) ||
         (c >= 0xAB5C && c <= 0xAB5F);
}

bool IsOtherUpper(char32_t c) {
  return (c >= 0x2160 && c <= 0x216F) || (c >= 0x24B6 && c <= 0x24CF) ||
         (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
         (c >= 0x1F170 && c <= 0x1F189);
}

}  // namespace

bool IsPythonSpace(char32_t c) { return IsWhiteSpace(c) || (c >= 0x1C && c <= 0x1F); }

size_t LeadingSpace(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    int length = 0;
    if (!IsPythonSpace(DecodeCodePoint(text, at, &length))) break;
    at += static_cast<size_t>(length);
  }
  return at;
}

size_t TrailingSpace(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const size_t last = PreviousOffset(text, end);
    int length = 0;
    if (!IsPythonSpace(DecodeCodePoint(text, last, &length))) break;
    end = last;
  }
  return text.size() - end;
}

size_t Length(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

size_t OffsetOf(std::string_view text, size_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) {
    at += static_cast<size_t>(CodePointLength(static_cast<unsigned char>(text[at])));
  }
  return at;
}

size_t PreviousOffset(std::string_view text, size_t end) {
  --end;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return end;
}

void AppendCase(char32_t c, Case to, std::string* out) {
  const auto table = to == Case::kUpper   ? UpperMappings()
                     : to == Case::kLower ? LowerMappings()
                                          : TitleMappings();
  const auto found =
      std::lower_bound(table.begin(), table.end(), c,
                       [](const CaseMapping& m, char32_t code) { return m.from < code; });
  if (found != table.end() && found->from == c) {
    for (const char32_t mapped : found->to) {
      if (mapped != 0) AppendCodePoint(mapped, out);
    }
    return;
  }
  const auto code = static_cast<utf8proc_int32_t>(c);
  AppendCodePoint(static_cast<char32_t>(to == Case::kUpper   ? utf8proc_toupper(code)
                                        : to == Case::kLower ? utf8proc_tolower(code)
                                                             : utf8proc_totitle(code)),
                  out);
}

bool IsUpper(char32_t c) { return CategoryOf(c) == UTF8PROC_CATEGORY_LU || IsOtherUpper(c); }
bool IsLower(char32_t c) { return CategoryOf(c) == UTF8PROC_CATEGORY_LL || IsOtherLower(c); }
bool IsTitle(char32_t c) { return CategoryOf(c) == UTF8PROC_CATEGORY_LT; }
bool IsCased(char32_t c) { return IsUpper(c) || IsLower(c) || IsTitle(c); }

bool IsCaseIgnorable(char32_t c) {
  switch (CategoryOf(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      break;
  }
  // Word_Break of MidLetter, MidNumLet or Single_Quote.
  return c == '\'' || c == '.' || c == ':' || c == 0xB7 || c == 0x387 || c == 0x55F || c == 0x5F4 ||
         c == 0x2018 || c == 0x2019 || c == 0x2024 || c == 0x2027 || c == 0xFE13 || c == 0xFE52 ||
         c == 0xFE55 || c == 0xFF07 || c == 0xFF0E || c == 0xFF1A;
}

bool IsAlpha(char32_t c) {
  switch (CategoryOf(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return true;
    default:
      return false;
  }
}

bool IsDecimal(char32_t c) { return CategoryOf(c) == UTF8PROC_CATEGORY_ND; }

bool IsDigit(char32_t c) {
  return IsDecimal(c) || c == 0xB2 || c == 0xB3 || c == 0xB9 || (c >= 0x1369 && c <= 0x1371) ||
         c == 0x19DA || c == 0x2070 || (c >= 0x2074 && c <= 0x2079) ||
         (c >= 0x2080 && c <= 0x2089) || (c >= 0x2460 && c <= 0x2468) ||
         (c >= 0x2474 && c <= 0x247C) || (c >= 0x2488 && c <= 0x2490) || c == 0x24EA ||
         (c >= 0x24F5 && c <= 0x24FD) || c == 0x24FF || (c >= 0x2776 && c <= 0x277E) ||
         (c >= 0x2780 && c <= 0x2788) || (c >= 0x278A && c <= 0x2792) ||
         (c >= 0x10A40 && c <= 0x10A43) || (c >= 0x10E60 && c <= 0x10E68) ||
         (c >= 0x11052 && c <= 0x1105A) || (c >= 0x1F100 && c <= 0x1F10A);
}

bool IsNumericChar(char32_t c) { return IsDigit(c) || IsNumeric(c); }

bool IsPrintable(char32_t c) {
  if (c == ' ') return true;
  switch (CategoryOf(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

}  // namespace winnow::engine::jinja

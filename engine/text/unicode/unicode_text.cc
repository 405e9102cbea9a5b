#include "engine/text/unicode/unicode_text.h"

#include <utf8proc.h>

#include <algorithm>

#include "engine/text/unicode/unicode_tables.h"

namespace winnow::engine {
namespace {

using Byte = unsigned char;

template <typename Range>
const Range* FindRange(std::span<const Range> table, char32_t code_point) {
  auto it = std::upper_bound(table.begin(), table.end(), code_point,
                             [](char32_t c, const Range& range) { return c < range.first; });
  if (it == table.begin()) return nullptr;
  --it;
  return code_point <= it->last ? &*it : nullptr;
}

// The two letters of the general category in the reference's version of Unicode.
struct Category {
  char major;
  char minor;
};

Category CategoryOf(char32_t code_point) {
  if (const CategoryRange* changed = FindRange(CategoryChanges(), code_point)) {
    return {changed->category[0], changed->category[1]};
  }
  const char* name = utf8proc_category_string(static_cast<utf8proc_int32_t>(code_point));
  return {name[0], name[1]};
}

// How a character that begins with `lead` goes on: its length, and the bounds of its second byte.
// Length 0: no character begins so.
struct Lead {
  int length;
  Byte second_min;
  Byte second_max;
};

Lead LeadOf(Byte lead) {
  if (lead < 0x80) return {1, 0, 0};
  if (lead < 0xC2) return {0, 0, 0};
  if (lead < 0xE0) return {2, 0x80, 0xBF};
  if (lead == 0xE0) return {3, 0xA0, 0xBF};  // no overlong form
  if (lead == 0xED) return {3, 0x80, 0x9F};  // no surrogate
  if (lead < 0xF0) return {3, 0x80, 0xBF};
  if (lead == 0xF0) return {4, 0x90, 0xBF};
  if (lead < 0xF4) return {4, 0x80, 0xBF};
  if (lead == 0xF4) return {4, 0x80, 0x8F};  // nothing above U+10FFFF
  return {0, 0, 0};
}

struct Scan {
  size_t valid_bytes;  // of the character at the offset, as far as it is well-formed
  bool complete;
  bool truncated;  // the text ended inside a so far well-formed character
};

Scan ScanCharacter(std::string_view text, size_t offset) {
  const Lead lead = LeadOf(static_cast<Byte>(text[offset]));
  if (lead.length == 0) return {1, false, false};
  size_t good = 1;
  while (good < static_cast<size_t>(lead.length)) {
    if (offset + good == text.size()) return {good, false, true};
    const Byte next = static_cast<Byte>(text[offset + good]);
    const Byte min = good == 1 ? lead.second_min : Byte{0x80};
    const Byte max = good == 1 ? lead.second_max : Byte{0xBF};
    if (next < min || next > max) return {good, false, false};
    ++good;
  }
  return {good, true, false};
}

}  // namespace

size_t FindInvalidUtf8(std::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    if (static_cast<Byte>(text[offset]) < 0x80) {
      ++offset;
      continue;
    }
    const Scan scan = ScanCharacter(text, offset);
    if (!scan.complete) return offset;
    offset += scan.valid_bytes;
  }
  return std::string_view::npos;
}

char32_t DecodeCodePoint(std::string_view text, size_t offset, int* length) {
  const auto byte = [&](size_t i) {
    return static_cast<char32_t>(static_cast<Byte>(text[offset + i]));
  };
  const char32_t lead = byte(0);
  *length = CodePointLength(static_cast<Byte>(lead));
  switch (*length) {
    case 1:
      return lead;
    case 2:
      return (lead & 0x1F) << 6 | (byte(1) & 0x3F);
    case 3:
      return (lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    default:
      return (lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 |
             (byte(3) & 0x3F);
  }
}

void AppendCodePoint(char32_t code_point, std::string* out) {
  const auto put = [out](char32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

size_t AppendLossyUtf8(std::string_view bytes, bool more_may_follow, std::string* out) {
  size_t offset = 0;
  while (offset < bytes.size()) {
    const Scan scan = ScanCharacter(bytes, offset);
    if (scan.complete) {
      out->append(bytes.substr(offset, scan.valid_bytes));
    } else {
      if (scan.truncated && more_may_follow) return offset;
      out->append(kReplacementCharacter);
    }
    offset += scan.valid_bytes;
  }
  return offset;
}

bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsNumeric(char32_t c) {
  if (c < 0x80) return c >= '0' && c <= '9';
  return CategoryOf(c).major == 'N' || FindRange(LateNumeric(), c) != nullptr;
}

bool IsWord(char32_t c) {
  if (c < 0x80) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
  }
  const Category category = CategoryOf(c);
  if (category.major == 'L' || category.major == 'M') return true;
  if (category.major == 'N') return category.minor == 'd' || category.minor == 'l';
  if (category.major == 'P') return category.minor == 'c';
  // Join_Control, and the circled and squared letters, which are Alphabetic although symbols.
  return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
         (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
         (c >= 0x1F170 && c <= 0x1F189);
}

}  // namespace winnow::engine

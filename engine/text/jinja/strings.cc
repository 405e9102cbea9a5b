#include "engine/text/jinja/strings.h"

#include <algorithm>

#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine::jinja {
namespace {

template <typename Visit>
void ForEachCodePoint(std::string_view text, Visit visit) {
  for (size_t at = 0; at < text.size();) {
    int length = 0;
    const char32_t c = DecodeCodePoint(text, at, &length);
    visit(c, at, at + static_cast<size_t>(length));
    at += static_cast<size_t>(length);
  }
}

bool Has(std::string_view characters, std::string_view one) {
  // Whole code points only: a lead byte never stands inside another code point.
  return characters.find(one) != std::string_view::npos;
}

bool IsFinalSigma(std::string_view text, size_t at) {
  bool before = false;
  for (size_t end = at; end > 0;) {
    const size_t begin = PreviousOffset(text, end);
    int length = 0;
    const char32_t c = DecodeCodePoint(text, begin, &length);
    end = begin;
    if (IsCaseIgnorable(c)) continue;
    before = IsCased(c);
    break;
  }
  if (!before) return false;
  for (size_t next = at + 2; next < text.size();) {
    int length = 0;
    const char32_t c = DecodeCodePoint(text, next, &length);
    next += static_cast<size_t>(length);
    if (IsCaseIgnorable(c)) continue;
    return !IsCased(c);
  }
  return true;
}

void AppendLower(const MarkedText& text, char32_t c, size_t at, MarkedText* out) {
  constexpr char32_t kSigma = 0x3A3;
  std::string mapped;
  if (c == kSigma) {
    AppendCodePoint(IsFinalSigma(text.bytes(), at) ? 0x3C2 : 0x3C3, &mapped);
  } else {
    AppendCase(c, Case::kLower, &mapped);
  }
  out->Append(mapped, text.IsUser(at));
}

}  // namespace

MarkedText Strip(const MarkedText& text, Side side, const std::string_view* characters) {
  const std::string_view bytes = text.bytes();
  size_t begin = 0;
  size_t end = bytes.size();
  if (characters == nullptr) {
    if (side != Side::kRight) begin = LeadingSpace(bytes);
    if (side != Side::kLeft) end -= TrailingSpace(bytes.substr(begin));
    return text.Slice(begin, end);
  }
  while (side != Side::kRight && begin < end) {
    const size_t next = begin + OffsetOf(bytes.substr(begin), 1);
    if (!Has(*characters, bytes.substr(begin, next - begin))) break;
    begin = next;
  }
  while (side != Side::kLeft && end > begin) {
    const size_t last = PreviousOffset(bytes, end);
    if (!Has(*characters, bytes.substr(last, end - last))) break;
    end = last;
  }
  return text.Slice(begin, end);
}

MarkedText Replace(const MarkedText& text, std::string_view from, const MarkedText& to,
                   int64_t count) {
  const std::string_view bytes = text.bytes();
  MarkedText out;
  size_t at = 0;
  if (from.empty()) {
    // Before every code point, and at the end.
    while (count != 0) {
      out.Append(to);
      --count;
      if (at >= bytes.size()) return out;
      const size_t next = at + OffsetOf(bytes.substr(at), 1);
      out.Append(text, at, next);
      at = next;
    }
  }
  while (count != 0 && !from.empty()) {
    const size_t found = bytes.find(from, at);
    if (found == bytes.npos) break;
    out.Append(text, at, found);
    out.Append(to);
    at = found + from.size();
    --count;
  }
  out.Append(text, at, bytes.size());
  return out;
}

int64_t CountOf(std::string_view text, std::string_view part) {
  if (part.empty()) return static_cast<int64_t>(Length(text)) + 1;
  int64_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + part.size()))
    ++count;
  return count;
}

namespace {

std::vector<MarkedText> SplitAtSpace(const MarkedText& text, int64_t max) {
  const std::string_view bytes = text.bytes();
  std::vector<MarkedText> out;
  size_t at = LeadingSpace(bytes);
  while (at < bytes.size()) {
    if (max-- == 0) {
      out.push_back(text.Slice(at, bytes.size()));  // with the space at its end, as in Python
      break;
    }
    size_t end = at;
    while (end < bytes.size()) {
      int length = 0;
      if (IsPythonSpace(DecodeCodePoint(bytes, end, &length))) break;
      end += static_cast<size_t>(length);
    }
    out.push_back(text.Slice(at, end));
    at = end + LeadingSpace(bytes.substr(end));
  }
  return out;
}

std::vector<MarkedText> SplitAtSpaceFromRight(const MarkedText& text, int64_t max) {
  const std::string_view bytes = text.bytes();
  std::vector<MarkedText> out;
  size_t end = bytes.size() - TrailingSpace(bytes);
  while (end > 0) {
    if (max-- == 0) {
      out.push_back(text.Slice(0, end));
      break;
    }
    size_t begin = end;
    while (begin > 0) {
      const size_t previous = PreviousOffset(bytes, begin);
      int length = 0;
      if (IsPythonSpace(DecodeCodePoint(bytes, previous, &length))) break;
      begin = previous;
    }
    out.push_back(text.Slice(begin, end));
    end = begin - TrailingSpace(bytes.substr(0, begin));
  }
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace

std::vector<MarkedText> Split(const MarkedText& text, const std::string_view* separator,
                              int64_t max, bool from_right) {
  if (separator == nullptr)
    return from_right ? SplitAtSpaceFromRight(text, max) : SplitAtSpace(text, max);
  const std::string_view bytes = text.bytes();
  std::vector<MarkedText> out;
  if (!from_right) {
    size_t at = 0;
    while (max-- != 0) {
      const size_t found = bytes.find(*separator, at);
      if (found == bytes.npos) break;
      out.push_back(text.Slice(at, found));
      at = found + separator->size();
    }
    out.push_back(text.Slice(at, bytes.size()));
    return out;
  }
  size_t end = bytes.size();
  while (max-- != 0) {
    const size_t found = bytes.substr(0, end).rfind(*separator);
    if (found == bytes.npos) break;
    out.push_back(text.Slice(found + separator->size(), end));
    end = found;
  }
  out.push_back(text.Slice(0, end));
  std::reverse(out.begin(), out.end());
  return out;
}

std::vector<MarkedText> SplitLines(const MarkedText& text, bool keep_ends) {
  const std::string_view bytes = text.bytes();
  std::vector<MarkedText> out;
  size_t begin = 0;
  ForEachCodePoint(bytes, [&](char32_t c, size_t at, size_t end) {
    const bool line_break = (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                            c == 0x2028 || c == 0x2029;
    if (!line_break || at < begin) return;
    if (c == '\r' && end < bytes.size() && bytes[end] == '\n') ++end;
    out.push_back(text.Slice(begin, keep_ends ? end : at));
    begin = end;
  });
  if (begin < bytes.size()) out.push_back(text.Slice(begin, bytes.size()));
  return out;
}

MarkedText ToCase(const MarkedText& text, Case to) {
  MarkedText out;
  ForEachCodePoint(text.bytes(), [&](char32_t c, size_t at, size_t) {
    if (to == Case::kLower) {
      AppendLower(text, c, at, &out);
      return;
    }
    std::string mapped;
    AppendCase(c, to, &mapped);
    out.Append(mapped, text.IsUser(at));
  });
  return out;
}

MarkedText Capitalize(const MarkedText& text) {
  MarkedText out;
  ForEachCodePoint(text.bytes(), [&](char32_t c, size_t at, size_t) {
    if (at > 0) {
      AppendLower(text, c, at, &out);
      return;
    }
    std::string mapped;
    AppendCase(c, Case::kTitle, &mapped);
    out.Append(mapped, text.IsUser(at));
  });
  return out;
}

MarkedText TitleCase(const MarkedText& text) {
  MarkedText out;
  bool in_word = false;
  ForEachCodePoint(text.bytes(), [&](char32_t c, size_t at, size_t) {
    if (in_word) {
      AppendLower(text, c, at, &out);
    } else {
      std::string mapped;
      AppendCase(c, Case::kTitle, &mapped);
      out.Append(mapped, text.IsUser(at));
    }
    in_word = IsCased(c);
  });
  return out;
}

MarkedText SwapCase(const MarkedText& text) {
  MarkedText out;
  ForEachCodePoint(text.bytes(), [&](char32_t c, size_t at, size_t end) {
    if (IsUpper(c)) {
      AppendLower(text, c, at, &out);
    } else if (IsLower(c)) {
      std::string mapped;
      AppendCase(c, Case::kUpper, &mapped);
      out.Append(mapped, text.IsUser(at));
    } else {
      out.Append(text, at, end);
    }
  });
  return out;
}

MarkedText Pad(const MarkedText& text, std::string_view fill, bool user_fill, size_t before,
               size_t after) {
  MarkedText out;
  for (size_t i = 0; i < before; ++i) out.Append(fill, user_fill);
  out.Append(text);
  for (size_t i = 0; i < after; ++i) out.Append(fill, user_fill);
  return out;
}

bool AllOf(std::string_view text, const std::function<bool(char32_t)>& is) {
  bool all = !text.empty();
  ForEachCodePoint(text, [&](char32_t c, size_t, size_t) { all = all && is(c); });
  return all;
}

}  // namespace winnow::engine::jinja

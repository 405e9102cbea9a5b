#include "engine/text/jinja/marked_text.h"

#include <algorithm>

namespace winnow::engine::jinja {

MarkedText::MarkedText(std::string bytes, bool user) : bytes_(std::move(bytes)) {
  if (user) Mark(0, bytes_.size());
}

bool MarkedText::IsUser(size_t offset) const {
  const auto after = std::upper_bound(user_.begin(), user_.end(), offset,
                                      [](size_t at, const Range& r) { return at < r.end; });
  return after != user_.end() && after->begin <= offset;
}

void MarkedText::Mark(size_t begin, size_t end) {
  if (begin == end) return;
  if (!user_.empty() && user_.back().end == begin) {
    user_.back().end = end;
  } else {
    user_.push_back({begin, end});
  }
}

void MarkedText::Append(std::string_view bytes, bool user) {
  const size_t begin = bytes_.size();
  bytes_.append(bytes);
  if (user) Mark(begin, bytes_.size());
}

void MarkedText::Append(const MarkedText& other, size_t begin, size_t end) {
  const size_t at = bytes_.size();
  bytes_.append(other.bytes_, begin, end - begin);
  auto range = std::upper_bound(other.user_.begin(), other.user_.end(), begin,
                                [](size_t offset, const Range& r) { return offset < r.end; });
  for (; range != other.user_.end() && range->begin < end; ++range) {
    Mark(at + std::max(range->begin, begin) - begin, at + std::min(range->end, end) - begin);
  }
}

MarkedText MarkedText::Slice(size_t begin, size_t end) const {
  MarkedText out;
  out.Append(*this, begin, end);
  return out;
}

std::vector<std::pair<size_t, bool>> MarkedText::Segments() const {
  std::vector<std::pair<size_t, bool>> out;
  size_t at = 0;
  for (const Range& range : user_) {
    if (range.begin > at) out.emplace_back(range.begin - at, true);
    out.emplace_back(range.end - range.begin, false);
    at = range.end;
  }
  if (at < bytes_.size()) out.emplace_back(bytes_.size() - at, true);
  return out;
}

}  // namespace winnow::engine::jinja

#include "engine/text/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace winnow::engine {

StopMatcher::StopMatcher(const std::vector<std::string>& strings, bool include_stop)
    : include_stop_(include_stop) {
  patterns_.reserve(strings.size());
  for (const std::string& text : strings) {
    WINNOW_CHECK(!text.empty());
    Pattern pattern{.text = text, .border = std::vector<size_t>(text.size(), 0)};
    size_t border = 0;
    for (size_t i = 1; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = pattern.border[border - 1];
      if (text[i] == text[border]) ++border;
      pattern.border[i] = border;
    }
    patterns_.push_back(std::move(pattern));
  }
}

void StopMatcher::Pattern::Step(char byte) {
  while (length > 0 && byte != text[length]) length = border[length - 1];
  if (byte == text[length]) ++length;
}

std::string StopMatcher::Add(std::string_view text) {
  WINNOW_CHECK(!matched());
  for (size_t i = 0; i < text.size(); ++i) {
    for (Pattern& pattern : patterns_) {
      pattern.Step(text[i]);
      if (pattern.length < pattern.text.size()) continue;
      if (!matched() || pattern.text.size() > match_->text.size()) match_ = &pattern;
    }
    if (matched()) {
      held_.append(text.substr(0, i + 1));
      if (!include_stop_) held_.resize(held_.size() - match_->text.size());
      return std::exchange(held_, {});
    }
  }
  size_t hold = 0;
  for (const Pattern& pattern : patterns_) hold = std::max(hold, pattern.length);
  held_.append(text);
  std::string out = held_.substr(0, held_.size() - hold);
  held_.erase(0, out.size());
  return out;
}

std::string StopMatcher::Flush() {
  for (Pattern& pattern : patterns_) pattern.length = 0;
  return std::exchange(held_, {});
}

}  // namespace winnow::engine

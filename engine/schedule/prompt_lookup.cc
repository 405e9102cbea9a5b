#include "engine/schedule/prompt_lookup.h"

#include <algorithm>

#include "kernels/check.h"

namespace winnow::engine {

// Hash of the tokens [end - kGram, end). Equal hashes are compared again.
uint64_t PromptLookup::GramAt(std::span<const int32_t> tokens, int32_t end) {
  uint64_t hash = 0;
  for (int32_t i = end - kGram; i < end; ++i) {
    hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  }
  return hash;
}

std::vector<int32_t> PromptLookup::Propose(std::span<const int32_t> tokens, int32_t most) {
  const auto size = static_cast<int32_t>(tokens.size());
  WINNOW_CHECK(before_.size() <= tokens.size());
  if (size < kGram || most <= 0) return {};
  // Ends that have a token after them.
  before_.reserve(tokens.size());
  while (static_cast<int32_t>(before_.size()) < size) {
    const auto end = static_cast<int32_t>(before_.size());
    int32_t previous = 0;
    if (end >= kGram) {
      int32_t& latest = latest_[GramAt(tokens, end)];
      previous = latest;
      latest = end;
    }
    before_.push_back(previous);
  }
  const auto found = latest_.find(GramAt(tokens, size));
  int32_t place = found == latest_.end() ? 0 : found->second;
  int32_t best = 0;
  int32_t best_length = kGram - 1;
  for (int32_t i = 0; i < kCandidates && place > 0; ++i, place = before_[place]) {
    int32_t length = 0;
    const int32_t longest = std::min(place, kLongest);
    while (length < longest && tokens[place - 1 - length] == tokens[size - 1 - length]) ++length;
    if (length > best_length) {
      best = place;
      best_length = length;
    }
  }
  std::vector<int32_t> proposal;
  if (best == 0) return proposal;
  for (int32_t i = 0; i < most; ++i) {
    proposal.push_back(best + i < size ? tokens[best + i] : proposal[best + i - size]);
  }
  return proposal;
}

}  // namespace winnow::engine

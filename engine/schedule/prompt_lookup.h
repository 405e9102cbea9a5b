// Drafts from a sequence's own text: what followed the last few tokens when they came before. Answers
// that quote, copy or repeat are drafted so without the model.
//
// Pure: the same tokens give the same proposal. Memory is 4 bytes a token and an entry for each
// different n-gram; a proposal looks at kCandidates places at most. One thread.
#ifndef WINNOW_ENGINE_SCHEDULE_PROMPT_LOOKUP_H_
#define WINNOW_ENGINE_SCHEDULE_PROMPT_LOOKUP_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace winnow::engine {

class PromptLookup {
 public:
  static constexpr int32_t kGram = 3;         // tokens that must agree
  static constexpr int32_t kCandidates = 32;  // places with an equal n-gram, the latest first
  static constexpr int32_t kLongest = 32;     // tokens before a place that are compared

  // At most `most` tokens that followed the place before the end of `tokens` where most of the last
  // tokens agree, the latest of those that are equally good; empty: the last kGram tokens are new.
  // A proposal that reaches the end of the text goes on with itself: a loop is drafted as one.
  // REQUIRES: `tokens` begins with those of the last call.
  std::vector<int32_t> Propose(std::span<const int32_t> tokens, int32_t most);

 private:
  static uint64_t GramAt(std::span<const int32_t> tokens, int32_t end);

  absl::flat_hash_map<uint64_t, int32_t> latest_;  // by hash of an n-gram: where it ended last
  std::vector<int32_t> before_;  // [tokens indexed] the end before, of the same hash; 0: none
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_PROMPT_LOOKUP_H_

// The known name that was probably meant by one that is not known.
#ifndef WINNOW_ENGINE_BASE_DID_YOU_MEAN_H_
#define WINNOW_ENGINE_BASE_DID_YOU_MEAN_H_

#include <span>
#include <string_view>

namespace winnow::engine {

// The name of `known` with the smallest edit distance to `word` (the first of equals), if that is
// at most a third of the word's length, and at least 1; otherwise "". A word of more than 64 bytes
// has none: it may come from a client, and must not cost quadratic time.
std::string_view NearestName(std::string_view word, std::span<const std::string_view> known);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_DID_YOU_MEAN_H_

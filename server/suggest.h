// "Did you mean": for a name that is not known, the known one that was probably meant.
#ifndef WINNOW_SERVER_SUGGEST_H_
#define WINNOW_SERVER_SUGGEST_H_

#include <span>
#include <string>
#include <string_view>

namespace winnow::server {

// ": did you mean NAME?" for the known name with the smallest edit distance, if it is at most a
// third of the name's length (and at least 1); otherwise "".
std::string DidYouMean(std::string_view name, std::span<const std::string> known);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_SUGGEST_H_

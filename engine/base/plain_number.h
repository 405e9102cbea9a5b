// Decimal numbers as policies write them: digits and a point alone, so that a number has few texts: no sign, no
// exponent, no "nan".
#ifndef WINNOW_ENGINE_BASE_PLAIN_NUMBER_H_
#define WINNOW_ENGINE_BASE_PLAIN_NUMBER_H_

#include <optional>
#include <string>
#include <string_view>

namespace winnow::engine {

// The double nearest to text * 10^exponent: a share must not be rounded once as a percentage and once more as a
// fraction. Nothing if `text` is no such number.
std::optional<double> ParsePlainNumber(std::string_view text, int exponent = 0);

// The fewest digits that parse back to `number`. REQUIRES: finite, not negative.
std::string PlainNumberText(double number);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_PLAIN_NUMBER_H_

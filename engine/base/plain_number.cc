#include "engine/base/plain_number.h"

#include <array>
#include <charconv>
#include <system_error>

#include "fmt/format.h"

namespace winnow::engine {

std::optional<double> ParsePlainNumber(std::string_view text, int exponent) {
  if (text.empty() || text.find_first_not_of("0123456789.") != std::string_view::npos)
    return std::nullopt;
  const std::string scaled = fmt::format("{}e{}", text, exponent);
  double number = 0;
  const auto [end, error] = std::from_chars(scaled.data(), scaled.data() + scaled.size(), number);
  if (error != std::errc() || end != scaled.data() + scaled.size()) return std::nullopt;
  return number;
}

std::string PlainNumberText(double number) {
  std::array<char, 400> digits;  // the smallest double has 324 places and 17 digits
  const auto [end, error] =
      std::to_chars(digits.data(), digits.data() + digits.size(), number, std::chars_format::fixed);
  return error == std::errc() ? std::string(digits.data(), end) : "";
}

}  // namespace winnow::engine

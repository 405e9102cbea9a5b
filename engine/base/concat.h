// Concat: absl::StrCat that also takes std::string_view. The packaged Abseil was built with its own
// string_view, to which a std::string_view does not convert.
#ifndef WINNOW_ENGINE_BASE_CONCAT_H_
#define WINNOW_ENGINE_BASE_CONCAT_H_

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace winnow::engine {

inline absl::string_view ToAbsl(std::string_view text) { return {text.data(), text.size()}; }

std::string Concat(const auto&... parts) {
  const auto convert = [](const auto& part) -> decltype(auto) {
    if constexpr (std::is_convertible_v<decltype(part), std::string_view>) {
      return ToAbsl(part);
    } else {
      return (part);
    }
  };
  return absl::StrCat(convert(parts)...);
}

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_BASE_CONCAT_H_

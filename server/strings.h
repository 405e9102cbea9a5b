// Strings across the seam: the packaged Abseil has its own string_view, the rest of the code the
// standard one.
#ifndef WINNOW_SERVER_STRINGS_H_
#define WINNOW_SERVER_STRINGS_H_

#include <string>
#include <string_view>

#include "absl/strings/string_view.h"
#include "engine/base/concat.h"

namespace winnow::server {

using engine::Concat;
using engine::ToAbsl;

inline std::string_view ToStd(absl::string_view text) { return {text.data(), text.size()}; }

void Append(std::string& out, const auto&... parts) { out += Concat(parts...); }

}  // namespace winnow::server

#endif  // WINNOW_SERVER_STRINGS_H_

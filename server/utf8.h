// Whether bytes are UTF-8: no overlong forms, no surrogates, nothing past U+10FFFF.
#ifndef WINNOW_SERVER_UTF8_H_
#define WINNOW_SERVER_UTF8_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace winnow::server {

// The offset of the first byte that is not part of a character; nothing if all are.
std::optional<size_t> InvalidUtf8At(std::string_view text);

// At most `max_bytes` of the text, cut between characters, invalid bytes as '?'.
std::string CleanUtf8(std::string_view text, size_t max_bytes);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_UTF8_H_

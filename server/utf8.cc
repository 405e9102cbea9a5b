#include "server/utf8.h"

#include <cstdint>

namespace winnow::server {
namespace {

// Length of the character at the front of `text`, 0 if there is none. The bounds of the second byte
// are those of table 3-7 of the Unicode standard: they exclude overlong forms and surrogates.
size_t CharacterLength(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  size_t length = 0;
  uint8_t low = 0x80, high = 0xbf;
  if (lead >= 0xc2 && lead <= 0xdf) {
    length = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    length = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    length = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return 0;
  }
  if (text.size() < length || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  }
  return length;
}

}  // namespace

std::optional<size_t> InvalidUtf8At(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t length = CharacterLength(text.substr(i));
    if (length == 0) return i;
    i += length;
  }
  return std::nullopt;
}

std::string CleanUtf8(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = CharacterLength(text.substr(i));
    const std::string_view piece = length == 0 ? "?" : text.substr(i, length);
    if (out.size() + piece.size() > max_bytes) break;
    out += piece;
    i += length == 0 ? 1 : length;
  }
  return out;
}

}  // namespace winnow::server

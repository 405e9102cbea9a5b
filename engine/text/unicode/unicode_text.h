// UTF-8 and the character classes that tokenisation needs, equal to the reference's for every code
// point.
//
// Pure functions; any thread.
#ifndef WINNOW_ENGINE_TEXT_UNICODE_TEXT_H_
#define WINNOW_ENGINE_TEXT_UNICODE_TEXT_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace winnow::engine {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// Offset of the first byte that does not belong to a well-formed character; npos if all is valid.
size_t FindInvalidUtf8(std::string_view text);

// The character at `offset` of valid UTF-8; `*length` becomes its size in bytes.
char32_t DecodeCodePoint(std::string_view text, size_t offset, int* length);

// Size in bytes of the character that begins with `lead` (valid UTF-8).
inline int CodePointLength(unsigned char lead) {
  return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

void AppendCodePoint(char32_t code_point, std::string* out);

// Appends `bytes` to `out` with each maximal ill-formed part replaced by U+FFFD (the practice of
// the Unicode standard, 3.9). With `more_may_follow`, an incomplete but so far well-formed
// character at the end is left over: returns the number of bytes consumed.
size_t AppendLossyUtf8(std::string_view bytes, bool more_may_follow, std::string* out);

bool IsWhiteSpace(char32_t code_point);  // property White_Space
bool IsNumeric(char32_t code_point);     // Nd, Nl, No
bool IsWord(char32_t code_point);        // regex \w of Unicode TR 18

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_UNICODE_TEXT_H_

// Python's view of strings: white space, case and classes of code points.
//
// Pure functions on valid UTF-8; any thread.
#ifndef WINNOW_ENGINE_TEXT_JINJA_UNICODE_H_
#define WINNOW_ENGINE_TEXT_JINJA_UNICODE_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace winnow::engine::jinja {

bool IsPythonSpace(char32_t c);  // str.isspace
// Sizes in bytes of the white space at the ends.
size_t LeadingSpace(std::string_view text);
size_t TrailingSpace(std::string_view text);

// Number of code points.
size_t Length(std::string_view text);
// Where code point `index` begins; text.size() if there are fewer.
size_t OffsetOf(std::string_view text, size_t index);
// Where the code point before `end` begins. REQUIRES: end > 0.
size_t PreviousOffset(std::string_view text, size_t end);

enum class Case { kUpper, kLower, kTitle };
// Appends the full case mapping of `c`, which may be several code points.
void AppendCase(char32_t c, Case to, std::string* out);

bool IsUpper(char32_t c);
bool IsLower(char32_t c);
bool IsTitle(char32_t c);
bool IsCased(char32_t c);
// Whether `c` is passed over when a final sigma is looked for.
bool IsCaseIgnorable(char32_t c);
bool IsAlpha(char32_t c);
bool IsDecimal(char32_t c);
bool IsDigit(char32_t c);
bool IsNumericChar(char32_t c);
bool IsPrintable(char32_t c);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_UNICODE_H_

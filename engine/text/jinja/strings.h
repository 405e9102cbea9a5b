// Python's string operations on marked text. Each keeps for every byte of its result where that
// byte came from.
//
// Pure functions; any thread. Callers bound the sizes.
#ifndef WINNOW_ENGINE_TEXT_JINJA_STRINGS_H_
#define WINNOW_ENGINE_TEXT_JINJA_STRINGS_H_

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "engine/text/jinja/marked_text.h"
#include "engine/text/jinja/unicode.h"

namespace winnow::engine::jinja {

enum class Side { kLeft, kRight, kBoth };

// Strips the code points of `characters`, or white space without any.
MarkedText Strip(const MarkedText& text, Side side, const std::string_view* characters);
// At most `count` times; all, if `count` is negative.
MarkedText Replace(const MarkedText& text, std::string_view from, const MarkedText& to,
                   int64_t count);
// Number of non-overlapping occurrences; of an empty `part`, code points + 1.
int64_t CountOf(std::string_view text, std::string_view part);
// str.split and str.rsplit; at white space without a separator. REQUIRES: *separator not empty.
std::vector<MarkedText> Split(const MarkedText& text, const std::string_view* separator,
                              int64_t max, bool from_right);
std::vector<MarkedText> SplitLines(const MarkedText& text, bool keep_ends);
MarkedText ToCase(const MarkedText& text, Case to);
MarkedText Capitalize(const MarkedText& text);
MarkedText TitleCase(const MarkedText& text);  // str.title
MarkedText SwapCase(const MarkedText& text);
// `fill` times n in front and behind.
MarkedText Pad(const MarkedText& text, std::string_view fill, bool user_fill, size_t before,
               size_t after);
// Whether there is a code point and all are of the class.
bool AllOf(std::string_view text, const std::function<bool(char32_t)>& is);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_STRINGS_H_

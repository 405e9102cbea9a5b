// Text forms that several parts of the interpreter share: Python's two ways to format, JSON, and
// HTML escapes.
#ifndef WINNOW_ENGINE_TEXT_JINJA_FORMAT_H_
#define WINNOW_ENGINE_TEXT_JINJA_FORMAT_H_

#include <string>
#include <string_view>

#include "engine/text/jinja/interpreter.h"

namespace winnow::engine::jinja {

// repr() of a float, as short as possible.
void AppendFloatRepr(double value, std::string* out);

// format % values. REQUIRES: `format` is a string.
Value FormatPercent(Interpreter& interpreter, const Value& format, const Value& values);
// str.format. REQUIRES: `format` is a string.
Value FormatBraces(Interpreter& interpreter, const Value& format, Arguments arguments);

// json.dumps as transformers' tojson filter calls it.
Value ToJson(Interpreter& interpreter, const Value& value, Arguments arguments);

// Markup with HTML's special characters escaped; what is Markup already stays as it is.
Value Escape(Interpreter& interpreter, const Value& value);

// str.replace with its bounds checked. REQUIRES: `self` is a string.
Value ReplaceIn(Interpreter& interpreter, const Value& self, const Value& from, const Value& to,
                int64_t count);

// str.isupper, str.islower.
bool IsCaseOf(std::string_view text, bool upper);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_FORMAT_H_

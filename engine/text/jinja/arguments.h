// Binds the arguments of a call to named parameters, with Python's errors.
#ifndef WINNOW_ENGINE_TEXT_JINJA_ARGUMENTS_H_
#define WINNOW_ENGINE_TEXT_JINJA_ARGUMENTS_H_

#include <initializer_list>
#include <string_view>
#include <vector>

#include "engine/text/jinja/interpreter.h"

namespace winnow::engine::jinja {

// One value for each of `names`, kMissing where none was given; the first `required` must be.
// `of` names the function in errors.
std::vector<Value> Bind(Interpreter& interpreter, std::string_view of, Arguments arguments,
                        std::initializer_list<std::string_view> names, size_t required);

// The value as an integer, `fallback` if it is missing or None. An error: another type.
int64_t IntOr(Interpreter& interpreter, const Value& value, int64_t fallback);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_ARGUMENTS_H_

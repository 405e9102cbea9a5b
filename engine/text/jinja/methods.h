// Methods of Python's str, list, tuple and dict that templates may call.
#ifndef WINNOW_ENGINE_TEXT_JINJA_METHODS_H_
#define WINNOW_ENGINE_TEXT_JINJA_METHODS_H_

#include <string_view>

#include "engine/text/jinja/interpreter.h"

namespace winnow::engine::jinja {

// The bound method `name` of `self`; false: its type has none. Methods that change their object
// are there, but undefined, as in Jinja's immutable sandbox; one that winnow lacks is an error
// when it is called.
bool FindMethod(Interpreter& interpreter, const Value& self, std::string_view name, Value* out);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_METHODS_H_

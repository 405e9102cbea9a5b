// Filters and tests: the names that Jinja has, and what the interpreter does for each.
#ifndef WINNOW_ENGINE_TEXT_JINJA_FILTERS_H_
#define WINNOW_ENGINE_TEXT_JINJA_FILTERS_H_

#include <string_view>

namespace winnow::engine::jinja {

// Whether winnow has the filter or the test. Interpreter::ApplyFilter and ApplyTest run them.
bool IsFilter(std::string_view name);
bool IsTest(std::string_view name);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_FILTERS_H_

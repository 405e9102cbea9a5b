// Parses a Jinja template, as the chat templates of models are: once, to be run any number of
// times and by any thread with an Interpreter each.
#ifndef WINNOW_ENGINE_TEXT_JINJA_TEMPLATE_H_
#define WINNOW_ENGINE_TEXT_JINJA_TEMPLATE_H_

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/text/jinja/limits.h"
#include "engine/text/jinja/syntax_tree.h"

namespace winnow::engine::jinja {

// InvalidArgument: "line N: ...", also for a text that is larger than the limit or not UTF-8.
absl::StatusOr<std::shared_ptr<const SyntaxTree>> ParseTemplate(std::string_view source,
                                                                const Limits& limits);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_TEMPLATE_H_

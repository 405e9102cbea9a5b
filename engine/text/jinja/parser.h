// Template text to syntax tree: the grammar of Jinja 3.1 with transformers' extensions (break,
// continue, generation). What a chat template has no use for (blocks, extends, include, import,
// autoescape) is refused by name.
//
// A pure function. InvalidArgument: "line N: ...", also for text that nests too deeply.
#ifndef WINNOW_ENGINE_TEXT_JINJA_PARSER_H_
#define WINNOW_ENGINE_TEXT_JINJA_PARSER_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "engine/text/jinja/syntax_tree.h"

namespace winnow::engine::jinja {

// Expressions and statements may nest so deeply together.
inline constexpr int kParserDepthMax = 200;
// Depth of one expression's tree, in which a chain of operators is as deep as it is long.
inline constexpr int kExpressionDepthMax = 400;

// Variables are not resolved yet; see resolver.h. REQUIRES: valid UTF-8.
absl::StatusOr<SyntaxTree> Parse(std::string_view source);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_PARSER_H_

// Cuts a template into tokens, as Jinja does with trim_blocks and lstrip_blocks.
//
// A pure function.
#ifndef WINNOW_ENGINE_TEXT_JINJA_LEXER_H_
#define WINNOW_ENGINE_TEXT_JINJA_LEXER_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::engine::jinja {

enum class TokenType {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenType type;
  int line;          // from 1
  std::string text;  // data, name, unescaped string, operator, digits without underscores

  bool IsName(std::string_view name) const { return type == TokenType::kName && text == name; }
  bool IsOperator(std::string_view name) const {
    return type == TokenType::kOperator && text == name;
  }
};

// The last token is kEnd. InvalidArgument: "line N: ...". REQUIRES: valid UTF-8.
absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source);

}  // namespace winnow::engine::jinja

#endif  // WINNOW_ENGINE_TEXT_JINJA_LEXER_H_

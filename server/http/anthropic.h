// Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens. Stateless; text, tools and reasoning.
#ifndef WINNOW_SERVER_HTTP_ANTHROPIC_H_
#define WINNOW_SERVER_HTTP_ANTHROPIC_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/http/answer_format.h"
#include "server/http/model_habits.h"
#include "server/parse/answer_parser.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

struct AnthropicRequest {
  v1::GenerateRequest generate;
  std::string model;
  bool stream = false;
  // By message of the prompt, what it was made of: "system", "messages[3]".
  std::vector<std::string> paths;
  AnswerParserOptions parser;  // of the answer; in_reasoning is not known here
  bool shows_reasoning = false;
  std::string structured_field;  // the client's name of what asks for a form of the answer
};

// `counting`: a body of count_tokens, which needs no max_tokens. What clients put at the head of
// every prompt anew (a billing header, a token counter) is dropped: it would make each prompt begin
// differently, and none would be found in the cache. InvalidArgument as ParseChatRequest.
absl::StatusOr<AnthropicRequest> ParseAnthropicRequest(std::string_view body, bool counting,
                                                       const ModelHabits& habits = {});

struct AnthropicAnswerOptions {
  std::string model;
  bool stream = false;
  std::vector<std::string> paths;
  AnswerParserOptions parser;
  bool shows_reasoning =
      false;  // else it is left out: a client that did not ask knows no such blocks
  std::string structured_field;
  // The request's. An answer that ends at its limit with fewer has filled the context.
  int32_t max_tokens = 0;
};
std::unique_ptr<AnswerFormat> MakeAnthropicFormat(AnthropicAnswerOptions options);

// {"type": "error", "error": {...}}
std::string AnthropicErrorBody(const HttpError& error);
// The client's name for a field that the validator names.
std::string AnthropicField(std::string_view field, const std::vector<std::string>& paths,
                           const std::string& structured_field);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_ANTHROPIC_H_

// Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens. Stateless; text only.
#ifndef WINNOW_SERVER_HTTP_ANTHROPIC_H_
#define WINNOW_SERVER_HTTP_ANTHROPIC_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/http/answer_format.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

struct AnthropicRequest {
  v1::GenerateRequest generate;
  std::string model;
  bool stream = false;
  bool has_system = false;  // the first of the messages is the system's text
};

// `counting`: a body of count_tokens, which needs no max_tokens. What clients put at the head of
// every prompt anew (a billing header, a token counter) is dropped: it would make each prompt begin
// differently, and none would be found in the cache. InvalidArgument as ParseChatRequest.
absl::StatusOr<AnthropicRequest> ParseAnthropicRequest(std::string_view body, bool counting);

std::unique_ptr<AnswerFormat> MakeAnthropicFormat(std::string model, bool stream, bool has_system);

// {"type": "error", "error": {...}}
std::string AnthropicErrorBody(const HttpError& error);
// The client's name for a field that the validator names.
std::string AnthropicField(std::string_view field, bool has_system);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_ANTHROPIC_H_

// OpenAI's Responses API, /v1/responses, without state: each request brings its whole history.
// Text, functions and reasoning.
#ifndef WINNOW_SERVER_HTTP_RESPONSES_H_
#define WINNOW_SERVER_HTTP_RESPONSES_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "server/http/answer_format.h"
#include "server/http/model_habits.h"
#include "server/parse/answer_parser.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

struct ResponsesRequest {
  v1::GenerateRequest generate;
  std::string model;
  bool stream = false;
  nlohmann::ordered_json echoed;  // what the answer repeats of the request
  AnswerParserOptions parser;     // of the answer; in_reasoning is not known here
  std::string structured_field;   // the client's name of what became structured_output
};

// InvalidArgument as ParseChatRequest. A conversation that the server should remember
// (previous_response_id, conversation, background) is refused by name.
absl::StatusOr<ResponsesRequest> ParseResponsesRequest(std::string_view body,
                                                       const ModelHabits& habits = {});

struct ResponsesAnswerOptions {
  std::string model;
  bool stream = false;
  nlohmann::ordered_json echoed;
  AnswerParserOptions parser;
  std::string structured_field;
};
std::unique_ptr<AnswerFormat> MakeResponsesFormat(ResponsesAnswerOptions options);

// The client's name for a field that the validator names.
std::string ResponsesField(std::string_view field, const std::string& structured_field);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_RESPONSES_H_

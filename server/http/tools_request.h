// Functions that a request offers, and what is to be done with them, from any of the three APIs.
//
//   Take...Tools    what the client wrote: types and names
//   ApplyTools      what follows for the prompt, the grammar of the answer, and its parser
#ifndef WINNOW_SERVER_HTTP_TOOLS_REQUEST_H_
#define WINNOW_SERVER_HTTP_TOOLS_REQUEST_H_

#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/http/json_fields.h"
#include "server/http/model_habits.h"
#include "server/parse/answer_parser.h"
#include "winnow/v1/inference.pb.h"

namespace winnow::server {

struct RequestedTool {
  std::string name;
  nlohmann::ordered_json parameters;  // a JSON schema
  bool strict = false;
  nlohmann::ordered_json shown;  // to the model: {"type": "function", "function": {...}}
  // Held back: not shown at the head of the prompt, and not there for the model until a search found it.
  bool deferred = false;
  bool found = false;
};

struct RequestedTools {
  enum class Choice { kAuto, kNone, kRequired, kNamed };
  std::vector<RequestedTool> tools;
  Choice choice = Choice::kAuto;
  std::string named;
  bool parallel = true;
};

// `body` is the text that `fields` was parsed from: tools keep the order of their members, as the model reads them.
// OpenAI's chat: {"type": "function", "function": {...}}.
RequestedTools TakeChatTools(std::string_view body, JsonFields& fields);
// The Responses: {"type": "function", "name", ...}. Tools of other types are passed over, as a server that runs them
// itself would be another.
RequestedTools TakeResponsesTools(std::string_view body, JsonFields& fields);
// Anthropic's: {"name", "input_schema", "defer_loading"}. Messages say what was found.
RequestedTools TakeAnthropicTools(std::string_view body, JsonFields& fields);

// Puts the tools into the chat, and where the answer has to call one, or its arguments have to be of a schema, that
// into out.structured_output. Returns how the answer is to be read; of reasoning it knows nothing.
AnswerParserOptions ApplyTools(const RequestedTools& requested, const ModelHabits& habits,
                               JsonFields& fields, v1::GenerateRequest& out);

// A name for a call, which its result refers to: nine letters and digits, because some templates take no others.
std::string CallId(std::string_view generation, int32_t choice, size_t index);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_TOOLS_REQUEST_H_

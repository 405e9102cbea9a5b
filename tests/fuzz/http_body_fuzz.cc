// Bodies of the HTTP routes that take JSON. The first byte chooses the route and the served model's habits: how it calls
// functions, and whether it thinks. A body that is taken makes a message that Protobuf writes and reads back; one that
// is not has a status with a message that is UTF-8.
//
// Protos: winnow/v1/inference.proto winnow/v1/prefix.proto google/rpc/status.proto google/rpc/error_details.proto
// Sources: server/http/anthropic.cc server/http/http_error.cc server/http/http_exchange.cc server/http/json_fields.cc
// Sources: server/http/harmony_request.cc server/http/openai_answer.cc server/http/openai_request.cc server/http/prefix_request.cc server/http/responses.cc server/status.cc
// Sources: server/http/structured_request.cc server/http/tools_request.cc server/ordered_json.cc server/parse/answer_parser.cc
// Sources: server/parse/json_call.cc engine/kv/block_name.cc
// Sources: server/suggest.cc server/utf8.cc engine/base/did_you_mean.cc engine/base/json_file.cc engine/text/added_tokens.cc engine/text/bpe.cc
// Sources: engine/text/bpe_load.cc engine/text/detokenizer.cc engine/text/post_processor.cc engine/text/pre_tokenizer.cc
// Sources: engine/text/token_decoder.cc engine/text/tokenizer.cc engine/text/tokenizer_encode.cc
// Sources: engine/text/tokenizer_json.cc engine/text/tokenizer_normalizer.cc engine/text/tokenizer_regex.cc
// Sources: engine/text/tokenizer_regex_syntax.cc engine/text/unicode_normalize.cc engine/text/unicode/unicode_tables.cc
// Sources: engine/text/unicode/unicode_text.cc kernels/check.cc
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"
#include "server/http/anthropic.h"
#include "server/http/http_error.h"
#include "server/http/model_habits.h"
#include "server/http/openai_request.h"
#include "server/http/prefix_request.h"
#include "server/http/responses.h"

namespace server = winnow::server;

namespace {

void CheckError(const absl::Status& status) {
  WINNOW_CHECK(!status.ok());
  const server::HttpError error = server::ToHttpError(status, {});
  WINNOW_CHECK(error.status >= 400 && error.status < 500);
  WINNOW_CHECK(winnow::engine::FindInvalidUtf8(error.message) == std::string::npos);
  WINNOW_CHECK(!server::OpenAiErrorBody(error).empty());
}

void CheckMessage(const google::protobuf::Message& message) {
  const std::string bytes = message.SerializeAsString();
  winnow::v1::GenerateRequest again;
  if (message.GetDescriptor() == again.GetDescriptor()) WINNOW_CHECK(again.ParseFromString(bytes));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data + 1), size - 1);
  const int kind = data[0] / 9;
  server::ModelHabits habits;
  habits.tools = static_cast<server::ToolFormat>(kind % 4);
  if ((kind & 4) != 0) habits.reasoning = server::ReasoningFormat::kThink;
  habits.has_effort = (kind & 8) != 0;
  if ((kind & 16) != 0) {
    habits.tools = (kind & 1) != 0 ? server::ToolFormat::kHarmony : server::ToolFormat::kNone;
    habits.reasoning = server::ReasoningFormat::kHarmony;
    habits.harmony = server::HarmonyTokens{
        .start = 1, .channel = 2, .message = 3, .end = 4, .constrain = 5, .ends_turn = {7, 6}};
  }
  if (habits.tools == server::ToolFormat::kMistral) {
    habits.calls_token = 5;
    if ((kind & 8) != 0) habits.arguments_token = 6;
  }
  const auto check = [](const auto& parsed, const auto& message) {
    if (parsed.ok()) {
      CheckMessage(message(*parsed));
    } else {
      CheckError(parsed.status());
    }
  };
  const auto generate = [](const auto& parsed) -> const google::protobuf::Message& {
    return parsed.generate;
  };
  switch (data[0] % 9) {
    case 0:
      check(server::ParseChatRequest(body, habits), generate);
      break;
    case 1:
      check(server::ParseCompletionRequest(body), generate);
      break;
    case 2:
      check(server::ParseAnthropicRequest(body, /*counting=*/(data[0] & 0x80) != 0, habits),
            generate);
      break;
    case 3:
      check(server::ParseResponsesRequest(body, habits), generate);
      break;
    case 4:
      check(server::ParseTokenizeBody(body, habits),
            [](const auto& parsed) -> const google::protobuf::Message& { return parsed.prompt; });
      break;
    case 5:
      check(server::ParseDetokenizeBody(body),
            [](const auto& parsed) -> const google::protobuf::Message& { return parsed.request; });
      break;
    case 7:
      check(server::ParsePutPrefixBody(body, habits),
            [](const auto& parsed) -> const google::protobuf::Message& { return parsed.request; });
      break;
    case 8:
      check(server::ParsePinPrefixBody(body),
            [](const auto& parsed) -> const google::protobuf::Message& { return parsed; });
      break;
    default:
      if (const auto parsed = server::ParseRenderBody(body); !parsed.ok()) {
        CheckError(parsed.status());
      } else {
        for (const auto& prompt : parsed->prompts) CheckMessage(prompt);
      }
  }
  return 0;
}

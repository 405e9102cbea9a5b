#include "server/http/anthropic.h"

#include <array>
#include <utility>

#include "absl/strings/numbers.h"
#include "engine/status_macros.h"
#include "server/http/json_fields.h"
#include "server/http/openai_answer.h"
#include "server/http/openai_request.h"
#include "server/strings.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

using Json = nlohmann::json;
using OutJson = nlohmann::ordered_json;

constexpr std::string_view kBillingHeader = "x-anthropic-billing-header:";
constexpr std::string_view kCounterBegin = "<total_tokens>";
constexpr std::string_view kCounterEnd = "tokens left</total_tokens>";

// A counter of tokens and nothing else.
bool IsTokenCounter(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == text.npos) return false;
  text = text.substr(first, text.find_last_not_of(" \t\r\n") + 1 - first);
  return text.starts_with(kCounterBegin) && text.ends_with(kCounterEnd) &&
         text.find('<', 1) == text.size() - std::string_view("</total_tokens>").size();
}

const std::string* TextOf(const Json& block) {
  if (!block.is_object()) return nullptr;
  const auto text = block.find("text");
  return text == block.end() ? nullptr : text->get_ptr<const std::string*>();
}

// Drops from a list of blocks what changes with every request.
void DropNonces(Json& content, bool system) {
  if (!content.is_array()) return;
  if (const std::string* const first = content.empty() ? nullptr : TextOf(content[0]);
      system && first != nullptr && first->starts_with(kBillingHeader)) {
    content.erase(content.begin());
  }
  for (auto it = content.begin(); it != content.end();) {
    const std::string* const text = TextOf(*it);
    it = text != nullptr && IsTokenCounter(*text) ? content.erase(it) : std::next(it);
  }
}

void TakeSystem(JsonFields& fields, v1::ChatPrompt& out) {
  Json* const system = fields.Find("system");
  if (system == nullptr) return;
  DropNonces(*system, /*system=*/true);
  std::string text = TakeContent(*system, "system", fields.violations());
  if (text.starts_with(kBillingHeader)) {
    const size_t line = text.find('\n');
    text = line == text.npos ? "" : text.substr(line + 1);
  }
  if (text.empty()) return;
  v1::ChatMessage& message = *out.add_messages();
  message.set_role("system");
  message.set_content(std::move(text));
}

void TakeMessages(JsonFields& fields, v1::ChatPrompt& out) {
  Json* const messages = fields.Array("messages");
  if (messages == nullptr) return;
  for (size_t i = 0; i < messages->size() && i <= kMaxMessages; ++i) {
    const std::string path = Concat("messages[", i, "]");
    if (!(*messages)[i].is_object()) {
      fields.Add(path, "must be an object");
      continue;
    }
    JsonFields message((*messages)[i], fields.violations(), path + ".");
    v1::ChatMessage& turn = *out.add_messages();
    turn.set_role(message.String("role").value_or(""));
    Json* const content = message.Find("content");
    if (content == nullptr) {
      message.Add("content", "must be set");
      continue;
    }
    DropNonces(*content, /*system=*/false);
    turn.set_content(TakeContent(*content, message.Path("content"), fields.violations()));
  }
}

void TakeStops(JsonFields& fields, v1::StoppingOptions& out) {
  Json* const stops = fields.Array("stop_sequences");
  if (stops == nullptr) return;
  for (size_t i = 0; i < stops->size() && i <= kMaxStopStrings; ++i) {
    if ((*stops)[i].is_string()) {
      out.add_stop_strings(std::move((*stops)[i].get_ref<std::string&>()));
    } else {
      fields.Add(Concat("stop_sequences[", i, "]"), "must be a string");
    }
  }
}

const char* StopReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_MAX_TOKENS:
      return "max_tokens";
    case v1::FINISH_REASON_STOP_STRING:
      return "stop_sequence";
    default:
      return "end_turn";
  }
}

class AnthropicFormat final : public AnswerFormat {
 public:
  AnthropicFormat(std::string model, bool stream, bool has_system)
      : model_(std::move(model)), stream_(stream), has_system_(has_system) {}

  bool streamed() const override { return stream_; }
  void Begin(const std::string& name, int64_t) override { id_ = Concat("msg_", name); }

  void Add(const v1::GenerateResponse& message, int32_t prompt_tokens, std::string& out) override {
    if (message.has_finish()) {
      finish_ = message.finish();
      usage_.Add(message.finish().usage());
    }
    if (!stream_) {
      text_ += message.text();
      return;
    }
    if (!std::exchange(begun_, true)) {
      OutJson start = Message(OutJson::array(), nullptr, nullptr);
      start["usage"] = {{"input_tokens", prompt_tokens},
                        {"cache_creation_input_tokens", 0},
                        {"cache_read_input_tokens", 0},
                        {"output_tokens", 0}};
      Event("message_start", {{"message", std::move(start)}}, out);
      Event("content_block_start",
            {{"index", 0}, {"content_block", {{"type", "text"}, {"text", ""}}}}, out);
    }
    if (!message.text().empty()) {
      Event("content_block_delta",
            {{"index", 0}, {"delta", {{"type", "text_delta"}, {"text", message.text()}}}}, out);
    }
  }

  void End(std::string& out) override {
    const char* const reason = StopReasonName(finish_.reason());
    OutJson sequence = nullptr;
    if (!finish_.stop_string().empty()) sequence = finish_.stop_string();
    if (!stream_) {
      OutJson block = {{"type", "text"}, {"text", text_}};
      OutJson message = Message(OutJson::array({std::move(block)}), reason, std::move(sequence));
      message["usage"] = Usage();
      out = Dump(message);
      return;
    }
    Event("content_block_stop", {{"index", 0}}, out);
    Event("message_delta",
          {{"delta", {{"stop_reason", reason}, {"stop_sequence", std::move(sequence)}}},
           {"usage", Usage()}},
          out);
    Event("message_stop", OutJson::object(), out);
  }

  void Break(const HttpError& error, std::string& out) override {
    Append(out, "event: error\ndata: ", AnthropicErrorBody(error), "\n\n");
  }
  void Ping(std::string& out) override { Event("ping", OutJson::object(), out); }
  std::string ErrorBody(const HttpError& error) const override { return AnthropicErrorBody(error); }
  std::string Field(std::string_view field) const override {
    return AnthropicField(field, has_system_);
  }

 private:
  static void Event(std::string_view type, const OutJson& fields, std::string& out) {
    OutJson data;
    data["type"] = type;
    data.update(fields);
    Append(out, "event: ", type, "\ndata: ", Dump(data), "\n\n");
  }

  OutJson Message(OutJson content, OutJson reason, OutJson sequence) const {
    OutJson message;
    message["id"] = id_;
    message["type"] = "message";
    message["role"] = "assistant";
    message["model"] = model_;
    message["content"] = std::move(content);
    message["stop_reason"] = std::move(reason);
    message["stop_sequence"] = std::move(sequence);
    return message;
  }

  // Input tokens are those that were computed; what came from the cache is told apart.
  OutJson Usage() const {
    const int32_t cached = usage_.cached_tokens.value_or(0);
    OutJson usage = {{"input_tokens", usage_.prompt_tokens - cached},
                     {"cache_creation_input_tokens", 0},
                     {"cache_read_input_tokens", cached},
                     {"output_tokens", usage_.generated_tokens}};
    usage["winnow"] = WinnowUsage(usage_);
    return usage;
  }

  const std::string model_;
  const bool stream_;
  const bool has_system_;
  std::string id_, text_;
  bool begun_ = false;
  v1::Finish finish_;
  UsageSum usage_;
};

}  // namespace

absl::StatusOr<AnthropicRequest> ParseAnthropicRequest(std::string_view body, bool counting) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  AnthropicRequest out;
  if (auto model = fields.String("model")) out.model = *std::move(model);
  fields.Refuse("tools", "is not served");
  fields.Refuse("mcp_servers", "is not served");
  fields.Refuse("container", "is not served");
  TakeSystem(fields, *out.generate.mutable_chat());
  out.has_system = out.generate.chat().messages_size() > 0;
  TakeMessages(fields, *out.generate.mutable_chat());
  if (!counting) {
    out.stream = fields.Bool("stream").value_or(false);
    TakeSampling(fields, *out.generate.mutable_sampling());
    TakeStops(fields, *out.generate.mutable_stopping());
    TakeWinnowOptions(fields, out.generate);
    const std::optional<int32_t> max_tokens = fields.Int32("max_tokens");
    if (max_tokens.has_value()) {
      out.generate.mutable_stopping()->set_max_tokens(*max_tokens);
    } else if (fields.Find("max_tokens") == nullptr) {
      fields.Add("max_tokens", "must be set");
    }
  }
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

std::unique_ptr<AnswerFormat> MakeAnthropicFormat(std::string model, bool stream, bool has_system) {
  return std::make_unique<AnthropicFormat>(std::move(model), stream, has_system);
}

std::string AnthropicErrorBody(const HttpError& error) {
  std::string_view type = error.type;
  if (error.status == 413) type = "request_too_large";
  if (error.status >= 500) type = error.status == 503 ? "overloaded_error" : "api_error";
  OutJson body;
  body["type"] = "error";
  body["error"]["type"] = type;
  body["error"]["message"] = error.message;
  return Dump(body);
}

std::string AnthropicField(std::string_view field, bool has_system) {
  constexpr std::string_view kMessages = "chat.messages[";
  if (has_system && field.starts_with(kMessages)) {
    const size_t end = field.find(']');
    int index = 0;
    if (end == field.npos ||
        !absl::SimpleAtoi(ToAbsl(field.substr(kMessages.size(), end - kMessages.size())), &index)) {
      return "messages";
    }
    if (index == 0) return "system";
    return Concat("messages[", index - 1, field.substr(end));
  }
  constexpr std::string_view kStops = "stopping.stop_strings";
  if (field.starts_with(kStops)) return Concat("stop_sequences", field.substr(kStops.size()));
  return OpenAiField(field, /*chat=*/true);
}

}  // namespace winnow::server

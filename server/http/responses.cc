#include "server/http/responses.h"

#include <array>
#include <utility>

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

constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kRefused = {{
    {"previous_response_id", "is not served: send the whole conversation as input"},
    {"conversation", "is not served: send the whole conversation as input"},
    {"background", "is not served"},
    {"prompt", "is not served: stored prompts"},
    {"top_logprobs", "is not served here"},
    {"max_tool_calls", "is not served"},
}};

void RefuseTools(JsonFields& fields) {
  Json* const tools = fields.Array("tools");
  for (size_t i = 0; tools != nullptr && i < tools->size(); ++i) {
    const Json& tool = (*tools)[i];
    const auto type = tool.is_object() ? tool.find("type") : tool.end();
    // Tools that the server of a kind would run itself are passed over, as other servers do.
    if (tool.is_object() && type != tool.end() && *type == "function") {
      fields.Add(Concat("tools[", i, "]"), "functions are not served");
      return;
    }
  }
  if (Json* const text = fields.Object("text")) {
    const auto format = text->find("format");
    const bool is_text =
        format == text->end() || format->is_null() ||
        (format->is_object() && format->contains("type") && (*format)["type"] == "text");
    if (!is_text) fields.Add("text.format", "is not served but for type \"text\"");
  }
}

void AddMessage(std::string role, std::string content, v1::ChatPrompt& out) {
  v1::ChatMessage& message = *out.add_messages();
  message.set_role(role == "developer" ? "system" : std::move(role));
  message.set_content(std::move(content));
}

void TakeItem(Json& item, const std::string& path, Violations& violations, v1::ChatPrompt& out) {
  if (!item.is_object()) {
    violations.Add(path, "must be an object");
    return;
  }
  JsonFields fields(item, violations, path + ".");
  const std::string type = fields.String("type").value_or("message");
  if (type == "reasoning") return;  // of an earlier answer: not part of the prompt
  if (type != "message") {
    fields.Add("type", Concat("\"", type.substr(0, 40), "\" is not served"));
    return;
  }
  Json* const content = fields.Find("content");
  if (content == nullptr) {
    fields.Add("content", "must be set");
    return;
  }
  AddMessage(fields.String("role").value_or(""),
             TakeContent(*content, fields.Path("content"), violations), out);
}

void TakeInput(JsonFields& fields, v1::ChatPrompt& out) {
  if (auto instructions = fields.String("instructions"); instructions && !instructions->empty()) {
    AddMessage("system", *std::move(instructions), out);
  }
  Json* const input = fields.Find("input");
  if (input == nullptr) {
    fields.Add("input", "must be set");
  } else if (input->is_string()) {
    AddMessage("user", std::move(input->get_ref<std::string&>()), out);
  } else if (!input->is_array()) {
    fields.Add("input", "must be a string or a list of items");
  } else if (input->empty()) {
    AddMessage("user", "", out);  // how clients ask whether the server is there
  } else {
    for (size_t i = 0; i < input->size() && i <= kMaxMessages; ++i) {
      TakeItem((*input)[i], Concat("input[", i, "]"), fields.violations(), out);
    }
  }
}

class ResponsesFormat final : public AnswerFormat {
 public:
  ResponsesFormat(std::string model, bool stream, OutJson echoed)
      : model_(std::move(model)), stream_(stream), echoed_(std::move(echoed)) {}

  bool streamed() const override { return stream_; }
  void Begin(const std::string& name, int64_t created) override {
    id_ = Concat("resp_", name);
    item_ = Concat("msg_", name);
    created_ = created;
  }

  void Add(const v1::GenerateResponse& message, int32_t, std::string& out) override {
    if (message.has_finish()) {
      finish_ = message.finish();
      usage_.Add(message.finish().usage());
    }
    text_ += message.text();
    if (!stream_) return;
    if (!std::exchange(begun_, true)) {
      Event("response.created", {{"response", Response("in_progress")}}, out);
      Event("response.in_progress", {{"response", Response("in_progress")}}, out);
      Event("response.output_item.added",
            {{"output_index", 0}, {"item", Item("in_progress", OutJson::array())}}, out);
      Event("response.content_part.added", InPart({{"part", Part("")}}), out);
    }
    if (message.text().empty()) return;
    Event("response.output_text.delta",
          InPart({{"delta", message.text()}, {"logprobs", OutJson::array()}}), out);
  }

  void End(std::string& out) override {
    const bool whole = finish_.reason() != v1::FINISH_REASON_MAX_TOKENS;
    const char* const status = whole ? "completed" : "incomplete";
    OutJson item = Item(status, OutJson::array({Part(text_)}));
    OutJson response = Response(status);
    response["output"] = OutJson::array({item});
    response["usage"] = Usage();
    if (!whole) response["incomplete_details"] = {{"reason", "max_output_tokens"}};
    if (!stream_) {
      out = Dump(response);
      return;
    }
    Event("response.output_text.done", InPart({{"text", text_}, {"logprobs", OutJson::array()}}),
          out);
    Event("response.content_part.done", InPart({{"part", Part(text_)}}), out);
    Event("response.output_item.done", {{"output_index", 0}, {"item", std::move(item)}}, out);
    Event(Concat("response.", status), {{"response", std::move(response)}}, out);
  }

  void Break(const HttpError& error, std::string& out) override {
    OutJson response = Response("failed");
    response["error"] = {{"code", error.code}, {"message", error.message}};
    Event("response.failed", {{"response", std::move(response)}}, out);
  }

  std::string Field(std::string_view field) const override {
    if (field == "stopping.max_tokens") return "max_output_tokens";
    // Which item a message came from is not known any more.
    if (field.starts_with("chat.messages")) return "input";
    return OpenAiField(field, /*chat=*/true);
  }

 private:
  void Event(std::string_view type, const OutJson& fields, std::string& out) {
    OutJson data;
    data["type"] = type;
    data["sequence_number"] = sequence_++;
    data.update(fields);
    Append(out, "event: ", type, "\ndata: ", Dump(data), "\n\n");
  }

  // Fields of an event about the one part of the one item.
  OutJson InPart(const OutJson& fields) const {
    OutJson out = {{"item_id", item_}, {"output_index", 0}, {"content_index", 0}};
    out.update(fields);
    return out;
  }

  static OutJson Part(const std::string& text) {
    OutJson part;
    part["type"] = "output_text";
    part["text"] = text;
    part["annotations"] = OutJson::array();
    part["logprobs"] = OutJson::array();
    return part;
  }

  OutJson Item(const char* status, OutJson content) const {
    OutJson item;
    item["id"] = item_;
    item["type"] = "message";
    item["status"] = status;
    item["role"] = "assistant";
    item["content"] = std::move(content);
    return item;
  }

  OutJson Response(const char* status) const {
    OutJson response;
    response["id"] = id_;
    response["object"] = "response";
    response["created_at"] = created_;
    response["status"] = status;
    response["error"] = nullptr;
    response["incomplete_details"] = nullptr;
    response["model"] = model_;
    response["output"] = OutJson::array();
    response["parallel_tool_calls"] = true;
    response["previous_response_id"] = nullptr;
    response["store"] = false;
    response["tool_choice"] = "auto";
    response["tools"] = OutJson::array();
    response["text"] = {{"format", {{"type", "text"}}}};
    response["truncation"] = "disabled";
    response["usage"] = nullptr;
    response.update(echoed_);
    return response;
  }

  OutJson Usage() const {
    OutJson usage;
    usage["input_tokens"] = usage_.prompt_tokens;
    usage["input_tokens_details"] = {{"cached_tokens", usage_.cached_tokens.value_or(0)}};
    usage["output_tokens"] = usage_.generated_tokens;
    usage["output_tokens_details"] = {{"reasoning_tokens", 0}};
    usage["total_tokens"] = int64_t{usage_.prompt_tokens} + usage_.generated_tokens;
    usage["winnow"] = WinnowUsage(usage_);
    return usage;
  }

  const std::string model_;
  const bool stream_;
  const OutJson echoed_;
  std::string id_, item_, text_;
  int64_t created_ = 0;
  int64_t sequence_ = 0;
  bool begun_ = false;
  v1::Finish finish_;
  UsageSum usage_;
};

}  // namespace

absl::StatusOr<ResponsesRequest> ParseResponsesRequest(std::string_view body) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  ResponsesRequest out;
  for (const auto& [name, why] : kRefused) fields.Refuse(name, why);
  RefuseTools(fields);
  if (const Json* const truncation = fields.Find("truncation")) {
    if (*truncation != "disabled") {
      fields.Add("truncation", "is not served: an input that is too long is refused");
    }
  }
  // Before they are moved out.
  for (const char* const name :
       {"instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user"}) {
    if (const Json* const value = fields.Find(name)) {
      out.echoed[name] =
          OutJson::parse(value->dump(-1, ' ', false, Json::error_handler_t::replace));
    } else {
      out.echoed[name] = nullptr;
    }
  }
  if (auto model = fields.String("model")) out.model = *std::move(model);
  out.stream = fields.Bool("stream").value_or(false);
  TakeInput(fields, *out.generate.mutable_chat());
  TakeSampling(fields, *out.generate.mutable_sampling());
  TakeWinnowOptions(fields, out.generate);
  if (const auto most = fields.Int32("max_output_tokens")) {
    out.generate.mutable_stopping()->set_max_tokens(*most);
  }
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

std::unique_ptr<AnswerFormat> MakeResponsesFormat(std::string model, bool stream, OutJson echoed) {
  return std::make_unique<ResponsesFormat>(std::move(model), stream, std::move(echoed));
}

}  // namespace winnow::server

#include "server/http/responses.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "engine/base/status_macros.h"
#include "server/http/harmony_request.h"
#include "server/http/json_fields.h"
#include "server/http/openai_answer.h"
#include "server/http/openai_request.h"
#include "server/http/structured_request.h"
#include "server/http/tools_request.h"
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

// Fields that the request leaves out are no null in the answer.
constexpr std::array<std::string_view, 3> kOwnDefaults = {"parallel_tool_calls", "tool_choice",
                                                          "text"};

void AddMessage(std::string role, std::string content, v1::ChatPrompt& out) {
  v1::ChatMessage& message = *out.add_messages();
  message.set_role(role == "developer" ? "system" : std::move(role));
  message.set_content(std::move(content));
}

// The turn that goes on, if the assistant has the last word; else a new one.
v1::ChatMessage& AssistantTurn(v1::ChatPrompt& out) {
  const bool goes_on =
      out.messages_size() > 0 && out.messages(out.messages_size() - 1).role() == "assistant";
  if (!goes_on) AddMessage("assistant", "", out);
  return *out.mutable_messages(out.messages_size() - 1);
}

// Reasoning before what the assistant says or calls next, as text; others can read it in no other form.
std::string ThoughtOf(JsonFields& fields) {
  std::string thought;
  const Json* const parts = fields.Array("content");
  for (size_t i = 0; parts != nullptr && i < parts->size(); ++i) {
    const Json& part = (*parts)[i];
    if (!part.is_object() || part.value("type", Json()) != "reasoning_text") continue;
    const Json text = part.value("text", Json());
    if (!text.is_string()) {
      fields.Add(Concat("content[", i, "].text"), "must be a string");
      continue;
    }
    Append(thought, thought.empty() ? "" : "\n\n", text.get_ref<const std::string&>());
  }
  return thought;
}

void AddThought(std::string& thought, v1::ChatMessage& turn) {
  if (thought.empty()) return;
  Append(*turn.mutable_reasoning(), turn.reasoning().empty() ? "" : "\n\n", thought);
  thought.clear();
}

// A call is part of the assistant's turn: of the message before it, or of the call before it.
void TakeCall(JsonFields& fields, std::string& thought, v1::ChatPrompt& out) {
  v1::ChatMessage& turn = AssistantTurn(out);
  AddThought(thought, turn);
  if (turn.tool_calls_size() > kMaxTools) return;  // the validator says how many may be
  v1::ToolCall& call = *turn.add_tool_calls();
  call.set_id(fields.String("call_id").value_or(""));
  call.set_name(fields.String("name").value_or(""));
  call.set_arguments(fields.String("arguments").value_or(""));
}

void TakeCallOutput(JsonFields& fields, v1::ChatPrompt& out) {
  Json* const output = fields.Find("output");
  if (output == nullptr) {
    fields.Add("output", "must be set");
    return;
  }
  AddMessage("tool", TakeContent(*output, fields.Path("output"), fields.violations()), out);
  out.mutable_messages(out.messages_size() - 1)
      ->set_tool_call_id(fields.String("call_id").value_or(""));
}

// `thought`: of the items before it, until a message or a call takes it.
void TakeItem(Json& item, const std::string& path, Violations& violations, std::string& thought,
              v1::ChatPrompt& out) {
  if (!item.is_object()) {
    violations.Add(path, "must be an object");
    return;
  }
  JsonFields fields(item, violations, path + ".");
  const std::string type = fields.String("type").value_or("message");
  if (type == "reasoning") {
    thought = ThoughtOf(fields);
    return;
  }
  if (type == "function_call") {
    TakeCall(fields, thought, out);
    return;
  }
  if (type == "function_call_output") {
    TakeCallOutput(fields, out);
    return;
  }
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
  v1::ChatMessage& message = *out.mutable_messages(out.messages_size() - 1);
  if (message.role() == "assistant") AddThought(thought, message);
  thought.clear();
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
    std::string thought;
    for (size_t i = 0; i < input->size() && i <= kMaxMessages; ++i) {
      TakeItem((*input)[i], Concat("input[", i, "]"), fields.violations(), thought, out);
    }
  }
}

// The answer as items: a message, calls, reasoning, in the order in which they come.
class ResponsesFormat final : public AnswerFormat {
 public:
  explicit ResponsesFormat(ResponsesAnswerOptions options)
      : options_(std::move(options)), parser_(MakeAnswerParser(options_.parser)) {}

  bool streamed() const override { return options_.stream; }
  void Begin(const std::string& name, int64_t created) override {
    name_ = name;
    created_ = created;
  }

  void Add(const v1::GenerateResponse& message, int32_t, std::string& out) override {
    std::vector<AnswerPiece> pieces;
    parser_->Add(message.text(), pieces);
    if (message.has_finish()) {
      parser_->Finish(pieces);
      finish_ = message.finish();
      usage_.Add(message.finish().usage());
    }
    const bool reasons = !pieces.empty() && pieces.front().kind == AnswerPiece::Kind::kReasoning;
    if (reasons || (pieces.empty() && open_ && items_.back().kind == Item::Kind::kReasoning)) {
      reasoning_tokens_ += message.tokens_size();
    }
    if (options_.stream && !std::exchange(begun_, true)) {
      Event("response.created", {{"response", Response("in_progress")}}, out);
      Event("response.in_progress", {{"response", Response("in_progress")}}, out);
    }
    for (const AnswerPiece& piece : pieces) AddPiece(piece, out);
  }

  void End(std::string& out) override {
    const bool whole = finish_.reason() != v1::FINISH_REASON_MAX_TOKENS;
    const char* const status = whole ? "completed" : "incomplete";
    if (items_.empty())
      BeginItem(Item::Kind::kMessage, "", out);  // an answer without text has one, too
    EndItem(status, out);
    OutJson response = Response(status);
    response["output"] = OutJson::array();
    for (size_t i = 0; i < items_.size(); ++i) {
      response["output"].push_back(ItemJson(i, i + 1 < items_.size() ? "completed" : status));
    }
    response["usage"] = Usage();
    if (!whole) response["incomplete_details"] = {{"reason", "max_output_tokens"}};
    if (!options_.stream) {
      out = Dump(response);
      return;
    }
    Event(Concat("response.", status), {{"response", std::move(response)}}, out);
  }

  // Clients look for this one in the stream, where OpenAI's server tells it, and make room.
  bool BreaksAtOnce(const HttpError& error) const override {
    return error.code == "context_length_exceeded";
  }

  void Break(const HttpError& error, std::string& out) override {
    if (!std::exchange(begun_, true)) {
      Event("response.created", {{"response", Response("in_progress")}}, out);
    }
    OutJson response = Response("failed");
    response["error"] = {{"code", error.code}, {"message", error.message}};
    Event("response.failed", {{"response", std::move(response)}}, out);
  }

  std::string Field(std::string_view field) const override {
    return ResponsesField(field, options_.structured_field);
  }

 private:
  struct Item {
    enum class Kind { kMessage, kReasoning, kCall };
    Kind kind;
    std::string name;  // of a call
    std::string text;  // of its one part, or a call's arguments
  };

  void AddPiece(const AnswerPiece& piece, std::string& out) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent:
        AddText(Item::Kind::kMessage, piece.text, out);
        break;
      case AnswerPiece::Kind::kReasoning:
        AddText(Item::Kind::kReasoning, piece.text, out);
        break;
      case AnswerPiece::Kind::kCallBegin:
        BeginItem(Item::Kind::kCall, piece.text, out);
        break;
      case AnswerPiece::Kind::kCallArguments:
        AddDelta(piece.text, out);
        break;
      case AnswerPiece::Kind::kCallEnd:
        EndItem("completed", out);
        break;
    }
  }

  void AddText(Item::Kind kind, const std::string& text, std::string& out) {
    if (!open_ || items_.back().kind != kind) BeginItem(kind, "", out);
    AddDelta(text, out);
  }

  void BeginItem(Item::Kind kind, const std::string& name, std::string& out) {
    EndItem("completed", out);
    items_.push_back({kind, name, ""});
    open_ = true;
    if (!options_.stream) return;
    OutJson item = ItemJson(items_.size() - 1, "in_progress");
    if (kind != Item::Kind::kCall) item["content"] = OutJson::array();
    Event("response.output_item.added", InItem({{"item", std::move(item)}}), out);
    if (kind != Item::Kind::kCall)
      Event("response.content_part.added", InPart({{"part", Part()}}), out);
  }

  void AddDelta(const std::string& text, std::string& out) {
    Item& item = items_.back();
    item.text += text;
    if (!options_.stream) return;
    switch (item.kind) {
      case Item::Kind::kMessage:
        Event("response.output_text.delta",
              InPart({{"delta", text}, {"logprobs", OutJson::array()}}), out);
        break;
      case Item::Kind::kReasoning:
        Event("response.reasoning_text.delta", InPart({{"delta", text}}), out);
        break;
      case Item::Kind::kCall:
        Event("response.function_call_arguments.delta",
              InItem({{"item_id", Id()}, {"delta", text}}), out);
    }
  }

  void EndItem(const char* status, std::string& out) {
    if (!std::exchange(open_, false) || !options_.stream) return;
    const Item& item = items_.back();
    switch (item.kind) {
      case Item::Kind::kMessage:
        Event("response.output_text.done",
              InPart({{"text", item.text}, {"logprobs", OutJson::array()}}), out);
        break;
      case Item::Kind::kReasoning:
        Event("response.reasoning_text.done", InPart({{"text", item.text}}), out);
        break;
      case Item::Kind::kCall:
        Event("response.function_call_arguments.done",
              InItem({{"item_id", Id()}, {"name", item.name}, {"arguments", item.text}}), out);
    }
    if (item.kind != Item::Kind::kCall)
      Event("response.content_part.done", InPart({{"part", Part()}}), out);
    Event("response.output_item.done", InItem({{"item", ItemJson(items_.size() - 1, status)}}),
          out);
  }

  void Event(std::string_view type, const OutJson& fields, std::string& out) {
    OutJson data;
    data["type"] = type;
    data["sequence_number"] = sequence_++;
    data.update(fields);
    Append(out, "event: ", type, "\ndata: ", Dump(data), "\n\n");
  }

  // Fields of an event about the last item, and about its one part.
  OutJson InItem(const OutJson& fields) const {
    OutJson out = {{"output_index", items_.size() - 1}};
    out.update(fields);
    return out;
  }
  OutJson InPart(const OutJson& fields) const {
    OutJson out = {{"item_id", Id()}, {"output_index", items_.size() - 1}, {"content_index", 0}};
    out.update(fields);
    return out;
  }

  std::string IdOf(size_t index) const {
    const char* prefix = "msg_";
    if (items_[index].kind == Item::Kind::kReasoning) prefix = "rs_";
    if (items_[index].kind == Item::Kind::kCall) prefix = "fc_";
    return index == 0 ? Concat(prefix, name_) : Concat(prefix, name_, "-", index);
  }
  std::string Id() const { return IdOf(items_.size() - 1); }

  // The part of the last item, as far as it has come.
  OutJson Part() const { return PartOf(items_.back()); }
  static OutJson PartOf(const Item& item) {
    OutJson part;
    if (item.kind == Item::Kind::kReasoning) {
      part["type"] = "reasoning_text";
      part["text"] = item.text;
      return part;
    }
    part["type"] = "output_text";
    part["text"] = item.text;
    part["annotations"] = OutJson::array();
    part["logprobs"] = OutJson::array();
    return part;
  }

  OutJson ItemJson(size_t index, const char* status) const {
    const Item& of = items_[index];
    OutJson item;
    item["id"] = IdOf(index);
    switch (of.kind) {
      case Item::Kind::kMessage:
        item["type"] = "message";
        item["status"] = status;
        item["role"] = "assistant";
        item["content"] = OutJson::array({PartOf(of)});
        break;
      case Item::Kind::kReasoning:
        item["type"] = "reasoning";
        item["summary"] = OutJson::array();
        item["content"] = OutJson::array({PartOf(of)});
        item["status"] = status;
        break;
      case Item::Kind::kCall:
        item["type"] = "function_call";
        item["status"] = status;
        item["call_id"] = CallId(name_, 0, index);
        item["name"] = of.name;
        item["arguments"] = of.text;
    }
    return item;
  }

  OutJson Response(const char* status) const {
    OutJson response;
    response["id"] = Concat("resp_", name_);
    response["object"] = "response";
    response["created_at"] = created_;
    response["status"] = status;
    response["background"] = false;
    response["error"] = nullptr;
    response["incomplete_details"] = nullptr;
    response["model"] = options_.model;
    response["output"] = OutJson::array();
    response["parallel_tool_calls"] = true;
    response["previous_response_id"] = nullptr;
    response["store"] = false;
    response["tool_choice"] = "auto";
    response["tools"] = OutJson::array();
    response["text"] = {{"format", {{"type", "text"}}}};
    response["truncation"] = "disabled";
    response["usage"] = nullptr;
    response.update(options_.echoed);
    return response;
  }

  OutJson Usage() const {
    OutJson usage;
    usage["input_tokens"] = usage_.prompt_tokens;
    usage["input_tokens_details"] = {{"cached_tokens", usage_.cached_tokens.value_or(0)}};
    usage["output_tokens"] = usage_.generated_tokens;
    usage["output_tokens_details"] = {{"reasoning_tokens", reasoning_tokens_}};
    usage["total_tokens"] = int64_t{usage_.prompt_tokens} + usage_.generated_tokens;
    usage["winnow"] = WinnowUsage(usage_);
    return usage;
  }

  const ResponsesAnswerOptions options_;
  const std::unique_ptr<AnswerParser> parser_;
  std::string name_;
  std::vector<Item> items_;
  bool open_ = false;  // the last item
  int64_t created_ = 0;
  int64_t sequence_ = 0;
  int32_t reasoning_tokens_ = 0;
  bool begun_ = false;
  v1::Finish finish_;
  UsageSum usage_;
};

}  // namespace

absl::StatusOr<ResponsesRequest> ParseResponsesRequest(std::string_view body,
                                                       const ModelHabits& habits) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  ResponsesRequest out;
  for (const auto& [name, why] : kRefused) fields.Refuse(name, why);
  out.structured_field = TakeTextFormat(body, fields, out.generate);
  if (const Json* const truncation = fields.Find("truncation")) {
    if (*truncation != "disabled") {
      fields.Add("truncation", "is not served: an input that is too long is refused");
    }
  }
  // Before they are moved out.
  for (const char* const name :
       {"instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user",
        "parallel_tool_calls", "tool_choice", "text"}) {
    if (const Json* const value = fields.Find(name)) {
      out.echoed[name] =
          OutJson::parse(value->dump(-1, ' ', false, Json::error_handler_t::replace));
    } else if (std::find(kOwnDefaults.begin(), kOwnDefaults.end(), name) == kOwnDefaults.end()) {
      out.echoed[name] = nullptr;
    }
  }
  if (auto model = fields.String("model")) out.model = *std::move(model);
  out.stream = fields.Bool("stream").value_or(false);
  TakeInput(fields, *out.generate.mutable_chat());
  if (Json* const reasoning = fields.Object("reasoning")) {
    JsonFields own(*reasoning, fields.violations(), "reasoning.");
    SetEffort(own, "effort", own.String("effort").value_or(""), habits,
              *out.generate.mutable_chat());
  }
  const RequestedTools tools = TakeResponsesTools(body, fields);
  out.parser = ApplyTools(tools, habits, fields, out.generate);
  ApplyReasoning(habits, out.structured_field, fields, out.generate, out.parser);
  if (out.structured_field.empty()) out.structured_field = "tools";
  for (const RequestedTool& tool : tools.tools) {
    OutJson shown = {{"type", "function"}};
    shown.update(tool.shown["function"]);
    shown["strict"] = tool.strict;
    out.echoed["tools"].push_back(std::move(shown));
  }
  TakeSampling(fields, *out.generate.mutable_sampling());
  TakeWinnowOptions(fields, out.generate);
  if (const auto most = fields.Int32("max_output_tokens")) {
    out.generate.mutable_stopping()->set_max_tokens(*most);
  }
  WINNOW_RETURN_IF_ERROR(violations.ToStatus());
  return out;
}

std::unique_ptr<AnswerFormat> MakeResponsesFormat(ResponsesAnswerOptions options) {
  return std::make_unique<ResponsesFormat>(std::move(options));
}

std::string ResponsesField(std::string_view field, const std::string& structured_field) {
  if (field == "stopping.max_tokens") return "max_output_tokens";
  // Which item a message came from is not known any more.
  if (field.starts_with("chat.messages")) return "input";
  return OpenAiField(field, /*chat=*/true, structured_field);
}

}  // namespace winnow::server

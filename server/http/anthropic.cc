#include "server/http/anthropic.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "engine/base/status_macros.h"
#include "server/http/harmony_request.h"
#include "server/http/json_fields.h"
#include "server/http/openai_answer.h"
#include "server/http/openai_request.h"
#include "server/http/structured_request.h"
#include "server/http/tools_request.h"
#include "server/ordered_json.h"
#include "server/strings.h"
#include "server/utf8.h"
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

// Arguments of tools, by the call's id, in the order in which the model wrote it.
using Inputs = absl::flat_hash_map<std::string, std::string>;

Inputs InputsOf(std::string_view body, JsonFields& fields) {
  Inputs inputs;
  // Most conversations have none, and they are long.
  if (body.find("tool_use") == body.npos) return inputs;
  const absl::StatusOr<OutJson> messages = ParseOrdered(TextOfMember(body, "messages"));
  if (!messages.ok()) {
    fields.Add("messages", ToStd(messages.status().message()));
    return inputs;
  }
  for (const OutJson& message : *messages) {
    if (!message.is_object() || !message.value("content", OutJson()).is_array()) continue;
    for (const OutJson& block : message["content"]) {
      if (!block.is_object() || !block.contains("input")) continue;
      const OutJson id = block.value("id", OutJson());
      if (id.is_string()) inputs[id.get<std::string>()] = Dump(block["input"]);
    }
  }
  return inputs;
}

// The messages of one turn: the results of tools each have one of their own, before what the user says.
class TurnTaker {
 public:
  TurnTaker(const std::string& path, const Inputs& inputs, RequestedTools& tools,
            JsonFields& fields, AnthropicRequest& out)
      : path_(path), inputs_(inputs), tools_(tools), violations_(fields.violations()), out_(out) {}

  void Take(JsonFields& message) {
    turn_.set_role(message.String("role").value_or(""));
    Json* const content = message.Find("content");
    if (content == nullptr) {
      message.Add("content", "must be set");
      return;
    }
    DropNonces(*content, /*system=*/false);
    if (content->is_array()) TakeOwnBlocks(*content, message.Path("content"));
    turn_.set_content(TakeContent(*content, message.Path("content"), violations_));
    const bool only_results = results_ > 0 && turn_.content().empty();
    if (!only_results) Add(std::move(turn_));
  }

 private:
  void Add(v1::ChatMessage message) {
    *out_.generate.mutable_chat()->add_messages() = std::move(message);
    out_.paths.push_back(path_);
  }

  // Those that are no text, which are taken out of the list.
  void TakeOwnBlocks(Json& content, const std::string& path) {
    Json text = Json::array();
    for (size_t i = 0; i < content.size(); ++i) {
      Json& block = content[i];
      const Json type = block.is_object() ? block.value("type", Json()) : Json();
      if (type != "tool_use" && type != "tool_result" && type != "thinking" &&
          type != "redacted_thinking") {
        text.push_back(std::move(block));
        continue;
      }
      JsonFields fields(block, violations_, Concat(path, "[", i, "]."));
      if (type == "tool_use") TakeCall(fields);
      if (type == "tool_result") TakeResult(fields);
      // Passes over blocks that nobody but Anthropic can read.
      if (type == "thinking")
        turn_.set_reasoning(turn_.reasoning() + fields.String("thinking").value_or(""));
    }
    content = std::move(text);
  }

  void TakeCall(JsonFields& fields) {
    if (turn_.tool_calls_size() > kMaxTools) return;  // the validator says how many may be
    v1::ToolCall& call = *turn_.add_tool_calls();
    call.set_id(fields.String("id").value_or(""));
    call.set_name(fields.String("name").value_or(""));
    const auto input = inputs_.find(call.id());
    call.set_arguments(input == inputs_.end() ? "{}" : input->second);
  }

  void TakeResult(JsonFields& fields) {
    ++results_;
    v1::ChatMessage result;
    result.set_role("tool");
    result.set_tool_call_id(fields.String("tool_use_id").value_or(""));
    if (Json* const content = fields.Find("content")) {
      if (content->is_array()) TakeReferences(*content, fields.Path("content"));
      result.set_content(TakeContent(*content, fields.Path("content"), violations_));
    }
    Add(std::move(result));
  }

  // Tools that a search found, each put as text where it was found first; after that its name does.
  void TakeReferences(Json& content, const std::string& path) {
    for (size_t i = 0; i < content.size(); ++i) {
      Json& block = content[i];
      if (!block.is_object() || block.value("type", Json()) != "tool_reference") continue;
      JsonFields fields(block, violations_, Concat(path, "[", i, "]."));
      const std::string name = fields.String("tool_name").value_or("");
      const auto tool = std::find_if(tools_.tools.begin(), tools_.tools.end(),
                                     [&](const RequestedTool& t) { return t.name == name; });
      if (tool == tools_.tools.end()) {
        fields.Add("tool_name", Concat("names \"", CleanUtf8(name, kMaxShownBytes),
                                       "\", which is not among the tools"));
      }
      const bool first =
          tool != tools_.tools.end() && tool->deferred && !std::exchange(tool->found, true);
      block = {{"type", "text"}, {"text", first ? Dump(tool->shown) : name}};
    }
  }

  const std::string& path_;
  const Inputs& inputs_;
  RequestedTools& tools_;
  Violations& violations_;
  AnthropicRequest& out_;
  v1::ChatMessage turn_;
  int results_ = 0;
};

void TakeMessages(std::string_view body, JsonFields& fields, RequestedTools& tools,
                  AnthropicRequest& out) {
  Json* const messages = fields.Array("messages");
  if (messages == nullptr) return;
  const Inputs inputs = InputsOf(body, fields);
  for (size_t i = 0; i < messages->size() && i <= kMaxMessages; ++i) {
    const std::string path = Concat("messages[", i, "]");
    if (!(*messages)[i].is_object()) {
      fields.Add(path, "must be an object");
      continue;
    }
    JsonFields message((*messages)[i], fields.violations(), path + ".");
    TurnTaker(path, inputs, tools, fields, out).Take(message);
  }
}

// {"type": "enabled"} or "adaptive"; without it the model is told not to think, where its template can do that.
void TakeThinking(JsonFields& fields, const ModelHabits& habits, AnthropicRequest& out) {
  if (Json* const object = fields.Object("thinking")) {
    JsonFields thinking(*object, fields.violations(), "thinking.");
    const std::string type = thinking.String("type").value_or("");
    out.shows_reasoning = type == "enabled" || type == "adaptive";
    if (!out.shows_reasoning && type != "disabled") {
      thinking.Add("type", "must be enabled, adaptive or disabled");
    }
  }
  if (habits.reasoning == ReasoningFormat::kThink && !out.shows_reasoning) {
    out.generate.mutable_chat()->set_template_options(R"({"enable_thinking": false})");
  }
  Json* const config = habits.has_effort ? fields.Object("output_config") : nullptr;
  if (config == nullptr) return;
  JsonFields output(*config, fields.violations(), "output_config.");
  std::string effort = output.String("effort").value_or("");
  // A Harmony model has three of Anthropic's efforts; what is beyond is its highest.
  if (habits.harmony.has_value() && (effort == "xhigh" || effort == "max")) effort = "high";
  SetEffort(output, "effort", effort, habits, *out.generate.mutable_chat());
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

// `full`: fewer tokens than the client asked for were all that the context had room for.
const char* StopReasonName(v1::FinishReason reason, bool called, bool full) {
  switch (reason) {
    case v1::FINISH_REASON_MAX_TOKENS:
      return full ? "model_context_window_exceeded" : "max_tokens";
    case v1::FINISH_REASON_STOP_STRING:
      return "stop_sequence";
    default:
      return called ? "tool_use" : "end_turn";
  }
}

class AnthropicFormat final : public AnswerFormat {
 public:
  explicit AnthropicFormat(AnthropicAnswerOptions options)
      : options_(std::move(options)), parser_(MakeAnswerParser(options_.parser)) {}

  bool streamed() const override { return options_.stream; }
  void Begin(const std::string& name, int64_t) override { id_ = Concat("msg_", name); }

  void Add(const v1::GenerateResponse& message, int32_t prompt_tokens, std::string& out) override {
    std::vector<AnswerPiece> pieces;
    parser_->Add(message.text(), pieces);
    if (message.has_finish()) {
      parser_->Finish(pieces);
      finish_ = message.finish();
      usage_.Add(message.finish().usage());
    }
    if (options_.stream && !std::exchange(begun_, true)) {
      OutJson start = Message(OutJson::array(), nullptr, nullptr);
      start["usage"] = {{"input_tokens", prompt_tokens},
                        {"cache_creation_input_tokens", 0},
                        {"cache_read_input_tokens", 0},
                        {"output_tokens", 0}};
      Event("message_start", {{"message", std::move(start)}}, out);
    }
    for (const AnswerPiece& piece : pieces) AddPiece(piece, out);
  }

  void End(std::string& out) override {
    if (blocks_.empty())
      BeginBlock(Block::Kind::kText, "", out);  // an answer without text has a block, too
    EndBlock(out);
    const bool called = std::any_of(blocks_.begin(), blocks_.end(), [](const Block& block) {
      return block.kind == Block::Kind::kCall;
    });
    const char* const reason =
        StopReasonName(finish_.reason(), called, usage_.generated_tokens < options_.max_tokens);
    OutJson sequence = nullptr;
    if (!finish_.stop_string().empty()) sequence = finish_.stop_string();
    if (!options_.stream) {
      OutJson content = OutJson::array();
      for (size_t i = 0; i < blocks_.size(); ++i) content.push_back(WholeBlock(i));
      OutJson message = Message(std::move(content), reason, std::move(sequence));
      message["usage"] = Usage();
      out = Dump(message);
      return;
    }
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
    return AnthropicField(field, options_.paths, options_.structured_field);
  }

 private:
  struct Block {
    enum class Kind { kText, kThinking, kCall };
    Kind kind;
    std::string name;  // of a call
    std::string text;  // not streamed: all of it
  };

  void AddPiece(const AnswerPiece& piece, std::string& out) {
    switch (piece.kind) {
      case AnswerPiece::Kind::kContent:
        AddText(Block::Kind::kText, piece.text, out);
        break;
      case AnswerPiece::Kind::kReasoning:
        if (options_.shows_reasoning) AddText(Block::Kind::kThinking, piece.text, out);
        break;
      case AnswerPiece::Kind::kCallBegin:
        BeginBlock(Block::Kind::kCall, piece.text, out);
        break;
      case AnswerPiece::Kind::kCallArguments:
        AddDelta(piece.text, out);
        break;
      case AnswerPiece::Kind::kCallEnd:
        EndBlock(out);
        break;
    }
  }

  void AddText(Block::Kind kind, const std::string& text, std::string& out) {
    if (!open_ || blocks_.back().kind != kind) BeginBlock(kind, "", out);
    AddDelta(text, out);
  }

  void BeginBlock(Block::Kind kind, const std::string& name, std::string& out) {
    EndBlock(out);
    blocks_.push_back({kind, name, ""});
    open_ = true;
    if (options_.stream) {
      Event("content_block_start",
            {{"index", blocks_.size() - 1}, {"content_block", WholeBlock(blocks_.size() - 1)}},
            out);
    }
  }

  void AddDelta(const std::string& text, std::string& out) {
    Block& block = blocks_.back();
    if (!options_.stream) {
      block.text += text;
      return;
    }
    OutJson delta;
    switch (block.kind) {
      case Block::Kind::kText:
        delta = {{"type", "text_delta"}, {"text", text}};
        break;
      case Block::Kind::kThinking:
        delta = {{"type", "thinking_delta"}, {"thinking", text}};
        break;
      case Block::Kind::kCall:
        delta = {{"type", "input_json_delta"}, {"partial_json", text}};
    }
    Event("content_block_delta", {{"index", blocks_.size() - 1}, {"delta", std::move(delta)}}, out);
  }

  void EndBlock(std::string& out) {
    if (!std::exchange(open_, false) || !options_.stream) return;
    Event("content_block_stop", {{"index", blocks_.size() - 1}}, out);
  }

  OutJson WholeBlock(size_t index) const {
    const Block& block = blocks_[index];
    switch (block.kind) {
      case Block::Kind::kText:
        return {{"type", "text"}, {"text", block.text}};
      case Block::Kind::kThinking:
        return {{"type", "thinking"}, {"thinking", block.text}, {"signature", ""}};
      case Block::Kind::kCall:
        break;
    }
    OutJson input = OutJson::object();
    if (!block.text.empty()) {
      // Arguments that max_tokens cut off are no JSON, and Anthropic's clients know nothing but JSON here.
      absl::StatusOr<OutJson> parsed = ParseOrdered(block.text);
      if (parsed.ok()) input = *std::move(parsed);
    }
    return {{"type", "tool_use"},
            {"id", CallId(id_, 0, index)},
            {"name", block.name},
            {"input", std::move(input)}};
  }

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
    message["model"] = options_.model;
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

  const AnthropicAnswerOptions options_;
  const std::unique_ptr<AnswerParser> parser_;
  std::string id_;
  std::vector<Block> blocks_;
  bool open_ = false;  // the last block
  bool begun_ = false;
  v1::Finish finish_;
  UsageSum usage_;
};

}  // namespace

absl::StatusOr<AnthropicRequest> ParseAnthropicRequest(std::string_view body, bool counting,
                                                       const ModelHabits& habits) {
  WINNOW_ASSIGN_OR_RETURN(Json json, ParseBody(body));
  Violations violations;
  JsonFields fields(json, violations);
  AnthropicRequest out;
  if (auto model = fields.String("model")) out.model = *std::move(model);
  fields.Refuse("mcp_servers", "is not served");
  fields.Refuse("container", "is not served");
  TakeSystem(fields, *out.generate.mutable_chat());
  if (out.generate.chat().messages_size() > 0) out.paths.emplace_back("system");
  RequestedTools tools = TakeAnthropicTools(body, fields);
  TakeMessages(body, fields, tools, out);
  TakeThinking(fields, habits, out);
  out.structured_field = TakeOutputFormat(body, fields, out.generate);
  out.parser = ApplyTools(tools, habits, fields, out.generate);
  ApplyReasoning(habits, out.structured_field, fields, out.generate, out.parser);
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

std::unique_ptr<AnswerFormat> MakeAnthropicFormat(AnthropicAnswerOptions options) {
  return std::make_unique<AnthropicFormat>(std::move(options));
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

std::string AnthropicField(std::string_view field, const std::vector<std::string>& paths,
                           const std::string& structured_field) {
  constexpr std::string_view kMessages = "chat.messages[";
  if (field.starts_with(kMessages)) {
    const size_t end = field.find(']');
    size_t index = 0;
    if (end == field.npos ||
        !absl::SimpleAtoi(ToAbsl(field.substr(kMessages.size(), end - kMessages.size())), &index) ||
        index >= paths.size()) {
      return "messages";
    }
    return paths[index] == "system" ? "system" : Concat(paths[index], field.substr(end + 1));
  }
  constexpr std::string_view kStops = "stopping.stop_strings";
  if (field.starts_with(kStops)) return Concat("stop_sequences", field.substr(kStops.size()));
  return OpenAiField(field, /*chat=*/true, structured_field.empty() ? "tools" : structured_field);
}

}  // namespace winnow::server

#include "engine/text/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/text/jinja/interpreter.h"
#include "engine/text/jinja/template.h"
#include "engine/text/tokenizer_json.h"
#include "engine/text/unicode/unicode_text.h"

namespace winnow::engine {
namespace {

using jinja::Interpreter;
using jinja::Value;
using OrderedJson = nlohmann::ordered_json;

constexpr int kDepthMax = 100;

// One template of a model: most have one, some have another for conversations with tools.
struct NamedTemplate {
  std::string name;
  absl::Status status;
  std::shared_ptr<const jinja::SyntaxTree> tree;
  std::string source;
};

NamedTemplate ParseNamed(std::string name, std::string_view text) {
  auto tree = jinja::ParseTemplate(text, jinja::Limits());
  if (tree.ok()) return {std::move(name), absl::OkStatus(), *std::move(tree), std::string(text)};
  return {std::move(name),
          absl::FailedPreconditionError(Concat(
              "the chat template cannot be used: ",
              std::string_view(tree.status().message().data(), tree.status().message().size()))),
          nullptr, std::string(text)};
}

// ---- files ----

// A token of tokenizer_config.json: a string, or an object with its content.
absl::StatusOr<std::string> ReadToken(const JsonNode& node) {
  if (!node.value().is_object()) return node.String();
  WINNOW_ASSIGN_OR_RETURN(const JsonNode content, node.Member("content"));
  return content.String();
}

// Every "..._token" of the file, as transformers gives them to templates.
absl::Status ReadTokens(const JsonNode& config, ChatTemplate::SpecialTokens* tokens) {
  static constexpr std::string_view kKnown[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                                "pad_token", "cls_token", "mask_token"};
  WINNOW_RETURN_IF_ERROR(config.RequireObject());
  const auto add = [&](const std::string& name, const std::string& text) {
    const bool there = std::any_of(tokens->begin(), tokens->end(),
                                   [&](const auto& token) { return token.first == name; });
    if (!there) tokens->emplace_back(name, text);
  };
  for (const auto& [name, value] : config.value().items()) {
    if (!name.ends_with("_token") || value.is_null()) continue;
    const bool known = std::find(std::begin(kKnown), std::end(kKnown), name) != std::end(kKnown);
    // Others are settings as well as tokens: "add_bos_token".
    const bool is_token = value.is_string() || (value.is_object() && value.contains("content"));
    if (!known && !is_token) continue;
    WINNOW_ASSIGN_OR_RETURN(const JsonNode node, config.Member(name));
    WINNOW_ASSIGN_OR_RETURN(const std::string text, ReadToken(node));
    add(name, text);
  }
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> extra,
                          config.Optional("extra_special_tokens"));
  if (extra && extra->value().is_object()) {
    for (const auto& [name, value] : extra->value().items()) {
      if (value.is_string()) add(name, value.get<std::string>());
    }
  }
  return absl::OkStatus();
}

// "chat_template": a string, or a list of {"name", "template"}.
absl::Status ReadTemplates(const JsonNode& config, std::vector<NamedTemplate>* templates) {
  WINNOW_ASSIGN_OR_RETURN(const std::optional<JsonNode> node, config.Optional("chat_template"));
  if (!node) return absl::OkStatus();
  if (!node->value().is_array()) {
    WINNOW_ASSIGN_OR_RETURN(const std::string text, node->String());
    templates->push_back(ParseNamed("default", text));
    return absl::OkStatus();
  }
  for (size_t i = 0; i < node->size(); ++i) {
    const JsonNode entry = node->At(i);
    WINNOW_ASSIGN_OR_RETURN(const JsonNode name_node, entry.Member("name"));
    WINNOW_ASSIGN_OR_RETURN(const std::string name, name_node.String());
    if (name != "default" && name != "tool_use") continue;
    WINNOW_ASSIGN_OR_RETURN(const JsonNode text_node, entry.Member("template"));
    WINNOW_ASSIGN_OR_RETURN(const std::string text, text_node.String());
    templates->push_back(ParseNamed(name, text));
  }
  return absl::OkStatus();
}

// ---- the request as values of the template ----

bool IsUsualRole(std::string_view role) {
  static constexpr std::string_view kUsual[] = {
      "system", "user",  "assistant", "tool",    "developer",   "function", "ipython",
      "model",  "human", "gpt",       "chatbot", "observation", "context",  "document"};
  return std::find(std::begin(kUsual), std::end(kUsual), role) != std::end(kUsual);
}

absl::Status CheckRole(std::string_view role, size_t index) {
  constexpr size_t kRoleBytesMax = 64;
  const bool sound = !role.empty() && role.size() <= kRoleBytesMax &&
                     role.find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                         "0123456789_-") == role.npos;
  if (sound) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("messages[", index, "].role: must be letters, digits, \"_\" and \"-\", at most ",
             kRoleBytesMax));
}

// Makes values of JSON, all of them text from the request.
class Converter {
 public:
  explicit Converter(Interpreter* interpreter) : interpreter_(interpreter) {}

  absl::StatusOr<Value> Convert(const OrderedJson& json, const std::string& path, int depth = 0) {
    if (depth > kDepthMax)
      return absl::InvalidArgumentError(Concat(path, ": nested deeper than ", kDepthMax));
    switch (json.type()) {
      case OrderedJson::value_t::null:
        return Value::None();
      case OrderedJson::value_t::boolean:
        return Value::Bool(json.get<bool>());
      case OrderedJson::value_t::number_integer:
        return Value::Int(json.get<int64_t>());
      case OrderedJson::value_t::number_unsigned:
        if (json.get<uint64_t>() > INT64_MAX) {
          return absl::InvalidArgumentError(Concat(path, ": an integer beyond 64 bits"));
        }
        return Value::Int(json.get<int64_t>());
      case OrderedJson::value_t::number_float:
        return Value::Float(json.get<double>());
      case OrderedJson::value_t::string:
        return String(json.get_ref<const std::string&>(), path);
      case OrderedJson::value_t::array: {
        std::vector<Value> items;
        items.reserve(json.size());
        for (const OrderedJson& item : json) {
          WINNOW_ASSIGN_OR_RETURN(Value value,
                                  Convert(item, Concat(path, "[", items.size(), "]"), depth + 1));
          items.push_back(std::move(value));
        }
        return interpreter_->List(std::move(items));
      }
      case OrderedJson::value_t::object:
        return Object(json, path, depth);
      default:
        return absl::InvalidArgumentError(Concat(path, ": not a JSON value"));
    }
  }

  absl::StatusOr<Value> Message(const OrderedJson& json, size_t index) {
    const std::string path = Concat("messages[", index, "]");
    if (!json.is_object()) return absl::InvalidArgumentError(Concat(path, ": must be an object"));
    const auto role = json.find("role");
    if (role == json.end() || !role->is_string()) {
      return absl::InvalidArgumentError(Concat(path, ".role: must be a string"));
    }
    WINNOW_RETURN_IF_ERROR(CheckRole(role->get_ref<const std::string&>(), index));
    const Value out = interpreter_->NewDict();
    // One text for the reasoning under the names that templates know, as in transformers.
    const OrderedJson* reasoning = nullptr;
    for (const char* name : {"reasoning_content", "thinking", "reasoning"}) {
      const auto found = json.find(name);
      if (reasoning == nullptr && found != json.end() && !found->is_null()) reasoning = &*found;
    }
    Value reasoning_value;
    if (reasoning != nullptr) {
      WINNOW_ASSIGN_OR_RETURN(reasoning_value, Convert(*reasoning, path + ".reasoning_content", 1));
      Set(out, "thinking", reasoning_value);
    }
    for (const auto& [key, value] : json.items()) {
      if (key == "role") {
        Set(out, key, Role(value.get_ref<const std::string&>()));
        continue;
      }
      WINNOW_ASSIGN_OR_RETURN(Value item, Convert(value, Concat(path, ".", key), 1));
      WINNOW_RETURN_IF_ERROR(CheckText(key, path));
      Set(out, key, std::move(item));
    }
    if (reasoning != nullptr) Set(out, "reasoning_content", reasoning_value);
    return out;
  }

  absl::StatusOr<Value> Plain(const ChatMessage& message, size_t index) {
    WINNOW_RETURN_IF_ERROR(CheckRole(message.role, index));
    WINNOW_ASSIGN_OR_RETURN(Value content,
                            String(message.content, Concat("messages[", index, "].content")));
    const Value out = interpreter_->NewDict();
    Set(out, "role", Role(message.role));
    Set(out, "content", std::move(content));
    return out;
  }

 private:
  static absl::Status CheckText(std::string_view text, const std::string& path) {
    if (FindInvalidUtf8(text) == text.npos) return absl::OkStatus();
    return absl::InvalidArgumentError(Concat(path, ": not UTF-8"));
  }

  absl::StatusOr<Value> String(const std::string& text, const std::string& path) {
    WINNOW_RETURN_IF_ERROR(CheckText(text, path));
    return interpreter_->String(jinja::MarkedText(text, /*user=*/true));
  }

  Value Role(const std::string& role) {
    return interpreter_->String(jinja::MarkedText(role, /*user=*/!IsUsualRole(role)));
  }

  void Set(const Value& dict, const std::string& key, Value value) {
    interpreter_->DictSet(&jinja::AsDict(dict),
                          interpreter_->String(jinja::MarkedText(key, /*user=*/true)),
                          std::move(value));
  }

  absl::StatusOr<Value> Object(const OrderedJson& json, const std::string& path, int depth) {
    const Value out = interpreter_->NewDict();
    for (const auto& [key, value] : json.items()) {
      WINNOW_RETURN_IF_ERROR(CheckText(key, path));
      WINNOW_ASSIGN_OR_RETURN(Value item, Convert(value, Concat(path, ".", key), depth + 1));
      Set(out, key, std::move(item));
    }
    return out;
  }

  Interpreter* interpreter_;
};

absl::Status SetVariables(const ChatRequest& request, std::span<const ChatMessage> plain,
                          Interpreter* interpreter) {
  Converter converter(interpreter);
  std::vector<Value> messages;
  if (request.messages != nullptr) {
    if (!request.messages->is_array())
      return absl::InvalidArgumentError("messages: must be an array");
    for (const OrderedJson& message : *request.messages) {
      WINNOW_ASSIGN_OR_RETURN(Value value, converter.Message(message, messages.size()));
      messages.push_back(std::move(value));
    }
  } else {
    for (const ChatMessage& message : plain) {
      WINNOW_ASSIGN_OR_RETURN(Value value, converter.Plain(message, messages.size()));
      messages.push_back(std::move(value));
    }
  }
  if (messages.empty()) return absl::InvalidArgumentError("messages: must not be empty");
  if (request.kwargs != nullptr && !request.kwargs->is_null()) {
    if (!request.kwargs->is_object())
      return absl::InvalidArgumentError("chat_template_kwargs: must be an object");
    for (const auto& [name, value] : request.kwargs->items()) {
      for (const std::string_view taken :
           {"messages", "tools", "documents", "add_generation_prompt"}) {
        if (name == taken)
          return absl::InvalidArgumentError(
              Concat("chat_template_kwargs.", name, ": has a field of its own"));
      }
      WINNOW_ASSIGN_OR_RETURN(Value item,
                              converter.Convert(value, Concat("chat_template_kwargs.", name)));
      interpreter->SetVariable(name, std::move(item));
    }
  }
  interpreter->SetVariable("messages", interpreter->List(std::move(messages)));
  interpreter->SetVariable("add_generation_prompt", Value::Bool(request.add_generation_prompt));
  for (const auto& [name, json] :
       {std::pair{"tools", request.tools}, std::pair{"documents", request.documents}}) {
    Value value = Value::None();
    if (json != nullptr && !json->is_null()) {
      if (!json->is_array()) return absl::InvalidArgumentError(Concat(name, ": must be an array"));
      WINNOW_ASSIGN_OR_RETURN(value, converter.Convert(*json, name));
    }
    interpreter->SetVariable(name, std::move(value));
  }
  if (request.now) interpreter->SetNow(*request.now);
  return absl::OkStatus();
}

}  // namespace

struct ChatTemplate::State {
  std::vector<NamedTemplate> templates;
  SpecialTokens tokens;
  std::string source;

  // The template for a conversation with or without tools; nullptr: none.
  const NamedTemplate* Find(bool tools) const {
    const auto find = [this](std::string_view name) {
      const auto found = std::find_if(templates.begin(), templates.end(),
                                      [name](const NamedTemplate& t) { return t.name == name; });
      return found == templates.end() ? nullptr : &*found;
    };
    const NamedTemplate* for_tools = tools ? find("tool_use") : nullptr;
    return for_tools != nullptr ? for_tools : find("default");
  }
};

ChatTemplate ChatTemplate::FromText(std::string_view text, std::string bos_token,
                                    std::string eos_token) {
  SpecialTokens tokens;
  if (!bos_token.empty()) tokens.emplace_back("bos_token", std::move(bos_token));
  if (!eos_token.empty()) tokens.emplace_back("eos_token", std::move(eos_token));
  return FromText(text, std::move(tokens), "text");
}

ChatTemplate ChatTemplate::FromText(std::string_view text, SpecialTokens tokens,
                                    std::string source) {
  auto state = std::make_shared<State>();
  state->templates.push_back(ParseNamed("default", text));
  state->tokens = std::move(tokens);
  state->source = std::move(source);
  ChatTemplate chat;
  chat.state_ = std::move(state);
  return chat;
}

absl::StatusOr<ChatTemplate> ChatTemplate::Load(const std::string& model_dir) {
  constexpr const char* kFile = "chat_template.jinja";
  auto state = std::make_shared<State>();
  state->source = "tokenizer_config.json";
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const absl::StatusOr<JsonDocument> config =
        JsonDocument::ReadFile(Concat(model_dir, "/", name));
    if (absl::IsNotFound(config.status())) continue;
    WINNOW_RETURN_IF_ERROR(config.status());
    WINNOW_RETURN_IF_ERROR(ReadTokens(config->root(), &state->tokens));
    if (name == state->source)
      WINNOW_RETURN_IF_ERROR(ReadTemplates(config->root(), &state->templates));
  }
  // The newer place, which goes before the older one.
  const size_t bytes_max = jinja::Limits().template_bytes_max;
  const absl::StatusOr<std::string> file = ReadSmallFile(Concat(model_dir, "/", kFile), bytes_max);
  if (file.ok()) {
    state->templates.clear();
    state->templates.push_back(ParseNamed("default", *file));
    state->source = kFile;
    const auto tool_use =
        ReadSmallFile(model_dir + "/additional_chat_templates/tool_use.jinja", bytes_max);
    if (tool_use.ok()) {
      state->templates.push_back(ParseNamed("tool_use", *tool_use));
    } else if (!absl::IsNotFound(tool_use.status())) {
      return tool_use.status();
    }
  } else if (!absl::IsNotFound(file.status())) {
    return file.status();
  }
  ChatTemplate chat;
  if (!state->templates.empty()) chat.state_ = std::move(state);
  return chat;
}

absl::Status ChatTemplate::status() const {
  if (state_ == nullptr)
    return absl::FailedPreconditionError("the model directory has no chat template");
  const NamedTemplate* found = state_->Find(/*tools=*/false);
  if (found == nullptr)
    return absl::FailedPreconditionError("the model has no chat template named \"default\"");
  return found->status;
}

std::string_view ChatTemplate::name() const {
  return status().ok() ? std::string_view(state_->source) : "";
}

bool ChatTemplate::Mentions(std::string_view text) const {
  return state_ != nullptr && std::any_of(state_->templates.begin(), state_->templates.end(),
                                          [text](const NamedTemplate& known) {
                                            return known.source.find(text) != std::string::npos;
                                          });
}

absl::StatusOr<ChatTemplate::Rendered> ChatTemplate::Render(const ChatRequest& request,
                                                            const jinja::Limits& limits) const {
  return RenderWith(request, {}, limits);
}

absl::StatusOr<ChatTemplate::Rendered> ChatTemplate::Render(
    std::span<const ChatMessage> messages, bool add_generation_prompt,
    std::optional<absl::CivilSecond> now) const {
  ChatRequest request;
  request.add_generation_prompt = add_generation_prompt;
  request.now = now;
  return RenderWith(request, messages, jinja::Limits());
}

absl::StatusOr<ChatTemplate::Rendered> ChatTemplate::RenderWith(const ChatRequest& request,
                                                                std::span<const ChatMessage> plain,
                                                                const jinja::Limits& limits) const {
  const bool tools = request.tools != nullptr && !request.tools->is_null();
  const NamedTemplate* chosen = state_ == nullptr ? nullptr : state_->Find(tools);
  if (chosen == nullptr) return status();
  WINNOW_RETURN_IF_ERROR(chosen->status);
  Interpreter interpreter(*chosen->tree, limits);
  for (const auto& [name, token] : state_->tokens)
    interpreter.SetVariable(name, Value::String(token));
  WINNOW_RETURN_IF_ERROR(SetVariables(request, plain, &interpreter));
  const absl::StatusOr<jinja::MarkedText> out = interpreter.Run();
  if (!out.ok()) {
    const std::string_view message(out.status().message().data(), out.status().message().size());
    return absl::Status(out.status().code(), interpreter.raised()
                                                 ? std::string(message)
                                                 : Concat("chat template, ", message));
  }
  return Rendered{std::string(out->bytes()), out->Segments()};
}

std::vector<TextSegment> ChatTemplate::Rendered::Segments() const {
  std::vector<TextSegment> out;
  out.reserve(segments.size());
  size_t at = 0;
  for (const auto& [length, parse_special] : segments) {
    out.push_back({std::string_view(text).substr(at, length), parse_special});
    at += length;
  }
  return out;
}

}  // namespace winnow::engine

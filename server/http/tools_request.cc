#include "server/http/tools_request.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "engine/grammar/grammar_check.h"
#include "engine/kv/block_name.h"
#include "server/http/harmony_request.h"
#include "server/http/openai_answer.h"
#include "server/ordered_json.h"
#include "server/strings.h"
#include "server/utf8.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;
using Choice = RequestedTools::Choice;

constexpr size_t kMaxFunctionNameBytes = 64;  // OpenAI's

bool IsFunctionName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxFunctionNameBytes &&
         name.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") == name.npos;
}

OrderedJson StringOr(const OrderedJson& object, const char* name, const char* otherwise) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? *found : OrderedJson(otherwise);
}

// The list of `tools`, in order; empty if there is none.
OrderedJson OrderedTools(std::string_view body, JsonFields& fields) {
  nlohmann::json* const tools = fields.Array("tools");
  if (tools == nullptr || tools->empty()) return OrderedJson::array();
  if (tools->size() > kMaxTools) {
    fields.Add("tools", Concat("has ", tools->size(), " tools, may have at most ", kMaxTools));
    return OrderedJson::array();
  }
  absl::StatusOr<OrderedJson> ordered = ParseOrdered(TextOfMember(body, "tools"));
  if (ordered.ok()) return *std::move(ordered);
  fields.Add("tools", ToStd(ordered.status().message()));
  return OrderedJson::array();
}

// `function` has name, description, `schema_name` and strict.
void AddTool(const OrderedJson& function, const char* schema_name, const std::string& path,
             JsonFields& fields, RequestedTools& out) {
  RequestedTool tool;
  tool.name = StringOr(function, "name", "").get<std::string>();
  if (!IsFunctionName(tool.name)) {
    fields.Add(path + ".name",
               Concat("must be 1 to ", kMaxFunctionNameBytes, " of [A-Za-z0-9_.-]"));
    return;
  }
  for (const RequestedTool& other : out.tools) {
    if (other.name != tool.name) continue;
    fields.Add(path + ".name", Concat("\"", tool.name, "\" is there twice"));
    return;
  }
  tool.parameters = function.value(schema_name, OrderedJson());
  if (tool.parameters.is_null()) {
    tool.parameters = {{"type", "object"}, {"properties", OrderedJson::object()}};
  } else if (!tool.parameters.is_object()) {
    fields.Add(Concat(path, ".", schema_name), "must be a JSON schema");
    return;
  }
  tool.strict = function.value("strict", OrderedJson()) == true;
  out.tools.push_back(std::move(tool));
}

// As every template knows it.
OrderedJson Shown(const OrderedJson& function, const RequestedTool& tool) {
  OrderedJson shown = {{"name", tool.name}};
  if (const OrderedJson description = function.value("description", OrderedJson());
      description.is_string()) {
    shown["description"] = description;
  }
  shown["parameters"] = tool.parameters;
  return {{"type", "function"}, {"function", std::move(shown)}};
}

// "auto", "none" and "required", or the name of a function.
void TakeChoiceWord(const nlohmann::json& choice, JsonFields& fields, RequestedTools& out) {
  if (choice == "auto") {
    out.choice = Choice::kAuto;
  } else if (choice == "none") {
    out.choice = Choice::kNone;
  } else if (choice == "required") {
    out.choice = Choice::kRequired;
  } else {
    fields.Add("tool_choice", "must be auto, none, required, or name a function");
  }
}

void TakeNamed(const nlohmann::json& name, JsonFields& fields, RequestedTools& out) {
  out.choice = Choice::kNamed;
  if (name.is_string()) out.named = name.get<std::string>();
  const bool known = std::any_of(out.tools.begin(), out.tools.end(),
                                 [&](const RequestedTool& tool) { return tool.name == out.named; });
  if (!known) {
    fields.Add("tool_choice", Concat("names \"", CleanUtf8(out.named, kMaxShownBytes),
                                     "\", which is not among the tools"));
  }
}

// ---- grammars ----

OrderedJson SchemaFormat(const RequestedTool& tool) {
  return {{"type", "json_schema"},
          {"json_schema", tool.parameters},
          {"max_whitespace_cnt", engine::kMaxJsonWhitespace}};
}
OrderedJson AnyObject() {
  return {{"type", "json_schema"},
          {"json_schema", {{"type", "object"}, {"additionalProperties", true}}},
          {"max_whitespace_cnt", engine::kMaxJsonWhitespace}};
}

// A call as the model writes it. `any`: its arguments may be any object.
OrderedJson CallTag(const RequestedTool& tool, const ModelHabits& habits, bool any) {
  const std::string name = OrderedJson(tool.name).dump();
  const OrderedJson content = any ? AnyObject() : SchemaFormat(tool);
  switch (habits.tools) {
    case ToolFormat::kHermes:
      return {{"type", "tag"},
              {"begin", Concat("<tool_call>\n{\"name\": ", name, ", \"arguments\": ")},
              {"content", content},
              {"end", "}\n</tool_call>"}};
    case ToolFormat::kLlama3:
      return {{"type", "tag"},
              {"begin", Concat("{\"name\": ", name, ", \"parameters\": ")},
              {"content", content},
              {"end", "}"}};
    default:
      return {{"type", "tag"},
              {"begin", Concat("{\"name\": ", name, ", \"arguments\": ")},
              {"content", content},
              {"end", "}"}};
  }
}

// Whether the model may call it: a client that names a tool has its way.
bool IsThere(const RequestedTool& tool, const RequestedTools& requested) {
  return !tool.deferred || tool.found ||
         (requested.choice == Choice::kNamed && tool.name == requested.named);
}

OrderedJson Token(int32_t id) { return {{"type", "token"}, {"token", id}}; }
OrderedJson Text(std::string_view text) { return {{"type", "const_string"}, {"value", text}}; }

// A last message that calls one of the tools: a turn of Harmony ends with its call. `texts`: or one that calls none.
OrderedJson HarmonyCalls(const std::vector<const RequestedTool*>& tools,
                         const HarmonyTokens& tokens, bool texts) {
  std::vector<OrderedJson> last;
  for (const RequestedTool* const tool : tools) {
    // Arguments are kept for those that ask for it, where the model may do otherwise.
    last.push_back(HarmonyCall(tokens, tool->name,
                               texts && !tool->strict ? AnyObject() : SchemaFormat(*tool)));
  }
  if (texts) last.push_back(HarmonyText(tokens));
  return HarmonyAnswer(tokens, /*preambles=*/true, last);
}

// One call or, where they may be parallel, several.
OrderedJson Calls(const std::vector<const RequestedTool*>& tools, const ModelHabits& habits,
                  bool parallel) {
  if (habits.harmony.has_value()) return HarmonyCalls(tools, *habits.harmony, /*texts=*/false);
  OrderedJson tags = OrderedJson::array();
  if (habits.tools == ToolFormat::kMistral && habits.arguments_token.has_value()) {
    OrderedJson calls = OrderedJson::array();
    for (const RequestedTool* const tool : tools) {
      calls.push_back({{"type", "sequence"},
                       {"elements", OrderedJson::array(
                                        {Token(*habits.calls_token), Text(tool->name),
                                         Token(*habits.arguments_token), SchemaFormat(*tool)})}});
    }
    OrderedJson one = {{"type", "or"}, {"elements", std::move(calls)}};
    return parallel ? OrderedJson{{"type", "plus"}, {"content", std::move(one)}} : one;
  }
  for (const RequestedTool* const tool : tools) tags.push_back(CallTag(*tool, habits, false));
  const bool mistral = habits.tools == ToolFormat::kMistral;
  OrderedJson calls = {{"type", "tags_with_separator"},
                       {"tags", std::move(tags)},
                       {"separator", mistral ? ", " : "\n"},
                       {"at_least_one", true},
                       {"stop_after_first", !parallel || habits.tools == ToolFormat::kLlama3}};
  if (!mistral) return calls;
  return {{"type", "sequence"},
          {"elements", OrderedJson::array(
                           {Token(*habits.calls_token), Text("["), std::move(calls), Text("]")})}};
}

void SetStructure(OrderedJson format, v1::GenerateRequest& out) {
  const OrderedJson tag = {{"type", "structural_tag"}, {"format", std::move(format)}};
  out.mutable_structured_output()->set_structural_tag(Dump(tag));
}

// The answer has to call; or may, and then the arguments have to be of the schema.
void ApplyGrammar(const RequestedTools& requested, const ModelHabits& habits, JsonFields& fields,
                  v1::GenerateRequest& out) {
  const bool must = requested.choice == Choice::kRequired || requested.choice == Choice::kNamed;
  const bool strict = std::any_of(
      requested.tools.begin(), requested.tools.end(),
      [&](const RequestedTool& tool) { return tool.strict && IsThere(tool, requested); });
  if (!must && !strict) return;
  if (out.has_structured_output()) {
    fields.Add("tool_choice", "beside a format of the answer is not served: one or the other");
    return;
  }
  if (must) {
    if (habits.tools == ToolFormat::kMistral && !habits.calls_token.has_value()) {
      fields.Add("tool_choice", "must be auto or none: the model has no token [TOOL_CALLS]");
      return;
    }
    std::vector<const RequestedTool*> tools;
    for (const RequestedTool& tool : requested.tools) {
      if (requested.choice == Choice::kRequired ? IsThere(tool, requested)
                                                : tool.name == requested.named)
        tools.push_back(&tool);
    }
    if (tools.empty()) {
      fields.Add("tool_choice", "needs tools that are not held back");
      return;
    }
    SetStructure(Calls(tools, habits, requested.parallel && requested.choice != Choice::kNamed),
                 out);
    return;
  }
  if (habits.harmony.has_value()) {
    std::vector<const RequestedTool*> tools;
    for (const RequestedTool& tool : requested.tools) {
      if (IsThere(tool, requested)) tools.push_back(&tool);
    }
    SetStructure(HarmonyCalls(tools, *habits.harmony, /*texts=*/true), out);
    return;
  }
  if (habits.tools != ToolFormat::kHermes) {
    fields.Add("tools",
               "strict needs tool_choice required with this model, or one function by name");
    return;
  }
  OrderedJson tags = OrderedJson::array();
  for (const RequestedTool& tool : requested.tools) {
    if (IsThere(tool, requested)) tags.push_back(CallTag(tool, habits, /*any=*/!tool.strict));
  }
  SetStructure({{"type", "triggered_tags"},
                {"triggers", OrderedJson::array({"<tool_call>"})},
                {"tags", std::move(tags)},
                {"at_least_one", false},
                {"stop_after_first", !requested.parallel}},
               out);
}

}  // namespace

RequestedTools TakeChatTools(std::string_view body, JsonFields& fields) {
  RequestedTools out;
  const OrderedJson tools = OrderedTools(body, fields);
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string path = Concat("tools[", i, "]");
    const OrderedJson& tool = tools[i];
    if (!tool.is_object() || StringOr(tool, "type", "") != "function" ||
        !tool.value("function", OrderedJson()).is_object()) {
      fields.Add(path, "must be {\"type\": \"function\", \"function\": {...}}");
      continue;
    }
    const size_t before = out.tools.size();
    AddTool(tool["function"], "parameters", path + ".function", fields, out);
    if (out.tools.size() > before) out.tools.back().shown = tool;
  }
  if (const nlohmann::json* const choice = fields.Find("tool_choice")) {
    if (choice->is_object() && choice->value("type", nlohmann::json()) == "function" &&
        choice->value("function", nlohmann::json()).is_object()) {
      TakeNamed((*choice)["function"].value("name", nlohmann::json()), fields, out);
    } else {
      TakeChoiceWord(*choice, fields, out);
    }
  }
  out.parallel = fields.Bool("parallel_tool_calls").value_or(true);
  return out;
}

RequestedTools TakeResponsesTools(std::string_view body, JsonFields& fields) {
  RequestedTools out;
  const OrderedJson tools = OrderedTools(body, fields);
  for (size_t i = 0; i < tools.size(); ++i) {
    const OrderedJson& tool = tools[i];
    const std::string path = Concat("tools[", i, "]");
    if (!tool.is_object()) {
      fields.Add(path, "must be an object");
      continue;
    }
    if (StringOr(tool, "type", "") != "function") continue;
    const size_t before = out.tools.size();
    AddTool(tool, "parameters", path, fields, out);
    if (out.tools.size() > before) out.tools.back().shown = Shown(tool, out.tools.back());
  }
  if (const nlohmann::json* const choice = fields.Find("tool_choice")) {
    if (choice->is_object() && choice->value("type", nlohmann::json()) == "function") {
      TakeNamed(choice->value("name", nlohmann::json()), fields, out);
    } else {
      TakeChoiceWord(*choice, fields, out);
    }
  }
  out.parallel = fields.Bool("parallel_tool_calls").value_or(true);
  return out;
}

namespace {

bool RunByAnthropic(std::string_view type) {
  return std::ranges::any_of(
      std::array{"web_search_", "web_fetch_", "code_execution_", "tool_search_tool_"},
      [&](std::string_view prefix) { return type.starts_with(prefix); });
}

}  // namespace

RequestedTools TakeAnthropicTools(std::string_view body, JsonFields& fields) {
  RequestedTools out;
  const OrderedJson tools = OrderedTools(body, fields);
  for (size_t i = 0; i < tools.size(); ++i) {
    const OrderedJson& tool = tools[i];
    const std::string path = Concat("tools[", i, "]");
    if (!tool.is_object()) {
      fields.Add(path, "must be an object");
      continue;
    }
    // Tools of Anthropic's own have a version as their type; a client's have none, or "custom". Those that Anthropic's
    // servers run are passed over, as with Responses: clients offer the web search with every request. Those that
    // the client runs (bash, an editor) are refused, because it relies on them.
    const OrderedJson type = StringOr(tool, "type", "custom");
    if (RunByAnthropic(type.get<std::string>())) continue;
    if (type != "custom") {
      fields.Add(path + ".type", Concat(CleanUtf8(Dump(type), kMaxShownBytes), " is not served"));
      continue;
    }
    const size_t before = out.tools.size();
    AddTool(tool, "input_schema", path, fields, out);
    if (out.tools.size() == before) continue;
    out.tools.back().shown = Shown(tool, out.tools.back());
    out.tools.back().deferred = tool.value("defer_loading", OrderedJson()) == true;
  }
  nlohmann::json* const object = fields.Object("tool_choice");
  if (object == nullptr) return out;
  JsonFields choice(*object, fields.violations(), "tool_choice.");
  out.parallel = !choice.Bool("disable_parallel_tool_use").value_or(false);
  const std::string type = choice.String("type").value_or("");
  if (type == "tool") {
    TakeNamed(choice.String("name").value_or(""), fields, out);
  } else if (type == "any") {
    out.choice = Choice::kRequired;
  } else if (type == "none") {
    out.choice = Choice::kNone;
  } else if (type != "auto") {
    choice.Add("type", "must be auto, any, tool or none");
  }
  return out;
}

AnswerParserOptions ApplyTools(const RequestedTools& requested, const ModelHabits& habits,
                               JsonFields& fields, v1::GenerateRequest& out) {
  AnswerParserOptions parser;
  const bool must = requested.choice == Choice::kRequired || requested.choice == Choice::kNamed;
  if (requested.tools.empty()) {
    if (must) fields.Add("tool_choice", "needs tools");
    return parser;
  }
  if (habits.tools == ToolFormat::kNone) {
    fields.Add("tools",
               "are not served: the model's chat template shows it no tools, or calls in a way "
               "that is not "
               "known (--tool-parser)");
    return parser;
  }
  // The model is not shown what it must not call.
  if (requested.choice == Choice::kNone) return parser;
  for (const RequestedTool& tool : requested.tools) {
    if (!tool.deferred) out.mutable_chat()->add_tools(Dump(tool.shown));
    if (IsThere(tool, requested)) parser.names.push_back(tool.name);
  }
  parser.tools = habits.tools;
  parser.one_call = !requested.parallel;
  // Marks of calls are control tokens there. Those of Harmony are marked in any case (ModelHabits::message_format).
  if (habits.tools == ToolFormat::kLlama3 || habits.tools == ToolFormat::kMistral) {
    out.set_show_special_tokens(true);
  }
  ApplyGrammar(requested, habits, fields, out);
  return parser;
}

std::string CallId(std::string_view generation, int32_t choice, size_t index) {
  constexpr std::string_view kDigits =
      "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  constexpr size_t kDigitsOfId = 9;
  const auto digest = engine::Sha256(Concat(generation, "/", choice, "/", index));
  std::string id;
  for (size_t i = 0; i < kDigitsOfId; ++i) {
    id += kDigits[static_cast<unsigned char>(digest[i]) % kDigits.size()];
  }
  return id;
}

}  // namespace winnow::server

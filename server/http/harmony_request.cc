#include "server/http/harmony_request.h"

#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/base/status_macros.h"
#include "engine/grammar/grammar_check.h"
#include "server/http/openai_answer.h"
#include "server/ordered_json.h"
#include "server/strings.h"
#include "server/validate.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson Token(int32_t id) { return {{"type", "token"}, {"token", id}}; }
OrderedJson Text(std::string_view text) { return {{"type", "const_string"}, {"value", text}}; }
OrderedJson Sequence(OrderedJson elements) {
  return {{"type", "sequence"}, {"elements", std::move(elements)}};
}
OrderedJson Or(OrderedJson elements) {
  if (elements.size() == 1) return std::move(elements[0]);
  return {{"type", "or"}, {"elements", std::move(elements)}};
}

// Any text of a message: all but the tokens that would end it or begin another.
OrderedJson AnyText(const HarmonyTokens& tokens) {
  OrderedJson excluded =
      OrderedJson::array({tokens.start, tokens.channel, tokens.message, tokens.end});
  if (tokens.constrain.has_value()) excluded.push_back(*tokens.constrain);
  for (const int32_t id : tokens.ends_turn) excluded.push_back(id);
  return {{"type", "any_tokens"}, {"exclude_tokens", std::move(excluded)}};
}

// A message that another one follows.
OrderedJson Message(const HarmonyTokens& tokens, std::string_view channel) {
  return Sequence(OrderedJson::array({Token(tokens.channel), Text(channel), Token(tokens.message),
                                      AnyText(tokens), Token(tokens.end), Token(tokens.start),
                                      Text("assistant")}));
}

OrderedJson Final(const HarmonyTokens& tokens, OrderedJson content) {
  return Sequence(OrderedJson::array(
      {Token(tokens.channel), Text("final"), Token(tokens.message), std::move(content)}));
}

// A schema whose objects and lists may have more than it names, where it does not say: a structural tag knows no other way
// to say so.
void Open(OrderedJson& schema) {
  if (!schema.is_object()) return;
  for (const char* const name : {"items", "additionalProperties", "unevaluatedItems",
                                 "unevaluatedProperties", "propertyNames"}) {
    if (const auto part = schema.find(name); part != schema.end()) Open(*part);
  }
  for (const char* const name : {"properties", "patternProperties", "$defs", "definitions",
                                 "prefixItems", "anyOf", "oneOf", "allOf"}) {
    const auto parts = schema.find(name);
    if (parts == schema.end() || !parts->is_structured()) continue;
    for (auto& [key, part] : parts->items()) Open(part);
  }
  const auto lacks = [&](const char* name) { return !schema.contains(name); };
  const bool object = schema.value("type", OrderedJson()) == "object" || !lacks("properties");
  const bool list = schema.value("type", OrderedJson()) == "array" || !lacks("prefixItems");
  if (object && lacks("additionalProperties") && lacks("unevaluatedProperties")) {
    schema["additionalProperties"] = true;
  }
  if (list && !lacks("prefixItems") && lacks("items") && lacks("unevaluatedItems")) {
    schema["items"] = true;
  }
}

OrderedJson SchemaFormat(OrderedJson schema) {
  return {{"type", "json_schema"},
          {"json_schema", std::move(schema)},
          {"max_whitespace_cnt", engine::kMaxJsonWhitespace}};
}

// A form of a text as a part of a structural tag. An error says what is wrong with it.
absl::StatusOr<OrderedJson> FormatOf(const v1::StructuredOutput& form) {
  switch (form.kind_case()) {
    case v1::StructuredOutput::kJsonSchema: {
      WINNOW_ASSIGN_OR_RETURN(OrderedJson schema, ParseOrdered(form.json_schema()));
      if (!schema.is_object() && !schema.is_boolean()) {
        return absl::InvalidArgumentError("a schema is an object, true or false");
      }
      if (form.open()) Open(schema);
      return SchemaFormat(std::move(schema));
    }
    case v1::StructuredOutput::kRegex:
      if (form.regex().size() > engine::kMaxRegexBytes) {
        return absl::InvalidArgumentError(Concat(
            "has ", form.regex().size(), " bytes, may have at most ", engine::kMaxRegexBytes));
      }
      return OrderedJson{{"type", "regex"}, {"pattern", form.regex()}};
    case v1::StructuredOutput::kGrammar:
      return OrderedJson{{"type", "grammar"}, {"grammar", form.grammar()}};
    case v1::StructuredOutput::kChoice: {
      OrderedJson texts = OrderedJson::array();
      for (const std::string& text : form.choice().texts()) {
        if (text.empty()) return absl::InvalidArgumentError("choice: a text is empty");
        texts.push_back(Text(text));
      }
      if (texts.empty() || texts.size() > size_t{kMaxGrammarChoices}) {
        return absl::InvalidArgumentError(
            Concat("choice: must have 1 to ", kMaxGrammarChoices, " texts, has ", texts.size()));
      }
      return Or(std::move(texts));
    }
    case v1::StructuredOutput::kStructuralTag: {
      WINNOW_ASSIGN_OR_RETURN(const OrderedJson tag, ParseOrdered(form.structural_tag()));
      // The older kind, with "structures" and "triggers", is of a whole answer.
      if (!tag.is_object() || !tag.contains("format")) {
        return absl::InvalidArgumentError("needs a member \"format\" with this model");
      }
      return tag["format"];
    }
    default:  // json_object
      return SchemaFormat({{"type", "object"}, {"additionalProperties", true}});
  }
}

// Recipients that `builtin_tools`, a variable of the template, shows to the model.
void AddBuiltinTools(const v1::ChatPrompt& chat, std::vector<std::string>& names) {
  const auto options =
      nlohmann::json::parse(chat.template_options(), nullptr, /*allow_exceptions=*/false);
  if (!options.is_object() || !options.contains("builtin_tools")) return;
  const nlohmann::json& tools = options["builtin_tools"];
  for (const nlohmann::json& tool : tools.is_array() ? tools : nlohmann::json::array()) {
    if (tool == "python") names.emplace_back("python");
    if (tool != "browser") continue;
    for (const char* const name : {"browser.search", "browser.open", "browser.find"}) {
      names.emplace_back(name);
    }
  }
}

}  // namespace

OrderedJson HarmonyAnswer(const HarmonyTokens& tokens, bool preambles,
                          const std::vector<OrderedJson>& last) {
  OrderedJson before = OrderedJson::array({Message(tokens, "analysis")});
  if (preambles) before.push_back(Message(tokens, "commentary"));
  return Sequence(OrderedJson::array(
      {{{"type", "star"}, {"content", Or(std::move(before))}}, Or(OrderedJson(last))}));
}

OrderedJson HarmonyCall(const HarmonyTokens& tokens, const std::string& name,
                        OrderedJson arguments) {
  const std::string to = Concat(" to=functions.", name);
  OrderedJson type = OrderedJson::array({Text("json")});
  if (tokens.constrain.has_value()) {
    type.push_back(Sequence(OrderedJson::array({Token(*tokens.constrain), Text("json")})));
  }
  return Sequence(OrderedJson::array(
      {Or(OrderedJson::array(
           {Sequence(
                OrderedJson::array({Token(tokens.channel), Text(Concat("commentary", to, " "))})),
            Sequence(OrderedJson::array({Text(to), Token(tokens.channel), Text("commentary ")}))})),
       Or(std::move(type)), Token(tokens.message), std::move(arguments)}));
}

OrderedJson HarmonyText(const HarmonyTokens& tokens) { return Final(tokens, AnyText(tokens)); }

void ApplyReasoning(const ModelHabits& habits, const std::string& structured_field,
                    JsonFields& fields, v1::GenerateRequest& generate,
                    AnswerParserOptions& parser) {
  parser.reasoning = habits.reasoning;
  if (!habits.harmony.has_value()) return;
  parser.shows_control_tokens = generate.show_special_tokens();
  const size_t offered = parser.names.size();
  AddBuiltinTools(generate.chat(), parser.names);
  if (parser.names.size() > offered) parser.tools = ToolFormat::kHarmony;
  if (structured_field.empty() || !generate.has_structured_output()) return;
  const absl::StatusOr<OrderedJson> format = FormatOf(generate.structured_output());
  if (!format.ok()) {
    fields.Add(structured_field, ToStd(format.status().message()));
    return;
  }
  const OrderedJson tag = {{"type", "structural_tag"},
                           {"format", HarmonyAnswer(*habits.harmony, /*preambles=*/false,
                                                    {Final(*habits.harmony, *format)})}};
  generate.mutable_structured_output()->set_structural_tag(Dump(tag));
}

}  // namespace winnow::server

#include "server/http/model_habits.h"

#include "nlohmann/json.hpp"
#include "server/strings.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// The template's text for a prompt with a tool; "" if that is what it writes without.
std::string TextWithTool(const engine::ChatTemplate& chat_template) {
  const OrderedJson messages = OrderedJson::array({{{"role", "user"}, {"content", "x"}}});
  const OrderedJson tools = OrderedJson::array(
      {{{"type", "function"},
        {"function",
         {{"name", "f"},
          {"description", "d"},
          {"parameters", {{"type", "object"}, {"properties", OrderedJson::object()}}}}}}});
  engine::ChatRequest request;
  request.messages = &messages;
  const auto without = chat_template.Render(request);
  request.tools = &tools;
  const auto with = chat_template.Render(request);
  if (!with.ok() || (without.ok() && without->text == with->text)) return "";
  return with->text;
}

ToolFormat FormatOf(const engine::ChatTemplate& chat_template) {
  if (TextWithTool(chat_template).empty()) return ToolFormat::kNone;
  if (chat_template.Mentions("[TOOL_CALLS]")) return ToolFormat::kMistral;
  if (chat_template.Mentions("<tool_call>")) return ToolFormat::kHermes;
  if (chat_template.Mentions("<|python_tag|>") || chat_template.Mentions("ipython")) {
    return ToolFormat::kLlama3;
  }
  return ToolFormat::kNone;
}

}  // namespace

absl::StatusOr<ModelHabits> FindModelHabits(const engine::ChatTemplate& chat_template,
                                            const engine::Tokenizer& tokenizer,
                                            std::string_view tool_parser,
                                            std::string_view reasoning_parser) {
  ModelHabits habits;
  if (tool_parser == "auto") {
    habits.tools = FormatOf(chat_template);
  } else if (const auto format = ToolFormatOf(tool_parser)) {
    habits.tools = *format;
  } else {
    return absl::InvalidArgumentError(Concat(
        "tool_parser: \"", tool_parser, "\" is not auto, none, hermes, llama3_json or mistral"));
  }
  if (habits.tools == ToolFormat::kMistral) {
    habits.calls_token = tokenizer.TokenToId("[TOOL_CALLS]");
    habits.arguments_token = tokenizer.TokenToId("[ARGS]");
  }
  if (reasoning_parser == "auto") {
    habits.reasoning =
        tokenizer.TokenToId("<think>").has_value() && tokenizer.TokenToId("</think>").has_value();
  } else if (reasoning_parser == "think" || reasoning_parser == "none") {
    habits.reasoning = reasoning_parser == "think";
  } else {
    return absl::InvalidArgumentError(
        Concat("reasoning_parser: \"", reasoning_parser, "\" is not auto, none or think"));
  }
  return habits;
}

}  // namespace winnow::server

#include "server/http/model_habits.h"

#include <algorithm>
#include <utility>

#include "engine/base/status_macros.h"
#include "nlohmann/json.hpp"
#include "server/harmony_chat.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

// The engine marks control tokens, and the parser reads them.
static_assert(kMarkerBegin == engine::kControlBegin && kMarkerEnd == engine::kControlEnd);

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
  request.now = absl::CivilSecond(2026, 1, 1);  // some templates cannot do without
  const auto without = chat_template.Render(request);
  request.tools = &tools;
  const auto with = chat_template.Render(request);
  if (!with.ok() || (without.ok() && without->text == with->text)) return "";
  return with->text;
}

ToolFormat FormatOf(const engine::ChatTemplate& chat_template) {
  if (TextWithTool(chat_template).empty()) return ToolFormat::kNone;
  if (WritesHarmony(chat_template)) return ToolFormat::kHarmony;
  if (chat_template.Mentions("[TOOL_CALLS]")) return ToolFormat::kMistral;
  if (chat_template.Mentions("<tool_call>")) return ToolFormat::kHermes;
  if (chat_template.Mentions("<|python_tag|>") || chat_template.Mentions("ipython")) {
    return ToolFormat::kLlama3;
  }
  return ToolFormat::kNone;
}

absl::StatusOr<HarmonyTokens> FindHarmonyTokens(const engine::Tokenizer& tokenizer) {
  HarmonyTokens tokens;
  for (const auto& [text, id] : {std::pair("<|start|>", &tokens.start),
                                 {"<|channel|>", &tokens.channel},
                                 {"<|message|>", &tokens.message},
                                 {"<|end|>", &tokens.end}}) {
    const std::optional<int32_t> found = tokenizer.TokenToId(text);
    if (!found.has_value() || !tokenizer.IsSpecial(*found)) {
      return absl::InvalidArgumentError(
          Concat("harmony needs the control token ", text, ", which the vocabulary lacks"));
    }
    *id = *found;
  }
  tokens.constrain = tokenizer.TokenToId("<|constrain|>");
  for (const char* const text : {"<|return|>", "<|call|>"}) {
    if (const auto id = tokenizer.TokenToId(text)) tokens.ends_turn.push_back(*id);
  }
  return tokens;
}

engine::MessageFormat MessageFormatOf(const HarmonyTokens& tokens) {
  engine::MessageFormat format;
  format.header_begins = {tokens.start, tokens.channel, tokens.end};
  format.header_begins.insert(format.header_begins.end(), tokens.ends_turn.begin(),
                              tokens.ends_turn.end());
  format.header_ends = {tokens.message};
  return format;
}

// The format that "auto" stands for.
ReasoningFormat ReasoningOf(const engine::ChatTemplate& chat_template,
                            const engine::Tokenizer& tokenizer, ToolFormat tools) {
  if (tools == ToolFormat::kHarmony) return ReasoningFormat::kHarmony;
  if (WritesHarmony(chat_template) && FindHarmonyTokens(tokenizer).ok()) {
    return ReasoningFormat::kHarmony;
  }
  const bool thinks =
      tokenizer.TokenToId("<think>").has_value() && tokenizer.TokenToId("</think>").has_value();
  return thinks ? ReasoningFormat::kThink : ReasoningFormat::kNone;
}

}  // namespace

absl::StatusOr<ModelHabits> FindModelHabits(const engine::ChatTemplate& chat_template,
                                            const engine::Tokenizer& tokenizer,
                                            std::string_view tool_parser,
                                            std::string_view reasoning_parser) {
  ModelHabits habits;
  if (tool_parser == "auto") {
    habits.tools = FormatOf(chat_template);
    // A template alone does not make a model speak it.
    if (habits.tools == ToolFormat::kHarmony && !FindHarmonyTokens(tokenizer).ok()) {
      habits.tools = ToolFormat::kNone;
    }
  } else if (const auto format = ToolFormatOf(tool_parser)) {
    habits.tools = *format;
  } else {
    return absl::InvalidArgumentError(
        Concat("tool_parser: \"", tool_parser,
               "\" is not auto, none, hermes, llama3_json, mistral or harmony"));
  }
  if (habits.tools == ToolFormat::kMistral) {
    habits.calls_token = tokenizer.TokenToId("[TOOL_CALLS]");
    habits.arguments_token = tokenizer.TokenToId("[ARGS]");
  }
  if (reasoning_parser == "auto") {
    habits.reasoning = ReasoningOf(chat_template, tokenizer, habits.tools);
  } else if (reasoning_parser == "think") {
    habits.reasoning = ReasoningFormat::kThink;
  } else if (reasoning_parser == "harmony") {
    habits.reasoning = ReasoningFormat::kHarmony;
  } else if (reasoning_parser != "none") {
    return absl::InvalidArgumentError(
        Concat("reasoning_parser: \"", reasoning_parser, "\" is not auto, none, think or harmony"));
  }
  habits.has_effort = chat_template.Mentions("reasoning_effort");
  if (habits.tools != ToolFormat::kHarmony && habits.reasoning != ReasoningFormat::kHarmony) {
    return habits;
  }
  // One format says both, so there is no harmony for one of them beside another format for the other.
  if (habits.reasoning != ReasoningFormat::kHarmony) {
    return absl::InvalidArgumentError(
        "tool_parser: harmony needs the reasoning parser harmony or auto, because one format has "
        "both calls and reasoning");
  }
  if (habits.tools != ToolFormat::kHarmony && habits.tools != ToolFormat::kNone) {
    return absl::InvalidArgumentError(
        Concat("reasoning_parser: harmony needs the tool parser harmony or none, because one "
               "format has both calls and reasoning; it is ",
               ToolFormatName(habits.tools)));
  }
  WINNOW_ASSIGN_OR_RETURN(habits.harmony, FindHarmonyTokens(tokenizer));
  habits.message_format =
      std::make_shared<const engine::MessageFormat>(MessageFormatOf(*habits.harmony));
  return habits;
}

void AddEndsOfTurn(const ModelHabits& habits, std::vector<int32_t>& end_tokens) {
  if (!habits.harmony.has_value()) return;
  for (const int32_t id : habits.harmony->ends_turn) {
    const auto place = std::lower_bound(end_tokens.begin(), end_tokens.end(), id);
    if (place == end_tokens.end() || *place != id) end_tokens.insert(place, id);
  }
}

}  // namespace winnow::server

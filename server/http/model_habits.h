// How a server's model calls functions and thinks, as its chat template, its vocabulary and the options --tool-parser
// and --reasoning-parser say. Found once, at start.
#ifndef WINNOW_SERVER_HTTP_MODEL_HABITS_H_
#define WINNOW_SERVER_HTTP_MODEL_HABITS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/chat_template.h"
#include "engine/text/message_format.h"
#include "engine/text/tokenizer.h"
#include "server/parse/answer_parser.h"

namespace winnow::server {

// Ids of the control tokens that Harmony's messages are made of.
struct HarmonyTokens {
  int32_t start = 0, channel = 0, message = 0, end = 0;
  std::optional<int32_t> constrain;
  std::vector<int32_t> ends_turn;  // "<|return|>" and "<|call|>", of those that the vocabulary has
};

struct ModelHabits {
  // kNone: tools are refused.
  ToolFormat tools = ToolFormat::kNone;
  // For kMistral: the control tokens before calls and, where the model has it, before arguments.
  std::optional<int32_t> calls_token, arguments_token;
  ReasoningFormat reasoning = ReasoningFormat::kNone;
  // Whether the template has a variable reasoning_effort.
  bool has_effort = false;
  // For reasoning kHarmony, and set with it.
  std::optional<HarmonyTokens> harmony;
  std::shared_ptr<const engine::MessageFormat> message_format;  // of every answer to a chat
};

// `tool_parser`: "auto", or a ToolFormatName; `reasoning_parser`: "auto", "none", "think", "harmony". "auto" goes by what
// the template writes for a conversation with a tool, and by the vocabulary. InvalidArgument: another name; "harmony" with
// a vocabulary that lacks its control tokens, or as one of the two alone, because one format has both reasoning and calls
// (beside it the tool parser may be "none").
absl::StatusOr<ModelHabits> FindModelHabits(const engine::ChatTemplate& chat_template,
                                            const engine::Tokenizer& tokenizer,
                                            std::string_view tool_parser,
                                            std::string_view reasoning_parser);

// Adds to a model's end tokens those that its format ends a turn with: configurations name one of several, often.
// `end_tokens` stays ascending and without a token twice, if it is so.
void AddEndsOfTurn(const ModelHabits& habits, std::vector<int32_t>& end_tokens);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_MODEL_HABITS_H_

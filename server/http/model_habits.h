// How a server's model calls functions and thinks, as its chat template, its vocabulary and the options --tool-parser
// and --reasoning-parser say. Found once, at start.
#ifndef WINNOW_SERVER_HTTP_MODEL_HABITS_H_
#define WINNOW_SERVER_HTTP_MODEL_HABITS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "server/parse/answer_parser.h"

namespace winnow::server {

struct ModelHabits {
  // kNone: tools are refused.
  ToolFormat tools = ToolFormat::kNone;
  // For kMistral: the control tokens before calls and, where the model has it, before arguments.
  std::optional<int32_t> calls_token, arguments_token;
  bool reasoning = false;
};

// `tool_parser`: "auto", or a ToolFormatName; `reasoning_parser`: "auto", "none", "think". "auto" goes by what the
// template writes for a conversation with a tool, and by the vocabulary. InvalidArgument: another name.
absl::StatusOr<ModelHabits> FindModelHabits(const engine::ChatTemplate& chat_template,
                                            const engine::Tokenizer& tokenizer,
                                            std::string_view tool_parser,
                                            std::string_view reasoning_parser);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_HTTP_MODEL_HABITS_H_

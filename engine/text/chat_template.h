// Chat templates as models bring them: Jinja programs that write a conversation as one prompt.
//
// Any template runs, in an interpreter of winnow's own (engine/text/jinja) with limits on steps,
// depth, output, memory and time; it renders what transformers' apply_chat_template renders, which
// the tests hold it to. Text from the request is marked while it is rendered, so that control
// tokens come from the template alone.
//
// Immutable after Load; any thread; freely copied.
#ifndef WINNOW_ENGINE_TEXT_CHAT_TEMPLATE_H_
#define WINNOW_ENGINE_TEXT_CHAT_TEMPLATE_H_

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/civil_time.h"
#include "engine/text/jinja/limits.h"
#include "engine/text/tokenizer.h"

namespace winnow::engine {

struct ChatMessage {
  std::string role;     // "system", "user", "assistant"
  std::string content;  // UTF-8
};

// Everything that a template may be given. The values must outlive the call; order is kept,
// because templates print tools as they came.
struct ChatRequest {
  // An array of objects, each with a "role"; "content" (a string, or a list of parts), "tool_calls",
  // "tool_call_id", "name", "reasoning_content" and anything else as the template reads it.
  const nlohmann::ordered_json* messages = nullptr;
  const nlohmann::ordered_json* tools = nullptr;      // an array; null: none
  const nlohmann::ordered_json* documents = nullptr;  // an array; null: none
  // Further variables of the template, as in {"enable_thinking": false}; null: none. They go before
  // special tokens of the same name.
  const nlohmann::ordered_json* kwargs = nullptr;
  bool add_generation_prompt = true;
  // What strftime_now tells. Without it the template does not find that function, and falls back
  // to a date of its own if it has one.
  std::optional<absl::CivilSecond> now;
};

class ChatTemplate {
 public:
  // Names of tokens and their texts, as in {"bos_token", "<s>"}.
  using SpecialTokens = std::vector<std::pair<std::string, std::string>>;

  // From chat_template.jinja in `model_dir` (with additional_chat_templates/tool_use.jinja), else
  // from "chat_template" in its tokenizer_config.json. A template that does not parse, or none, is
  // not an error here: Render says so, because only chat needs it. An error: a file that is
  // malformed, too large or not readable.
  static absl::StatusOr<ChatTemplate> Load(const std::string& model_dir);
  // The same from a template's text and the tokens that it may print. An empty token is none.
  static ChatTemplate FromText(std::string_view text, std::string bos_token, std::string eos_token);
  static ChatTemplate FromText(std::string_view text, SpecialTokens tokens, std::string source);

  // The prompt as segments: the template's own text may hold control tokens, text from the request
  // may not. Owns nothing of the request after it returns. Encode it without adding special
  // tokens: what the model expects at the beginning is part of the template.
  struct Rendered {
    std::string text;  // the whole prompt
    std::vector<std::pair<size_t, bool>>
        segments;  // (length in bytes, parse_special), covering text in order
    std::vector<TextSegment> Segments() const;  // views into `text`
  };
  // Roles of one word that is usual (system, user, assistant, tool, ...) count as the template's
  // own text, because templates build control tokens of them: "<|" + role + "|>".
  //
  // InvalidArgument: no messages, a message that is no object or has no role made of letters,
  // digits, "_" and "-", an integer beyond 64 bits, nesting deeper than 100, or what the template
  // itself refuses (its own message, or "chat template, line N: ...").
  // ResourceExhausted: the template ran into a limit; names limit and line.
  // FailedPrecondition: no template, or one that does not parse; names the line.
  absl::StatusOr<Rendered> Render(const ChatRequest& request,
                                  const jinja::Limits& limits = jinja::Limits()) const;
  absl::StatusOr<Rendered> Render(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                  std::optional<absl::CivilSecond> now = std::nullopt) const;

  // Where the template was found: "chat_template.jinja", "tokenizer_config.json", ...; "" if there
  // is none that can be used.
  std::string_view name() const;
  // Whether any of the model's templates has `text` in its source.
  bool Mentions(std::string_view text) const;
  // What is wrong with the template, if it cannot be used.
  absl::Status status() const;

 private:
  struct State;
  absl::StatusOr<Rendered> RenderWith(const ChatRequest& request,
                                      std::span<const ChatMessage> plain,
                                      const jinja::Limits& limits) const;
  std::shared_ptr<const State> state_;  // null: no template
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_CHAT_TEMPLATE_H_

// The chat formats of the supported families, compiled in and recognised by their template text.
//
// A model directory's template is a Jinja program. winnow runs none: it knows the published
// templates of its families by a fingerprint of their text, and renders what they render for
// system, user and assistant messages (equal to transformers' apply_chat_template, which the tests
// hold it to). A template that differs by more than white space that Jinja drops is unknown,
// because it may render something else.
//
// Immutable after Load; any thread; freely copied.
#ifndef WINNOW_ENGINE_TEXT_CHAT_TEMPLATE_H_
#define WINNOW_ENGINE_TEXT_CHAT_TEMPLATE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer.h"

namespace winnow::engine {

struct ChatMessage {
  std::string role;     // "system", "user", "assistant"
  std::string content;  // UTF-8
};

enum class ChatFormat;

class ChatTemplate {
 public:
  // From chat_template.jinja in `model_dir`, else from "chat_template" in its
  // tokenizer_config.json. A template that is not known, or none, is not an error here: Render says
  // so, because only chat needs it. An error: a file that is malformed, too large or not readable.
  static absl::StatusOr<ChatTemplate> Load(const std::string& model_dir);
  // The same from a template's text and the tokens that it may print.
  static ChatTemplate FromText(std::string_view text, std::string bos_token, std::string eos_token);

  // The prompt as segments: the template's own text may hold control tokens, the messages' content
  // may not. Owns nothing of `messages` after it returns. Encode it without adding special tokens:
  // what the model expects at the beginning is part of the template.
  struct Rendered {
    std::string text;  // the whole prompt
    std::vector<std::pair<size_t, bool>>
        segments;  // (length in bytes, parse_special), covering text in order
    std::vector<TextSegment> Segments() const;  // views into `text`
  };
  // `date` is what templates that print today's date print, as in "26 Jul 2024"; empty: the date
  // that the template itself falls back to. See wants_date. InvalidArgument: no messages, a role
  // other than system, user and assistant, or roles in an order that the template refuses.
  // FailedPrecondition: no known template, or no BOS or EOS token for it.
  absl::StatusOr<Rendered> Render(std::span<const ChatMessage> messages, bool add_generation_prompt,
                                  std::string_view date = {}) const;

  std::string_view name() const;  // "llama3", "qwen2", ..., "" if unknown
  // Whether the template asks the reference for the current date (Llama 3.2 does; 3.1 has a fixed
  // one).
  bool wants_date() const;

 private:
  ChatFormat format_{};
  bool has_text_ = false;
  uint64_t fingerprint_ = 0;  // of an unknown template, for the error
  std::string bos_token_;
  std::string eos_token_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_CHAT_TEMPLATE_H_

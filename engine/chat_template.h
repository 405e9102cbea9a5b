// The chat formats of the supported families, compiled in and recognised by their template text.
#ifndef WINNOW_ENGINE_CHAT_TEMPLATE_H_
#define WINNOW_ENGINE_CHAT_TEMPLATE_H_

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer.h"

namespace winnow::engine {

struct ChatMessage {
  std::string role;     // "system", "user", "assistant"
  std::string content;  // UTF-8
};

class ChatTemplate {
 public:
  // From tokenizer_config.json (or chat_template.jinja) in `model_dir`. A template that is not known, or none, is not an
  // error here: Render says so, because only chat needs it.
  static absl::StatusOr<ChatTemplate> Load(const std::string& model_dir);

  // The prompt as segments: the template's own text may hold control tokens, the messages' content
  // may not. Owns nothing of `messages` after it returns.
  // InvalidArgument: roles in an order the template refuses. FailedPrecondition: no known template.
  struct Rendered {
    std::string text;                       // the whole prompt
    std::vector<std::pair<size_t, bool>> segments;  // (length in bytes, parse_special), covering text in order
    std::vector<TextSegment> Segments() const;
  };
  absl::StatusOr<Rendered> Render(std::span<const ChatMessage> messages, bool add_generation_prompt) const;

  std::string_view name() const;  // "llama3", "qwen2", ..., "" if unknown
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_CHAT_TEMPLATE_H_

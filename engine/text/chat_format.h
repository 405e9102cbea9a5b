// What each known chat template renders. Internal to chat_template.cc.
#ifndef WINNOW_ENGINE_TEXT_CHAT_FORMAT_H_
#define WINNOW_ENGINE_TEXT_CHAT_FORMAT_H_

#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/text/chat_template.h"

namespace winnow::engine {

enum class ChatFormat {
  kUnknown = 0,
  kNeedle,
  kChatMl,
  kLlama2,
  kLlama3,
  kLlama3AlwaysPrompts,  // adds the generation prompt even where none is asked for
  kLlama31,              // and 3.3
  kLlama32,
  kMistralV01,          // a space after the end of an answer
  kMistralV02,          // no system message
  kMistralV02Spaced,    // the same with a space before [INST] and before answers
  kMistralV02System,    // system message in the first user message
  kMistralV03,          // system message in the last one; answers trimmed
  kMistralV03Verbatim,  // answers as they are
  kMistralNemo,
  kQwen15,
  kQwen2,
  kQwen25,
  kQwen25Base,
  kQwen3,
};

struct ChatContext {
  std::span<const ChatMessage> messages;  // not empty; roles are system, user and assistant only
  bool add_generation_prompt;
  std::string_view date;
  std::string_view bos_token;
  std::string_view eos_token;
};

// Collects the prompt and who wrote each part of it.
class PromptBuilder {
 public:
  void Template(std::string_view text) { Add(text, true); }
  void Content(std::string_view text) { Add(text, false); }
  // Drops white space at the end, back to `begin` (a size of the text so far) at most.
  void StripRight(size_t begin);
  // The same at the left end of what was added since `begin`.
  void StripLeft(size_t begin);
  size_t size() const { return rendered_.text.size(); }
  ChatTemplate::Rendered Take() { return std::move(rendered_); }

 private:
  void Add(std::string_view text, bool is_template);
  ChatTemplate::Rendered rendered_;
};

// InvalidArgument: an order of roles that the template refuses.
absl::Status RenderChat(ChatFormat format, const ChatContext& chat, PromptBuilder* out);

// What Python's str.strip() leaves.
std::string_view StripSpace(std::string_view text);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TEXT_CHAT_FORMAT_H_

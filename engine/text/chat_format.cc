#include "engine/text/chat_format.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/concat.h"
#include "engine/status_macros.h"
#include "engine/text/unicode_text.h"

namespace winnow::engine {
namespace {

// str.isspace of Python: White_Space and the four separators of ASCII.
bool IsPythonSpace(char32_t c) { return IsWhiteSpace(c) || (c >= 0x1C && c <= 0x1F); }

size_t LeadingSpace(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    int length = 0;
    if (!IsPythonSpace(DecodeCodePoint(text, at, &length))) break;
    at += static_cast<size_t>(length);
  }
  return at;
}

size_t TrailingSpace(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t last = end - 1;
    while ((static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    int length = 0;
    if (!IsPythonSpace(DecodeCodePoint(text, last, &length))) break;
    end = last;
  }
  return text.size() - end;
}

absl::Status OutOfOrder(size_t index, std::string_view rule) {
  return absl::InvalidArgumentError(Concat("messages[", index, "].role: ", rule));
}

// User first, then in turns. The templates of Llama 2 and Mistral ask only whether it is the user's
// turn.
absl::Status CheckTurns(std::span<const ChatMessage> messages, size_t first_index) {
  for (size_t i = 0; i < messages.size(); ++i) {
    if ((messages[i].role == "user") != (i % 2 == 0)) {
      return OutOfOrder(first_index + i,
                        "roles must alternate user/assistant/user/assistant/... (after an optional "
                        "system message, where the template allows one)");
    }
  }
  return absl::OkStatus();
}

void RenderNeedle(const ChatContext& chat, PromptBuilder* out) {
  out->Template(chat.bos_token);
  for (const ChatMessage& message : chat.messages) {
    out->Template(Concat("<|", message.role, "|>\n"));
    out->Content(message.content);
    out->Template("<|end|>\n");
  }
  if (chat.add_generation_prompt) out->Template("<|assistant|>\n");
}

absl::Status RenderLlama2(const ChatContext& chat, PromptBuilder* out) {
  const bool has_system = chat.messages[0].role == "system";
  const std::span<const ChatMessage> turns = chat.messages.subspan(has_system ? 1 : 0);
  WINNOW_RETURN_IF_ERROR(CheckTurns(turns, has_system ? 1 : 0));
  for (size_t i = 0; i < turns.size(); ++i) {
    const ChatMessage& message = turns[i];
    const auto content = [&] {
      const size_t begin = out->size();
      if (i == 0 && has_system) {
        out->Template("<<SYS>>\n");
        out->Content(chat.messages[0].content);
        out->Template("\n<</SYS>>\n\n");
      }
      out->Content(message.content);
      // The template strips the two together.
      out->StripRight(begin);
      out->StripLeft(begin);
    };
    if (message.role == "user") {
      out->Template(Concat(chat.bos_token, "[INST] "));
      content();
      out->Template(" [/INST]");
    } else if (message.role == "assistant") {
      out->Template(" ");
      content();
      out->Template(Concat(" ", chat.eos_token));
    }
    // A later system message in an assistant's place prints nothing, as in the template.
  }
  return absl::OkStatus();
}

void Llama3Header(std::string_view role, PromptBuilder* out) {
  out->Template(Concat("<|start_header_id|>", role, "<|end_header_id|>\n\n"));
}

void Llama3Turns(const ChatContext& chat, std::span<const ChatMessage> messages, bool prompt,
                 PromptBuilder* out) {
  for (const ChatMessage& message : messages) {
    Llama3Header(message.role, out);
    out->Content(StripSpace(message.content));
    out->Template("<|eot_id|>");
  }
  if (prompt) Llama3Header("assistant", out);
}

void RenderLlama3(const ChatContext& chat, bool prompt, PromptBuilder* out) {
  out->Template(chat.bos_token);
  Llama3Turns(chat, chat.messages, prompt, out);
}

void RenderLlama31(const ChatContext& chat, PromptBuilder* out) {
  out->Template(chat.bos_token);
  Llama3Header("system", out);
  out->Template(Concat("Cutting Knowledge Date: December 2023\nToday Date: ",
                       chat.date.empty() ? std::string_view("26 Jul 2024") : chat.date, "\n\n"));
  const bool has_system = chat.messages[0].role == "system";
  if (has_system) out->Content(StripSpace(chat.messages[0].content));
  out->Template("<|eot_id|>");
  Llama3Turns(chat, chat.messages.subspan(has_system ? 1 : 0), chat.add_generation_prompt, out);
}

enum class SystemPlace { kNone, kFirstUser, kLastMessage };

struct MistralStyle {
  std::string_view open;
  std::string_view close;
  std::string_view before_answer;
  std::string_view after_answer;  // beside EOS
  SystemPlace system;
  bool trims_answers;
};

absl::Status RenderMistral(const ChatContext& chat, const MistralStyle& style, PromptBuilder* out) {
  const bool has_system = style.system != SystemPlace::kNone && chat.messages[0].role == "system";
  const std::span<const ChatMessage> turns = chat.messages.subspan(has_system ? 1 : 0);
  const size_t first_index = has_system ? 1 : 0;
  WINNOW_RETURN_IF_ERROR(CheckTurns(turns, first_index));
  out->Template(chat.bos_token);
  for (size_t i = 0; i < turns.size(); ++i) {
    const std::string_view content = turns[i].content;
    if (turns[i].role == "user") {
      out->Template(style.open);
      const bool here = style.system == SystemPlace::kFirstUser ? i == 0 : i + 1 == turns.size();
      if (has_system && here) {
        out->Content(chat.messages[0].content);
        out->Template("\n\n");
      }
      out->Content(content);
      out->Template(style.close);
    } else if (turns[i].role == "assistant") {
      out->Template(style.before_answer);
      out->Content(style.trims_answers ? StripSpace(content) : content);
      out->Template(Concat(chat.eos_token, style.after_answer));
    } else {
      return OutOfOrder(first_index + i,
                        "the template takes a system message only at the beginning");
    }
  }
  return absl::OkStatus();
}

void ChatMlTurn(std::string_view role, std::string_view content, PromptBuilder* out) {
  out->Template(Concat("<|im_start|>", role, "\n"));
  out->Content(content);
  out->Template("<|im_end|>\n");
}

void RenderChatMl(const ChatContext& chat, std::optional<std::string_view> default_system,
                  PromptBuilder* out) {
  if (default_system && chat.messages[0].role != "system") {
    out->Template(Concat("<|im_start|>system\n", *default_system, "<|im_end|>\n"));
  }
  for (const ChatMessage& message : chat.messages) ChatMlTurn(message.role, message.content, out);
  if (chat.add_generation_prompt) out->Template("<|im_start|>assistant\n");
}

// Without a generation prompt the last message stays open; with one after an answer, none is added.
void RenderQwen15(const ChatContext& chat, PromptBuilder* out) {
  if (chat.messages[0].role != "system") {
    out->Template("<|im_start|>system\nYou are a helpful assistant<|im_end|>\n");
  }
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    out->Template(Concat("<|im_start|>", chat.messages[i].role, "\n"));
    out->Content(chat.messages[i].content);
    const bool last = i + 1 == chat.messages.size();
    if (!last || chat.add_generation_prompt) out->Template("<|im_end|>\n");
  }
  if (chat.add_generation_prompt && chat.messages.back().role != "assistant") {
    out->Template("<|im_start|>assistant\n");
  }
}

std::string_view StripNewlines(std::string_view text, bool left, bool right) {
  while (left && text.starts_with('\n')) text.remove_prefix(1);
  while (right && text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

// Thinking is shown again only after the last question of the user.
void RenderQwen3(const ChatContext& chat, PromptBuilder* out) {
  constexpr std::string_view kOpen = "<think>";
  constexpr std::string_view kClose = "</think>";
  const size_t count = chat.messages.size();
  size_t last_question = count - 1;
  for (size_t i = count; i-- > 0;) {
    const std::string_view content = chat.messages[i].content;
    const bool tool_answer =
        content.starts_with("<tool_response>") && content.ends_with("</tool_response>");
    if (chat.messages[i].role == "user" && !tool_answer) {
      last_question = i;
      break;
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const ChatMessage& message = chat.messages[i];
    if (message.role != "assistant") {
      ChatMlTurn(message.role, message.content, out);
      continue;
    }
    std::string_view content = message.content;
    std::string_view reasoning;
    if (const size_t first = content.find(kClose); first != std::string_view::npos) {
      reasoning = StripNewlines(content.substr(0, first), false, true);
      if (const size_t open = reasoning.rfind(kOpen); open != std::string_view::npos) {
        reasoning.remove_prefix(open + kOpen.size());
      }
      reasoning = StripNewlines(reasoning, true, false);
      content = StripNewlines(content.substr(content.rfind(kClose) + kClose.size()), true, false);
    }
    out->Template("<|im_start|>assistant\n");
    if (i > last_question && (i + 1 == count || !reasoning.empty())) {
      out->Template("<think>\n");
      out->Content(StripNewlines(reasoning, true, true));
      out->Template("\n</think>\n\n");
      content = StripNewlines(content, true, false);
    }
    out->Content(content);
    out->Template("<|im_end|>\n");
  }
  if (chat.add_generation_prompt) out->Template("<|im_start|>assistant\n");
}

}  // namespace

std::string_view StripSpace(std::string_view text) {
  text.remove_suffix(TrailingSpace(text));
  text.remove_prefix(LeadingSpace(text));
  return text;
}

void PromptBuilder::Add(std::string_view text, bool is_template) {
  if (text.empty()) return;
  rendered_.text += text;
  auto& segments = rendered_.segments;
  if (!segments.empty() && segments.back().second == is_template) {
    segments.back().first += text.size();
  } else {
    segments.emplace_back(text.size(), is_template);
  }
}

void PromptBuilder::StripRight(size_t begin) {
  size_t drop = TrailingSpace(std::string_view(rendered_.text).substr(begin));
  rendered_.text.resize(rendered_.text.size() - drop);
  while (drop > 0) {
    auto& last = rendered_.segments.back();
    const size_t part = std::min(drop, last.first);
    last.first -= part;
    drop -= part;
    if (last.first == 0) rendered_.segments.pop_back();
  }
}

void PromptBuilder::StripLeft(size_t begin) {
  const size_t drop = LeadingSpace(std::string_view(rendered_.text).substr(begin));
  if (drop == 0) return;
  // Take off what was added since `begin` and add it again without its beginning.
  const ChatTemplate::Rendered all = std::exchange(rendered_, {});
  size_t at = 0;
  for (const auto& [length, is_template] : all.segments) {
    for (size_t i = at; i < at + length;) {
      const size_t end = i < begin ? std::min(begin, at + length) : at + length;
      const size_t from = i < begin ? i : std::max(i, begin + drop);
      if (from < end) Add(std::string_view(all.text).substr(from, end - from), is_template);
      i = end;
    }
    at += length;
  }
}

absl::Status RenderChat(ChatFormat format, const ChatContext& chat, PromptBuilder* out) {
  switch (format) {
    case ChatFormat::kUnknown:
      return absl::FailedPreconditionError("no known chat template");
    case ChatFormat::kNeedle:
      RenderNeedle(chat, out);
      break;
    case ChatFormat::kChatMl:
      RenderChatMl(chat, std::nullopt, out);
      break;
    case ChatFormat::kLlama2:
      return RenderLlama2(chat, out);
    case ChatFormat::kLlama3:
      RenderLlama3(chat, chat.add_generation_prompt, out);
      break;
    case ChatFormat::kLlama3AlwaysPrompts:
      RenderLlama3(chat, true, out);
      break;
    case ChatFormat::kLlama31:
    case ChatFormat::kLlama32:
      RenderLlama31(chat, out);
      break;
    case ChatFormat::kMistralV01:
      return RenderMistral(chat, {"[INST] ", " [/INST]", "", " ", SystemPlace::kNone, false}, out);
    case ChatFormat::kMistralV02:
      return RenderMistral(chat, {"[INST] ", " [/INST]", "", "", SystemPlace::kNone, false}, out);
    case ChatFormat::kMistralV02Spaced:
      return RenderMistral(chat, {" [INST] ", " [/INST]", " ", "", SystemPlace::kNone, false}, out);
    case ChatFormat::kMistralV02System:
      return RenderMistral(chat, {" [INST] ", " [/INST]", " ", "", SystemPlace::kFirstUser, false},
                           out);
    case ChatFormat::kMistralV03:
      return RenderMistral(chat, {"[INST] ", "[/INST]", " ", "", SystemPlace::kLastMessage, true},
                           out);
    case ChatFormat::kMistralV03Verbatim:
      return RenderMistral(chat, {"[INST] ", "[/INST]", " ", "", SystemPlace::kLastMessage, false},
                           out);
    case ChatFormat::kMistralNemo:
      return RenderMistral(chat, {"[INST]", "[/INST]", "", "", SystemPlace::kLastMessage, false},
                           out);
    case ChatFormat::kQwen15:
      RenderQwen15(chat, out);
      break;
    case ChatFormat::kQwen2:
    case ChatFormat::kQwen25Base:
      RenderChatMl(chat, "You are a helpful assistant.", out);
      break;
    case ChatFormat::kQwen25:
      RenderChatMl(chat, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
                   out);
      break;
    case ChatFormat::kQwen3:
      RenderQwen3(chat, out);
      break;
  }
  return absl::OkStatus();
}

}  // namespace winnow::engine

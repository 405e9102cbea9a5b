#include "bench/eval_prompt.h"

#include <algorithm>
#include <span>
#include <string>

#include "engine/base/status_macros.h"

namespace winnow::bench {
namespace {

absl::StatusOr<std::vector<int32_t>> Encode(const engine::Tokenizer& tokenizer,
                                            const engine::ChatTemplate& chat_template,
                                            PromptFormat format, const std::string& text,
                                            const EvalQuestion& question) {
  const std::string& prefix = question.answer_prefix;
  if (question.plain_prompt || format == PromptFormat::kPlain) {
    return tokenizer.Encode(text + (question.plain_prompt ? "" : "\n") + prefix,
                            /*add_special_tokens=*/true, /*parse_special=*/false);
  }
  const engine::ChatMessage message{"user", text};
  WINNOW_ASSIGN_OR_RETURN(const engine::ChatTemplate::Rendered rendered,
                          chat_template.Render({&message, 1}, /*add_generation_prompt=*/true));
  std::vector<engine::TextSegment> segments = rendered.Segments();
  if (!prefix.empty()) segments.push_back({prefix, /*parse_special=*/false});
  return tokenizer.Encode(segments, /*add_special_tokens=*/false);
}

}  // namespace

PromptFormat BestPromptFormat(const engine::ChatTemplate& chat_template) {
  const engine::ChatMessage message{"user", "Hello"};
  return chat_template.Render({&message, 1}, /*add_generation_prompt=*/true).ok()
             ? PromptFormat::kChat
             : PromptFormat::kPlain;
}

absl::StatusOr<std::vector<int32_t>> EncodeEvalPrompt(const engine::Tokenizer& tokenizer,
                                                      const engine::ChatTemplate& chat_template,
                                                      PromptFormat format, const EvalTask& task,
                                                      const EvalQuestion& question,
                                                      int32_t max_tokens) {
  std::string text = task.intro + task.document + "\n\n" + question.question;
  WINNOW_ASSIGN_OR_RETURN(std::vector<int32_t> prompt,
                          Encode(tokenizer, chat_template, format, text, question));
  if (!question.truncate || static_cast<int32_t>(prompt.size()) <= max_tokens) return prompt;

  WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(text, false, false));
  // The halves may take more tokens together with what stands around them than alone: what is over
  // is cut, too, until all fits.
  auto keep = static_cast<int32_t>(ids.size());
  while (static_cast<int32_t>(prompt.size()) > max_tokens && keep > 0) {
    keep = std::max(0, keep - (static_cast<int32_t>(prompt.size()) - max_tokens));
    const int32_t head = (keep + 1) / 2;
    text = tokenizer.Decode(std::span(ids).first(head), /*skip_special_tokens=*/false) +
           tokenizer.Decode(std::span(ids).last(keep - head), /*skip_special_tokens=*/false);
    WINNOW_ASSIGN_OR_RETURN(prompt, Encode(tokenizer, chat_template, format, text, question));
  }
  return prompt;
}

}  // namespace winnow::bench

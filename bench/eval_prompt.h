// The prompt of a question of `winnow eval`, as token ids.
//
// Its text is intro + document + "\n\n" + question. In chat format it is one user message in the
// model's template, and the answer's prefix follows where the assistant's turn begins; as plain text
// it is followed by a line break and the prefix. A question with plain_prompt is plain text in either
// format, and the answer goes on where the question's text ends, without a line break.
//
// Pure functions; any thread.
#ifndef WINNOW_BENCH_EVAL_PROMPT_H_
#define WINNOW_BENCH_EVAL_PROMPT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/eval_tasks.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace winnow::bench {

enum class PromptFormat { kChat, kPlain };

// kChat where the template can render a user's message, else kPlain.
PromptFormat BestPromptFormat(const engine::ChatTemplate& chat_template);

// A prompt of more than `max_tokens` comes back as it is, for the caller to leave out; but if the
// question allows it, tokens are cut out of the middle of its text, and both ends stay, in equal parts.
// Errors: what the chat template or the tokenizer refuses.
absl::StatusOr<std::vector<int32_t>> EncodeEvalPrompt(const engine::Tokenizer& tokenizer,
                                                      const engine::ChatTemplate& chat_template,
                                                      PromptFormat format, const EvalTask& task,
                                                      const EvalQuestion& question,
                                                      int32_t max_tokens);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_PROMPT_H_

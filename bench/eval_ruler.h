// The 13 tasks of RULER (Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context
// Language Models?") as questions of `winnow eval`, made for any length in tokens of any tokenizer.
//
//   niah_single_1     one number for one key in a noise of four repeated sentences
//   niah_single_2     the same in prose
//   niah_single_3     a UUID for one key in prose
//   niah_multikey_1   four keys with a number each in prose; one is asked for
//   niah_multikey_2   nothing but keys with numbers; one is asked for
//   niah_multikey_3   nothing but UUIDs with UUIDs; one is asked for
//   niah_multivalue   one key with four numbers in prose; all are asked for
//   niah_multiquery   four keys with a number each in prose; all are asked for
//   vt                variable tracking: a chain of one number and four assignments in the noise
//   cwe               common words: ten words 30 times, all others three times, in a numbered list
//   fwe               frequent words: coded words, rank r occurs in proportion to r^-2; rank 1 is dots,
//                     and ranks 2 to 4 are asked for
//   qa_1              a question that one of many passages answers
//   qa_2              a question that two of them answer together
//
// Scores are RULER's: the share of the references found in a greedy answer of at most 128 (niah), 30
// (vt), 120 (cwe), 50 (fwe) or 32 (qa) tokens, or for qa whether any form of the answer is found. The
// length is that of the whole prompt, chat format included, and the answer's tokens.
//
// Differences from the paper, because its material may not be here: the wording of prompts; prose is
// made of random sentences (or taken from a file) instead of essays; qa has passages about people and
// towns that do not exist instead of SQuAD and HotpotQA, so a model cannot know the answers before it
// reads; keys are pairs of words from a list of 358, and so are the words of cwe that go beyond that
// list. Figures are comparable between policies and models here, not with published ones.
//
// The same options give the same questions on every machine.
#ifndef WINNOW_BENCH_EVAL_RULER_H_
#define WINNOW_BENCH_EVAL_RULER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/eval_tasks.h"

namespace winnow::bench {

std::vector<std::string> RulerTasks();  // all 13 names, in the order above

struct RulerOptions {
  std::vector<int32_t> lengths;    // tokens
  std::vector<std::string> tasks;  // empty: all
  int32_t questions = 100;         // of each task and length
  uint64_t seed = 1;
  std::vector<std::string> sentences;  // the prose; empty: made
};

// Tokens of the prompt of the task's only question.
using CountPromptTokens = std::function<absl::StatusOr<int32_t>(const EvalTask&)>;

// Tasks in the order of names, then lengths, then questions. `count_tokens` is called whenever a task
// is made, and what it refers to must outlive the source. InvalidArgument: an unknown task. From `at`:
// InvalidArgument if the length has no room for the task's least.
absl::StatusOr<EvalTaskSource> RulerSource(RulerOptions options, CountPromptTokens count_tokens);

// The sentences of a text, for RulerOptions::sentences: cut after . ! ? and white space; those of more
// than 600 bytes are left out.
std::vector<std::string> SentencesOf(std::string_view text);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_RULER_H_

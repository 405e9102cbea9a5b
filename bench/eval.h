// How well a model answers under an attention policy: the work of `winnow eval`, without its flags.
//
// Tasks. A question's prompt is eval_prompt.h's. The answer is tokenised by itself, without special
// tokens.
//   token_acc  share of the answers' tokens that are the most likely one, given the prompt and the
//              answer so far (teacher-forced); over all tokens of all questions
//   exact      share of the questions all of whose answer tokens are: the greedy answer then begins
//              with the expected one
//   contains   share of the must_contain strings found in the free-running greedy answer, which
//              ends at an end token, when all were found, or kFreeRunExtraTokens after the expected
//              answer's length; averaged over the questions that have such strings
//   score      of a suite's questions: eval_score.h's, of the free-running greedy answer of at most
//              max_answer_tokens; averaged over the questions
//   kept       share of candidates that attention read, in the layers and for the tokens that the
//              policy covers: 1 for dense
//   coverage   share of the attention mass that anchors and those carry, mean over the measured
//              queries, layers and heads that retrieved: 1 for dense
//   iou        of the tokens selected and the equally many with the largest true scores, the same
//              mean: 1 for dense, where both are all tokens
//   probes     how many (query, layer, KV head) coverage and iou are means over
// What retrieves: the answer's tokens and the prompt's last `suffix`, or as many as the policy
// says. All before them is computed once for all policies.
//
// Text. Tokenised once as a whole, without special tokens; cut into windows that lie end to end,
// each begun afresh with what the tokenizer puts before a text (a BOS, if any). Every token is
// predicted from those before it in its window, but the first of a window that begins with nothing.
// Queries at positions from `retrieve_from` of a window on retrieve. What queries at positions from
// `score_from` on predict is scored; by default the two are the same, because what comes before is
// the same under every policy.
//   perplexity exp of the mean loss over the scored tokens
//   top1       share of the scored tokens at whose place the likeliest token is dense attention's
//   run        mean number of such places in a row: agreeing tokens over disagreeing ones
//
// Errors and pairs. Every mean has its standard error (eval_statistics.h), from blocks of 64 scored
// tokens or of one question. If one of the policies is dense, the first such is the reference: each
// other policy is compared with it token by token and question by question. A paired difference's
// error is much smaller than the two means', because easy and hard places are the same for both. The
// reference's losses and likeliest tokens are computed once per window and kept until the next. Of text another run can be
// the reference (eval_reference.h), of the same tokens under other weights.
#ifndef WINNOW_BENCH_EVAL_H_
#define WINNOW_BENCH_EVAL_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/eval_prompt.h"
#include "bench/eval_reference.h"
#include "bench/eval_statistics.h"
#include "bench/eval_tasks.h"
#include "engine/model.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/sequence_kv.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace winnow::bench {

inline constexpr int32_t kFreeRunExtraTokens = 32;
// The task's name of the cells that are means over a suite's tasks.
inline constexpr std::string_view kMeanTask = "mean";

struct EvalOptions {
  int32_t limit = 0;     // questions of each task and length, or windows of text; 0: all
  bool free_run = true;  // without it `contains` and `score` are absent
  PromptFormat prompt_format = PromptFormat::kChat;
  int32_t suffix = 1;            // last tokens of a prompt that retrieve; its last gives the first
                                 // token of the answer
  int32_t window_tokens = 4096;  // of text, with what is put before it
  int32_t retrieve_from = 1024;  // position in a window of text
  int32_t score_from = 1024;     // the same
  bool mean_over_tasks = false;  // a further cell for each policy and length
  // A second reference for texts, one of the policies.
  std::optional<engine::AttentionPolicy> beside;
};

// Measures of one policy's questions, or their paired differences to the reference's.
struct EvalMeasures {
  Estimate exact, token_acc;
  std::optional<Estimate> contains, score;
};

// One line of the results: a policy, a task and a length.
struct EvalCell {
  std::string policy, task;
  int32_t length = 0;   // 0: the task has none
  int32_t n = 0;        // questions asked
  int32_t skipped = 0;  // questions that do not fit into the context
  EvalMeasures measures;
  std::optional<EvalMeasures> against_dense;
  double kept = 1, coverage = 1, iou = 1;
  int64_t probes = 0;
  double prompt_tokens = 0;  // mean
};

struct TextResult {
  std::string policy;
  int64_t tokens = 0;  // scored
  Estimate perplexity;
  struct AgainstDense {
    Estimate percent;  // of perplexity, paired
    Estimate top1;
    double run = 0;
  };
  std::optional<AgainstDense> against_dense;
  std::optional<Estimate> beside_percent;  // of perplexity, paired with EvalOptions::beside
  double kept = 1, coverage = 1, iou = 1;
  int64_t probes = 0;
};

// `done` of `total` in units of expected work; `what` says where it is.
using EvalProgress = std::function<void(double done, double total, const std::string& what)>;

// One at a time; uses `model` alone while it runs. All references must outlive it. Coverage and IoU
// are of the queries that the model measures (RetrievalOptions::probe_interval).
class Evaluator {
 public:
  Evaluator(engine::Model& model, const engine::Tokenizer& tokenizer,
            const engine::ChatTemplate& chat_template, std::vector<int32_t> end_tokens,
            EvalOptions options);

  // The longest prompt and answer together, in tokens.
  int32_t max_tokens() const { return sequence_.max_tokens(); }

  // Cells in the order of policies, then of tasks as they first occur, then of lengths. A task is
  // not made when the limit of its cell is reached.
  // Errors: what the source, the chat template or the tokenizer refuses, with the task's id.
  absl::StatusOr<std::vector<EvalCell>> RunTasks(const EvalTaskSource& tasks,
                                                 std::span<const engine::AttentionPolicy> policies,
                                                 const EvalProgress& progress);

  // `against`, where given, is the reference of every policy, also of dense. `found` gets what the first dense policy
  // found. InvalidArgument: the window does not fit, no token is scored, `against` is of other tokens, or the second
  // reference is not among the policies. REQUIRES: with `found`, a dense policy.
  absl::StatusOr<std::vector<TextResult>> RunText(std::string_view text,
                                                  std::span<const engine::AttentionPolicy> policies,
                                                  const EvalProgress& progress,
                                                  const TextReference* against = nullptr,
                                                  TextReference* found = nullptr);

  // Tokens that the model computed so far; those of shared prefixes count once.
  int64_t computed_tokens() const { return sequence_.computed_tokens(); }

 private:
  struct Outcome;
  struct Tally;
  struct TextTally;
  struct TextWindow;
  absl::Status Ask(const EvalTask& task, const EvalQuestion& question,
                   const engine::AttentionPolicy& policy, Tally& tally);
  absl::Status AnswerFreely(const EvalQuestion& question, const engine::AttentionPolicy& policy,
                            int32_t retrieve_from, std::vector<int32_t> tokens,
                            size_t prompt_tokens, int32_t next, int32_t budget, Outcome& outcome);
  absl::Status RunWindow(const TextWindow& window,
                         std::span<const engine::AttentionPolicy> policies,
                         std::span<const size_t> order, std::span<TextTally> tallies,
                         const TextReference* against, TextReference* found,
                         const std::function<void(const engine::AttentionPolicy&)>& ran);

  const engine::Tokenizer& tokenizer_;
  const engine::ChatTemplate& chat_template_;
  const std::vector<int32_t> end_tokens_;
  const EvalOptions options_;
  engine::SequenceKv sequence_;
};

// {"results": [...], "text": [...]}, pretty-printed; `run` (a JSON object's text) becomes "run".
// docs/evaluation.md has every key.
std::string EvalJson(std::span<const EvalCell> cells, std::span<const TextResult> texts,
                     const std::string& run);

// The same for a person: aligned columns, one line a cell. Columns that no cell has are left out.
std::string EvalTable(std::span<const EvalCell> cells, std::span<const TextResult> texts);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_H_

// How well a model answers under an attention policy: the work of `winnow eval`, without its flags.
//
// Tasks. The prompt of a question is one user message, intro + document + "\n\n" + question, in the
// model's chat format (or as plain text, when asked for). The answer is tokenised by itself,
// without special tokens.
//   token_acc  share of the answers' tokens that are the most likely one, given the prompt and the
//              answer so far (teacher-forced); over all tokens of all questions
//   exact      share of the questions all of whose answer tokens are: the greedy answer then begins
//              with the expected one
//   contains   share of the must_contain strings found in the free-running greedy answer, which
//              ends at an end token, when all were found, or kFreeRunExtraTokens after the expected
//              answer's length; averaged over the questions that have such strings
//   kept       share of mid tokens that attention read, in the layers and for the tokens that the
//              policy covers: 1 for dense
//   coverage   share of the attention mass that anchors and those carry, mean over queries, layers
//              and heads that retrieved: 1 for dense
//   iou        of the tokens chosen and the equally many with the largest true scores, the same
//              mean: 1 for dense, where both are all tokens
// What retrieves: the answer's tokens and the prompt's last `suffix`, or as many as the policy
// says. All before them is computed once for all policies.
//
// Text. Tokenised once as a whole, without special tokens; cut into windows that lie end to end,
// each begun afresh with what the tokenizer puts before a text (a BOS, if any). Every token is
// predicted from those before it in its window, but the first of a window that begins with nothing.
// Perplexity is exp of the mean loss over all predicted tokens. Tokens from `retrieve_from` of a
// window on retrieve; perplexity of those alone stands beside, since what comes before is the same
// for all policies.
#ifndef WINNOW_ENGINE_EVAL_H_
#define WINNOW_ENGINE_EVAL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/attention_policy.h"
#include "engine/eval_tasks.h"
#include "engine/model.h"
#include "engine/sequence_kv.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"

namespace winnow::engine {

inline constexpr int32_t kFreeRunExtraTokens = 32;

enum class PromptFormat { kChat, kPlain };

struct EvalOptions {
  std::vector<int32_t> lengths;  // target_tokens to run; empty: all
  int32_t limit = 0;             // questions of each task and length, or windows of text; 0: all
  bool free_run = true;          // without it `contains` is absent
  PromptFormat prompt_format = PromptFormat::kChat;
  int32_t suffix = 1;            // last tokens of a prompt that retrieve; its last gives the first
                                 // token of the answer
  int32_t window_tokens = 4096;  // of text, with what is put before it
  int32_t retrieve_from = 1024;  // of a window of text
};

// One line of the results: a policy, a task and a length.
struct EvalCell {
  std::string policy, task;
  int32_t length = 0;
  int32_t n = 0;        // questions asked
  int32_t skipped = 0;  // questions that do not fit into the context
  double exact = 0;
  double token_acc = 0;
  std::optional<double> contains;
  double kept = 0, coverage = 0, iou = 0;
  double prompt_tokens = 0;  // mean
};

struct TextResult {
  std::string policy;
  double perplexity = 0;
  int64_t tokens = 0;                // predicted
  double retrieving_perplexity = 0;  // of the tokens that are predicted from retrieve_from on
  int64_t retrieving_tokens = 0;
  double kept = 1, coverage = 1, iou = 1;
};

// `done` of `total` in units of expected work; `what` says where it is.
using EvalProgress = std::function<void(double done, double total, const std::string& what)>;

// One at a time; uses `model` alone while it runs. All references must outlive it. Coverage and IoU
// need a model that measures every query (RetrievalOptions::probe_interval 1).
class Evaluator {
 public:
  Evaluator(Model& model, const Tokenizer& tokenizer, const ChatTemplate& chat_template,
            std::vector<int32_t> end_tokens, EvalOptions options);

  // Cells in the order of policies, then of tasks as they first occur, then of lengths.
  // Errors: what the chat template or the tokenizer refuses, with the task's id. InvalidArgument:
  // the file has no task of the wanted lengths.
  absl::StatusOr<std::vector<EvalCell>> RunTasks(std::span<const EvalTask> tasks,
                                                 std::span<const AttentionPolicy> policies,
                                                 const EvalProgress& progress);

  absl::StatusOr<std::vector<TextResult>> RunText(std::string_view text,
                                                  std::span<const AttentionPolicy> policies,
                                                  const EvalProgress& progress);

  // Tokens that the model computed so far; those of shared prefixes count once.
  int64_t computed_tokens() const { return sequence_.computed_tokens(); }

 private:
  struct Tally;
  struct TextTally;
  absl::StatusOr<std::vector<int32_t>> Prompt(const EvalTask& task, const EvalQuestion& question);
  absl::Status Ask(const EvalTask& task, const EvalQuestion& question,
                   const AttentionPolicy& policy, Tally& tally);
  absl::StatusOr<double> ContainedShare(const EvalQuestion& question, const AttentionPolicy& policy,
                                        int32_t retrieve_from, std::vector<int32_t> tokens,
                                        size_t prompt_tokens, int32_t next, int32_t budget);

  const Tokenizer& tokenizer_;
  const ChatTemplate& chat_template_;
  const std::vector<int32_t> end_tokens_;
  const EvalOptions options_;
  SequenceKv sequence_;
};

// {"results": [...], "text": [...]}, pretty-printed; `run` (a JSON object's text) becomes "run".
std::string EvalJson(std::span<const EvalCell> cells, std::span<const TextResult> texts,
                     const std::string& run);

// The same for a person: aligned columns, one line a cell.
std::string EvalTable(std::span<const EvalCell> cells, std::span<const TextResult> texts);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_EVAL_H_

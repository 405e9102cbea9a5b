// Input of `winnow eval`: documents with questions, and the task files that hold them, one JSON object
// a line,
//
//   {"id", "task", "target_tokens", "intro", "document",
//    "questions": [{"question", "answer", "must_contain": [..]}, ..]}
//
// A document with questions about it; each question is asked by itself after the whole document. The
// fields of EvalQuestion that no file has are set by the suites (eval_ruler.h, eval_longbench.h).
#ifndef WINNOW_BENCH_EVAL_TASKS_H_
#define WINNOW_BENCH_EVAL_TASKS_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::bench {

// How a free answer is scored against the references: engine/eval_score.h.
enum class EvalScorer {
  kNone,
  kMatchAll,
  kMatchAny,
  kQaF1,
  kRougeL,
  kClassification,
  kRetrieval,
  kCount,
  kCodeSimilarity,
};

struct EvalQuestion {
  std::string question;
  std::string answer;                     // the expected one, for token_acc and exact; not empty
  std::vector<std::string> must_contain;  // what a free answer must say; may be empty

  // Text that the answer begins with. It is given to the model, after the prompt.
  std::string answer_prefix = {};
  EvalScorer scorer = EvalScorer::kNone;
  std::vector<std::string> references = {};  // at least one where there is a scorer
  std::vector<std::string> classes = {};     // for kClassification: all that there are
  int32_t max_answer_tokens = 0;             // of a free answer that a scorer reads
  bool first_line_only = false;              // only the answer's first line is scored
  bool plain_prompt = false;                 // no chat format, whatever the model has
  bool truncate = false;                     // a prompt that is too long loses its middle
};

struct EvalTask {
  std::string id;
  std::string task;           // "niah_single"
  int32_t target_tokens = 0;  // the length that the document was made for; 0: none
  std::string intro;          // before the document
  std::string document;
  std::vector<EvalQuestion> questions;  // at least one
};

// Tasks that are made when their turn comes, because a suite of long documents does not fit into
// memory. `at(i)` for 0 <= i < size gives the same task every time.
struct EvalTaskSource {
  size_t size = 0;
  std::function<absl::StatusOr<EvalTask>(size_t)> at;
  std::function<double(size_t)> work;  // expected, in any unit: for the progress bar
};

// Those of `tasks` that were made for one of `lengths`; all where there are none. `tasks` must outlive
// the source. InvalidArgument: there is no such task.
absl::StatusOr<EvalTaskSource> SourceOf(std::span<const EvalTask> tasks,
                                        std::span<const int32_t> lengths);

// Cost of reading a document of so many tokens, in arbitrary units: products grow with its length,
// attention with the square.
double ExpectedEvalWork(double tokens);

// Empty lines are skipped. InvalidArgument: "NAME:LINE: what is wrong", or no task at all.
absl::StatusOr<std::vector<EvalTask>> ParseEvalTasks(std::string_view json_lines,
                                                     std::string_view name);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_TASKS_H_

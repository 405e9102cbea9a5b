// The task files of `winnow eval`: one JSON object a line,
//
//   {"id", "task", "target_tokens", "intro", "document",
//    "questions": [{"question", "answer", "must_contain": [..]}, ..]}
//
// A document with questions about it; each question is asked by itself after the whole document.
#ifndef WINNOW_ENGINE_EVAL_TASKS_H_
#define WINNOW_ENGINE_EVAL_TASKS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace winnow::engine {

struct EvalQuestion {
  std::string question;
  std::string answer;                     // not empty
  std::vector<std::string> must_contain;  // what a free answer must say; may be empty
};

struct EvalTask {
  std::string id;
  std::string task;           // "niah_single"
  int32_t target_tokens = 0;  // the length that the document was made for
  std::string intro;          // before the document
  std::string document;
  std::vector<EvalQuestion> questions;  // at least one
};

// Empty lines are skipped. InvalidArgument: "NAME:LINE: what is wrong", or no task at all.
absl::StatusOr<std::vector<EvalTask>> ParseEvalTasks(std::string_view json_lines,
                                                     std::string_view name);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_EVAL_TASKS_H_

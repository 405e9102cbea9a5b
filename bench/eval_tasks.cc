#include "bench/eval_tasks.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace winnow::bench {
namespace {

using nlohmann::json;

absl::Status ReadString(const json& object, const std::string& place, const char* key,
                        std::string& to) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    return absl::InvalidArgumentError(fmt::format("{}: \"{}\" must be a string", place, key));
  }
  to = found->get<std::string>();
  return absl::OkStatus();
}

absl::StatusOr<EvalQuestion> ReadQuestion(const json& object, const std::string& place) {
  if (!object.is_object()) return absl::InvalidArgumentError(place + ": must be an object");
  EvalQuestion question;
  WINNOW_RETURN_IF_ERROR(ReadString(object, place, "question", question.question));
  WINNOW_RETURN_IF_ERROR(ReadString(object, place, "answer", question.answer));
  if (question.answer.empty()) {
    return absl::InvalidArgumentError(place + ": \"answer\" must not be empty");
  }
  if (const auto words = object.find("must_contain"); words != object.end()) {
    if (!words->is_array()) {
      return absl::InvalidArgumentError(place + ": \"must_contain\" must be an array");
    }
    for (const json& word : *words) {
      if (!word.is_string() || word.get_ref<const std::string&>().empty()) {
        return absl::InvalidArgumentError(
            place + ": \"must_contain\" must hold strings that are not empty");
      }
      question.must_contain.push_back(word.get<std::string>());
    }
  }
  return question;
}

absl::StatusOr<EvalTask> ReadTask(const json& object, const std::string& place) {
  EvalTask task;
  WINNOW_RETURN_IF_ERROR(ReadString(object, place, "id", task.id));
  WINNOW_RETURN_IF_ERROR(ReadString(object, place, "task", task.task));
  WINNOW_RETURN_IF_ERROR(ReadString(object, place, "intro", task.intro));
  WINNOW_RETURN_IF_ERROR(ReadString(object, place, "document", task.document));
  const auto length = object.find("target_tokens");
  if (length == object.end() || !length->is_number_unsigned() ||
      length->get<uint64_t>() > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(place + ": \"target_tokens\" must be a count");
  }
  task.target_tokens = length->get<int32_t>();
  const auto questions = object.find("questions");
  if (questions == object.end() || !questions->is_array() || questions->empty()) {
    return absl::InvalidArgumentError(place + ": \"questions\" must be an array that is not empty");
  }
  for (size_t i = 0; i < questions->size(); ++i) {
    WINNOW_ASSIGN_OR_RETURN(
        EvalQuestion question,
        ReadQuestion((*questions)[i], fmt::format("{}: questions[{}]", place, i)));
    task.questions.push_back(std::move(question));
  }
  return task;
}

}  // namespace

double ExpectedEvalWork(double tokens) { return tokens + tokens * tokens / 8192; }

absl::StatusOr<EvalTaskSource> SourceOf(std::span<const EvalTask> tasks,
                                        std::span<const int32_t> lengths) {
  std::vector<const EvalTask*> wanted;
  for (const EvalTask& task : tasks) {
    if (lengths.empty() ||
        std::find(lengths.begin(), lengths.end(), task.target_tokens) != lengths.end()) {
      wanted.push_back(&task);
    }
  }
  if (wanted.empty()) return absl::InvalidArgumentError("no task of the lengths asked for");
  EvalTaskSource source;
  source.size = wanted.size();
  source.work = [wanted](size_t i) {
    return ExpectedEvalWork(static_cast<double>(wanted[i]->document.size()) / 4);
  };
  source.at = [wanted = std::move(wanted)](size_t i) { return *wanted[i]; };
  return source;
}

absl::StatusOr<std::vector<EvalTask>> ParseEvalTasks(std::string_view json_lines,
                                                     std::string_view name) {
  std::vector<EvalTask> tasks;
  WINNOW_RETURN_IF_ERROR(engine::ForEachJsonLine(
      json_lines, name, [&](const json& object, const std::string& place) -> absl::Status {
        WINNOW_ASSIGN_OR_RETURN(EvalTask task, ReadTask(object, place));
        tasks.push_back(std::move(task));
        return absl::OkStatus();
      }));
  if (tasks.empty()) return absl::InvalidArgumentError(fmt::format("{}: no task", name));
  return tasks;
}

}  // namespace winnow::bench

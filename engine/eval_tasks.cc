#include "engine/eval_tasks.h"

#include <limits>

#include "absl/status/status.h"
#include "engine/json_file.h"
#include "engine/status_macros.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace winnow::engine {
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

absl::StatusOr<std::vector<EvalTask>> ParseEvalTasks(std::string_view json_lines,
                                                     std::string_view name) {
  std::vector<EvalTask> tasks;
  int line_number = 0;
  for (size_t begin = 0; begin < json_lines.size();) {
    const size_t end = std::min(json_lines.find('\n', begin), json_lines.size());
    const std::string_view line = json_lines.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = fmt::format("{}:{}", name, line_number);
    WINNOW_ASSIGN_OR_RETURN(const json object, ParseJsonObject(line, place));
    WINNOW_ASSIGN_OR_RETURN(EvalTask task, ReadTask(object, place));
    tasks.push_back(std::move(task));
  }
  if (tasks.empty()) return absl::InvalidArgumentError(fmt::format("{}: no task", name));
  return tasks;
}

}  // namespace winnow::engine

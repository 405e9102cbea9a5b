#include "bench/eval_longbench.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace winnow::bench {
namespace {

using nlohmann::json;

struct Dataset {
  std::string_view name;
  EvalScorer scorer;
  int32_t max_answer_tokens;
  bool plain;            // no chat format
  bool first_line_only;  // of the answer
  std::string_view intro;
  std::string_view question;       // "{}" stands for the line's "input"
  std::string_view answer_prefix;  // the beginning of the answer
};

constexpr std::array kDatasets = {
    Dataset{
        "narrativeqa", EvalScorer::kQaF1, 128, false, false,
        "Here is a story, from a book or a film script. A question about it follows.\n\nStory: ",
        "Answer in as few words as you can, with a single phrase if that will do, and explain "
        "nothing.\n\nQuestion: {}",
        "Answer:"},
    Dataset{"qasper", EvalScorer::kQaF1, 128, false, false,
            "Here is a scientific article. A question about it follows.\n\nArticle: ",
            "Answer in as few words as you can, with a phrase or one sentence. If the article does "
            "not say it, answer \"unanswerable\"; if the question wants a yes or a no, answer "
            "\"yes\", \"no\" or \"unanswerable\". Explain nothing.\n\nQuestion: {}",
            "Answer:"},
    Dataset{"multifieldqa_en", EvalScorer::kQaF1, 64, false, false,
            "Read this text; a question about it follows.\n\n",
            "Answer the question from the text. Give nothing but the answer.\n\nQuestion: {}",
            "Answer:"},
    Dataset{"hotpotqa", EvalScorer::kQaF1, 32, false, false,
            "A question follows that these passages answer.\n\n",
            "Answer the question from the passages. Give nothing but the answer.\n\nQuestion: {}",
            "Answer:"},
    Dataset{"2wikimqa", EvalScorer::kQaF1, 32, false, false,
            "A question follows that these passages answer.\n\n",
            "Answer the question from the passages. Give nothing but the answer.\n\nQuestion: {}",
            "Answer:"},
    Dataset{"musique", EvalScorer::kQaF1, 32, false, false,
            "A question follows that these passages answer.\n\n",
            "Answer the question from the passages. Give nothing but the answer.\n\nQuestion: {}",
            "Answer:"},
    Dataset{"gov_report", EvalScorer::kRougeL, 512, false, false,
            "Here is a report of a government's agency, to be summed up in one page.\n\nReport:\n",
            "Now sum up the report in one page.", "Summary:"},
    Dataset{"qmsum", EvalScorer::kRougeL, 512, false, false,
            "Here is the transcript of a meeting. A question or a request about it "
            "follows.\n\nTranscript:\n",
            "Answer from the transcript, in one or more sentences.\n\nQuery: {}", "Answer:"},
    Dataset{"multi_news", EvalScorer::kRougeL, 512, false, false,
            "Here are several news stories, to be summed up together in one page.\n\nNews:\n",
            "Now sum up all the news in one page.", "Summary:"},
    Dataset{"trec", EvalScorer::kClassification, 64, true, true,
            "Say of what type the last question is. Here are examples.\n\n", "{}", ""},
    Dataset{"triviaqa", EvalScorer::kQaF1, 32, true, true,
            "Answer the last question from its passage, with nothing but the answer. Here are "
            "examples.\n\n",
            "{}", ""},
    Dataset{"samsum", EvalScorer::kRougeL, 128, true, true,
            "Sum up the last dialogue in a few short sentences. Here are examples.\n\n", "{}", ""},
    Dataset{"lsht", EvalScorer::kClassification, 64, true, true,
            "判断最后一条新闻属于哪个类别。先看例子。\n\n", "{}", ""},
    Dataset{"passage_count", EvalScorer::kCount, 32, false, false,
            "Some of these paragraphs occur more than once. Read them and find out how many "
            "different ones there are.\n\n",
            "How many different paragraphs are there? Give nothing but the number, as 1, 2 or 3.",
            "The number of different paragraphs is"},
    Dataset{
        "passage_retrieval_en", EvalScorer::kRetrieval, 32, false, false,
        "Here are 30 paragraphs, and after them the abstract of one of them. Find out which one "
        "it is.\n\n",
        "This is the abstract:\n\n{}\n\nName the paragraph's number, as \"Paragraph 1\" or "
        "\"Paragraph 2\".",
        "The abstract is that of"},
    Dataset{"passage_retrieval_zh", EvalScorer::kRetrieval, 32, false, false,
            "下面是若干段落，之后是其中一段的摘要。请找出摘要属于哪一段。\n\n",
            "摘要如下：\n\n{}\n\n请写出段落编号，例如“段落1”或“段落2”。", "答案是："},
    Dataset{"lcc", EvalScorer::kCodeSimilarity, 64, true, false,
            "Write the next line of the code below.\n", "Next line of the code:\n", ""},
    Dataset{"repobench-p", EvalScorer::kCodeSimilarity, 64, true, false,
            "Write the next line of the code at the end.\n", "{}Next line of the code:\n", ""},
};

constexpr std::array<std::string_view, 3> kNeedWords = {"multifieldqa_zh", "dureader", "vcsum"};

absl::StatusOr<const Dataset*> FindDataset(std::string_view name, const std::string& place) {
  std::string_view base = name;
  if (base.ends_with("_e")) base.remove_suffix(2);
  for (const Dataset& dataset : kDatasets) {
    if (dataset.name == base) return &dataset;
  }
  if (std::find(kNeedWords.begin(), kNeedWords.end(), base) != kNeedWords.end()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: dataset {} is scored by words of Chinese text, which winnow cannot split",
                    place, name));
  }
  return absl::InvalidArgumentError(
      fmt::format("{}: dataset {} is not one of LongBench's", place, name));
}

absl::StatusOr<std::string> ReadString(const json& object, const char* key,
                                       const std::string& place) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) {
    return absl::InvalidArgumentError(fmt::format("{}: \"{}\" must be a string", place, key));
  }
  return found->get<std::string>();
}

// Empty strings are left out, because they match every answer or none.
absl::StatusOr<std::vector<std::string>> ReadStrings(const json& object, const char* key,
                                                     const std::string& place) {
  const auto found = object.find(key);
  std::vector<std::string> strings;
  const auto wrong = [&] {
    return absl::InvalidArgumentError(fmt::format(
        "{}: \"{}\" must be an array of strings, at least one of them not empty", place, key));
  };
  if (found == object.end() || !found->is_array()) return wrong();
  for (const json& item : *found) {
    if (!item.is_string()) return wrong();
    if (!item.get_ref<const std::string&>().empty()) strings.push_back(item.get<std::string>());
  }
  if (strings.empty()) return wrong();
  return strings;
}

std::string WithInput(std::string_view pattern, const std::string& input) {
  std::string text(pattern);
  if (const size_t place = text.find("{}"); place != std::string::npos) {
    text.replace(place, 2, input);
  }
  return text;
}

absl::StatusOr<EvalTask> ReadTask(const json& object, const std::string& place) {
  WINNOW_ASSIGN_OR_RETURN(const std::string name, ReadString(object, "dataset", place));
  WINNOW_ASSIGN_OR_RETURN(const Dataset* const dataset, FindDataset(name, place));
  WINNOW_ASSIGN_OR_RETURN(const std::string input, ReadString(object, "input", place));
  EvalTask task;
  task.task = name;
  WINNOW_ASSIGN_OR_RETURN(task.id, ReadString(object, "_id", place));
  WINNOW_ASSIGN_OR_RETURN(task.document, ReadString(object, "context", place));
  task.intro = dataset->intro;

  EvalQuestion question;
  WINNOW_ASSIGN_OR_RETURN(question.references, ReadStrings(object, "answers", place));
  if (dataset->scorer == EvalScorer::kClassification) {
    WINNOW_ASSIGN_OR_RETURN(question.classes, ReadStrings(object, "all_classes", place));
  }
  question.question = WithInput(dataset->question, input);
  question.answer_prefix = dataset->answer_prefix;
  // After a prefix, or an input that ends within a line ("Type:"), the answer is a further word of it.
  const bool in_line = !question.answer_prefix.empty() || input.ends_with(':');
  question.answer = (in_line ? " " : "") + question.references.front();
  question.scorer = dataset->scorer;
  question.max_answer_tokens = dataset->max_answer_tokens;
  question.plain_prompt = dataset->plain;
  question.first_line_only = dataset->first_line_only;
  question.truncate = true;
  task.questions.push_back(std::move(question));
  return task;
}

}  // namespace

absl::StatusOr<std::vector<EvalTask>> ParseLongBench(std::string_view json_lines,
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

#include "bench/eval_longbench.h"

#include <string>
#include <vector>

#include "bench/eval_prompt.h"
#include "bench/eval_score.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/unit/test_paths.h"

namespace winnow::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

nlohmann::json Line(const std::string& dataset) {
  return {{"input", "Who dug the well?"},
          {"context", "Ida dug a well."},
          {"answers", {"Ida", "", "Ida the smith"}},
          {"length", 4},
          {"dataset", dataset},
          {"language", "en"},
          {"all_classes", nullptr},
          {"_id", "a1"}};
}

absl::StatusOr<std::vector<EvalTask>> Parse(const nlohmann::json& line) {
  return ParseLongBench(line.dump(), "lb.jsonl");
}

TEST(EvalLongBench, LinesBecomeQuestionsThatTheirDatasetScores) {
  const auto tasks = ParseLongBench(
      Line("hotpotqa").dump() + "\n\n" + Line("gov_report_e").dump() + "\n", "lb.jsonl");
  ASSERT_TRUE(tasks.ok()) << tasks.status();
  ASSERT_THAT(*tasks, SizeIs(2));
  const EvalTask& task = tasks->front();
  EXPECT_EQ(task.id, "a1");
  EXPECT_EQ(task.task, "hotpotqa");
  EXPECT_EQ(task.document, "Ida dug a well.");
  const EvalQuestion& question = task.questions.front();
  EXPECT_THAT(question.question, HasSubstr("Who dug the well?"));
  EXPECT_THAT(question.references, ElementsAre("Ida", "Ida the smith"));
  EXPECT_EQ(question.answer, " Ida");
  EXPECT_EQ(question.scorer, EvalScorer::kQaF1);
  EXPECT_EQ(question.max_answer_tokens, 32);
  EXPECT_TRUE(question.truncate);
  EXPECT_FALSE(question.plain_prompt);
  EXPECT_EQ((*tasks)[1].task, "gov_report_e");
  EXPECT_EQ((*tasks)[1].questions.front().scorer, EvalScorer::kRougeL);
  EXPECT_THAT((*tasks)[1].questions.front().question, Not(HasSubstr("well")));
}

TEST(EvalLongBench, ClassesAreThoseOfTheLine) {
  nlohmann::json line = Line("trec");
  line["input"] = "Question: Who?\nType:";
  line["answers"] = {"Person"};
  line["all_classes"] = {"Person", "Place"};
  const auto tasks = Parse(line);
  ASSERT_TRUE(tasks.ok()) << tasks.status();
  const EvalQuestion& question = tasks->front().questions.front();
  EXPECT_TRUE(question.plain_prompt);
  EXPECT_TRUE(question.first_line_only);
  EXPECT_EQ(question.answer, " Person");
  EXPECT_EQ(ScoreAnswer(question, " Person\nQuestion: Place"), 1);
  line["all_classes"] = nullptr;
  EXPECT_THAT(std::string(Parse(line).status().message()), HasSubstr("\"all_classes\""));
}

TEST(EvalLongBench, WhatIsWrongIsNamedWithItsLine) {
  const auto expect_error = [](const absl::Status& status, const char* message) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  expect_error(ParseLongBench("", "lb.jsonl").status(), "lb.jsonl: no task");
  expect_error(ParseLongBench("\n{", "lb.jsonl").status(), "lb.jsonl:2");
  expect_error(Parse(Line("nonesuch")).status(), "lb.jsonl:1: dataset nonesuch is not one of");
  expect_error(Parse(Line("dureader")).status(), "words of Chinese text");
  for (const char* key : {"input", "context", "answers", "_id", "dataset"}) {
    nlohmann::json line = Line("hotpotqa");
    line.erase(key);
    expect_error(Parse(line).status(), key);
    line[key] = 7;
    expect_error(Parse(line).status(), key);
  }
  nlohmann::json line = Line("hotpotqa");
  line["answers"] = {""};
  expect_error(Parse(line).status(), "answers");
}

// ---- prompts ----

class EvalPrompt : public ::testing::Test {
 protected:
  EvalPrompt()
      : tokenizer_(*engine::Tokenizer::Load(SourcePath("models/needle-5m"))),
        chat_(*engine::ChatTemplate::Load(SourcePath("models/needle-5m"))) {
    for (int i = 0; i < 300; ++i) document_ += "Line " + std::to_string(i) + " of the report. ";
    nlohmann::json line = Line("gov_report");
    line["context"] = document_;
    task_ = Parse(line)->front();
  }

  std::string Prompt(const EvalTask& task, PromptFormat format, int32_t max_tokens,
                     size_t* size = nullptr) {
    const auto prompt =
        EncodeEvalPrompt(*tokenizer_, chat_, format, task, task.questions.front(), max_tokens);
    EXPECT_TRUE(prompt.ok()) << prompt.status();
    if (size != nullptr) *size = prompt->size();
    return tokenizer_->Decode(*prompt, /*skip_special_tokens=*/false);
  }

  std::unique_ptr<engine::Tokenizer> tokenizer_;
  engine::ChatTemplate chat_;
  std::string document_;
  EvalTask task_;
};

TEST_F(EvalPrompt, LosesItsMiddleWhereItIsTooLong) {
  size_t size = 0;
  const std::string whole = Prompt(task_, PromptFormat::kChat, 1 << 20, &size);
  EXPECT_THAT(whole, HasSubstr("Line 150 of"));
  for (const size_t room : {size, size - 1, size / 2, size_t{101}}) {
    size_t cut_size = 0;
    const std::string cut =
        Prompt(task_, PromptFormat::kChat, static_cast<int32_t>(room), &cut_size);
    EXPECT_LE(cut_size, room);
    EXPECT_GE(cut_size + 4, room);
    EXPECT_EQ(cut == whole, room == size);
    EXPECT_THAT(cut, ::testing::StartsWith("<|begin_of_text|><|user|>\nHere is a report"));
    EXPECT_THAT(cut, ::testing::EndsWith("one page.<|end|>\n<|assistant|>\nSummary:"));
    if (room <= size / 2) {
      EXPECT_THAT(cut, Not(HasSubstr("Line 150 of")));
    }
  }
  // What may not be cut is left as it is, for the caller to leave out.
  task_.questions.front().truncate = false;
  size_t untouched = 0;
  Prompt(task_, PromptFormat::kChat, 100, &untouched);
  EXPECT_EQ(untouched, size);
}

TEST_F(EvalPrompt, PlainQuestionsEndWhereTheAnswerGoesOn) {
  EXPECT_THAT(Prompt(task_, PromptFormat::kPlain, 1 << 20),
              ::testing::EndsWith("in one page.\nSummary:"));
  nlohmann::json line = Line("lcc");
  line["input"] = "";
  const EvalTask code = Parse(line)->front();
  for (const PromptFormat format : {PromptFormat::kChat, PromptFormat::kPlain}) {
    EXPECT_THAT(Prompt(code, format, 1 << 20), ::testing::EndsWith("\n\nNext line of the code:\n"));
  }
  EXPECT_EQ(BestPromptFormat(chat_), PromptFormat::kChat);
  EXPECT_EQ(BestPromptFormat(engine::ChatTemplate::FromText("{% if %}", "", "")),
            PromptFormat::kPlain);
}

}  // namespace
}  // namespace winnow::bench

#include "bench/eval_ruler.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "bench/eval_prompt.h"
#include "bench/eval_score.h"
#include "bench/eval_words.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/test_paths.h"

namespace winnow::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class EvalRuler : public ::testing::Test {
 protected:
  EvalRuler()
      : tokenizer_(*engine::Tokenizer::Load(SourcePath("models/needle-5m"))),
        chat_(*engine::ChatTemplate::Load(SourcePath("models/needle-5m"))) {}

  absl::StatusOr<int32_t> Count(const EvalTask& task) const {
    const auto prompt = EncodeEvalPrompt(*tokenizer_, chat_, PromptFormat::kChat, task,
                                         task.questions.front(), 1 << 28);
    if (!prompt.ok()) return prompt.status();
    return static_cast<int32_t>(prompt->size());
  }

  absl::StatusOr<EvalTaskSource> Source(const RulerOptions& options) const {
    return RulerSource(options, [this](const EvalTask& task) { return Count(task); });
  }

  std::vector<EvalTask> Make(const RulerOptions& options) const {
    const auto source = Source(options);
    EXPECT_TRUE(source.ok()) << source.status();
    std::vector<EvalTask> tasks;
    for (size_t i = 0; i < source->size; ++i) {
      auto task = source->at(i);
      EXPECT_TRUE(task.ok()) << task.status();
      if (task.ok()) tasks.push_back(*std::move(task));
    }
    return tasks;
  }

  EvalTask One(const char* task, int32_t length = 2048) const {
    return Make({.lengths = {length}, .tasks = {task}, .questions = 1, .seed = 1, .sentences = {}})
        .front();
  }

  std::unique_ptr<engine::Tokenizer> tokenizer_;
  engine::ChatTemplate chat_;
};

size_t Occurrences(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_F(EvalRuler, AllThirteenFillTheirLengthAndHoldTheirAnswers) {
  ASSERT_THAT(RulerTasks(), SizeIs(13));
  const std::vector<EvalTask> tasks =
      Make({.lengths = {4096, 6000}, .tasks = {}, .questions = 2, .seed = 3, .sentences = {}});
  ASSERT_EQ(tasks.size(), 13u * 2 * 2);
  std::map<std::string, int> seen;
  std::set<std::string> ids, documents;
  for (const EvalTask& task : tasks) {
    SCOPED_TRACE(task.id);
    ++seen[task.task];
    EXPECT_TRUE(ids.insert(task.id).second);
    EXPECT_TRUE(documents.insert(task.document).second);
    ASSERT_THAT(task.questions, SizeIs(1));
    const EvalQuestion& question = task.questions.front();
    const int32_t tokens = *Count(task) + question.max_answer_tokens;
    EXPECT_LE(tokens, task.target_tokens);
    // A passage is about 80 tokens, and which words cwe has changes with their number.
    const double least = task.task.starts_with("qa") || task.task == "cwe" ? 0.95 : 0.985;
    EXPECT_GE(tokens, least * task.target_tokens);
    ASSERT_THAT(question.references, Not(IsEmpty()));
    for (const std::string& reference : question.references) {
      EXPECT_THAT(task.document, HasSubstr(reference));
    }
    // The expected answer is one that scores.
    EXPECT_EQ(ScoreAnswer(question, question.answer), 1);
    EXPECT_EQ(ScoreAnswer(question, "I do not know."), 0);
  }
  EXPECT_THAT(seen, SizeIs(13));
}

TEST_F(EvalRuler, TheSameSeedGivesTheSameQuestionsAndAnotherOthers) {
  RulerOptions options{.lengths = {4096}, .tasks = {}, .questions = 1, .seed = 5, .sentences = {}};
  const std::vector<EvalTask> first = Make(options), again = Make(options);
  options.seed = 6;
  const std::vector<EvalTask> other = Make(options);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].document, again[i].document);
    EXPECT_EQ(first[i].questions[0].question, again[i].questions[0].question);
    EXPECT_NE(first[i].questions[0].references, other[i].questions[0].references) << first[i].id;
  }
}

TEST_F(EvalRuler, NeedlesAreAsManyAsTheTaskSays) {
  struct Expected {
    const char* task;
    size_t keys, references;  // needles in the document; 0: nothing else is there
  };
  for (const Expected& expected : std::vector<Expected>{{"niah_single_1", 1, 1},
                                                        {"niah_single_2", 1, 1},
                                                        {"niah_single_3", 1, 1},
                                                        {"niah_multikey_1", 4, 1},
                                                        {"niah_multivalue", 4, 4},
                                                        {"niah_multiquery", 4, 4},
                                                        {"niah_multikey_2", 0, 1},
                                                        {"niah_multikey_3", 0, 1}}) {
    SCOPED_TRACE(expected.task);
    const EvalTask task = One(expected.task);
    const EvalQuestion& question = task.questions.front();
    const size_t needles = Occurrences(task.document, "A special magic ");
    EXPECT_THAT(question.references, SizeIs(expected.references));
    if (expected.keys > 0) {
      EXPECT_EQ(needles, expected.keys);
    } else {
      EXPECT_GT(needles, 15u);
      EXPECT_EQ(needles, Occurrences(task.document, "."));
    }
    for (const std::string& reference : question.references) {
      EXPECT_EQ(Occurrences(task.document, reference), 1u);
      const size_t size = reference.size();
      EXPECT_EQ(size, expected.task == std::string("niah_single_3") ||
                              expected.task == std::string("niah_multikey_3")
                          ? 36u
                          : 7u);
    }
  }
  const EvalTask noise = One("niah_single_1");
  EXPECT_GT(Occurrences(noise.document, "The river runs to the sea."), 20u);
}

TEST_F(EvalRuler, NeedlesLieAnywhere) {
  const std::vector<EvalTask> tasks = Make(
      {.lengths = {2048}, .tasks = {"niah_single_2"}, .questions = 60, .seed = 1, .sentences = {}});
  int early = 0, late = 0;
  for (const EvalTask& task : tasks) {
    const double place = static_cast<double>(task.document.find("A special magic")) /
                         static_cast<double>(task.document.size());
    early += place < 0.25 ? 1 : 0;
    late += place > 0.75 ? 1 : 0;
  }
  // 15 are expected of each, with a spread of 3.4.
  EXPECT_GE(early, 3);
  EXPECT_GE(late, 3);
}

TEST_F(EvalRuler, VariablesFormAChainInOrder) {
  const EvalTask task = One("vt");
  const EvalQuestion& question = task.questions.front();
  ASSERT_THAT(question.references, SizeIs(5));
  size_t last = 0;
  for (size_t i = 0; i < 5; ++i) {
    const size_t at = task.document.find("VAR " + question.references[i] + " = ");
    ASSERT_NE(at, task.document.npos);
    EXPECT_GE(at, last);
    last = at;
    if (i > 0) {
      EXPECT_THAT(task.document,
                  HasSubstr(question.references[i] + " = VAR " + question.references[i - 1]));
    }
  }
  EXPECT_EQ(Occurrences(task.document, " = "), 5u);
  EXPECT_THAT(task.intro, HasSubstr(" = VAR "));  // the solved example
}

TEST_F(EvalRuler, WordsOccurAsOftenAsTheTaskSays) {
  const EvalTask task = One("cwe", 6000);
  std::map<std::string, int> counts;
  std::istringstream words(task.document);
  for (std::string number, word; words >> number >> word;) ++counts[word];
  ASSERT_THAT(task.questions[0].references, SizeIs(10));
  for (const std::string& reference : task.questions[0].references) {
    EXPECT_EQ(counts[reference], 30);
    counts.erase(reference);
  }
  EXPECT_GT(counts.size(), 20u);
  for (const auto& [word, count] : counts) EXPECT_EQ(count, 3) << word;
}

TEST_F(EvalRuler, CodedWordsFollowTheSquareOfTheirRank) {
  const EvalTask task = One("fwe", 8192);
  std::map<std::string, int> counts;
  std::istringstream words(task.document);
  int total = 0;
  for (std::string word; words >> word; ++total) ++counts[word];
  std::vector<std::pair<int, std::string>> ranked;
  for (const auto& [word, count] : counts) ranked.emplace_back(count, word);
  std::sort(ranked.rbegin(), ranked.rend());
  EXPECT_EQ(ranked[0].second, "....");
  EXPECT_THAT(task.questions[0].references,
              ElementsAre(ranked[1].second, ranked[2].second, ranked[3].second));
  for (int rank = 1; rank <= 4; ++rank) {
    EXPECT_NEAR(ranked[rank - 1].first, 0.60793 * total / (rank * rank), 1) << rank;
  }
  EXPECT_GT(ranked[3].first, ranked[4].first);
}

TEST_F(EvalRuler, PassagesAnswerAloneOrTwoTogether) {
  const EvalTask one = One("qa_1");
  EXPECT_GT(Occurrences(one.document, "Document "), 10u);
  for (int i = 0; i < 20; ++i) {
    EvalRandom random(i);
    FactWriter writer(random);
    const LinkedPassages linked = writer.PersonAndTown();
    // The town's passage has the answer, the question names the person, and only the person's names the
    // town.
    for (const auto& [question, references] : linked.questions) {
      EXPECT_THAT(question, HasSubstr(linked.person.title));
      EXPECT_THAT(question, Not(HasSubstr(linked.town.title)));
      EXPECT_THAT(linked.person.text, HasSubstr(linked.town.title));
      EXPECT_THAT(linked.town.text, HasSubstr(references.front()));
    }
  }
}

TEST_F(EvalRuler, ProseMayComeFromAText) {
  const std::vector<std::string> sentences =
      SentencesOf("One is first.  Two\nfollows! " + std::string(700, 'x') + ". Is it three? four ");
  EXPECT_THAT(sentences, ElementsAre("One is first.", "Two follows!", "Is it three?", "four"));
  const std::vector<EvalTask> tasks = Make({.lengths = {1024},
                                            .tasks = {"niah_multikey_1"},
                                            .questions = 1,
                                            .seed = 1,
                                            .sentences = sentences});
  EXPECT_GT(Occurrences(tasks.front().document, "Two follows!"), 10u);
}

TEST_F(EvalRuler, WhatCannotBeMadeIsRefused) {
  const auto unknown =
      Source({.lengths = {2048}, .tasks = {"vtt"}, .questions = 1, .seed = 1, .sentences = {}});
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.status().message()), HasSubstr("niah_single_1"));
  const auto small =
      Source({.lengths = {600}, .tasks = {"cwe"}, .questions = 1, .seed = 1, .sentences = {}});
  ASSERT_TRUE(small.ok());
  EXPECT_EQ(small->at(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(small->at(0).status().message()), HasSubstr("cwe needs at least"));
}

TEST(EvalWords, ManyPairsAreAllDifferent) {
  EvalRandom random(1);
  UniqueTexts texts(random);
  std::set<std::string> pairs;
  for (int i = 0; i < 40000; ++i) EXPECT_TRUE(pairs.insert(texts.WordPair()).second);
}

TEST(EvalWords, WordsBeyondTheListArePairsAndNotTheLast) {
  EvalRandom random(1);
  const std::vector<std::string> words = DistinctWords(1000, random);
  EXPECT_EQ(std::set<std::string>(words.begin(), words.end()).size(), 1000u);
  const auto pairs = [&](size_t first, size_t last) {
    return std::count_if(words.begin() + first, words.begin() + last,
                         [](const std::string& word) { return word.find('-') != word.npos; });
  };
  EXPECT_EQ(pairs(0, 1000), 1000 - 358);
  EXPECT_NEAR(pairs(0, 500), 321, 60);
  EXPECT_EQ(DistinctWords(10, random).size(), 10u);
}

// Of a seed, on every machine: no distribution of the standard library is in between.
TEST(EvalWords, SeedsGiveTheSameEverywhere) {
  EvalRandom random(SeedFrom(1, "vt-4096-0"));
  EXPECT_THAT((std::vector<size_t>{random.Below(1000), random.Below(1000), random.Below(7)}),
              ElementsAre(240u, 432u, 4u));
  EXPECT_EQ(ProseSentence(random),
            "It took the carpenter 6 days to walk from the idle basket to the silent field.");
}

}  // namespace
}  // namespace winnow::bench

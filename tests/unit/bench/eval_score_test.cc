#include "bench/eval_score.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace winnow::bench {
namespace {

EvalQuestion Question(EvalScorer scorer, std::vector<std::string> references,
                      std::vector<std::string> classes = {}) {
  EvalQuestion question;
  question.scorer = scorer;
  question.references = std::move(references);
  question.classes = std::move(classes);
  return question;
}

double Score(EvalScorer scorer, const std::string& answer, const std::string& reference) {
  return ScoreAnswer(Question(scorer, {reference}), answer);
}

TEST(EvalScore, MatchAllIsTheShareOfReferencesWhateverTheCase) {
  const EvalQuestion question = Question(EvalScorer::kMatchAll, {"ÉMILE", "42", "abc", "xyz"});
  EXPECT_EQ(ScoreAnswer(question, "émile wrote ABC and 4"), 0.5);
  EXPECT_EQ(ScoreAnswer(question, ""), 0);
  EXPECT_FALSE(ScoreIsFinal(question, "émile 42 abc"));
  EXPECT_TRUE(ScoreIsFinal(question, "émile 42 abc xYz"));
}

TEST(EvalScore, MatchAnyNeedsOne) {
  const EvalQuestion question = Question(EvalScorer::kMatchAny, {"Rhine", "the Rhone"});
  EXPECT_EQ(ScoreAnswer(question, "It is the rhone."), 1);
  EXPECT_EQ(ScoreAnswer(question, "It is the Rhon"), 0);
  EXPECT_TRUE(ScoreIsFinal(question, "RHINE"));
}

// Figures of the definition in Python: words without punctuation and articles, shared as often as both
// have them.
TEST(EvalScore, F1OfSharedWords) {
  EXPECT_DOUBLE_EQ(Score(EvalScorer::kQaF1, "The Danube, I think.", "river Danube"), 0.4);
  EXPECT_DOUBLE_EQ(Score(EvalScorer::kQaF1, "a dog and a dog", "the dog"), 0.5);
  EXPECT_DOUBLE_EQ(Score(EvalScorer::kQaF1, "Émile", "émile zola"), 2.0 / 3);
  EXPECT_EQ(Score(EvalScorer::kQaF1, "none", "other"), 0);
  EXPECT_EQ(Score(EvalScorer::kQaF1, "", "other"), 0);
  EXPECT_EQ(Score(EvalScorer::kQaF1, "the-end", "theend"), 1);
  EXPECT_DOUBLE_EQ(
      ScoreAnswer(Question(EvalScorer::kQaF1, {"x", "two words", "y"}), "two small words"), 0.8);
}

// Figures of rouge 1.0.1 on these texts (which adds 1e-8 to a divisor).
TEST(EvalScore, RougeLOfSentences) {
  const auto expect_score = [](double expected, const char* answer, const char* reference) {
    EXPECT_NEAR(Score(EvalScorer::kRougeL, answer, reference), expected, 2e-8) << answer;
  };
  expect_score(0.7999999950000002, "the cat sat on the mat", "the cat lay on the mat");
  expect_score(0.3809523759637189, "The pump failed. It was replaced in May. Nobody was hurt. ",
               "In May the pump was replaced. Nobody saw it fail.");
  expect_score(0.6666666616666668, "b a c", "a b c");
  expect_score(0.5999999950000001, "one two. three four five", "five four. two three one");
  expect_score(0.8571428522448981, "x  y\tz . ", "x y z");
  expect_score(
      0.31999999520000005,
      "Water rose in the valley. Three bridges were closed and the school moved. Then it fell",
      "The valley flooded. The school moved because three bridges were closed.");
  EXPECT_EQ(Score(EvalScorer::kRougeL, "", "x"), 0);
  EXPECT_EQ(Score(EvalScorer::kRougeL, "...", "x"), 0);
}

TEST(EvalScore, ClassesThatTheAnswerNamesShareThePoint) {
  const std::vector<std::string> classes = {"Animal", "Animal group", "Food", "Date"};
  const auto score = [&](const char* answer, const char* reference) {
    return ScoreAnswer(Question(EvalScorer::kClassification, {reference}, classes), answer);
  };
  EXPECT_EQ(score("Food", "Food"), 1);
  EXPECT_EQ(score("Food or Date", "Food"), 0.5);
  EXPECT_EQ(score("Animal group", "Animal group"), 1);  // which names "Animal", too
  EXPECT_EQ(score("Animal group", "Animal"), 0.5);
  EXPECT_EQ(score("Date", "Food"), 0);
  EXPECT_EQ(score("nothing", "Food"), 0);
}

TEST(EvalScore, FirstLineOnlyLeavesOutTheRest) {
  EvalQuestion question = Question(EvalScorer::kClassification, {"Food"}, {"Food", "Date"});
  EXPECT_EQ(ScoreAnswer(question, "\n\nFood\nDate"), 0.5);
  question.first_line_only = true;
  EXPECT_EQ(ScoreAnswer(question, "\n\nFood\nDate"), 1);
  EXPECT_FALSE(ScoreIsFinal(question, "\n\nFood"));
  EXPECT_TRUE(ScoreIsFinal(question, "\n\nFood\n"));
}

TEST(EvalScore, NumbersOfParagraphsAndCounts) {
  EXPECT_EQ(Score(EvalScorer::kRetrieval, "Paragraph 12", "Paragraph 12"), 1);
  EXPECT_EQ(Score(EvalScorer::kRetrieval, "12, or 13 or 1", "Paragraph 12"), 1.0 / 3);
  EXPECT_EQ(Score(EvalScorer::kRetrieval, "Paragraph 1", "Paragraph 12"), 0);
  EXPECT_EQ(Score(EvalScorer::kRetrieval, "段落7", "段落7"), 1);
  EXPECT_EQ(Score(EvalScorer::kRetrieval, "none", "Paragraph 12"), 0);
  EXPECT_EQ(Score(EvalScorer::kCount, "There are 7 of 10.", "7"), 0.5);
  EXPECT_EQ(Score(EvalScorer::kCount, "77", "7"), 0);
}

// Figures of fuzzywuzzy with python-Levenshtein on these lines.
TEST(EvalScore, CodeIsComparedInItsFirstLineWithoutAComment) {
  const auto score = [](const char* answer, const char* reference) {
    return Score(EvalScorer::kCodeSimilarity, answer, reference);
  };
  EXPECT_EQ(score("for i in range(10):", "for j in range(n):"), 0.86);
  EXPECT_EQ(score("return a + b", "return b + a"), 0.83);
  EXPECT_EQ(score("naïve = 2", "naive = 2"), 0.89);  // by characters, not by bytes
  EXPECT_EQ(score("    return result", "return results[0]"), 0.76);
  EXPECT_EQ(score("abc", "xyz"), 0);
  EXPECT_EQ(score("\n# a comment\n```python\nx = 1\ny = 2", "x = 1"), 1);
  EXPECT_EQ(score("// nothing else", "x = 1"), 0);
}

TEST(EvalScore, AnyBytesAreAnAnswer) {
  for (const EvalScorer scorer : {EvalScorer::kMatchAny, EvalScorer::kQaF1, EvalScorer::kRougeL,
                                  EvalScorer::kCodeSimilarity}) {
    EXPECT_EQ(Score(scorer, "\xff\xfe", "x"), 0);
  }
}

}  // namespace
}  // namespace winnow::bench

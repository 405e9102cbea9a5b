#include "bench/eval_score.h"

#include <utf8proc.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <span>
#include <vector>

#include "engine/text/unicode/unicode_text.h"
#include "kernels/check.h"

namespace winnow::bench {
namespace {

using Words = std::vector<std::string>;

std::u32string CodePoints(std::string_view text) {
  std::string valid;
  engine::AppendLossyUtf8(text, /*more_may_follow=*/false, &valid);
  std::u32string code_points;
  for (size_t i = 0; i < valid.size();) {
    int length = 0;
    code_points.push_back(engine::DecodeCodePoint(valid, i, &length));
    i += length;
  }
  return code_points;
}

Words SplitAtWhiteSpace(std::string_view text) {
  Words words;
  std::string word;
  for (const char32_t c : CodePoints(text)) {
    if (!engine::IsWhiteSpace(c)) {
      engine::AppendCodePoint(c, &word);
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

bool IsAsciiPunctuation(char c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
         (c >= '{' && c <= '~');
}

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

double F1(double common, double of_answer, double of_reference) {
  return common == 0 ? 0 : 2 * common / (of_answer + of_reference);
}

// ---- words of questions and answers ----

Words PlainWords(std::string_view text) {
  std::string kept;
  for (const char c : LowerCase(text)) {
    if (!IsAsciiPunctuation(c)) kept += c;
  }
  Words words = SplitAtWhiteSpace(kept);
  std::erase_if(
      words, [](const std::string& word) { return word == "a" || word == "an" || word == "the"; });
  return words;
}

double QaF1(std::string_view answer, std::string_view reference) {
  Words of_answer = PlainWords(answer), of_reference = PlainWords(reference), common;
  std::sort(of_answer.begin(), of_answer.end());
  std::sort(of_reference.begin(), of_reference.end());
  std::set_intersection(of_answer.begin(), of_answer.end(), of_reference.begin(),
                        of_reference.end(), std::back_inserter(common));
  return F1(static_cast<double>(common.size()), static_cast<double>(of_answer.size()),
            static_cast<double>(of_reference.size()));
}

// ---- longest common subsequences ----

// table[i][j]: length for the first i of `a` and the first j of `b`.
template <typename Sequence>
std::vector<std::vector<int32_t>> CommonLengths(const Sequence& a, const Sequence& b) {
  std::vector<std::vector<int32_t>> table(a.size() + 1, std::vector<int32_t>(b.size() + 1, 0));
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      table[i][j] = a[i - 1] == b[j - 1] ? table[i - 1][j - 1] + 1
                                         : std::max(table[i - 1][j], table[i][j - 1]);
    }
  }
  return table;
}

// Adds the words of a longest common subsequence; where there are several, of the one that the
// backward walk finds when it gives up words of `reference` only if it must.
void AddCommonWords(const Words& reference, const Words& answer, std::set<std::string>& found) {
  const auto table = CommonLengths(reference, answer);
  for (size_t i = reference.size(), j = answer.size(); i > 0 && j > 0;) {
    if (reference[i - 1] == answer[j - 1]) {
      found.insert(reference[i - 1]);
      --i;
      --j;
    } else if (table[i - 1][j] > table[i][j - 1]) {
      --i;
    } else {
      --j;
    }
  }
}

// A sentence of nothing but white space has one empty word, and counts: so the published figures
// were made.
std::vector<Words> Sentences(std::string_view text) {
  std::vector<Words> sentences;
  while (!text.empty()) {
    const size_t end = std::min(text.find('.'), text.size());
    if (end > 0) {
      sentences.push_back(SplitAtWhiteSpace(text.substr(0, end)));
      if (sentences.back().empty()) sentences.back().emplace_back();
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return sentences;
}

double RougeL(std::string_view answer, std::string_view reference) {
  const std::vector<Words> of_answer = Sentences(answer), of_reference = Sentences(reference);
  std::set<std::string> answer_words, reference_words, common;
  for (const Words& sentence : of_answer) answer_words.insert(sentence.begin(), sentence.end());
  for (const Words& sentence : of_reference) {
    reference_words.insert(sentence.begin(), sentence.end());
    for (const Words& other : of_answer) AddCommonWords(sentence, other, common);
  }
  return F1(static_cast<double>(common.size()), static_cast<double>(answer_words.size()),
            static_cast<double>(reference_words.size()));
}

// ---- classes, numbers, code ----

double Classification(std::string_view answer, std::string_view reference,
                      std::span<const std::string> classes) {
  int named = 0;
  bool right = false;
  for (const std::string& name : classes) {
    if (!Contains(answer, name)) continue;
    if (name == reference) right = true;
    if (name == reference || !Contains(reference, name)) ++named;
  }
  return right ? 1.0 / named : 0;
}

Words Numbers(std::string_view text) {
  Words numbers;
  bool in_number = false;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (digit && !in_number) numbers.emplace_back();
    if (digit) numbers.back() += c;
    in_number = digit;
  }
  return numbers;
}

// The share of the answer's numbers that are the one wanted.
double NumberShare(std::string_view answer, const std::string& wanted) {
  const Words numbers = Numbers(answer);
  if (numbers.empty()) return 0;
  return static_cast<double>(std::count(numbers.begin(), numbers.end(), wanted)) /
         static_cast<double>(numbers.size());
}

std::string_view WithoutLeadingBreaks(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of('\n'), text.size()));
  return text;
}

std::string_view FirstLine(std::string_view text) {
  text = WithoutLeadingBreaks(text);
  return text.substr(0, text.find('\n'));
}

double CodeSimilarity(std::string_view answer, std::string_view reference) {
  std::string_view rest = WithoutLeadingBreaks(answer), line;
  for (bool more = true; more;) {
    const size_t end = rest.find('\n');
    const std::string_view next = rest.substr(0, end);
    more = end != std::string_view::npos;
    if (more) rest.remove_prefix(end + 1);
    if (Contains(next, "`") || Contains(next, "#") || Contains(next, "//")) continue;
    line = next;
    break;
  }
  const std::u32string a = CodePoints(line), b = CodePoints(reference);
  if (a.empty() || b.empty()) return 0;
  const double common = CommonLengths(a, b).back().back();
  return std::nearbyint(100 * 2 * common / static_cast<double>(a.size() + b.size())) / 100;
}

double ScoreAgainst(const EvalQuestion& question, std::string_view answer,
                    const std::string& reference) {
  switch (question.scorer) {
    case EvalScorer::kMatchAny:
      return Contains(LowerCase(answer), LowerCase(reference)) ? 1 : 0;
    case EvalScorer::kQaF1:
      return QaF1(answer, reference);
    case EvalScorer::kRougeL:
      return RougeL(answer, reference);
    case EvalScorer::kClassification:
      return Classification(answer, reference, question.classes);
    case EvalScorer::kRetrieval: {
      const Words numbers = Numbers(reference);
      return numbers.empty() ? 0 : NumberShare(answer, numbers.front());
    }
    case EvalScorer::kCount:
      return NumberShare(answer, reference);
    case EvalScorer::kCodeSimilarity:
      return CodeSimilarity(answer, reference);
    case EvalScorer::kNone:
    case EvalScorer::kMatchAll:
      break;
  }
  WINNOW_CHECK(false);
  return 0;
}

}  // namespace

std::string LowerCase(std::string_view text) {
  std::string lower;
  for (const char32_t c : CodePoints(text)) {
    engine::AppendCodePoint(
        static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))), &lower);
  }
  return lower;
}

double ScoreAnswer(const EvalQuestion& question, std::string_view answer) {
  WINNOW_CHECK(!question.references.empty());
  if (question.first_line_only) answer = FirstLine(answer);
  if (question.scorer == EvalScorer::kMatchAll) {
    const std::string lower = LowerCase(answer);
    const auto found = std::count_if(
        question.references.begin(), question.references.end(),
        [&](const std::string& reference) { return Contains(lower, LowerCase(reference)); });
    return static_cast<double>(found) / static_cast<double>(question.references.size());
  }
  double best = 0;
  for (const std::string& reference : question.references) {
    best = std::max(best, ScoreAgainst(question, answer, reference));
  }
  return best;
}

bool ScoreIsFinal(const EvalQuestion& question, std::string_view answer) {
  if (question.first_line_only && Contains(WithoutLeadingBreaks(answer), "\n")) return true;
  const bool matches =
      question.scorer == EvalScorer::kMatchAll || question.scorer == EvalScorer::kMatchAny;
  return matches && ScoreAnswer(question, answer) == 1;
}

}  // namespace winnow::bench

#include "bench/eval.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "bench/eval_score.h"
#include "bench/eval_shares.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"

namespace winnow::bench {
namespace {

int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

absl::Status WithPlace(const absl::Status& status, std::string_view place) {
  return absl::Status(status.code(), fmt::format("{}: {}", place, std::string(status.message())));
}

double ContainedShare(const std::vector<std::string>& words, std::string_view text) {
  const auto found = std::count_if(words.begin(), words.end(), [&](const std::string& word) {
    return text.find(word) != std::string_view::npos;
  });
  return static_cast<double>(found) / static_cast<double>(words.size());
}

}  // namespace

// Outcome of one question under one policy.
struct Evaluator::Outcome {
  int64_t answer_tokens = 0, right_tokens = 0;
  double exact = 0;
  std::optional<double> contains, score;
};

// The questions of one cell, in the order in which they were asked.
struct Evaluator::Tally {
  std::vector<Outcome> outcomes;
  int32_t skipped = 0;
  int64_t prompt_tokens = 0;
  engine::RetrievalCounts retrieval;

  int64_t questions() const { return static_cast<int64_t>(outcomes.size()) + skipped; }

  // Means, or with `dense` means of the differences to its outcomes of the same questions.
  EvalMeasures Measures(const Tally* dense) const {
    const Outcome none;
    std::vector<BlockSum> exact, token_acc, contains, score;
    for (size_t i = 0; i < outcomes.size(); ++i) {
      const Outcome& of = outcomes[i];
      const Outcome& base = dense != nullptr ? dense->outcomes[i] : none;
      exact.push_back({of.exact - base.exact, 1});
      token_acc.push_back({static_cast<double>(of.right_tokens - base.right_tokens),
                           static_cast<double>(of.answer_tokens)});
      if (of.contains) contains.push_back({*of.contains - base.contains.value_or(0), 1});
      if (of.score) score.push_back({*of.score - base.score.value_or(0), 1});
    }
    EvalMeasures measures;
    measures.exact = MeanOfBlocks(exact);
    measures.token_acc = MeanOfBlocks(token_acc);
    if (!contains.empty()) measures.contains = MeanOfBlocks(contains);
    if (!score.empty()) measures.score = MeanOfBlocks(score);
    return measures;
  }

  EvalCell Cell(const engine::AttentionPolicy& policy, const std::string& task, int32_t length,
                const Tally* dense) const {
    EvalCell cell;
    cell.policy = ToString(policy);
    cell.task = task;
    cell.length = length;
    cell.n = static_cast<int32_t>(outcomes.size());
    cell.skipped = skipped;
    if (cell.n == 0) return cell;
    cell.measures = Measures(nullptr);
    if (dense != nullptr && dense != this) cell.against_dense = Measures(dense);
    cell.prompt_tokens = static_cast<double>(prompt_tokens) / cell.n;
    cell.kept = KeptShare(retrieval);
    cell.coverage = MeanCoverage(retrieval);
    cell.iou = MeanIou(retrieval);
    cell.probes = static_cast<int64_t>(retrieval.probes);
    return cell;
  }
};

Evaluator::Evaluator(engine::Model& model, const engine::Tokenizer& tokenizer,
                     const engine::ChatTemplate& chat_template, std::vector<int32_t> end_tokens,
                     EvalOptions options)
    : tokenizer_(tokenizer),
      chat_template_(chat_template),
      end_tokens_(std::move(end_tokens)),
      options_(options),
      sequence_(model) {}

absl::Status Evaluator::Ask(const EvalTask& task, const EvalQuestion& question,
                            const engine::AttentionPolicy& policy, Tally& tally) {
  WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> answer,
                          tokenizer_.Encode(question.answer, false, false));
  const int32_t budget = question.scorer != EvalScorer::kNone
                             ? question.max_answer_tokens
                             : static_cast<int32_t>(answer.size()) + kFreeRunExtraTokens;
  const int32_t room =
      sequence_.max_tokens() - std::max(budget, static_cast<int32_t>(answer.size()));
  WINNOW_ASSIGN_OR_RETURN(
      std::vector<int32_t> tokens,
      EncodeEvalPrompt(tokenizer_, chat_template_, options_.prompt_format, task, question, room));
  const size_t prompt_tokens = tokens.size();
  if (static_cast<int64_t>(prompt_tokens) > room) {
    ++tally.skipped;
    return absl::OkStatus();
  }

  const int32_t retrieve_from =
      std::max(0, static_cast<int32_t>(prompt_tokens) - std::max(options_.suffix, policy.suffix));
  // Teacher-forced: the row before each answer token, in one pass over prompt and answer.
  tokens.insert(tokens.end(), answer.begin(), answer.end() - 1);
  std::vector<int32_t> predicted(answer.size());
  sequence_.Forget(retrieve_from);
  WINNOW_RETURN_IF_ERROR(sequence_.Run(
      tokens, static_cast<int32_t>(answer.size()), policy, retrieve_from,
      [&](int32_t row, std::span<const float> logits) { predicted[row] = ArgMax(logits); }));
  size_t agreed = 0;  // before the first difference, greedy decoding and the answer are the same
  while (agreed < answer.size() && predicted[agreed] == answer[agreed]) ++agreed;

  Outcome outcome;
  outcome.answer_tokens = static_cast<int64_t>(answer.size());
  for (size_t i = 0; i < answer.size(); ++i) {
    outcome.right_tokens += predicted[i] == answer[i] ? 1 : 0;
  }
  outcome.exact = agreed == answer.size() ? 1 : 0;
  tally.prompt_tokens += static_cast<int64_t>(prompt_tokens);
  tally.retrieval += sequence_.counts();

  const bool asks_for_more = question.scorer != EvalScorer::kNone || !question.must_contain.empty();
  if (options_.free_run && asks_for_more) {
    // Goes on from the first difference, or with the whole answer said.
    const size_t said = std::min({agreed, answer.size() - 1, static_cast<size_t>(budget)});
    tokens.resize(prompt_tokens + said);
    WINNOW_RETURN_IF_ERROR(AnswerFreely(question, policy, retrieve_from, std::move(tokens),
                                        prompt_tokens, predicted[said], budget, outcome));
  }
  tally.outcomes.push_back(outcome);
  return absl::OkStatus();
}

// Decodes greedily from `tokens` and the token `next` that follows, up to `budget` answer tokens.
absl::Status Evaluator::AnswerFreely(const EvalQuestion& question,
                                     const engine::AttentionPolicy& policy, int32_t retrieve_from,
                                     std::vector<int32_t> tokens, size_t prompt_tokens,
                                     int32_t next, int32_t budget, Outcome& outcome) {
  const bool scored = question.scorer != EvalScorer::kNone;
  const auto text = [&] {
    return tokenizer_.Decode(std::span(tokens).subspan(prompt_tokens),
                             /*skip_special_tokens=*/true);
  };
  const auto settled = [&] {
    return scored ? ScoreIsFinal(question, text())
                  : ContainedShare(question.must_contain, text()) == 1;
  };
  const size_t last_size = prompt_tokens + budget;
  while (tokens.size() < last_size && !settled() &&
         std::find(end_tokens_.begin(), end_tokens_.end(), next) == end_tokens_.end()) {
    tokens.push_back(next);
    if (tokens.size() == last_size) break;
    WINNOW_RETURN_IF_ERROR(
        sequence_.Run(tokens, 1, policy, retrieve_from,
                      [&](int32_t, std::span<const float> logits) { next = ArgMax(logits); }));
  }
  if (scored) outcome.score = ScoreAnswer(question, text());
  if (!question.must_contain.empty()) {
    outcome.contains = ContainedShare(question.must_contain, text());
  }
  return absl::OkStatus();
}

namespace {

// One cell for the cells of a policy and a length, of which each counts as much as the next.
// Empty cells (no question fitted) are left out.
EvalCell MeanCell(std::span<const EvalCell* const> cells) {
  EvalCell mean;
  mean.policy = cells.front()->policy;
  mean.task = kMeanTask;
  mean.length = cells.front()->length;
  std::vector<const EvalCell*> asked;
  for (const EvalCell* cell : cells) {
    mean.n += cell->n;
    mean.skipped += cell->skipped;
    if (cell->n > 0) asked.push_back(cell);
  }
  if (asked.empty()) return mean;
  const auto mean_of = [&](const auto& measures_of) {
    EvalMeasures measures;
    std::vector<Estimate> exact, token_acc, contains, score;
    for (const EvalCell* cell : asked) {
      const EvalMeasures& of = measures_of(*cell);
      exact.push_back(of.exact);
      token_acc.push_back(of.token_acc);
      if (of.contains) contains.push_back(*of.contains);
      if (of.score) score.push_back(*of.score);
    }
    measures.exact = MeanOfEstimates(exact);
    measures.token_acc = MeanOfEstimates(token_acc);
    if (!contains.empty()) measures.contains = MeanOfEstimates(contains);
    if (!score.empty()) measures.score = MeanOfEstimates(score);
    return measures;
  };
  mean.measures =
      mean_of([](const EvalCell& cell) -> const EvalMeasures& { return cell.measures; });
  if (asked.front()->against_dense) {
    mean.against_dense =
        mean_of([](const EvalCell& cell) -> const EvalMeasures& { return *cell.against_dense; });
  }
  double kept = 0, coverage = 0, iou = 0, prompt_tokens = 0;
  for (const EvalCell* cell : asked) {
    kept += cell->kept;
    coverage += cell->coverage;
    iou += cell->iou;
    prompt_tokens += cell->prompt_tokens;
    mean.probes += cell->probes;
  }
  const auto count = static_cast<double>(asked.size());
  mean.kept = kept / count;
  mean.coverage = coverage / count;
  mean.iou = iou / count;
  mean.prompt_tokens = prompt_tokens / count;
  return mean;
}

void AppendMeanCells(std::vector<EvalCell>& cells, size_t first) {
  std::map<int32_t, std::vector<const EvalCell*>> of_lengths;
  const std::vector<EvalCell> of_policy(cells.begin() + static_cast<std::ptrdiff_t>(first),
                                        cells.end());
  for (const EvalCell& cell : of_policy) of_lengths[cell.length].push_back(&cell);
  for (const auto& [length, of_length] : of_lengths) cells.push_back(MeanCell(of_length));
}

}  // namespace

absl::StatusOr<std::vector<EvalCell>> Evaluator::RunTasks(
    const EvalTaskSource& tasks, std::span<const engine::AttentionPolicy> policies,
    const EvalProgress& progress) {
  double total = 0;
  for (size_t i = 0; i < tasks.size; ++i) total += tasks.work(i);
  // A question is put to every policy before the next is read: what comes before it, and most of
  // what it says, is computed once.
  using Key = std::pair<size_t, int32_t>;  // (place in names, length)
  std::vector<std::string> names;          // as they first occur
  std::map<Key, std::vector<Tally>> tallies;
  double done = 0;
  for (size_t index = 0; index < tasks.size; ++index) {
    WINNOW_ASSIGN_OR_RETURN(const EvalTask task, tasks.at(index));
    const size_t name = std::find(names.begin(), names.end(), task.task) - names.begin();
    if (name == names.size()) names.push_back(task.task);
    std::vector<Tally>& of_policies = tallies[{name, task.target_tokens}];
    of_policies.resize(policies.size());
    for (const EvalQuestion& question : task.questions) {
      if (options_.limit != 0 && of_policies.front().questions() >= options_.limit) break;
      for (size_t i = 0; i < policies.size(); ++i) {
        if (absl::Status status = Ask(task, question, policies[i], of_policies[i]); !status.ok()) {
          return WithPlace(status, task.id);
        }
      }
    }
    done += tasks.work(index);
    if (progress) progress(done, total, task.id);
  }
  const auto dense = static_cast<size_t>(
      std::find_if(policies.begin(), policies.end(),
                   [](const engine::AttentionPolicy& policy) { return policy.IsDense(); }) -
      policies.begin());
  std::vector<EvalCell> cells;
  for (size_t i = 0; i < policies.size(); ++i) {
    const size_t first = cells.size();
    for (const auto& [key, of_policies] : tallies) {
      cells.push_back(of_policies[i].Cell(policies[i], names[key.first], key.second,
                                          dense < policies.size() ? &of_policies[dense] : nullptr));
    }
    if (options_.mean_over_tasks) AppendMeanCells(cells, first);
  }
  return cells;
}

}  // namespace winnow::bench

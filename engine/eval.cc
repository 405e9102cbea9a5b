#include "engine/eval.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "engine/status_macros.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// -log softmax(logits)[token]
double Loss(std::span<const float> logits, int32_t token) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - max);
  return std::log(sum) + max - logits[token];
}

absl::Status WithPlace(const absl::Status& status, std::string_view place) {
  return absl::Status(status.code(), fmt::format("{}: {}", place, std::string(status.message())));
}

// What a document costs to read, in arbitrary units: products grow with its length, attention with
// the square. For the progress bar only.
double ExpectedWork(const EvalTask& task) {
  const double tokens = static_cast<double>(task.document.size()) / 4;
  return tokens + tokens * tokens / 8192;
}

// Shares over what was counted; 1 where nothing retrieved.
double Kept(const RetrievalCounts& counts) {
  return counts.mid_rows == 0
             ? 1
             : static_cast<double>(counts.chosen_rows) / static_cast<double>(counts.mid_rows);
}
double Coverage(const RetrievalCounts& counts) {
  return counts.probes == 0 ? 1 : counts.coverage / static_cast<double>(counts.probes);
}
double Iou(const RetrievalCounts& counts) {
  return counts.probes == 0 ? 1 : counts.iou / static_cast<double>(counts.probes);
}

}  // namespace

// Sums over the questions of one cell.
struct Evaluator::Tally {
  int32_t asked = 0, skipped = 0, exact = 0;
  int64_t answer_tokens = 0, right_tokens = 0, prompt_tokens = 0;
  double contains_sum = 0;
  int32_t contains_count = 0;
  RetrievalCounts retrieval;

  EvalCell Cell(const AttentionPolicy& policy, const std::string& task, int32_t length) const {
    EvalCell cell;
    cell.policy = ToString(policy);
    cell.task = task;
    cell.length = length;
    cell.n = asked;
    cell.skipped = skipped;
    if (asked == 0) return cell;
    cell.exact = static_cast<double>(exact) / asked;
    cell.token_acc = static_cast<double>(right_tokens) / static_cast<double>(answer_tokens);
    if (contains_count > 0) cell.contains = contains_sum / contains_count;
    cell.prompt_tokens = static_cast<double>(prompt_tokens) / asked;
    cell.kept = Kept(retrieval);
    cell.coverage = Coverage(retrieval);
    cell.iou = Iou(retrieval);
    return cell;
  }
};

Evaluator::Evaluator(Model& model, const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                     std::vector<int32_t> end_tokens, EvalOptions options)
    : tokenizer_(tokenizer),
      chat_template_(chat_template),
      end_tokens_(std::move(end_tokens)),
      options_(std::move(options)),
      sequence_(model) {}

absl::StatusOr<std::vector<int32_t>> Evaluator::Prompt(const EvalTask& task,
                                                       const EvalQuestion& question) {
  const std::string text = task.intro + task.document + "\n\n" + question.question;
  if (options_.prompt_format == PromptFormat::kPlain) {
    return tokenizer_.Encode(text + "\n", /*add_special_tokens=*/true, /*parse_special=*/false);
  }
  const ChatMessage message{"user", text};
  WINNOW_ASSIGN_OR_RETURN(const ChatTemplate::Rendered rendered,
                          chat_template_.Render({&message, 1}, /*add_generation_prompt=*/true));
  return tokenizer_.Encode(rendered.Segments(), /*add_special_tokens=*/false);
}

absl::Status Evaluator::Ask(const EvalTask& task, const EvalQuestion& question,
                            const AttentionPolicy& policy, Tally& tally) {
  WINNOW_ASSIGN_OR_RETURN(std::vector<int32_t> tokens, Prompt(task, question));
  WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> answer,
                          tokenizer_.Encode(question.answer, false, false));
  const size_t prompt_tokens = tokens.size();
  const int32_t budget = static_cast<int32_t>(answer.size()) + kFreeRunExtraTokens;
  if (prompt_tokens + budget > static_cast<size_t>(sequence_.max_tokens())) {
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

  ++tally.asked;
  tally.prompt_tokens += static_cast<int64_t>(prompt_tokens);
  tally.answer_tokens += static_cast<int64_t>(answer.size());
  for (size_t i = 0; i < answer.size(); ++i)
    tally.right_tokens += predicted[i] == answer[i] ? 1 : 0;
  tally.exact += agreed == answer.size() ? 1 : 0;
  tally.retrieval += sequence_.counts();

  if (options_.free_run && !question.must_contain.empty()) {
    // Goes on from the first difference, or with the whole answer said.
    const bool whole = agreed == answer.size();
    const size_t said = whole ? agreed - 1 : agreed;
    tokens.resize(prompt_tokens + said);
    WINNOW_ASSIGN_OR_RETURN(const double share,
                            ContainedShare(question, policy, retrieve_from, std::move(tokens),
                                           prompt_tokens, predicted[said], budget));
    tally.contains_sum += share;
    ++tally.contains_count;
  }
  return absl::OkStatus();
}

// Decodes greedily from `tokens` and the token `next` that follows, up to `budget` answer tokens.
absl::StatusOr<double> Evaluator::ContainedShare(const EvalQuestion& question,
                                                 const AttentionPolicy& policy,
                                                 int32_t retrieve_from, std::vector<int32_t> tokens,
                                                 size_t prompt_tokens, int32_t next,
                                                 int32_t budget) {
  const auto count_found = [&] {
    const std::string text =
        tokenizer_.Decode(std::span(tokens).subspan(prompt_tokens), /*skip_special_tokens=*/true);
    return std::count_if(
        question.must_contain.begin(), question.must_contain.end(),
        [&](const std::string& word) { return text.find(word) != std::string::npos; });
  };
  const auto all = static_cast<std::ptrdiff_t>(question.must_contain.size());
  const size_t last_size = prompt_tokens + budget;
  std::ptrdiff_t found = count_found();
  while (found < all && tokens.size() < last_size &&
         std::find(end_tokens_.begin(), end_tokens_.end(), next) == end_tokens_.end()) {
    tokens.push_back(next);
    found = count_found();
    if (found == all || tokens.size() == last_size) break;
    WINNOW_RETURN_IF_ERROR(
        sequence_.Run(tokens, 1, policy, retrieve_from,
                      [&](int32_t, std::span<const float> logits) { next = ArgMax(logits); }));
  }
  return static_cast<double>(found) / static_cast<double>(all);
}

absl::StatusOr<std::vector<EvalCell>> Evaluator::RunTasks(std::span<const EvalTask> tasks,
                                                          std::span<const AttentionPolicy> policies,
                                                          const EvalProgress& progress) {
  const auto wanted = [&](const EvalTask& task) {
    return options_.lengths.empty() || std::find(options_.lengths.begin(), options_.lengths.end(),
                                                 task.target_tokens) != options_.lengths.end();
  };
  std::vector<std::string> names;  // as they first occur
  double total = 0;
  for (const EvalTask& task : tasks) {
    if (!wanted(task)) continue;
    if (std::find(names.begin(), names.end(), task.task) == names.end()) names.push_back(task.task);
    total += ExpectedWork(task);
  }
  if (names.empty()) return absl::InvalidArgumentError("no task of the lengths asked for");

  // A question is put to every policy before the next is read: what comes before it, and most of
  // what it says, is computed once.
  using Key = std::pair<size_t, int32_t>;  // (place in names, length)
  std::map<Key, std::vector<Tally>> tallies;
  double done = 0;
  for (const EvalTask& task : tasks) {
    if (!wanted(task)) continue;
    const size_t name = std::find(names.begin(), names.end(), task.task) - names.begin();
    std::vector<Tally>& of_policies = tallies[{name, task.target_tokens}];
    of_policies.resize(policies.size());
    for (const EvalQuestion& question : task.questions) {
      const Tally& first = of_policies.front();
      if (options_.limit != 0 && first.asked + first.skipped >= options_.limit) break;
      for (size_t i = 0; i < policies.size(); ++i) {
        if (absl::Status status = Ask(task, question, policies[i], of_policies[i]); !status.ok()) {
          return WithPlace(status, task.id);
        }
      }
    }
    done += ExpectedWork(task);
    if (progress) progress(done, total, task.id);
  }
  std::vector<EvalCell> cells;
  for (size_t i = 0; i < policies.size(); ++i) {
    for (const auto& [key, of_policies] : tallies) {
      cells.push_back(of_policies[i].Cell(policies[i], names[key.first], key.second));
    }
  }
  return cells;
}

// Sums over the tokens of a text under one policy.
struct Evaluator::TextTally {
  double loss = 0, retrieving_loss = 0;
  int64_t tokens = 0, retrieving_tokens = 0;
  RetrievalCounts retrieval;

  TextResult Result(const AttentionPolicy& policy) const {
    const auto perplexity = [](double of, int64_t count) {
      return count == 0 ? 0 : std::exp(of / static_cast<double>(count));
    };
    return {.policy = ToString(policy),
            .perplexity = perplexity(loss, tokens),
            .tokens = tokens,
            .retrieving_perplexity = perplexity(retrieving_loss, retrieving_tokens),
            .retrieving_tokens = retrieving_tokens,
            .kept = Kept(retrieval),
            .coverage = Coverage(retrieval),
            .iou = Iou(retrieval)};
  }
};

absl::StatusOr<std::vector<TextResult>> Evaluator::RunText(
    std::string_view text, std::span<const AttentionPolicy> policies,
    const EvalProgress& progress) {
  if (options_.window_tokens < 2 || options_.window_tokens > sequence_.max_tokens()) {
    return absl::InvalidArgumentError(
        fmt::format("window: {} is not from 2 to {}, what the context and the KV pool hold",
                    options_.window_tokens, sequence_.max_tokens()));
  }
  WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> before,
                          tokenizer_.Encode("", /*add_special_tokens=*/true, false));
  WINNOW_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer_.Encode(text, false, false));
  const int64_t stride = options_.window_tokens - static_cast<int64_t>(before.size());
  if (stride < 1) {
    return absl::InvalidArgumentError("window: no room for text beside the special tokens");
  }
  const int64_t size = static_cast<int64_t>(ids.size());
  int64_t windows = (size + stride - 1) / stride;
  if (options_.limit != 0) windows = std::min<int64_t>(windows, options_.limit);

  std::vector<TextTally> tallies(policies.size());
  for (int64_t window = 0; window < windows; ++window) {
    std::vector<int32_t> tokens = before;
    tokens.insert(tokens.end(), ids.begin() + window * stride,
                  ids.begin() + std::min(size, (window + 1) * stride));
    // Row i of `first`.. predicts token i + 1.
    const int32_t first = std::max<int32_t>(0, static_cast<int32_t>(before.size()) - 1);
    const int32_t count = static_cast<int32_t>(tokens.size()) - 1 - first;
    if (count < 1) continue;
    const std::span<const int32_t> inputs = std::span(tokens).first(tokens.size() - 1);
    const int32_t shared = std::clamp(options_.retrieve_from - first, 0, count);
    // Rows before retrieve_from are those of every policy: their losses are taken once.
    double shared_loss = 0;
    for (size_t i = 0; i < policies.size(); ++i) {
      TextTally& tally = tallies[i];
      const bool all = i == 0;
      if (all || shared < count) {
        sequence_.Forget(options_.retrieve_from);
        WINNOW_RETURN_IF_ERROR(
            sequence_.Run(inputs, all ? count : count - shared, policies[i], options_.retrieve_from,
                          [&](int32_t row_of_run, std::span<const float> logits) {
                            const int32_t row = all ? row_of_run : row_of_run + shared;
                            const double loss = Loss(logits, tokens[first + row + 1]);
                            (row < shared ? shared_loss : tally.retrieving_loss) += loss;
                            if (row >= shared) tally.loss += loss;
                          }));
        tally.retrieval += sequence_.counts();
      }
      tally.loss += shared_loss;
      tally.tokens += count;
      tally.retrieving_tokens += count - shared;
      if (progress) {
        progress(static_cast<double>(window) * static_cast<double>(policies.size()) +
                     static_cast<double>(i) + 1,
                 static_cast<double>(policies.size()) * static_cast<double>(windows),
                 fmt::format("window {} {}", window + 1, ToString(policies[i])));
      }
    }
  }
  if (tallies.empty() || tallies.front().tokens == 0) {
    return absl::InvalidArgumentError("the text has no token to predict");
  }
  std::vector<TextResult> results;
  for (size_t i = 0; i < policies.size(); ++i) results.push_back(tallies[i].Result(policies[i]));
  return results;
}

}  // namespace winnow::engine

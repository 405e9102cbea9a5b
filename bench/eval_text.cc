// Evaluator::RunText: perplexity and agreement with dense attention, window by window.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/status/status.h"
#include "bench/eval.h"
#include "bench/eval_shares.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"

namespace winnow::bench {
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

}  // namespace

// Row i, the query at position first_row + i, predicts the token that follows it.
struct Evaluator::TextWindow {
  std::vector<int32_t> tokens;
  int32_t first_row = 0;
  int32_t rows = 0;
  int32_t first_scored = 0;      // row
  int32_t first_retrieving = 0;  // row
};

// Sums over the scored tokens of a text under one policy, and those beside the reference.
struct Evaluator::TextTally {
  BlockSums loss, loss_difference, agreement, beside_difference;
  int64_t tokens = 0;
  engine::RetrievalCounts retrieval;

  void Break() {
    loss.Break();
    loss_difference.Break();
    agreement.Break();
    beside_difference.Break();
  }

  TextResult Result(const engine::AttentionPolicy& policy, bool compared, bool beside) const {
    TextResult result{.policy = ToString(policy),
                      .tokens = tokens,
                      .perplexity = Perplexity(MeanOfBlocks(loss.blocks())),
                      .against_dense = {},
                      .beside_percent = {},
                      .kept = KeptShare(retrieval),
                      .coverage = MeanCoverage(retrieval),
                      .iou = MeanIou(retrieval),
                      .probes = static_cast<int64_t>(retrieval.probes)};
    if (compared) {
      const Estimate top1 = MeanOfBlocks(agreement.blocks());
      const auto all = static_cast<double>(tokens);
      result.against_dense = {PerplexityPercent(MeanOfBlocks(loss_difference.blocks())), top1,
                              MeanAgreeingRun(std::round(top1.mean * all), all)};
    }
    if (beside) {
      result.beside_percent = PerplexityPercent(MeanOfBlocks(beside_difference.blocks()));
    }
    return result;
  }
};

namespace {

// Whether the scored tokens of a window, of which the first is number `first` of the text's, are those of `against`.
bool SameTokens(std::span<const int32_t> scored, int64_t first, const TextReference& against) {
  const auto there = static_cast<int64_t>(against.tokens.size());
  return first + static_cast<int64_t>(scored.size()) <= there &&
         std::equal(scored.begin(), scored.end(), against.tokens.begin() + first);
}

absl::Status OtherTokens() {
  return absl::InvalidArgumentError(
      "--reference: is of other tokens: text, tokenizer, --window, --score-from and --limit must "
      "be those of the run that wrote it");
}

}  // namespace

// The first policy of `order` is the reference, if there is one, then comes the second, if there is one: what they
// gave is kept for the others. Rows before first_retrieving are the same under every policy, so only it computes them.
absl::Status Evaluator::RunWindow(const TextWindow& window,
                                  std::span<const engine::AttentionPolicy> policies,
                                  std::span<const size_t> order, std::span<TextTally> tallies,
                                  const TextReference* against, TextReference* found,
                                  const std::function<void(const engine::AttentionPolicy&)>& ran) {
  const std::span<const int32_t> inputs = std::span(window.tokens).first(window.tokens.size() - 1);
  std::vector<double> first_loss(window.rows), beside_loss;
  std::vector<int32_t> first_best(window.rows);
  const std::span<const int32_t> scored =
      std::span(window.tokens).subspan(window.first_row + window.first_scored + 1);
  const int64_t before = tallies[order.front()].tokens;  // scored tokens of other windows
  if (against != nullptr && !SameTokens(scored, before, *against)) return OtherTokens();
  for (const size_t index : order) {
    TextTally& tally = tallies[index];
    const bool is_first = index == order.front();
    std::vector<double> loss = first_loss;
    std::vector<int32_t> best = first_best;
    const int32_t from =
        is_first ? window.first_scored : std::max(window.first_scored, window.first_retrieving);
    if (from < window.rows) {
      sequence_.Forget(options_.retrieve_from);
      WINNOW_RETURN_IF_ERROR(
          sequence_.Run(inputs, window.rows - from, policies[index], options_.retrieve_from,
                        [&](int32_t row_of_run, std::span<const float> logits) {
                          const int32_t row = from + row_of_run;
                          loss[row] = Loss(logits, window.tokens[window.first_row + row + 1]);
                          best[row] = ArgMax(logits);
                        }));
      tally.retrieval += sequence_.counts();
    }
    if (is_first) {
      first_loss = loss;
      first_best = best;
      if (found != nullptr) {
        found->tokens.insert(found->tokens.end(), scored.begin(), scored.end());
        found->losses.insert(found->losses.end(), loss.begin() + window.first_scored, loss.end());
        found->likeliest.insert(found->likeliest.end(), best.begin() + window.first_scored,
                                best.end());
      }
    }
    if (options_.beside == policies[index]) beside_loss = loss;
    tally.Break();
    for (int32_t row = window.first_scored; row < window.rows; ++row) {
      tally.loss.Add(loss[row]);
      const int64_t place = before + row - window.first_scored;
      const double other_loss = against != nullptr ? against->losses[place] : first_loss[row];
      const int32_t other_best = against != nullptr ? against->likeliest[place] : first_best[row];
      tally.loss_difference.Add(loss[row] - other_loss);
      tally.agreement.Add(best[row] == other_best ? 1 : 0);
      if (!beside_loss.empty()) tally.beside_difference.Add(loss[row] - beside_loss[row]);
    }
    tally.tokens += window.rows - window.first_scored;
    ran(policies[index]);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TextResult>> Evaluator::RunText(
    std::string_view text, std::span<const engine::AttentionPolicy> policies,
    const EvalProgress& progress, const TextReference* against, TextReference* found) {
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

  std::vector<size_t> order(policies.size());
  std::iota(order.begin(), order.end(), 0);
  const auto dense =
      std::find_if(order.begin(), order.end(), [&](size_t i) { return policies[i].IsDense(); });
  const size_t reference = dense == order.end() ? policies.size() : *dense;
  if (dense != order.end()) std::rotate(order.begin(), dense, dense + 1);
  if (options_.beside.has_value()) {
    const auto beside = std::find_if(order.begin(), order.end(),
                                     [&](size_t i) { return policies[i] == *options_.beside; });
    if (beside == order.end()) {
      return absl::InvalidArgumentError(
          fmt::format("beside: {} is not one of the policies", ToString(*options_.beside)));
    }
    const auto second = std::min(beside, order.begin() + (reference < policies.size() ? 1 : 0));
    std::rotate(second, beside, beside + 1);
  }

  std::vector<TextTally> tallies(policies.size());
  const double total = static_cast<double>(windows) * static_cast<double>(policies.size());
  double done = 0;
  for (int64_t index = 0; index < windows; ++index) {
    TextWindow window{.tokens = before};
    window.tokens.insert(window.tokens.end(), ids.begin() + index * stride,
                         ids.begin() + std::min(size, (index + 1) * stride));
    window.first_row = std::max<int32_t>(0, static_cast<int32_t>(before.size()) - 1);
    window.rows = static_cast<int32_t>(window.tokens.size()) - 1 - window.first_row;
    window.first_scored =
        std::clamp(options_.score_from - window.first_row, 0, std::max(0, window.rows));
    window.first_retrieving =
        std::clamp(options_.retrieve_from - window.first_row, 0, std::max(0, window.rows));
    if (window.first_scored >= window.rows) continue;  // there is nothing to measure
    WINNOW_RETURN_IF_ERROR(RunWindow(
        window, policies, order, tallies, against, found,
        [&](const engine::AttentionPolicy& policy) {
          done += 1;
          if (progress) {
            progress(done, total, fmt::format("window {} {}", index + 1, ToString(policy)));
          }
        }));
  }
  if (tallies.empty() || tallies.front().tokens == 0) {
    return absl::InvalidArgumentError(
        fmt::format("no token of the text is scored: windows of {} tokens are scored from "
                    "position {} on (--score-from)",
                    std::min<int64_t>(options_.window_tokens, size), options_.score_from));
  }
  if (against != nullptr &&
      tallies.front().tokens != static_cast<int64_t>(against->tokens.size())) {
    return OtherTokens();
  }
  std::vector<TextResult> results;
  for (size_t i = 0; i < policies.size(); ++i) {
    const bool compared = against != nullptr || (reference < policies.size() && i != reference);
    const bool beside =
        i != reference && options_.beside.has_value() && policies[i] != *options_.beside;
    results.push_back(tallies[i].Result(policies[i], compared, beside));
  }
  return results;
}

}  // namespace winnow::bench

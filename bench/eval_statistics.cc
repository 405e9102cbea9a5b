#include "bench/eval_statistics.h"

#include <algorithm>
#include <cmath>

namespace winnow::bench {

Estimate MeanOfBlocks(std::span<const BlockSum> blocks) {
  double value = 0, weight = 0;
  for (const BlockSum& block : blocks) {
    value += block.value;
    weight += block.weight;
  }
  Estimate estimate;
  if (weight == 0) return estimate;
  estimate.mean = value / weight;
  if (blocks.size() < 2) return estimate;
  double squares = 0;
  for (const BlockSum& block : blocks) {
    const double rest = block.value - estimate.mean * block.weight;
    squares += rest * rest;
  }
  const auto n = static_cast<double>(blocks.size());
  estimate.error = std::sqrt(n / (n - 1) * squares) / weight;
  return estimate;
}

Estimate MeanOfEstimates(std::span<const Estimate> estimates) {
  Estimate mean;
  if (estimates.empty()) return mean;
  double squares = 0;
  bool known = true;
  for (const Estimate& estimate : estimates) {
    mean.mean += estimate.mean;
    known = known && estimate.error.has_value();
    squares += estimate.error.value_or(0) * estimate.error.value_or(0);
  }
  const auto n = static_cast<double>(estimates.size());
  mean.mean /= n;
  if (known) mean.error = std::sqrt(squares) / n;
  return mean;
}

Estimate Perplexity(const Estimate& loss) {
  const double perplexity = std::exp(loss.mean);
  return {perplexity, loss.error ? std::optional(perplexity * *loss.error) : std::nullopt};
}

Estimate PerplexityPercent(const Estimate& loss_difference) {
  const Estimate ratio = Perplexity(loss_difference);
  return {100 * std::expm1(loss_difference.mean),
          ratio.error ? std::optional(100 * *ratio.error) : std::nullopt};
}

void BlockSums::Add(double value) {
  if (!open_ || blocks_.back().weight == kEvalBlockTokens) blocks_.emplace_back();
  open_ = true;
  blocks_.back().value += value;
  blocks_.back().weight += 1;
}

double MeanAgreeingRun(double agreeing, double all) {
  return agreeing / std::max(1.0, all - agreeing);
}

}  // namespace winnow::bench

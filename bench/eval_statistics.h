// Means with standard errors, for results whose neighbours resemble each other.
//
// Losses of neighbouring tokens rise and fall together, so tokens are no independent draws and a
// standard error over single tokens is too small. Values are therefore added up in blocks (64
// tokens of text, or one question), and the error is taken from the spread of the blocks. Blocks may
// differ in size: the mean is the sum of all values over the sum of all weights, and
//
//   error² = n/(n−1) · Σ (value_i − mean·weight_i)² / (Σ weight_i)²
//
// With equal weights this is the textbook's standard error of the mean of n block means.
//
// Pure functions and plain data; any thread.
#ifndef WINNOW_BENCH_EVAL_STATISTICS_H_
#define WINNOW_BENCH_EVAL_STATISTICS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace winnow::bench {

inline constexpr int32_t kEvalBlockTokens = 64;

// Sums over one block: of the values, and of what they are means over (tokens, questions).
struct BlockSum {
  double value = 0;
  double weight = 0;
};

struct Estimate {
  double mean = 0;
  std::optional<double> error;  // standard error; absent with fewer than two blocks
};

// Mean 0 without error where the weights add up to nothing.
Estimate MeanOfBlocks(std::span<const BlockSum> blocks);

// The mean of independent estimates, each of the same weight (tasks of a suite). Its error is absent
// if one of theirs is.
Estimate MeanOfEstimates(std::span<const Estimate> estimates);

// exp of a mean loss, and its error to first order.
Estimate Perplexity(const Estimate& loss);
// A mean difference of losses as per cent of perplexity: 100·(exp(difference) − 1).
Estimate PerplexityPercent(const Estimate& loss_difference);

// Cuts a stream of values into blocks of kEvalBlockTokens. 16 bytes of memory a block.
class BlockSums {
 public:
  void Add(double value);
  // The next value begins a block, because it does not neighbour the last one.
  void Break() { open_ = false; }
  std::span<const BlockSum> blocks() const { return blocks_; }

 private:
  std::vector<BlockSum> blocks_;
  bool open_ = false;
};

// Mean number of tokens in a row on which two models agree, between two on which they do not:
// agreeing tokens over disagreeing ones, of which at least one is assumed.
double MeanAgreeingRun(double agreeing, double all);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EVAL_STATISTICS_H_

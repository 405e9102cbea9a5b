#include "bench/eval_statistics.h"

#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace winnow::bench {
namespace {

TEST(EvalStatistics, EqualBlocksGiveTheStandardErrorOfTheirMeans) {
  // Means 1, 2, 3 and 6 of two each: mean 3, squares 4 + 1 + 0 + 9 = 14, error √(14 / (4·3)).
  const std::vector<BlockSum> blocks = {{2, 2}, {4, 2}, {6, 2}, {12, 2}};
  const Estimate estimate = MeanOfBlocks(blocks);
  EXPECT_DOUBLE_EQ(estimate.mean, 3);
  ASSERT_TRUE(estimate.error.has_value());
  EXPECT_NEAR(*estimate.error, std::sqrt(14.0 / 12), 1e-12);
}

TEST(EvalStatistics, BlocksCountByTheirWeight) {
  // 1 of 1 and 1 of 3: mean 1/2, rests 1/2 and −1/2, error √(2/1 · (1/4 + 1/4)) / 4 = 1/4.
  const std::vector<BlockSum> blocks = {{1, 1}, {1, 3}};
  const Estimate estimate = MeanOfBlocks(blocks);
  EXPECT_DOUBLE_EQ(estimate.mean, 0.5);
  EXPECT_DOUBLE_EQ(*estimate.error, 0.25);
}

TEST(EvalStatistics, OneBlockHasNoErrorAndNoneHasNoMean) {
  const std::vector<BlockSum> one = {{3, 4}};
  EXPECT_DOUBLE_EQ(MeanOfBlocks(one).mean, 0.75);
  EXPECT_FALSE(MeanOfBlocks(one).error.has_value());
  EXPECT_EQ(MeanOfBlocks({}).mean, 0);
  EXPECT_FALSE(MeanOfBlocks({}).error.has_value());
}

TEST(EvalStatistics, BlocksHoldSixtyFourAndEndAtABreak) {
  BlockSums sums;
  for (int i = 0; i < 130; ++i) sums.Add(i);
  sums.Break();
  sums.Break();
  sums.Add(7);
  ASSERT_EQ(sums.blocks().size(), 4u);
  EXPECT_EQ(sums.blocks()[0].weight, 64);
  EXPECT_EQ(sums.blocks()[0].value, 63 * 64 / 2);
  EXPECT_EQ(sums.blocks()[1].weight, 64);
  EXPECT_EQ(sums.blocks()[2].weight, 2);
  EXPECT_EQ(sums.blocks()[2].value, 128 + 129);
  EXPECT_EQ(sums.blocks()[3].weight, 1);
  EXPECT_EQ(sums.blocks()[3].value, 7);
}

TEST(EvalStatistics, SuitesAddErrorsInSquares) {
  const std::vector<Estimate> tasks = {{0.5, 0.3}, {1.0, 0.4}};
  const Estimate mean = MeanOfEstimates(tasks);
  EXPECT_DOUBLE_EQ(mean.mean, 0.75);
  EXPECT_DOUBLE_EQ(*mean.error, 0.25);
  const std::vector<Estimate> unknown = {{0.5, 0.3}, {1.0, std::nullopt}};
  EXPECT_DOUBLE_EQ(MeanOfEstimates(unknown).mean, 0.75);
  EXPECT_FALSE(MeanOfEstimates(unknown).error.has_value());
}

TEST(EvalStatistics, PerplexityAndItsPercentFollowFromLosses) {
  const Estimate perplexity = Perplexity({std::log(6.0), 0.01});
  EXPECT_DOUBLE_EQ(perplexity.mean, 6);
  EXPECT_DOUBLE_EQ(*perplexity.error, 0.06);
  const Estimate percent = PerplexityPercent({std::log(1.02), 0.005});
  EXPECT_NEAR(percent.mean, 2, 1e-9);
  EXPECT_NEAR(*percent.error, 0.51, 1e-9);
  EXPECT_FALSE(Perplexity({1, std::nullopt}).error.has_value());
}

TEST(EvalStatistics, RunsLieBetweenDisagreements) {
  EXPECT_DOUBLE_EQ(MeanAgreeingRun(944, 1000), 944.0 / 56);
  EXPECT_DOUBLE_EQ(MeanAgreeingRun(10, 10), 10);  // no disagreement yet: at least so many
}

}  // namespace
}  // namespace winnow::bench

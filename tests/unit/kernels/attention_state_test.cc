#include "kernels/attention_state.h"

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

constexpr int64_t kDim = 8;

// The state of the given keys, by its definition.
std::vector<float> StateOf(const std::vector<double>& scores,
                           const std::vector<std::vector<double>>& values) {
  std::vector<float> state(AttentionStateFloats(kDim));
  ResetAttentionState(state.data(), kDim);
  if (scores.empty()) return state;
  const double max = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  std::vector<double> o(kDim, 0);
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp2(scores[i] - max);
    sum += weight;
    for (int64_t j = 0; j < kDim; ++j) o[j] += weight * values[i][j];
  }
  for (int64_t j = 0; j < kDim; ++j) state[j] = static_cast<float>(o[j]);
  state[kDim] = static_cast<float>(max);
  state[kDim + 1] = static_cast<float>(sum);
  return state;
}

TEST(AttentionStateTest, MergedPartsAreTheWhole) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 100; ++round) {
    const int n = static_cast<int>(random.Int(2, 12)), cut = static_cast<int>(random.Int(1, n - 1));
    std::vector<double> scores;
    std::vector<std::vector<double>> values;
    for (int i = 0; i < n; ++i) {
      scores.push_back(random.Normal(20.0f));
      values.emplace_back();
      for (int64_t j = 0; j < kDim; ++j) values.back().push_back(random.Normal());
    }
    auto whole = StateOf(scores, values);
    auto merged =
        StateOf({scores.begin(), scores.begin() + cut}, {values.begin(), values.begin() + cut});
    const auto part =
        StateOf({scores.begin() + cut, scores.end()}, {values.begin() + cut, values.end()});
    MergeAttentionState(merged.data(), part.data(), kDim);
    EXPECT_NEAR(AttentionStateLogSumExp(merged.data(), kDim),
                AttentionStateLogSumExp(whole.data(), kDim), 1e-4);
    std::vector<float> a(kDim), b(kDim);
    FinishAttentionState(merged.data(), kDim, a.data());
    FinishAttentionState(whole.data(), kDim, b.data());
    for (int64_t j = 0; j < kDim; ++j) EXPECT_NEAR(a[j], b[j], 1e-5);
  }
}

// A sink is a key whose value is zero.
TEST(AttentionStateTest, ASinkIsAKeyWithoutAValue) {
  Random random;
  SCOPED_TRACE(random.seed());
  for (int round = 0; round < 100; ++round) {
    const double sink = random.Normal(20.0f);
    std::vector<double> scores;
    std::vector<std::vector<double>> values;
    for (int64_t i = random.Int(1, 6); i > 0; --i) {
      scores.push_back(random.Normal(20.0f));
      values.emplace_back();
      for (int64_t j = 0; j < kDim; ++j) values.back().push_back(random.Normal());
    }
    const auto state = StateOf(scores, values);
    scores.push_back(sink);
    values.emplace_back(kDim, 0.0);
    const auto with_key = StateOf(scores, values);
    std::vector<float> a(kDim), b(kDim);
    FinishAttentionState(state.data(), kDim, static_cast<float>(sink), a.data());
    FinishAttentionState(with_key.data(), kDim, b.data());
    for (int64_t j = 0; j < kDim; ++j) EXPECT_NEAR(a[j], b[j], 1e-5);
  }
}

TEST(AttentionStateTest, ASinkOfMinusInfinityChangesNoBitAndALargeOneLeavesNothing) {
  const auto state =
      StateOf({-3.0, 2.0, 1.5}, {std::vector<double>(kDim, 1.0), std::vector<double>(kDim, -0.3),
                                 std::vector<double>(kDim, 0.7)});
  std::vector<float> none(kDim), with(kDim, 5.0f);
  FinishAttentionState(state.data(), kDim, none.data());
  FinishAttentionState(state.data(), kDim, -INFINITY, with.data());
  EXPECT_EQ(with, none);
  FinishAttentionState(state.data(), kDim, 3e38f, with.data());
  EXPECT_EQ(with, std::vector<float>(kDim, 0.0f));
  std::fill(with.begin(), with.end(), 5.0f);
  FinishAttentionState(StateOf({}, {}).data(), kDim, 1.0f, with.data());
  EXPECT_EQ(with, std::vector<float>(kDim, 0.0f));
}

TEST(AttentionStateTest, AnEmptyPartChangesNoBit) {
  const auto state =
      StateOf({-3.0, 2.0}, {std::vector<double>(kDim, 1.0), std::vector<double>(kDim, -0.3)});
  const auto empty = StateOf({}, {});
  auto left = state, right = empty;
  MergeAttentionState(left.data(), empty.data(), kDim);
  MergeAttentionState(right.data(), state.data(), kDim);
  EXPECT_EQ(left, state);
  EXPECT_EQ(right, state);
  EXPECT_EQ(AttentionStateLogSumExp(empty.data(), kDim), -INFINITY);
}

TEST(AttentionStateTest, LogSumExpIsNatural) {
  const auto state =
      StateOf({1.0, 1.0, 1.0}, std::vector<std::vector<double>>(3, std::vector<double>(kDim, 0.0)));
  EXPECT_NEAR(AttentionStateLogSumExp(state.data(), kDim), std::log(3 * std::exp2(1.0)), 1e-6);
}

TEST(AttentionStateTest, FarApartMaximaLeaveTheLargerPart) {
  const auto large = StateOf({5000.0}, {std::vector<double>(kDim, 2.0)});
  auto small = StateOf({-5000.0}, {std::vector<double>(kDim, 7.0)});
  MergeAttentionState(small.data(), large.data(), kDim);
  EXPECT_EQ(small, large);
}

}  // namespace
}  // namespace winnow::kernels

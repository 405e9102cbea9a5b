#include "kernels/sample.h"

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "kernels/token_noise.h"
#include "tests/unit/kernels/sample_testing.h"

namespace winnow::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The reference by itself, on rows small enough to follow.
SampledToken Sampled(std::vector<float> logits, const AnySampleRow& row) {
  return SampleRef(logits, row.row());
}
std::vector<int32_t> DrawnFrom(std::vector<float> logits, const AnySampleRow& row) {
  std::vector<int32_t> tokens;
  for (const SampleCandidate& c : SampleCandidatesRef(logits, row.row())) tokens.push_back(c.token);
  return tokens;
}
using Tokens = std::vector<int32_t>;

TEST(SampleRefTest, EditsComeInOneOrder) {
  AnySampleRow row;
  row.repetition_penalty = 2;
  row.presence_penalty = 1;
  row.frequency_penalty = 0.5f;
  const SampleRow r = row.row();
  EXPECT_EQ(EditedLogit(3, {0, -1, 1}, r), 4);      // bias only
  EXPECT_EQ(EditedLogit(3, {0, 0, 1}, r), 2);       // (3 + 1) / 2
  EXPECT_EQ(EditedLogit(-3, {0, 0, 1}, r), -4);     // (-3 + 1) * 2
  EXPECT_EQ(EditedLogit(3, {0, 2, 1}, r), 0);       // 2 - (1 + 0.5 * 2)
  EXPECT_EQ(EditedLogit(-1, {0, 1, 2}, r), -1.0f);  // 1 / 2 - 1.5
  row.edits = {{1, -1, 5.0f}};
  row.masked = {1};
  EXPECT_EQ(Sampled({0, 1, 2}, row).token, 2);
}

TEST(SampleRefTest, OnlyWhatIsAllowedIsDrawnAndLogprobsDoNotKnow) {
  AnySampleRow row;
  row.allowed = {0b1011};
  row.top_logprobs = 1;
  const SampledToken greedy = Sampled({1, 2, 5, 2}, row);
  EXPECT_EQ(greedy.token, 1);
  EXPECT_EQ(greedy.top[0].token, 2) << "the model's distribution, not the mask's";
  row.temperature = 1;
  EXPECT_EQ(DrawnFrom({1, 2, 5, 2}, row), (Tokens{0, 1, 3}));
  row.top_k = 2;  // of those that are allowed
  EXPECT_EQ(DrawnFrom({1, 2, 5, 2}, row), (Tokens{1, 3}));
  row.allowed = {0};
  EXPECT_EQ(Sampled({1, 2, 5, 2}, row).status, SampleStatus::kNothing);
}

TEST(SampleRefTest, EqualsGoByTheirIds) {
  EXPECT_EQ(Sampled({1, 2, 2}, {}).token, 1);
  AnySampleRow row;
  row.temperature = 1;
  row.top_k = 3;
  EXPECT_EQ(DrawnFrom({1, 2, 1, 1, 2, 1}, row), (Tokens{0, 1, 4}));
  row.top_k = 0;
  row.top_p = 0.5f;
  EXPECT_EQ(DrawnFrom({1, 1, 1, 1}, row), (Tokens{0, 1}));
  row.top_p = 0.51f;
  EXPECT_EQ(DrawnFrom({1, 1, 1, 1}, row), (Tokens{0, 1, 2}));
  row.top_logprobs = 3;
  const SampledToken sampled = Sampled({1, 2, 2}, row);
  EXPECT_EQ(sampled.top[0].token, 1);
  EXPECT_EQ(sampled.top[1].token, 2);
  EXPECT_EQ(sampled.top[2].token, 0);
}

TEST(SampleRefTest, FiltersCutOneAfterTheOther) {
  const float ln2 = std::log(2.0f);  // probabilities 1/2, 1/4, 1/8, 1/8
  AnySampleRow row;
  row.temperature = 1;
  row.top_p = 0.7f;
  EXPECT_EQ(DrawnFrom({-3 * ln2, -ln2, -2 * ln2, -3 * ln2}, row), (Tokens{1, 2}));
  row.top_k = 2;  // of 3/4, 0.7 is more than the first token
  EXPECT_EQ(DrawnFrom({-3 * ln2, -ln2, -2 * ln2, -3 * ln2}, row), (Tokens{1, 2}));
  row.top_p = 0.6f;  // 0.6 of 3/4 is less
  EXPECT_EQ(DrawnFrom({-3 * ln2, -ln2, -2 * ln2, -3 * ln2}, row), (Tokens{1}));
  row.top_k = 0;
  row.top_p = 1;
  row.min_p = 0.3f;
  EXPECT_EQ(DrawnFrom({-3 * ln2, -ln2, -2 * ln2, -3 * ln2}, row), (Tokens{1, 2}));
}

TEST(SampleRefTest, TheDrawIsBetweenTheTokensThatAreLeftAndNoOthers) {
  AnySampleRow row;
  row.temperature = 1;
  const std::vector<float> logits = {0.3f, -1.0f, 0.5f, 0.0f, 1.5f, -0.2f};
  int others = 0;
  for (row.noise = 0; row.noise < 200; ++row.noise) {
    row.masked.clear();
    const int32_t drawn = Sampled(logits, row).token;
    EXPECT_EQ(Sampled({100.3f, 99.0f, 100.5f, 100.0f, 101.5f, 99.8f}, row).token, drawn);
    // A token that was not drawn changes nothing by being there.
    for (int32_t t = 0; t < 6; ++t) {
      row.masked = {t};
      const int32_t without = Sampled(logits, row).token;
      EXPECT_TRUE(t == drawn ? without != drawn : without == drawn) << row.noise << ", " << t;
    }
    others += drawn != 4 ? 1 : 0;
    row.masked.clear();
    EXPECT_EQ(Sampled({-200, 0}, row).token, 1) << "what weighs nothing is never drawn";
    EXPECT_EQ(Sampled({0, -200}, row).token, 0);
  }
  EXPECT_GT(others, 60);
}

TEST(SampleRefTest, AGivenTokenIsRatedAsTheRowCame) {
  AnySampleRow row;
  row.given = 2;
  row.temperature = 1;
  row.edits = {{2, -1, 100.0f}};
  row.masked = {2};
  row.allowed = {0b0001};
  row.top_logprobs = 1;
  const SampledToken rated = Sampled({0, std::log(2.0f), 0, 0}, row);
  EXPECT_EQ(rated.status, SampleStatus::kOk);
  EXPECT_EQ(rated.token, 2);
  EXPECT_EQ(rated.rank, 3) << "behind the likelier one, and behind an equal of a lower id";
  EXPECT_NEAR(rated.logprob, std::log(0.2), 1e-6);
  EXPECT_EQ(rated.top[0].token, 1);
  row.given = 1;
  EXPECT_EQ(Sampled({0, 1, 0, 0}, row).rank, 1);
  row.given = -1;
  EXPECT_EQ(Sampled({0, 1, 0, 0}, row).rank, 0) << "of a drawn one nobody asks";
}

// Each bit of noise and token changes half of the bits, and no two tokens have the same.
TEST(TokenNoiseTest, HangsOnEveryBitOfBoth) {
  Random random;
  SCOPED_TRACE(testing::Message() << "seed " << random.seed());
  constexpr int kSamples = 4'000;
  std::vector<int> changed(96, 0);
  for (int i = 0; i < kSamples; ++i) {
    const auto noise = static_cast<uint64_t>(random.Int(INT64_MIN, INT64_MAX));
    const auto token = static_cast<uint32_t>(random.Int(0, 200'000));
    const uint32_t bits = TokenNoise(noise, token);
    for (int bit = 0; bit < 64; ++bit) {
      changed[bit] += std::popcount(bits ^ TokenNoise(noise ^ uint64_t{1} << bit, token));
    }
    for (int bit = 0; bit < 32; ++bit) {
      changed[64 + bit] += std::popcount(bits ^ TokenNoise(noise, token ^ 1u << bit));
    }
  }
  for (size_t bit = 0; bit < changed.size(); ++bit) {
    EXPECT_NEAR(changed[bit] / static_cast<double>(kSamples), 16.0, 0.5) << "bit " << bit;
  }
  std::set<uint32_t> all;
  for (uint32_t token = 0; token < 50'000; ++token) all.insert(TokenNoise(random.seed(), token));
  EXPECT_EQ(all.size(), 50'000u);
}

class SampleTest : public EachIsa {
 protected:
  static std::vector<SampledToken> Run(Backend& backend, Matrix& logits,
                                       const std::vector<AnySampleRow>& any) {
    std::vector<SampleRow> rows;
    for (const AnySampleRow& row : any) rows.push_back(row.row());
    std::vector<SampledToken> sampled(rows.size());
    backend.Sample(logits.tensor(), rows, sampled.data());
    return sampled;
  }
};

TEST_P(SampleTest, RowsOfEveryKindUnderEveryOption) {
  SCOPED_TRACE(Seed());
  const auto one = Make(1), several = Make(3);
  for (int round = 0; round < 60; ++round) {
    const int64_t vocab = AnyVocab(random_, round == 0 ? 152064 : 9000);
    const int64_t num_rows = random_.Int(1, vocab > 9000 ? 3 : 12);
    Matrix logits(num_rows, vocab);
    std::vector<AnySampleRow> rows;
    for (int64_t i = 0; i < num_rows; ++i) {
      FillLogits(random_, {logits.row(i), static_cast<size_t>(vocab)});
      rows.push_back(AnySampleRow::Any(random_, vocab));
    }
    const Matrix before = logits;
    const auto sampled = Run(*one, logits, rows);
    for (int64_t i = 0; i < num_rows; ++i) {
      SCOPED_TRACE(testing::Message() << "row " << i << ", " << vocab << " tokens, " << rows[i]);
      ASSERT_NO_FATAL_FAILURE(ExpectSampled(logits, i, rows[i], sampled[i]));
      ASSERT_EQ(std::memcmp(logits.row(i), before.row(i), 4 * static_cast<size_t>(vocab)), 0)
          << "the logits were changed";
    }
    EXPECT_TRUE(logits.GuardsIntact());
    const auto again = Run(*several, logits, rows);
    for (int64_t i = 0; i < num_rows; ++i) ASSERT_TRUE(SameSample(again[i], sampled[i]));
  }
}

TEST_P(SampleTest, ABrokenRowIsSaidToBeWhereverItIsBrokenAndDisturbsNobody) {
  SCOPED_TRACE(Seed());
  const auto backend = Make(2);
  for (const int64_t vocab : {1, 40, 600}) {
    for (int64_t at = 0; at<vocab; at += vocab> 40 ? 7 : 1) {
      Matrix logits(8, vocab);
      std::vector<AnySampleRow> rows;
      for (int64_t i = 0; i < 8; ++i) {
        for (int64_t j = 0; j < vocab; ++j) logits.row(i)[j] = random_.Normal();
        rows.push_back(AnySampleRow::Any(random_, vocab));
      }
      rows[4].given = rows[5].given = -1;  // no edit can spoil the row of a given one
      logits.row(1)[at] = kNan;
      logits.row(2)[at] = kInfinity;
      std::fill_n(logits.row(3), vocab, -kInfinity);
      for (int32_t t = 0; t < vocab; ++t) rows[4].masked.push_back(t);
      logits.row(5)[at] = 3e38f;
      rows[5].repetition_penalty = 0.01f;
      rows[5].masked.clear();
      rows[5].allowed.clear();
      rows[5].edits = {{static_cast<int32_t>(at), 0, 0.0f}};
      logits.row(6)[at] = -kInfinity;
      const auto sampled = Run(*backend, logits, rows);
      EXPECT_EQ(sampled[1].status, SampleStatus::kNan);
      EXPECT_EQ(sampled[2].status, SampleStatus::kInfinity);
      EXPECT_EQ(sampled[3].status, SampleStatus::kNothing);
      EXPECT_EQ(sampled[4].status, SampleStatus::kNothing);
      EXPECT_EQ(sampled[5].status, SampleStatus::kInfinity);
      for (int64_t i = 0; i < 8; ++i) {
        SCOPED_TRACE(testing::Message() << "row " << i << ", " << vocab << " tokens, at " << at);
        ASSERT_NO_FATAL_FAILURE(ExpectSampled(logits, i, rows[i], sampled[i]));
      }
    }
  }
}

TEST_P(SampleTest, DrawsFollowTheProbabilities) {
  const std::vector<double> expected = {0.5, 0.3, 0.15, 0.05};
  const auto backend = Make(1);
  constexpr int kDraws = 4'000;
  constexpr double kDeviations = 4.5;  // the noise below is always the same
  for (const float top_p : {1.0f, 0.9999999f}) {
    std::vector<int> counts(4, 0);
    Matrix logits(1, 4);
    for (int i = 0; i < 4; ++i) logits.row(0)[i] = static_cast<float>(std::log(expected[i]));
    AnySampleRow row;
    row.temperature = 1;
    row.top_p = top_p;
    for (int i = 0; i < kDraws; ++i) {
      row.noise = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u;
      ++counts[Run(*backend, logits, {row})[0].token];
    }
    for (int i = 0; i < 4; ++i) {
      const double deviation = std::sqrt(kDraws * expected[i] * (1 - expected[i]));
      EXPECT_NEAR(counts[i], kDraws * expected[i], kDeviations * deviation) << i;
    }
  }
}

// A draft's logits are nearly its verification's: what they draw is nearly always the same, however many tokens there are.
TEST_P(SampleTest, RowsThatAreNearlyEqualDrawTheSame) {
  SCOPED_TRACE(Seed());
  const auto backend = Make(2);
  constexpr int64_t kVocab = 20'000;
  constexpr int kDraws = 300;
  for (const float deviation : {0.02f, 0.2f}) {
    Matrix logits(2, kVocab);
    std::vector<double> weights[2];
    double sums[2] = {}, distance = 0;
    for (int64_t i = 0; i < kVocab; ++i) {
      logits.row(0)[i] = random_.Normal(2.0f);
      logits.row(1)[i] = logits.row(0)[i] + random_.Normal(deviation);
      for (int r : {0, 1}) sums[r] += weights[r].emplace_back(std::exp(logits.row(r)[i]));
    }
    for (int64_t i = 0; i < kVocab; ++i) {
      distance += std::abs(weights[0][i] / sums[0] - weights[1][i] / sums[1]) / 2;
    }
    std::vector<AnySampleRow> rows(2);
    rows[0].temperature = rows[1].temperature = 1;
    int apart = 0;
    for (int i = 0; i < kDraws; ++i) {
      rows[0].noise = rows[1].noise = static_cast<uint64_t>(random_.Int(INT64_MIN, INT64_MAX));
      const auto sampled = Run(*backend, logits, rows);
      apart += sampled[0].token != sampled[1].token ? 1 : 0;
    }
    const double bound = 2 * distance / (1 + distance);
    EXPECT_LE(apart, kDraws * bound + 5 * std::sqrt(kDraws * bound)) << "distance " << distance;
  }
}

TEST_P(SampleTest, LogprobsOfLargeLogitsAreStable) {
  const auto backend = Make(1);
  Matrix logits(1, 2);
  logits.row(0)[0] = logits.row(0)[1] = 1e30f;
  AnySampleRow row;
  row.top_logprobs = 9;  // more than there are
  const SampledToken sampled = Run(*backend, logits, {row})[0];
  EXPECT_NEAR(sampled.logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(sampled.num_top, 2);
}

WINNOW_FOR_EACH_ISA(SampleTest);

}  // namespace
}  // namespace winnow::kernels

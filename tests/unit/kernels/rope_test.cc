#include "kernels/rope.h"

#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

class RopeTest : public EachIsa {
 protected:
  static std::vector<float> InverseFrequencies(int32_t d) {
    std::vector<float> values(d / 2);
    for (int32_t j = 0; j < d / 2; ++j)
      values[j] = std::pow(10000.0f, -2.0f * static_cast<float>(j) / d);
    return values;
  }
};
WINNOW_FOR_EACH_ISA(RopeTest);

TEST_P(RopeTest, TheTableRoundsTheAngleAndThenTheCosine) {
  const std::vector<float> inv_freq = InverseFrequencies(64);
  const std::vector<int32_t> positions = {0, 1, 63, 4096, 131071, 1000000};
  Matrix table(6, 64);
  Make(2)->RopeTable(positions, inv_freq, 1.5f, {}, table.tensor());
  for (size_t i = 0; i < positions.size(); ++i) {
    for (int32_t j = 0; j < 32; ++j) {
      const float angle = static_cast<float>(positions[i]) * inv_freq[j];
      EXPECT_EQ(table.row(i)[j], static_cast<float>(std::cos(double{angle})) * 1.5f);
      EXPECT_EQ(table.row(i)[32 + j], static_cast<float>(std::sin(double{angle})) * 1.5f);
    }
  }
  EXPECT_TRUE(table.GuardsIntact());
}

// Queries that lie far along are multiplied by more: the whole row, pairs that do not turn, too.
TEST_P(RopeTest, FactorsMultiplyTheirRows) {
  std::vector<float> inv_freq = InverseFrequencies(64);
  inv_freq[31] = 0;
  const std::vector<int32_t> positions = {5, 5, 70000};
  const std::vector<float> factors = {1.0f, 1.25f, 0.5f};
  Matrix plain(3, 64), table(3, 64);
  const auto backend = Make(2);
  backend->RopeTable(positions, inv_freq, 1.5f, {}, plain.tensor());
  backend->RopeTable(positions, inv_freq, 1.5f, factors, table.tensor());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t c = 0; c < 64; ++c) {
      EXPECT_EQ(table.row(i)[c], plain.row(i)[c] * factors[i]) << i << ", " << c;
    }
  }
  EXPECT_EQ(table.row(1)[31], 1.25f);
  EXPECT_TRUE(table.GuardsIntact());
}

// Heads of which a part rotates, and layers that rotate none: the rest of a head is neither turned nor scaled.
TEST_P(RopeTest, PairsOfFrequencyZeroStayAsTheyAre) {
  SCOPED_TRACE(Seed());
  std::vector<float> inv_freq = InverseFrequencies(64);
  std::fill(inv_freq.begin() + 20, inv_freq.end(), 0.0f);
  const std::vector<int32_t> positions = {0, 7, 131071};
  Matrix table(3, 64), x = Matrix::Normal(random_, 3, 2 * 64);
  const auto backend = Make(1);
  backend->RopeTable(positions, inv_freq, 1.5f, {}, table.tensor());
  const Matrix before = x;
  backend->Rope(x.tensor(), 64, table.tensor());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t c = 0; c < 2 * 64; ++c) {
      if (c % 32 < 20) {
        EXPECT_NE(x.row(i)[c], before.row(i)[c]) << i << ", " << c;
      } else {
        EXPECT_EQ(x.row(i)[c], before.row(i)[c]) << i << ", " << c;
      }
    }
  }
}

TEST_P(RopeTest, EqualsTheReferenceForEveryHeadDimension) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : {64, 80, 96, 128, 256}) {
    const int64_t m = random_.Int(1, 30);
    std::vector<int32_t> positions(m);
    for (int32_t& position : positions) position = static_cast<int32_t>(random_.Int(0, 200000));
    Matrix table(m, d);
    const auto backend = Make(3);
    backend->RopeTable(positions, InverseFrequencies(d), 1.0f, {}, table.tensor());
    Matrix x = Matrix::Normal(random_, m, 5 * d);
    Matrix expected = x;
    backend->Rope(x.tensor(), d, table.tensor());
    RopeRef(expected.tensor(), d, table.tensor());
    ExpectNear(x, expected, 1e-6, 1e-6);
  }
}

TEST_P(RopeTest, ScoresDependOnTheDistanceAlone) {
  SCOPED_TRACE(Seed());
  const auto backend = Make(1);
  Matrix q = Matrix::Normal(random_, 1, 64), k = Matrix::Normal(random_, 1, 64);
  auto score = [&](int32_t q_position, int32_t k_position) {
    Matrix table(1, 64), rotated_q = q, rotated_k = k;
    const std::vector<int32_t> q_at = {q_position}, k_at = {k_position};
    backend->RopeTable(q_at, InverseFrequencies(64), 1.0f, {}, table.tensor());
    backend->Rope(rotated_q.tensor(), 64, table.tensor());
    backend->RopeTable(k_at, InverseFrequencies(64), 1.0f, {}, table.tensor());
    backend->Rope(rotated_k.tensor(), 64, table.tensor());
    double sum = 0;
    for (int j = 0; j < 64; ++j) sum += double{rotated_q.row(0)[j]} * rotated_k.row(0)[j];
    return sum;
  };
  EXPECT_NEAR(score(17, 5), score(1012, 1000), 1e-2);
  EXPECT_GT(std::abs(score(17, 5) - score(5, 17)), 1e-3);  // which of the two comes first matters
}

}  // namespace
}  // namespace winnow::kernels

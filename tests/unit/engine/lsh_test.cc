#include "engine/retrieval/lsh.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dtype.h"
#include "tests/unit/engine/sequence_runner.h"

namespace winnow::engine {
namespace {

using kernels::AffineStage;
using kernels::EncoderWeights;

float Weight(const AffineStage& stage, int32_t head, int32_t row, int32_t column) {
  return kernels::ToFloat(
      kernels::BF16{stage.weight[(int64_t{head} * stage.out + row) * stage.in + column]});
}

// By elimination with pivots: knows nothing of how the matrix was made.
double Determinant(std::vector<double> m, int32_t dim) {
  double determinant = 1;
  for (int32_t k = 0; k < dim; ++k) {
    int32_t pivot = k;
    for (int32_t row = k; row < dim; ++row)
      if (std::abs(m[row * dim + k]) > std::abs(m[pivot * dim + k])) pivot = row;
    if (pivot != k) {
      std::swap_ranges(&m[k * dim], &m[k * dim] + dim, &m[pivot * dim]);
      determinant = -determinant;
    }
    determinant *= m[k * dim + k];
    for (int32_t row = k + 1; row < dim; ++row) {
      const double factor = m[row * dim + k] / m[k * dim + k];
      for (int32_t i = k; i < dim; ++i) m[row * dim + i] -= factor * m[k * dim + i];
    }
  }
  return determinant;
}

TEST(RandomRotation, IsOrthogonalAndTurnsWithoutMirroring) {
  const uint64_t seed = testing::TestSeed();
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(seed));
  for (const int32_t dim : {2, 3, 5, 64, 80, 96, 127, 128}) {
    for (int32_t number = 0; number < 4; ++number) {
      const std::vector<double> q = RandomRotation(dim, seed, number);
      ASSERT_EQ(q.size(), static_cast<size_t>(dim) * dim);
      double worst = 0;
      for (int32_t a = 0; a < dim; ++a) {
        for (int32_t b = 0; b < dim; ++b) {
          double dot = 0;
          for (int32_t i = 0; i < dim; ++i) dot += q[a * dim + i] * q[b * dim + i];
          worst = std::max(worst, std::abs(dot - (a == b ? 1 : 0)));
        }
      }
      EXPECT_LT(worst, 1e-13) << dim;
      EXPECT_NEAR(Determinant(q, dim), 1, 1e-10) << dim;
    }
  }
}

// Of a uniform rotation every entry has mean 0 and variance 1 / dim. A decomposition whose triangle
// has no positive diagonal keeps signs: its diagonal entries would not have mean 0.
TEST(RandomRotation, IsUniform) {
  const uint64_t seed = testing::TestSeed();
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(seed));
  constexpr int32_t kDim = 4, kRotations = 4000;
  std::vector<double> sum(kDim * kDim), squares(kDim * kDim);
  for (int32_t number = 0; number < kRotations; ++number) {
    const std::vector<double> q = RandomRotation(kDim, seed, number);
    for (int32_t i = 0; i < kDim * kDim; ++i) {
      sum[i] += q[i] / kRotations;
      squares[i] += q[i] * q[i] / kRotations;
    }
  }
  for (int32_t i = 0; i < kDim * kDim; ++i) {
    EXPECT_NEAR(sum[i], 0, 0.05) << i;  // six standard deviations of the mean
    EXPECT_NEAR(squares[i], 1.0 / kDim, 0.025) << i;
  }
}

TEST(LshEncoder, AreOneStageWithoutBias) {
  for (const int32_t bits : {32, 64, 128, 256, 512, 1024}) {
    const LshEncoder encoder(3, 2, 96, bits);
    const EncoderWeights weights = encoder.weights();
    EXPECT_EQ(weights.kv_heads, 2);
    EXPECT_EQ(weights.queries_per_input, 1);
    ASSERT_EQ(weights.stages.size(), 1u);
    const AffineStage& stage = weights.stages[0];
    EXPECT_EQ(stage.in, 96);
    EXPECT_EQ(stage.out, bits);
    EXPECT_EQ(stage.weight.size(), size_t{2} * bits * 96);
    ASSERT_EQ(stage.bias.size(), size_t{2} * bits);
    for (const float bias : stage.bias) EXPECT_EQ(std::bit_cast<uint32_t>(bias), 0u);
  }
}

TEST(LshEncoder, StackRotationsUnderEachOther) {
  constexpr int32_t kDim = 80;  // does not divide 256: the fourth rotation is cut
  const LshEncoder encoder(1, 2, kDim, 256);
  const EncoderWeights weights = encoder.weights();
  const AffineStage& stage = weights.stages[0];
  for (int32_t head = 0; head < 2; ++head) {
    double between = 0;
    for (int32_t a = 0; a < 256; ++a) {
      for (int32_t b = 0; b <= a; ++b) {
        double dot = 0;
        for (int32_t i = 0; i < kDim; ++i)
          dot += double{Weight(stage, head, a, i)} * Weight(stage, head, b, i);
        if (a / kDim == b / kDim) {
          ASSERT_NEAR(dot, a == b ? 1 : 0, 0.005) << a << " " << b;  // of bfloat16
        } else {
          between = std::max(between, std::abs(dot));
        }
      }
    }
    EXPECT_GT(between, 0.2);  // not the same rotation again
    EXPECT_LT(between, 0.8);
  }
}

TEST(LshEncoder, AreTheSameEverywhere) {
  const LshEncoder once(5, 2, 64, 128), again(5, 2, 64, 128), longer(5, 3, 64, 256);
  const auto rows = [](const LshEncoder& of, int32_t head, int32_t bits) {
    const AffineStage stage = of.weights().stages[0];
    const auto begin = stage.weight.begin() + int64_t{head} * stage.out * 64;
    return std::vector<uint16_t>(begin, begin + int64_t{bits} * 64);
  };
  EXPECT_EQ(rows(once, 1, 128), rows(again, 1, 128));
  EXPECT_EQ(rows(once, 1, 128), rows(longer, 1, 128));  // more bits and heads only add

  std::set<std::vector<uint16_t>> distinct;
  for (int32_t layer = 0; layer < 3; ++layer) {
    const LshEncoder encoder(layer, 3, 64, 128);
    for (int32_t head = 0; head < 3; ++head) distinct.insert(rows(encoder, head, 64));
  }
  EXPECT_EQ(distinct.size(), 9u);

  // FNV-1a of the weights: a change here makes codes that were stored before worthless.
  uint64_t hash = 0xcbf29ce484222325;
  const EncoderWeights weights = once.weights();
  for (const uint16_t bits : weights.stages[0].weight) hash = (hash ^ bits) * 0x100000001b3;
  EXPECT_EQ(hash, 0x5d6f6a79c81185cbu);
}

// docs/artifact-format.md wants no weights under 2^-30. One in 10^8 is; here is one.
TEST(LshEncoder, StoresTinyWeightsAsZero) {
  const LshEncoder encoder(45153, 1, 64, 64);
  const EncoderWeights weights = encoder.weights();
  EXPECT_EQ(weights.stages[0].weight[2558], 0);
  EXPECT_EQ(std::ranges::count(weights.stages[0].weight, 0), 1);
}

// Share of bits in which the codes of x and y agree.
double Agreement(const AffineStage& stage, int32_t head, const std::vector<double>& x,
                 const std::vector<double>& y) {
  int32_t agree = 0;
  for (int32_t row = 0; row < stage.out; ++row) {
    double of_x = 0, of_y = 0;
    for (int32_t i = 0; i < stage.in; ++i) {
      of_x += Weight(stage, head, row, i) * x[i];
      of_y += Weight(stage, head, row, i) * y[i];
    }
    agree += (of_x >= 0) == (of_y >= 0);
  }
  return double(agree) / stage.out;
}

TEST(LshEncoder, AgreementOfCodesGrowsWithTheCosine) {
  const uint64_t seed = testing::TestSeed();
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::normal_distribution<double> gaussian;
  constexpr int32_t kDim = 64, kPairs = 200;
  const LshEncoder encoder(2, 2, kDim, 128);
  const EncoderWeights weights = encoder.weights();
  double previous = -1;
  for (const double cosine : {-1.0, -0.9, -0.5, 0.0, 0.3, 0.6, 0.9, 0.99, 1.0}) {
    double mean = 0;
    for (int32_t pair = 0; pair < kPairs; ++pair) {
      std::vector<double> x(kDim), y(kDim);
      for (double& value : x) value = gaussian(random);
      double xx = 0, xz = 0, zz = 0;
      for (double& value : y) value = gaussian(random);
      for (int32_t i = 0; i < kDim; ++i) xx += x[i] * x[i], xz += x[i] * y[i];
      for (int32_t i = 0; i < kDim; ++i) {  // y: orthogonal to x, then turned towards it
        y[i] -= xz / xx * x[i];
        zz += y[i] * y[i];
      }
      for (int32_t i = 0; i < kDim; ++i)
        y[i] =
            cosine * x[i] / std::sqrt(xx) + std::sqrt(1 - cosine * cosine) * y[i] / std::sqrt(zz);
      mean += Agreement(weights.stages[0], pair % 2, x, y) / kPairs;
    }
    EXPECT_GT(mean, previous);
    EXPECT_NEAR(mean, 1 - std::acos(cosine) / std::numbers::pi, 0.02) << cosine;
    previous = mean;
  }
}

}  // namespace
}  // namespace winnow::engine

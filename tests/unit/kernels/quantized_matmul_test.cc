#include "kernels/quantized_matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cpu/ops.h"
#include "kernels/cpu/quantized_panel.h"
#include "kernels/quantized.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/random_blocks.h"
#include "tests/unit/kernels/stored_matmul_testing.h"

namespace winnow::kernels {
namespace {

class QuantizedMatmulTest : public StoredMatmul {};
WINNOW_FOR_EACH_ISA(QuantizedMatmulTest);

TEST_P(QuantizedMatmulTest, EqualsTheReferenceForEveryTypeAndOddShapes) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 6; ++round) {
    const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
    ASSERT_TRUE(backend->ComputesStored());
    for (const WeightType type : kIntegerBlocks) {
      const int64_t in = BlockSizeOf(type).values * random_.Int(1, 5), m = random_.Int(1, 20);
      const int64_t out_a = random_.Int(1, 150), out_b = random_.Int(0, 70);
      SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", m " << m << ", in " << in
                                      << ", out " << out_a << "+" << out_b);
      const BlockMatrix a(random_, out_a, in, type), b(random_, out_b, in, type);
      const std::vector<StoredMatrix> parts = {a.stored(), b.stored()};
      Matrix x = Matrix::Normal(random_, m, in);
      Matrix bias = Matrix::Normal(random_, 1, out_a + out_b);
      Matrix y = Matrix::Normal(random_, m, out_a + out_b);
      Matrix expected = y;
      MatmulEpilogue epilogue;
      if (random_.Int(0, 1) == 1) epilogue.bias = bias.row(0);
      epilogue.accumulate = random_.Int(0, 1) == 1;
      const auto w = backend->PackStored(parts, DType::kBF16);
      EXPECT_EQ(w->out_features(), out_a + out_b);
      EXPECT_EQ(w->in_features(), in);
      backend->Matmul(x.tensor(), *w, y.tensor(), epilogue);
      QuantizedMatmulRef(x.tensor(), parts, expected.tensor(), epilogue);
      EXPECT_TRUE(y.GuardsIntact());
      // The sums' values are around 1, and there are `in` of them in float32.
      ExpectNear(y, expected, 1e-5 * static_cast<double>(in), 1e-5);
    }
  }
}

// Integers at their largest on both sides, where sums of products in 16 bits would be too much.
TEST_P(QuantizedMatmulTest, TheLargestIntegersHaveRoom) {
  SCOPED_TRACE(Seed());
  const auto backend = Make(1);
  for (const WeightType type : kIntegerBlocks) {
    for (const int fill : {0xff, 0x77, 0}) {  // 0x77 is the largest of 4-bit floats
      SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", " << fill);
      constexpr int64_t kIn = 256, kOut = 20, kRows = 7;
      const BlockMatrix a(random_, kOut, kIn, type, static_cast<uint8_t>(fill));
      Matrix x(kRows, kIn), y(kRows, kOut), expected(kRows, kOut);
      for (int64_t i = 0; i < kRows; ++i) {
        std::fill_n(x.row(i), kIn, i % 2 == 0 ? 1.0f : -0.5f);
      }
      const auto w = backend->PackStored({{a.stored()}}, DType::kBF16);
      backend->Matmul(x.tensor(), *w, y.tensor(), {});
      QuantizedMatmulRef(x.tensor(), {{a.stored()}}, expected.tensor(), {});
      ExpectNear(y, expected, 1e-3, 1e-5);
    }
  }
}

TEST_P(QuantizedMatmulTest, PartsOfDifferentTypesAreEachTheirOwn) {
  SCOPED_TRACE(Seed());
  const auto backend = Make(2);
  const int64_t in = 512, m = 9;
  const BlockMatrix q(random_, 70, in, WeightType::kQ4K), k(random_, 33, in, WeightType::kQ6K);
  const BlockMatrix v(random_, 17, in, WeightType::kBF16);
  const std::vector<StoredMatrix> parts = {q.stored(), k.stored(), v.stored()};
  Matrix x = Matrix::Normal(random_, m, in), bias = Matrix::Normal(random_, 1, 120);
  Matrix y(m, 120);
  const MatmulEpilogue epilogue{.bias = bias.row(0), .accumulate = true};
  backend->Matmul(x.tensor(), *backend->PackStored(parts, DType::kBF16), y.tensor(), epilogue);
  int64_t first = 0;
  for (const StoredMatrix& part : parts) {
    const auto rows = static_cast<int64_t>(part.rows.size());
    Matrix alone(m, rows);
    const MatmulEpilogue own{.bias = bias.row(0) + first, .accumulate = true};
    const auto w = backend->PackStored({{part}}, DType::kBF16);
    backend->Matmul(x.tensor(), *w, alone.tensor(), own);
    for (int64_t i = 0; i < m; ++i) {
      ASSERT_EQ(std::memcmp(alone.row(i), y.row(i) + first, rows * sizeof(float)), 0) << first;
    }
    first += rows;
  }
}

TEST_P(QuantizedMatmulTest, ARowIsTheSameBitsAloneAndInABatchOfAnySize) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kIntegerBlocks) {
    ExpectRowsToBeAsAlone(type, random_.Int(150, 300), 256 * random_.Int(1, 3));
  }
}

TEST_P(QuantizedMatmulTest, RoundsRowsAsTheReferenceDoes) {
  SCOPED_TRACE(Seed());
  const CpuOps* ops = FindCpuOps(GetParam().c_str());
  constexpr int64_t kValues = 32 * 8;
  for (int round = 0; round < 50; ++round) {
    std::vector<float> x(kValues);
    for (float& value : x) value = random_.Normal() * std::exp(random_.Normal(3));
    // Halves are ties, and the largest is a power of two: the integers lie on them exactly.
    for (int64_t i = 0; i < 32; ++i) x[i] = static_cast<float>(random_.Int(-254, 254)) / 2;
    x[0] = 127;
    std::fill_n(x.begin() + 32, 32, 0.0f);
    x[64 + random_.Int(0, 31)] = round % 2 == 0 ? NAN : -INFINITY;
    for (int64_t i = 96; i < 128; ++i) x[i] *= 1e-38f;
    x[130] = 3e38f;
    std::vector<std::byte> prepared(PreparedRow::Bytes(kValues));
    ops->prepare_rounded_row(x.data(), kValues, prepared.data());
    for (int64_t at = 0; at < kValues; at += kRoundedValues) {
      int8_t expected[kRoundedValues];
      const float scale = RoundActivations(x.data() + at, kRoundedValues, expected);
      float prepared_scale;
      std::memcpy(&prepared_scale, prepared.data() + PreparedRow::ScalesAt(kValues) + at / 32 * 4,
                  4);
      if (std::isnan(scale)) {
        EXPECT_TRUE(std::isnan(prepared_scale));
      } else {
        EXPECT_EQ(prepared_scale, scale);
      }
      ASSERT_EQ(std::memcmp(prepared.data() + at, expected, kRoundedValues), 0);
      for (int64_t half = 0; half < 2; ++half) {
        int32_t sum = 0, prepared_sum;
        for (int64_t i = 0; i < 16; ++i) sum += expected[16 * half + i];
        std::memcpy(&prepared_sum,
                    prepared.data() + PreparedRow::SumsAt(kValues) + (at / 16 + half) * 4, 4);
        EXPECT_EQ(prepared_sum, sum);
      }
    }
  }
}

TEST_P(QuantizedMatmulTest, NotANumberStaysInItsRow) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kIntegerBlocks) ExpectNotANumberToStayInItsRow(type, 256);
}

TEST(QuantizedMatmulVectorTest, Avx2AndAvx512GiveTheSameBits) {
  const auto avx2 = MakeCpuBackend("avx2", 1), avx512 = MakeCpuBackend("avx512", 1);
  if (avx2 == nullptr || avx512 == nullptr) return;  // there is nothing to compare
  Random random;
  SCOPED_TRACE(random.seed());
  for (const WeightType type : kIntegerBlocks) {
    const BlockMatrix w(random, 150, 768, type);
    Matrix x = Matrix::Normal(random, 7, 768), a(7, 150), b(7, 150);
    avx2->Matmul(x.tensor(), *avx2->PackStored({{w.stored()}}, DType::kF32), a.tensor(), {});
    avx512->Matmul(x.tensor(), *avx512->PackStored({{w.stored()}}, DType::kF32), b.tensor(), {});
    for (int64_t i = 0; i < 7; ++i) EXPECT_TRUE(SameBits(a, i, b, i)) << WeightTypeName(type);
  }
}

}  // namespace
}  // namespace winnow::kernels

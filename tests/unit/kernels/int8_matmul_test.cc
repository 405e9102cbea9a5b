#include "kernels/int8_matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/int8_panel.h"
#include "kernels/cpu/ops.h"
#include "kernels/quantized.h"
#include "kernels/quantized_matmul.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/random_blocks.h"
#include "tests/unit/kernels/stored_matmul_testing.h"

namespace winnow::kernels {
namespace {

class Int8MatmulTest : public StoredMatmul {};
WINNOW_FOR_EACH_ISA(Int8MatmulTest);

// Sums of integers are exact, and the rest is in one order: every instruction set has the oracle's bits.
TEST_P(Int8MatmulTest, HasTheBitsOfTheReferenceForOddShapes) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 30; ++round) {
    const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
    // Rows that end anywhere within a group; on AMX all heights of tiles.
    const int64_t in = 32 * random_.Int(1, 20), out_a = random_.Int(1, 150);
    const int64_t out_b = random_.Int(0, 70);
    const int64_t m = round % 5 == 0 ? random_.Int(33, 200) : random_.Int(1, 34);
    const int32_t bits_a = 4 * random_.Int(1, 2), bits_b = 4 * random_.Int(1, 2);
    SCOPED_TRACE(testing::Message() << "m " << m << ", in " << in << ", out " << out_a << "+"
                                    << out_b << ", bits " << bits_a << " and " << bits_b);
    const BlockMatrix a(random_, out_a, in, WeightType::kI8x128, {}, bits_a);
    const BlockMatrix b(random_, out_b, in, WeightType::kI8x128, {}, bits_b);
    Matrix x = Matrix::Normal(random_, m, in), bias = Matrix::Normal(random_, 1, out_a + out_b);
    Matrix y = Matrix::Normal(random_, m, out_a + out_b), expected = y;
    MatmulEpilogue epilogue;
    if (random_.Int(0, 1) == 1) epilogue.bias = bias.row(0);
    epilogue.accumulate = random_.Int(0, 1) == 1;
    const auto w = backend->PackStored({{a.stored(), b.stored()}}, DType::kBF16);
    backend->Matmul(x.tensor(), *w, y.tensor(), epilogue);
    EXPECT_TRUE(y.GuardsIntact());
    std::vector<StoredMatrix> both = {a.stored()};
    for (const std::byte* row : b.stored().rows) both[0].rows.push_back(row);
    Int8MatmulRef(x.tensor(), both[0], expected.tensor(), epilogue);
    for (int64_t i = 0; i < m; ++i) ASSERT_TRUE(SameBits(y, i, expected, i)) << "row " << i;
  }
}

// The integers -128 and -8, which files may have, have no positive counterparts.
TEST_P(Int8MatmulTest, TakesTheLeastAndTheLargestIntegers) {
  const int64_t in = 160, out = 20;
  const int64_t row_bytes = WeightRowBytes(WeightType::kI8x128, in);
  for (const int32_t bits : {8, 4}) {
    const int32_t least = -(1 << (bits - 1));
    std::vector<std::byte> rows(out * row_bytes);
    StoredMatrix w{.type = WeightType::kI8x128, .cols = in, .rows = {}, .integer_bits = bits};
    for (int64_t o = 0; o < out; ++o) {
      std::byte* const row = rows.data() + o * row_bytes;
      for (int64_t i = 0; i < in; ++i) {
        row[i / 32 * 34 + 2 + i % 32] = static_cast<std::byte>(o % 2 == 0 ? least : -least - 1);
        const F16 one = ToF16(1);
        std::memcpy(row + i / 32 * 34, &one, sizeof one);
      }
      w.rows.push_back(row);
    }
    Matrix x(40, in), y(40, out), expected(40, out);
    for (int64_t i = 0; i < 40; ++i) {
      for (int64_t k = 0; k < in; ++k) x.row(i)[k] = i % 2 == 0 ? -127.0f : 127.0f;
    }
    const auto backend = Make(2);
    backend->Matmul(x.tensor(), *backend->PackStored({{w}}, DType::kBF16), y.tensor(), {});
    Int8MatmulRef(x.tensor(), w, expected.tensor(), {});
    EXPECT_EQ(expected.row(0)[0], 160 * 127 * -least);
    for (int64_t i = 0; i < 40; ++i) {
      ASSERT_TRUE(SameBits(y, i, expected, i)) << bits << " bits, row " << i;
    }
  }
}

// Integers from -8 to 7 have the same bits in half the bytes.
TEST_P(Int8MatmulTest, FourBitsTakeHalfTheBytes) {
  SCOPED_TRACE(Seed());
  const int64_t in = 128 * random_.Int(1, 8), out = 16 * random_.Int(1, 9), m = random_.Int(1, 40);
  const BlockMatrix w(random_, out, in, WeightType::kI8x128, {}, 4);
  StoredMatrix wide = w.stored();
  wide.integer_bits = 8;
  const auto backend = Make(2);
  const auto four = backend->PackStored({{w.stored()}}, DType::kBF16);
  const auto eight = backend->PackStored({{wide}}, DType::kBF16);
  EXPECT_EQ(four->size_bytes(), static_cast<size_t>(out * in / 128 * (64 + 4)));
  EXPECT_EQ(eight->size_bytes(), static_cast<size_t>(out * in / 128 * (128 + 4)));
  Matrix x = Matrix::Normal(random_, m, in), of_four(m, out), of_eight(m, out);
  backend->Matmul(x.tensor(), *four, of_four.tensor(), {});
  backend->Matmul(x.tensor(), *eight, of_eight.tensor(), {});
  for (int64_t i = 0; i < m; ++i) ASSERT_TRUE(SameBits(of_four, i, of_eight, i)) << "row " << i;
}

TEST_P(Int8MatmulTest, ARowIsTheSameBitsAloneAndInABatchOfAnySize) {
  SCOPED_TRACE(Seed());
  for (const int32_t bits : {8, 4}) {
    ExpectRowsToBeAsAlone(WeightType::kI8x128, random_.Int(150, 300), 32 * random_.Int(3, 30),
                          bits);
  }
}

TEST_P(Int8MatmulTest, RoundsRowsAsTheReferenceDoes) {
  SCOPED_TRACE(Seed());
  const CpuOps* ops = FindCpuOps(GetParam().c_str());
  for (int round = 0; round < 50; ++round) {
    const int64_t n = 32 * random_.Int(1, 12);
    std::vector<float> x(n);
    for (float& value : x) value = random_.Normal() * std::exp(random_.Normal(3));
    // Halves are ties, and the largest is a power of two: the integers lie on them exactly.
    for (int64_t i = 0; i < 32; ++i) x[i] = static_cast<float>(random_.Int(-254, 254)) / 2;
    if (round % 3 == 0) x[0] = 127;
    if (n > 128)
      x[128 + random_.Int(0, std::min<int64_t>(n - 128, 128) - 1)] =
          round % 2 == 0 ? NAN : -INFINITY;
    if (n > 256) std::fill(x.begin() + 256, x.end(), 1e-38f);
    std::vector<std::byte> prepared(PreparedInt8Row::Bytes(n), std::byte{0x55});
    ops->prepare_int8_row(x.data(), n, prepared.data());
    for (int64_t g = 0; g < Int8Groups(n); ++g) {
      const int64_t count = std::min(kInt8GroupValues, n - g * kInt8GroupValues);
      int8_t expected[kInt8GroupValues] = {};
      const float scale = RoundActivations(x.data() + g * kInt8GroupValues, count, expected);
      ASSERT_EQ(std::memcmp(prepared.data() + g * kInt8GroupValues, expected, sizeof expected), 0);
      float prepared_scale;
      int32_t prepared_sum, sum = 0;
      std::memcpy(&prepared_scale, prepared.data() + PreparedInt8Row::ScalesAt(n) + 4 * g, 4);
      std::memcpy(&prepared_sum, prepared.data() + PreparedInt8Row::SumsAt(n) + 4 * g, 4);
      for (const int8_t integer : expected) sum += integer;
      EXPECT_EQ(prepared_sum, sum);
      if (std::isnan(scale)) {
        EXPECT_TRUE(std::isnan(prepared_scale));
      } else {
        EXPECT_EQ(prepared_scale, scale);
      }
    }
  }
}

TEST_P(Int8MatmulTest, NotANumberStaysInItsRow) {
  SCOPED_TRACE(Seed());
  for (const int32_t bits : {8, 4}) {
    ExpectNotANumberToStayInItsRow(WeightType::kI8x128, 288, bits);
  }
}

}  // namespace
}  // namespace winnow::kernels

#include "kernels/float8_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/float8.h"
#include "kernels/quantized.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/random_blocks.h"
#include "tests/unit/kernels/stored_matmul_testing.h"

namespace winnow::kernels {
namespace {

// The value as its definition says it.
double F8ByDefinition(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude =
      exponent == 0 ? mantissa * 0x1p-9 : (1 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
  return bits & 0x80 ? -magnitude : magnitude;
}

TEST(Float8Test, EveryValueIsThatOfItsDefinitionAndComesBack) {
  for (int bits = 0; bits < 256; ++bits) {
    const float value = ToFloat(F8E4M3{static_cast<uint8_t>(bits)});
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(value, F8ByDefinition(bits)) << bits;
      EXPECT_EQ(std::signbit(value), bits >= 128);
    }
    EXPECT_EQ(ToF8E4M3(value).bits, bits);
  }
}

TEST(Float8Test, RoundsToTheNearestAndOfTwoToTheEven) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    const auto low = static_cast<float>(F8ByDefinition(bits));
    const auto high = static_cast<float>(F8ByDefinition(bits + 1));
    const float middle = (low + high) / 2;  // exact
    for (const float sign : {1.0f, -1.0f}) {
      const int set = sign < 0 ? 0x80 : 0;
      EXPECT_EQ(ToF8E4M3(sign * std::nextafterf(middle, low)).bits, bits | set) << bits;
      EXPECT_EQ(ToF8E4M3(sign * std::nextafterf(middle, high)).bits, (bits + 1) | set) << bits;
      EXPECT_EQ(ToF8E4M3(sign * middle).bits, (bits + bits % 2) | set) << bits;
    }
  }
  for (const float large : {448.0f, 449.0f, 464.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(ToF8E4M3(large).bits, 0x7e);
    EXPECT_EQ(ToF8E4M3(-large).bits, 0xfe);
  }
}

class Float8MatmulTest : public StoredMatmul {
 protected:
  // As products on AMX take rows.
  static void RoundToBF16(Matrix& x) {
    for (int64_t i = 0; i < x.rows(); ++i) {
      for (int64_t j = 0; j < x.cols(); ++j) x.row(i)[j] = ToFloat(ToBF16(x.row(i)[j]));
    }
  }
};
WINNOW_FOR_EACH_ISA(Float8MatmulTest);

TEST_P(Float8MatmulTest, EqualsTheReferenceForOddShapes) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 12; ++round) {
    const auto backend = Make(static_cast<int>(random_.Int(1, 3)));
    for (const WeightType type : kFloatBlocks) {
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
      ASSERT_EQ(w->out_features(), out_a + out_b);
      ASSERT_EQ(w->in_features(), in);
      backend->Matmul(x.tensor(), *w, y.tensor(), epilogue);
      if (GetParam() == "amx") RoundToBF16(x);
      Float8MatmulRef(x.tensor(), parts, expected.tensor(), epilogue);
      EXPECT_TRUE(y.GuardsIntact());
      // Terms are up to some 5 · 448 · 0.1; rounding adds up over `in` of them in float32.
      ExpectNear(y, expected, 2e-6 * 224 * static_cast<double>(in), 1e-5);
    }
  }
}

TEST_P(Float8MatmulTest, ValuesThatRoundingCannotTouchAreExact) {
  // Small whole numbers, powers of two as scales: every sum is exact, whatever its order.
  SCOPED_TRACE(Seed());
  const auto backend = Make(2);
  for (const WeightType type : kFloatBlocks) {
    const BlockSize block = BlockSizeOf(type);
    const int64_t in = 3 * block.values, out = 37, m = 11;
    std::vector<std::byte> bytes(out * WeightRowBytes(type, in));
    std::vector<const std::byte*> rows;
    for (int64_t at = 0; at < static_cast<int64_t>(bytes.size()); at += block.bytes) {
      const float scale = std::ldexp(1.0f, static_cast<int>(random_.Int(-3, 3)));
      std::memcpy(bytes.data() + at, &scale, sizeof scale);
      for (int64_t i = 0; i < block.values; ++i) {
        const auto whole = static_cast<float>(random_.Int(-15, 15)) * 0x1p-9f;  // subnormal, too
        bytes[at + 4 + i] = std::byte{ToF8E4M3(whole).bits};
      }
    }
    for (int64_t i = 0; i < out; ++i) rows.push_back(bytes.data() + i * WeightRowBytes(type, in));
    const StoredMatrix w{type, in, rows};
    Matrix x(m, in), y(m, out), expected(m, out);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < in; ++j) x.row(i)[j] = static_cast<float>(random_.Int(-9, 9));
    }
    backend->Matmul(x.tensor(), *backend->PackStored({{w}}, DType::kF32), y.tensor(), {});
    Float8MatmulRef(x.tensor(), {{w}}, expected.tensor(), {});
    for (int64_t i = 0; i < m; ++i) EXPECT_TRUE(SameBits(y, i, expected, i)) << i;
  }
}

TEST_P(Float8MatmulTest, ARowIsTheSameBitsAloneAndInABatchOfAnySize) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kFloatBlocks) {
    ExpectRowsToBeAsAlone(type, random_.Int(150, 300), 128 * random_.Int(1, 3));
  }
}

TEST_P(Float8MatmulTest, NotANumberStaysInItsRow) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kFloatBlocks) ExpectNotANumberToStayInItsRow(type, 256);
}

TEST(Float8MatmulVectorTest, Avx2AndAvx512GiveTheSameBits) {
  const auto avx2 = MakeCpuBackend("avx2", 1), avx512 = MakeCpuBackend("avx512", 1);
  if (avx2 == nullptr || avx512 == nullptr) return;  // there is nothing to compare
  Random random;
  SCOPED_TRACE(random.seed());
  for (const WeightType type : kFloatBlocks) {
    const BlockMatrix w(random, 150, 768, type);
    Matrix x = Matrix::Normal(random, 7, 768), a(7, 150), b(7, 150);
    avx2->Matmul(x.tensor(), *avx2->PackStored({{w.stored()}}, DType::kF32), a.tensor(), {});
    avx512->Matmul(x.tensor(), *avx512->PackStored({{w.stored()}}, DType::kF32), b.tensor(), {});
    for (int64_t i = 0; i < 7; ++i) EXPECT_TRUE(SameBits(a, i, b, i)) << WeightTypeName(type);
  }
}

}  // namespace
}  // namespace winnow::kernels

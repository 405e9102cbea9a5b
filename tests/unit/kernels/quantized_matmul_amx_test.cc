// Products of quantised weights by matrix tiles on any processor, with tiles in plain C++, and by the processor's own.

// clang-format off
#include "kernels/cpu/vec_scalar.h"
// clang-format on
#include "kernels/cpu/quantized_matmul_amx_impl.h"

#include <cstring>
#include <vector>

#include "kernels/cpu/float8_matmul_amx_impl.h"
#include "kernels/cpu/int8_matmul_amx_impl.h"
#include "kernels/cpu/packed_matrix.h"
#include "kernels/float8_matmul.h"
#include "kernels/int8_matmul.h"
#include "kernels/quantized.h"
#include "tests/unit/kernels/emulated_tiles.h"
#include "tests/unit/kernels/kernel_testing.h"
#include "tests/unit/kernels/random_blocks.h"

namespace winnow::kernels {
namespace {

using emulated::EmulatedTiles;

// x in the order that a kernel reads, and panels as a backend packs them.
template <typename Call>
class Operands {
 public:
  Operands(const Matrix& x, size_t row_bytes, void (*prepare)(const float*, int64_t, void*),
           const CpuPackedMatrix& w)
      : rows_(static_cast<size_t>(x.rows()) * row_bytes) {
    for (int64_t i = 0; i < x.rows(); ++i) {
      prepare(x.row(i), x.cols(), rows_.data() + static_cast<size_t>(i) * row_bytes);
    }
    call_.rows = rows_.data();
    call_.row_bytes = row_bytes;
    call_.panels = w.parts()[0].panel(0);
    call_.in_features = x.cols();
    call_.out_features = w.out_features();
  }
  // For rows [first, ...) of x, into the rows of y that begin with the row 0.
  Call Of(int64_t first, const MatmulEpilogue& epilogue, const Tensor& y) const {
    Call call = call_;
    call.rows = rows_.data() + static_cast<size_t>(first) * call.row_bytes;
    call.y = y.f32();
    call.y_stride = y.stride;
    call.bias = epilogue.bias;
    call.accumulate = epilogue.accumulate;
    return call;
  }
  Call* operator->() { return &call_; }

 private:
  GuardedArray<std::byte> rows_;
  Call call_;
};

Operands<QuantizedMatmulCall> IntegerOperands(const Matrix& x, const CpuPackedMatrix& w,
                                              WeightType type) {
  Operands<QuantizedMatmulCall> operands(x, static_cast<size_t>(PreparedRow::Bytes(x.cols())),
                                         scalar::PrepareRoundedRow, w);
  operands->shape = BlockShapeOf(type);
  return operands;
}

void PrepareInBF16(const float* x, int64_t n, void* out) {
  for (int64_t i = 0; i < n; ++i) {
    const BF16 rounded = ToBF16(x[i]);
    std::memcpy(static_cast<std::byte*>(out) + 2 * i, &rounded, sizeof rounded);
  }
}
Operands<Float8MatmulCall> Float8Operands(const Matrix& x, const CpuPackedMatrix& w,
                                          WeightType type) {
  Operands<Float8MatmulCall> operands(x, static_cast<size_t>(2 * x.cols()), PrepareInBF16, w);
  operands->block_values = BlockSizeOf(type).values;
  return operands;
}

class QuantizedAmxTest : public testing::Test {
 protected:
  const CpuPackedMatrix& Pack(const BlockMatrix& w) {
    packed_ = scalar_->PackStored({{w.stored()}}, DType::kBF16);
    return static_cast<const CpuPackedMatrix&>(*packed_);
  }

  Random random_;
  const std::unique_ptr<Backend> scalar_ = MakeCpuBackend("scalar", 1);
  std::unique_ptr<PackedMatrix> packed_;
};

TEST_F(QuantizedAmxTest, IntegersHaveTheBitsOfTheProductWithoutTiles) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (int round = 0; round < 4; ++round) {
    for (const WeightType type : kIntegerBlocks) {
      // Several chunks of a panel's inputs, the last one short; rows of all tiles' heights, and more than meet a panel at once.
      const int64_t in =
          BlockSizeOf(type).values * random_.Int(1, type == WeightType::kQ8_0 ? 40 : 6);
      const int64_t m = round == 0 ? random_.Int(129, 160) : random_.Int(1, 60);
      const int64_t out = random_.Int(1, 40);
      SCOPED_TRACE(testing::Message()
                   << WeightTypeName(type) << ", m " << m << ", in " << in << ", out " << out);
      const BlockMatrix w(random_, out, in, type);
      const CpuPackedMatrix& packed = Pack(w);
      Matrix x = Matrix::Normal(random_, m, in), bias = Matrix::Normal(random_, 1, out);
      x.row(m / 2)[random_.Int(0, in - 1)] = NAN;
      Matrix y = Matrix::Normal(random_, m, out), expected = y;
      MatmulEpilogue epilogue;
      if (random_.Int(0, 1) == 1) epilogue.bias = bias.row(0);
      epilogue.accumulate = random_.Int(0, 1) == 1;
      auto operands = IntegerOperands(x, packed, type);
      operands->ahead_bytes = 1024 * random_.Int(0, 1);
      TiledQuantizedMatmul<EmulatedTiles>::Run(operands.Of(0, epilogue, y.tensor()), 0, m, 0,
                                               NumPanels(out), scalar::QuantizedMatmulTiles);
      EXPECT_FALSE(EmulatedTiles::configured());
      scalar_->Matmul(x.tensor(), packed, expected.tensor(), epilogue);
      for (int64_t i = 0; i < m; ++i) {
        if (i == m / 2) {
          for (int64_t j = 0; j < out; ++j) ASSERT_TRUE(std::isnan(y.row(i)[j]));
        } else {
          ASSERT_TRUE(SameBits(y, i, expected, i)) << "row " << i;
        }
      }
      EXPECT_TRUE(y.GuardsIntact());
    }
  }
}

// Products of W8A8 and W4A8 have one result, by tiles as without.
TEST_F(QuantizedAmxTest, ProductsOfW8A8HaveTheBitsOfTheReference) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (int round = 0; round < 20; ++round) {
    const int32_t bits = round % 2 == 0 ? 8 : 4;
    const int64_t in = 32 * random_.Int(1, 20), out = random_.Int(1, 70);
    const int64_t m = round < 2 ? random_.Int(129, 160) : random_.Int(1, 70);
    SCOPED_TRACE(testing::Message()
                 << "m " << m << ", in " << in << ", out " << out << ", bits " << bits);
    const BlockMatrix w(random_, out, in, WeightType::kI8x128, {}, bits);
    Matrix x = Matrix::Normal(random_, m, in), bias = Matrix::Normal(random_, 1, out);
    Matrix y = Matrix::Normal(random_, m, out), expected = y;
    MatmulEpilogue epilogue;
    if (random_.Int(0, 1) == 1) epilogue.bias = bias.row(0);
    epilogue.accumulate = random_.Int(0, 1) == 1;
    const Operands<Int8MatmulCall> operands(
        x, static_cast<size_t>(PreparedInt8Row::Bytes(x.cols())), scalar::PrepareInt8Row, Pack(w));
    const auto run =
        bits == 4 ? TiledInt8Matmul<EmulatedTiles, 4>::Run : TiledInt8Matmul<EmulatedTiles, 8>::Run;
    run(operands.Of(0, epilogue, y.tensor()), 0, m, 0, NumPanels(out));
    EXPECT_FALSE(EmulatedTiles::configured());
    Int8MatmulRef(x.tensor(), w.stored(), expected.tensor(), epilogue);
    EXPECT_TRUE(y.GuardsIntact());
    for (int64_t i = 0; i < m; ++i) ASSERT_TRUE(SameBits(y, i, expected, i)) << "row " << i;
  }
}

TEST_F(QuantizedAmxTest, FloatsEqualTheReferenceForOddShapes) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (int round = 0; round < 12; ++round) {
    for (const WeightType type : kFloatBlocks) {
      const int64_t in = BlockSizeOf(type).values * random_.Int(1, 9);
      const int64_t m = round == 0 ? random_.Int(129, 160) : random_.Int(1, 70);
      const int64_t out = random_.Int(1, 100);
      SCOPED_TRACE(testing::Message()
                   << WeightTypeName(type) << ", m " << m << ", in " << in << ", out " << out);
      const BlockMatrix w(random_, out, in, type);
      Matrix x = Matrix::Normal(random_, m, in), bias = Matrix::Normal(random_, 1, out);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t k = 0; k < in; ++k) x.row(i)[k] = ToFloat(ToBF16(x.row(i)[k]));
      }
      Matrix y = Matrix::Normal(random_, m, out), expected = y;
      MatmulEpilogue epilogue;
      if (random_.Int(0, 1) == 1) epilogue.bias = bias.row(0);
      epilogue.accumulate = random_.Int(0, 1) == 1;
      const auto operands = Float8Operands(x, Pack(w), type);
      TiledFloat8Matmul<EmulatedTiles>::Run(operands.Of(0, epilogue, y.tensor()), 0, m, 0,
                                            NumPanels(out));
      EXPECT_FALSE(EmulatedTiles::configured());
      Float8MatmulRef(x.tensor(), {{w.stored()}}, expected.tensor(), epilogue);
      EXPECT_TRUE(y.GuardsIntact());
      ExpectNear(y, expected, 2e-6 * 224 * static_cast<double>(in), 1e-5);
    }
  }
}

TEST_F(QuantizedAmxTest, ARowOfFloatsIsTheSameBitsAloneAndInABatchOfAnySize) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (const WeightType type : kFloatBlocks) {
    const int64_t most = 150, in = 128 * random_.Int(1, 4), out = random_.Int(20, 100);
    const BlockMatrix w(random_, out, in, type);
    Matrix x = Matrix::Normal(random_, most, in), alone(most, out);
    const auto operands = Float8Operands(x, Pack(w), type);
    const auto multiply = [&](int64_t first, int64_t m, const Tensor& y) {
      TiledFloat8Matmul<EmulatedTiles>::Run(operands.Of(first, {}, y), 0, m, 0, NumPanels(out));
    };
    for (int64_t i = 0; i < most; ++i) multiply(i, 1, alone.tensor().RowRange(i, 1));
    for (const int64_t m : {2, 15, 16, 17, 31, 32, 33, 48, 49, 65, 129, 150}) {
      const int64_t first = random_.Int(0, most - m);
      Matrix y(m, out);
      multiply(first, m, y.tensor());
      for (int64_t i = 0; i < m; ++i) ASSERT_TRUE(SameBits(y, i, alone, first + i)) << "m " << m;
    }
  }
}

// A processor that has tiles computes the same integers' sums as AVX-512 does. (Float8MatmulTest has its floats.)
class QuantizedAmxProcessorTest : public testing::TestWithParam<std::string> {
 protected:
  Random random_;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(QuantizedAmxProcessorTest);  // as AmxProcessorTest
INSTANTIATE_TEST_SUITE_P(Cpu, QuantizedAmxProcessorTest,
                         testing::ValuesIn(emulated::IsasWithTiles()));

TEST_P(QuantizedAmxProcessorTest, IntegersHaveTheBitsOfAvx512) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  const auto plain = MakeCpuBackend("avx512", 2);
  for (int round = 0; round < 6; ++round) {
    const auto backend = MakeCpuBackend(GetParam(), static_cast<int>(random_.Int(1, 3)));
    for (const WeightType type : kIntegerBlocks) {
      const int64_t in = BlockSizeOf(type).values * random_.Int(1, 20), m = random_.Int(1, 300);
      const int64_t out = random_.Int(1, 300);
      SCOPED_TRACE(testing::Message()
                   << WeightTypeName(type) << ", m " << m << ", in " << in << ", out " << out);
      const BlockMatrix w(random_, out, in, type);
      Matrix x = Matrix::Normal(random_, m, in), y(m, out), expected(m, out);
      backend->Matmul(x.tensor(), *backend->PackStored({{w.stored()}}, DType::kBF16), y.tensor(),
                      {});
      plain->Matmul(x.tensor(), *plain->PackStored({{w.stored()}}, DType::kBF16), expected.tensor(),
                    {});
      for (int64_t i = 0; i < m; ++i) ASSERT_TRUE(SameBits(y, i, expected, i)) << "row " << i;
    }
  }
}

}  // namespace
}  // namespace winnow::kernels

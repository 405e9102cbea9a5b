#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cuda/block_order.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul.h"
#include "kernels/quantized.h"
#include "tests/cuda/backend_testing.h"
#include "tests/cuda/packed_blocks.h"
#include "tests/unit/kernels/random_blocks.h"

namespace winnow::kernels::cuda {
namespace {

// Rows of a stored matrix in bfloat16, as `--weights wide` has them.
std::vector<uint16_t> Widened(const StoredMatrix& w) {
  std::vector<uint16_t> values;
  std::vector<float> row(w.cols);
  for (const std::byte* bytes : w.rows) {
    DequantizeRow(w.type, bytes, w.cols, row.data());
    for (const float value : row) values.push_back(ToBF16(value).bits);
  }
  return values;
}

class CudaMatmulBlocksTest : public CudaBackendFixture {
 protected:
  // Gates from which on no tile of them and their ups is split, on this device.
  int64_t LeastWholeWidth() {
    int multiprocessors = 0;
    EXPECT_EQ(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0),
              cudaSuccess);
    return multiprocessors / 2 * 64 + 32;
  }
  // MatmulGated() of `width` gates and as many ups, with and without bias, where there is a kernel.
  void ExpectGatedAsItsParts(WeightType type, int64_t m, int64_t in, int64_t width) {
    const int64_t out = 2 * width;
    SCOPED_TRACE(testing::Message()
                 << WeightTypeName(type) << ", m " << m << ", in " << in << ", width " << width);
    const BlockMatrix matrix(random_, out, in, type);
    DeviceArray<std::byte> packed(BlockBytes(type, out, in));
    const DeviceWeights w = PackOnDevice(matrix.stored(), packed);
    ASSERT_FALSE(GatesProducts(kMatmulFewRows, w));
    if (!StreamsBlocks(m, w)) {
      ASSERT_FALSE(GatesProducts(m, w));
      return;
    }
    ASSERT_TRUE(GatesProducts(m, w));
    // Sums of like size, whatever scales are.
    Matrix x = Matrix::Normal(random_, m, in, 1.0f / std::sqrt(static_cast<float>(in)));
    std::vector<float> bias;
    if (random_.Int(0, 1) == 1) {
      for (int64_t o = 0; o < out; ++o) bias.push_back(random_.Normal());
    }
    const DeviceArray<float> of_bias(bias), gate_up(m * out);
    const auto on_device = Upload(x);
    const DeviceArray<std::byte> ordered(OrderedBytes(m, in));
    WINNOW_CUDA_OK(OrderRows(on_device.data(), x.tensor().stride, m, in, ordered.data(), nullptr));
    MatmulArgs args;
    args.m = m;
    args.y = gate_up.data();
    args.y_stride = out;
    args.bias = bias.empty() ? nullptr : of_bias.data();
    constexpr size_t kBehind = 4096;
    const DeviceArray<std::byte> parts(OrderedBytes(m, width) + kBehind),
        gated(OrderedBytes(m, width) + kBehind);
    WINNOW_CUDA_OK(MatmulOrdered(args, w, ordered.data(), nullptr));
    WINNOW_CUDA_OK(SiluMulOrdered({gate_up.data(), m, out, out}, parts.data(), nullptr));
    args.y = nullptr;
    WINNOW_CUDA_OK(MatmulGated(args, w, ordered.data(), gated.data(), nullptr));
    ASSERT_TRUE(gated.Get() == parts.Get());
  }
  int64_t AnyPadding() { return random_.Int(0, 1) == 0 ? 3 : 4; }
};

// The promise of matmul.h: the bits of the widened matrix, for any number of rows.
TEST_F(CudaMatmulBlocksTest, ProductsHaveTheBitsOfTheWidenedMatrix) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kBlockTypes) {
    const int64_t values = BlockSizeOf(type).values;
    std::vector<int64_t> rows = {1,  2,  3,  7,  8,  9,  15, 16,  17,  24,  25,
                                 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 200};
    rows.push_back(random_.Int(130, 199));
    rows.push_back(random_.Int(201, 700));
    for (const int64_t m : rows) {
      // Fewer slices than segments, segments of an odd number of slices, of an even one, some without slices, and of several
      // records.
      const int64_t ins[] = {values * random_.Int(1, 6), values * random_.Int(1, 3000 / values),
                             512 * random_.Int(1, 12), 2048 * random_.Int(1, 2),
                             values * 2 * random_.Int(1, 16)};
      const int64_t in = ins[random_.Int(0, 4)];
      const int64_t out_a = random_.Int(1, 200), out_b = random_.Int(1, 90);
      SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", m " << m << ", in " << in
                                      << ", out " << out_a << "+" << out_b);
      const BlockMatrix a(random_, out_a, in, type), b(random_, out_b, in, type);
      const std::vector<StoredMatrix> parts = {a.stored(), b.stored()};
      std::vector<uint16_t> wide = Widened(parts[0]);
      const std::vector<uint16_t> rest = Widened(parts[1]);
      wide.insert(wide.end(), rest.begin(), rest.end());
      Matrix x = Matrix::Normal(random_, m, in, 1.0f, AnyPadding());
      const Matrix y = Matrix::Normal(random_, m, out_a + out_b);
      std::vector<float> bias;
      if (random_.Int(0, 1) == 1) {
        for (int64_t i = 0; i < out_a + out_b; ++i) bias.push_back(random_.Normal());
      }
      const bool accumulate = random_.Int(0, 1) == 1;
      const auto stored = backend_->PackStored(parts, DType::kBF16);
      const auto plain =
          backend_->Pack({{{wide.data(), DType::kBF16, out_a + out_b, in}}}, DType::kBF16);
      ASSERT_NE(stored, nullptr);
      ASSERT_NE(plain, nullptr);
      EXPECT_EQ(stored->out_features(), out_a + out_b);
      EXPECT_EQ(stored->in_features(), in);
      EXPECT_EQ(stored->size_bytes(), BlockBytes(type, out_a + out_b, in));
      const Matrix actual = Product(x, y, *stored, bias, accumulate, 0, m);
      EXPECT_TRUE(actual.GuardsIntact());
      ASSERT_TRUE(SameBits(actual, Product(x, y, *plain, bias, accumulate, 0, m)));
    }
  }
}

// 4-bit floats lie as 8-bit ones, beside blocks of other types, too.
TEST_F(CudaMatmulBlocksTest, FourBitFloatsHaveTheBitsOfTheWidenedMatrix) {
  SCOPED_TRACE(Seed());
  for (const int64_t m : {1, 8, 20, 64, 128, 200, 600}) {
    const int64_t in = 32 * random_.Int(1, 90), out_a = random_.Int(1, 200),
                  out_b = random_.Int(1, 90);
    SCOPED_TRACE(testing::Message()
                 << "m " << m << ", in " << in << ", out " << out_a << "+" << out_b);
    const BlockMatrix a(random_, out_a, in, WeightType::kMxfp4),
        b(random_, out_b, in, m % 3 == 0 ? WeightType::kQ8_0 : WeightType::kMxfp4);
    const std::vector<StoredMatrix> parts = {a.stored(), b.stored()};
    std::vector<uint16_t> wide = Widened(parts[0]);
    const std::vector<uint16_t> rest = Widened(parts[1]);
    wide.insert(wide.end(), rest.begin(), rest.end());
    Matrix x = Matrix::Normal(random_, m, in, 1.0f, AnyPadding());
    const Matrix y = Matrix::Normal(random_, m, out_a + out_b);
    const auto stored = backend_->PackStored(parts, DType::kBF16);
    const auto plain =
        backend_->Pack({{{wide.data(), DType::kBF16, out_a + out_b, in}}}, DType::kBF16);
    ASSERT_NE(stored, nullptr);
    ASSERT_NE(plain, nullptr);
    ASSERT_TRUE(
        SameBits(Product(x, y, *stored, {}, true, 0, m), Product(x, y, *plain, {}, true, 0, m)));
  }
}

// Enough outputs for every block of the device to take several tiles, and more inner values than a ring holds.
TEST_F(CudaMatmulBlocksTest, ManyTilesAndLongRowsHaveTheSameBits) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kBlockTypes) {
    for (const int64_t in : {int64_t{2048}, int64_t{14336}}) {
      const int64_t out = in == 2048 ? random_.Int(9000, 10000) : random_.Int(600, 1200);
      SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", in " << in << ", out " << out);
      const BlockMatrix w(random_, out, in, type);
      const std::vector<uint16_t> wide = Widened(w.stored());
      const auto stored = backend_->PackStored({{w.stored()}}, DType::kBF16);
      const auto plain = backend_->Pack({{{wide.data(), DType::kBF16, out, in}}}, DType::kBF16);
      ASSERT_NE(stored, nullptr);
      ASSERT_NE(plain, nullptr);
      constexpr int64_t kRows = 430;
      Matrix x = Matrix::Normal(random_, kRows, in);
      const Matrix y(kRows, out);
      for (const int64_t m : {1, 2, 5, 8, 20, 32, 33, 64, 70, 128, 140, 176, 177, 352, 425}) {
        const int64_t first = random_.Int(0, kRows - m);
        const Matrix actual = Product(x, y, *stored, {}, false, first, m);
        ASSERT_TRUE(SameBits(actual, Product(x, y, *plain, {}, false, first, m))) << "m " << m;
      }
    }
  }
}

// The promise of backend.h: a row's bits do not depend on how many rows are in the call.
TEST_F(CudaMatmulBlocksTest, ARowHasTheSameBitsAmongAnyNumberOfRows) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kBlockTypes) {
    const int64_t in = 256 * random_.Int(1, 12), out = random_.Int(100, 400), m = 500;
    SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", in " << in);
    const BlockMatrix w(random_, out, in, type);
    const auto packed = backend_->PackStored({{w.stored()}}, DType::kBF16);
    ASSERT_NE(packed, nullptr);
    Matrix x = Matrix::Normal(random_, m, in, 1.0f, AnyPadding());
    const Matrix y = Matrix::Normal(random_, m, out);
    const Matrix whole = Product(x, y, *packed, {}, true, 0, m);
    for (const int64_t rows : {1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200, 353}) {
      const int64_t first = random_.Int(0, m - rows);
      const Matrix part = Product(x, y, *packed, {}, true, first, rows);
      for (int64_t i = first; i < first + rows; ++i) {
        ASSERT_TRUE(SameBits(part, i, whole, i)) << "of " << rows << " rows";
      }
    }
  }
}

TEST_F(CudaMatmulBlocksTest, PartsOfDifferentTypesAreEachTheirOwn) {
  SCOPED_TRACE(Seed());
  const int64_t in = 512;
  for (const int64_t m : {1, 5, 30, 50, 90, 190}) {
    const BlockMatrix q(random_, 70, in, WeightType::kQ4K), k(random_, 33, in, WeightType::kQ4K);
    const BlockMatrix v(random_, 17, in, WeightType::kQ6K), p(random_, 40, in, WeightType::kBF16);
    const std::vector<StoredMatrix> parts = {q.stored(), k.stored(), v.stored(), p.stored()};
    std::vector<uint16_t> wide;
    for (const StoredMatrix& part : parts) {
      const std::vector<uint16_t> rows = Widened(part);
      wide.insert(wide.end(), rows.begin(), rows.end());
    }
    const int64_t out = 160;
    const auto stored = backend_->PackStored(parts, DType::kBF16);
    const auto plain = backend_->Pack({{{wide.data(), DType::kBF16, out, in}}}, DType::kBF16);
    ASSERT_NE(stored, nullptr);
    ASSERT_EQ(stored->out_features(), out);
    Matrix x = Matrix::Normal(random_, m, in);
    const Matrix y = Matrix::Normal(random_, m, out);
    std::vector<float> bias;
    for (int64_t i = 0; i < out; ++i) bias.push_back(random_.Normal());
    const Matrix actual = Product(x, y, *stored, bias, true, 0, m);
    EXPECT_TRUE(actual.GuardsIntact());
    ASSERT_TRUE(SameBits(actual, Product(x, y, *plain, bias, true, 0, m))) << "m " << m;
  }
}

// The promise of backend.h for operations that are several in one.
TEST_F(CudaMatmulBlocksTest, NormedAndGatedOperandsAreThoseThatWereMadeBefore) {
  SCOPED_TRACE(Seed());
  for (const WeightType type :
       {WeightType::kQ8_0, WeightType::kQ4_1, WeightType::kL4x32, WeightType::kF8x128}) {
    for (const int64_t m : {1, 2, 3, 9, 33, 70, 210}) {
      const int64_t in = 128 * random_.Int(1, 20), out = random_.Int(1, 300);
      SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", m " << m << ", in " << in);
      const BlockMatrix w(random_, out, in, type);
      const auto packed = backend_->PackStored({{w.stored()}}, DType::kBF16);
      ASSERT_NE(packed, nullptr);
      Matrix x = Matrix::Normal(random_, m, in), weight = Matrix::Normal(random_, 1, in);
      Matrix gate_up = Matrix::Normal(random_, m, 2 * in, 3.0f), scratch(m, in);
      const Matrix y = Matrix::Normal(random_, m, out);
      const auto weights = Upload(weight);
      auto of_x = Put(x), of_gate_up = Put(gate_up), of_scratch = Put(scratch);
      for (const bool gated : {false, true}) {
        Matrix expected = y, actual = y;
        auto of_expected = Put(expected), of_actual = Put(actual);
        if (gated) {
          backend_->SiluMul(of_gate_up.tensor, of_scratch.tensor);
        } else {
          backend_->RmsNorm(of_x.tensor, weights.data(), 1e-5f, of_scratch.tensor);
        }
        backend_->Matmul(of_scratch.tensor, *packed, of_expected.tensor, {nullptr, true});
        if (gated) {
          backend_->SiluMatmul(of_gate_up.tensor, *packed, of_scratch.tensor, of_actual.tensor,
                               {nullptr, true});
        } else {
          backend_->NormMatmul({.x = of_x.tensor,
                                .weight = weights.data(),
                                .eps = 1e-5f,
                                .w = *packed,
                                .normed = of_scratch.tensor,
                                .y = of_actual.tensor,
                                .epilogue = {nullptr, true}});
        }
        of_expected.Fetch();
        of_actual.Fetch();
        ASSERT_TRUE(SameBits(actual, expected)) << (gated ? "gated" : "normed");
      }
    }
  }
}

// The kernels that gate: the bits of the product and of the gate that come one after the other, and nothing else written.
TEST_F(CudaMatmulBlocksTest, GatedBatchesHaveTheBitsOfTheirParts) {
  SCOPED_TRACE(Seed());
  const int64_t whole = LeastWholeWidth();
  for (const WeightType type : kBlockTypes) {
    for (const int64_t m : {int64_t{33}, int64_t{64}, int64_t{128}, random_.Int(34, 127)}) {
      ExpectGatedAsItsParts(type, m, 512 * random_.Int(1, 3), whole + 32 * random_.Int(0, 9));
    }
  }
}

// Tiles of either size, one and several a cluster, and the last of which is half there.
TEST_F(CudaMatmulBlocksTest, GatedManyRowsHaveTheBitsOfTheirParts) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kBlockTypes) {
    const int64_t width = 32 * random_.Int(1, 40), wide = 64 * random_.Int(145, 155);
    ExpectGatedAsItsParts(type, kMatmulBatchRows + 1, 1024 * random_.Int(1, 3), width);
    ExpectGatedAsItsParts(type, random_.Int(150, 384), 1024, width);
    ExpectGatedAsItsParts(type, random_.Int(130, 176), 1024, wide);
    ExpectGatedAsItsParts(type, random_.Int(354, 384), 1024, wide / 2);
    ExpectGatedAsItsParts(type, random_.Int(1000, 1024), 1024, width);
    ExpectGatedAsItsParts(type, random_.Int(1025, 1400), 1024, width);
  }
}

// A whole gated MLP of quantised weights, and of such beside plain ones: its parts to the bit.
TEST_F(CudaMatmulBlocksTest, AGatedMlpIsItsPartsForAnyNumberOfRows) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : {WeightType::kQ8_0, WeightType::kL4x32, WeightType::kBF16}) {
    for (const int64_t m : {1, 20, 50, 100, 129, 300}) {
      // A kernel gates 50 and 100 rows of so many outputs, where gates and ups are of one type.
      const bool wide = m == 50 || m == 100;
      const int64_t hidden = wide ? 512 : 128 * random_.Int(1, 4);
      const int64_t width = wide ? (LeastWholeWidth() + 127) / 128 * 128 : 128 * random_.Int(1, 4);
      SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", m " << m << ", hidden "
                                      << hidden << ", width " << width);
      const BlockMatrix gate(random_, width, hidden, type),
          up(random_, width, hidden, WeightType::kQ8_0), down(random_, hidden, width, type);
      ExpectGatedMlpIsItsParts(m, gate.stored(), up.stored(), down.stored());
    }
  }
}

// Widening alone: the tiles that plain weights of the same values are packed into, whatever scales are.
TEST_F(CudaMatmulBlocksTest, WidenedTilesAreThoseOfPlainWeights) {
  SCOPED_TRACE(Seed());
  for (const WeightType type : kBlockTypes) {
    const int64_t in = BlockSizeOf(type).values * random_.Int(1, 12), out = random_.Int(17, 200);
    SCOPED_TRACE(testing::Message() << WeightTypeName(type) << ", in " << in << ", out " << out);
    const BlockMatrix matrix(random_, out, in, type);
    const StoredMatrix stored = matrix.stored();
    DeviceArray<std::byte> packed(BlockBytes(type, out, in));
    const DeviceWeights blocks = PackOnDevice(stored, packed);

    // Outputs from a tile in the middle on.
    const int64_t first = random_.Int(0, (out - 1) / 16) * 16, count = out - first;
    const auto way = DeviceWeights::Way::kTensor;
    DeviceArray<std::byte> widened(PackedMatrixBytes(count, in, way, DType::kBF16));
    WINNOW_CUDA_OK(WidenBlocks(blocks, first, count, widened.data(), nullptr));

    const std::vector<uint16_t> values = Widened(stored);
    const DeviceArray<uint16_t> of_values(values);
    DeviceWeights plain{nullptr, count, in, way, DType::kBF16};
    DeviceArray<std::byte> expected(widened.size());
    expected.Zero();
    plain.data = expected.data();
    WINNOW_CUDA_OK(PackRows(of_values.data() + first * in, DType::kBF16, 0, count, plain, nullptr));
    const std::vector<std::byte> actual = widened.Get(), wanted = expected.Get();
    // A tile's rows past the last output are undefined.
    const int64_t slices = in / 32;
    int64_t wrong = 0;
    for (int64_t output = 0; output < count; ++output) {
      for (int64_t slice = 0; slice < slices; ++slice) {
        const int64_t at = (output / 16 * slices + slice) * 1024 + output % 16 * 64;
        wrong += std::memcmp(actual.data() + at, wanted.data() + at, 64) != 0 ? 1 : 0;
      }
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST_F(CudaMatmulBlocksTest, WhatHasNoKernelIsRefused) {
  DeviceWeights w;
  w.out = 64;
  w.in = 256;  // segments of one slice are half a panel
  w.way = DeviceWeights::Way::kBlocks;
  w.type = WeightType::kQ8_0;
  const DeviceArray<std::byte> packed(BlockBytes(w.type, w.out, w.in));
  w.data = packed.data();
  constexpr int64_t kRows = kMatmulBatchRows + 1;
  const DeviceArray<float> x(kRows * w.in), y(kRows * w.out);
  const DeviceArray<std::byte> workspace(MatmulWorkspaceBytes(kRows, w));
  MatmulArgs args{x.data(), w.in, kRows, y.data(), w.out};
  for (const int64_t m : {kRows, int64_t{kMatmulFewRows + 1}}) {
    args.m = m;
    EXPECT_EQ(cuda::Matmul(args, w, workspace.data(), nullptr), cudaErrorInvalidValue);
  }
  // More rows than are worth it.
  w.in = 1024;
  EXPECT_TRUE(StreamsBlocks(kRows, w));
  EXPECT_FALSE(StreamsBlocks(4096, w));
  w.type = WeightType::kL4x32;
  EXPECT_TRUE(StreamsBlocks(4096, w));
  w.type = WeightType::kQ8_0;
  w.in = 256;
  args.m = 1;
  args.portable = true;
  EXPECT_EQ(cuda::Matmul(args, w, workspace.data(), nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(WidenBlocks(w, 8, 16, workspace.data(), nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(WidenBlocks(w, 0, 65, workspace.data(), nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(PackBlocks(packed.data(), 60, 5, w, nullptr), cudaErrorInvalidValue);
  w.type = WeightType::kBF16;
  EXPECT_EQ(PackBlocks(packed.data(), 0, 1, w, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace winnow::kernels::cuda

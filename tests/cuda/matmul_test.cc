#include "kernels/matmul.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul.h"
#include "kernels/host_matrix.h"
#include "kernels/silu_mul.h"
#include "tests/cuda/backend_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaMatmulTest : public CudaBackendFixture {
 protected:
  struct Product {
    Matrix x, y;
    std::vector<FileMatrix> parts;
    std::vector<HostMatrix> hosts;
    std::vector<float> bias;
    bool accumulate = false;
  };
  Product Draw(int64_t m, int64_t in, const std::vector<int64_t>& outs, DType dtype) {
    int64_t out = 0;
    for (const int64_t of_part : outs) out += of_part;
    // The weights or x have the deviation that makes sums of size 1: f16 has no such small weights
    // (kernel_testing.h).
    const float deviation = 1.0f / std::sqrt(static_cast<float>(in));
    const bool f16 = dtype == DType::kF16;
    // Few rows that lie in pairs of values are read as they are.
    const int64_t padding = random_.Int(0, 1) == 0 ? 3 : 4;
    Product product{Matrix::Normal(random_, m, in, f16 ? deviation : 1.0f, padding),
                    Matrix::Normal(random_, m, out),
                    {},
                    {},
                    {}};
    for (const int64_t of_part : outs) {
      product.parts.emplace_back(random_, of_part, in, dtype, f16 ? 1.0f : deviation);
    }
    for (const FileMatrix& part : product.parts) product.hosts.push_back(part.host());
    if (random_.Int(0, 1) == 1) {
      for (int64_t i = 0; i < out; ++i) product.bias.push_back(random_.Normal());
    }
    product.accumulate = random_.Int(0, 1) == 1;
    return product;
  }
  Matrix Run(Product& product, const PackedMatrix& w, int64_t first_row, int64_t rows) {
    Matrix y = product.y;
    auto on_device = Put(y);
    auto x = Put(product.x);
    const DeviceArray<float> bias(product.bias);
    backend_->Matmul(x.tensor.RowRange(first_row, rows), w,
                     on_device.tensor.RowRange(first_row, rows),
                     {product.bias.empty() ? nullptr : bias.data(), product.accumulate});
    on_device.Fetch();
    return y;
  }
};

TEST_F(CudaMatmulTest, TensorCoresEqualTheReference) {
  SCOPED_TRACE(Seed());
  for (const int64_t m : {1, 3, 8, 9, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300}) {
    for (int round = 0; round < 3; ++round) {
      const int64_t in = round == 0 ? random_.Int(1, 70) : random_.Int(71, 1500);
      const std::vector<int64_t> outs = {random_.Int(1, 200), random_.Int(1, 100)};
      const DType dtype = round == 1 ? DType::kF32 : round == 2 ? DType::kF16 : DType::kBF16;
      SCOPED_TRACE(testing::Message()
                   << "m " << m << " in " << in << " out " << outs[0] << "+" << outs[1]);
      Product product = Draw(m, in, outs, dtype);
      const auto w = backend_->Pack(product.hosts, DType::kBF16);
      ASSERT_NE(w, nullptr);
      const Matrix actual = Run(product, *w, 0, m);
      Matrix expected = product.y;
      MatmulRef(product.x.tensor(), product.hosts, DType::kBF16, expected.tensor(),
                {product.bias.empty() ? nullptr : product.bias.data(), product.accumulate});
      ExpectNear(actual, expected, 3e-5, 1e-5);
    }
  }
}

TEST_F(CudaMatmulTest, ExactProductsAreTheChainThatMatmulPromises) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t m : {1, 2, 4, 5, 17, 40}) {
      const int64_t in = random_.Int(1, 900), out = random_.Int(1, 300);
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " m " << m << " in " << in);
      Product product = Draw(m, in, {out}, dtype);
      const auto w =
          backend_->Pack(product.hosts, dtype == DType::kF16 ? DType::kF16 : DType::kF32);
      ASSERT_NE(w, nullptr);
      const Matrix actual = Run(product, *w, 0, m);
      Matrix expected = product.y;
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t o = 0; o < out; ++o) {
          float sum = 0;
          for (int64_t k = 0; k < in; ++k) {
            sum = std::fma(product.x.row(i)[k], ElementOf(product.hosts[0], o, k), sum);
          }
          if (!product.bias.empty()) sum += product.bias[o];
          expected.row(i)[o] = product.accumulate ? sum + expected.row(i)[o] : sum;
        }
      }
      ASSERT_TRUE(SameBits(actual, expected));
      EXPECT_TRUE(actual.GuardsIntact());
    }
  }
}

TEST_F(CudaMatmulTest, MixedPartsAreWidenedExactly) {
  SCOPED_TRACE(Seed());
  const int64_t m = 5, in = 100;
  Matrix x = Matrix::Normal(random_, m, in);
  const FileMatrix first(random_, 33, in, DType::kBF16), second(random_, 20, in, DType::kF32);
  const std::vector<HostMatrix> parts = {first.host(), second.host()};
  const auto w = backend_->Pack(parts, DType::kF32);
  ASSERT_NE(w, nullptr);
  Matrix y(m, 53), expected(m, 53);
  auto on_device = Put(y);
  auto of_x = Put(x);
  backend_->Matmul(of_x.tensor, *w, on_device.tensor, {});
  on_device.Fetch();
  MatmulRef(x.tensor(), parts, DType::kF32, expected.tensor(), {});
  ExpectNear(y, expected, 1e-5, 1e-5);
}

// The promise of backend.h: a row's bits do not depend on how many rows are in the call.
TEST_F(CudaMatmulTest, ARowHasTheSameBitsAmongAnyNumberOfRows) {
  SCOPED_TRACE(Seed());
  for (const bool exact : {false, true}) {
    // Segments of several slices, of one, of unequal length, and fewer than there are.
    for (const int64_t in : {int64_t{64}, int64_t{256}, random_.Int(260, 500), int64_t{2048},
                             random_.Int(1000, 4000)}) {
      const int64_t m = 700;
      SCOPED_TRACE(testing::Message() << "in " << in << (exact ? " exact" : ""));
      // Once with more outputs than blocks that stay on the device can have one tile each of.
      const int64_t out = in == 256 ? random_.Int(9000, 10000) : random_.Int(100, 400);
      Product product = Draw(m, in, {out}, DType::kBF16);
      const auto w = backend_->Pack(product.hosts, exact ? DType::kF32 : DType::kBF16);
      ASSERT_NE(w, nullptr);
      const Matrix whole = Run(product, *w, 0, m);
      for (const int64_t rows :
           {1, 2, 7, 8, 9, 16, 17, 32, 33, 60, 64, 65, 100, 128, 129, 200, 257, 513}) {
        const int64_t first = random_.Int(0, m - rows);
        const Matrix part = Run(product, *w, first, rows);
        for (int64_t i = first; i < first + rows; ++i) {
          ASSERT_TRUE(SameBits(part, i, whole, i)) << "of " << rows << " rows";
        }
      }
    }
  }
}

// Where the device has kernels of its own for few and for many rows, they give the bits of those that any
// device has: on values of like size, on such of any size, whose sums lose most of what is added, and on sums
// of which nearly nothing is left.
TEST_F(CudaMatmulTest, TheDevicesOwnKernelsGiveTheBitsOfThoseThatAnyHas) {
  SCOPED_TRACE(Seed());
  int multiprocessors = 0;
  WINNOW_CUDA_OK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  // From round `kLarge` on so many outputs that tiles of 176 rows and of 192 leave the fewest multiprocessors idle.
  constexpr int kRounds = 30, kLarge = 24;
  for (int round = 0; round < kRounds; ++round) {
    const int kind = round % 3;  // of values
    int64_t m = round < 3 ? random_.Int(1, 64) : random_.Int(65, 900);
    int64_t in = round < 12 ? 64 * random_.Int(1, 80) : random_.Int(1, 3000);
    int64_t out = random_.Int(1, round % 2 == 0 ? 300 : 3000);
    if (round >= kLarge) {
      m = round % 2 == 0 ? random_.Int(1000, 1056) : random_.Int(1060, 1152);
      in = 512 * random_.Int(1, 2);
      out = multiprocessors / 2 * 128 - random_.Int(0, 100);
    }
    SCOPED_TRACE(testing::Message() << "m " << m << " in " << in << " out " << out);
    Matrix x = Matrix::Normal(random_, m, in), of_w = Matrix::Normal(random_, out, in);
    Matrix y = Matrix::Normal(random_, m, out);
    const auto scale = [&](Matrix& matrix, bool negates) {
      for (int64_t i = 0; i < matrix.rows(); ++i) {
        for (int64_t k = 0; k < in; ++k) {
          float& value = matrix.row(i)[k];
          if (kind == 1) value = std::ldexp(value, static_cast<int>(random_.Int(-40, 40)));
          if (kind == 2 && k % 2 == 1) {
            value = (negates ? -1.0f : 1.0f) * matrix.row(i)[k - 1];
            if (random_.Int(0, 50) == 0) value = -0.0f;
          }
        }
      }
    };
    scale(x, false);
    scale(of_w, true);
    DeviceWeights w{nullptr, out, in, DeviceWeights::Way::kTensor, DType::kBF16};
    DeviceArray<std::byte> packed(PackedMatrixBytes(out, in, w.way, w.storage));
    packed.Zero();
    w.data = packed.data();
    std::vector<float> source;
    for (int64_t o = 0; o < out; ++o) {
      source.insert(source.end(), of_w.row(o), of_w.row(o) + in);
    }
    const DeviceArray<float> of_source(source);
    WINNOW_CUDA_OK(PackRows(of_source.data(), DType::kF32, 0, out, w, nullptr));
    const bool accumulate = random_.Int(0, 1) == 1;
    const auto on_device = Upload(x);
    const auto run = [&](int64_t first, int64_t rows, bool portable) {
      Matrix result = y;
      const DeviceArray<float> of_y = Upload(result);
      const DeviceArray<std::byte> workspace(MatmulWorkspaceBytes(rows, w));
      const int64_t stride = x.tensor().stride, y_stride = y.tensor().stride;
      WINNOW_CUDA_OK(
          cuda::Matmul({on_device.data() + first * stride, stride, rows,
                        of_y.data() + first * y_stride, y_stride, nullptr, accumulate, portable},
                       w, workspace.data(), nullptr));
      Download(of_y, result);
      return result;
    };
    const Matrix own = run(0, m, false);
    EXPECT_TRUE(own.GuardsIntact());
    ASSERT_TRUE(SameBits(own, run(0, m, true)));
    for (const bool portable : {false, true}) {
      for (const int64_t rows : {1, 3, 20}) {
        const int64_t count = std::min(rows, m), first = random_.Int(0, m - count);
        const Matrix part = run(first, count, portable);
        for (int64_t i = first; i < first + count; ++i) {
          ASSERT_TRUE(SameBits(part, i, own, i)) << "row " << i << " of " << count;
        }
      }
    }
  }
}

// The kernels of a batch's rows, at the borders between ways: the bits of the kernels that any device has, and of
// each row alone. Outputs are few enough for a cluster's blocks to share a tile, and too many for that.
TEST_F(CudaMatmulTest, ABatchHasTheBitsOfAnyDevicesKernelAndOfEachRowAlone) {
  SCOPED_TRACE(Seed());
  struct Size {
    int64_t in, out;
  };
  for (const int64_t m : {33, 40, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257}) {
    // Segments of one slice, and some without any; of an odd number; of an even one; of unequal length; of more stages
    // than there are at once.
    for (const Size size : {Size{32 * random_.Int(1, 7), random_.Int(1, 70)},
                            {256 * (2 * random_.Int(0, 2) + 1), 16 * random_.Int(1, 40)},
                            {512 * random_.Int(1, 4), random_.Int(100, 900)},
                            {random_.Int(300, 1500), random_.Int(1, 300)},
                            {4096 + 512 * random_.Int(0, 2), 64 * random_.Int(1, 4)},
                            {random_.Int(64, 600), random_.Int(8700, 9000)}}) {
      SCOPED_TRACE(testing::Message() << "m " << m << " in " << size.in << " out " << size.out);
      const float deviation = 1.0f / std::sqrt(static_cast<float>(size.in));
      Matrix x = Matrix::Normal(random_, m, size.in, 1.0f, random_.Int(0, 5));
      Matrix y = Matrix::Normal(random_, m, size.out, 1.0f, random_.Int(0, 5));
      DeviceWeights w{nullptr, size.out, size.in, DeviceWeights::Way::kTensor, DType::kBF16};
      DeviceArray<std::byte> packed(PackedMatrixBytes(size.out, size.in, w.way, w.storage));
      packed.Zero();
      w.data = packed.data();
      std::vector<float> source(size.out * size.in);
      for (float& value : source) value = random_.Normal(deviation);
      const DeviceArray<float> of_source(source);
      WINNOW_CUDA_OK(PackRows(of_source.data(), DType::kF32, 0, size.out, w, nullptr));
      const bool accumulate = random_.Int(0, 1) == 1;
      std::vector<float> bias;
      if (random_.Int(0, 1) == 1) {
        for (int64_t o = 0; o < size.out; ++o) bias.push_back(random_.Normal());
      }
      const DeviceArray<float> of_bias(bias);
      const auto on_device = Upload(x);
      const auto run = [&](int64_t rows_at_once, bool portable) {
        Matrix result = y;
        const DeviceArray<float> of_y = Upload(result);
        const DeviceArray<std::byte> workspace(MatmulWorkspaceBytes(rows_at_once, w));
        const int64_t stride = x.tensor().stride, y_stride = y.tensor().stride;
        for (int64_t i = 0; i < m; i += rows_at_once) {
          WINNOW_CUDA_OK(cuda::Matmul(
              {on_device.data() + i * stride, stride, rows_at_once, of_y.data() + i * y_stride,
               y_stride, bias.empty() ? nullptr : of_bias.data(), accumulate, portable},
              w, workspace.data(), nullptr));
        }
        Download(of_y, result);
        return result;
      };
      const Matrix own = run(m, false);
      EXPECT_TRUE(own.GuardsIntact());
      ASSERT_TRUE(SameBits(own, run(m, true)));
      ASSERT_TRUE(SameBits(own, run(1, false)));
    }
  }
}

// A value of a product's operand that lies in panels (matmul.h).
float InPanels(const std::vector<std::byte>& panels, int64_t columns, int64_t row, int64_t column) {
  const int64_t panel = row / 64 * ((columns + 63) / 64) + column / 64;
  const int64_t piece = (column % 64 / 8) ^ (row % 8);
  BF16 value;
  std::memcpy(&value, &panels[panel * 8192 + row % 64 * 128 + piece * 16 + column % 8 * 2], 2);
  return ToFloat(value);
}

// The kernels that gate: the reference's values rounded, the bits of the product and of the gate that come one after the other,
// and nothing else written.
TEST_F(CudaMatmulTest, GatedProductsHaveTheBitsOfTheirPartsAndTheReferencesValues) {
  SCOPED_TRACE(Seed());
  int multiprocessors = 0;
  WINNOW_CUDA_OK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  struct Size {
    int64_t m, in, width;
  };
  const int64_t all = multiprocessors / 2 * 64;
  std::vector<Size> sizes = {
      {129, 1, 32},    // half of a warpgroup's outputs, one inner value
      {192, 256, 64},  // segments of one slice
      {random_.Int(129, 400), 32 * random_.Int(1, 7),
       32 * random_.Int(1, 9)},                                  // and some without any
      {random_.Int(129, 400), 256 * 3, 32 * random_.Int(1, 9)},  // of an odd number of slices
      {random_.Int(129, 400), random_.Int(300, 1500), 32 * random_.Int(1, 9)},
      {random_.Int(129, 600), 512 * random_.Int(1, 4), 32 * random_.Int(1, 20)},
      // Tiles of 176 rows, of 192, and more of them than run at once.
      {random_.Int(1000, 1056), 512, all - 32 * random_.Int(0, 1)},
      {random_.Int(1060, 1152), 512, all - 32 * random_.Int(0, 1)},
      {random_.Int(1500, 2100), 512, all + 32 * random_.Int(1, 9)},
      // A batch's: the least tiles that are not split, and more, of segments as above.
      {64, 256, all + 32},
      {128, 256, all / 2 + 32},
      {random_.Int(33, 64), 32 * random_.Int(1, 7), all + 32 * random_.Int(1, 70)},
      {random_.Int(33, 64), 256 * 3, all + 32 * random_.Int(1, 9)},
      {random_.Int(33, 64), random_.Int(300, 1500), all + 32 * random_.Int(1, 9)},
      {random_.Int(65, 128), 256 * 3, all / 2 + 32 * random_.Int(1, 9)},
      {random_.Int(65, 128), 512, all / 2 + 32 * random_.Int(1, 140)},
  };
  for (size_t round = 0; round < 2 * sizes.size(); ++round) {
    const Size size = sizes[round % sizes.size()];
    // Gates of like size, and such as saturate; those have no reference within a bound.
    const bool wild = round >= sizes.size();
    SCOPED_TRACE(testing::Message() << "m " << size.m << " in " << size.in << " width "
                                    << size.width << (wild ? " wild" : ""));
    const int64_t out = 2 * size.width;
    const float deviation = (wild ? 40.0f : 1.0f) / std::sqrt(static_cast<float>(size.in));
    Matrix x = Matrix::Normal(random_, size.m, size.in, 1.0f, random_.Int(0, 5));
    std::vector<float> source(out * size.in), bias;
    for (float& value : source) value = random_.Normal(deviation);
    if (random_.Int(0, 1) == 1) {
      for (int64_t o = 0; o < out; ++o) bias.push_back(random_.Normal());
    }
    DeviceWeights w{nullptr, out, size.in, DeviceWeights::Way::kTensor, DType::kBF16};
    if (!IsHopper()) {
      // No kernel there: the product is refused, and the backend computes the parts.
      ASSERT_FALSE(GatesProducts(size.m, w));
      MatmulArgs args;
      args.m = size.m;
      ASSERT_EQ(MatmulGated(args, w, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
      continue;
    }
    ASSERT_TRUE(GatesProducts(size.m, w));
    ASSERT_FALSE(GatesProducts(kMatmulFewRows, w));
    DeviceArray<std::byte> packed(PackedMatrixBytes(out, size.in, w.way, w.storage));
    packed.Zero();
    w.data = packed.data();
    const DeviceArray<float> of_source(source), of_bias(bias);
    WINNOW_CUDA_OK(PackRows(of_source.data(), DType::kF32, 0, out, w, nullptr));
    const auto on_device = Upload(x);
    const DeviceArray<std::byte> ordered(OrderedBytes(size.m, size.in));
    WINNOW_CUDA_OK(
        OrderRows(on_device.data(), x.tensor().stride, size.m, size.in, ordered.data(), nullptr));
    const DeviceArray<float> gate_up(size.m * out);
    MatmulArgs args;
    args.m = size.m;
    args.y = gate_up.data();
    args.y_stride = out;
    args.bias = bias.empty() ? nullptr : of_bias.data();
    // Poisoned: rows past the last one, a panel's half that no slice has, and what lies behind stay as they are.
    constexpr size_t kBehind = 4096;
    const size_t bytes = OrderedBytes(size.m, size.width);
    const DeviceArray<std::byte> parts(bytes + kBehind), gated(bytes + kBehind);
    WINNOW_CUDA_OK(MatmulOrdered(args, w, ordered.data(), nullptr));
    WINNOW_CUDA_OK(SiluMulOrdered({gate_up.data(), size.m, out, out}, parts.data(), nullptr));
    args.y = nullptr;
    WINNOW_CUDA_OK(MatmulGated(args, w, ordered.data(), gated.data(), nullptr));
    const std::vector<std::byte> actual = gated.Get();
    ASSERT_TRUE(actual == parts.Get());
    if (wild || size.m * out * size.in > 100'000'000) continue;  // the reference takes its time
    Matrix sums(size.m, out), expected(size.m, size.width);
    const std::vector<HostMatrix> hosts = {{source.data(), DType::kF32, out, size.in}};
    MatmulRef(x.tensor(), hosts, DType::kBF16, sums.tensor(),
              {bias.empty() ? nullptr : bias.data(), false});
    SiluMulRef(sums.tensor(), expected.tensor());
    for (int64_t i = 0; i < size.m; ++i) {
      for (int64_t j = 0; j < size.width; ++j) {
        const double value = expected.row(i)[j];
        // Half of the last of bfloat16's eight bits, and what the sum may be off.
        ASSERT_NEAR(InPanels(actual, size.width, i, j), value, 1e-3 + std::abs(value) / 256)
            << "row " << i << " column " << j;
      }
    }
  }
}

TEST_F(CudaMatmulTest, GatedProductsThatNoKernelHasAreRefused) {
  for (const auto way : {DeviceWeights::Way::kExact, DeviceWeights::Way::kBlocks}) {
    DeviceWeights w{nullptr, 128, 256, way, DType::kBF16, WeightType::kQ8_0};
    EXPECT_FALSE(GatesProducts(500, w));
  }
  DeviceWeights w{nullptr, 128, 256, DeviceWeights::Way::kTensor, DType::kBF16};
  MatmulArgs args;
  args.m = 500;
  args.accumulate = true;
  EXPECT_EQ(MatmulGated(args, w, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  args.accumulate = false;
  args.portable = true;
  EXPECT_EQ(MatmulGated(args, w, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  args.portable = false;
  for (const int64_t out : {32, 96, 128 + 16}) {  // 16, 48 and 72 gates
    w.out = out;
    EXPECT_EQ(MatmulGated(args, w, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
  }
  w.out = 128;
  args.m = kMatmulBatchRows;  // tiles of so few outputs are split
  EXPECT_EQ(MatmulGated(args, w, nullptr, nullptr, nullptr), cudaErrorInvalidValue);
}

// The promise of model_ops.h, for the rows of decoding, of a batch and of a prompt, and each of them alone: widths that the kernel
// which gates has and such as it does not have, scratch whose rows follow each other and scratch with gaps.
TEST_F(CudaMatmulTest, AGatedMlpIsItsPartsForAnyNumberOfRows) {
  SCOPED_TRACE(Seed());
  for (const DType compute : {DType::kBF16, DType::kF32}) {
    for (int round = 0; round < 4; ++round) {
      const int64_t m = random_.Int(200, 500), hidden = random_.Int(1, 600);
      const int64_t width = round == 1 ? random_.Int(1, 400) : 32 * random_.Int(1, 12);
      const int64_t gap = round == 2 ? 4 : 0;
      SCOPED_TRACE(testing::Message() << "m " << m << " hidden " << hidden << " width " << width
                                      << DTypeName(compute));
      Product gate_up = Draw(m, hidden, {width, width}, DType::kBF16);
      Product down = Draw(m, width, {hidden}, DType::kBF16);
      const auto of_gate_up = backend_->Pack(gate_up.hosts, compute);
      const auto of_down = backend_->Pack(down.hosts, compute);
      ASSERT_NE(of_gate_up, nullptr);
      ASSERT_NE(of_down, nullptr);
      const DeviceArray<float> gate_up_bias(gate_up.bias), down_bias(down.bias);
      const float* const biases[2] = {gate_up.bias.empty() ? nullptr : gate_up_bias.data(),
                                      down.bias.empty() ? nullptr : down_bias.data()};
      Matrix norm = Matrix::Normal(random_, 1, hidden);
      const auto norm_weight = Upload(norm);
      Matrix normed(m, hidden), activated(m, width), gate_rows(m, 2 * width, gap);
      auto scratch = Put(normed), of_activated = Put(activated), of_gate_rows = Put(gate_rows);

      Matrix expected = gate_up.x;
      auto of_expected = Put(expected);
      backend_->RmsNorm(of_expected.tensor, norm_weight.data(), 1e-5f, scratch.tensor);
      backend_->Matmul(scratch.tensor, *of_gate_up, of_gate_rows.tensor, {.bias = biases[0]});
      backend_->SiluMul(of_gate_rows.tensor, of_activated.tensor);
      backend_->Matmul(of_activated.tensor, *of_down, of_expected.tensor,
                       {.bias = biases[1], .accumulate = true});
      of_expected.Fetch();
      for (const int64_t rows : {m, int64_t{1}, int64_t{9}, int64_t{40}, int64_t{100}, int64_t{128},
                                 int64_t{129}, int64_t{199}}) {
        const int64_t first = random_.Int(0, m - rows);
        Matrix actual = gate_up.x;
        auto of_actual = Put(actual);
        ASSERT_TRUE(backend_->Synchronize());
        of_gate_rows.values.Poison();
        backend_->GatedMlp({.hidden = of_actual.tensor.RowRange(first, rows),
                            .norm_weight = norm_weight.data(),
                            .eps = 1e-5f,
                            .gate_up = *of_gate_up,
                            .gate_up_bias = biases[0],
                            .down = *of_down,
                            .down_bias = biases[1],
                            .normed = scratch.tensor.RowRange(first, rows),
                            .gate_rows = of_gate_rows.tensor.RowRange(first, rows),
                            .activated = of_activated.tensor.RowRange(first, rows)});
        of_actual.Fetch();
        EXPECT_TRUE(actual.GuardsIntact());
        for (int64_t i = 0; i < m; ++i) {
          const bool computed = i >= first && i < first + rows;
          ASSERT_TRUE(SameBits(actual, i, computed ? expected : gate_up.x, i))
              << "of " << rows << " rows from " << first;
        }
        // Scratch outside its rows, and the gaps between them.
        const std::vector<float> left = of_gate_rows.values.Get();
        const int64_t stride = 2 * width + gap;
        for (size_t i = 0; i < left.size(); ++i) {
          const auto row = static_cast<int64_t>(i) / stride;
          if (row >= first && row < first + rows && static_cast<int64_t>(i) % stride < 2 * width) {
            continue;
          }
          ASSERT_EQ(std::bit_cast<uint32_t>(left[i]), 0xffffffffu) << "scratch " << i;
        }
      }
    }
  }
}

// What backend.h says of operations that are several in one.
TEST_F(CudaMatmulTest, NormedAndGatedOperandsAreThoseThatWereMadeBefore) {
  SCOPED_TRACE(Seed());
  for (const DType compute : {DType::kBF16, DType::kF32}) {
    for (const int64_t m : {1, 2, 3, 8, 9, 33, 70, 200}) {
      const int64_t in = random_.Int(0, 1) == 0 ? 32 * random_.Int(1, 60) : random_.Int(1, 6000);
      SCOPED_TRACE(testing::Message() << "m " << m << " in " << in << DTypeName(compute));
      Product product = Draw(m, in, {random_.Int(1, 300)}, DType::kBF16);
      const auto w = backend_->Pack(product.hosts, compute);
      ASSERT_NE(w, nullptr);
      const DeviceArray<float> bias(product.bias);
      const MatmulEpilogue epilogue{product.bias.empty() ? nullptr : bias.data(),
                                    product.accumulate};
      Matrix weight = Matrix::Normal(random_, 1, in), scratch(m, in);
      Matrix gate_up = Matrix::Normal(random_, m, 2 * in, 3.0f);
      const auto weights = Upload(weight);
      auto x = Put(product.x), of_gate_up = Put(gate_up), of_scratch = Put(scratch);
      for (const bool gated : {false, true}) {
        Matrix expected = product.y, actual = product.y;
        auto of_expected = Put(expected), of_actual = Put(actual);
        if (gated) {
          backend_->SiluMul(of_gate_up.tensor, of_scratch.tensor);
          backend_->Matmul(of_scratch.tensor, *w, of_expected.tensor, epilogue);
          backend_->SiluMatmul(of_gate_up.tensor, *w, of_scratch.tensor, of_actual.tensor,
                               epilogue);
        } else {
          backend_->RmsNorm(x.tensor, weights.data(), 1e-5f, of_scratch.tensor);
          backend_->Matmul(of_scratch.tensor, *w, of_expected.tensor, epilogue);
          backend_->NormMatmul({.x = x.tensor,
                                .weight = weights.data(),
                                .eps = 1e-5f,
                                .w = *w,
                                .normed = of_scratch.tensor,
                                .y = of_actual.tensor,
                                .epilogue = epilogue});
        }
        of_expected.Fetch();
        of_actual.Fetch();
        ASSERT_TRUE(SameBits(actual, expected)) << (gated ? "gated" : "normed");
        EXPECT_TRUE(actual.GuardsIntact());
      }
    }
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda

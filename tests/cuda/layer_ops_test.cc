#include "kernels/cuda/layer_ops.h"

#include <array>

#include "kernels/embed_rows.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/silu_mul.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {
namespace {

class CudaLayerOpsTest : public CudaTest {
 protected:
  static DeviceMatrix View(const DeviceArray<float>& memory, Matrix& shape) {
    const Tensor tensor = shape.tensor();
    return {memory.data(), tensor.rows, tensor.cols, tensor.stride};
  }
  int64_t AnyRows() { return random_.Int(0, 2) == 0 ? 1 : random_.Int(2, 70); }
};

TEST_F(CudaLayerOpsTest, RmsNormEqualsTheReferenceAndARowAloneHasTheSameBits) {
  SCOPED_TRACE(Seed());
  for (const int64_t cols : {64, 80, 100, 2048, 4096}) {
    Matrix x = Matrix::Normal(random_, AnyRows(), cols, 3.0f), expected(x.rows(), cols);
    Matrix weight = Matrix::Normal(random_, 1, cols), out(x.rows(), cols), alone(1, cols);
    RmsNormRef(x.tensor(), weight.row(0), 1e-5f, expected.tensor());
    const auto on_device = Upload(x), weights = Upload(weight), result = Upload(out);
    WINNOW_CUDA_OK(RmsNorm(View(on_device, x), weights.data(), 1e-5f, View(result, out), nullptr));
    Download(result, out);
    ExpectNear(out, expected, 1e-6, 2e-6);
    const auto one = Upload(alone);
    const int64_t row = random_.Int(0, x.rows() - 1);
    const DeviceMatrix from{on_device.data() + row * x.tensor().stride, 1, cols, 0};
    WINNOW_CUDA_OK(RmsNorm(from, weights.data(), 1e-5f, View(one, alone), nullptr));
    Download(one, alone);
    EXPECT_TRUE(SameBits(alone, 0, out, row));
  }
}

TEST_F(CudaLayerOpsTest, ANormIsAddedToWhatIsThere) {
  SCOPED_TRACE(Seed());
  for (const int64_t cols : {int64_t{64}, random_.Int(65, 5000), int64_t{8192}}) {
    Matrix x = Matrix::Normal(random_, AnyRows(), cols, 3.0f),
           weight = Matrix::Normal(random_, 1, cols);
    Matrix sum = Matrix::Normal(random_, x.rows(), cols), normed(x.rows(), cols), expected = sum;
    const auto on_device = Upload(x), weights = Upload(weight), of_sum = Upload(sum),
               of_normed = Upload(normed);
    WINNOW_CUDA_OK(
        RmsNorm(View(on_device, x), weights.data(), 1e-5f, View(of_normed, normed), nullptr));
    Download(of_normed, normed);
    Matrix apart = sum;
    for (int64_t i = 0; i < x.rows(); ++i) {
      for (int64_t j = 0; j < cols; ++j) apart.row(i)[j] += normed.row(i)[j];
    }
    WINNOW_CUDA_OK(
        AddRmsNorm(View(on_device, x), weights.data(), 1e-5f, View(of_sum, sum), nullptr));
    Download(of_sum, sum);
    AddRmsNormRef(x.tensor(), weight.row(0), 1e-5f, expected.tensor());
    ExpectNear(sum, expected, 1e-6, 3e-6);
    EXPECT_TRUE(SameBits(sum, apart));
  }
}

TEST_F(CudaLayerOpsTest, HeadsNormedAsOneAreARow) {
  SCOPED_TRACE(Seed());
  Matrix x = Matrix::Normal(random_, AnyRows(), 5120), weight = Matrix::Normal(random_, 1, 5120);
  const auto on_device = Upload(x), weights = Upload(weight);
  WINNOW_CUDA_OK(RmsNormHeads(View(on_device, x), 5120, weights.data(), 1e-6f, nullptr));
  Matrix out = x;
  Download(on_device, out);
  RmsNormRef(x.tensor(), weight.row(0), 1e-6f, x.tensor());
  ExpectNear(out, x, 1e-6, 2e-6);
}

TEST_F(CudaLayerOpsTest, HeadsAreNormedInPlace) {
  SCOPED_TRACE(Seed());
  const int32_t d = AnyHeadDim(random_);
  Matrix x = Matrix::Normal(random_, AnyRows(), 5 * d), weight = Matrix::Normal(random_, 1, d);
  const auto on_device = Upload(x), weights = Upload(weight);
  WINNOW_CUDA_OK(RmsNormHeads(View(on_device, x), d, weights.data(), 1e-6f, nullptr));
  Matrix out = x;
  Download(on_device, out);
  RmsNormHeadsRef(x.tensor(), d, weight.row(0), 1e-6f);
  ExpectNear(out, x, 1e-6, 2e-6);
}

TEST_F(CudaLayerOpsTest, RopeEqualsTheReference) {
  SCOPED_TRACE(Seed());
  for (const int32_t d : kCudaHeadDims) {
    Matrix x = Matrix::Normal(random_, AnyRows(), 3 * d), table(x.rows(), d);
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < x.rows(); ++i) {
      positions.push_back(static_cast<int32_t>(random_.Int(0, 1 << 20)));
    }
    // Rows of queries have factors, rows of keys do not.
    std::vector<float> factors;
    for (int64_t i = 0; i < x.rows() && d != 64; ++i) {
      factors.push_back(0.5f + 0.0015f * static_cast<float>(random_.Int(0, 1000)));
    }
    std::vector<float> inv_freq;
    for (int32_t j = 0; j < d / 2; ++j) {
      inv_freq.push_back(
          std::pow(500000.0f, -2.0f * static_cast<float>(j) / static_cast<float>(d)));
    }
    inv_freq[d / 4] = inv_freq[d / 2 - 1] = 0;  // pairs that do not turn
    const DeviceArray<int32_t> positions_on_device(positions);
    const DeviceArray<float> inv_freq_on_device(inv_freq), factors_on_device(factors);
    const auto on_device = Upload(x), table_on_device = Upload(table);
    WINNOW_CUDA_OK(RopeTable(positions_on_device.data(), inv_freq_on_device.data(), d / 2, 1.25f,
                             factors.empty() ? nullptr : factors_on_device.data(),
                             View(table_on_device, table), nullptr));
    WINNOW_CUDA_OK(Rope(View(on_device, x), d, View(table_on_device, table), nullptr));
    Matrix expected_table(x.rows(), d), out = x;
    for (int64_t i = 0; i < x.rows(); ++i) {
      RopeTableRow(positions[i], inv_freq, 1.25f, factors.empty() ? 1.0f : factors[i],
                   expected_table.row(i));
    }
    Download(table_on_device, table);
    // A unit in the last place, times 1.25, and by a factor of up to 2.
    const double unit = factors.empty() ? 1.5e-7 : 3e-7;
    ExpectNear(table, expected_table, unit, unit);
    Download(on_device, out);
    RopeRef(x.tensor(), d, expected_table.tensor());
    ExpectNear(out, x, 2e-6, 1e-6);
  }
}

TEST_F(CudaLayerOpsTest, SiluMulEqualsTheReference) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {1, 80, 1000, 14336}) {
    Matrix gate_up = Matrix::Normal(random_, AnyRows(), 2 * n, 5.0f);
    gate_up.row(0)[0] = -200.0f;
    Matrix out(gate_up.rows(), n), expected(gate_up.rows(), n);
    const auto on_device = Upload(gate_up), result = Upload(out);
    WINNOW_CUDA_OK(SiluMul(View(on_device, gate_up), View(result, out), nullptr));
    Download(result, out);
    SiluMulRef(gate_up.tensor(), expected.tensor());
    ExpectNear(out, expected, 1e-6, 2e-6);
  }
}

TEST_F(CudaLayerOpsTest, GeluMulEqualsTheReference) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {1, 80, 1000, 14336}) {
    Matrix gate_up = Matrix::Normal(random_, AnyRows(), 2 * n, 3.0f);
    gate_up.row(0)[0] = -200.0f;
    Matrix out(gate_up.rows(), n), expected(gate_up.rows(), n);
    const auto on_device = Upload(gate_up), result = Upload(out);
    WINNOW_CUDA_OK(GeluTanhMul(View(on_device, gate_up), View(result, out), nullptr));
    Download(result, out);
    GeluTanhMulRef(gate_up.tensor(), expected.tensor());
    ExpectNear(out, expected, 1e-6, 4e-6);
  }
}

TEST_F(CudaLayerOpsTest, ClampedSwigluMulEqualsTheReference) {
  SCOPED_TRACE(Seed());
  for (const int64_t n : {1, 80, 1000, 2880}) {
    const ClampedSwiglu by = {1.702f, static_cast<float>(random_.Int(1, 9))};
    Matrix gate_up = Matrix::Normal(random_, AnyRows(), 2 * n, 6.0f);
    gate_up.row(0)[0] = -200.0f;
    gate_up.row(gate_up.rows() - 1)[n] = 300.0f;
    Matrix out(gate_up.rows(), n), expected(gate_up.rows(), n);
    const auto on_device = Upload(gate_up), result = Upload(out);
    WINNOW_CUDA_OK(ClampedSwigluMul(View(on_device, gate_up), by, View(result, out), nullptr));
    Download(result, out);
    ClampedSwigluMulRef(gate_up.tensor(), by, expected.tensor());
    ExpectNear(out, expected, 1e-6, 4e-6);
  }
}

TEST_F(CudaLayerOpsTest, EmbeddingIsExactForEveryTypeAndScale) {
  SCOPED_TRACE(Seed());
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const FileMatrix table(random_, 50, 300, dtype);
    const HostMatrix host = table.host();
    Matrix out(AnyRows(), 300), expected(out.rows(), 300);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < out.rows(); ++i) {
      ids.push_back(static_cast<int32_t>(random_.Int(0, 49)));
    }
    const DeviceArray<std::byte> on_device(std::span<const std::byte>(
        static_cast<const std::byte*>(host.data), 50 * 300 * DTypeBytes(dtype)));
    const DeviceArray<int32_t> ids_on_device(ids);
    const auto result = Upload(out);
    for (const float scale : {1.0f, 54.545456f, 0.25f}) {
      EmbedRowsRef(host, ids, scale, expected.tensor());
      WINNOW_CUDA_OK(EmbedRows(on_device.data(), dtype, ids_on_device.data(), scale,
                               View(result, out), nullptr));
      Download(result, out);
      EXPECT_TRUE(SameBits(out, expected)) << DTypeName(dtype) << " by " << scale;
      EXPECT_TRUE(out.GuardsIntact());
    }
  }
}

TEST_F(CudaLayerOpsTest, WrittenRowsAreTheReferencesBytes) {
  SCOPED_TRACE(Seed());
  for (int round = 0; round < 15; ++round) {
    const int32_t d = kCudaHeadDims[round % 5];
    const KvLayout layout{3, d, static_cast<int32_t>(16 * random_.Int(1, 5)),
                          CudaKvTypeOf(d, kCudaKvTypes[round / 5])};
    SCOPED_TRACE(DTypeName(layout.dtype));
    PagedKv kv(random_, layout, {300, 40});
    Matrix k = Matrix::Normal(random_, 60, 3 * d), v = Matrix::Normal(random_, 60, 3 * d);
    // Rows of zeros, of nearly nothing, of values that cancel no scale, and of what is no number.
    std::fill(k.row(5), k.row(5) + 3 * d, 0.0f);
    std::fill(v.row(6), v.row(6) + d, -0.0f);
    for (int64_t c = 0; c < 3 * d; ++c) {
      k.row(7)[c] *= 1e-38f;
      v.row(8)[c] *= 1e37f;
      k.row(9)[c] = std::ldexp(k.row(9)[c], static_cast<int>(random_.Int(-90, 90)));
      v.row(10)[c] = static_cast<float>(random_.Int(-448, 448)) / 8;
    }
    k.row(11)[random_.Int(0, d - 1)] = NAN;
    v.row(12)[random_.Int(0, d - 1)] = INFINITY;
    v.row(57)[d] = -INFINITY;
    const std::vector<AttentionChunk> chunks = {kv.Chunk(0, 5, 50, 201), kv.Chunk(1, 57, 1, 39)};
    const auto pool = UploadPool(kv);
    const DeviceArray<int32_t> table0(kv.table(0)), table1(kv.table(1));
    const DeviceArray<DeviceChunk> on_device(
        std::vector<DeviceChunk>{{table0.data(), 5, 50, 201, 0}, {table1.data(), 57, 1, 39, 0}});
    const auto k_on_device = Upload(k), v_on_device = Upload(v);
    WINNOW_CUDA_OK(WriteKv(View(k_on_device, k), View(v_on_device, v), on_device.data(), 2, 50,
                           pool.data(), layout, nullptr));
    const auto* before = static_cast<const std::byte*>(kv.pool());
    std::vector<std::byte> expected(before, before + pool.size());
    WriteKvRef(k.tensor(), v.tensor(), chunks, expected.data(), layout);
    ASSERT_EQ(pool.Get(), expected) << "d " << d;
  }
}

}  // namespace
}  // namespace winnow::kernels::cuda

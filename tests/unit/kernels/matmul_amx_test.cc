// The product by matrix tiles on any processor, with tiles in plain C++, and the processor's own tiles beside those.

// clang-format off
#include "kernels/cpu/vec_scalar.h"
// clang-format on
#include "kernels/cpu/matmul_amx_impl.h"

#include <cstring>

#include "kernels/host_matrix.h"
#include "kernels/matmul.h"
#include "tests/unit/kernels/emulated_tiles.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {
namespace {

using emulated::EmulatedTiles;

// x and w in the order that the kernel reads, each ending before a page that must not be touched.
class AmxOperands {
 public:
  AmxOperands(const Matrix& x, const HostMatrix& w)
      : m_(x.rows()),
        in_(x.cols()),
        out_(w.rows),
        row_bytes_(static_cast<size_t>(in_ + in_ % 2) * 2),
        rows_(static_cast<size_t>(m_) * row_bytes_),
        panels_(static_cast<size_t>(NumPanels(out_)) * PanelBytes(DType::kBF16, in_)) {
    std::memset(rows_.data(), 0, rows_.size());
    std::memset(panels_.data(), 0, panels_.size());
    for (int64_t i = 0; i < m_; ++i) {
      for (int64_t k = 0; k < in_; ++k) Put(rows_.data() + i * row_bytes_ + 2 * k, x.row(i)[k]);
    }
    for (int64_t o = 0; o < out_; ++o) {
      std::byte* const panel = panels_.data() + o / kPanelOutputs * PanelBytes(DType::kBF16, in_);
      for (int64_t k = 0; k < in_; ++k) {
        Put(panel + k / 2 * kTileBytesPerRow + o % kPanelOutputs * 4 + k % 2 * 2,
            ElementAt(RowOf(w, o), w.dtype, k));
      }
    }
  }

  // Rows [first, last) into the rows of y that begin with the row 0.
  void Multiply(int64_t first, int64_t last, const MatmulEpilogue& epilogue,
                const Tensor& y) const {
    MatmulCall call;
    call.rows = rows_.data() + first * row_bytes_;
    call.row_bytes = row_bytes_;
    call.panels = panels_.data();
    call.in_features = in_;
    call.out_features = out_;
    call.y = y.f32();
    call.y_stride = y.stride;
    call.bias = epilogue.bias;
    call.accumulate = epilogue.accumulate;
    call.compute = DType::kBF16;
    TiledMatmul<EmulatedTiles>::Run(call, 0, last - first, 0, NumPanels(out_));
    EXPECT_FALSE(EmulatedTiles::configured());
  }

 private:
  static void Put(std::byte* to, float value) {
    const BF16 rounded = ToBF16(value);
    std::memcpy(to, &rounded, sizeof rounded);
  }

  const int64_t m_, in_, out_;
  const size_t row_bytes_;
  GuardedArray<std::byte> rows_, panels_;
};

class MatmulAmxTest : public testing::Test {
 protected:
  Random random_;
};

TEST_F(MatmulAmxTest, EqualsTheReferenceForOddShapes) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (int round = 0; round < 60; ++round) {
    const int64_t m = random_.Int(1, 70), in = random_.Int(1, 150), out = random_.Int(1, 130);
    SCOPED_TRACE(testing::Message() << "m " << m << ", in " << in << ", out " << out);
    const FileMatrix w(random_, out, in, DType::kBF16);
    const std::vector<HostMatrix> parts = {w.host()};
    Matrix x = Matrix::Normal(random_, m, in), bias = Matrix::Normal(random_, 1, out);
    Matrix y = Matrix::Normal(random_, m, out), expected = y;
    MatmulEpilogue epilogue;
    if (random_.Int(0, 1) == 1) epilogue.bias = bias.row(0);
    epilogue.accumulate = random_.Int(0, 1) == 1;
    AmxOperands(x, parts[0]).Multiply(0, m, epilogue, y.tensor());
    MatmulRef(x.tensor(), parts, DType::kBF16, expected.tensor(), epilogue);
    ExpectNear(y, expected, 2e-6 * static_cast<double>(in) + 1e-5, 1e-5);
  }
}

TEST_F(MatmulAmxTest, ARowIsTheSameBitsAloneAndInABatchOfAnySize) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  const int64_t most = 70, in = random_.Int(100, 300), out = random_.Int(60, 150);
  const FileMatrix w(random_, out, in, DType::kBF16);
  Matrix x = Matrix::Normal(random_, most, in), alone(most, out);
  const AmxOperands operands(x, w.host());
  for (int64_t i = 0; i < most; ++i) {
    operands.Multiply(i, i + 1, {}, alone.tensor().RowRange(i, 1));
  }
  for (const int64_t m : {2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 70}) {
    const int64_t first = random_.Int(0, most - m);
    Matrix y(m, out);
    operands.Multiply(first, first + m, {}, y.tensor());
    for (int64_t i = 0; i < m; ++i) ASSERT_TRUE(SameBits(y, i, alone, first + i)) << "m " << m;
  }
}

// A processor that has tiles computes what is described. Values from tiny to huge: denormals, sums that cancel.
class AmxProcessorTest : public testing::TestWithParam<std::string> {
 protected:
  Random random_;
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AmxProcessorTest);  // most processors have no tiles
INSTANTIATE_TEST_SUITE_P(Cpu, AmxProcessorTest, testing::ValuesIn(emulated::IsasWithTiles()));

TEST_P(AmxProcessorTest, HasTheBitsOfItsDescription) {
  SCOPED_TRACE("WINNOW_TEST_SEED=" + std::to_string(random_.seed()));
  for (int round = 0; round < 40; ++round) {
    const int64_t m = random_.Int(1, 70), in = random_.Int(1, 400), out = random_.Int(1, 130);
    SCOPED_TRACE(testing::Message() << "m " << m << ", in " << in << ", out " << out);
    const float sizes[] = {1.0f, 1e-20f, 1e-30f, 1e18f};
    const float size = sizes[round % 4];
    const FileMatrix w(random_, out, in, DType::kBF16, size);
    const std::vector<HostMatrix> parts = {w.host()};
    Matrix x = Matrix::Normal(random_, m, in), y(m, out), expected(m, out);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t k = 0; k < in; ++k) x.row(i)[k] *= random_.Int(0, 3) == 0 ? 1e-10f : 1.0f;
    }
    const auto backend = MakeCpuBackend(GetParam(), static_cast<int>(random_.Int(1, 3)));
    const auto packed = backend->Pack(parts, DType::kBF16);
    backend->Matmul(x.tensor(), *packed, y.tensor(), {});
    AmxOperands(x, parts[0]).Multiply(0, m, {}, expected.tensor());
    for (int64_t i = 0; i < m; ++i) ASSERT_TRUE(SameBits(y, i, expected, i)) << "row " << i;
  }
}

}  // namespace
}  // namespace winnow::kernels

// What tests of the CUDA backend share: a backend, and operands in its memory.
#ifndef WINNOW_TESTS_CUDA_BACKEND_TESTING_H_
#define WINNOW_TESTS_CUDA_BACKEND_TESTING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {

class CudaBackendFixture : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (HasFatalFailure()) return;
    std::string why;
    backend_ = CudaBackend::Create(0, &why);
    ASSERT_NE(backend_, nullptr) << why;
    backend_->BeginPass();
  }
  void TearDown() override {
    if (backend_ != nullptr) {
      EXPECT_TRUE(backend_->Synchronize());
      EXPECT_EQ(backend_->failure(), "");
      backend_.reset();
    }
    CudaTest::TearDown();
  }

  // A matrix on the device, with its rows' gaps.
  struct OnDevice {
    OnDevice(Matrix& host, Backend& used) : values(Upload(host)), matrix(host), backend(used) {
      tensor = host.tensor();
      tensor.data = values.data();
    }
    // What the device has, into the matrix.
    void Fetch() {
      ASSERT_TRUE(backend.Synchronize());
      Download(values, matrix);
    }
    DeviceArray<float> values;
    Matrix& matrix;
    Backend& backend;
    Tensor tensor;
  };
  OnDevice Put(Matrix& matrix) { return OnDevice(matrix, *backend_); }

  // Rows [first, first + rows) of x times W, as the backend computes them, in y's place.
  Matrix Product(Matrix& x, const Matrix& y, const PackedMatrix& w, const std::vector<float>& bias,
                 bool accumulate, int64_t first, int64_t rows) {
    Matrix result = y;
    auto on_device = Put(result);
    auto of_x = Put(x);
    const DeviceArray<float> of_bias(bias);
    backend_->Matmul(of_x.tensor.RowRange(first, rows), w, on_device.tensor.RowRange(first, rows),
                     {bias.empty() ? nullptr : of_bias.data(), accumulate});
    on_device.Fetch();
    return result;
  }

  // GatedMlp() of m rows: the bits of its parts, one after the other. down [hidden][width], gate and up [width][hidden].
  void ExpectGatedMlpIsItsParts(int64_t m, const StoredMatrix& gate, const StoredMatrix& up,
                                const StoredMatrix& down) {
    const int64_t hidden = gate.cols, width = down.cols;
    const auto of_gate_up = backend_->PackStored({{gate, up}}, DType::kBF16);
    const auto of_down = backend_->PackStored({{down}}, DType::kBF16);
    ASSERT_NE(of_gate_up, nullptr);
    ASSERT_NE(of_down, nullptr);
    Matrix expected = Matrix::Normal(random_, m, hidden), actual = expected;
    Matrix norm = Matrix::Normal(random_, 1, hidden), normed(m, hidden), activated(m, width);
    Matrix gate_rows(m, 2 * width, 0);
    const auto weight = Upload(norm);
    auto scratch = Put(normed), of_activated = Put(activated), of_gate_rows = Put(gate_rows);
    auto of_expected = Put(expected), of_actual = Put(actual);
    backend_->RmsNorm(of_expected.tensor, weight.data(), 1e-5f, scratch.tensor);
    backend_->Matmul(scratch.tensor, *of_gate_up, of_gate_rows.tensor, {});
    backend_->SiluMul(of_gate_rows.tensor, of_activated.tensor);
    backend_->Matmul(of_activated.tensor, *of_down, of_expected.tensor, {nullptr, true});
    backend_->GatedMlp({.hidden = of_actual.tensor,
                        .norm_weight = weight.data(),
                        .eps = 1e-5f,
                        .gate_up = *of_gate_up,
                        .down = *of_down,
                        .normed = scratch.tensor,
                        .gate_rows = of_gate_rows.tensor,
                        .activated = of_activated.tensor});
    of_expected.Fetch();
    of_actual.Fetch();
    ASSERT_TRUE(SameBits(actual, expected));
  }

  // A selection in shared memory, of guards.
  class SharedSelection {
   public:
    SharedSelection(Backend& backend, size_t queries, int32_t kv_heads, int32_t capacity)
        : queries_(queries),
          counts_(backend.AllocateShared(queries * kv_heads * 4)),
          tokens_(backend.AllocateShared(queries * kv_heads * capacity * 4)),
          view_{kv_heads, capacity, static_cast<int32_t*>(counts_.data()),
                static_cast<int32_t*>(tokens_.data())} {}
    const Selection& view() const { return view_; }
    std::vector<int32_t> Of(int64_t query, int32_t head) const {
      const int32_t* first = view_.chosen(query, head);
      return {first, first + view_.count(query, head)};
    }

   private:
    size_t queries_;
    Buffer counts_, tokens_;
    Selection view_;
  };

  std::unique_ptr<CudaBackend> backend_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_TESTS_CUDA_BACKEND_TESTING_H_

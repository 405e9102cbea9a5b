#include <cstddef>

#include "kernels/host_matrix.h"
#include "kernels/matmul.h"

namespace winnow::kernels {

void MatmulRef(const Tensor& x, std::span<const HostMatrix> parts, DType compute, const Tensor& y,
               const MatmulEpilogue& epilogue) {
  int64_t out = 0;
  for (const HostMatrix& part : parts) {
    for (int64_t row = 0; row < part.rows; ++row, ++out) {
      for (int64_t i = 0; i < x.rows; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < x.cols; ++j) {
          float a = x.f32(i)[j];
          float w = ElementOf(part, row, j);
          if (compute == DType::kBF16) {
            a = ToFloat(ToBF16(a));
            w = ToFloat(ToBF16(w));
          }
          sum += static_cast<double>(a) * w;
        }
        if (epilogue.bias != nullptr) sum += epilogue.bias[out];
        if (epilogue.accumulate) sum += y.f32(i)[out];
        y.f32(i)[out] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace winnow::kernels

#include <vector>

#include "kernels/float8_matmul.h"
#include "kernels/quantized.h"

namespace winnow::kernels {

void Float8MatmulRef(const Tensor& x, std::span<const StoredMatrix> parts, const Tensor& y,
                     const MatmulEpilogue& epilogue) {
  std::vector<float> weights(x.cols);
  int64_t out = 0;
  for (const StoredMatrix& part : parts) {
    for (const std::byte* row : part.rows) {
      DequantizeRow(part.type, row, x.cols, weights.data());
      for (int64_t i = 0; i < x.rows; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < x.cols; ++j) sum += double{x.f32(i)[j]} * weights[j];
        if (epilogue.bias != nullptr) sum += epilogue.bias[out];
        if (epilogue.accumulate) sum += y.f32(i)[out];
        y.f32(i)[out] = static_cast<float>(sum);
      }
      ++out;
    }
  }
}

}  // namespace winnow::kernels

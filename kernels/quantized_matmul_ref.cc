#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/quantized.h"
#include "kernels/quantized_matmul.h"

namespace winnow::kernels {

float RoundActivations(const float* x, int64_t count, int8_t* integers) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::abs(x[i]));
  }
  std::fill_n(integers, count, int8_t{0});
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  if (largest < kLeastRounded) return 0;
  for (int64_t i = 0; i < count; ++i) {
    integers[i] = static_cast<int8_t>(std::nearbyint(x[i] * (127 / largest)));
  }
  return largest / 127;
}

void QuantizedMatmulRef(const Tensor& x, std::span<const StoredMatrix> parts, const Tensor& y,
                        const MatmulEpilogue& epilogue) {
  std::vector<double> rounded(x.cols);
  std::vector<float> weights(x.cols);
  int8_t integers[kRoundedValues];
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; j += kRoundedValues) {
      const double scale = RoundActivations(x.f32(i) + j, kRoundedValues, integers);
      for (int64_t k = 0; k < kRoundedValues; ++k) rounded[j + k] = scale * integers[k];
    }
    int64_t out = 0;
    for (const StoredMatrix& part : parts) {
      for (const std::byte* row : part.rows) {
        DequantizeRow(part.type, row, x.cols, weights.data());
        double sum = 0;
        for (int64_t j = 0; j < x.cols; ++j) sum += rounded[j] * weights[j];
        if (epilogue.bias != nullptr) sum += epilogue.bias[out];
        if (epilogue.accumulate) sum += y.f32(i)[out];
        y.f32(i)[out++] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace winnow::kernels

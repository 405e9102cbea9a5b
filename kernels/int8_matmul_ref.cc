#include "kernels/int8_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/quantized.h"
#include "kernels/quantized_matmul.h"

namespace winnow::kernels {

void Int8MatmulRef(const Tensor& x, const StoredMatrix& w, const Tensor& y,
                   const MatmulEpilogue& epilogue) {
  WINNOW_CHECK(w.type == WeightType::kI8x128);
  const BlockSize block = BlockSizeOf(w.type);
  std::vector<int8_t> integers(x.cols);
  std::vector<float> scales((x.cols + kInt8GroupValues - 1) / kInt8GroupValues);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t at = 0; at < x.cols; at += kInt8GroupValues) {
      const int64_t count = std::min(kInt8GroupValues, x.cols - at);
      scales[at / kInt8GroupValues] = RoundActivations(x.f32(i) + at, count, integers.data() + at);
    }
    for (size_t output = 0; output < w.rows.size(); ++output) {
      const auto* const row = reinterpret_cast<const int8_t*>(w.rows[output]);
      float sum = 0;
      for (int64_t at = 0; at < x.cols; at += kInt8GroupValues) {
        F16 scale;
        std::memcpy(&scale, row + at / block.values * block.bytes, sizeof scale);
        int32_t products = 0;
        for (int64_t j = at; j < std::min(at + kInt8GroupValues, x.cols); ++j) {
          products += row[j / block.values * block.bytes + 2 + j % block.values] * integers[j];
        }
        sum = std::fma(static_cast<float>(products), ToFloat(scale) * scales[at / kInt8GroupValues],
                       sum);
      }
      if (epilogue.bias != nullptr) sum += epilogue.bias[output];
      float& to = y.f32(i)[output];
      to = epilogue.accumulate ? sum + to : sum;
    }
  }
}

}  // namespace winnow::kernels

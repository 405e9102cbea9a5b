#include <cmath>

#include "kernels/rmsnorm.h"

namespace winnow::kernels {

void RmsNormRef(const Tensor& x, const float* weight, float eps, const Tensor& out) {
  for (int64_t i = 0; i < x.rows; ++i) {
    double squares = 0;
    for (int64_t j = 0; j < x.cols; ++j) squares += static_cast<double>(x.f32(i)[j]) * x.f32(i)[j];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.cols) + eps);
    for (int64_t j = 0; j < x.cols; ++j)
      out.f32(i)[j] = static_cast<float>(x.f32(i)[j] * scale * weight[j]);
  }
}

void AddRmsNormRef(const Tensor& x, const float* weight, float eps, const Tensor& y) {
  for (int64_t i = 0; i < x.rows; ++i) {
    const Tensor row = x.RowRange(i, 1);
    RmsNormRef(row, weight, eps, row);
    for (int64_t j = 0; j < x.cols; ++j) y.f32(i)[j] += row.f32(0)[j];
  }
}

void RmsNormHeadsRef(const Tensor& x, int32_t head_dim, const float* weight, float eps) {
  for (int64_t first = 0; first < x.cols; first += head_dim) {
    const Tensor head = x.ColRange(first, head_dim);
    RmsNormRef(head, weight, eps, head);
  }
}

}  // namespace winnow::kernels

#include <algorithm>
#include <cmath>

#include "kernels/silu_mul.h"

namespace winnow::kernels {

void SiluMulRef(const Tensor& gate_up, const Tensor& out) {
  for (int64_t i = 0; i < out.rows; ++i) {
    for (int64_t j = 0; j < out.cols; ++j) {
      const double gate = gate_up.f32(i)[j];
      const double up = gate_up.f32(i)[out.cols + j];
      out.f32(i)[j] = static_cast<float>(gate / (1.0 + std::exp(-gate)) * up);
    }
  }
}

void GeluTanhMulRef(const Tensor& gate_up, const Tensor& out) {
  for (int64_t i = 0; i < out.rows; ++i) {
    for (int64_t j = 0; j < out.cols; ++j) {
      const double gate = gate_up.f32(i)[j], up = gate_up.f32(i)[out.cols + j];
      const double u = std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate);
      out.f32(i)[j] = static_cast<float>(0.5 * gate * (1.0 + std::tanh(u)) * up);
    }
  }
}

void ClampedSwigluMulRef(const Tensor& gate_up, const ClampedSwiglu& by, const Tensor& out) {
  for (int64_t i = 0; i < out.rows; ++i) {
    for (int64_t j = 0; j < out.cols; ++j) {
      const double gate = std::min<double>(gate_up.f32(i)[j], by.limit);
      const double up = std::clamp<double>(gate_up.f32(i)[out.cols + j], -by.limit, by.limit);
      out.f32(i)[j] =
          static_cast<float>((up + 1.0) * gate / (1.0 + std::exp(-double{by.alpha} * gate)));
    }
  }
}

}  // namespace winnow::kernels

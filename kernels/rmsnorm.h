// out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight, for each row, or for each head of each row; or added to y[i].
//
//   x, out [m][n] f32 (out may be x), weight [n] f32; per head: x [m][heads*d] in place, weight
//   [d].
//
// Order: squares are summed per lane, then across lanes in a fixed tree: the same for every m.
// Reads x twice (the second time from L1), writes out; 4*m*n FLOPs. Bound by memory.
#ifndef WINNOW_KERNELS_RMSNORM_H_
#define WINNOW_KERNELS_RMSNORM_H_

#include <cstdint>

#include "kernels/tensor.h"

namespace winnow::kernels {

constexpr double RmsNormFlops(int64_t m, int64_t n) {
  return 4.0 * static_cast<double>(m) * static_cast<double>(n);
}
constexpr double RmsNormBytes(int64_t m, int64_t n) {
  return 4.0 * static_cast<double>(n) * (2.0 * static_cast<double>(m) + 1.0);
}

void RmsNormRef(const Tensor& x, const float* weight, float eps, const Tensor& out);
void AddRmsNormRef(const Tensor& x, const float* weight, float eps, const Tensor& y);
void RmsNormHeadsRef(const Tensor& x, int32_t head_dim, const float* weight, float eps);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_RMSNORM_H_

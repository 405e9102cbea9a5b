// out[i][j] = silu(gate) * up, with silu(g) = g / (1 + exp(-g)); or gelu(gate) * up, with the approximation of gelu by a
// tanh: g / (1 + exp(-2 u)) for u = sqrt(2 / pi) (g + 0.044715 g^3).
//
// ClampedSwigluMul (gpt-oss): out[i][j] = (u + 1) * g / (1 + exp(-alpha g)), with g = min(gate, limit) and
// u = min(max(up, -limit), limit).
//
//   gate_up [m][2n] f32: n gates, then n ups; out [m][n] f32. out must not overlap gate_up.
//
// One expression per value; nothing is summed.
// Reads 8*m*n bytes, writes 4*m*n; about 16 FLOPs per value, most of them the exponential.
#ifndef WINNOW_KERNELS_SILU_MUL_H_
#define WINNOW_KERNELS_SILU_MUL_H_

#include <cstdint>

#include "kernels/tensor.h"

namespace winnow::kernels {

constexpr double SiluMulFlops(int64_t m, int64_t n) {
  return 16.0 * static_cast<double>(m) * static_cast<double>(n);
}
constexpr double SiluMulBytes(int64_t m, int64_t n) {
  return 12.0 * static_cast<double>(m) * static_cast<double>(n);
}

// -2 sqrt(2 / pi), and times 0.044715.
inline constexpr float kGeluTanhLinear = -1.5957691216057308f,
                       kGeluTanhCubic = -0.07135481282714818f;

struct ClampedSwiglu {
  float alpha = 1.702f, limit = 7.0f;  // both above 0
  bool operator==(const ClampedSwiglu&) const = default;
};

void SiluMulRef(const Tensor& gate_up, const Tensor& out);
void GeluTanhMulRef(const Tensor& gate_up, const Tensor& out);
void ClampedSwigluMulRef(const Tensor& gate_up, const ClampedSwiglu& by, const Tensor& out);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_SILU_MUL_H_

// The gate of an MLP, for every kernel that computes it.
#ifndef WINNOW_KERNELS_CUDA_SILU_CUH_
#define WINNOW_KERNELS_CUDA_SILU_CUH_

#include "kernels/silu_mul.h"

namespace winnow::kernels::cuda {

// gate / (1 + exponential) * up. The roundings are fixed, so that every kernel has the same.
//
// The division is __fdiv_rn's way for operands of usual size, and rounds as it does. Its branch for others is left out, because
// the matrix product computes 48 values one after the other (matmul_wgmma.cu), and they overlap only where nothing branches.
// So a denominator above 2^126, of gates under -87, counts as 2^126.
__device__ __forceinline__ float GateBy(float exponential, float gate, float up) {
  const float denominator = fminf(__fadd_rn(1.0f, exponential), 0x1p126f);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(denominator));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-denominator, inverse, 1.0f), inverse);
  const float first = __fmul_rn(gate, inverse);
  float quotient = __fmaf_rn(inverse, __fmaf_rn(-denominator, first, gate), first);
  quotient = __fmaf_rn(inverse, __fmaf_rn(-denominator, quotient, gate), quotient);
  // An infinity's corrections are not numbers.
  return __fmul_rn(isnan(quotient) ? first : quotient, up);
}
// silu(gate) * up, and gelu(gate) * up by its tanh (silu_mul.h).
__device__ __forceinline__ float SiluOf(float gate, float up) {
  return GateBy(expf(-gate), gate, up);
}
__device__ __forceinline__ float GeluTanhOf(float gate, float up) {
  const float factor = __fmaf_rn(__fmul_rn(gate, gate), kGeluTanhCubic, kGeluTanhLinear);
  return GateBy(expf(__fmul_rn(gate, factor)), gate, up);
}
// The clamped gate (silu_mul.h). Comparisons are false for NaN, which stays what it is.
__device__ __forceinline__ float ClampedSwigluOf(float gate, float up, const ClampedSwiglu& by) {
  gate = gate > by.limit ? by.limit : gate;
  up = up > by.limit ? by.limit : up < -by.limit ? -by.limit : up;
  return GateBy(expf(__fmul_rn(gate, -by.alpha)), gate, __fadd_rn(up, 1.0f));
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_SILU_CUH_

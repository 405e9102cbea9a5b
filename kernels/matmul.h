// y = x Wᵀ (+ bias) (+ y).
//
//   x [m][in] f32, W [out][in] packed, y [m][out] f32, bias [out] f32.
//
// Order: one sum per element of y, in ascending order of the inner dimension (bf16: of its pairs,
// as vdpbf16ps adds them), then the bias, then what y held. It does not depend on m. compute kBF16
// rounds x to bf16 (nearest even) and adds in f32; on AVX-512 and AMX the dot product flushes denormals. AMX adds tile by
// tile of 32 inner values (cpu/amx_tiles_impl.h).
// kF32 and kF16 use x as it is and widen the weights, which is exact.
//
// Reads out*in weights once when they are more than the caches hold and m is small; 2*m*out*in
// FLOPs. Intensity with 2-byte weights: m FLOP/B. Bound by memory up to m of about 8 on the CPUs we
// know.
#ifndef WINNOW_KERNELS_MATMUL_H_
#define WINNOW_KERNELS_MATMUL_H_

#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/model_ops.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

constexpr double MatmulFlops(int64_t m, int64_t out, int64_t in) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(out) * static_cast<double>(in);
}
// The weights, x and y: each once.
constexpr double MatmulBytes(int64_t m, int64_t out, int64_t in, DType weights) {
  return static_cast<double>(out) * static_cast<double>(in) *
             static_cast<double>(DTypeBytes(weights)) +
         4.0 * static_cast<double>(m) * static_cast<double>(in + out);
}

// The oracle: sums in double over the parts' values, stacked along the rows. Rounds x and the
// weights as `compute` says, and nothing else.
void MatmulRef(const Tensor& x, std::span<const HostMatrix> parts, DType compute, const Tensor& y,
               const MatmulEpilogue& epilogue);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_MATMUL_H_

// y = x Wᵀ (+ bias) (+ y) with weights of 8-bit floats in blocks (quantized.h: kF8x32, kF8x128), which are widened in
// registers. x stays float32: the weights' rounding in the file is the only loss beside float32's. On AMX x is rounded to
// bfloat16 (nearest even), as in products with bfloat16 weights.
//
//   x [m][in] f32, W [out][in] in blocks, y [m][out] f32, bias [out] f32.
//
// Order: a block's products x · w are added to zero by one chain of fused multiply-adds in ascending order of the inner
// dimension; the sum times the block's scale is added to y's element by another, blocks in ascending order. Then come the
// bias and what y held. It does not depend on m. AVX2 and AVX-512 give the same bits; the scalar kernels do not fuse. AMX adds
// a block's products up tile by tile of 32 inner values (cpu/amx_tiles_impl.h), and scales as above.
// Weights meet x as w / 256, which is what their bits say as a float16's, and scales are 256 times as large for it: both
// exact, as long as no product is a subnormal float32.
//
// REQUIRES: no NaN among the weights (whose bits would count as 480).
//
// Reads the weights once when they are more than the caches hold and m is small: 1.03 bytes a weight in blocks of 128
// values, 1.13 in blocks of 32.
#ifndef WINNOW_KERNELS_FLOAT8_MATMUL_H_
#define WINNOW_KERNELS_FLOAT8_MATMUL_H_

#include <span>

#include "kernels/model_ops.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// The oracle: sums in double over the values that DequantizeRow gives.
void Float8MatmulRef(const Tensor& x, std::span<const StoredMatrix> parts, const Tensor& y,
                     const MatmulEpilogue& epilogue);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_FLOAT8_MATMUL_H_

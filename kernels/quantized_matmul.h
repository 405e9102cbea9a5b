// y = x Wᵀ (+ bias) (+ y) with weights in quantised blocks, computed with their integers.
//
//   x [m][in] f32, W [out][in] in blocks (quantized.h), y [m][out] f32, bias [out] f32.
//
// Each 32 values of a row of x are rounded to 8 bits first: scale t = max |x| / 127, integers p = x / t to the nearest
// (ties to even, by a multiplication with 127 / max |x|). With a value that is not finite among them t is NaN, and so is
// every result of the row. Where all are smaller than kLeastRounded they count as zeros.
//
// Order: one sum per element of y over the weights' groups, in ascending order. A group adds
//     float(Σ (q - bias) p) · (s · t), by one fused multiply-add,
// and with an offset o then  o · (t · float(Σ p)), by another; both Σ are of integers and exact. Then come the bias and
// what y held. It does not depend on m. AVX2, AVX-512 and AMX give the same bits; the scalar kernels do not fuse.
//
// The rounding of x is the only loss beside float32's: per value at most half a 127th of its 32's largest.
//
// Reads the weights once when they are more than the caches hold and m is small. Bytes a weight, packed: Q4_0 0.56,
// Q4_1 0.63, MXFP4 0.56, Q4_K 0.58, Q5_0 and Q8_0 1.06, Q5_1 1.13, Q5_K 1.08, Q6_K 1.07. What the file packs in 5 and 6 bits takes 8.
#ifndef WINNOW_KERNELS_QUANTIZED_MATMUL_H_
#define WINNOW_KERNELS_QUANTIZED_MATMUL_H_

#include <cstdint>
#include <span>

#include "kernels/model_ops.h"
#include "kernels/quantized.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

inline constexpr int64_t kRoundedValues = 32;  // of x that a group of W meets
inline constexpr float kLeastRounded =
    1e-36f;  // below about a third of it 127 / max |x| is infinite

// Rounds `x` [count] to `integers`; returns t. The oracle of the CPU's own.
float RoundActivations(const float* x, int64_t count, int8_t* integers);

// The oracle: rounds x, and sums in double over the values that DequantizeRow gives.
void QuantizedMatmulRef(const Tensor& x, std::span<const StoredMatrix> parts, const Tensor& y,
                        const MatmulEpilogue& epilogue);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_QUANTIZED_MATMUL_H_

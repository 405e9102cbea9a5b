// W8A8: y = x Wᵀ (+ bias) (+ y), both sides rounded to integers of 8 bits, 128 inner values with a scale, the last ones of a row with
// fewer. W4A8: the same with weights whose integers lie from -8 to 7 (StoredMatrix::integer_bits), which take half the bytes.
//
//   x [m][in] f32, W [out][in] of type kI8x128 (quantized.h), y [m][out] f32, bias [out] f32.
//
// x is rounded as quantized_matmul.h says, but 128 values with a scale in place of 32. An element of y is one chain of fused
// multiply-adds over the groups in ascending order, which add
//     float(Σ q p) · (s · t)
// to zero; then come the bias and what y held. Σ is exact, so the order is that of the groups alone, whatever computes it, and does
// not depend on m: a CPU of any instruction set and a GPU have the same bits. (With one scale for a whole row of x, as in LLM.int8(),
// arXiv 2208.07339, section 2, SmolLM2 loses three times as much: docs/models.md.)
//
// Reads the weights once when they are more than the caches hold and m is small, 1.03 or .53 bytes a weight; rows are kept as whole
// groups.
#ifndef WINNOW_KERNELS_INT8_MATMUL_H_
#define WINNOW_KERNELS_INT8_MATMUL_H_

#include <cstdint>

#include "kernels/model_ops.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

inline constexpr int64_t kInt8GroupValues = 128;

// The oracle, bit for bit but for the payload of NaN. REQUIRES: w of kI8x128.
void Int8MatmulRef(const Tensor& x, const StoredMatrix& w, const Tensor& y,
                   const MatmulEpilogue& epilogue);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_INT8_MATMUL_H_

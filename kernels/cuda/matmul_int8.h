// Products of W8A8 and W4A8 (kernels/int8_matmul.h) on the device: way kInt8 of matmul.h, where both sides are integers.
//
//   W        type kI8x128, packed by PackInt8; integers from -8 to 7 may lie in 4 bits (DeviceWeights::integer_bits)
//   x        rows of float32 that are rounded to integers first, 128 with a scale: "rounded rows", below
//
// The sum of 128 products of integers is exact, so whichever kernel makes it, by whichever instruction, has the same one; what is
// added up in float32 are those sums times two scales, 128 after 128 in ascending order, by one fused multiply-add each. So an
// element of y does not depend on m, nor on the kernel.
//
// Hopper's kernel takes any number of rows (matmul_int8_wgmma.cu); other devices have one without its instructions (matmul_int8.cu).
// Integers of 4 bits are multiplied as they lie by up to kFourBitRows rows, on Hopper (one row or two by matmul_int4_stream.cu); for
// the rest the caller widens them.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_INT8_H_
#define WINNOW_KERNELS_CUDA_MATMUL_INT8_H_

#include "kernels/cuda/device_types.h"
#include "kernels/cuda/layer_ops.h"
#include "kernels/cuda/matmul.h"

namespace winnow::kernels::cuda {

inline constexpr int64_t kFourBitRows = 64;

size_t Int8WeightBytes(int64_t out, int64_t in, int32_t integer_bits = 8);
// Puts rows [first_row, first_row + rows) in place, from rows of kI8x128 one behind the other, at any address. A group past the
// last value is filled up with zeros. REQUIRES: `packed` was zeroed once.
[[nodiscard]] cudaError_t PackInt8(const std::byte* source, int64_t first_row, int64_t rows,
                                   const DeviceWeights& packed, Stream stream);

// Outputs [first_output, first_output + outputs) of integers of 4 bits as those of 8 at `to`, Int8WeightBytes() of them. REQUIRES:
// first_output a multiple of 64; where outputs end before the matrix does, they are a multiple, too.
[[nodiscard]] cudaError_t WidenInt4(const DeviceWeights& w, int64_t first_output, int64_t outputs,
                                    void* to, Stream stream);

// Rounded rows: panels [ceil(m / 64)][groups] of 64 rows' integers and scales (rounded_rows.cuh). RmsNormRounded (layer_ops.h) makes
// them, too.
size_t RoundedBytes(int64_t m, int64_t in);
[[nodiscard]] cudaError_t RoundRows(const DeviceMatrix& x, void* rounded, Stream stream);
// The rows of SiluMul (layer_ops.h), rounded. gate_up [m][2 * in].
[[nodiscard]] cudaError_t SiluMulRounded(const DeviceMatrix& gate_up, void* rounded, Stream stream);

// True where products of m rows multiply W as it lies: always with integers of 8 bits.
bool MultipliesAsItLies(int64_t m, const DeviceWeights& w);
// y = x Wᵀ (+ bias) (+ y); args.x is not read. REQUIRES: w of kInt8, MultipliesAsItLies(), and not `portable` with 4 bits.
[[nodiscard]] cudaError_t MatmulRounded(const MatmulArgs& args, const DeviceWeights& w,
                                        const void* rounded, Stream stream);

// Whether products of m rows with W, the gates' outputs and then as many of ups, have a kernel on the current device that gates
// them: more than kMatmulBatchRows rows, on Hopper, whole groups of gates.
bool GatesRounded(int64_t m, const DeviceWeights& w);
// silu(gate) * up of the same sums (silu.cuh), rounded: the bits of MatmulRounded() and SiluMulRounded() after it, and gates and ups
// are never in memory. RoundedBytes(m, w.out / 2) at `gated`; args.x and args.y are not used. REQUIRES: GatesRounded(), neither
// `accumulate` nor `portable`, `gated` aligned to 16 bytes.
[[nodiscard]] cudaError_t MatmulRoundedGated(const MatmulArgs& args, const DeviceWeights& w,
                                             const void* rounded, void* gated, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_INT8_H_

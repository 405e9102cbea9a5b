// How a row is rounded to integers for products of W8A8, and where they lie (matmul_int8.h), for those who write them: matmul_int8.cu,
// layer_ops.cu. The arithmetic is that of RoundActivations (kernels/quantized_matmul.h).
#ifndef WINNOW_KERNELS_CUDA_ROUNDED_ROWS_CUH_
#define WINNOW_KERNELS_CUDA_ROUNDED_ROWS_CUH_

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/matmul_order.cuh"
#include "kernels/int8_matmul.h"
#include "kernels/quantized_matmul.h"

namespace winnow::kernels::cuda {

inline constexpr int32_t kGroupValues = kInt8GroupValues;

inline int32_t GroupsOf(int64_t in) { return static_cast<int32_t>(CeilDiv(in, kGroupValues)); }

// A panel of rounded rows: 64 rows' integers of a group, and their scales.
inline constexpr int32_t kIntegerBytes = kPanelRows * kGroupValues;
inline constexpr int32_t kScaleBytes = kPanelRows * 4;
inline constexpr int32_t kRoundedPanelBytes = kIntegerBytes + kScaleBytes;

// Rounded rows, as whoever writes them sees them: [ceil(m / 64)][groups] panels.
struct RoundedRows {
  uint8_t* panels;
  int32_t groups;
  int32_t unused = 0;

  __device__ __forceinline__ uint8_t* Panel(int64_t row, int32_t group) const {
    return panels + (row / kPanelRows * groups + group) * kRoundedPanelBytes;
  }
  __device__ __forceinline__ float& Scale(int64_t row, int32_t group) const {
    return reinterpret_cast<float*>(Panel(row, group) + kIntegerBytes)[row % kPanelRows];
  }
};
inline RoundedRows RoundedRowsOf(void* rounded, int64_t in) {
  return {static_cast<uint8_t*>(rounded), GroupsOf(in)};
}

// The place of four neighbours of a row, from the column of its group on that `four` counts in fours. 16 columns lie as the i ^ (row % 8)-th
// 16 bytes of their row instead of the i-th, as matrix instructions read them (wgmma.cuh).
__device__ __forceinline__ uint8_t* FourOf(const RoundedRows& rows, int64_t row, int32_t group,
                                           int four) {
  return rows.Panel(row, group) + row % kPanelRows * kGroupValues +
         ((four / 4) ^ static_cast<int>(row % 8)) * 16 + four % 4 * 4;
}

// How a group is rounded whose largest magnitude has these bits. (The bits of magnitudes are in their order, and those that are
// not finite come last.)
struct Rounding {
  float inverse, scale;
  bool zero;

  __device__ __forceinline__ explicit Rounding(uint32_t largest_bits) {
    const float largest = __uint_as_float(largest_bits);
    const bool finite = largest_bits < 0x7f800000u;
    zero = !finite || largest < kLeastRounded;
    inverse = zero ? 0.0f : __fdiv_rn(127.0f, largest);
    scale = !finite ? __uint_as_float(0x7fc00000u) : zero ? 0.0f : __fdiv_rn(largest, 127.0f);
  }
  // A rounding known by its inverse, without its scale.
  __device__ __forceinline__ Rounding(float group_inverse, bool group_zero)
      : inverse(group_inverse), scale(0.0f), zero(group_zero) {}
  // The integer, in the lowest eight bits.
  __device__ __forceinline__ uint32_t Of(float value) const {
    return static_cast<uint32_t>(__float2int_rn(__fmul_rn(zero ? 0.0f : value, inverse))) & 255u;
  }
};
__device__ __forceinline__ uint32_t MagnitudeBits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// Rounds and writes a group of a row; a warp's, of which a lane has four neighbours.
__device__ __forceinline__ void PutGroup(const RoundedRows& to, int64_t row, int32_t group,
                                         int lane, const float (&values)[4]) {
  uint32_t largest_bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest_bits = max(largest_bits, MagnitudeBits(values[i]));
  const Rounding rounding(__reduce_max_sync(kFullMask, largest_bits));
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= rounding.Of(values[i]) << (8 * i);
  *reinterpret_cast<uint32_t*>(FourOf(to, row, group, lane)) = word;
  if (lane == 0) to.Scale(row, group) = rounding.scale;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ROUNDED_ROWS_CUH_

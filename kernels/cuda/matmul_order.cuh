// Where a product's left operand lies in order (matmul.h), for those who write it: matmul.cu, layer_ops.cu.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_ORDER_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_ORDER_CUH_

#include "kernels/cuda/matmul.h"

namespace winnow::kernels::cuda {

inline constexpr int32_t kPanelRows = 64;
inline constexpr int32_t kPanelBytes = kPanelRows * 128;  // 64 rows of 64 columns

// Eight values of a row, of a slice of kOrderedSlice columns: the pairs 2c and 2c + 1 of every eight.
__device__ __forceinline__ void PutOrdered(uint4* ordered, bool panels, int32_t slices, int64_t row,
                                           int32_t slice, int c, const uint32_t (&pairs)[4]) {
  if (!panels) {
    ordered[(row / 8 * slices + slice) * 32 + row % 8 * 4 + c] =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
  uint32_t* words =
      reinterpret_cast<uint32_t*>(ordered) +
      ((row / kPanelRows * ((slices + 1) / 2) + slice / 2) * kPanelRows + row % kPanelRows) * 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) words[((slice % 2 * 4 + i) ^ (row % 8)) * 4 + c] = pairs[i];
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_ORDER_CUH_

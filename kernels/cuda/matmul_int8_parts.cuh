// Shared by products of W8A8: matmul_int8.cu and matmul_int8_wgmma.cu; no one else includes it.
//
// W lies as the rows that it meets (rounded_rows.cuh): panels [ceil(out / 64)][groups] of 64 outputs, but for their scales, which are
// [4][8][2]: those of outputs i and i + 8 of 16 side by side, as a thread wants them.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_INT8_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_INT8_PARTS_CUH_

#include "kernels/cuda/matmul_int8.h"
#include "kernels/cuda/matmul_parts.cuh"
#include "kernels/cuda/rounded_rows.cuh"

namespace winnow::kernels::cuda {

inline constexpr int32_t kGroupSlices = 4;  // of 32 inner values, a matrix instruction's
static_assert(kGroupValues == kGroupSlices * 32);

struct Int8Operands {
  Operands product;  // x: rounded rows
  const uint8_t* w;
  int32_t groups;
  int32_t unused = 0;
  // In place of y: silu(gate) * up, rounded; or no panels. W is gates, then ups.
  RoundedRows gated = {};
  // In place of w: each of these tiles of rows has its own. Of m rows, those past the last tile are nobody's.
  RowTiles of_rows = {};
};

// The place of the scales of outputs i and i + 8, of the tile-th 16, in a panel of W.
__host__ __device__ constexpr int32_t WScalesAt(int tile, int i) {
  return kIntegerBytes + (tile * 8 + i) * static_cast<int>(sizeof(float2));
}

// Adds a group's products of a thread, of outputs i and i + 8 and two rows, to its sums.
__device__ __forceinline__ void AddGroup(const int32_t (&products)[4], float2 of_outputs,
                                         float2 of_rows, float (&sums)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float scale =
        __fmul_rn(e < 2 ? of_outputs.x : of_outputs.y, e % 2 == 0 ? of_rows.x : of_rows.y);
    sums[e] = __fmaf_rn(__int2float_rn(products[e]), scale, sums[e]);
  }
}

// REQUIRES: HasInt8GroupMatmul(); for `gated` what GatesRounded() says.
[[nodiscard]] cudaError_t MatmulInt8ByGroups(const Int8Operands& operands, Stream stream);
// REQUIRES: HasInt8GroupMatmul(), and operands.of_rows, tiles of 8, 64 or 128 rows.
[[nodiscard]] cudaError_t MatmulInt8OfTiles(const Int8Operands& operands, int32_t tile_rows,
                                            Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_INT8_PARTS_CUH_

// Layout of a product's operands. x in its orders (matmul.h), for those who write it: matmul.cu, layer_ops.cu. W, for
// all kernels of kTensor:
//
//   [ceil(out / 16)][slices] tiles of 1 KiB, 16 outputs by 32 inner values: a row of 64 bytes is an output; its i-th 16
//   bytes, eight inner values, lie as its i ^ (row / 2 % 4)-th
//
// So matrix instructions of a warpgroup read tiles as they are (wgmma.cuh), ldmatrix makes fragments of them without bank
// conflicts, and the tiles of 16 outputs are one piece of memory, which is what streaming them wants.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_ORDER_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_ORDER_CUH_

#include "kernels/cuda/device_math.cuh"
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

// A tile of W, and where a piece of 16 bytes of a row lies in it, in pieces.
inline constexpr int32_t kWTilePieces = 64;
inline constexpr int32_t kWTileBytes = kWTilePieces * 16;
__device__ __forceinline__ int WPiece(int row, int piece) {
  return row * 4 + (piece ^ (row / 2 % 4));
}

// Fragments of the matrix instruction m16n8k16 of a tile: of its first 16 inner values and of its last.
struct WFragments {
  uint32_t of[2][4];
};
// Byte offset in a tile of the row that a lane names to ldmatrix, for the first half (0) or the second (1).
__device__ __forceinline__ uint32_t WFragmentAt(int lane, int half) {
  return WPiece(lane % 16, half * 2 + lane / 16) * 16;
}
__device__ __forceinline__ WFragments LoadWFragments(uint32_t tile, int lane) {
  WFragments w;
#pragma unroll
  for (int half = 0; half < 2; ++half) LoadMatrix4(tile + WFragmentAt(lane, half), w.of[half]);
  return w;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_ORDER_CUH_

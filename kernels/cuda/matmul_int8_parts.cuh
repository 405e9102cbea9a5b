// Shared by products of W8A8 and W4A8: matmul_int8.cu, matmul_int8_wgmma.cu and matmul_int4_stream.cu; no one else includes it.
//
// W lies as the rows that it meets (rounded_rows.cuh): panels [ceil(out / 64)][groups] of 64 outputs, but for their scales, which are
// [4][8][2]: those of outputs i and i + 8 of 16 side by side, as a thread wants them.
//
// A panel of integers of 4 bits is four tiles of 16 outputs, each with its scales behind it, [8][2], and words in place of rows, as a
// lane of a matrix instruction wants them: [2][32 lanes][4]. A lane's i-th of eight words has, of output lane / 4 + 8 * (i % 2),
// four values from column i / 2 * 32 + 4 * (lane % 4) on in the upper halves of its bytes, and those 16 columns further in
// the lower ones. A byte with its other half cleared is 16 times the integer, with its sign, so scales there are a sixteenth.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_INT8_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_INT8_PARTS_CUH_

#include "kernels/cuda/matmul_int8.h"
#include "kernels/cuda/matmul_parts.cuh"
#include "kernels/cuda/rounded_rows.cuh"

namespace winnow::kernels::cuda {

inline constexpr int32_t kFourBitTileOutputs = 16;
inline constexpr int32_t kFourBitScalesAt = kFourBitTileOutputs * kGroupValues / 2;  // in a tile
inline constexpr int32_t kFourBitTileBytes = kFourBitScalesAt + kFourBitTileOutputs * 4;
inline constexpr int32_t kFourBitPanelBytes = kPanelRows / kFourBitTileOutputs * kFourBitTileBytes;
constexpr int32_t WPanelBytes(int32_t integer_bits) {
  return integer_bits == 4 ? kFourBitPanelBytes : kRoundedPanelBytes;
}
inline constexpr float kFourBitUnit = 16.0f;

// The place of word i of a lane in a tile.
__host__ __device__ constexpr int32_t FourBitWordAt(int lane, int i) {
  return (i / 4 * 32 + lane) * 16 + i % 4 * 4;
}
// Fragments of one instruction, of 32 columns, of a lane's two words.
__device__ __forceinline__ void FourBitFragments(uint32_t first, uint32_t second,
                                                 uint32_t (&a)[4]) {
  constexpr uint32_t kUpper = 0xf0f0f0f0u;
  a[0] = first & kUpper;
  a[1] = second & kUpper;
  a[2] = (first << 4) & kUpper;
  a[3] = (second << 4) & kUpper;
}

inline constexpr int32_t kGroupSlices = 4;  // of 32 inner values, a matrix instruction's
static_assert(kGroupValues == kGroupSlices * 32);

struct Int8Operands {
  Operands product;  // x: rounded rows
  const uint8_t* w;
  int32_t groups;
  int32_t integer_bits = 8;
  // In place of y: silu(gate) * up, rounded; or no panels. W is gates, then ups.
  RoundedRows gated = {};
  // In place of w: each of these tiles of rows has its own. Of m rows, those past the last tile are nobody's.
  RowTiles of_rows = {};
};

// The place of the scales of outputs i and i + 8, of the tile-th 16, behind a panel's integers.
__host__ __device__ constexpr int32_t WScalesAt(int tile, int i) {
  return (tile * 8 + i) * static_cast<int>(sizeof(float2));
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

// REQUIRES: HasInt8GroupMatmul(), and up to kFourBitRows rows of 4 bits; for `gated` what GatesRounded() says.
[[nodiscard]] cudaError_t MatmulInt8ByGroups(const Int8Operands& operands, Stream stream);
// One row or two with integers of 4 bits (matmul_int4_stream.cu), on Hopper.
inline constexpr int64_t kInt4StreamRows = 2;
bool StreamsInt4(int64_t m, int64_t in);
// REQUIRES: StreamsInt4().
[[nodiscard]] cudaError_t MatmulInt4Stream(const Int8Operands& operands, Stream stream);
// REQUIRES: HasInt8GroupMatmul(), and operands.of_rows, tiles of 8, 64 or 128 rows, of 4 bits 8 or 64.
[[nodiscard]] cudaError_t MatmulInt8OfTiles(const Int8Operands& operands, int32_t tile_rows,
                                            Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_INT8_PARTS_CUH_

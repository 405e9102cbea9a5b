// What the files of the matrix product share; no one else includes it.
//
//   matmul.cu        kTensor: few rows, many rows
//   matmul_batch.cu  kTensor: the rows of a batch on Hopper
//   matmul_wgmma.cu  kTensor: many rows on Hopper
//   matmul_blocks.cu kBlocks: few rows, W on its way into that order and out of it
//   matmul_blocks_batch.cu   kBlocks: the rows of a batch on Hopper
//   matmul_blocks_wgmma.cu   kBlocks: many rows on Hopper
//   matmul_exact.cu  kExact, and plain W on its way into either order
//   matmul_int8.cu   kInt8: any device, W on its way, rows that are rounded; matmul_int8_wgmma.cu: on Hopper
//   matmul_int4_stream.cu    kInt8 with integers of 4 bits: one row or two on Hopper
#ifndef WINNOW_KERNELS_CUDA_MATMUL_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_PARTS_CUH_

#include "kernels/cuda/matmul.h"
#include "kernels/cuda/matmul_order.cuh"
#include "kernels/cuda/silu.cuh"

namespace winnow::kernels::cuda {

inline constexpr int kLanes = 32;

// Shared memory that lets two blocks stay on a multiprocessor of Hopper: less a KiB of the system's each.
inline constexpr int kHalfSharedBytes = 113 * 1024;

__host__ __device__ inline int32_t SlicesOf(int64_t in) {
  return static_cast<int32_t>((in + kOrderedSlice - 1) / kOrderedSlice);
}

// What the sums become; one expression for every way here (matmul_wgmma.cu has it in steps).
__device__ __forceinline__ void Finish(float sum, int32_t output, int32_t row, const float* bias,
                                       bool accumulate, float* y, int64_t y_stride) {
  if (bias != nullptr) sum = __fadd_rn(sum, bias[output]);
  float* to = y + row * y_stride + output;
  *to = accumulate ? __fadd_rn(sum, *to) : sum;
}

// A product of way kTensor, or kBlocks.
struct Operands {
  const uint4* w;       // of kTensor: [out / 16][slices] tiles (matmul_order.cuh)
  const uint4* x;       // in order; or null, and
  const float* x_rows;  // [m][in], as they are
  int64_t x_stride;
  int32_t slices, slices_per_segment;
  int32_t out, m;
  float* y;
  int64_t y_stride;
  // In place of y, where GatesProducts(); or null. W is gates, then ups: silu(gate) * up in panels.
  uint32_t* gated;
  const float* bias;
  bool accumulate;
  bool
      new_weights;  // the kernel before may have written W: nothing of it is read before that has ended
  bool unused[6];

  // Segments at the end that have no slices. The kernels for few rows add their zeros, which changes
  // no sum but one of -0.
  __device__ __forceinline__ bool HasEmptySegments() const {
    return (slices + slices_per_segment - 1) / slices_per_segment < kMatmulSegments;
  }
};

// Tiles of rows that have a W each (MatmulTiles of matmul.h), in kernels whose blocks take one tile after the other. Without a
// count there is one W for all rows. They can be read before WaitForEarlier(), by which W is on its way when its rows come:
// Count() waits for whoever writes them, and the rest comes from L2.
struct RowTiles {
  const int32_t* count;
  const void* const* w;

  __device__ __forceinline__ int32_t Count() const {
    int32_t tiles;
    do {
      asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(tiles) : "l"(count) : "memory");
    } while (tiles == 0);
    return tiles;
  }
  __device__ __forceinline__ const void* W(int32_t tile) const {
    return reinterpret_cast<const void*>(
        __ldcg(reinterpret_cast<const unsigned long long*>(w + tile)));
  }
};
// Numbers of a tile of outputs and of one of rows. Of few rows, which stay in L2, the first outputs of all come first, so that those
// of one expert read its W at about the same time; of many rows all outputs of some, so that rows are read once.
struct TileOfRows {
  int32_t outputs, rows;

  __device__ __forceinline__ TileOfRows(int32_t tile, int32_t row_tiles, int32_t output_tiles,
                                        bool many) {
    const int32_t inner = many ? output_tiles : row_tiles;
    const int32_t outer = tile / inner, rest = tile - outer * inner;
    outputs = many ? rest : outer;
    rows = many ? outer : rest;
  }
};
// A product of one of these tiles of rows; `rows`: its first.
__device__ __forceinline__ Operands OfRowTile(const Operands& args, int32_t rows) {
  Operands product = args;
  product.y += int64_t{rows} * args.y_stride;
  return product;
}

__device__ __forceinline__ void MultiplyAddTile(float (&sums)[4], const WFragments& w,
                                                const uint4& x) {
  MultiplyAdd16x8x16(sums, w.of[0], x.x, x.y);
  MultiplyAdd16x8x16(sums, w.of[1], x.z, x.w);
}
// The segments' sums of a tile, from left to right, and what becomes of them. A warp takes every
// eighth tile of rows, beginning with its own number.
template <int kRowTiles>
__device__ __forceinline__ void AddSegments(
    const float4 (&parts)[kMatmulSegments][kRowTiles][kLanes], const Operands& args, int32_t tile,
    int warp, int lane) {
  for (int i = warp; i < kRowTiles; i += kMatmulSegments) {
    float4 total = parts[0][i][lane];
#pragma unroll
    for (int s = 1; s < kMatmulSegments; ++s) {
      const float4 part = parts[s][i][lane];
      total.x = __fadd_rn(total.x, part.x);
      total.y = __fadd_rn(total.y, part.y);
      total.z = __fadd_rn(total.z, part.z);
      total.w = __fadd_rn(total.w, part.w);
    }
    const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t output = tile * 16 + lane / 4 + j / 2 * 8;
      const int32_t row = i * 8 + lane % 4 * 2 + j % 2;
      if (output < args.out && row < args.m) {
        Finish(values[j], output, row, args.bias, args.accumulate, args.y, args.y_stride);
      }
    }
  }
}

// Adds the bias of a thread's outputs, `output` of its values (0, 1) and `other` of (2, 3), if they exist, to all of its tiles of rows.
template <int kRowTiles>
__device__ __forceinline__ void AddBias(const Operands& args, int32_t output, int32_t other,
                                        float (&values)[kRowTiles][4]) {
  if (args.bias == nullptr) return;
  const float bias[2] = {output < args.out ? args.bias[output] : 0.0f,
                         other < args.out ? args.bias[other] : 0.0f};
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[j][e] = __fadd_rn(values[j][e], bias[e / 2]);
  }
}

// A thread's values of a tile to y; kWhole: all of them exist. What is added to is read sixteen at a time, so that
// they do not wait for one another.
template <bool kWhole, int kRowTiles>
__device__ __forceinline__ void WriteTile(const Operands& args, int32_t output, int32_t row,
                                          float (&values)[kRowTiles][4]) {
  constexpr int kAtOnce = 4;
  float* y = args.y + row * args.y_stride + output;
  const auto exists = [&](int j, int e) {
    return j < kRowTiles &&
           (kWhole || (row + j * 8 + e % 2 < args.m && output + e / 2 * 8 < args.out));
  };
#pragma unroll
  for (int first = 0; first < kRowTiles; first += kAtOnce) {
    float* const at[2] = {y + first * 8 * args.y_stride, y + (first * 8 + 1) * args.y_stride};
    if (args.accumulate) {
      float before[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          before[i][e] = 0.0f;
          if (exists(first + i, e)) before[i][e] = at[e % 2][i * 8 * args.y_stride + e / 2 * 8];
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (first + i < kRowTiles) {
            values[first + i][e] = __fadd_rn(values[first + i][e], before[i][e]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (exists(first + i, e)) {
          at[e % 2][i * 8 * args.y_stride + e / 2 * 8] = values[first + i][e];
        }
      }
    }
  }
}

// A thread's gates (0, 1) and ups (2, 3) of a tile, to panels (matmul.h). A warp's are eight columns from `column` on, those of a tile
// of rows one matrix, which is transposed so that a lane has neighbours of a row. No branch surrounds that: what comes after one
// in which lanes may part is not known to be the same in all of a warp, and the addresses of matrix instructions, with much
// else of the loop above, would be computed by each lane.
template <int kRowTiles>
__device__ __forceinline__ void WriteGated(const Operands& args, uint32_t column,
                                           uint32_t first_row, int lane,
                                           const float (&values)[kRowTiles][4]) {
  const uint32_t columns = args.out / 2, panels = (columns + 63) / 64;  // side by side
  uint32_t pairs[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    pairs[j] = Transposed8x8(
        PackBf16(SiluOf(values[j][0], values[j][2]), SiluOf(values[j][1], values[j][3])));
  }
  // Now row lane / 4 of each tile of rows, and a pair of its columns.
  const uint32_t word = lane / 4 * 32 + ((column / 8 % 8) ^ (lane / 4)) * 4 + lane % 4;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    const uint32_t row = first_row + j * 8;
    const uint64_t panel = uint64_t{row / kPanelRows} * panels + column / 64;
    if (row + lane / 4 < args.m && column < columns) {
      args.gated[(panel * kPanelRows + row % kPanelRows) * 32 + word] = pairs[j];
    }
  }
}
// The place in W of a tile's `index`-th 16 outputs, of the last ones that exist where its own do not; T::kWTiles: of a tile. Of a
// gated one half are gates and half ups.
template <typename T>
__device__ __forceinline__ int32_t WTileOf(const Operands& args, int32_t tile, int index) {
  if (args.gated == nullptr) return min(tile * T::kWTiles + index, (args.out + 15) / 16 - 1);
  const int32_t gates = args.out / 32;  // and as many of ups
  return min(tile * (T::kWTiles / 2) + index % (T::kWTiles / 2), gates - 1) +
         index / (T::kWTiles / 2) * gates;
}

// Shared memory in which two warps exchange what GateTile() gates.
constexpr uint32_t GateBytes(int row_tiles) {
  return static_cast<uint32_t>(row_tiles) * kLanes * 16;
}
// A tile's sums of two warps, one with 16 gates, from `column` on, the other (`ups`) with the ups that belong to them, with
// bias and gated. The first takes the first half of their rows, from `first_row` on, the second the other half. `memory`: theirs,
// GateBytes() at a multiple of 16. `meet()` is a barrier for both and for all who read what lies there before.
template <int kRowTiles, typename Meet>
__device__ __forceinline__ void GateTile(const Operands& args, int32_t column, int32_t first_row,
                                         bool ups, uint32_t memory, float (&totals)[kRowTiles][4],
                                         const Meet& meet) {
  constexpr int kHalf = kRowTiles / 2;
  static_assert(kRowTiles % 2 == 0);
  const int lane = threadIdx.x % kLanes;
  // Those of columns that do not exist are nobody's.
  const int32_t output = column + lane / 4 + (ups ? args.out / 2 : 0);
  AddBias(args, output, output + 8, totals);
  const auto at = [&](bool of_ups, int j) {
    return memory + (((of_ups ? kHalf : 0) + j) * kLanes + lane) * 16;
  };
  meet();
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    float given[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) given[e] = ups ? totals[j][e] : totals[kHalf + j][e];
    StoreShared(at(ups, j), given);
  }
  meet();
  float left[kHalf][4], right[kHalf][4];  // eight columns each
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    float taken[4];
    LoadShared(at(!ups, j), taken);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float mine = ups ? totals[kHalf + j][e] : totals[j][e];
      float(&to)[4] = e < 2 ? left[j] : right[j];
      to[e % 2] = ups ? taken[e] : mine;
      to[2 + e % 2] = ups ? mine : taken[e];
    }
  }
  const int32_t row = first_row + (ups ? kHalf * 8 : 0);
  WriteGated(args, column, row, lane, left);
  WriteGated(args, column + 8, row, lane, right);
}

// Whether m rows are a batch's, where the code that runs on the current device has what those need.
bool TakesBatchMatmul(int64_t m, int64_t out);
// Whether MatmulOfBatch() has a kernel that gates them. REQUIRES: TakesBatchMatmul(), and whole slices of gates.
bool GatesBatchMatmul(int64_t m, int64_t out);
// REQUIRES: TakesBatchMatmul(), and x in panels; for `gated` GatesBatchMatmul() too.
[[nodiscard]] cudaError_t MatmulOfBatch(const Operands& operands, Stream stream);

// Whether the code that runs on the current device has the matrix instructions of Hopper.
bool HasGroupMatmul();
// REQUIRES: HasGroupMatmul(), and x in panels; for `gated` what GatesProducts() says.
[[nodiscard]] cudaError_t MatmulManyRowsByGroups(const Operands& operands, Stream stream);

// REQUIRES: kBlocks, and StreamsBlocks(m, w); for `gated` GatesBlocks() too. operands.w is not read.
[[nodiscard]] cudaError_t MatmulBlocks(const Operands& operands, const DeviceWeights& w,
                                       Stream stream);
// Whether MatmulBlocks() has a kernel that gates m rows. REQUIRES: m > kMatmulFewRows, StreamsBlocks(m, w), and whole slices of gates.
bool GatesBlocks(int64_t m, const DeviceWeights& w);

// MatmulTiles() of matmul.h; `most`: how many tiles there are at most. Of up to kMatmulFewRows rows `operands.m` is a tile's, of
// more that of all.
[[nodiscard]] cudaError_t MatmulBlocksOfTiles(const Operands& operands, const RowTiles& rows,
                                              int64_t most, const DeviceWeights& w, Stream stream);

// Whether the current device has the kernels of matmul_int8_wgmma.cu.
bool HasInt8GroupMatmul();
// MatmulTiles() of kInt8; args.m is that of all tiles. REQUIRES: HasInt8GroupMatmul().
[[nodiscard]] cudaError_t MatmulRoundedTiles(const MatmulArgs& args, const DeviceWeights& w,
                                             const void* rounded, const RowTiles& rows,
                                             int32_t tile_rows, Stream stream);
// And of kTensor, for tiles of 64 or 128 rows. REQUIRES: HasGroupMatmul().
[[nodiscard]] cudaError_t MatmulTilesByGroups(const Operands& operands, const RowTiles& rows,
                                              int32_t tile_rows, Stream stream);

// REQUIRES: kExact, and m >= 1.
[[nodiscard]] cudaError_t MatmulExact(const MatmulArgs& args, const DeviceWeights& w,
                                      Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_PARTS_CUH_

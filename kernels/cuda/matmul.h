// Matmul (backend.h, kernels/matmul.h) on the device: y = x Wᵀ (+ bias) (+ y).
//
//   x [m][in] f32, y [m][out] f32, rows `stride` floats apart; bias [out]
//   W packed by PackMatrix, in memory of the caller
//
// Four ways to compute, chosen when W is packed:
//
//   kTensor   x rounded to bfloat16, W bfloat16: tensor cores, float32 sums. Compute kBF16.
//   kExact    x as it is, W in the type it has, widened: one chain of fused multiply-adds per element
//             of y in ascending order of the inner dimension, as kernels/matmul.h says, so the same
//             bits as the CPU's. Computes kF32 and kF16.
//   kBlocks   x rounded to bfloat16, W in quantised blocks (block_order.h) whose values are widened to float32 and rounded
//             to bfloat16: the bits of kTensor with that W, for any number of rows.
//   kInt8     both rounded to integers, W8A8 and W4A8 (matmul_int8.h, which has its kernels).
//
// Batch invariance, by construction. kTensor: the inner dimension is cut into kMatmulSegments
// segments, which follow from `in` alone; a segment's sum is one chain of matrix instructions of 16
// inner values each, in ascending order, in which W is always the left operand and x always the
// right one; segments are added from left to right. The kernels for few rows, for a batch's and for many
// differ in which chains run side by side and in nothing else. (That an element of a matrix instruction does
// not depend on its place in the tile, nor on whether a warp or a warpgroup executes it, is what the
// hardware does: wgmma.cuh says what was compared, tests/cuda/matmul_test.cc checks it.) There is no
// cuBLAS here for that reason: its kernel and its split of the inner dimension may change with m.
//
// Rows, and the kernels of kTensor that take them:
//
//   1 to 16                       StreamKernel (matmul.cu; Hopper)
//   to kMatmulFewRows             FewRowsKernel (matmul.cu)
//   to kMatmulBatchRows           matmul_batch.cu (Hopper; from 65 rows on only up to 512 outputs a multiprocessor)
//   more, and what is left over   matmul_wgmma.cu (Hopper, from 65 rows on), ManyRowsKernel (matmul.cu)
//
// Gates and ups of more than kMatmulFewRows rows need not be in memory: MatmulGated().
//
// Products of kBlocks have kernels of their own for up to kMatmulFewRows rows (matmul_blocks.cu; Hopper) and for up to
// kMatmulBatchRows (matmul_blocks_batch.cu; Hopper, most shapes), and for more where making weights anew for each tile of rows
// costs less than widening them (matmul_blocks_wgmma.cu; Hopper, fewer shapes). For the rest, and on other devices, the caller
// widens outputs by WidenBlocks and multiplies by those.
//
// Cost: matmul.h's. Few rows and a batch's read W once, from HBM; more rows read it once per 128 rows
// (Hopper: 256, 352 or 384), and x once per 128 outputs, a batch of more than 64 per 64 outputs, from L2. Few rows and a batch's of
// kBlocks read the blocks once (bytes: block_order.h), many rows of it once per 128 or 176 rows, and x once per 256 outputs; widening
// reads the blocks and writes 2 bytes a weight.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_H_
#define WINNOW_KERNELS_CUDA_MATMUL_H_

#include "kernels/cuda/device_types.h"
#include "kernels/quantized.h"

namespace winnow::kernels::cuda {

inline constexpr int32_t kMatmulSegments = 8;
inline constexpr int32_t kMatmulFewRows = 32;
inline constexpr int32_t kMatmulBatchRows = 128;

struct DeviceWeights {
  enum class Way : uint8_t { kTensor, kExact, kBlocks, kInt8 };
  const void* data = nullptr;
  int64_t out = 0, in = 0;
  Way way = Way::kTensor;
  DType storage = DType::kBF16;         // of `data`
  WeightType type = WeightType::kBF16;  // of kBlocks and kInt8
  int32_t integer_bits = 8;             // of kInt8, as they lie: 8, or 4
};

// kTensor stores bf16. kExact stores `storage` as it is. Of kBlocks BlockBytes (block_order.h) says it, of kInt8 Int8WeightBytes.
size_t PackedMatrixBytes(int64_t out, int64_t in, DeviceWeights::Way way, DType storage);

// Puts rows [first_row, first_row + rows) of W in place, from `source` [rows][in] of `dtype` in
// device memory. REQUIRES: `packed` was zeroed once; for kExact, dtype == storage or storage is f32.
[[nodiscard]] cudaError_t PackRows(const void* source, DType dtype, int64_t first_row, int64_t rows,
                                   const DeviceWeights& packed, Stream stream);

// The same of kBlocks; `source`: rows of blocks as a file has them, one behind the other, at any address. REQUIRES:
// `packed` was zeroed once; no NaN among 8-bit floats.
[[nodiscard]] cudaError_t PackBlocks(const std::byte* source, int64_t first_row, int64_t rows,
                                     const DeviceWeights& packed, Stream stream);
// Outputs [first_output, first_output + outputs) of kBlocks as a matrix of kTensor at `to`, PackedMatrixBytes of them; what
// lies past the last output is undefined where outputs end before the matrix does. REQUIRES: first_output a multiple of 16.
[[nodiscard]] cudaError_t WidenBlocks(const DeviceWeights& w, int64_t first_output, int64_t outputs,
                                      void* to, Stream stream);
// Whether products of m rows with W of kBlocks have a kernel on the current device, and that is the fastest way: for more than
// kMatmulFewRows only where segments of W are whole panels of 64 inner values, for more than kMatmulBatchRows only where they are
// an even number of those, and up to a number of rows that depends on the type.
bool StreamsBlocks(int64_t m, const DeviceWeights& w);

// x in the order in which kTensor and kBlocks read it, or rounded rows of kInt8; none for kExact. Need not be zeroed.
size_t MatmulWorkspaceBytes(int64_t m, const DeviceWeights& w);

// That order: x rounded to bfloat16, zeros past the last column of a row up to a whole slice of 32; what
// lies past the last row does not matter. There are two (matmul_order.cuh):
//   tiles   up to kMatmulFewRows rows: [ceil(m / 8)][slices] of 8 rows by 32 columns. In a tile 16 bytes
//           each of row r, for c in 0..3 in turn: columns 2c and 2c + 1 of every eight
//   panels  more: [ceil(m / 64)][ceil(slices / 2)] of 64 rows by 64 columns. In a panel rows of 128
//           bytes; eight columns, 16 bytes, lie as the i ^ (row % 8)-th of their row instead of the i-th
inline constexpr int32_t kOrderedSlice = 32;
inline bool OrderedInPanels(int64_t m) { return m > kMatmulFewRows; }
size_t OrderedBytes(int64_t m, int64_t in);

struct MatmulArgs {
  const float* x = nullptr;
  int64_t x_stride = 0;
  int64_t m = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;
  bool accumulate = false;
  // Only kernels that any device has, for tests and benchmarks: the same bits.
  bool portable = false;
  // W was written on the same stream, and not while a model was loaded: kernels read it when those before have ended.
  bool new_weights = false;
  bool unused[5] = {};
};
// REQUIRES, of both: for kBlocks StreamsBlocks(m, w), and not `portable`.
[[nodiscard]] cudaError_t Matmul(const MatmulArgs& args, const DeviceWeights& w, void* workspace,
                                 Stream stream);
// x in order, for MatmulOrdered. REQUIRES: OrderedBytes at `ordered`.
[[nodiscard]] cudaError_t OrderRows(const float* x, int64_t stride, int64_t m, int64_t in,
                                    void* ordered, Stream stream);
// The same product of an x that lies in order; args.x is not read. REQUIRES: kTensor or kBlocks.
[[nodiscard]] cudaError_t MatmulOrdered(const MatmulArgs& args, const DeviceWeights& w,
                                        const void* ordered, Stream stream);

// Products of tiles of rows that have a W each, as many tiles as `count` says: what rows have of experts (experts.h). The bits of
// Matmul with that W. Tiles have kMatmulTileRows rows, or more: 32 with kBlocks, 64 or 128 with kTensor and kInt8 (of 4 bits 64).
inline constexpr int32_t kMatmulTileRows = 8;
inline constexpr int64_t kMostTiledRows = int64_t{1} << 18;  // of all tiles
struct TiledMatmulArgs {
  // OrderedTilesBytes: rows in order, or rounded, those of a tile after those of the one before.
  const void* x = nullptr;
  float* y = nullptr;  // [tiles * tile_rows][out]
  int64_t y_stride = 0;
  // In device memory, as is w: 0 until whoever writes both has done so, which is waited for. Such a kernel must have been launched.
  const int32_t* count = nullptr;
  const void* const* w = nullptr;  // [count] W of each; where NeedsTileMaps() its map
  int64_t most = 0;                // tiles, at most
  int32_t tile_rows = kMatmulTileRows;
  // In place of y: silu(gate) * up in the order of the next product, where GatesTiles().
  void* gated = nullptr;
};
// Whether many rows of W's outputs alone keep the current device busy.
bool FillsDevice(const DeviceWeights& w);
// Whether W of this kind has such products on the current device.
bool MultipliesTiles(const DeviceWeights& w, int32_t tile_rows);
bool GatesTiles(const DeviceWeights& w, int32_t tile_rows);
size_t OrderedTilesBytes(int64_t tiles, int32_t tile_rows, const DeviceWeights& w);
// Whether rows of such tiles lie in panels; else in tiles of eight.
constexpr bool TilesInPanels(int32_t tile_rows) { return tile_rows > kMatmulFewRows; }
// Larger tiles of kTensor find W by a map of it, kTileMapBytes in device memory, aligned so; `gates`: of a product that gates.
inline constexpr size_t kTileMapBytes = 128;
constexpr bool NeedsTileMaps(DeviceWeights::Way way, int32_t tile_rows) {
  return way == DeviceWeights::Way::kTensor && tile_rows > kMatmulTileRows;
}
[[nodiscard]] bool MakeTileMap(const DeviceWeights& w, bool gates, std::byte* map);
// `w`: what all have in common; its data is not read. REQUIRES: MultipliesTiles(); for `gated` GatesTiles().
[[nodiscard]] cudaError_t MatmulTiles(const TiledMatmulArgs& args, const DeviceWeights& w,
                                      Stream stream);

// Whether products of m rows with W, the gates' outputs and then as many of ups, have a kernel on the current device that gates them:
// more than kMatmulFewRows rows, on Hopper, whole slices of gates; up to kMatmulBatchRows only where there are so many outputs that
// no tile of them is split (matmul_batch_parts.cuh), and of kBlocks only those.
bool GatesProducts(int64_t m, const DeviceWeights& w);
// silu(gate) * up of the same sums (silu.cuh), OrderedBytes(m, w.out / 2) at `gated` in the order of the product that reads it:
// the bits of MatmulOrdered() and SiluMulOrdered() after it, and gates and ups are never in memory. `args.x` and `args.y` are
// not used. REQUIRES: GatesProducts(), neither `accumulate` nor `portable`, `gated` aligned to 16 bytes.
[[nodiscard]] cudaError_t MatmulGated(const MatmulArgs& args, const DeviceWeights& w,
                                      const void* ordered, void* gated, Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_H_

// Tensor maps: by which the copy engine of Hopper finds a tile of a matrix, and swizzles it in shared memory.
#ifndef WINNOW_KERNELS_CUDA_TENSOR_MAP_H_
#define WINNOW_KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

namespace winnow::kernels::cuda {

// A row of a tile, and after how many rows the swizzle comes again: of row r the 16 bytes i lie at i ^ (r % 8).
inline constexpr int32_t kTensorTileRowBytes = 128;
inline constexpr int32_t kTensorSwizzleRows = 8;

// Of tiles of 64 values of 2 bytes by `tile_rows` (at most 256) in a matrix from `base` on, whose rows have `row_values`
// values and lie one after the other, 2^31 - 1 of them: what is asked for has to be there. `base` is a multiple of 16 bytes.
// False where the driver has no tensor maps, or refuses this one. Any thread; it is told to the driver alone, no device.
[[nodiscard]] bool MakeTensorMap(const void* base, int32_t row_values, int32_t tile_rows,
                                 CUtensorMap* map);

// Boxes of a matrix in tiles [tiles][slices] of `kTensorTileBytes`, some of both: [box_slices][box_tiles] in shared
// memory, one behind the other as they are. A box's place is {0, tile, slice}; of tiles that do not exist it has zeros.
inline constexpr int32_t kTensorTileBytes = 1024;
[[nodiscard]] bool MakeTilesMap(const void* base, int32_t tiles, int32_t slices, int32_t box_tiles,
                                int32_t box_slices, CUtensorMap* map);
// The same of a matrix whose first half of tiles are gates and whose second half are ups, `tiles` of each. A box has `box_tiles` of
// each, in halves of a tile (eight outputs) by turns: eight gates, then the eight ups that belong to them. Its place is
// {0, 0, 0, tile, slice}, and its order [box_slices][box_tiles][halves][gate, up].
[[nodiscard]] bool MakeGatedTilesMap(const void* base, int32_t tiles, int32_t slices,
                                     int32_t box_tiles, int32_t box_slices, CUtensorMap* map);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_TENSOR_MAP_H_

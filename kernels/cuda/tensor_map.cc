#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace winnow::kernels::cuda {
namespace {

// The one function of the driver that the runtime has no name for: asked for by name, so that no program links the
// driver and all run where there is none.
PFN_cuTensorMapEncodeTiled_v12000 FindEncode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = {};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                       &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

PFN_cuTensorMapEncodeTiled_v12000 Encode() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = FindEncode();
  return encode;
}

}  // namespace

bool MakeTilesMap(const void* base, int32_t tiles, int32_t slices, int32_t box_tiles,
                  int32_t box_slices, CUtensorMap* map) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = Encode();
  if (encode == nullptr) return false;
  // A tile is a row of values of 8 bytes, because a box has 256 of a row at most.
  constexpr cuuint32_t kValues = kTensorTileBytes / 8;
  const cuuint64_t size[3] = {kValues, static_cast<cuuint64_t>(tiles),
                              static_cast<cuuint64_t>(slices)};
  const cuuint64_t bytes[2] = {static_cast<cuuint64_t>(slices) * kTensorTileBytes,
                               kTensorTileBytes};
  const cuuint32_t box[3] = {kValues, static_cast<cuuint32_t>(box_tiles),
                             static_cast<cuuint32_t>(box_slices)};
  const cuuint32_t every[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_INT64, 3, const_cast<void*>(base), size, bytes, box,
                every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool MakeGatedTilesMap(const void* base, int32_t tiles, int32_t slices, int32_t box_tiles,
                       int32_t box_slices, CUtensorMap* map) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = Encode();
  if (encode == nullptr) return false;
  constexpr cuuint32_t kHalfBytes = kTensorTileBytes / 2, kValues = kHalfBytes / 8;
  const cuuint64_t tile_row = static_cast<cuuint64_t>(slices) * kTensorTileBytes;
  const cuuint64_t size[5] = {kValues, 2, 2, static_cast<cuuint64_t>(tiles),
                              static_cast<cuuint64_t>(slices)};
  const cuuint64_t bytes[4] = {static_cast<cuuint64_t>(tiles) * tile_row, kHalfBytes, tile_row,
                               kTensorTileBytes};
  const cuuint32_t box[5] = {kValues, 2, 2, static_cast<cuuint32_t>(box_tiles),
                             static_cast<cuuint32_t>(box_slices)};
  const cuuint32_t every[5] = {1, 1, 1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_INT64, 5, const_cast<void*>(base), size, bytes, box,
                every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool MakeTensorMap(const void* base, int32_t row_values, int32_t tile_rows, CUtensorMap* map) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = Encode();
  if (encode == nullptr) return false;
  constexpr cuuint64_t kRows = 0x7fffffff;  // as far as a place counts
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(row_values), kRows};
  const cuuint64_t row_bytes[1] = {2 * static_cast<cuuint64_t>(row_values)};
  const cuuint32_t tile[2] = {kTensorTileRowBytes / 2, static_cast<cuuint32_t>(tile_rows)};
  const cuuint32_t every[2] = {1, 1};
  // 256 bytes at a time cost a tenth of what HBM gives (dense_attention.cu).
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), size, row_bytes,
                tile, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace winnow::kernels::cuda

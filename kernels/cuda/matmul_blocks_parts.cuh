// Shared by products of quantised weights: few rows (matmul_blocks.cu), a batch's (matmul_blocks_batch.cu) and many
// (matmul_blocks_wgmma.cu); no one else includes it.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_BLOCKS_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_BLOCKS_PARTS_CUH_

#include "kernels/cuda/block_order.h"
#include "kernels/cuda/matmul_parts.cuh"

namespace winnow::kernels::cuda {

static_assert(kBlockSegments == kMatmulSegments && kSliceValues == kOrderedSlice);

struct BlockOperands {
  Operands product;  // w: none
  const std::byte* blocks;
  int64_t tile_bytes;
  int32_t segment_bytes, coarse;
};
inline BlockOperands BlockOperandsOf(const Operands& operands, const DeviceWeights& w) {
  const BlockOrder order = BlockOrderOf(BlockFormatOf(w.type), w.in);
  return {operands, static_cast<const std::byte*>(w.data), order.tile_bytes, order.segment_bytes,
          order.coarse};
}

// Calls f with the type whose kernels those of `type` are.
template <typename F>
cudaError_t WithBlockType(WeightType type, F f) {
  switch (type) {
#define WINNOW_TYPE(name) \
  case WeightType::name:  \
    return f.template operator()<WeightType::name>();
    WINNOW_TYPE(kQ4_0)
    WINNOW_TYPE(kQ4_1)
    WINNOW_TYPE(kQ5_1)
    WINNOW_TYPE(kQ8_0)
    WINNOW_TYPE(kQ4K)
    WINNOW_TYPE(kQ5K)
    WINNOW_TYPE(kQ6K)
    WINNOW_TYPE(kI4x32)
    WINNOW_TYPE(kI4x128)
    WINNOW_TYPE(kL4x32)
    WINNOW_TYPE(kF8x32)
    WINNOW_TYPE(kF8x128)
#undef WINNOW_TYPE
    case WeightType::kQ5_0:  // lies as Q8_0
      return f.template operator()<WeightType::kQ8_0>();
    case WeightType::kF32:
    case WeightType::kF16:
    case WeightType::kBF16:
    case WeightType::kI8x128:  // of kInt8
    case WeightType::kMxfp4:   // packed as F8x32
      break;
  }
  return cudaErrorInvalidValue;
}

// Whether a batch's m rows, more than kMatmulFewRows, have a kernel of their own on the current device.
bool TakesBlocksBatch(int64_t m, const DeviceWeights& w);
// REQUIRES: TakesBlocksBatch(), and x in panels.
[[nodiscard]] cudaError_t MatmulBlocksOfBatch(const Operands& operands, const DeviceWeights& w,
                                              Stream stream);

// The same of more rows than a batch's, where they have a kernel and it is faster than widening.
bool TakesBlocksOfManyRows(int64_t m, const DeviceWeights& w);
// REQUIRES: TakesBlocksOfManyRows(), and x in panels.
[[nodiscard]] cudaError_t MatmulBlocksOfManyRows(const Operands& operands, const DeviceWeights& w,
                                                 Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_BLOCKS_PARTS_CUH_

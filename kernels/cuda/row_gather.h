// Pieces of one size that lie anywhere in device and pinned host memory, copied to anywhere in either: many copies
// of a few KiB in one launch, and what the bus gives at best, which the benchmark measures FetchRows
// (row_cache.h) against.
//
// Reads what it does from device memory, so it needs no host inside a step.
#ifndef WINNOW_KERNELS_CUDA_ROW_GATHER_H_
#define WINNOW_KERNELS_CUDA_ROW_GATHER_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

// Copies row i of `sources` to `targets[i]`, i < *count, each of `row_bytes` (a multiple of 16;
// both 16-byte aligned). Sources or targets may lie in pinned host memory: the copy is done by loads of
// `num_blocks` blocks of 512 threads, which 16 blocks keep as busy as the bus allows, so that the
// other multiprocessors are free for what runs on another stream meanwhile.
//
// Moves row_bytes per row over the bus. Rows of neighbouring tokens should be neighbours in the
// list: over 16 GiB at random, translation of addresses costs two thirds of the speed.
inline constexpr int32_t kGatherBlocks = 16;
[[nodiscard]] cudaError_t GatherRows(const std::byte* const* sources, std::byte* const* targets,
                                     const int32_t* count, int32_t row_bytes, int32_t num_blocks,
                                     Stream stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ROW_GATHER_H_

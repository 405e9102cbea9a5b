// Between choosing tokens and attending to them (DESIGN 3.5, FETCH): tokens become addresses of
// rows, and rows that are in pinned host memory are copied into device memory.
//
// Both read what they do from device memory, so neither needs the host inside a step.
#ifndef WINNOW_KERNELS_CUDA_ROW_GATHER_H_
#define WINNOW_KERNELS_CUDA_ROW_GATHER_H_

#include "kernels/cuda/device_types.h"

namespace winnow::kernels::cuda {

// Lists of what each query and KV head attends to, ascending: the anchors before mid, the chosen
// tokens, the anchors after mid; all rows in `pool`, which may be device memory or the device's
// address of pinned host memory.
//
//   chosen  counts and tokens in device memory
//   rows    [num_queries][Hkv][capacity] addresses; lists [num_queries][Hkv] point into it
// REQUIRES: capacity >= the anchors and chosen tokens of each list.
// Reads 4 bytes and writes 8 per row.
[[nodiscard]] cudaError_t ResolveRows(const DeviceQuery* queries, int32_t num_queries,
                                      const Selection& chosen, const void* pool,
                                      const KvLayout& layout, int32_t capacity,
                                      const std::byte** rows, RowList* lists, cudaStream_t stream);

// Copies row i of `sources` to `targets[i]`, i < *count, each of `row_bytes` (a multiple of 16;
// both 16-byte aligned). Sources may lie in pinned host memory: the copy is done by loads of
// `num_blocks` blocks of 512 threads, which 16 blocks keep as busy as the bus allows, so that the
// other multiprocessors are free for what runs on another stream meanwhile.
//
// Moves row_bytes per row over the bus. Rows of neighbouring tokens should be neighbours in the
// list: over 16 GiB at random, translation of addresses costs two thirds of the speed.
inline constexpr int32_t kGatherBlocks = 16;
[[nodiscard]] cudaError_t GatherRows(const std::byte* const* sources, std::byte* const* targets,
                                     const int32_t* count, int32_t row_bytes, int32_t num_blocks,
                                     cudaStream_t stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ROW_GATHER_H_

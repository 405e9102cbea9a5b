// What the CUDA kernels take beside plain pointers: the descriptors of retrieval.h and backend.h as
// they lie in device memory. A kernel reads them when it runs, so a captured graph replays with
// whatever the descriptors then say; what fixes a grid (the number of queries, an upper bound of
// tokens) is an argument of its launcher.
//
// Every launcher of this folder
//   - only enqueues work on `stream` (stream.h): no allocation, no synchronisation, so it can be held back and
//     captured;
//   - takes device pointers (or pinned host memory, where its header says so);
//   - returns the first error of a launch and changes nothing if its arguments are refused
//     (cudaErrorInvalidValue: a shape that the kernel does not have);
//   - yields the same bits for a query alone and among others.
// Workspaces are sized by a function beside the launcher, aligned to 256 bytes, zeroed once by the
// caller with cudaMemset, and left ready for the next call of the same shape on the same stream. Where
// shapes vary, the caller zeroes the part that XZeroedPart() names before a call of another shape; a
// workspace without such a function need not be zeroed. A workspace serves one call at a time.
//
// KV is bfloat16, int8 or float8 here (kv_rows.cuh); CUDA has no float32 KV.
#ifndef WINNOW_KERNELS_CUDA_DEVICE_TYPES_H_
#define WINNOW_KERNELS_CUDA_DEVICE_TYPES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/stream.h"
#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"

namespace winnow::kernels::cuda {

// LetCudaKernelsStartEarly (backend.h).
inline bool kernels_start_early = true;

// retrieval.h's RetrievalQuery.
struct DeviceQuery {
  const int32_t* block_table = nullptr;
  int32_t row = 0;
  int32_t position = 0;
  TokenRange mid;
  int32_t k = 0;  // of candidates, where a selection is pruned; 0 <= k <= mid.size()
  int32_t least_key = 0;
  // 1: no kernel of this pass writes an index of mid, so that it may be read before the kernels ahead
  // have ended (launch.cuh).
  int32_t settled = 0;
};

// retrieval.h's KeySpan.
struct DeviceKeySpan {
  const int32_t* block_table = nullptr;  // of the KV pool
  TokenRange tokens;
  const int32_t* index_table = nullptr;  // of the index; never null
};

// backend.h's AttentionChunk.
struct DeviceChunk {
  const int32_t* block_table = nullptr;
  int32_t first_row = 0, num_tokens = 0, position = 0, window = 0;
};

// RowList and Selection are used as they are, with device pointers inside.

// Whether kernels have rows of this layout. Of 8-bit types four rows are copied together, because they are a multiple of 16
// bytes; and a warp writes a row's K, and its V, four codes a lane.
constexpr bool HasKvRows(const KvLayout& layout) {
  return layout.dtype == DType::kBF16 || (HasScales(layout.dtype) && layout.head_dim % 4 == 0 &&
                                          layout.head_dim <= 128 && layout.block_tokens % 4 == 0);
}

// The part of a workspace that must be zero when a call begins.
struct ZeroedPart {
  size_t offset = 0, size_bytes = 0;
};

constexpr size_t AlignUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
constexpr int64_t CeilDiv(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_DEVICE_TYPES_H_

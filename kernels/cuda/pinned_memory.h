// Host memory that the device reads and writes in place, at the host's own addresses: what KV beyond the
// device's memory lies in.
//
// Pinning is slow (16 GiB took cudaHostAlloc 10.6 s, LIMITS.md), because every page is cleared and
// looked up by one thread. So several threads each take a piece, fill it with huge pages and register
// it. Pieces are registered one by one: a copy by the runtime must not span two of them, which kernels
// and the host may.
//
// Tried and lost (H200): pages of 2 MiB that the driver makes (cuMemCreate on the host). Rows anywhere in
// 48 GiB come no faster from them, and making them takes eight times as long.
#ifndef WINNOW_KERNELS_CUDA_PINNED_MEMORY_H_
#define WINNOW_KERNELS_CUDA_PINNED_MEMORY_H_

#include <cstddef>

#include "kernels/tensor.h"

namespace winnow::kernels::cuda {

inline constexpr size_t kPinnedPieceBytes = size_t{256} << 20;

// Zeroed and aligned to 2 MiB. Null data() if the memory cannot be had, or not be pinned; whether as much
// is free as the machine has is for the caller to know, as pages are taken here and now.
// `threads` 0: as many as were measured to be good. `piece_bytes`: a multiple of 2 MiB.
Buffer AllocatePinned(int device, size_t size_bytes, int threads = 0,
                      size_t piece_bytes = kPinnedPieceBytes);

// memcpy, by several threads where it is worth it.
void CopyInParallel(void* to, const void* from, size_t size_bytes);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_PINNED_MEMORY_H_

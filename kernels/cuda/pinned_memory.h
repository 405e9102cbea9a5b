// Host memory that the device reads and writes in place, at the host's own addresses: what KV beyond the
// device's memory lies in.
//
// Pinning is slow (16 GiB took cudaHostAlloc 10.6 s, LIMITS.md), because every page is cleared and
// looked up by one thread. So several threads each take a piece. Two ways: pages of the process that are
// registered, which the device maps 4 KiB at a time, and pages that the driver makes, which it maps
// 2 MiB at a time. Pieces stand for themselves: a copy by the runtime must not span two of them, which
// kernels and the host may.
#ifndef WINNOW_KERNELS_CUDA_PINNED_MEMORY_H_
#define WINNOW_KERNELS_CUDA_PINNED_MEMORY_H_

#include <cstddef>

#include "kernels/backend.h"

namespace winnow::kernels::cuda {

enum class PinWay : uint8_t { kBest, kDriver, kRegistered };

// Zeroed and aligned to 2 MiB. Null data() if the memory cannot be had, or not be pinned; whether as much
// is free as the machine has is for the caller to know, as pages are taken here and now.
// `threads` and `piece_bytes` (a multiple of 2 MiB) 0: what was measured to be good. kBest: the driver's,
// or where it has none, registered.
Buffer AllocatePinned(int device, size_t size_bytes, PinWay way = PinWay::kBest, int threads = 0,
                      size_t piece_bytes = 0);

// memcpy, by several threads where it is worth it.
void CopyInParallel(void* to, const void* from, size_t size_bytes);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_PINNED_MEMORY_H_

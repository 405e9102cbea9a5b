// Where the time of a decode step goes, between kernels and inside them. A build with -DWINNOW_CUDA_TIMELINE=ON
// writes down the device's clock at the marks that block 0 of a kernel passes, and the backend, when it goes, appends them
// to the file that WINNOW_TIMELINE names; scripts/timeline.py makes a table of that, scripts/gpu.py timeline both. In any
// other build a mark is nothing.
//
// A mark costs its kernel some 0.1 us (a clock, an atomic addition and a store by one thread), and the clock ticks every 32 ns:
// medians of many layers say more than one of them.
#ifndef WINNOW_KERNELS_CUDA_TIMELINE_CUH_
#define WINNOW_KERNELS_CUDA_TIMELINE_CUH_

#ifdef WINNOW_CUDA_TIMELINE

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <memory>

#include "kernels/cuda/timeline.h"

namespace winnow::kernels::cuda::timeline {

// Of this source file, the last ones: nanoseconds << 13 | line << 1 | whether it waits there.
constexpr uint32_t kEvents = 1 << 16;
static __device__ uint64_t events[kEvents];
static __device__ uint32_t count;

__device__ __forceinline__ void Mark(uint32_t line, bool waits = false) {
  if ((threadIdx.x | blockIdx.x | blockIdx.y | blockIdx.z) != 0) return;
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  events[atomicAdd(&count, 1u) % kEvents] = now << 13 | line << 1 | (waits ? 1 : 0);
}

// A line for each: nanoseconds, file, line, 1 where it waits there.
static void Write(std::FILE* to) {
  const auto copy = std::make_unique<uint64_t[]>(kEvents);
  uint32_t written = 0;
  if (cudaMemcpyFromSymbol(&written, count, sizeof(written)) != cudaSuccess ||
      cudaMemcpyFromSymbol(copy.get(), events, sizeof(events)) != cudaSuccess) {
    std::fprintf(stderr, "timeline: %s: %s\n", __BASE_FILE__,
                 cudaGetErrorString(cudaGetLastError()));
    return;
  }
  for (uint32_t i = 0; i < (written < kEvents ? written : kEvents); ++i) {
    std::fprintf(to, "%llu %s %u %u\n", static_cast<unsigned long long>(copy[i] >> 13),
                 __BASE_FILE__, static_cast<unsigned>(copy[i] >> 1 & 0xfff),
                 static_cast<unsigned>(copy[i] & 1));
  }
}
static const bool is_registered = (writers.push_back(Write), true);

}  // namespace winnow::kernels::cuda::timeline

// `what` is read by scripts/timeline.py where it stands: a literal, on the mark's line.
#define WINNOW_TIMELINE_MARK(what) ::winnow::kernels::cuda::timeline::Mark(__LINE__)

#else

#define WINNOW_TIMELINE_MARK(what) static_cast<void>(0)

#endif  // WINNOW_CUDA_TIMELINE

#endif  // WINNOW_KERNELS_CUDA_TIMELINE_CUH_

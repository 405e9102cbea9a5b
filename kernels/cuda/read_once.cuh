// L2's policy for what nobody reads again soon, weights of few rows and codes that are scanned: it goes first, and what else
// lies there stays, the next kernels' instructions among it. (On an H200 selection by mass at 128K took 57 us of a layer, and 74 where
// weights came without it.)
#ifndef WINNOW_KERNELS_CUDA_READ_ONCE_CUH_
#define WINNOW_KERNELS_CUDA_READ_ONCE_CUH_

#include <cstdint>

namespace winnow::kernels::cuda {

__device__ __forceinline__ uint64_t ReadOnce() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_READ_ONCE_CUH_

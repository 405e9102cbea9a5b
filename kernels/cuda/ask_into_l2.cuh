// Memory that is asked for before it can be read, or is needed: a hint, so that it may be written meanwhile.
#ifndef WINNOW_KERNELS_CUDA_ASK_INTO_L2_CUH_
#define WINNOW_KERNELS_CUDA_ASK_INTO_L2_CUH_

#include <cstdint>

namespace winnow::kernels::cuda {

// All threads of the block call it. At most a line more than `count` floats.
__device__ __forceinline__ void AskIntoL2(const float* from, int64_t count) {
  constexpr int64_t kLineFloats = 32;
  for (int64_t at = threadIdx.x * kLineFloats; at < count; at += blockDim.x * kLineFloats) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ASK_INTO_L2_CUH_

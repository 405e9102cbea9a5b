// A prefix sum over the threads of a block, which places what they choose in order.
#ifndef WINNOW_KERNELS_CUDA_BLOCK_SCAN_CUH_
#define WINNOW_KERNELS_CUDA_BLOCK_SCAN_CUH_

#include <cstdint>

#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {

// Exclusive; *total is the sum. Of a block of kWarps warps; uses kWarps words of `shared`; begins and
// ends with a barrier.
template <int kWarps>
__device__ uint32_t BlockExclusiveScan(uint32_t x, uint32_t* shared, uint32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t inclusive = WarpInclusiveScan(x, lane);
  __syncthreads();
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += shared[w];
    all += shared[w];
  }
  *total = all;
  __syncthreads();
  return before + inclusive - x;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_BLOCK_SCAN_CUH_

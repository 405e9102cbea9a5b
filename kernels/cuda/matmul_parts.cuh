// What the files of the matrix product share; no one else includes it.
//
//   matmul.cu        kTensor: few rows, many rows
//   matmul_exact.cu  kExact, and W on its way into either order
#ifndef WINNOW_KERNELS_CUDA_MATMUL_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_PARTS_CUH_

#include "kernels/cuda/matmul.h"

namespace winnow::kernels::cuda {

inline constexpr int kLanes = 32;

__host__ __device__ inline int32_t SlicesOf(int64_t in) {
  return static_cast<int32_t>((in + kOrderedSlice - 1) / kOrderedSlice);
}

// What the sums become; one expression for every way here.
__device__ __forceinline__ void Finish(float sum, int32_t output, int32_t row, const float* bias,
                                       bool accumulate, float* y, int64_t y_stride) {
  if (bias != nullptr) sum = __fadd_rn(sum, bias[output]);
  float* to = y + row * y_stride + output;
  *to = accumulate ? __fadd_rn(sum, *to) : sum;
}

// REQUIRES: kExact, and m >= 1.
[[nodiscard]] cudaError_t MatmulExact(const MatmulArgs& args, const DeviceWeights& w,
                                      cudaStream_t stream);

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_PARTS_CUH_

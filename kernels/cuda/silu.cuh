// The gate of an MLP, for every kernel that computes it.
#ifndef WINNOW_KERNELS_CUDA_SILU_CUH_
#define WINNOW_KERNELS_CUDA_SILU_CUH_

namespace winnow::kernels::cuda {

// silu(gate) * up. The roundings are fixed, so that every kernel has the same.
__device__ __forceinline__ float SiluOf(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up);
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_SILU_CUH_

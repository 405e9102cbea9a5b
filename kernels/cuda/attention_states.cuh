// Attention states (kernels/attention_state.h) on the device: the same roundings wherever one is read or merged.
#ifndef WINNOW_KERNELS_CUDA_ATTENTION_STATES_CUH_
#define WINNOW_KERNELS_CUDA_ATTENTION_STATES_CUH_

#include <cstdint>

#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda {

// The natural logarithm of the sum of exp(score) over the keys of state `at`; minus infinity if it is of no keys.
__device__ __forceinline__ float MassOf(const float* states, int64_t at, int32_t head_dim) {
  const float* end = states + at * (head_dim + 2) + head_dim;
  constexpr float kLn2 = 0.6931471805599453f;
  return end[1] == 0.0f ? -INFINITY : __fmul_rn(__fadd_rn(end[0], log2f(end[1])), kLn2);
}

// The sum of a finished state, with the weight of its head's sink (kernels/attention_state.h). Null `sinks`: there are none.
__device__ __forceinline__ float SumWithSink(float sum, float max, const float* sinks,
                                             int32_t head) {
  if (sinks == nullptr) return sum;
  return __fadd_rn(sum, exp2f(__fsub_rn(__fmul_rn(sinks[head], kLog2E), max)));
}

// One channel of a state.
struct StateValue {
  float o, max, sum;
};
// That of both parts. A part of no keys leaves the other's bits.
__device__ __forceinline__ StateValue MergeValues(const StateValue& state, const StateValue& part) {
  if (part.sum == 0) return state;
  if (state.sum == 0) return part;
  const float max = fmaxf(state.max, part.max);
  const float keep = exp2f(state.max - max), add = exp2f(part.max - max);
  return {__fmaf_rn(state.o, keep, __fmul_rn(part.o, add)), max,
          __fmaf_rn(state.sum, keep, __fmul_rn(part.sum, add))};
}
__device__ __forceinline__ float AttentionOf(const StateValue& state, const float* sinks,
                                             int32_t head) {
  if (state.sum == 0.0f) return 0.0f;
  return __fdiv_rn(state.o, SumWithSink(state.sum, state.max, sinks, head));
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_ATTENTION_STATES_CUH_

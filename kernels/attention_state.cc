#include "kernels/attention_state.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace winnow::kernels {

void ResetAttentionState(float* state, int64_t head_dim) {
  std::fill(state, state + head_dim, 0.0f);
  state[head_dim] = -std::numeric_limits<float>::infinity();
  state[head_dim + 1] = 0.0f;
}

void MergeAttentionState(float* state, const float* part, int64_t head_dim) {
  float& max = state[head_dim];
  float& sum = state[head_dim + 1];
  const float part_max = part[head_dim];
  const float part_sum = part[head_dim + 1];
  if (part_sum == 0) return;
  if (sum == 0) {
    std::copy(part, part + AttentionStateFloats(head_dim), state);
    return;
  }
  const float new_max = std::max(max, part_max);
  const float keep = std::exp2(max - new_max);
  const float add = std::exp2(part_max - new_max);
  for (int64_t i = 0; i < head_dim; ++i) state[i] = state[i] * keep + part[i] * add;
  sum = sum * keep + part_sum * add;
  max = new_max;
}

void FinishAttentionState(const float* state, int64_t head_dim, float* out) {
  const float scale = 1.0f / state[head_dim + 1];
  for (int64_t i = 0; i < head_dim; ++i) out[i] = state[i] * scale;
}

void FinishAttentionState(const float* state, int64_t head_dim, float sink, float* out) {
  const float max = state[head_dim], sum = state[head_dim + 1];
  if (sum == 0) {
    std::fill(out, out + head_dim, 0.0f);
    return;
  }
  const float new_max = std::max(max, sink);
  const float keep = std::exp2(max - new_max);
  const float scale = keep / (sum * keep + std::exp2(sink - new_max));
  for (int64_t i = 0; i < head_dim; ++i) out[i] = state[i] * scale;
}

float AttentionStateLogSumExp(const float* state, int64_t head_dim) {
  const float sum = state[head_dim + 1];
  if (sum == 0) return -std::numeric_limits<float>::infinity();
  return (state[head_dim] + std::log2(sum)) * 0.693147180559945309f;
}

}  // namespace winnow::kernels

// Learned log-features of keys and queries (docs/artifact-format.md, "How log-features are
// computed"; "Top-K Retrieval with Fixed-Size Linear-Attention Completion", appendix J):
//
//   h = stem(x);  h = h + down(gelu(gate(h)) * up(h));  log-features = out(h)
//
//   x [d] is rounded to bfloat16; stem, out and what lies between are affine; gelu(x) = x Phi(x).
//
// What comes before gate and up, and what comes after down, is affine, so a backend may fold it
// into three matrices (the widths: w of stem, u of gate, F of out), exact but for rounding:
//
//   g = (Wg Ws) x + ..., p = (Wu Ws) x + ...;  z = gelu(g) * p;  (Wo Ws) x + (Wo Wd) z + ...
//
// That is 2du + (d + u)F multiplications instead of dw + 3uw + wF: 49 K instead of 74 K at
// d = w = u = 128, F = 64.
//
// Order: a backend has one for each value, which does not depend on how many vectors are mapped at a time: on a CPU
// one chain of multiply-adds over its inputs in ascending order (of x, then of z), then the bias; on a GPU that of
// cuda/completion_map.cuh. Results agree with the reference to about 2e-5 of the terms' size.
//
// Reads 4 (2du + (d + u)F) bytes of weights once per tile of vectors.
#ifndef WINNOW_KERNELS_FEATURE_MAP_H_
#define WINNOW_KERNELS_FEATURE_MAP_H_

#include <cstdint>

#include "kernels/retrieval.h"

namespace winnow::kernels {

constexpr double FeatureMapWeightBytes(int32_t head_dim, int32_t inner, int32_t features) {
  return 4.0 * (2.0 * head_dim * inner + (1.0 * head_dim + inner) * features);
}
// Of `rows` vectors; a gelu is about 30.
constexpr double FeatureMapFlops(double rows, int32_t head_dim, int32_t inner, int32_t features) {
  return rows * (FeatureMapWeightBytes(head_dim, inner, features) / 2 + 30.0 * inner);
}

// Stops the process unless the shapes fit each other.
void CheckFeatureMapShapes(const FeatureMapWeights& weights);

// The oracle: log-features [F] of x [d] by the map of `head`, unfolded, in double.
void FeatureMapRef(const FeatureMapWeights& weights, int32_t head, const float* x,
                   double* log_features);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_FEATURE_MAP_H_

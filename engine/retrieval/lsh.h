// Hash functions that need no training: the signs of a vector's coordinates in randomly rotated
// axes. Two vectors at an angle t agree in each bit with probability 1 - t / pi (Charikar, STOC
// 2002); orthogonal axes make the count of agreeing bits vary less than independent ones.
//
// The functions are the same in every process, so that codes in a prefix store stay valid: they
// depend on nothing but layer, KV head, head dimension and bits.
#ifndef WINNOW_ENGINE_RETRIEVAL_LSH_H_
#define WINNOW_ENGINE_RETRIEVAL_LSH_H_

#include <cstdint>
#include <vector>

#include "kernels/retrieval.h"

namespace winnow::engine {

// One layer's functions, for keys and queries alike: a stage without bias, its weights rounded to
// bfloat16. Immutable.
class LshEncoder {
 public:
  // ceil(bits / head_dim) rotations under each other, of which the first `bits` rows count.
  // Costs about 8/3 * head_dim^3 FLOPs per rotation: 27 ms for 8 heads of 128 and 128 bits.
  // REQUIRES: layer >= 0, kv_heads >= 1, head_dim >= 2, bits 32, 64, 128, 256, 512 or 1024.
  LshEncoder(int32_t layer, int32_t kv_heads, int32_t head_dim, int32_t bits);

  // A view into this.
  kernels::EncoderWeights weights() const;

 private:
  const int32_t kv_heads_, head_dim_, bits_;
  std::vector<uint16_t> weight_;  // [kv_heads][bits][head_dim]
  std::vector<float> bias_;       // [kv_heads][bits], zero
};

// A rotation (orthogonal, determinant +1) that is uniformly distributed: [dim][dim], row-major.
// Its numbers are those of CounterRandom(seed, i) from i = number * 2 * dim^2 on.
// REQUIRES: dim >= 2, number >= 0.
std::vector<double> RandomRotation(int32_t dim, uint64_t seed, int32_t number);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_LSH_H_

// Random feature maps, for tests of completion.
#ifndef WINNOW_TESTS_CUDA_RANDOM_MAP_H_
#define WINNOW_TESTS_CUDA_RANDOM_MAP_H_

#include <cmath>
#include <cstdint>
#include <deque>
#include <vector>

#include "kernels/retrieval.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels::cuda {

// Owns what a FeatureMapWeights points to. Inputs of deviation 1 get log-features of deviation
// about `spread`.
class RandomMap {
 public:
  RandomMap(Random& random, int32_t kv_heads, int32_t d, int32_t width, int32_t inner,
            int32_t features, float spread) {
    weights_.kv_heads = kv_heads;
    weights_.stem = Stage(random, d, width, 1.0f);
    weights_.gate = Stage(random, width, inner, 1.0f);
    weights_.up = Stage(random, width, inner, 1.0f);
    weights_.down = Stage(random, inner, width, 0.7f);
    weights_.out = Stage(random, width, features, spread);
  }
  const FeatureMapWeights& weights() const { return weights_; }

 private:
  AffineStage Stage(Random& random, int32_t in, int32_t out, float spread) {
    auto& weight = weight_data_.emplace_back();
    auto& bias = bias_data_.emplace_back();
    const float deviation = spread / std::sqrt(static_cast<float>(in));
    for (int64_t i = 0; i < int64_t{weights_.kv_heads} * in * out; ++i) {
      weight.push_back(ToBF16(random.Normal(deviation)).bits);
    }
    for (int64_t i = 0; i < int64_t{weights_.kv_heads} * out; ++i) {
      bias.push_back(random.Normal(0.3f * spread));
    }
    return {weight, bias, in, out};
  }

  FeatureMapWeights weights_;
  std::deque<std::vector<uint16_t>> weight_data_;
  std::deque<std::vector<float>> bias_data_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_TESTS_CUDA_RANDOM_MAP_H_

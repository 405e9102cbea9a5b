// Feature maps of random weights, for tests here and on a GPU.
#ifndef WINNOW_TESTS_UNIT_KERNELS_RANDOM_FEATURE_MAP_H_
#define WINNOW_TESTS_UNIT_KERNELS_RANDOM_FEATURE_MAP_H_

#include <cmath>
#include <cstdint>
#include <deque>
#include <vector>

#include "kernels/retrieval.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace winnow::kernels {

struct FeatureMapShape {
  int32_t kv_heads = 1, head_dim = 64, width = 64, inner = 64, features = 64;
};

// Owns what a FeatureMapWeights points to. Inputs of deviation 1 get log-features of deviation
// about `spread`.
class RandomFeatureMap {
 public:
  RandomFeatureMap(Random& random, const FeatureMapShape& shape, float spread) {
    weights_.kv_heads = shape.kv_heads;
    weights_.stem = Stage(random, shape.head_dim, shape.width, 1.0f);
    weights_.gate = Stage(random, shape.width, shape.inner, 1.0f);
    weights_.up = Stage(random, shape.width, shape.inner, 1.0f);
    weights_.down = Stage(random, shape.inner, shape.width, 0.7f);
    weights_.out = Stage(random, shape.width, shape.features, spread);
  }
  RandomFeatureMap(const RandomFeatureMap&) = delete;
  RandomFeatureMap& operator=(const RandomFeatureMap&) = delete;

  const FeatureMapWeights& weights() const { return weights_; }

 private:
  AffineStage Stage(Random& random, int32_t in, int32_t out, float spread) {
    auto& weight = weights_data_.emplace_back();
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
  std::deque<std::vector<uint16_t>> weights_data_;  // deques: their elements stay where they are
  std::deque<std::vector<float>> bias_data_;
};

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_RANDOM_FEATURE_MAP_H_

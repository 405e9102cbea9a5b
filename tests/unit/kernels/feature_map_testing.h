// Feature maps for tests: of random weights, and those whose results calibrate/golden.py recorded.
#ifndef WINNOW_TESTS_UNIT_KERNELS_FEATURE_MAP_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_FEATURE_MAP_TESTING_H_

#include <cmath>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "kernels/retrieval.h"
#include "tests/unit/kernels/golden_tensors.h"
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

// tests/golden/features/completion.safetensors
class RecordedCompletion : public GoldenTensors {
 public:
  RecordedCompletion() : GoldenTensors("features/completion.safetensors") {}

  // The map of `side`, "key" or "query"; a view into this object.
  FeatureMapWeights Map(const std::string& side) {
    FeatureMapWeights weights;
    weights.kv_heads = shape(side + ".stem.weight")[0];
    const auto stage = [&](const std::string& role) {
      const auto shape_of = shape(side + "." + role + ".weight");
      const auto& weight =
          weights_data_.emplace_back(values<uint16_t>(side + "." + role + ".weight"));
      const auto& bias = bias_data_.emplace_back(values<float>(side + "." + role + ".bias"));
      return AffineStage{weight, bias, shape_of[2], shape_of[1]};
    };
    weights.stem = stage("stem");
    weights.gate = stage("gate");
    weights.up = stage("up");
    weights.down = stage("down");
    weights.out = stage("out");
    return weights;
  }

 private:
  std::deque<std::vector<uint16_t>> weights_data_;
  std::deque<std::vector<float>> bias_data_;
};

}  // namespace winnow::kernels

#endif  // WINNOW_TESTS_UNIT_KERNELS_FEATURE_MAP_TESTING_H_

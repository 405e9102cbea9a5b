// Feature maps whose results calibrate/golden.py recorded, for tests; random_feature_map.h has others.
#ifndef WINNOW_TESTS_UNIT_KERNELS_FEATURE_MAP_TESTING_H_
#define WINNOW_TESTS_UNIT_KERNELS_FEATURE_MAP_TESTING_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "kernels/retrieval.h"
#include "tests/unit/kernels/golden_tensors.h"
#include "tests/unit/kernels/random_feature_map.h"

namespace winnow::kernels {

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

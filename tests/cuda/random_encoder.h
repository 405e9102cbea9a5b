// Hash functions of any shape, for tests.
#ifndef WINNOW_TESTS_CUDA_RANDOM_ENCODER_H_
#define WINNOW_TESTS_CUDA_RANDOM_ENCODER_H_

#include <deque>
#include <vector>

#include "kernels/retrieval.h"
#include "tests/cuda/cuda_testing.h"

namespace winnow::kernels::cuda {

// Weights that own what EncoderWeights views.
class RandomEncoder {
 public:
  // widths: in, inner widths, out.
  RandomEncoder(Random& random, int32_t kv_heads, int32_t queries_per_input,
                const std::vector<int32_t>& widths) {
    weights_.kv_heads = kv_heads;
    weights_.queries_per_input = queries_per_input;
    for (size_t i = 0; i + 1 < widths.size(); ++i) {
      auto& weight = values_.emplace_back(size_t{1} * kv_heads * widths[i] * widths[i + 1]);
      auto& bias = biases_.emplace_back(size_t{1} * kv_heads * widths[i + 1]);
      const float deviation = 1.5f / std::sqrt(static_cast<float>(widths[i]));
      for (uint16_t& value : weight) value = ToBF16(random.Normal(deviation)).bits;
      for (float& value : bias) value = random.Normal(0.2f);
      weights_.stages.push_back({weight, bias, widths[i], widths[i + 1]});
    }
  }
  EncoderWeights& weights() { return weights_; }

 private:
  EncoderWeights weights_;
  std::deque<std::vector<uint16_t>> values_;
  std::deque<std::vector<float>> biases_;
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_TESTS_CUDA_RANDOM_ENCODER_H_

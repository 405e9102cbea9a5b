// The text of docs/artifact-format.md, line by line.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/hash_encode.h"

namespace winnow::kernels {
namespace {

float Silu(float a) {
  constexpr float kTaylor[7] = {1.0f,
                                0.693147182464599609375f,
                                0.2402265071868896484375f,
                                0.0555041097104549407959f,
                                0.0096181293f,
                                0.00133335591f,
                                0.000154035297f};
  a = std::max(a, -87.0f);
  const float z = std::max(-a, -87.0f);
  const float t = z * 1.44269502162933349609375f;
  const float n = std::nearbyint(t);
  const float f = t - n;
  float p = kTaylor[6];
  for (int i = 5; i >= 0; --i) {
    p = p * f;
    p = p + kTaylor[i];
  }
  const float e = std::ldexp(p, static_cast<int>(n));
  return ToFloat(ToBF16(a / (1.0f + e)));
}

}  // namespace

void HashEncodeRef(const EncoderWeights& weights, int32_t head, const float* x, uint8_t* code) {
  std::vector<float> input(x, x + weights.stages[0].in), sums;
  for (float& value : input) value = ToFloat(ToBF16(value));
  for (size_t i = 0; i < weights.stages.size(); ++i) {
    const AffineStage& stage = weights.stages[i];
    const uint16_t* weight = stage.weight.data() + int64_t{head} * stage.out * stage.in;
    sums.assign(stage.out, 0.0f);
    for (int32_t o = 0; o < stage.out; ++o) {
      float sum = stage.bias[int64_t{head} * stage.out + o];
      for (int32_t j = 0; j < stage.in; ++j) {
        const float product = input[j] * ToFloat(BF16{weight[int64_t{o} * stage.in + j]});
        sum = sum + product;
      }
      sums[o] = sum;
    }
    if (i + 1 == weights.stages.size()) break;
    input = sums;
    for (float& value : input) value = Silu(ToFloat(ToBF16(value)));
  }
  std::memset(code, 0, sums.size() / 8);
  for (size_t o = 0; o < sums.size(); ++o) {
    if (sums[o] >= 0) code[o / 8] |= static_cast<uint8_t>(1u << (o % 8));
  }
}

}  // namespace winnow::kernels

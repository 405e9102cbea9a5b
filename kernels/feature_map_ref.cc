#include <cmath>
#include <vector>

#include "kernels/check.h"
#include "kernels/dtype.h"
#include "kernels/feature_map.h"

namespace winnow::kernels {
namespace {

std::vector<double> Apply(const AffineStage& stage, int32_t head, const std::vector<double>& x) {
  std::vector<double> y(stage.out);
  for (int32_t o = 0; o < stage.out; ++o) {
    const size_t row = size_t(head) * stage.out + o;
    y[o] = stage.bias[row];
    for (int32_t i = 0; i < stage.in; ++i) {
      y[o] += static_cast<double>(ToFloat(BF16{stage.weight[row * stage.in + i]})) * x[i];
    }
  }
  return y;
}

void CheckStage(const AffineStage& stage, int32_t kv_heads, int32_t in, int32_t out) {
  WINNOW_CHECK(stage.in == in && stage.out == out && in > 0 && out > 0);
  WINNOW_CHECK(stage.weight.size() == size_t(kv_heads) * in * out);
  WINNOW_CHECK(stage.bias.size() == size_t(kv_heads) * out);
}

}  // namespace

void CheckFeatureMapShapes(const FeatureMapWeights& weights) {
  const int32_t width = weights.stem.out, inner = weights.gate.out;
  WINNOW_CHECK(weights.kv_heads > 0);
  CheckStage(weights.stem, weights.kv_heads, weights.stem.in, width);
  CheckStage(weights.gate, weights.kv_heads, width, inner);
  CheckStage(weights.up, weights.kv_heads, width, inner);
  CheckStage(weights.down, weights.kv_heads, inner, width);
  CheckStage(weights.out, weights.kv_heads, width, weights.out.out);
}

void FeatureMapRef(const FeatureMapWeights& weights, int32_t head, const float* x,
                   double* log_features) {
  std::vector<double> rounded(weights.stem.in);
  for (int32_t i = 0; i < weights.stem.in; ++i) rounded[i] = ToFloat(ToBF16(x[i]));
  std::vector<double> h = Apply(weights.stem, head, rounded);
  std::vector<double> z = Apply(weights.gate, head, h);
  const std::vector<double> up = Apply(weights.up, head, h);
  for (size_t i = 0; i < z.size(); ++i) {
    z[i] = z[i] * 0.5 * std::erfc(-z[i] * std::sqrt(0.5)) * up[i];
  }
  const std::vector<double> down = Apply(weights.down, head, z);
  for (size_t i = 0; i < h.size(); ++i) h[i] += down[i];
  const std::vector<double> result = Apply(weights.out, head, h);
  for (size_t i = 0; i < result.size(); ++i) log_features[i] = result[i];
}

}  // namespace winnow::kernels

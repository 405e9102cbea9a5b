// A feature map on its way to the device: three stages folded into matrices (kernels/feature_map.h), in the order in which the
// matrix instruction reads them (completion_map.cuh).
#include <cstring>
#include <vector>

#include "kernels/completion.h"
#include "kernels/cuda/completion.h"
#include "kernels/cuda/completion_map.cuh"

namespace winnow::kernels::cuda {
namespace {

using namespace completion;

// y [out] of an affine stage, in double: columns of what is folded.
struct Affine {
  std::vector<double> weight;  // [out][in]
  std::vector<double> bias;    // [out]
  int32_t in, out;
};
Affine StageOf(const AffineStage& stage, int32_t head) {
  Affine affine{{}, {}, stage.in, stage.out};
  for (int64_t i = 0; i < int64_t{stage.in} * stage.out; ++i) {
    affine.weight.push_back(ToFloat(BF16{stage.weight[int64_t{head} * stage.in * stage.out + i]}));
  }
  for (int32_t o = 0; o < stage.out; ++o) {
    affine.bias.push_back(stage.bias[int64_t{head} * stage.out + o]);
  }
  return affine;
}
// second(first(x)).
Affine Compose(const Affine& second, const Affine& first) {
  Affine both{std::vector<double>(int64_t{second.out} * first.in), second.bias, first.in,
              second.out};
  for (int32_t o = 0; o < second.out; ++o) {
    for (int32_t k = 0; k < second.in; ++k) {
      const double w = second.weight[int64_t{o} * second.in + k];
      for (int32_t i = 0; i < first.in; ++i) {
        both.weight[int64_t{o} * first.in + i] += w * first.weight[int64_t{k} * first.in + i];
      }
      both.bias[o] += w * first.bias[k];
    }
  }
  return both;
}

// A matrix [inputs][outputs] of which value(k, n) is one, as fragments of 16 inputs by 8 outputs, the steps of
// an output tile side by side.
template <typename Value>
uint4* PutFragments(int32_t steps, int32_t tiles, Value value, uint4* to) {
  for (int32_t tile = 0; tile < tiles; ++tile) {
    for (int32_t step = 0; step < steps; ++step) {
      for (int lane = 0; lane < kLanes; ++lane) {
        uint32_t words[4] =
            {};  // inputs 2c, 2c + 1 and those 8 further; then what bfloat16 lost of them
        for (int i = 0; i < 4; ++i) {
          const double weight =
              value(step * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2, tile * 8 + lane / 4);
          const BF16 high = ToBF16(static_cast<float>(weight));
          const BF16 rest = ToBF16(static_cast<float>(weight - ToFloat(high)));
          words[i / 2] |= static_cast<uint32_t>(high.bits) << i % 2 * 16;
          words[2 + i / 2] |= static_cast<uint32_t>(rest.bits) << i % 2 * 16;
        }
        *to++ = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  return to;
}

// Where the parts of a packed map lie.
struct Parts {
  size_t gate_up, gate_up_bias, out, out_bias, size_bytes;
  Parts(int32_t heads, int32_t d, int32_t u, int32_t f) {
    const DeviceFeatureMap map{nullptr, nullptr, nullptr, nullptr, heads, d, u, f};
    const auto take = [this](size_t bytes) {
      const size_t at = size_bytes;
      size_bytes += AlignUp(bytes, 256);
      return at;
    };
    size_bytes = 0;
    gate_up = take(sizeof(uint4) * heads * map.GateUpFragments() * kLanes);
    gate_up_bias = take(size_t{4} * heads * 2 * map.InnerTiles() * 8);
    out = take(sizeof(uint4) * heads * map.OutFragments() * kLanes);
    out_bias = take(size_t{4} * heads * map.FeatureTiles() * 8);
  }
};

}  // namespace

size_t PackedFeatureMapBytes(const FeatureMapWeights& weights) {
  return Parts(weights.kv_heads, weights.stem.in, weights.gate.out, weights.out.out).size_bytes;
}

DeviceFeatureMap PackFeatureMap(const FeatureMapWeights& weights, void* host, void* device) {
  const int32_t d = weights.stem.in, u = weights.gate.out, f = weights.out.out;
  DeviceFeatureMap map{nullptr, nullptr, nullptr, nullptr, weights.kv_heads, d, u, f};
  if (IsRefused(map)) return {};
  const Parts parts(weights.kv_heads, d, u, f);
  auto* const to = static_cast<std::byte*>(host);
  const auto* const there = static_cast<const std::byte*>(device);
  std::memset(to, 0, parts.size_bytes);
  map.gate_up = reinterpret_cast<const uint4*>(there + parts.gate_up);
  map.gate_up_bias = reinterpret_cast<const float*>(there + parts.gate_up_bias);
  map.out = reinterpret_cast<const uint4*>(there + parts.out);
  map.out_bias = reinterpret_cast<const float*>(there + parts.out_bias);
  auto* gate_up = reinterpret_cast<uint4*>(to + parts.gate_up);
  auto* out = reinterpret_cast<uint4*>(to + parts.out);
  for (int32_t head = 0; head < weights.kv_heads; ++head) {
    const Affine stem = StageOf(weights.stem, head), last = StageOf(weights.out, head);
    const Affine gate = Compose(StageOf(weights.gate, head), stem);
    const Affine up = Compose(StageOf(weights.up, head), stem);
    const Affine of_x = Compose(last, stem);
    const Affine of_z = Compose(last, StageOf(weights.down, head));
    // Outputs and inner values past the last are zero.
    for (int32_t tile = 0; tile < map.InnerTiles(); ++tile) {
      for (const Affine* stage : {&gate, &up}) {
        const auto value = [&](int32_t k, int32_t n) {
          const int32_t o = tile * 8 + n;
          return o < u ? stage->weight[int64_t{o} * d + k] : 0.0;
        };
        gate_up = PutFragments(map.InputSteps(), 1, value, gate_up);
      }
    }
    const auto value = [&](int32_t k, int32_t o) {
      if (o >= f || k - d >= u) return 0.0;
      return k < d ? of_x.weight[int64_t{o} * d + k] : of_z.weight[int64_t{o} * u + k - d];
    };
    out = PutFragments(map.InputSteps() + map.InnerSteps(), map.FeatureTiles(), value, out);
    const int32_t padded = map.InnerTiles() * 8;
    float* bias = reinterpret_cast<float*>(to + parts.gate_up_bias) + int64_t{head} * 2 * padded;
    for (int32_t o = 0; o < u; ++o) {
      bias[o] = static_cast<float>(gate.bias[o]);
      bias[padded + o] = static_cast<float>(up.bias[o]);
    }
    bias = reinterpret_cast<float*>(to + parts.out_bias) + int64_t{head} * map.FeatureTiles() * 8;
    for (int32_t o = 0; o < f; ++o) {
      // Both compositions have the last stage's bias.
      bias[o] = static_cast<float>(of_x.bias[o] + of_z.bias[o] - last.bias[o]);
    }
  }
  return map;
}

}  // namespace winnow::kernels::cuda

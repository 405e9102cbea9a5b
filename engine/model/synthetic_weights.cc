#include "engine/model/synthetic_weights.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <vector>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "kernels/dtype.h"

namespace winnow::engine {
namespace {

using kernels::DType;

constexpr int64_t kPatternValues = 1 << 16;
constexpr int64_t kMaxOffset = 4099;  // a prime, so that layers do not fall into step

uint64_t NextRandom(uint64_t& state) {  // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void StoreValue(std::byte* to, DType dtype, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, sizeof(value));
  } else if (dtype == DType::kBF16) {
    const uint16_t bits = kernels::ToBF16(value).bits;
    std::memcpy(to, &bits, sizeof(bits));
  } else {
    // Only called with normal float16 magnitudes: drop the mantissa's tail, move the exponent.
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint16_t half =
        static_cast<uint16_t>(((bits >> 16) & 0x8000u) | ((((bits >> 23) & 0xffu) - 112) << 10) |
                              ((bits >> 13) & 0x3ffu));
    std::memcpy(to, &half, sizeof(half));
  }
}

}  // namespace

absl::StatusOr<SyntheticWeights> MakeSyntheticWeights(const ModelConfig& config, uint64_t seed) {
  SyntheticWeights made;
  const std::vector<TensorSpec> tensors = ModelTensors(config, &made.weights);
  int64_t largest = 0;
  for (const TensorSpec& tensor : tensors) {
    largest = std::max(largest, std::max<int64_t>(tensor.rows, 1) * tensor.cols);
  }
  const int64_t value_bytes = static_cast<int64_t>(kernels::DTypeBytes(config.dtype));
  const int64_t noise_bytes = (largest + kMaxOffset) * value_bytes;
  const int64_t ones_values = std::max(config.hidden_size, config.head_dim);
  made.noise.reset(new (std::nothrow) std::byte[noise_bytes]);
  made.ones.reset(new (std::nothrow) std::byte[ones_values * value_bytes]);
  if (made.noise == nullptr || made.ones == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for random weights: {} bytes", noise_bytes));
  }

  // Signs are random and magnitudes lie in [1/64, 1/32): as variances go, trained weights of a
  // hidden size of 2048. Repeating a pattern is enough to keep any cache from helping, and quick.
  uint64_t state = seed;
  const auto fill = [&](std::byte* to, int64_t bytes, uint64_t& from) {
    for (int64_t offset = 0; offset < bytes; offset += value_bytes) {
      const uint64_t random = NextRandom(from);
      const float magnitude = 0x1p-6f + static_cast<float>(random >> 40) * 0x1p-30f;
      StoreValue(to + offset, config.dtype, (random & 1) != 0 ? magnitude : -magnitude);
    }
  };
  const int64_t pattern_bytes = std::min(kPatternValues * value_bytes, noise_bytes);
  fill(made.noise.get(), pattern_bytes, state);
  for (int64_t offset = pattern_bytes; offset < noise_bytes; offset += pattern_bytes) {
    std::memcpy(&made.noise[offset], &made.noise[0], std::min(pattern_bytes, noise_bytes - offset));
  }
  for (int64_t i = 0; i < ones_values; ++i) {
    StoreValue(&made.ones[i * value_bytes], config.dtype, 1.0f);
  }

  // The pattern's rows would come again: a router would have equal logits for several experts.
  const int64_t router_bytes =
      (int64_t{config.experts.count} * config.hidden_size + kMaxOffset) * value_bytes;
  if (config.experts.count > 0) {
    made.routers.reset(new (std::nothrow) std::byte[router_bytes]);
    if (made.routers == nullptr) {
      return absl::ResourceExhaustedError(
          fmt::format("no memory for random weights: {} bytes", router_bytes));
    }
    uint64_t state_of_routers = ~seed;
    fill(made.routers.get(), router_bytes, state_of_routers);
  }

  using Role = TensorSpec::Role;
  for (const TensorSpec& tensor : tensors) {
    const int64_t offset = static_cast<int64_t>(NextRandom(state) % kMaxOffset);
    const std::byte* const noise =
        tensor.role == Role::kRouter ? made.routers.get() : made.noise.get();
    const std::byte* data =
        tensor.role == Role::kNorm ? made.ones.get() : noise + offset * value_bytes;
    *tensor.matrix = {data, kernels::WeightTypeOf(config.dtype), std::max<int64_t>(tensor.rows, 1),
                      tensor.cols};
  }
  if (config.tie_word_embeddings) made.weights.lm_head = made.weights.embedding;
  return made;
}

}  // namespace winnow::engine

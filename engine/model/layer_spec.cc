#include "engine/model/layer_spec.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "engine/base/concat.h"

namespace winnow::engine {
namespace {

// The property that is not computed; "" if all are.
std::string UnsupportedProperty(const LayerSpec& layer) {
  if (layer.mlp == LayerSpec::Mlp::kExperts && layer.NormsAfter()) {
    return "norms after attention and experts";
  }
  if (layer.mlp == LayerSpec::Mlp::kGatedGelu && !layer.NormsAfter()) {
    return "gelu without a norm after the MLP";
  }
  return "";
}

}  // namespace

absl::Status CheckLayers(std::span<const LayerSpec> layers, int32_t num_ropes) {
  for (size_t i = 0; i < layers.size(); ++i) {
    if (const std::string property = UnsupportedProperty(layers[i]); !property.empty()) {
      return absl::UnimplementedError(Concat("layer ", i, ": ", property, " is not supported"));
    }
    if (layers[i].rope == LayerSpec::kNoRope) continue;
    if (layers[i].rope < 0 || layers[i].rope >= num_ropes) {
      return absl::InvalidArgumentError(Concat("layer ", i, ": there is no RoPE set ",
                                               layers[i].rope, "; the model has ", num_ropes));
    }
  }
  return absl::OkStatus();
}

uint64_t KvRowsSeen(std::span<const LayerSpec> layers, int32_t kv_heads, int32_t position,
                    int32_t num_queries) {
  const int64_t all = int64_t{position} + num_queries;
  int64_t tokens = 0;
  for (const LayerSpec& layer : layers) {
    tokens += layer.SeesAll() ? all : std::min(all, int64_t{layer.window} + num_queries - 1);
  }
  return static_cast<uint64_t>(tokens) * static_cast<uint64_t>(kv_heads);
}

}  // namespace winnow::engine

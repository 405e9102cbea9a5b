#include "engine/model/layer_spec.h"

#include <cstddef>
#include <string>

#include "engine/base/concat.h"

namespace winnow::engine {
namespace {

// The property that is not computed; "" if all are.
std::string UnsupportedProperty(const LayerSpec& layer) {
  if (layer.window != 0) return Concat("a sliding window of ", layer.window, " tokens");
  if (layer.norms != LayerSpec::Norms::kBefore) return "norms after attention and MLP";
  if (layer.mlp == LayerSpec::Mlp::kExperts && layer.mlp_bias) return "biases of experts";
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

}  // namespace winnow::engine

#include "engine/kv/kv_plan.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "fmt/format.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

std::string_view ResidencyName(ResidencyKind kind) {
  switch (kind) {
    case ResidencyKind::kInPlace:
      return "in place";
    case ResidencyKind::kMirrored:
      return "mirrored";
    case ResidencyKind::kPaged:
      return "paged";
  }
  return "";
}

}  // namespace

std::string_view KvPlacementName(KvPlacement placement) {
  switch (placement) {
    case KvPlacement::kFast:
      return "fast";
    case KvPlacement::kFastFrames:
      return "fast frames";
    case KvPlacement::kHost:
      return "host";
    case KvPlacement::kHostFrames:
      return "host frames";
  }
  return "";
}

int32_t KvPlan::NumLayersAt(KvPlacement placement) const {
  return static_cast<int32_t>(
      std::count_if(layers.begin(), layers.end(),
                    [&](const LayerKvPlan& layer) { return layer.placement == placement; }));
}

int32_t KvPlan::NumFastLayers() const {
  return NumLayersAt(KvPlacement::kFast) + NumLayersAt(KvPlacement::kFastFrames);
}

KvPlan PlanPools(ResidencyKind residency, const kernels::KvLayout& layout,
                 const std::vector<KvPlacement>& placements, int32_t num_blocks,
                 int64_t shared_frames) {
  KvPlan plan;
  plan.residency = residency;
  plan.layout = layout;
  plan.num_blocks = num_blocks;
  for (const KvPlacement placement : placements) {
    plan.layers.push_back({.placement = placement, .dtype = layout.dtype});
  }
  const int32_t host_places = plan.NumLayersAt(KvPlacement::kHost);
  const bool fast_frames = plan.NumLayersAt(KvPlacement::kFastFrames) > 0;
  const bool host_frames = plan.NumLayersAt(KvPlacement::kHostFrames) > 0;
  if (plan.is_paged()) {
    WINNOW_CHECK(fast_frames != host_frames && host_places == 0 && shared_frames > 0);
  } else {
    WINNOW_CHECK(!fast_frames && !host_frames && shared_frames == 0);
  }
  const int64_t fast = int64_t{plan.NumLayersAt(KvPlacement::kFast)} * num_blocks +
                       (fast_frames ? shared_frames : 0);
  const int64_t host = int64_t{host_places} * num_blocks + (host_frames ? shared_frames : 0);
  const auto block_bytes = static_cast<int64_t>(layout.BlockBytes());
  plan.num_frames = fast + host;
  plan.fast_bytes = fast * block_bytes;
  plan.host_bytes = host * block_bytes;
  plan.shared.layout = layout;
  plan.shared.num_pools = host_frames ? 1 : host_places;
  plan.shared.of_frames = host_frames;
  if (plan.uses_host()) {
    plan.shared.num_blocks = host_frames ? static_cast<int32_t>(shared_frames) : num_blocks;
  }
  return plan;
}

int64_t LeastFrames(int32_t num_layers, int32_t block_tokens, int32_t max_context,
                    int32_t max_batch_tokens, int32_t max_sequences) {
  // A chunk writes into the block that it finds begun, whole ones, and one that it leaves begun.
  const int64_t written = max_batch_tokens / block_tokens + 2 * int64_t{max_sequences};
  const int64_t attended = (int64_t{max_context} + block_tokens - 1) / block_tokens;
  return num_layers * written + attended;
}

std::string ToString(const KvPlan& plan) {
  std::string text(ResidencyName(plan.residency));
  for (size_t first = 0, last = 0; first < plan.layers.size(); first = last) {
    const LayerKvPlan& layer = plan.layers[first];
    while (last < plan.layers.size() && plan.layers[last] == layer) ++last;
    const std::string range = last - first == 1 ? fmt::format("layer {}", first)
                                                : fmt::format("layers {}-{}", first, last - 1);
    const std::string window = layer.window > 0 ? fmt::format(", window {}", layer.window) : "";
    const std::string reads =
        layer.retrieves() ? fmt::format("retrieves ({})", absl::StrJoin(layer.indexes, ", "))
                          : "dense";
    text += fmt::format("; {}: {}, {}{}, {}", range, KvPlacementName(layer.placement),
                        kernels::DTypeName(layer.dtype), window, reads);
  }
  return text;
}

}  // namespace winnow::engine

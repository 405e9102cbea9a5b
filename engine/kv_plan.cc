#include "engine/kv_plan.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "engine/kv/row_cache.h"
#include "engine/model_retrieval.h"
#include "fmt/format.h"

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

std::vector<LayerKvPlan> PlanLayers(const ModelConfig& config, const DecoderOptions& options,
                                    bool has_indexes) {
  const bool paged = options.residency == ResidencyKind::kPaged;
  const bool shares = options.shared_kv_bytes > 0;
  std::vector<LayerKvPlan> layers;
  for (int32_t i = 0; i < config.num_layers; ++i) {
    LayerKvPlan layer;
    if (shares && i >= FirstSharedLayer()) {
      layer.placement = paged ? KvPlacement::kHostFrames : KvPlacement::kHost;
    } else if (paged && !shares) {
      layer.placement = KvPlacement::kFastFrames;
    }
    layer.dtype = options.kv_dtype;
    layer.retrieves = has_indexes && i >= AttentionPolicy().dense_layers;
    layers.push_back(layer);
  }
  return layers;
}

// Frames and bytes of the pools.
void PlanPools(const ModelConfig& config, const DecoderOptions& options, KvPlan* plan) {
  const auto block_bytes = static_cast<int64_t>(plan->layout.BlockBytes());
  plan->num_blocks = NumKvBlocks(config, options);
  if (options.shared_kv_bytes > 0) {
    const kernels::SharedKvShape shape = ShapeOfSharedKv(config, options);
    const int64_t own = int64_t{FirstSharedLayer()} * plan->num_blocks;
    const int64_t shared = std::max<int64_t>(1, shape.num_pools) * shape.num_blocks;
    plan->num_frames = own + shared;
    plan->fast_bytes = own * block_bytes;
    plan->host_bytes = shared * block_bytes;
    return;
  }
  plan->num_frames = options.residency == ResidencyKind::kPaged
                         ? options.kv_bytes / block_bytes
                         : plan->num_blocks * config.num_layers;
  plan->fast_bytes = plan->num_frames * block_bytes;
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

KvPlan PlanKv(const ModelConfig& config, const DecoderOptions& options) {
  KvPlan plan;
  plan.residency = options.residency;
  plan.layout = {config.num_kv_heads, config.head_dim, options.block_tokens, options.kv_dtype};
  for (const IndexPool& pool : IndexPools(config, options)) {
    plan.indexes.push_back(pool.title());
    plan.index_bytes += pool.bytes;
  }
  plan.layers = PlanLayers(config, options, !plan.indexes.empty());
  PlanPools(config, options, &plan);
  plan.summary_bytes = SummaryBytes(config, options.retrieval) * options.retrieval.summaries;
  // A device's cache of KV in the host's memory rounds its own size to whole sets, down.
  plan.row_cache_bytes = static_cast<int64_t>(
      options.shared_kv_bytes > 0 ? options.rows.cache_bytes
                                  : RowCache::SizeBytesFor(options.rows.cache_bytes,
                                                           config.num_layers * config.num_kv_heads,
                                                           plan.layout.RowBytes()));
  plan.staging_bytes =
      static_cast<int64_t>(options.rows.staging_bytes * (options.rows.prefetch ? 2 : 1));
  return plan;
}

std::string ToString(const KvPlan& plan) {
  std::string text(ResidencyName(plan.residency));
  for (size_t first = 0, last = 0; first < plan.layers.size(); first = last) {
    const LayerKvPlan& layer = plan.layers[first];
    while (last < plan.layers.size() && plan.layers[last] == layer) ++last;
    const std::string range = last - first == 1 ? fmt::format("layer {}", first)
                                                : fmt::format("layers {}-{}", first, last - 1);
    const std::string window = layer.window > 0 ? fmt::format(", window {}", layer.window) : "";
    const std::string reads = layer.retrieves
                                  ? fmt::format("retrieves ({})", absl::StrJoin(plan.indexes, ", "))
                                  : "dense";
    text += fmt::format("; {}: {}, {}{}, {}", range, KvPlacementName(layer.placement),
                        kernels::DTypeName(layer.dtype), window, reads);
  }
  return text;
}

}  // namespace winnow::engine

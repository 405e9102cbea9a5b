#include "engine/kv_planning.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "engine/kv/row_cache.h"
#include "fmt/format.h"

namespace winnow::engine {
namespace {

using Kind = AttentionPolicy::Kind;

kernels::KvLayout LayoutOf(const ModelConfig& config, const DecoderOptions& options) {
  return {config.num_kv_heads, config.head_dim, options.block_tokens, options.kv_dtype};
}

absl::Status Refuse(std::string_view option, int64_t value, std::string_view wanted) {
  return absl::InvalidArgumentError(fmt::format("{} is {}: must be {}", option, value, wanted));
}

KvPlacement PlacementOf(const DecoderOptions& options, int32_t layer) {
  const bool paged = options.residency == ResidencyKind::kPaged;
  if (options.shared_kv_bytes == 0) return paged ? KvPlacement::kFastFrames : KvPlacement::kFast;
  if (layer < FirstSharedLayer()) return KvPlacement::kFast;
  return paged ? KvPlacement::kHostFrames : KvPlacement::kHost;
}

// Refuses memory that holds no block. SharedFrames says what paged KV needs beside.
absl::Status CheckBlocks(const ModelConfig& config, const DecoderOptions& options) {
  const auto layer_block_bytes = static_cast<int64_t>(LayoutOf(config, options).BlockBytes());
  if (options.shared_kv_bytes > 0) {
    const int32_t shared_layers = config.num_layers() - FirstSharedLayer();
    if (shared_layers <= 0) {
      return absl::InvalidArgumentError(fmt::format(
          "host_bytes: KV of the first {} layers lies on the device, and this model has {}",
          FirstSharedLayer(), config.num_layers()));
    }
    if (NumKvBlocks(config, options) >= 1) return absl::OkStatus();
    return Refuse(
        "host_bytes", options.shared_kv_bytes,
        fmt::format("at least {}, a block of {} tokens in {} layers",
                    layer_block_bytes * shared_layers, options.block_tokens, shared_layers));
  }
  const int64_t block_bytes = layer_block_bytes * config.num_layers();
  if (options.residency == ResidencyKind::kPaged || options.kv_bytes >= block_bytes) {
    return absl::OkStatus();
  }
  return Refuse("kv_bytes", options.kv_bytes,
                fmt::format("at least {}, a block of {} tokens in every layer", block_bytes,
                            options.block_tokens));
}

// Frames that layers share: as many as fit. `own_frames`: places of the layers that share none.
absl::StatusOr<int64_t> SharedFrames(const ModelConfig& config, const DecoderOptions& options,
                                     int32_t sharing_layers, int64_t own_frames) {
  const char* const option = options.spills() ? "host_bytes" : "kv_bytes";
  const int64_t bytes = options.spills() ? options.shared_kv_bytes : options.kv_bytes;
  const auto block_bytes = static_cast<int64_t>(LayoutOf(config, options).BlockBytes());
  const int32_t sequences =
      options.max_sequences > 0 ? options.max_sequences : options.max_batch_logits;
  const int32_t context = ContextOf(config, options);
  const int64_t least = LeastFrames(sharing_layers, options.block_tokens, context,
                                    options.max_batch_tokens, sequences);
  const int64_t frames = bytes / block_bytes;
  if (frames < least) {
    return Refuse(option, bytes,
                  fmt::format("at least {}: with slower tiers, what {} sequences write in a step "
                              "of {} tokens and one layer of {} tokens stay in fast memory",
                              least * block_bytes, sequences, options.max_batch_tokens, context));
  }
  if (frames + own_frames > INT32_MAX) {
    return Refuse(option, bytes,
                  fmt::format("fewer: {} frames are the most that are numbered", INT32_MAX));
  }
  return frames;
}

// Indexes, by what they are, and the layers that have them.
void PlanIndexes(const ModelConfig& config, const DecoderOptions& options, KvPlan* plan) {
  const Artifact* const artifact = options.retrieval.artifact.get();
  const auto add = [&](IndexKvPlan index, int64_t block_bytes, Kind kind) {
    index.bytes = plan->num_blocks * block_bytes;
    plan->index_bytes += index.bytes;
    for (int32_t i = 0; i < config.num_layers(); ++i) {
      if (!AttentionPolicy().RetrievesIn(i) || !config.layers[i].SeesAll()) continue;
      if (index.learned && !artifact->HasLayer(kind, i)) continue;
      plan->layers[i].indexes.push_back(index.title);
    }
    plan->indexes.push_back(std::move(index));
  };
  for (const IndexSpec& spec : options.retrieval.indexes) {
    RetrievalOptions alone;
    alone.artifact = options.retrieval.artifact;
    alone.indexes = {spec};
    add({.name = std::string(KindName(spec.kind)),
         .title = ToString(spec),
         .bits = spec.bits,
         .learned = artifact != nullptr && artifact->HasKind(spec.kind)},
        IndexBlockBytes(config, plan->layout, alone), spec.kind);
    if (spec.kind != Kind::kPca || !options.retrieval.residual_codes) continue;
    add({.name = "residual", .title = "residual", .bits = spec.bits},
        ResidualBlockBytes(config, plan->layout, spec.bits), Kind::kDense);
  }
  if (!options.retrieval.four_bit_keys) return;
  RetrievalOptions alone;
  alone.four_bit_keys = true;
  add({.name = "int4", .title = "int4"}, IndexBlockBytes(config, plan->layout, alone),
      Kind::kDense);
}

}  // namespace

int32_t FirstSharedLayer() { return AttentionPolicy().dense_layers; }

int64_t NumKvBlocks(const ModelConfig& config, const DecoderOptions& options) {
  const auto block_bytes = static_cast<int64_t>(LayoutOf(config, options).BlockBytes());
  if (block_bytes <= 0 || config.num_layers() <= 0) return 0;
  if (options.shared_kv_bytes > 0) {
    const int64_t layers = config.num_layers() - FirstSharedLayer();
    if (layers <= 0) return 0;
    return options.spills() ? options.kv_bytes / (block_bytes * FirstSharedLayer())
                            : options.shared_kv_bytes / (block_bytes * layers);
  }
  return options.kv_bytes / (block_bytes * config.num_layers()) + options.lower_blocks;
}

absl::StatusOr<KvPlan> PlanKv(const ModelConfig& config, const DecoderOptions& options) {
  WINNOW_RETURN_IF_ERROR(CheckDecoderOptions(config, options));
  WINNOW_RETURN_IF_ERROR(CheckBlocks(config, options));
  std::vector<KvPlacement> placements;
  for (int32_t i = 0; i < config.num_layers(); ++i) placements.push_back(PlacementOf(options, i));
  // Block numbers are int32; a larger pool than that could address is never asked for in earnest.
  const auto num_blocks =
      static_cast<int32_t>(std::min<int64_t>(NumKvBlocks(config, options), INT32_MAX));
  int64_t shared_frames = 0;
  if (options.residency == ResidencyKind::kPaged) {
    const auto own_layers = static_cast<int32_t>(
        std::count_if(placements.begin(), placements.end(),
                      [](KvPlacement placement) { return HasPlaces(placement); }));
    WINNOW_ASSIGN_OR_RETURN(shared_frames,
                            SharedFrames(config, options, config.num_layers() - own_layers,
                                         int64_t{own_layers} * num_blocks));
  }
  const kernels::KvLayout layout = LayoutOf(config, options);
  KvPlan plan = PlanPools(options.residency, layout, placements, num_blocks, shared_frames);
  for (int32_t i = 0; i < config.num_layers(); ++i) plan.layers[i].window = config.layers[i].window;
  plan.shared.max_context = ContextOf(config, options);
  plan.shared.max_batch_tokens = options.max_batch_tokens;
  plan.shared.cache_bytes = options.spills() ? 0 : options.rows.cache_bytes;
  PlanIndexes(config, options, &plan);
  plan.summary_bytes = SummaryBytes(config, options.retrieval) * options.retrieval.summaries;
  // A device's cache of KV in the host's memory rounds its own size to whole sets, down.
  plan.row_cache_bytes = static_cast<int64_t>(
      plan.uses_host()
          ? options.rows.cache_bytes
          : RowCache::SizeBytesFor(options.rows.cache_bytes,
                                   config.num_layers() * config.num_kv_heads, layout.RowBytes()));
  plan.staging_bytes =
      static_cast<int64_t>(options.rows.staging_bytes * (options.rows.prefetch ? 2 : 1));
  return plan;
}

}  // namespace winnow::engine

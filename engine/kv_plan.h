// Where a model's KV is to lie: one immutable description, made once from the model and its resolved options
// (ResolveDecoderOptions), for everything that sizes, prints or explains KV before or after it is allocated.
//
// Layers are described one by one, and need not be alike: each says its placement, type, window and whether it
// retrieves.
#ifndef WINNOW_ENGINE_KV_PLAN_H_
#define WINNOW_ENGINE_KV_PLAN_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/decoder.h"
#include "engine/kv/kv_memory_options.h"
#include "engine/model/model_config.h"
#include "kernels/dtype.h"
#include "kernels/kv_layout.h"

namespace winnow::engine {

enum class KvPlacement : uint8_t {
  kFast,        // a place for each block, in the backend's own memory
  kFastFrames,  // frames there, which layers share
  kHost,        // a place for each block, in the host's memory that a device reads
  kHostFrames,  // frames there, which layers share
};
std::string_view KvPlacementName(KvPlacement placement);

struct LayerKvPlan {
  KvPlacement placement = KvPlacement::kFast;
  kernels::DType dtype = kernels::DType::kBF16;
  int32_t window = 0;  // tokens that the layer attends to; 0: all
  // Whether the default policy selects entries there. A request's policy may say otherwise.
  bool retrieves = false;
  bool operator==(const LayerKvPlan&) const = default;
};

// Bytes are those that KvMemory, Indexes and RowFetcher allocate.
struct KvPlan {
  ResidencyKind residency = ResidencyKind::kInPlace;
  kernels::KvLayout layout;
  std::vector<LayerKvPlan> layers;
  std::vector<std::string> indexes;  // titles, of all layers
  int64_t num_blocks = 0;            // that fast memory and the store hold
  int64_t num_frames = 0;            // layer blocks that have memory at one time
  int64_t fast_bytes = 0;            // KV in the backend's own memory
  int64_t host_bytes = 0;            // KV in the host's memory that a device reads
  int64_t index_bytes = 0;
  int64_t summary_bytes = 0;  // of all sequences
  int64_t row_cache_bytes = 0;
  int64_t staging_bytes = 0;

  int64_t pool_bytes() const { return fast_bytes + host_bytes; }
};

// REQUIRES: options as ResolveDecoderOptions makes them.
KvPlan PlanKv(const ModelConfig& config, const DecoderOptions& options);

// One line: the residency, then runs of equal layers.
//   "mirrored; layers 0-1: fast, bfloat16, dense; layers 2-31: host, bfloat16, retrieves (lsh:128, quest)"
std::string ToString(const KvPlan& plan);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_PLAN_H_

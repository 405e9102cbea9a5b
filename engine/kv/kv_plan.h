// Where the KV of a model lies: one immutable description, made once (PlanKv in engine/kv_planning.h), that everything
// which allocates, counts, prints or explains KV reads.
//
// Layers are described one by one. Neighbours need not be alike: layers of one placement may lie anywhere among the
// others.
#ifndef WINNOW_ENGINE_KV_KV_PLAN_H_
#define WINNOW_ENGINE_KV_KV_PLAN_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/kv_layout.h"
#include "kernels/kv_ops.h"

namespace winnow::engine {

enum class ResidencyKind : uint8_t {
  kInPlace,   // every layer block has its place, and there is no store
  kMirrored,  // the same, with copies of what is to be kept in a store
  kPaged,     // more layer blocks than frames: the store has those that have none
};

enum class KvPlacement : uint8_t {
  kFast,        // a place for each block, in the backend's own memory
  kFastFrames,  // frames there, which layers share
  kHost,        // a place for each block, in the host's memory that a device reads
  kHostFrames,  // frames there, which layers share
};
std::string_view KvPlacementName(KvPlacement placement);
constexpr bool IsOnHost(KvPlacement placement) {
  return placement == KvPlacement::kHost || placement == KvPlacement::kHostFrames;
}
constexpr bool HasPlaces(KvPlacement placement) {
  return placement == KvPlacement::kFast || placement == KvPlacement::kHost;
}

struct LayerKvPlan {
  KvPlacement placement = KvPlacement::kFast;
  kernels::DType dtype = kernels::DType::kBF16;
  int32_t window = 0;  // tokens that the layer attends to; 0: all
  // Titles of the indexes that a policy may select by there. Empty: the default policy is dense in this layer. A
  // request's policy may say otherwise.
  std::vector<std::string> indexes = {};

  bool retrieves() const { return !indexes.empty(); }
  bool operator==(const LayerKvPlan&) const = default;
};

// An index beside the KV, of all layers that have it.
struct IndexKvPlan {
  std::string name, title;  // "lsh"; with its bits "lsh:128"
  int32_t bits = 0;         // of codes; 0: none
  bool learned = false;     // by an artifact
  int64_t bytes = 0;        // of its pools
};

// Bytes are those that KvMemory, Indexes and RowFetcher allocate.
struct KvPlan {
  ResidencyKind residency = ResidencyKind::kInPlace;
  kernels::KvLayout layout;
  std::vector<LayerKvPlan> layers;
  std::vector<IndexKvPlan> indexes;
  int32_t num_blocks = 0;  // that fast memory and the store hold
  int64_t num_frames = 0;  // layer blocks that have memory at one time, places included
  // KV in the host's memory. num_pools is 0: no layer lies there.
  kernels::SharedKvShape shared;
  int64_t fast_bytes = 0;  // KV in the backend's own memory
  int64_t host_bytes = 0;  // KV in the host's memory that a device reads
  int64_t index_bytes = 0;
  int64_t summary_bytes = 0;  // of all sequences
  int64_t row_cache_bytes = 0;
  int64_t staging_bytes = 0;

  int32_t num_layers() const { return static_cast<int32_t>(layers.size()); }
  int64_t pool_bytes() const { return fast_bytes + host_bytes; }
  bool is_paged() const { return residency == ResidencyKind::kPaged; }
  bool uses_host() const { return shared.num_pools > 0; }
  int32_t NumLayersAt(KvPlacement placement) const;
  // Layers in the backend's own memory.
  int32_t NumFastLayers() const;
};

// A plan of KV alone, without indexes and caches. `shared_frames`: those that the layers without places share.
// REQUIRES: layers share frames under kPaged and then only, all of them of one kind; beside them no layer is kHost.
KvPlan PlanPools(ResidencyKind residency, const kernels::KvLayout& layout,
                 const std::vector<KvPlacement>& placements, int32_t num_blocks,
                 int64_t shared_frames = 0);

// Frames that a pass may need at one time: what is being written, in every layer that shares them,
// and all that one sequence attends to in one layer. Fewer cannot work.
int64_t LeastFrames(int32_t num_layers, int32_t block_tokens, int32_t max_context,
                    int32_t max_batch_tokens, int32_t max_sequences);

// One line: the residency, then runs of equal layers.
//   "mirrored; layers 0-1: fast, bfloat16, dense; layers 2-31: host, bfloat16, retrieves (lsh:128, quest)"
std::string ToString(const KvPlan& plan);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_PLAN_H_

// `winnow plan`: what a server of given options holds and where, and what one decode step reads, without the weights
// being loaded or a byte of KV being taken. Sizes come from the functions that the server itself allocates by
// (ResolveDecoderOptions, PlanKv, LowerBlocks); tests/e2e/test_plan.py starts servers with the same
// options and compares.
//
// A step's reads are those of one token for each of `batch` sequences that see `context` keys. They are exact where
// they are counts of the policy, and bounds where they depend on the text: `p` keeps fewer entries than are counted
// here, and a row cache saves reads of slower tiers (PlanRequest::row_cache_hits).
#ifndef WINNOW_BENCH_PLAN_H_
#define WINNOW_BENCH_PLAN_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/output.h"
#include "engine/retrieval/attention_policy.h"
#include "server/config.h"

namespace winnow::bench {

// Bytes a second that a step gets of each tier, and where the number comes from.
struct TierSpeeds {
  double fast = 0, host = 0, disk = 0;
  std::string source;
};

struct PlanRequest {
  std::string like;            // a config.json, or
  server::ServeConfig config;  // its `model`; the options of `winnow serve` either way
  int64_t context = 0;         // keys that a sequence sees; 0: max_context
  int64_t batch = 1;           // sequences of a step
  int64_t memory_bytes = 0;    // what fast memory the machine or the GPU has; 0: not asked
  double row_cache_hits = 0;   // share of reads of slower tiers that the row cache saves
};

struct PlannedIndex {
  std::string name, title;  // as GetModel and the log have them
  int64_t bytes = 0;
};

// Bytes, by what they are. "Fast" is the GPU's memory with --device cuda, else the host's.
struct PlannedMemory {
  int64_t weight_bytes = 0;
  int64_t draft_weight_bytes = 0;
  int64_t widening_bytes =
      0;  // what quantised weights are widened into for products of many rows, on a GPU
  int64_t kv_pool_bytes = 0;  // of all frames
  int64_t kv_host_bytes = 0;  // of them, in the host's memory (--device cuda with --host-bytes)
  std::vector<PlannedIndex> indexes;
  int64_t summary_bytes = 0;
  int64_t row_cache_bytes = 0;
  int64_t staging_bytes = 0;
  int64_t host_bytes = 0, disk_bytes = 0;  // of the store below

  int64_t index_bytes() const;
  // Bytes that must find room in fast memory. The host's tier is in the same memory on a CPU.
  int64_t fast_bytes(bool on_host) const;
};

// One decode step of the whole batch.
struct StepReads {
  double weight_bytes = 0;
  double index_bytes = 0;
  double summary_bytes = 0;
  double fast_kv_bytes = 0, host_kv_bytes = 0, disk_kv_bytes = 0;
  int64_t rows = 0;  // KV entries attended

  double fast_bytes() const { return weight_bytes + index_bytes + summary_bytes + fast_kv_bytes; }
  // Tiers one after the other, each at its speed: what overlaps takes less, launches and arithmetic add.
  double Seconds(const TierSpeeds& speeds) const;
};

struct Plan {
  std::string model, architecture, device, dtype, kv_dtype, policy;
  bool on_host = true;  // the device has no memory of its own
  int64_t context = 0, batch = 0, max_context = 0, block_tokens = 0;
  int64_t kv_token_bytes = 0;    // of all layers
  int64_t kv_blocks = 0;         // that the pool and the tiers hold
  int64_t kv_blocks_needed = 0;  // by the batch
  int64_t memory_bytes = 0;      // as asked
  int64_t kv_bytes_that_fit =
      0;                  // the largest --kv-bytes that memory_bytes has room for; 0: not asked
  std::string kv_layers;  // engine::KvPlan, as the server's log has it
  PlannedMemory memory;
  StepReads step, dense;  // by the policy; as dense attention would
  TierSpeeds speeds;
  std::vector<std::string> notes;  // what is assumed, one sentence each

  bool sequences_fit() const { return kv_blocks_needed <= kv_blocks; }
  bool memory_fits() const;
};

// Errors are those that `winnow serve` would end with for these options, as far as they can be known without reading
// weights; InvalidArgument also for a context or a batch that such a server would refuse.
absl::StatusOr<Plan> MakePlan(const PlanRequest& request, const TierSpeeds& speeds);

// "fast=4532,host=48,disk=0.5": GB a second, each tier at most once, over `defaults`.
absl::StatusOr<TierSpeeds> ParseSpeeds(std::string_view text, const TierSpeeds& defaults);

Json PlanJson(const Plan& plan);
std::string PlanText(const Plan& plan);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_PLAN_H_

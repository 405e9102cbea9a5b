// What the engine tells about itself: a snapshot to pull and a sink of observations to be pushed
// to. The engine knows no metrics library; server/metrics maps both to its series.
#ifndef WINNOW_ENGINE_SCHEDULE_ENGINE_STATS_H_
#define WINNOW_ENGINE_SCHEDULE_ENGINE_STATS_H_

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "engine/base/clock.h"
#include "engine/kv/kv_memory.h"
#include "engine/schedule/request.h"
#include "kernels/device_ops.h"

namespace winnow::engine {

inline constexpr int kNumFinishReasons = static_cast<int>(FinishReason::kError) + 1;

// Fetches of whole layer blocks between steps (engine/kv/block_fetcher.h).
struct FetchCounts {
  int32_t open = 0;         // now
  uint64_t begun = 0;       // since the start, as the others
  uint64_t given_up = 0;    // took too long: the sequence computed its KV
  uint64_t room_waits = 0;  // times that a sequence had to wait until another fetch ends
  uint64_t rests = 0;  // times that a sequence was left out for having made a step wait for reads
};

// State at the end of a Step, and totals since the start. What the engine thread counts belongs to
// one moment; what the queue counts (waiting, accepted, rejected) is of now. A request that moves
// between both is never missed: nothing waits and nothing runs only if nothing is there.
struct EngineStats {
  // Now.
  int32_t running = 0;  // sequences that hold KV blocks or were promised them, paused ones included
  int32_t paused = 0;   // sequences whose reader is slow: not planned
  int32_t waiting = 0;  // requests accepted that do not run, preempted ones included
  int32_t preempted = 0;       // of the waiting: ran before and lost their blocks
  int64_t waiting_tokens = 0;  // prompt tokens of the waiting
  int32_t blocks_used = 0;     // KV blocks
  int32_t blocks_total = 0;
  bool draining = false;
  bool failed = false;    // the model failed: nothing is accepted any more, the process should go
  TimePoint heartbeat{};  // when the engine thread last began a Step; an idle engine beats too

  // Totals.
  KvMemoryStats kv;  // moves of KV between tiers
  FetchCounts fetches;
  int32_t blocks_idle = 0;      // now: of no sequence, and kept for whoever begins with them
  int32_t named_prefixes = 0;   // now (prefix_table.h)
  int32_t pinned_prefixes = 0;  // of them
  bool tiered = false;          // there is a store, of which:
  storage::StoreStats store;
  uint64_t steps = 0;
  uint64_t accepted = 0;                                  // requests
  uint64_t rejected = 0;                                  // requests that Submit refused
  std::array<uint64_t, kNumFinishReasons> finished = {};  // requests, by FinishReason
  uint64_t prompt_tokens = 0;                             // of accepted requests
  uint64_t computed_tokens =
      0;  // that went through Forward: prompts, decoding, and again after preemption
  uint64_t cached_tokens = 0;  // of prompts, taken over from other sequences or the store; also
                               // where what was taken over got lost afterwards
  // Prompt tokens whose blocks were found, by where: in the pool, of another sequence, or in the store.
  // More than cached_tokens where a preempted sequence takes over anew.
  uint64_t prefix_tokens_pool = 0;
  uint64_t prefix_tokens_store = 0;
  uint64_t blocks_over_store_quota =
      0;  // that the store did not keep, because of their tenant's quota
  uint64_t generated_tokens = 0;
  uint64_t preemptions = 0;
  uint64_t kv_losses = 0;  // times that a sequence's KV was lost in a slower tier, and made again
  uint64_t kv_read_bytes_fast = 0;  // as in Usage
  uint64_t kv_read_bytes_host = 0;
  uint64_t kv_read_bytes_disk = 0;
  uint64_t kv_dense_bytes = 0;
  uint64_t attended_rows = 0;
  RetrievalCounts retrieval;
  DraftCounts drafts;
  PrefetchCounts prefetch;
  kernels::LaunchCounts launches;
  // Sequences that began with blocks that were found, and what bringing them back took at once: indexes and
  // summaries, and with an eager resume the blocks themselves.
  uint64_t resumes = 0;
  uint64_t resume_bytes = 0;
  Duration resume_time{};
};

// One Step that ran the model.
struct StepObservation {
  int32_t sequences = 0;
  int32_t tokens = 0;          // computed
  uint64_t attended_rows = 0;  // KV rows attended while decoding, as in Usage
  Duration duration{};         // of the whole Step
};

// Called on the engine thread, inside Step: return quickly, never call the engine back.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnFirstToken(const Request& request, Duration since_arrival) {}
  virtual void OnNextToken(const Request& request, Duration since_previous_token) {}
  virtual void OnFinished(const Request& request, FinishReason reason, const Usage& usage) {}
  virtual void OnStep(const StepObservation& step) {}
  // The model failed; the engine serves no more, and its stats say so. Once.
  virtual void OnFailure(const absl::Status& status) {}
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_ENGINE_STATS_H_

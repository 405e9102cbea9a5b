// Counts of retrieval's reads: KV entries selected, from which tier, and what dense attention would have read. Counts go to the
// sequences' states, each position once, however often it is computed.
//
// Threads: the engine thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_READ_COUNTER_H_
#define WINNOW_ENGINE_RETRIEVAL_READ_COUNTER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "engine/kv/kv_memory.h"
#include "engine/retrieval/fetcher.h"
#include "engine/retrieval/query_call.h"
#include "kernels/device_ops.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::engine {

// Rows of KV in shared memory (KvPools::IsShared) that attention over chosen rows read.
struct SharedReads {
  uint64_t cached = 0;    // lay in the row cache
  uint64_t fetched = 0;   // came over the bus into it
  uint64_t in_place = 0;  // over the bus without it: there was no room, or completion wanted them
};

class ReadCounter {
 public:
  // Both must outlive it.
  ReadCounter(const RetrievalShape& shape, KvMemory& memory, kernels::DeviceOps& backend)
      : shape_(shape), memory_(memory), backend_(backend) {}
  absl::Status Allocate();  // before anything else

  // The slot of the next call: Defer keeps its data there until the slots are counted.
  int32_t slot() const { return slot_; }
  // Counts the call at the end of the pass, because the device may not have selected yet. `masses.before` is null unless
  // its estimates were measured.
  void Defer(const QueryCall& call, const kernels::Selection& selected, const StateMasses& masses);
  // Counts a call whose selection the host has seen; `tier_rows` of its queries. `anchors` of pca's anchors, which were read
  // before; empty: they were not, or without addresses. `entries`: whether `tier_rows` has the anchors again.
  void Count(const QueryCall& call, const kernels::Selection& selected,
             std::span<const Fetcher::TierRows> tier_rows,
             std::span<const Fetcher::TierRows> anchors, Fetcher::Entries entries);
  // REQUIRES: the device is done with the masses.
  void CountTails(const QueryCall& call, const StateMasses& masses);

  // The pass is over: counts what was deferred, and all of its rows.
  void EndPass(std::span<const PassRows> rows, bool any_retrieves);

  const SharedReads& shared_reads() const { return shared_reads_; }  // since the start

 private:
  // A query whose counts of selected tokens the device may not have written yet.
  struct Pending {
    RetrievalState* state = nullptr;
    int32_t position = 0, candidates = 0;
    const int32_t* counts = nullptr;  // [Hkv]
    StateMasses masses = {};          // of its heads
  };
  void CountPending();
  void CountSharedReads(std::span<const PassRows> rows);
  void CountRows(const PassRows& rows);
  void AddSelected(RetrievalCounts& tally, uint64_t kept, int32_t candidates) const;
  void AddTails(RetrievalCounts& tally, const StateMasses& masses) const;

  const RetrievalShape shape_;
  KvMemory& memory_;
  kernels::DeviceOps& backend_;
  std::vector<Pending> pending_;
  int32_t slot_ = 0;
  SharedReads shared_reads_;
  kernels::Buffer reads_;  // [rows of a pass] kernels::SharedKvReads; empty without shared KV
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_READ_COUNTER_H_

// The estimate for the candidates that were not read: one more partial state, merged into each query's. Two kinds:
//
//   tables of cells   pca's: mean values of cells of codes, weighted by the masses that the selection left (MergeTables)
//   completion        the papers': sums of learned features of keys and values (Complete)
//
// Both keep sums in the sequence's state, which must reach what the query leaves to them before it is completed.
//
// Threads: the engine thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_TAIL_ESTIMATOR_H_
#define WINNOW_ENGINE_RETRIEVAL_TAIL_ESTIMATOR_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "engine/kv/kv_memory.h"
#include "engine/retrieval/indexes.h"
#include "engine/retrieval/query_call.h"
#include "engine/retrieval/scratch.h"
#include "kernels/backend.h"

namespace winnow::engine {

class TailEstimator {
 public:
  // All must outlive it.
  TailEstimator(const RetrievalShape& shape, KvMemory& memory, kernels::Backend& backend,
                const Indexes& indexes)
      : shape_(shape), memory_(memory), backend_(backend), indexes_(indexes) {}
  // `completes`: some policy may ask for completion; `has_tables`: for tables of cells. Before anything else.
  absl::Status Allocate(bool completes, bool has_tables, ScratchAllocator& scratch);

  // ---- tables of cells ----

  // The tables of the call's sequences reach the border that its queries see. True at once if its policy has none. False:
  // what they have yet to take in cannot be resident at once, or the device has failed.
  bool ExtendTables(const QueryCall& call);
  // Where a selection by masses leaves what it did not select; null: the policy has no tail.
  const kernels::TailMasses* MassesFor(const AttentionPolicy& policy) const {
    return policy.HasTail() ? &tail_ : nullptr;
  }
  // Adds the tail to `states` [queries][H], after ExtendTables and a selection that left its masses. `measured`: their masses,
  // which are of the call's slot, too.
  void MergeTables(const QueryCall& call, float* states, bool measured);

  // ---- completion ----

  // Makes resident the blocks that the call's summaries have yet to take in: one group for the queries of each sequence.
  // True at once if its policy does not complete. False: they do not fit, or one is lost.
  bool PinCompletion(const QueryCall& call);
  // Adds the summaries to `states`, after PinCompletion and after the `rows` were attended to. Masses are of the call's slot.
  StateMasses Complete(const QueryCall& call, const kernels::Tensor& q, kernels::RowSource rows,
                       float* states);
  StateMasses MassesOf(int32_t slot) const;

 private:
  const RetrievalShape shape_;
  KvMemory& memory_;
  kernels::Backend& backend_;
  const Indexes& indexes_;

  kernels::Buffer masses_;  // [kCallSlots][before, after an estimate][kMaxCallQueries][H]; shared
  kernels::Buffer tail_masses_, tail_references_, tail_deltas_;  // the device's
  kernels::Buffer empty_table_;                                  // zeros; the device's
  kernels::TailMasses tail_;
  std::vector<std::vector<int32_t>> tables_;  // [queries] of pinned blocks
  std::vector<const float*> cell_tables_;     // [queries]
  void* pool_ = nullptr;                      // of the pinned tables of completion
  std::vector<kernels::RetrievalQuery> pinned_queries_;
  std::vector<kernels::CompletionGroup> groups_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_TAIL_ESTIMATOR_H_

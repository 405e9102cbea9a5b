// SELECT: which candidates each query of a call reads, by the index that its policy names, and pruned if it asks for that.
//
// A selection depends on the queries and the KV alone, and lies in shared memory. Its tokens are void at the next Select, its
// counts when kCallSlots more calls have been selected for.
//
// Threads: the engine thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_SELECTOR_H_
#define WINNOW_ENGINE_RETRIEVAL_SELECTOR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/kv/kv_memory.h"
#include "engine/retrieval/indexes.h"
#include "engine/retrieval/query_call.h"
#include "engine/retrieval/scratch.h"
#include "engine/retrieval/whole_context.h"
#include "kernels/retrieval.h"
#include "kernels/selection_ops.h"
#include "kernels/tensor.h"

namespace winnow::engine {

// The masses against which pca's estimates are measured.
struct MassInputs {
  // [queries][H] log masses of the anchors, in shared memory or the device's. Minus infinity: not known, and masses are
  // over the candidates alone.
  const float* anchors = nullptr;
  const kernels::TailMasses* tail = nullptr;  // what is left for the tail; null: nothing
};

class Selector {
 public:
  // All must outlive it.
  Selector(const RetrievalShape& shape, kernels::SelectionOps& backend, KvMemory& memory,
           const Indexes& indexes)
      : shape_(shape), backend_(backend), indexes_(indexes), whole_(shape, memory) {}
  // `max_entries`: tokens of a call, over queries and KV heads. Before anything else.
  absl::Status Allocate(int64_t max_entries, ScratchAllocator& scratch);

  // The k tokens of each query; with pruning the best of its candidates. Those of lost chunks may be anything.
  kernels::Selection Select(const QueryCall& call, const kernels::Tensor& q,
                            const MassInputs& masses);
  // A selection of nothing: a query reads its anchors.
  kernels::Selection Nothing() const;

 private:
  void SelectTokens(const QueryCall& call, const kernels::Tensor& q, const MassInputs& masses,
                    const kernels::Selection& selected);
  void SelectByMass(const QueryCall& call, const kernels::Tensor& q, const MassInputs& masses,
                    const kernels::Selection& selected);
  void Prune(const QueryCall& call, const kernels::Tensor& q, const kernels::Selection& selected);
  void Rerank(const QueryCall& call, const kernels::Tensor& q, const kernels::Selection& selected);
  // After pruning or re-ranking `masses` are left of all candidates: what is not kept belongs to the tail,
  // what is kept is taken out of it.
  void TakeFromTail(const QueryCall& call, const kernels::Tensor& q, const MassInputs& masses,
                    const kernels::Selection& selected);
  kernels::MassScales scales() const {
    return {static_cast<float*>(references_.data()), static_cast<float*>(inverses_.data())};
  }

  const RetrievalShape shape_;
  kernels::SelectionOps& backend_;
  const Indexes& indexes_;
  WholeContext whole_;  // for the oracle
  // Shared memory.
  kernels::Buffer counts_;       // [kCallSlots][kMaxCallQueries][Hkv]
  kernels::Buffer tokens_;       // of a selection
  kernels::Buffer no_counts_;    // [kMaxCallQueries][Hkv] zeros
  kernels::Buffer query_codes_;  // the device's
  // Denominators of masses, for re-ranking [kMaxCallQueries][H]; the device's.
  kernels::Buffer references_, inverses_;
  std::vector<int32_t> least_keys_;  // of a call, while its candidates are selected
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_SELECTOR_H_

// The measurement of what a selection covers: beside one in so many selections the oracle's masses are computed, which
// reads all keys. A sequence whose coverage falls below its policy's floor reads more from its next token on.
//
// Threads: the engine thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_PROBE_H_
#define WINNOW_ENGINE_RETRIEVAL_PROBE_H_

#include <cstdint>
#include <vector>

#include "engine/kv/kv_memory.h"
#include "engine/retrieval/query_call.h"
#include "engine/retrieval/whole_context.h"
#include "kernels/backend.h"

namespace winnow::engine {

class Probe {
 public:
  // `interval` 0: nothing is measured. `memory` and `backend` must outlive it.
  Probe(const RetrievalShape& shape, KvMemory& memory, kernels::Backend& backend, int32_t interval)
      : shape_(shape),
        backend_(backend),
        interval_(interval),
        whole_(shape, memory),
        quality_(shape.kv_heads) {}

  // Whether one of the call's queries is measured: then its tail is, too (TailEstimator::MergeTables).
  bool IsDue(const QueryCall& call) const;
  // Counts coverage and IoU of the call's queries that are due, in their states, and takes a step of their floor where they
  // fell below it. Queries of lost chunks are measured when they are computed again.
  void Measure(const QueryCall& call, const kernels::Selection& selected, const kernels::Tensor& q);

 private:
  bool MeasureQuery(const QueryCall& call, size_t i, const kernels::Selection& selected,
                    const kernels::Tensor& q);
  double CountQuery(RetrievalState& state, bool counted) const;
  void StepFloor(const PassRows& rows, int32_t position) const;

  const RetrievalShape shape_;
  kernels::Backend& backend_;
  const int32_t interval_;
  WholeContext whole_;
  std::vector<kernels::SelectionQuality> quality_;  // [Hkv]
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_PROBE_H_

// ATTEND: attention over the rows that a selection names, and what becomes of it. One order of steps, each left out where
// a policy does without:
//
//   AttendRows      the exact state of the rows that are read: anchors and selected tokens, or a part of them
//   MergeStates     of two such parts
//   CompleteStates  adds what a summary estimates for the mid tokens that were not read; or
//   MergeTails      the same by tables of cells
//   FinishStates    makes of a state a row of attention, and merges a model's sinks
//
// A state is the attention over a part of the keys with its maximum and sum (attention_state.h); states lie in the device's
// memory, [queries][H]. Rows are given by their addresses or as tokens of a pool: RowSource (kernels/retrieval.h). `q` is
// [m][H*d] after RoPE.
#ifndef WINNOW_KERNELS_ROW_OPS_H_
#define WINNOW_KERNELS_ROW_OPS_H_

#include <cstdint>
#include <span>

#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// Exactly one of `states` and `out` is given.
struct AttendRowsArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;
  RowSource rows;
  float scale = 0;
  float* states =
      nullptr;  // [queries][H][AttentionStateFloats(d)]; the state of no keys where there are no rows
  Tensor out = {};               // [m][H*d]: the queries' rows, finished. REQUIRES: rows are tokens
  const float* sinks = nullptr;  // of `out`: FinishStates has them
};

struct CompleteStatesArgs {
  Tensor q;
  std::span<const RetrievalQuery> queries;
  std::span<const CompletionGroup> groups;
  RowSource
      rows;  // as AttendRows was given; its pool has the tokens that summaries have yet to take in
  const PackedFeatureMap& key_map;
  const PackedFeatureMap& query_map;
  float* states = nullptr;
};

class RowOps {
 public:
  // Whether this backend finds the rows of tokens in `pool` itself, so that what was selected need not pass through the
  // host. If not, rows are given by their addresses alone.
  virtual bool FindsRows(const void* pool) const { return false; }

  // Exact attention over the rows. REQUIRES: FindsRows(rows.pool) where rows are tokens.
  virtual void AttendRows(const AttendRowsArgs& args) = 0;

  // Adds to each state what the mid tokens that were not chosen are estimated to give (completion.h). Advances
  // each group's summary to every query's mid in turn (and leaves it at the last).
  virtual void CompleteStates(const CompleteStatesArgs& args) = 0;

  // masses [count], in shared memory or the device's: of each of the states, the natural logarithm of the sum of
  // exp(score) over its keys; minus infinity if it is of no keys.
  virtual void StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses) = 0;

  // states [count] become those of both parts; a part of no keys leaves the state's bits.
  virtual void MergeStates(const float* parts, int64_t count, int32_t head_dim, float* states) = 0;

  // Adds to each state of the queries what the mid tokens that were not selected are estimated to give. `tables`
  // [queries]: data of the table of each query's sequence.
  virtual void MergeTails(std::span<const RetrievalQuery> queries,
                          std::span<const float* const> tables,
                          const PackedTransformCode& transform, const TailMasses& tail,
                          int32_t head_dim, float* states) = 0;

  // out row of each query [H*d] = the states' attention; zeros where a state is of no keys. The states' last use: they may
  // or may not have been merged in memory. `sinks`: as AttentionChunk's (kv_ops.h). They are merged here, after everything
  // else: masses are of keys alone, and the share of attention that was read is counted without them.
  virtual void FinishStates(std::span<const RetrievalQuery> queries, const float* states,
                            int32_t head_dim, const float* sinks, const Tensor& out) = 0;

 protected:
  ~RowOps() = default;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_ROW_OPS_H_

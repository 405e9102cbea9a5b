#include "engine/retrieval/tail_estimator.h"

#include <algorithm>
#include <cstddef>

#include "engine/base/status_macros.h"
#include "kernels/check.h"
#include "kernels/transform_code.h"

namespace winnow::engine {

using kernels::RetrievalQuery;
using kernels::Tensor;

absl::Status TailEstimator::Allocate(bool completes, bool has_tables, ScratchAllocator& scratch) {
  const size_t states = size_t{kMaxCallQueries} * shape_.num_heads;
  const bool estimates = completes || has_tables;
  WINNOW_RETURN_IF_ERROR(scratch.Allocate(estimates ? kCallSlots * 2 * states * sizeof(float) : 0,
                                          "masses of states", /*shared=*/true, &masses_));
  if (!has_tables) return absl::OkStatus();
  WINNOW_RETURN_IF_ERROR(scratch.Allocate(states * kernels::kTransformCells * sizeof(int64_t),
                                          "masses of cells", /*shared=*/false, &tail_masses_));
  WINNOW_RETURN_IF_ERROR(scratch.Allocate(states * sizeof(float), "references of masses",
                                          /*shared=*/false, &tail_references_));
  WINNOW_RETURN_IF_ERROR(
      scratch.Allocate(states * sizeof(float), "deltas", /*shared=*/false, &tail_deltas_));
  const auto table_floats =
      static_cast<size_t>(kernels::CellTableFloats(shape_.kv_heads, shape_.layout.head_dim));
  WINNOW_RETURN_IF_ERROR(scratch.Allocate(table_floats * sizeof(float), "a table without tokens",
                                          /*shared=*/false, &empty_table_));
  tail_ = {shape_.num_heads, static_cast<int64_t*>(tail_masses_.data()),
           static_cast<float*>(tail_references_.data()), static_cast<float*>(tail_deltas_.data())};
  return absl::OkStatus();
}

// ---- tables of cells ----

bool TailEstimator::ExtendTables(const QueryCall& call) {
  if (!call.policy->HasTail()) return true;
  const Indexes::Codes& codes = *indexes_.CodesOf(*call.policy);
  const Indexes::Codes::Layer& of_layer = codes.layers[call.layer];
  memory_.Unpin();
  tables_.resize(std::max(tables_.size(), call.size()));
  for (size_t i = 0; i < call.size(); ++i) {
    const PassRows& rows = *call.rows[i];
    const RetrievalQuery& query = call.queries[i];
    if (memory_.chunk_lost(rows.index)) continue;
    kernels::Summary& table = rows.state().layer(call.layer).summary;
    const int32_t end = rows.TableEnd(query.position);
    if (table.tokens.size() == 0) table.tokens = {query.mid.first, query.mid.first};
    WINNOW_CHECK(table.tokens.last <= end);
    if (table.tokens.last == end) continue;
    PinnedBlocks pinned;
    if (memory_.TryPin(rows.index, call.layer, query.block_table, shape_.BlockOf(table.tokens.last),
                       shape_.BlocksOf(end), &tables_[i], &pinned) != KvMemory::PinResult::kOk) {
      if (call.size() > 1) return false;
      memory_.LoseChunk(rows.index);
      continue;
    }
    const kernels::CellTableExtension extension{&table, pinned.table, query.block_table, end};
    backend_.ExtendCellTables({&extension, 1}, pinned.pool, shape_.layout, *of_layer.transform,
                              of_layer.pool.data(), codes.layout);
    // What was pinned may go to others from here on.
    if ((memory_.tiered() || memory_.blocks().num_away(call.layer) != 0) &&
        !backend_.Synchronize()) {
      return false;
    }
  }
  return true;
}

void TailEstimator::MergeTables(const QueryCall& call, float* states, bool measured) {
  const Indexes::Codes& codes = *indexes_.CodesOf(*call.policy);
  cell_tables_.clear();
  for (const PassRows* rows : call.rows) {
    const kernels::Summary& table = rows->state().layer(call.layer).summary;
    // The place of a table without tokens may hold another sequence's.
    cell_tables_.push_back(table.tokens.size() > 0 ? table.data
                                                   : static_cast<float*>(empty_table_.data()));
  }
  const auto num_states = static_cast<int64_t>(call.size()) * shape_.num_heads;
  const StateMasses masses = MassesOf(call.slot);
  if (measured) backend_.StateMasses(states, num_states, shape_.layout.head_dim, masses.before);
  backend_.MergeTails(call.queries, cell_tables_, *codes.layers[call.layer].transform, tail_,
                      shape_.layout.head_dim, states);
  if (measured) backend_.StateMasses(states, num_states, shape_.layout.head_dim, masses.after);
}

// ---- completion ----

bool TailEstimator::PinCompletion(const QueryCall& call) {
  groups_.clear();
  pinned_queries_.assign(call.queries.begin(), call.queries.end());
  if (!call.policy->completion) return true;
  tables_.resize(std::max(tables_.size(), call.size()));
  bool good = true;
  for (size_t i = 0; i < call.size(); ++i) {
    const PassRows& rows = *call.rows[i];
    const RetrievalQuery& query = call.queries[i];
    kernels::Summary* summary = &rows.state().layer(call.layer).summary;
    if (groups_.empty() || groups_.back().summary != summary) {
      groups_.push_back({static_cast<int32_t>(i), 0, summary});
    }
    ++groups_.back().num_queries;
    const int32_t begin = summary->tokens.size() > 0 ? summary->tokens.last : query.mid.first;
    const int32_t end = std::max(begin, query.mid.last);
    PinnedBlocks pinned;
    if (memory_.TryPin(rows.index, call.layer, query.block_table, shape_.BlockOf(begin),
                       shape_.BlocksOf(end), &tables_[i], &pinned) != KvMemory::PinResult::kOk) {
      if (call.size() == 1) memory_.LoseChunk(rows.index);
      good = false;
      continue;
    }
    pinned_queries_[i].block_table = pinned.table;
    pool_ = pinned.pool;
  }
  return good;
}

StateMasses TailEstimator::MassesOf(int32_t slot) const {
  const int64_t states = int64_t{kMaxCallQueries} * shape_.num_heads;
  float* const before = static_cast<float*>(masses_.data()) + 2 * states * slot;
  return {before, before + states};
}

StateMasses TailEstimator::Complete(const QueryCall& call, const Tensor& q, kernels::RowSource rows,
                                    float* states) {
  const auto num_states = static_cast<int64_t>(call.size()) * shape_.num_heads;
  const StateMasses masses = MassesOf(call.slot);
  const Indexes::FeatureMaps& maps = indexes_.feature_maps(call.layer);
  if (!rows.are_tokens()) rows.pool = pool_;
  backend_.StateMasses(states, num_states, shape_.layout.head_dim, masses.before);
  backend_.CompleteStates({.q = q,
                           .queries = pinned_queries_,
                           .groups = groups_,
                           .rows = rows,
                           .key_map = *maps.key,
                           .query_map = *maps.query,
                           .states = states});
  backend_.StateMasses(states, num_states, shape_.layout.head_dim, masses.after);
  return masses;
}

}  // namespace winnow::engine

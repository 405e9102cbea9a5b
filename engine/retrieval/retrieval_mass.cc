// pca: selection by estimated masses, whose denominators have the anchors' exact logits, and the tail estimate from the
// same codes (kernels/transform_code.h). The order in a call:
//
//   anchors   read and attended alone: their log-sum-exps
//   tables    of cell means, brought up to the last border of 64 tokens that the call's queries see
//   SELECT    by masses
//   ATTEND    anchors and selected tokens, as under every policy; then the tail is one more state
//
// The anchors are attended twice, which is 144 rows of a call's thousands. They are needed before the selection is known, and
// one list in the order of positions keeps the bits of a state independent of how it was read.
#include <algorithm>
#include <limits>

#include "engine/retrieval/retrieval_attention.h"
#include "kernels/check.h"
#include "kernels/transform_code.h"

namespace winnow::engine {

using kernels::RetrievalQuery;
using kernels::Selection;
using kernels::Tensor;

// The end of the table for a query at `position`: the last border that it sees, at least its first token. A draft's
// tokens stay outside: the means of a cell cannot give them back.
int32_t RetrievalAttention::TableEnd(const Rows& rows, int32_t position) const {
  const int32_t seen = std::min(position + 1, rows.chunk->settled);
  const int32_t border = seen / kernels::kCellRefreshTokens * kernels::kCellRefreshTokens;
  return std::max(rows.chunk->retrieval->policy_.sink, border);
}

kernels::TailMasses RetrievalAttention::TailOfCall() const {
  return {config_.num_heads, static_cast<int64_t*>(tail_masses_.data()),
          static_cast<float*>(tail_references_.data()), static_cast<float*>(tail_deltas_.data())};
}

// anchor_masses_ of the queries. False: they do not fit in one call, or the device has failed.
bool RetrievalAttention::MeasureAnchors(int32_t layer, int32_t first,
                                        std::span<const RetrievalQuery> queries, const Tensor& q) {
  float* const states = static_cast<float*>(states_.data());
  float* const masses = static_cast<float*>(anchor_masses_.data());
  const auto num_states = static_cast<int64_t>(queries.size()) * config_.num_heads;
  const Selection nothing{layout_.kv_heads, 1, static_cast<int32_t*>(no_counts_.data()),
                          static_cast<int32_t*>(tokens_.data())};
  if (!BringRows(layer, first, queries, nothing)) return false;
  bool any_lost = false;
  for (size_t i = 0; i < queries.size(); ++i) {
    any_lost |= memory_.chunk_lost(query_rows_[first + i]->index);
  }
  if (memory_.tiered() || any_lost ||
      !backend_.AttendChosenStates(q, queries, nothing, memory_.LayerPool(layer), layout_, scale_,
                                   states)) {
    // The device may still read what an earlier call fetched.
    if (!backend_.Synchronize() || !Fetch(layer, first, queries, nothing)) return false;
    backend_.AttendRows(q, queries, lists_, layout_, scale_, states);
    // The fetch of what is selected takes the same addresses and frames again.
    if (!backend_.Synchronize()) return false;
    fetcher_->End();
    anchor_rows_ = tier_rows_;
  }
  backend_.StateMasses(states, num_states, layout_.head_dim, masses);
  // Where blocks are away, what is fetched next may take the frames that this reads.
  return memory_.away_in(layer) == 0 || backend_.Synchronize();
}

void RetrievalAttention::SelectByMass(int32_t layer, const AttentionPolicy& policy, int32_t first,
                                      std::span<const RetrievalQuery> queries, const Tensor& q,
                                      const Selection& chosen) {
  const CodeIndex& codes = *FindCodes(policy);
  float* const masses = static_cast<float*>(anchor_masses_.data());
  if (predicting_) {
    if (!backend_.Synchronize()) return;
    std::fill_n(masses, queries.size() * static_cast<size_t>(config_.num_heads),
                -std::numeric_limits<float>::infinity());
  }
  const kernels::TailMasses tail = TailOfCall();
  backend_.SelectByMass(q, queries, masses, *codes.layers[layer].transform, scale_,
                        codes.layers[layer].pool.data(), codes.layout, chosen,
                        policy.HasTail() && !predicting_ ? &tail : nullptr);
}

// The tables of the call's sequences reach the border that its queries see. False: what they have yet to take in cannot
// be resident at once.
bool RetrievalAttention::ExtendTables(int32_t layer, int32_t first,
                                      std::span<const RetrievalQuery> queries) {
  const AttentionPolicy& policy = query_rows_[first]->chunk->retrieval->policy_;
  if (!policy.HasTail()) return true;
  const CodeIndex& codes = *FindCodes(policy);
  memory_.Unpin();
  tables_.resize(std::max(tables_.size(), queries.size()));
  for (size_t i = 0; i < queries.size(); ++i) {
    const Rows& rows = *query_rows_[first + i];
    if (memory_.chunk_lost(rows.index)) continue;
    kernels::Summary& table = rows.chunk->retrieval->layers_[layer].summary;
    const int32_t end = TableEnd(rows, queries[i].position);
    if (table.tokens.size() == 0) table.tokens = {queries[i].mid.first, queries[i].mid.first};
    WINNOW_CHECK(table.tokens.last <= end);
    if (table.tokens.last == end) continue;
    PinnedBlocks pinned;
    if (memory_.TryPin(rows.index, layer, queries[i].block_table,
                       table.tokens.last / layout_.block_tokens,
                       (end + layout_.block_tokens - 1) / layout_.block_tokens, &tables_[i],
                       &pinned) != KvMemory::PinResult::kOk) {
      if (queries.size() > 1) return false;
      memory_.LoseChunk(rows.index);
      continue;
    }
    const kernels::CellTableExtension extension{&table, pinned.table, queries[i].block_table, end};
    backend_.ExtendCellTables({&extension, 1}, pinned.pool, layout_, *codes.layers[layer].transform,
                              codes.layers[layer].pool.data(), codes.layout);
    // What was pinned may go to others from here on.
    if ((memory_.tiered() || memory_.away_in(layer) != 0) && !backend_.Synchronize()) return false;
  }
  return true;
}

void RetrievalAttention::MergeTails(int32_t layer, int32_t first,
                                    std::span<const RetrievalQuery> queries) {
  const CodeIndex& codes = *FindCodes(query_rows_[first]->chunk->retrieval->policy_);
  cell_tables_.clear();
  for (size_t i = 0; i < queries.size(); ++i) {
    cell_tables_.push_back(query_rows_[first + i]->chunk->retrieval->layers_[layer].summary.data);
  }
  backend_.MergeTails(queries, cell_tables_, *codes.layers[layer].transform, TailOfCall(),
                      layout_.head_dim, static_cast<float*>(states_.data()));
}

}  // namespace winnow::engine

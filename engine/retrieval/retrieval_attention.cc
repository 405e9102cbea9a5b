#include "engine/retrieval/retrieval_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"
#include "kernels/check.h"

namespace winnow::engine {

using kernels::AttentionChunk;
using kernels::RetrievalQuery;
using kernels::Selection;
using kernels::SelectionQuality;
using kernels::Tensor;

namespace {

using Kind = AttentionPolicy::Kind;

}  // namespace

// ---- one forward pass ----

QueryPlan RetrievalAttention::Rows::Plan(int32_t row_in_chunk, int32_t from) const {
  const int32_t position = chunk->position + row_in_chunk;
  return PlanQuery(chunk->retrieval->policy(), position, from, floor.Widen(position));
}

void RetrievalAttention::Begin(std::span<const SequenceChunk> chunks) {
  rows_.clear();
  for (Method& method : methods_) method.rows.clear();
  any_retrieves_ = false;
  int32_t first_row = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const SequenceChunk& chunk = chunks[i];
    const int32_t size = static_cast<int32_t>(chunk.tokens.size());
    if (chunk.retrieval != nullptr) {
      Rows rows;
      rows.chunk = &chunk;
      rows.index = static_cast<int32_t>(i);
      rows.first_row = first_row;
      rows.first_retrieving = std::clamp(chunk.retrieve_from - chunk.position, 0, size);
      rows.floor = chunk.retrieval->floor_;
      while (rows.first_retrieving < size &&
             rows.Plan(rows.first_retrieving, options_.from).dense) {
        ++rows.first_retrieving;
      }
      rows.last_retrieving = static_cast<int32_t>(
          std::clamp<int64_t>(int64_t{rows.floor.dense_from()} - chunk.position, 0, size));
      if (rows.first_retrieving >= rows.last_retrieving) {
        rows.first_retrieving = rows.last_retrieving = size;
      }
      any_retrieves_ |= rows.first_retrieving < size;
      rows_.push_back(rows);
    }
    first_row += size;
  }
  // Chunks of one method share calls. There are few methods, and their memory is kept.
  for (size_t i = 0; i < rows_.size(); ++i) {
    const AttentionPolicy& policy = rows_[i].chunk->retrieval->policy();
    auto method = methods_.begin();
    for (; method != methods_.end() && !method->rows.empty(); ++method) {
      const AttentionPolicy& other = *method->policy;
      if (policy.kind == other.kind && policy.bits == other.bits && policy.p == other.p &&
          policy.completion == other.completion && policy.HasTail() == other.HasTail()) {
        break;
      }
    }
    if (method == methods_.end()) method = methods_.emplace(method);
    if (method->rows.empty()) method->policy = &policy;
    method->rows.push_back(static_cast<int32_t>(i));
  }
}

void RetrievalAttention::Index(int32_t layer) {
  for (const Method& method : methods_) {
    if (!method.rows.empty()) IndexMethod(layer, method);
  }
}

// Indexes are made as a prompt is read, and not when it first retrieves: 100,000 keys at once would
// hold up every other sequence of the batch.
void RetrievalAttention::IndexMethod(int32_t layer, const Method& method) {
  memory_.Unpin();
  spans_.clear();
  extensions_.clear();
  table_extensions_.clear();
  tables_.resize(std::max(tables_.size(), method.rows.size()));
  for (size_t at = 0; at < method.rows.size(); ++at) {
    Rows& rows = rows_[method.rows[at]];
    const SequenceChunk& chunk = *rows.chunk;
    RetrievalState& state = *chunk.retrieval;
    if (layer < state.policy_.dense_layers || memory_.chunk_lost(rows.index)) continue;
    RetrievalState::Layer& of_layer = state.layers_[layer];
    const int32_t end = chunk.position + static_cast<int32_t>(chunk.tokens.size());
    // Rows of this chunk were just written: what an index said of them is of other tokens.
    const int32_t begin = std::min(of_layer.indexed, chunk.position);
    int32_t first = begin;
    // As far as the next query to complete allows, be it in this chunk or after it.
    const kernels::TokenRange mid = rows.Plan(rows.first_retrieving, options_.from).mid;
    kernels::Summary& summary = of_layer.summary;
    bool extends = false;
    if (state.policy_.completion) {
      if (summary.tokens.size() == 0) summary.tokens = {mid.first, mid.first};
      extends = mid.last > summary.tokens.last;
      if (extends) first = std::min(first, summary.tokens.last);
    }
    int32_t table_end = 0;
    if (state.policy_.HasTail()) {
      if (summary.tokens.size() == 0) summary.tokens = {mid.first, mid.first};
      table_end = std::min(TableEnd(rows, chunk.position + rows.first_retrieving),
                           end / kernels::kCellRefreshTokens * kernels::kCellRefreshTokens);
      if (table_end > summary.tokens.last) first = std::min(first, summary.tokens.last);
    }
    PinnedBlocks pinned;
    // A page of bounds is read from its beginning: blocks are whole pages.
    if (!memory_.Pin(rows.index, layer, chunk.block_table, first / layout_.block_tokens,
                     (end + layout_.block_tokens - 1) / layout_.block_tokens, &tables_[at], &pinned,
                     [&] { IndexSpans(layer, method); })) {
      continue;
    }
    spans_.push_back({pinned.table, {begin, end}, chunk.block_table});
    of_layer.indexed = end;
    rows.indexed_from = begin;
    if (extends) extensions_.push_back({&summary, pinned.table, mid.last});
    if (table_end > summary.tokens.last) {
      table_extensions_.push_back({&summary, pinned.table, chunk.block_table, table_end});
    }
    pool_ = pinned.pool;
  }
  IndexSpans(layer, method);
}

void RetrievalAttention::IndexSpans(int32_t layer, const Method& method) {
  if (spans_.empty()) return;
  if (method.policy->kind == Kind::kQuest) {
    backend_.BoundKeys(spans_, pool_, layout_, bounds_[layer].data());
  } else if (const CodeIndex* codes = FindCodes(*method.policy)) {
    const CodeIndex::Layer& of_layer = codes->layers[layer];
    if (of_layer.transform != nullptr) {
      backend_.EncodeTransformKeys(spans_, pool_, layout_, *of_layer.transform,
                                   of_layer.pool.data(), codes->layout);
      if (!table_extensions_.empty()) {
        backend_.ExtendCellTables(table_extensions_, pool_, layout_, *of_layer.transform,
                                  of_layer.pool.data(), codes->layout);
      }
      table_extensions_.clear();
    } else {
      backend_.EncodeKeys(spans_, pool_, layout_, *of_layer.key, of_layer.pool.data(),
                          codes->layout);
    }
  }
  if (method.policy->p.has_value()) {
    backend_.QuantizeKeys(spans_, pool_, layout_, int4_keys_[layer].data());
  }
  if (!extensions_.empty()) {
    backend_.ExtendSummaries(extensions_, pool_, layout_, *feature_maps_[layer].key);
  }
  spans_.clear();
  extensions_.clear();
}

std::span<const AttentionChunk> RetrievalAttention::DenseChunks(
    int32_t layer, std::span<const AttentionChunk> all) {
  dense_chunks_.clear();
  auto rows = rows_.begin();
  // Rows [first, last) of q of one chunk.
  const auto add = [&](AttentionChunk chunk, int32_t first, int32_t last) {
    const int32_t end = std::min(chunk.first_row + chunk.num_tokens, last);
    const int32_t skipped = std::max(0, first - chunk.first_row);
    chunk.first_row += skipped;
    chunk.position += skipped;
    chunk.num_tokens = end - chunk.first_row;
    if (chunk.num_tokens > 0) dense_chunks_.push_back(chunk);
  };
  for (const AttentionChunk& chunk : all) {
    while (rows != rows_.end() && rows->first_row + rows->size() <= chunk.first_row) ++rows;
    const bool covered = rows != rows_.end() && rows->first_row <= chunk.first_row &&
                         layer >= rows->chunk->retrieval->policy_.dense_layers;
    if (!covered) {
      dense_chunks_.push_back(chunk);
      continue;
    }
    add(chunk, chunk.first_row, rows->first_row + rows->first_retrieving);
    add(chunk, rows->first_row + rows->last_retrieving, chunk.first_row + chunk.num_tokens);
  }
  return dense_chunks_;
}

// queries_, candidates_ and query_rows_ of the method's rows that retrieve.
void RetrievalAttention::PlanQueries(int32_t layer, const Method& method, bool logits_only,
                                     bool decoding_only) {
  queries_.clear();
  candidates_.clear();
  query_rows_.clear();
  for (const int32_t i : method.rows) {
    const Rows& rows = rows_[i];
    if (layer < rows.chunk->retrieval->policy_.dense_layers || memory_.chunk_lost(rows.index) ||
        (decoding_only && rows.size() > 1)) {
      continue;
    }
    const int32_t skipped = logits_only ? rows.size() - rows.chunk->num_logits : 0;
    for (int32_t row = std::max(rows.first_retrieving, skipped); row < rows.last_retrieving;
         ++row) {
      const QueryPlan plan = rows.Plan(row, options_.from);
      queries_.push_back({rows.first_row + row, rows.chunk->block_table, rows.chunk->position + row,
                          plan.mid, plan.k});
      candidates_.push_back(plan.candidates);
      query_rows_.push_back(&rows);
    }
  }
}

// As many queries from `first` on as fit into the scratch memory.
int32_t RetrievalAttention::CallSize(int32_t first) const {
  const int32_t num_queries = static_cast<int32_t>(queries_.size());
  int32_t count = 0;
  int64_t widest = 0;
  while (first + count < num_queries && count < kMaxQueries) {
    const RetrievalQuery& query = queries_[first + count];
    const int64_t attended = query.position + 1 - query.mid.size() + candidates_[first + count];
    widest = std::max(widest, attended);
    if (count > 0 && widest * (count + 1) * layout_.kv_heads > max_entries_) break;
    // Queries of a sequence in one call see the same table.
    const Rows& rows = *query_rows_[first + count];
    if (count > 0 && &rows == query_rows_[first + count - 1] &&
        rows.chunk->retrieval->policy_.HasTail() &&
        TableEnd(rows, query.position) != TableEnd(rows, queries_[first + count - 1].position)) {
      break;
    }
    ++count;
  }
  return count;
}

void RetrievalAttention::Attend(int32_t layer, const Tensor& q, bool logits_only,
                                const Tensor& out) {
  for (const Method& method : methods_) {
    PlanQueries(layer, method, logits_only, /*decoding_only=*/false);
    for (int32_t first = 0; first < static_cast<int32_t>(queries_.size());) {
      const int32_t count = CallSize(first);
      RunQueries(layer, method, first, count, q, out);
      first += count;
    }
  }
}

bool RetrievalAttention::predicts() const {
  if (!any_retrieves_ || !memory_.tiered()) return false;
  return std::any_of(rows_.begin(), rows_.end(), [](const Rows& rows) {
    return rows.size() == 1 && rows.first_retrieving == 0 && rows.last_retrieving == 1;
  });
}

void RetrievalAttention::Predict(int32_t layer, const Tensor& q) {
  for (const Method& method : methods_) {
    // The oracle reads all keys, and a window chooses nothing.
    const IndexKind kind = method.rows.empty() ? IndexKind::kNone : method.policy->index_kind();
    if (kind == IndexKind::kNone) continue;
    PlanQueries(layer, method, /*logits_only=*/false, /*decoding_only=*/true);
    for (int32_t first = 0; first < static_cast<int32_t>(queries_.size());) {
      const int32_t count = CallSize(first);
      const std::span<RetrievalQuery> queries = std::span(queries_).subspan(first, count);
      predicting_ = true;
      const Selection chosen = SelectAndPrune(layer, *method.policy, first, queries, q);
      predicting_ = false;
      if (!backend_.Synchronize()) return;
      for (int32_t i = 0; i < count; ++i) {
        for (int32_t head = 0; head < layout_.kv_heads; ++head) {
          const int32_t* tokens = chosen.chosen(i, head);
          for (int32_t t = 0; t < chosen.count(i, head); ++t) {
            fetcher_->Expect(layer, query_rows_[first + i]->index,
                             queries[i].block_table[tokens[t] / layout_.block_tokens], head,
                             tokens[t] % layout_.block_tokens);
          }
        }
      }
      first += count;
    }
  }
  fetcher_->Ask();
}

// SELECT, wider first where the selection is pruned afterwards.
Selection RetrievalAttention::SelectAndPrune(int32_t layer, const AttentionPolicy& policy,
                                             int32_t first, std::span<RetrievalQuery> queries,
                                             const Tensor& q) {
  int32_t capacity = 1;
  for (size_t i = 0; i < queries.size(); ++i) {
    capacity = std::max(capacity, candidates_[first + i]);
  }
  int32_t* const counts =
      static_cast<int32_t*>(counts_.data()) + int64_t{count_call_} * kMaxQueries * layout_.kv_heads;
  const Selection chosen{layout_.kv_heads, capacity, counts, static_cast<int32_t*>(tokens_.data())};
  for (size_t i = 0; i < queries.size(); ++i) std::swap(queries[i].k, candidates_[first + i]);
  Select(layer, policy, first, queries, q, chosen);
  for (size_t i = 0; i < queries.size(); ++i) std::swap(queries[i].k, candidates_[first + i]);
  if (policy.p.has_value()) {
    backend_.PruneSelection(q, queries, int4_keys_[layer].data(), layout_, scale_,
                            static_cast<float>(*policy.p), chosen, chosen);
  }
  return chosen;
}

void RetrievalAttention::RunQueries(int32_t layer, const Method& method, int32_t first,
                                    int32_t count, const Tensor& q, const Tensor& out) {
  const AttentionPolicy& policy = *method.policy;
  const std::span<RetrievalQuery> queries = std::span(queries_).subspan(first, count);
  anchor_rows_.clear();
  if (policy.kind == Kind::kPca) {
    if (!backend_.failure().empty()) return;
    if (!MeasureAnchors(layer, first, queries, q) || !ExtendTables(layer, first, queries)) {
      if (!backend_.failure().empty()) return;
      // As below: fewer queries at a time.
      RunQueries(layer, method, first, count / 2, q, out);
      RunQueries(layer, method, first + count / 2, count - count / 2, q, out);
      return;
    }
  }
  const Selection chosen = SelectAndPrune(layer, policy, first, queries, q);

  if (!BringRows(layer, first, queries, chosen)) return;

  // FETCH and ATTEND where all rows are resident and the backend finds them itself
  if (!memory_.tiered() && AttendChosen(layer, first, queries, chosen, q, out)) {
    const Masses masses = MassesOfCall();
    for (size_t i = 0; i < queries.size(); ++i) {
      pending_counts_.push_back({query_rows_[first + i]->chunk->retrieval, queries[i].position,
                                 queries[i].mid.size(), &chosen.count(i, 0)});
      if (!policy.completion) continue;
      pending_counts_.back().masses = masses.From(static_cast<int64_t>(i) * config_.num_heads);
    }
    Probe(layer, first, queries, chosen, q);
    if (++count_call_ == kCountCalls) CountPending();
    return;
  }

  // The host looks at what was chosen. If the device has failed there is nothing to look at, and
  // Forward says so.
  if (!backend_.Synchronize()) return;

  // FETCH: addresses of the rows of anchors and chosen tokens
  if (!Fetch(layer, first, queries, chosen)) {
    // More rows are missing than can be on their way: fewer queries at a time choose again.
    RunQueries(layer, method, first, count / 2, q, out);
    RunQueries(layer, method, first + count / 2, count - count / 2, q, out);
    return;
  }
  for (size_t i = 0; i < anchor_rows_.size(); ++i) {
    // What the anchors took was read once, and found in the cache the second time.
    const uint64_t stored = std::min(anchor_rows_[i].stored, tier_rows_[i].cached);
    tier_rows_[i].cached -= stored;
    tier_rows_[i].stored += stored;
  }
  Count(first, queries, chosen);
  if (memory_.IsShared(layer)) {
    for (int32_t i = 0; i < count; ++i) {
      shared_reads_.in_place += tier_rows_[i].in_frames;
      memory_.CountRead(query_rows_[first + i]->index, tier_rows_[i].in_frames * layout_.RowBytes(),
                        /*from_disk=*/false);
    }
  }

  // ATTEND: states [queries][H][d + 2]
  float* const states = static_cast<float*>(states_.data());
  backend_.AttendRows(q, queries, lists_, layout_, scale_, states);
  if (policy.completion) Complete(layer, first, queries, q);
  if (policy.HasTail()) MergeTails(layer, first, queries);
  backend_.FinishStates(queries, states, layout_.head_dim, out);
  if (fetcher_->keeps() && !backend_.Synchronize()) return;
  fetcher_->End();
  Probe(layer, first, queries, chosen, q);
}

RetrievalAttention::Masses RetrievalAttention::MassesOfCall() {
  const int64_t states = int64_t{kMaxQueries} * config_.num_heads;
  float* const before = static_cast<float*>(masses_.data()) + 2 * states * count_call_;
  return {before, before + states};
}

// False: the backend needs addresses. The queries of lost chunks are left out: their rows may be nowhere
// yet, and a device keeps what it has read.
bool RetrievalAttention::AttendChosen(int32_t layer, int32_t first,
                                      std::span<const RetrievalQuery> queries,
                                      const Selection& chosen, const Tensor& q, const Tensor& out) {
  const auto is_lost = [&](size_t i) { return memory_.chunk_lost(query_rows_[first + i]->index); };
  bool any_lost = false;
  for (size_t i = 0; i < queries.size() && !any_lost; ++i) any_lost = is_lost(i);
  if (query_rows_[first]->chunk->retrieval->policy_.completion) {
    // What a summary takes in has to be resident, and of KV in the host's memory rows have addresses.
    return !any_lost && !memory_.IsShared(layer) && PinForCompletion(layer, first, queries) &&
           AttendAndComplete(layer, first, queries, chosen, q, out);
  }
  const AttentionPolicy& policy = query_rows_[first]->chunk->retrieval->policy_;
  if (policy.HasTail()) {
    float* const states = static_cast<float*>(states_.data());
    if (any_lost || !backend_.AttendChosenStates(q, queries, chosen, memory_.LayerPool(layer),
                                                 layout_, scale_, states)) {
      return false;
    }
    MergeTails(layer, first, queries);
    backend_.FinishStates(queries, states, layout_.head_dim, out);
    return true;
  }
  // A part of a selection is known to the host only.
  if (any_lost && !backend_.Synchronize()) return true;
  for (size_t begin = 0, end = 0; begin < queries.size(); begin = end) {
    end = begin + 1;
    if (is_lost(begin)) continue;
    while (end < queries.size() && !is_lost(end)) ++end;
    if (!backend_.AttendChosen(q, queries.subspan(begin, end - begin),
                               chosen.From(static_cast<int64_t>(begin)), memory_.LayerPool(layer),
                               layout_, scale_, out)) {
      return false;
    }
  }
  return true;
}

bool RetrievalAttention::AttendAndComplete(int32_t layer, int32_t first,
                                           std::span<const RetrievalQuery> queries,
                                           const Selection& chosen, const Tensor& q,
                                           const Tensor& out) {
  float* const states = static_cast<float*>(states_.data());
  const void* pool = memory_.LayerPool(layer);
  if (!backend_.AttendChosenStates(q, queries, chosen, pool, layout_, scale_, states)) return false;
  const auto num_states = static_cast<int64_t>(queries.size()) * config_.num_heads;
  const Masses masses = MassesOfCall();
  backend_.StateMasses(states, num_states, layout_.head_dim, masses.before);
  backend_.CompleteChosenStates(q, pinned_queries_, completion_groups_, chosen, pool, layout_,
                                *feature_maps_[layer].key, *feature_maps_[layer].query, states);
  backend_.StateMasses(states, num_states, layout_.head_dim, masses.after);
  backend_.FinishStates(queries, states, layout_.head_dim, out);
  return true;
}

template <typename Call>
void RetrievalAttention::ForPinned(int32_t layer, int32_t first,
                                   std::span<const RetrievalQuery> queries, Call call) {
  memory_.Unpin();
  pinned_queries_.assign(queries.begin(), queries.end());
  tables_.resize(std::max(tables_.size(), queries.size()));
  size_t begin = 0;
  const void* pool = nullptr;
  const auto flush = [&](size_t end) {
    if (begin < end) call(begin, std::span(pinned_queries_).subspan(begin, end - begin), pool);
    begin = end;
  };
  for (size_t i = 0; i < queries.size(); ++i) {
    const int32_t chunk = query_rows_[first + i]->index;
    PinnedBlocks pinned;
    if (!memory_.Pin(chunk, layer, queries[i].block_table, 0,
                     queries[i].position / layout_.block_tokens + 1, &tables_[i], &pinned,
                     [&] { flush(i); })) {
      flush(i);
      begin = i + 1;
      continue;
    }
    if (memory_.IsShared(layer)) {
      // Keys, half of every row.
      const int64_t blocks = queries[i].position / layout_.block_tokens + 1;
      memory_.CountRead(chunk, blocks * layout_.BlockBytes() / 2, /*from_disk=*/false);
    }
    pinned_queries_[i].block_table = pinned.table;
    pool = pinned.pool;
  }
  flush(queries.size());
}

void RetrievalAttention::Select(int32_t layer, const AttentionPolicy& policy, int32_t first,
                                std::span<const RetrievalQuery> queries, const Tensor& q,
                                const Selection& chosen) {
  switch (policy.kind) {
    case Kind::kDense:
    case Kind::kWindow:
      std::fill_n(chosen.counts, queries.size() * layout_.kv_heads, 0);
      return;
    case Kind::kOracle:
      std::fill_n(chosen.counts, queries.size() * layout_.kv_heads, 0);
      ForPinned(layer, first, queries,
                [&](size_t begin, std::span<const RetrievalQuery> pinned, const void* pool) {
                  backend_.SelectByLogits(q, pinned, pool, layout_, scale_, chosen.From(begin));
                });
      return;
    case Kind::kQuest:
      backend_.SelectByBounds(q, queries, bounds_[layer].data(), layout_, scale_, chosen);
      return;
    case Kind::kPca:
      SelectByMass(layer, policy, first, queries, q, chosen);
      return;
    case Kind::kLsh:
    case Kind::kHata:
    case Kind::kSpotlight:
    case Kind::kHashAttention: {
      const CodeIndex& codes = *FindCodes(policy);
      backend_.EncodeQueries(q, queries, *codes.layers[layer].query, query_codes_.data());
      backend_.SelectByCodes(queries, query_codes_.data(), group_, codes.layers[layer].pool.data(),
                             codes.layout, chosen);
      return;
    }
  }
}

void RetrievalAttention::Complete(int32_t layer, int32_t first,
                                  std::span<const RetrievalQuery> queries, const Tensor& q) {
  if (memory_.chunk_lost(query_rows_[first]->index) && queries.size() == 1) return;
  float* states = static_cast<float*>(states_.data());
  const int32_t d = layout_.head_dim;
  const auto num_states = static_cast<int64_t>(queries.size()) * config_.num_heads;
  const Masses masses = MassesOfCall();
  backend_.StateMasses(states, num_states, d, masses.before);
  backend_.CompleteStates(q, pinned_queries_, completion_groups_, lists_, pool_, layout_,
                          *feature_maps_[layer].key, *feature_maps_[layer].query, states);
  backend_.StateMasses(states, num_states, d, masses.after);
  if (!backend_.Synchronize()) return;
  for (size_t i = 0; i < queries.size(); ++i) {
    RetrievalState& state = *query_rows_[first + i]->chunk->retrieval;
    if (queries[i].position < state.counted_) continue;
    AddCompletions(state.counts_, masses.From(static_cast<int64_t>(i) * config_.num_heads));
  }
}

void RetrievalAttention::AddCompletions(RetrievalCounts& counts, const Masses& masses) const {
  for (int32_t head = 0; head < config_.num_heads; ++head) {
    ++counts.completions;
    counts.completed += -std::expm1(masses.before[head] - masses.after[head]);
  }
}

// Which queries are measured is a function of position and layer, so that a sequence that is
// computed again is measured at the same places, and `floor` acts from the same position on.
void RetrievalAttention::Probe(int32_t layer, int32_t first,
                               std::span<const RetrievalQuery> queries, const Selection& chosen,
                               const Tensor& q) {
  if (options_.probe_interval == 0) return;
  for (size_t i = 0; i < queries.size(); ++i) {
    if (!IsProbed(queries[i].position, layer, options_.probe_interval)) continue;
    RetrievalState& state = *query_rows_[first + i]->chunk->retrieval;
    const bool counted = queries[i].position < state.counted_;
    if (counted && !state.policy_.floor.has_value()) continue;
    bool measured = false;
    ForPinned(layer, first + static_cast<int32_t>(i), queries.subspan(i, 1),
              [&](size_t, std::span<const RetrievalQuery> pinned, const void* pool) {
                backend_.MeasureSelection(q, pinned, pool, layout_, scale_, chosen.From(i),
                                          quality_.data());
                measured = true;
              });
    if (!backend_.failure().empty()) return;
    if (!measured) continue;  // its chunk is lost: it will be measured when it is computed again
    double coverage = 0;
    for (const SelectionQuality& head : quality_) {
      coverage += head.coverage;
      if (counted) continue;
      ++state.counts_.probes;
      state.counts_.coverage += head.coverage;
      state.counts_.iou += head.iou;
    }
    coverage /= layout_.kv_heads;
    if (state.policy_.floor.has_value() && coverage < *state.policy_.floor) {
      // Not within the prompt: which of its tokens have attended by now, and in which layers, depends on
      // how it was cut into chunks, and results must not.
      const int32_t before = state.policy_.suffix > 0 ? layout_.block_tokens - 1 : 0;
      const int32_t prompt_end =
          query_rows_[first + i]->chunk->retrieve_from + state.policy_.suffix + before;
      state.floor_.Fell(query_rows_[first + i]->floor.Taken(queries[i].position),
                        std::max(queries[i].position + 1, prompt_end), state.policy_.HasBudget());
    }
  }
}

void RetrievalAttention::Count(int32_t first, std::span<const RetrievalQuery> queries,
                               const Selection& chosen) {
  for (size_t i = 0; i < queries.size(); ++i) {
    RetrievalState& state = *query_rows_[first + i]->chunk->retrieval;
    const RetrievalQuery& query = queries[i];
    if (query.position < state.counted_) continue;
    RetrievalCounts& counts = state.counts_;
    uint64_t kept = 0;
    for (int32_t head = 0; head < layout_.kv_heads; ++head) {
      kept += chosen.count(static_cast<int64_t>(i), head);
    }
    counts.rows_cached += tier_rows_[i].cached;
    counts.rows_stored += tier_rows_[i].stored;
    AddCounts(counts, kept, query.mid.size());
  }
}

void RetrievalAttention::CountPending() {
  // If the device has failed, so has the pass, and nobody asks what it read.
  const bool done = pending_counts_.empty() || backend_.Synchronize();
  for (const PendingCount& pending : pending_counts_) {
    RetrievalState& state = *pending.state;
    if (!done || pending.position < state.counted_) continue;
    uint64_t kept = 0;
    for (int32_t head = 0; head < layout_.kv_heads; ++head) kept += pending.counts[head];
    AddCounts(state.counts_, kept, pending.mid_size);
    if (pending.masses.before != nullptr) AddCompletions(state.counts_, pending.masses);
  }
  pending_counts_.clear();
  count_call_ = 0;
}

void RetrievalAttention::CountSharedReads() {
  if (memory_.shared_kv() == nullptr || !any_retrieves_) return;
  const Rows& last = rows_.back();
  const std::span reads(static_cast<kernels::SharedKvReads*>(reads_.data()),
                        static_cast<size_t>(last.first_row) + last.size());
  memory_.shared_kv()->TakeReads(reads);
  if (!backend_.Synchronize()) return;
  for (const Rows& rows : rows_) {
    RetrievalState& state = *rows.chunk->retrieval;
    for (int32_t row = rows.first_retrieving; row < rows.last_retrieving; ++row) {
      const kernels::SharedKvReads& of_row = reads[rows.first_row + row];
      const uint64_t stored = uint64_t{of_row.fetched} + of_row.in_place;
      shared_reads_.cached += of_row.cached;
      shared_reads_.fetched += of_row.fetched;
      shared_reads_.in_place += of_row.in_place;
      memory_.CountRead(rows.index, stored * layout_.RowBytes(), /*from_disk=*/false);
      if (rows.chunk->position + row < state.counted_) continue;
      state.counts_.rows_cached += of_row.cached;
      state.counts_.rows_stored += stored;
    }
  }
}

void RetrievalAttention::AddCounts(RetrievalCounts& counts, uint64_t kept, int32_t mid_size) const {
  const uint64_t mid_rows = uint64_t{1} * layout_.kv_heads * mid_size;
  counts.chosen_rows += kept;
  counts.mid_rows += mid_rows;
  // End() takes this row for a dense one first.
  counts.rows_read -= mid_rows - kept;
}

void RetrievalAttention::End() {
  CountSharedReads();
  CountPending();
  for (const Rows& rows : rows_) {
    const SequenceChunk& chunk = *rows.chunk;
    RetrievalState& state = *chunk.retrieval;
    const int32_t end = chunk.position + rows.size();
    if (rows.indexed_from >= 0 && !memory_.chunk_lost(rows.index)) {
      MarkIndexed(rows, rows.indexed_from, end);
    }
    for (int32_t position = std::max({chunk.position, chunk.retrieve_from, state.counted_});
         position < end; ++position) {
      // Nobody attends in the last layer but who wants logits.
      const bool has_logits = position >= end - chunk.num_logits;
      const uint64_t layers = static_cast<uint64_t>(config_.num_layers) - (has_logits ? 0 : 1);
      const uint64_t visible = static_cast<uint64_t>(position) + 1;
      const uint64_t heads = layout_.kv_heads;
      state.counts_.rows_dense += visible * layers * heads;
      state.counts_.rows_read += visible * layers * heads;
      const int32_t steps = rows.floor.Taken(position);
      state.counts_.widened_tokens += steps == 1 || steps == 2 ? 1 : 0;
      state.counts_.floor_dense_tokens += steps == 3 ? 1 : 0;
    }
    state.counted_ = std::max(state.counted_, end);
  }
  fetcher_->EndPass();
}

}  // namespace winnow::engine

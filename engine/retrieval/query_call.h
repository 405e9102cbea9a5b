// A forward pass as retrieval sees it: the rows of each sequence, and the queries of one call of the backend. Plain data
// that every step of a layer is handed.
#ifndef WINNOW_ENGINE_RETRIEVAL_QUERY_CALL_H_
#define WINNOW_ENGINE_RETRIEVAL_QUERY_CALL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/model.h"
#include "engine/model/layer_spec.h"
#include "engine/model/model_config.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/retrieval_state.h"
#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"

namespace winnow::engine {

// Facts of the model that the steps need.
struct RetrievalShape {
  RetrievalShape(const ModelConfig& config, const kernels::KvLayout& kv)
      : layers(config.layers),
        num_layers(config.num_layers()),
        num_heads(config.num_heads),
        kv_heads(kv.kv_heads),
        head_dim(config.head_dim),
        scale(config.AttentionScale()),
        layout(kv) {}

  int32_t group() const { return num_heads / kv_heads; }  // query heads of a KV head
  // The block of the sequence that has the token, and one past the last block of [0, tokens).
  int32_t BlockOf(int32_t token) const { return token / layout.block_tokens; }
  int32_t BlocksOf(int32_t tokens) const {
    return (tokens + layout.block_tokens - 1) / layout.block_tokens;
  }

  std::vector<LayerSpec> layers;
  int32_t num_layers, num_heads, kv_heads, head_dim;
  float scale;  // of logits
  kernels::KvLayout layout;
};

// The rows of a sequence that has a retrieval state.
struct PassRows {
  const SequenceChunk* chunk = nullptr;
  int32_t index = 0;      // of the chunk in the pass
  int32_t first_row = 0;  // of the chunk, in q and out
  // Rows [first, last) of the chunk retrieve; those around them are dense. Empty: first == last
  // == size.
  int32_t first_retrieving = 0, last_retrieving = 0;
  // The index of the last layer took in tokens from here on, as those before it did; -1: nothing.
  int32_t indexed_from = -1;
  FloorSteps floor;  // as they were when the pass began: a probe acts from the next pass on

  RetrievalState& state() const { return *chunk->retrieval; }
  const AttentionPolicy& policy() const { return chunk->retrieval->policy(); }
  int32_t size() const { return static_cast<int32_t>(chunk->tokens.size()); }
  QueryPlan Plan(int32_t row_in_chunk, int32_t from) const {
    const int32_t position = chunk->position + row_in_chunk;
    return PlanQuery(policy(), position, from, floor.Widen(position));
  }
  // The end of the table of cells for a query at `position`: the last border that it sees, at least the table's first
  // token. A draft's tokens stay outside: the means of a cell cannot give them back.
  int32_t TableEnd(int32_t position) const;
};

// Queries of one call are enough to keep every thread busy; their states stay small.
inline constexpr int32_t kMaxCallQueries = 64;
// Calls whose counts can wait for the end of the pass: those of a decode step.
inline constexpr int32_t kCallSlots = 128;

// Queries whose policies agree in all but sizes, in one layer. Queries of a sequence stand side by side.
struct QueryCall {
  int32_t layer = 0;
  int32_t slot =
      0;  // of [kCallSlots]: memory of the call that the host may read at the end of the pass
  const AttentionPolicy* policy = nullptr;
  std::span<kernels::RetrievalQuery> queries;  // at most kMaxCallQueries
  std::span<int32_t> candidates;               // [queries] to select before pruning
  std::span<const PassRows* const> rows;       // [queries] their sequences
  const float* sinks = nullptr;                // the layer's (kernels/row_ops.h), or null

  size_t size() const { return queries.size(); }
  QueryCall Part(size_t first, size_t count) const {
    return {layer,
            slot,
            policy,
            queries.subspan(first, count),
            candidates.subspan(first, count),
            rows.subspan(first, count),
            sinks};
  }
};

// Logarithms of states' masses, query heads side by side, before and after an estimate was merged, in shared
// memory.
struct StateMasses {
  float *before = nullptr, *after = nullptr;
  StateMasses From(int64_t state) const { return {before + state, after + state}; }
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_QUERY_CALL_H_

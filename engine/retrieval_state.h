// What a model keeps of one sequence that retrieves, beside its KV blocks: how far each layer's
// index reaches, the summaries of completion, and what was counted. Made by
// Model::NewRetrievalState, owned by whoever owns the sequence, passed with every chunk. Engine
// thread only.
//
// Everything here but the counts is a function of the sequence's KV and its policy: lost state is
// made again from the KV, and greedy output does not change.
#ifndef WINNOW_ENGINE_RETRIEVAL_STATE_H_
#define WINNOW_ENGINE_RETRIEVAL_STATE_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "engine/attention_policy.h"
#include "kernels/backend.h"

namespace winnow::engine {

// Sums over the rows that a policy had its say in: those at retrieve_from and after. A row that
// went dense (a short context, a dense layer) counts as having read everything.
struct RetrievalCounts {
  uint64_t rows_read = 0;    // KV rows that attention read, over layers and KV heads
  uint64_t rows_dense = 0;   // what dense attention would have read
  uint64_t rows_cached = 0;  // of rows_read: lay in the row cache
  uint64_t rows_stored = 0;  // of rows_read: came from a slower tier for it
  uint64_t mid_rows = 0;     // of layers under the policy: mid tokens, over KV heads
  uint64_t chosen_rows = 0;  // of those, read
  uint64_t probes = 0;       // (query, layer, KV head) whose selection was measured
  double coverage = 0;       // sum over probes (kernels::SelectionQuality)
  double iou = 0;            // the same
  uint64_t completions = 0;  // (query, layer, query head) that completion added to
  double completed = 0;      // sum over completions: the share of the mass that it stands for

  RetrievalCounts& operator+=(const RetrievalCounts& other);
};

// How one query token attends in a layer under the policy. Sizes in tokens.
struct QueryPlan {
  bool dense = true;
  kernels::TokenRange mid;
  int32_t k = 0;           // to choose of mid
  int32_t candidates = 0;  // to choose first, when they are pruned afterwards; else k
};
// Of the query at `position`, which sees position + 1 tokens. Dense where choosing would save
// nothing: mid has no more tokens than k. `from` is the shortest context that retrieves, for
// policies that leave it open. Monotone: what retrieves at a position retrieves at all later ones.
QueryPlan PlanQuery(const AttentionPolicy& policy, int32_t position, int32_t from);

class RetrievalState {
 public:
  RetrievalState(const AttentionPolicy& policy, int32_t num_layers)
      : policy_(policy), layers_(num_layers) {}

  const AttentionPolicy& policy() const { return policy_; }
  const RetrievalCounts& counts() const { return counts_; }

  // The KV from token `tokens` on is lost, and will be written again with the same tokens: what is
  // counted once is not counted again.
  void Truncate(int32_t tokens);
  // The same, but other tokens may follow: everything that comes is news.
  void Rewind(int32_t tokens);
  // All of the KV is lost, and the summaries' place goes to others: before the next pass
  // Model::ResumeRetrieval must find it one.
  void Suspend();
  RetrievalCounts TakeCounts();

 private:
  friend class RetrievalAttention;
  struct Layer {
    int32_t indexed = 0;       // tokens [0, indexed) are in the index of the policy
    kernels::Summary summary;  // its data are in summaries_
  };

  const AttentionPolicy policy_;
  std::vector<Layer> layers_;
  kernels::Buffer
      summaries_;  // of all layers, a place in RetrievalAttention's pool; null: suspended
  // Queries from this position on are dense, because a probe before it fell below policy.floor; never
  // inside a prompt.
  int32_t dense_from_ = std::numeric_limits<int32_t>::max();
  int32_t counted_ = 0;  // positions below this one have been counted
  RetrievalCounts counts_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_STATE_H_

// What a model keeps of one sequence that retrieves, beside its KV blocks: how far each layer's
// index reaches, the summaries of completion, and what was counted. Made by
// Model::NewRetrievalState, owned by whoever owns the sequence, passed with every chunk. Engine
// thread only.
//
// Everything here but the counts is a function of the sequence's KV and its policy: lost state is
// made again from the KV, and greedy output does not change.
#ifndef WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_STATE_H_
#define WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_STATE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/retrieval/attention_policy.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::engine {

// Sums over the rows that a policy had its say in: those at retrieve_from and after. A row that
// went dense (a short context, a dense layer) counts as having read everything.
struct RetrievalCounts {
  uint64_t rows_read = 0;       // KV rows that attention read, over layers and KV heads
  uint64_t rows_dense = 0;      // what dense attention would have read
  uint64_t rows_cached = 0;     // of rows_read: lay in the row cache
  uint64_t rows_stored = 0;     // of rows_read: came from a slower tier for it
  uint64_t candidate_rows = 0;  // of layers under the policy: mid tokens, over KV heads
  uint64_t selected_rows = 0;   // of those, read
  uint64_t probes = 0;          // (query, layer, KV head) whose selection was measured
  double coverage = 0;          // sum over probes (kernels::SelectionQuality)
  double iou = 0;               // the same
  uint64_t tail_estimates = 0;  // (query, layer, query head) whose tail's mass was measured
  double tail_mass = 0;         // sum over tail_estimates: the share of the mass that it stands for
  uint64_t widened_tokens = 0;  // query tokens that selected more because of the policy's floor
  uint64_t floor_dense_tokens = 0;  // query tokens that were dense because of it

  RetrievalCounts& operator+=(const RetrievalCounts& other);
};

// KV entries that were read ahead of time, and those of them that a policy then chose; the rest was
// read in vain.
struct PrefetchCounts {
  uint64_t asked = 0, hits = 0;
};

// How one query token attends in a layer under the policy. Sizes in tokens.
struct QueryPlan {
  bool dense = true;
  kernels::TokenRange mid;
  int32_t k = 0;           // to choose of mid
  int32_t candidates = 0;  // to choose first, when they are pruned afterwards; else k
  double min_mass = 0;     // share of the attention that a token of mid must have to be chosen
};
// Of the query at `position`, which sees position + 1 tokens. Dense where choosing would save
// nothing: mid has no more tokens than k. `from` is the shortest context that retrieves, for
// policies that leave it open. `widen` multiplies k, up to all candidates, and divides min_mass; whether the query is dense
// does not depend on it. Monotone: what retrieves at a position retrieves at all later ones.
QueryPlan PlanQuery(const AttentionPolicy& policy, int32_t position, int32_t from,
                    int32_t widen = 1);

// From which positions on a sequence reads more, because a probe before them fell below the policy's
// floor: twice k, four times k, everything. Each step begins after the one before it, since it needs a
// probe that fell below the floor in spite of that one. Plain data.
class FloorSteps {
 public:
  static constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

  // A query that ran when `taken` steps were taken fell below the floor, and queries from `next` on are
  // yet to come: the next step begins there, or all of them if there is no k to widen. Does nothing if
  // those queries read more than that one already: others of its pass may have fallen, too.
  void Fell(int32_t taken, int32_t next, bool can_widen);
  // Steps taken before or at `position`, 0 to 3.
  int32_t Taken(int32_t position) const;
  int32_t Widen(int32_t position) const { return 1 << std::min(Taken(position), 2); }
  int32_t dense_from() const { return first_[2]; }
  // Steps that begin after `tokens` are undone.
  void Rewind(int32_t tokens);

 private:
  std::array<int32_t, 3> first_ = {kNever, kNever, kNever};
};

// Whether the selection of the query at `position` is measured in `layer`: one in `interval`, spread
// over positions and layers as if drawn at random. Counting through positions and layers instead would
// measure only some layers where their number and the interval share a factor: of 32 layers and an
// interval of 64 only the first, which is dense. REQUIRES: interval > 0
bool IsProbed(int32_t position, int32_t layer, int32_t interval);

// Blocks of densely decoded tokens that an index takes in together, where no query needs it before.
inline constexpr int32_t kWaitingBlocks = 8;

class RetrievalState {
 public:
  // `sees_all`: for each layer, whether attention sees all tokens (LayerSpec::SeesAll): the policy chooses in no other.
  RetrievalState(const AttentionPolicy& policy, const std::vector<bool>& sees_all);

  const AttentionPolicy& policy() const { return policy_; }
  // Whether the policy chooses what the layer reads; else it reads all that it sees.
  bool RetrievesIn(int32_t layer) const { return layers_[layer].retrieves; }
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
  // Tokens among the first `tokens` that the index of some layer lacks: the next query that selects takes them in first.
  int32_t NotIndexed(int32_t tokens) const;

  // ---- for engine/retrieval/ alone ----

  struct Layer {
    bool retrieves = false;
    int32_t indexed = 0;       // tokens [0, indexed) are in the index of the policy
    kernels::Summary summary;  // its data are in summaries()
  };
  Layer& layer(int32_t i) { return layers_[i]; }
  const Layer& layer(int32_t i) const { return layers_[i]; }
  int32_t num_layers() const { return static_cast<int32_t>(layers_.size()); }
  // A place in the pool of Indexes, for all layers; null: suspended.
  kernels::Buffer& summaries() { return summaries_; }
  const kernels::Buffer& summaries() const { return summaries_; }
  FloorSteps& floor() { return floor_; }
  // Positions below this one have been counted.
  int32_t counted() const { return counted_; }
  void CountedUpTo(int32_t position) { counted_ = std::max(counted_, position); }
  RetrievalCounts& tally() { return counts_; }

 private:
  const AttentionPolicy policy_;
  std::vector<Layer> layers_;
  kernels::Buffer summaries_;
  FloorSteps floor_;  // no step begins inside a prompt
  int32_t counted_ = 0;
  RetrievalCounts counts_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_STATE_H_

// Retrieval in a forward pass: one layer's steps for the rows that a policy covers (docs/retrieval.md). The decoder calls it
// at three places:
//
//   Begin(chunks)       which rows retrieve at all
//   Index(layer)        after the layer's KV is written: the indexes catch up with it
//   Attend(layer, ...)  the rows that retrieve; those that do not are in DenseChunks(layer)
//
// The order of a layer's steps is here, each step in an object of its own, which can be had and tested alone:
//
//   Indexes        codes, bounds, summaries beside the KV        IndexKeeper  the same in the store
//   Selector       which candidates a query reads                Fetcher      where their KV entries lie
//   TailEstimator  what stands for the rest                      Probe        what a selection covers
//   ReadCounter    what was read
//
// Rows are attended one by one as far as results go: what a row selects and computes depends on its
// query and the KV before it alone, not on the batch, nor on the tier that a KV entry came from. Pools
// and scratch are allocated at Create.
//
// Threads: one at a time (the engine thread); CheckPolicy from any thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_ATTENTION_H_
#define WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_memory.h"
#include "engine/model.h"
#include "engine/retrieval/fetcher.h"
#include "engine/retrieval/index_keeper.h"
#include "engine/retrieval/indexes.h"
#include "engine/retrieval/probe.h"
#include "engine/retrieval/query_call.h"
#include "engine/retrieval/read_counter.h"
#include "engine/retrieval/retrieval_options.h"
#include "engine/retrieval/selector.h"
#include "engine/retrieval/tail_estimator.h"
#include "kernels/backend.h"

namespace winnow::engine {

class RetrievalAttention {
 public:
  // `memory` and `backend` must outlive it. ResourceExhausted: with bytes asked for and what for.
  static absl::StatusOr<std::unique_ptr<RetrievalAttention>> Create(
      const ModelConfig& config, KvMemory& memory, int32_t max_context, kernels::Backend& backend,
      const RetrievalOptions& options, const RowFetcherOptions& rows = {});

  // InvalidArgument names the option that cannot be honoured, and what would help.
  absl::Status CheckPolicy(const AttentionPolicy& policy) const;
  // REQUIRES: CheckPolicy is OK; the state goes before this does. ResourceExhausted: as many states
  // as options.summaries complete already.
  absl::StatusOr<std::unique_ptr<RetrievalState>> NewState(const AttentionPolicy& policy);
  // After Suspend; else does nothing.
  absl::Status Resume(RetrievalState& state) { return indexes_->GivePlace(state); }

  // ---- a pass ----

  // The chunks of this pass, and where their rows begin. Null states are dense.
  // REQUIRES: chunks and what they point to stay until the pass is over.
  void Begin(std::span<const SequenceChunk> chunks);
  // Whether any row of this pass retrieves.
  bool any_retrieves() const { return any_retrieves_; }

  void Index(int32_t layer);

  // The chunks of `all` (one of every sequence, or its last rows) that attend densely in `layer`.
  std::span<const kernels::AttentionChunk> DenseChunks(
      int32_t layer, std::span<const kernels::AttentionChunk> all);
  // out rows of every query that retrieves in `layer`; only those with logits if `logits_only`. `sinks`: the layer's, [H] on the
  // device, or null. They share the denominator with what is read and with what is estimated; policies choose, and shares are
  // counted, as if there were none.
  void Attend(int32_t layer, const kernels::Tensor& q, bool logits_only, const float* sinks,
              const kernels::Tensor& out);
  // Starts to read what `layer`, the next one, may select for rows that decode: `q` [rows][H*d] is an
  // estimate of its queries. Only what is read when depends on it, never a result.
  void Predict(int32_t layer, const kernels::Tensor& q);
  bool predicts() const;  // there are rows that it would help
  // Counts the pass.
  void End();

  const Indexes& indexes() const { return *indexes_; }
  IndexKeeper& keeper() { return *keeper_; }
  const RowFetcher& row_fetcher() const { return fetcher_.rows(); }
  const SharedReads& shared_reads() const { return counter_.shared_reads(); }
  size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  // Rows that one call of the backend can serve: of sequences whose policies agree in all but sizes.
  struct Method {
    const AttentionPolicy* policy = nullptr;
    std::vector<PassRows*> rows;
  };

  RetrievalAttention(const ModelConfig& config, KvMemory& memory, kernels::Backend& backend,
                     int32_t from, std::unique_ptr<Indexes> indexes,
                     std::unique_ptr<IndexKeeper> keeper, int32_t probe_interval);
  absl::Status Allocate(int32_t max_context, const RetrievalOptions& options,
                        const RowFetcherOptions& rows);
  PassRows RowsOf(const SequenceChunk& chunk, int32_t index, int32_t first_row) const;
  void GroupByMethod();
  void PlanQueries(int32_t layer, const Method& method, bool logits_only, bool decoding_only);
  QueryCall NextCall(int32_t layer, const Method& method, int32_t first);
  int32_t CallSize(int32_t first) const;
  void RunCall(QueryCall call, const kernels::Tensor& q, const kernels::Tensor& out);
  void RunHalves(const QueryCall& call, const kernels::Tensor& q, const kernels::Tensor& out);
  bool MeasureAnchors(const QueryCall& call, const kernels::Tensor& q);
  bool FindsRows(int32_t layer) const;
  kernels::RowSource RowsInPool(int32_t layer, const kernels::Selection& selected) const;
  kernels::RowSource RowsAtAddresses() const;
  bool AttendInPool(const QueryCall& call, const kernels::Selection& selected,
                    const kernels::Tensor& q, const kernels::Tensor& out);
  bool AttendStatesInPool(const QueryCall& call, const kernels::Selection& selected,
                          const kernels::Tensor& q, const kernels::Tensor& out);
  std::span<const kernels::RetrievalQuery> ChosenAlone(const QueryCall& call);
  bool MeasuresTail(const QueryCall& call) const;
  void Finish(const QueryCall& call, float* states, const kernels::Tensor& out);
  void AttendByAddress(const QueryCall& call, const kernels::Selection& selected,
                       const kernels::Tensor& q, const kernels::Tensor& out);

  const RetrievalShape shape_;
  KvMemory& memory_;
  kernels::Backend& backend_;
  const int32_t from_;  // shortest context that retrieves, for policies that leave it open
  const std::unique_ptr<Indexes> indexes_;
  const std::unique_ptr<IndexKeeper> keeper_;
  Selector selector_;
  Fetcher fetcher_;
  TailEstimator tail_;
  Probe probe_;
  ReadCounter counter_;

  // State of the present pass.
  std::vector<PassRows> rows_;
  std::vector<Method> methods_;
  bool any_retrieves_ = false;

  // Scratch of a call. Sized at Create for any one query, or many small ones.
  int64_t max_entries_ = 0;  // tokens selected and entries attended, over queries and heads
  std::vector<kernels::RetrievalQuery> queries_;  // of one method in one layer
  std::vector<int32_t> candidates_;               // [queries_] to select before pruning
  std::vector<const PassRows*> query_rows_;       // [queries_] their sequences
  std::vector<kernels::AttentionChunk> dense_chunks_;
  std::vector<Fetcher::TierRows> anchor_rows_;  // [queries] what reading the anchors first took
  kernels::Buffer states_;                      // the device's
  // Selection by masses alone has these: the anchors' masses [kMaxCallQueries][H]; masses of no keys, in shared memory, for
  // the prediction of a layer; and the anchors' states, as states_.
  kernels::Buffer anchor_masses_, no_anchor_masses_, anchor_states_;
  std::vector<kernels::RetrievalQuery> chosen_alone_;  // of a call
  size_t scratch_bytes_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_ATTENTION_H_

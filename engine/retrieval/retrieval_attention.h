// Retrieval in a forward pass: the indexes beside the KV, and one layer's SELECT, FETCH, ATTEND and
// completion for the rows that a policy covers (DESIGN, section 3). The decoder calls it at three
// places:
//
//   Begin(chunks)       which rows retrieve at all
//   Index(layer)        after the layer's KV is written: codes, bounds, summaries catch up with it
//   Attend(layer, ...)  the rows that retrieve; those that do not are in DenseChunks(layer)
//
// Rows are attended one by one as far as results go: what a row chooses and computes depends on its
// query and the KV before it alone, not on the batch, nor on the tier that a KV row came from. Pools
// and scratch are allocated at Create.
//
// Threads: one at a time (the engine thread); CheckPolicy from any thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_ATTENTION_H_
#define WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_ATTENTION_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_memory.h"
#include "engine/model.h"
#include "engine/model/model_config.h"
#include "engine/retrieval/artifact.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/retrieval_state.h"
#include "engine/retrieval/row_fetcher.h"
#include "engine/retrieval/transform_fit.h"
#include "kernels/backend.h"

namespace winnow::engine {

// An index that policies of one kind need: its pools hold memory, so a server may leave some out.
struct IndexSpec {
  AttentionPolicy::Kind kind =
      AttentionPolicy::Kind::kLsh;  // quest, lsh, pca, hata, spotlight or hashattention
  int32_t bits = 0;                 // of codes; 0 for quest
  bool operator==(const IndexSpec&) const = default;
};
std::string ToString(const IndexSpec& spec);  // "lsh:128", "quest"

struct RetrievalOptions {
  std::shared_ptr<const Artifact> artifact;  // null: learned policies and completion are refused
  std::shared_ptr<const TransformFit> transform;  // null: pca is refused
  std::string no_transform;                       // why there is none, where one was tried
  std::vector<IndexSpec> indexes;
  bool four_bit_keys = false;  // for policies with p
  int32_t from = 0;            // shortest context that retrieves, for policies that leave it open
  // Sequences that may complete at a time: each has a place for its summaries. 0: none may.
  int32_t summaries = 1;
  // One in so many (query, layer) is measured: its coverage and IoU with the oracle, which reads
  // all keys. 0: none
  int32_t probe_interval = 0;
};

// What the policies need, and no more.
RetrievalOptions OptionsFor(std::span<const AttentionPolicy> policies,
                            std::shared_ptr<const Artifact> artifact);
// Every index that can be had: those that need no training, and the artifact's kinds. pca, which needs a fit, is not
// among them (model_retrieval.h adds it).
std::vector<IndexSpec> AllIndexes(const Artifact* artifact);
// Bytes of the summaries of one sequence; 0 without feature maps.
int64_t SummaryBytes(const ModelConfig& config, const RetrievalOptions& options);
// Bytes of the index pools beside one block of KV of every layer.
int64_t IndexBlockBytes(const ModelConfig& config, const kernels::KvLayout& layout,
                        const RetrievalOptions& options);

// Rows of KV in shared memory (KvMemory::IsShared) that attention over chosen rows read.
struct SharedReads {
  uint64_t cached = 0;    // lay in the row cache
  uint64_t fetched = 0;   // came over the bus into it
  uint64_t in_place = 0;  // over the bus without it: there was no room, or completion wanted them
};

class RetrievalAttention {
 public:
  // `memory` and `backend` must outlive it. ResourceExhausted: with bytes asked for and what for.
  static absl::StatusOr<std::unique_ptr<RetrievalAttention>> Create(
      const ModelConfig& config, KvMemory& memory, int32_t max_context, kernels::Backend& backend,
      const RetrievalOptions& options, const RowFetcherOptions& rows = {});
  ~RetrievalAttention();

  // InvalidArgument names the option that cannot be honoured, and what would help.
  absl::Status CheckPolicy(const AttentionPolicy& policy) const;
  // REQUIRES: CheckPolicy is OK; the state goes before this does. ResourceExhausted: as many states
  // as options.summaries complete already.
  absl::StatusOr<std::unique_ptr<RetrievalState>> NewState(const AttentionPolicy& policy);
  absl::Status Resume(RetrievalState& state);  // after Suspend; else does nothing

  // ---- what is kept beside KV (retrieval_keep.cc) ----

  // Puts what the indexes say of a full block aside in the store, under the block's name. Nothing
  // without a store, or where no index has the whole block.
  void SaveIndex(int32_t block, const BlockName& name);
  // The same of the state's summaries.
  void SaveSummary(const RetrievalState& state, const BlockName& name);
  // `blocks` hold the first tokens of a sequence that did not compute them: what the indexes have of
  // them, or the store, need not be made again.
  void AdoptIndex(RetrievalState& state, std::span<const int32_t> blocks,
                  std::span<const BlockName> names, int32_t retrieve_from);

  // ---- a pass ----

  // The chunks of this pass, and where their rows begin. Null states are dense.
  // REQUIRES: chunks and what they point to stay until the pass is over.
  void Begin(std::span<const SequenceChunk> chunks);
  // Whether any row of this pass retrieves.
  bool any_retrieves() const { return any_retrieves_; }

  void Index(int32_t layer);

  // Of `all` (a chunk of every sequence, or its last rows), what attends densely in `layer`.
  std::span<const kernels::AttentionChunk> DenseChunks(
      int32_t layer, std::span<const kernels::AttentionChunk> all);
  // out rows of every query that retrieves in `layer`; only those with logits if `logits_only`.
  void Attend(int32_t layer, const kernels::Tensor& q, bool logits_only,
              const kernels::Tensor& out);
  // Starts to read what `layer`, the next one, may choose for rows that decode: `q` [rows][H*d] is an
  // estimate of its queries. Only what is read when depends on it, never a result.
  void Predict(int32_t layer, const kernels::Tensor& q);
  bool predicts() const;  // there are rows that it would help
  // Counts the pass.
  void End();

  // What choosing reads of a mid token, per layer and KV head: its code, its share of a page's
  // bounds, its key. Without four-bit keys, of which pruning reads those of candidates.
  double IndexRowBytes(const AttentionPolicy& policy) const;
  size_t index_bytes() const { return index_bytes_; }
  size_t summary_bytes() const { return summary_pool_.size_bytes(); }  // of all sequences
  size_t scratch_bytes() const { return scratch_bytes_; }
  const RowFetcher& fetcher() const { return *fetcher_; }
  const SharedReads& shared_reads() const { return shared_reads_; }
  const RetrievalOptions& options() const { return options_; }

 private:
  // Learned or random functions and the pools of one kind, for every layer that has them.
  struct CodeIndex {
    struct Layer {
      std::unique_ptr<kernels::PackedEncoder> key, query;       // null: the layer has none
      std::unique_ptr<kernels::PackedTransformCode> transform;  // of pca, in place of both
      kernels::Buffer pool;
    };
    IndexSpec spec;
    kernels::CodeLayout layout;
    std::vector<Layer> layers;
  };
  // A chunk of the pass that has a state.
  struct Rows {
    const SequenceChunk* chunk = nullptr;
    int32_t index = 0;      // of the chunk in the pass
    int32_t first_row = 0;  // of the chunk, in q and out
    // Rows [first, last) of the chunk retrieve; those around them are dense. Empty: first == last
    // == size.
    int32_t first_retrieving = 0, last_retrieving = 0;
    // The index of the last layer took in tokens from here on, as those before it did; -1: nothing.
    int32_t indexed_from = -1;
    FloorSteps floor;  // as they were when the pass began: a probe acts from the next pass on
    int32_t size() const { return static_cast<int32_t>(chunk->tokens.size()); }
    QueryPlan Plan(int32_t row_in_chunk, int32_t from) const;
  };
  // What one call of the backend can serve: chunks whose policies agree in all but sizes.
  struct Method {
    const AttentionPolicy* policy = nullptr;
    std::vector<int32_t> rows;  // indexes into rows_
  };

  RetrievalAttention(const ModelConfig& config, KvMemory& memory, int32_t max_context,
                     kernels::Backend& backend, const RetrievalOptions& options);
  absl::Status Allocate(const RowFetcherOptions& rows);
  absl::StatusOr<kernels::Buffer> Pool(size_t size_bytes, const std::string& what,
                                       bool shared = false);
  absl::Status MakeCodeIndex(const IndexSpec& spec, int32_t num_blocks);
  absl::Status MakeFeatureMaps();
  const CodeIndex* FindCodes(const AttentionPolicy& policy) const;

  // One of the indexes, as what is kept of a block: `block_bytes` for each layer from `pool`.
  struct Keepable {
    std::string title;
    size_t block_bytes = 0;
    std::vector<std::byte*> pools;  // by layer; null: the layer has none
    // Of each block: its generation then, and the first layer that has all of it, as have those
    // after it.
    struct Mark {
      uint32_t generation = 0;
      int32_t first_layer = std::numeric_limits<int32_t>::max();
    };
    std::vector<Mark> marks;
    uint32_t kind = 0;  // of the store's keys
    Digest digest = {};
  };
  std::span<std::byte> Kept(size_t bytes);
  void MakeKeepable();
  std::vector<Keepable*> KeepableOf(const AttentionPolicy& policy);
  void MarkIndexed(const Rows& rows, int32_t begin, int32_t end);
  int32_t FirstKept(const Keepable& index, int32_t first_layer) const;
  storage::BlockId IndexId(const Keepable& index, const BlockName& name) const;
  bool HasIndex(const Keepable& index, int32_t block, int32_t first_layer) const;
  size_t LoadIndex(Keepable& index, std::span<const int32_t> blocks,
                   std::span<const BlockName> names, int32_t first_layer);
  bool LoadSummary(RetrievalState& state, std::span<const BlockName> names, int32_t retrieve_from);
  uint32_t SummaryKind(const AttentionPolicy& policy, Digest* digest) const;

  void IndexMethod(int32_t layer, const Method& method);
  void IndexSpans(int32_t layer, const Method& method);
  void PlanQueries(int32_t layer, const Method& method, bool logits_only, bool decoding_only);
  int32_t CallSize(int32_t first) const;
  void RunQueries(int32_t layer, const Method& method, int32_t first, int32_t count,
                  const kernels::Tensor& q, const kernels::Tensor& out);
  bool AttendChosen(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
                    const kernels::Selection& chosen, const kernels::Tensor& q,
                    const kernels::Tensor& out);
  kernels::Selection SelectAndPrune(int32_t layer, const AttentionPolicy& policy, int32_t first,
                                    std::span<kernels::RetrievalQuery> queries,
                                    const kernels::Tensor& q);
  // pca's own steps (retrieval_mass.cc).
  bool MeasureAnchors(int32_t layer, int32_t first,
                      std::span<const kernels::RetrievalQuery> queries, const kernels::Tensor& q);
  void SelectByMass(int32_t layer, const AttentionPolicy& policy, int32_t first,
                    std::span<const kernels::RetrievalQuery> queries, const kernels::Tensor& q,
                    const kernels::Selection& chosen);
  bool ExtendTables(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries);
  void MergeTails(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries);
  int32_t TableEnd(const Rows& rows, int32_t position) const;
  kernels::TailMasses TailOfCall() const;
  void Select(int32_t layer, const AttentionPolicy& policy, int32_t first,
              std::span<const kernels::RetrievalQuery> queries, const kernels::Tensor& q,
              const kernels::Selection& chosen);
  // retrieval_fetch.cc; BringWhole: retrieval_whole.cc
  bool BringRows(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
                 const kernels::Selection& chosen);
  void LoseChunksOfLostBlocks(int32_t layer, int32_t first,
                              std::span<const kernels::RetrievalQuery> queries);
  bool Fetch(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
             const kernels::Selection& chosen);
  void BringWhole(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
                  const kernels::Selection& chosen, double pages_share);
  bool AddressRows(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
                   const kernels::Selection& chosen);
  bool PinForCompletion(int32_t layer, int32_t first,
                        std::span<const kernels::RetrievalQuery> queries);
  void Complete(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
                const kernels::Tensor& q);
  bool AttendAndComplete(int32_t layer, int32_t first,
                         std::span<const kernels::RetrievalQuery> queries,
                         const kernels::Selection& chosen, const kernels::Tensor& q,
                         const kernels::Tensor& out);
  void Probe(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
             const kernels::Selection& chosen, const kernels::Tensor& q);
  // Runs call(begin, queries, pool) over runs of `queries` whose whole KV is resident: all at once,
  // or sequence by sequence where KV has to be brought. Queries of a lost chunk are left out.
  template <typename Call>
  void ForPinned(int32_t layer, int32_t first, std::span<const kernels::RetrievalQuery> queries,
                 Call call);
  // Of the pass: what AttendChosen read of shared KV.
  void CountSharedReads();
  // Counts what was chosen in calls whose selections the host has not looked at; waits for them.
  void CountPending();
  void AddCounts(RetrievalCounts& counts, uint64_t kept, int32_t mid_size) const;
  void Count(int32_t first, std::span<const kernels::RetrievalQuery> queries,
             const kernels::Selection& chosen);
  // Of states, query heads side by side: the masses before and after completion, in shared memory.
  struct Masses {
    float *before = nullptr, *after = nullptr;
    Masses From(int64_t state) const { return {before + state, after + state}; }
  };
  Masses MassesOfCall();
  // Of a query's heads.
  void AddCompletions(RetrievalCounts& counts, const Masses& masses) const;

  const ModelConfig config_;
  KvMemory& memory_;
  const kernels::KvLayout layout_;
  const int32_t max_context_;
  const int32_t group_;
  const float scale_;
  kernels::Backend& backend_;
  const RetrievalOptions options_;
  size_t index_bytes_ = 0;
  size_t scratch_bytes_ = 0;

  std::vector<std::unique_ptr<CodeIndex>> code_indexes_;
  std::vector<kernels::Buffer> bounds_;     // of quest, by layer; empty without
  std::vector<kernels::Buffer> int4_keys_;  // by layer; empty without
  struct FeatureMaps {
    std::unique_ptr<kernels::PackedFeatureMap> key, query;  // null: the layer has none
  };
  std::vector<FeatureMaps> feature_maps_;  // by layer; empty without
  std::unique_ptr<RowFetcher> fetcher_;
  kernels::Buffer summary_pool_;  // [summaries] places of SummaryBytes each
  std::vector<std::byte*> free_summaries_;

  std::vector<Keepable> keepable_;
  std::string artifact_id_;
  kernels::Buffer kept_;  // shared memory: payloads on their way
  std::vector<kernels::CopyPart> copies_;

  // Of the pass.
  void* pool_ = nullptr;  // that pinned tables are of
  std::vector<Rows> rows_;
  std::vector<Method> methods_;
  bool any_retrieves_ = false;

  // Scratch of a call. Sized at Create for any one query, or many small ones.
  // Queries of one call are enough to keep every thread busy; their states stay small.
  static constexpr int32_t kMaxQueries = 64;
  // Calls whose counts can wait for the end of the pass: those of a decode step.
  static constexpr int32_t kCountCalls = 128;
  int64_t max_entries_ = 0;  // tokens chosen and rows attended, over queries and heads
  std::vector<kernels::RetrievalQuery> queries_;         // of one method in one layer
  std::vector<int32_t> candidates_;                      // [queries_] to choose before pruning
  std::vector<const Rows*> query_rows_;                  // [queries_] whose they are
  std::vector<kernels::RetrievalQuery> pinned_queries_;  // with the tables of pinned blocks
  // Tables of pinned blocks: of the queries of a call, or of a method's chunks.
  std::vector<std::vector<int32_t>> tables_;
  std::vector<kernels::KeySpan> spans_;
  std::vector<kernels::SummaryExtension> extensions_;
  std::vector<kernels::CompletionGroup> completion_groups_;
  std::vector<kernels::AttentionChunk> dense_chunks_;
  std::vector<kernels::RowList> lists_;  // [queries][Hkv]
  struct TierRows {
    uint64_t cached = 0, stored = 0;
    uint64_t in_frames = 0;  // of `stored`, where frames are a slower tier themselves
  };
  std::vector<TierRows> tier_rows_;    // [queries]
  std::vector<TierRows> anchor_rows_;  // [queries] what reading the anchors first took
  std::vector<kernels::CellTableExtension> table_extensions_;
  std::vector<const float*> cell_tables_;  // [queries]
  bool predicting_ = false;                // anchors are not known yet
  // A query's counts of chosen tokens, which the device may not have written yet.
  struct PendingCount {
    RetrievalState* state = nullptr;
    int32_t position = 0, mid_size = 0;
    const int32_t* counts = nullptr;  // [Hkv]
    Masses masses = {};               // of its heads; null unless they were completed
  };
  std::vector<PendingCount> pending_counts_;
  SharedReads shared_reads_;
  int32_t count_call_ = 0;  // whose part of counts_ the next call takes

  // Shared memory: what the host looks at or writes within a step.
  kernels::Buffer reads_;   // [rows of a pass] kernels::SharedKvReads; empty without shared KV
  kernels::Buffer masses_;  // [kCountCalls][before, after completion][kMaxQueries][H]
  kernels::Buffer counts_;  // [kCountCalls][kMaxQueries][Hkv] of selections
  kernels::Buffer tokens_;  // of a selection
  kernels::Buffer addresses_;
  kernels::Buffer query_codes_, states_;  // the device's
  // pca: log-sum-exps of anchors [kMaxQueries][H], shared; and what the tail needs of each query head.
  kernels::Buffer no_counts_;  // [kMaxQueries][Hkv] zeros: a selection of nothing, shared
  kernels::Buffer anchor_masses_, tail_masses_, tail_references_, tail_deltas_;
  std::vector<kernels::SelectionQuality> quality_;  // [Hkv]
  std::vector<uint64_t> wanted_pages_;              // [logical blocks][pages of a block] bits
  std::vector<int32_t> whole_blocks_, whole_frames_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_ATTENTION_H_

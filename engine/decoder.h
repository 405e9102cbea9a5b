// The Llama family's forward pass over paged KV: norm, project, rope, write KV, attend, project,
// mlp. Reads top to bottom in decoder.cc; every operation is a call of kernels::Backend.
//
// Life cycle: Create packs the weights and allocates the KV pool and all scratch; Forward allocates
// nothing. Threads: one at a time (the engine thread); the backend may use its own inside a call.
//
// Logits are a function of a sequence's own tokens and positions, bit for bit: not of what else is
// in the batch, nor of how the sequence was cut into chunks (the promise of kernels/backend.h).
#ifndef WINNOW_ENGINE_DECODER_H_
#define WINNOW_ENGINE_DECODER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/decoder_options.h"
#include "engine/expert_mlp.h"
#include "engine/kv/kv_memory.h"
#include "engine/model.h"
#include "engine/model/model_config.h"
#include "engine/model/weight_storage.h"
#include "engine/model/weights.h"
#include "engine/retrieval/retrieval_attention.h"
#include "kernels/backend.h"
#include "kernels/kv_layout.h"

namespace winnow::engine {

class Decoder final : public Model {
 public:
  // `backend` must outlive the decoder, and so must the memory behind weights.embedding, whose rows
  // are looked up where they lie (quantised ones are widened then). Every other weight is copied: its
  // pages may be released afterwards. InvalidArgument: an option out of range. ResourceExhausted: with bytes asked for
  // and what for, or with those taken where a device's operations are left too few. Unavailable: the
  // device has failed. InvalidArgument, with the tensor's name: a weight that is NaN or infinite.
  // Unimplemented, with the layer: what CheckLayers refuses (engine/model/layer_spec.h).
  // REQUIRES: `plan` is what PlanKv makes of the options.
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(const ModelConfig& config,
                                                         const Weights& weights,
                                                         kernels::Backend& backend,
                                                         const DecoderOptions& options,
                                                         const KvPlan& plan);
  // The same, planned here.
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(const ModelConfig& config,
                                                         const Weights& weights,
                                                         kernels::Backend& backend,
                                                         const DecoderOptions& options);
  ~Decoder() override;

  int32_t vocab_size() const override { return config_.vocab_size; }
  int32_t max_context() const override { return options_.max_context; }
  int32_t block_tokens() const override { return options_.block_tokens; }
  int32_t num_blocks() const override { return plan_.num_blocks; }
  uint64_t KvRowsSeen(int32_t position, int32_t num_queries) const override {
    return engine::KvRowsSeen(config_.layers, config_.num_kv_heads, position, num_queries);
  }
  int32_t FirstRead(int32_t layer, int32_t position) const override {
    return kernels::AttentionChunk{.position = position, .window = config_.layers[layer].window}
        .FirstRead();
  }
  int64_t kv_row_bytes() const override { return static_cast<int64_t>(plan_.layout.RowBytes()); }
  int32_t max_batch_tokens() const override { return options_.max_batch_tokens; }
  int32_t max_batch_logits() const override { return options_.max_batch_logits; }
  bool has_draft_weights() const override { return options_.draft_weights.has_value(); }

  absl::Status CheckPolicy(const AttentionPolicy& policy) const override;
  bool Retrieves(const AttentionPolicy& policy, int32_t position) const override {
    return !PlanQuery(policy, position, options_.retrieval.from).dense;
  }
  absl::StatusOr<std::unique_ptr<RetrievalState>> NewRetrievalState(
      const AttentionPolicy& policy) override {
    return retrieval_->NewState(policy);
  }
  absl::Status ResumeRetrieval(RetrievalState& state) override { return retrieval_->Resume(state); }
  void SaveIndex(int32_t block, const BlockName& name) override {
    retrieval_->keeper().SaveBlock(block, name);
  }
  void SaveSummary(const RetrievalState& state, const BlockName& name) override {
    retrieval_->keeper().SaveSummary(state, name);
  }
  void AdoptIndex(RetrievalState& state, std::span<const int32_t> blocks,
                  std::span<const BlockName> names, int32_t retrieve_from) override {
    retrieval_->keeper().Adopt(state, blocks, names, retrieve_from);
  }
  KvMemory* kv_memory() override { return memory_.get(); }
  const RowFetcher& row_fetcher() const { return retrieval_->row_fetcher(); }
  kernels::LaunchCounts launches() const override { return backend_.launches(); }
  PrefetchCounts prefetch_counts() const override {
    return {row_fetcher().stats().asked_rows, row_fetcher().stats().asked_hits};
  }

  // REQUIRES (all checked): a batch within max_batch_tokens, Forward's within max_batch_logits, token ids within
  // the vocabulary, positions within max_context, blocks within the pool, and no block written by
  // two chunks. Unavailable: the device has failed, and stays failed. Always OK on the CPU.
  absl::Status Forward(const Batch& batch, std::span<float> logits) override;
  absl::Status Sample(const Batch& batch, std::span<const kernels::SampleRow> rows,
                      std::span<kernels::SampledToken> sampled) override;

  // `observe` is called in each layer of a pass with the queries of all rows, after RoPE: [m][H*d], the device's.
  void ObserveQueries(std::function<void(int32_t layer, const kernels::Tensor& q)> observe) {
    observe_queries_ = std::move(observe);
  }

  // Sizes, for the log, metrics and bench.
  size_t weight_bytes() const { return weight_bytes_ + weights_.bytes; }  // packed weights
  size_t expert_bytes() const { return expert_weight_bytes_; }        // of them, those of experts
  size_t draft_weight_bytes() const { return draft_weights_.bytes; }  // beside them
  size_t kv_pool_bytes() const { return memory_->places().size_bytes(); }  // of all layers
  // Of them in shared memory, with what they take on the device and how long making them took.
  size_t shared_kv_bytes() const { return memory_->places().shared_bytes(); }
  kernels::SharedKvSizes shared_kv_sizes() const {
    return memory_->places().shared_kv() == nullptr ? kernels::SharedKvSizes()
                                                    : memory_->places().shared_kv()->sizes();
  }
  double pin_seconds() const { return memory_->places().pin_seconds(); }
  // Rows that retrieval read of shared KV, since the start.
  const SharedReads& shared_reads() const { return retrieval_->shared_reads(); }
  size_t index_bytes() const { return retrieval_->indexes().pool_bytes(); }  // beside it
  size_t summary_bytes() const { return retrieval_->indexes().summary_bytes(); }
  // What choosing reads of a mid token's index, per layer and KV head.
  double IndexRowBytes(const AttentionPolicy& policy) const {
    return retrieval_->indexes().RowBytes(policy);
  }
  size_t scratch_bytes() const { return scratch_bytes_; }  // everything else that Create allocated
  const ModelConfig& config() const { return config_; }
  const DecoderOptions& options() const { return options_; }  // max_context resolved
  const KvPlan& kv_plan() const { return plan_; }
  const kernels::KvLayout& kv_layout() const { return plan_.layout; }

  // Fills the whole KV pool with noise drawn from `seed`, so that bench can time a step at a long
  // context without computing that context. What sequences held before is lost.
  void FillKvWithNoise(uint64_t seed);

 private:
  struct Layer;
  struct Products;
  // The matrices of all products in one form: what answers are computed with, or drafts.
  struct WeightSet {
    WeightStorage storage = WeightStorage::kWide;
    kernels::DType compute = kernels::DType::kBF16;
    size_t bytes = 0;  // packed
    std::vector<Products> layers;
    std::unique_ptr<kernels::PackedMatrix> lm_head;  // [vocab][hidden]
  };
  // Rows [first, first + count) of the batch, all of whose logits are wanted.
  struct RowRun {
    int32_t first = 0;
    int32_t count = 0;
  };

  Decoder(const ModelConfig& config, kernels::Backend& backend, const DecoderOptions& options,
          const KvPlan& plan);

  absl::Status PackWeights(const Weights& weights);
  absl::Status PackProducts(const LayerWeights& from, int32_t index, WeightSet& to);
  // InvalidArgument, with the tensor's name, if one of `values`, which come from the weights' view at
  // `tensor` from row `first_row` on, is NaN or infinite. REQUIRES: packing_.
  absl::Status CheckFinite(const kernels::HostMatrix& values, const void* tensor,
                           int64_t first_row = 0);
  // The same of a matrix where it lies, quantised or not.
  absl::Status CheckFiniteRows(const WeightMatrix& matrix);
  // Packs a layer's router and experts. REQUIRES: packing_.
  absl::Status PackRouting(const LayerWeights& from, ExpertMlp::Layer* to);
  absl::Status PackExperts(const LayerWeights& from, WeightSet& set, ExpertMlp::Layer* to);
  absl::StatusOr<std::unique_ptr<kernels::PackedMatrix>> PackRouter(const WeightMatrix& router);
  absl::Status AllocatePools();
  // One product's weights, in the form of `set`, whose bytes they count among. `is_output`: the output embedding.
  absl::StatusOr<std::unique_ptr<kernels::PackedMatrix>> Pack(WeightSet& set,
                                                              std::span<const WeightMatrix> parts,
                                                              const char* what,
                                                              bool is_output = false);
  absl::StatusOr<std::unique_ptr<kernels::PackedMatrix>> PackWide(
      const WeightSet& set, std::span<const WeightMatrix> parts);
  absl::StatusOr<std::unique_ptr<kernels::PackedMatrix>> PackStored(
      const WeightSet& set, std::span<const WeightMatrix> parts, bool is_output);
  absl::StatusOr<kernels::Buffer> Widen(std::span<const WeightMatrix> parts, const char* what,
                                        float summand = 0, float divisor = 1);
  absl::StatusOr<kernels::Buffer> WidenNorm(const WeightMatrix& weight, float divisor = 1);
  absl::StatusOr<kernels::Tensor> AllocateScratch(int64_t rows, int64_t cols, const char* what);

  absl::Status DeviceStatus() const;
  // The steps of Forward and Sample; shapes are in decoder.cc.
  void Compute(const Batch& batch);  // up to hidden_, of the rows whose logits are wanted
  void Embed(int64_t m);
  void PlanRows(const Batch& batch);
  void CheckBlocks(const SequenceChunk& chunk);
  void ProjectAndWriteKv(int32_t index);
  void PredictQueries(int32_t index);
  void NormHeads(int32_t index, const kernels::Tensor& x, const kernels::Buffer& weight);
  void Project(const kernels::Tensor& x, const kernels::Buffer& norm,
               const kernels::PackedMatrix& w, const kernels::Buffer& bias,
               const kernels::Tensor& normed, const kernels::Tensor& y);
  void RotateAndWriteKv(int32_t index, const kernels::Tensor& q, const kernels::Tensor& k,
                        const kernels::Tensor& v);
  void Attend(int32_t index, std::span<const kernels::AttentionChunk> chunks, bool logits_only);
  void AddAttended(int32_t index, RowRun rows);
  void AddMlp(int32_t index, RowRun rows);
  kernels::Tensor ComputeLogits(int64_t first, int64_t count);

  struct Rotation {
    RopeParameters rope;
    QueryScaling query_scaling = {};
    kernels::Tensor cos_sin = {};    // [T][d], of keys
    kernels::Tensor q_cos_sin = {};  // [T][d], of queries; the same table where they are not scaled
  };
  const Rotation& RotationOf(int32_t layer) const;

  const ModelConfig config_;
  // hidden_ holds the residual stream divided by config_.residual_multiplier, so that attention and MLP add what they give as
  // it is, whatever the form of their weights. What reads it is a norm, to which the divisor is nothing but another epsilon.
  const float embedding_scale_, hidden_eps_;
  kernels::Backend& backend_;
  DecoderOptions options_;
  // Those of config_.ropes, and one that turns nothing where a layer needs it.
  std::vector<Rotation> rotations_;
  const KvPlan plan_;
  size_t weight_bytes_ = 0;         // of vectors and routers, which weight sets share
  size_t expert_weight_bytes_ = 0;  // of weights_, and of experts' biases
  size_t scratch_bytes_ = 0;

  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<RetrievalAttention> retrieval_;

  // Weights.
  const Weights* packing_ = nullptr;  // while weights are packed: for the names of tensors
  WeightMatrix embedding_;            // [vocab][hidden], where it lies in the file
  // Rows of one batch, widened, where no backend takes the embedding as it lies; and 0, 1, 2, ...
  std::vector<float> embedded_rows_;  // [max_batch_tokens][hidden]
  std::vector<int32_t> row_numbers_;  // [max_batch_tokens]
  std::vector<Layer> layers_;
  kernels::Buffer final_norm_;         // [hidden]
  WeightSet weights_, draft_weights_;  // the second is empty without options_.draft_weights
  const WeightSet* pass_ = nullptr;    // that the batch being run is computed with

  // Scratch, for up to T = max_batch_tokens rows.
  std::vector<kernels::Buffer> scratch_;

  kernels::Tensor hidden_;  // [T][hidden] the residual stream, as embedding_scale_ says
  kernels::Tensor
      normed_;  // [T][hidden]; what is yet to be normed, in layers that norm what they give
  kernels::Tensor qkv_;                    // [T][(H + 2*Hkv)*d]
  kernels::Tensor attended_;               // [T][H*d]
  kernels::Tensor gate_up_;                // [T][2*intermediate], of the widest MLP
  kernels::Tensor activated_;              // [T][intermediate]
  kernels::Tensor last_;                   // [max_batch_logits][hidden]
  kernels::Tensor logits_;                 // [max_batch_logits][vocab]
  kernels::Buffer sampled_;                // [T] in shared memory
  std::unique_ptr<ExpertMlp> expert_mlp_;  // null where no layer has experts

  // The batch being run, flattened. Reserved at Create for the largest batch.
  std::vector<int32_t> ids_;                            // [m]
  std::vector<int32_t> positions_;                      // [m]
  std::vector<float> query_factors_;                    // [m], of one rotation
  std::vector<kernels::AttentionChunk> chunks_;         // all rows
  std::vector<kernels::AttentionChunk> logit_chunks_;   // the rows whose logits are wanted
  std::vector<RowRun> logit_runs_;                      // the same rows, neighbours joined
  std::vector<int32_t> chunk_of_row_;                   // index into chunks_
  std::vector<kernels::AttentionChunk> pinned_chunks_;  // of a call, with tables of pinned blocks
  std::vector<std::vector<int32_t>> tables_;
  std::vector<uint64_t> block_written_in_;  // [num_blocks] the last Forward that wrote it
  uint64_t forward_count_ = 0;
  std::function<void(int32_t, const kernels::Tensor&)> observe_queries_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_DECODER_H_

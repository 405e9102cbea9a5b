// The indexes beside the KV, which say of each key what a selection needs, and what stands for tokens that are not read:
//
//   codes      of a kind of functions, for each key
//   bounds     of quest, for each page of keys
//   residual   of each key, what pca's codes leave, for re-ranking
//   int4       four-bit keys, for pruning
//   summaries  of a sequence: features of completion, or tables of cells
//
// Codes, residual codes, bounds and four-bit keys lie in pools with the block numbers of the KV; each is a function of the KV alone, so
// lost ones are made again. IndexKeeper keeps them in the store. Pools are allocated at Create.
//
// Threads: the engine thread; Check from any thread.
#ifndef WINNOW_ENGINE_RETRIEVAL_INDEXES_H_
#define WINNOW_ENGINE_RETRIEVAL_INDEXES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kv/kv_memory.h"
#include "engine/retrieval/query_call.h"
#include "engine/retrieval/retrieval_options.h"
#include "kernels/backend.h"

namespace winnow::engine {

class Indexes {
 public:
  // Learned, fitted or random functions and the codes that they make.
  struct Codes {
    struct Layer {
      std::unique_ptr<kernels::PackedEncoder> key, query;       // null: the layer has none
      std::unique_ptr<kernels::PackedTransformCode> transform;  // of pca, in place of both
      kernels::Buffer pool;
      // pca's second code, which has the layout of the first; null where it is not kept.
      std::unique_ptr<kernels::PackedTransformCode> residual;
      kernels::Buffer residual_pool;
    };
    IndexSpec spec;
    kernels::CodeLayout layout;
    std::vector<Layer> layers;
  };
  struct FeatureMaps {
    std::unique_ptr<kernels::PackedFeatureMap> key, query;  // null: the layer has none
  };
  // A pool with something of each block: `block_bytes` in every layer that has it.
  struct Part {
    std::string title;    // "lsh:128", "quest", "residual", "int4"
    bool fitted = false;  // by the transform fit; else the artifact's functions, or nobody's
    size_t block_bytes = 0;
    std::vector<std::byte*> pools;  // by layer; null: the layer has none
  };

  // `memory` and `backend` must outlive it. ResourceExhausted: with the bytes.
  static absl::StatusOr<std::unique_ptr<Indexes>> Create(const ModelConfig& config,
                                                         KvMemory& memory,
                                                         kernels::Backend& backend,
                                                         const RetrievalOptions& options);

  // InvalidArgument names the option of the policy that cannot be honoured, and what would help.
  absl::Status Check(const AttentionPolicy& policy) const;
  // Gives the state a place for its summaries, if it needs one and has none. ResourceExhausted: all are taken.
  absl::Status GivePlace(RetrievalState& state);

  // Takes the pass's rows into the layer's index: codes, bounds, four-bit keys and, as far as their next query allows,
  // summaries. `rows` are of one method. A token that was decoded densely may wait for those after it.
  void Append(int32_t layer, const AttentionPolicy& policy, std::span<PassRows* const> rows);

  // Null: the policy needs no codes, or they are not here.
  const Codes* CodesOf(const AttentionPolicy& policy) const;
  // REQUIRES: Check is OK of a policy that reads them.
  const void* bounds(int32_t layer) const { return bounds_[layer].data(); }
  const void* int4_keys(int32_t layer) const { return int4_keys_[layer].data(); }
  const FeatureMaps& feature_maps(int32_t layer) const { return feature_maps_[layer]; }
  bool has_feature_maps() const { return !feature_maps_.empty(); }
  bool has_residuals() const { return options_.residual_codes; }
  size_t max_code_bytes() const;  // of one key
  // All of them, and those that the policy reads.
  std::vector<Part> Parts() const;
  std::vector<std::string> TitlesFor(const AttentionPolicy& policy) const;

  // Bytes that selecting reads of a candidate, per layer and KV head: its code, its share of a page's bounds, its key.
  double RowBytes(const AttentionPolicy& policy) const;
  size_t pool_bytes() const { return pool_bytes_; }
  size_t summary_bytes() const { return summary_pool_.size_bytes(); }  // of all sequences

 private:
  Indexes(const ModelConfig& config, KvMemory& memory, kernels::Backend& backend,
          const RetrievalOptions& options)
      : config_(config),
        shape_(config, memory.places().layout()),
        memory_(memory),
        backend_(backend),
        options_(options) {}
  absl::Status Allocate();
  absl::Status AllocateLayers(size_t block_bytes, const char* what,
                              std::vector<kernels::Buffer>* out);
  absl::Status MakeCodes(const IndexSpec& spec);
  absl::Status MakeCodesOfLayer(const IndexSpec& spec, int32_t layer, Codes::Layer* to);
  absl::Status MakeResiduals(const Codes& codes, int32_t layer, Codes::Layer* to);
  absl::Status MakeFeatureMaps();
  absl::Status CheckLearned(const AttentionPolicy& policy) const;
  absl::Status CheckPca(const AttentionPolicy& policy) const;
  absl::Status CheckCompletion(const AttentionPolicy& policy) const;
  bool MayRetrieveIn(const AttentionPolicy& policy, int32_t layer) const {
    return policy.RetrievesIn(layer) && config_.layers[layer].SeesAll();
  }
  bool Waits(const PassRows& rows, int32_t indexed) const;
  void AppendSpans(int32_t layer, const AttentionPolicy& policy);

  const ModelConfig config_;
  const RetrievalShape shape_;
  KvMemory& memory_;
  kernels::Backend& backend_;
  const RetrievalOptions options_;
  size_t pool_bytes_ = 0;

  std::vector<std::unique_ptr<Codes>> codes_;
  std::vector<kernels::Buffer> bounds_;     // by layer; empty without
  std::vector<kernels::Buffer> int4_keys_;  // by layer; empty without
  std::vector<FeatureMaps> feature_maps_;   // by layer; empty without
  kernels::Buffer summary_pool_;            // [options.summaries] places of SummaryBytes each
  std::vector<std::byte*> free_places_;

  // Scratch of Append.
  void* pool_ = nullptr;  // of the pinned tables
  std::vector<std::vector<int32_t>> tables_;
  std::vector<kernels::KeySpan> spans_;
  std::vector<kernels::SummaryExtension> extensions_;
  std::vector<kernels::CellTableExtension> table_extensions_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_INDEXES_H_

// The parts of a model's retrieval: its indexes, learned functions and places for summaries. Plain data, and the
// memory that it takes.
#ifndef WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_OPTIONS_H_
#define WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/model/model_config.h"
#include "engine/retrieval/artifact.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/retrieval/transform_fit.h"
#include "kernels/kv_layout.h"

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
  bool four_bit_keys = false;   // for policies with p
  bool residual_codes = false;  // for policies with rerank; beside the index pca, of its bits
  int32_t from = 0;             // shortest context that retrieves, for policies that leave it open
  // Sequences that may complete at a time: each has a place for its summaries. 0: none may.
  int32_t summaries = 1;
  // One in so many (query, layer) is measured: its coverage and IoU with the oracle, which reads
  // all keys. 0: none
  int32_t probe_interval = 0;
};

// Everything that the policies need, and no more.
RetrievalOptions OptionsFor(std::span<const AttentionPolicy> policies,
                            std::shared_ptr<const Artifact> artifact);
// Every index that can be had: those that need no training, and the artifact's kinds. pca, which needs a fit, is not
// among them (model_retrieval.h adds it).
std::vector<IndexSpec> AllIndexes(const Artifact* artifact);
// The bits of the policy's codes; 0 if it has none, or the artifact or the fit does not.
int32_t CodeBits(const AttentionPolicy& policy, const Artifact* artifact,
                 const TransformFit* transform);
// Bytes of the summaries of one sequence; 0 without feature maps and tables of cells.
int64_t SummaryBytes(const ModelConfig& config, const RetrievalOptions& options);
// Bytes of the residual codes of `bits` beside one block of KV of every layer.
int64_t ResidualBlockBytes(const ModelConfig& config, const kernels::KvLayout& layout,
                           int32_t bits);
// Bytes of the index pools beside one block of KV of every layer.
int64_t IndexBlockBytes(const ModelConfig& config, const kernels::KvLayout& layout,
                        const RetrievalOptions& options);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_RETRIEVAL_OPTIONS_H_

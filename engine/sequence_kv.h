// One sequence on a model of its own: for offline work (eval), where there is nothing to schedule.
//
// It remembers the tokens whose KV the model holds, so that tokens which begin alike are computed
// once: questions about one document share the document, and a greedy answer continues where the
// teacher-forced one went wrong. What is reused is decided by comparing token ids, and batch
// invariance makes the reused KV equal, bit for bit, to what would be computed.
#ifndef WINNOW_ENGINE_SEQUENCE_KV_H_
#define WINNOW_ENGINE_SEQUENCE_KV_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model.h"
#include "engine/retrieval/attention_policy.h"

namespace winnow::engine {

class SequenceKv {
 public:
  // Takes all of the model's blocks; `model` must outlive it, and nobody else may run it meanwhile.
  explicit SequenceKv(Model& model);

  // The longest sequence that fits: the model's context, or its KV pool.
  int32_t max_tokens() const;

  // Computes `tokens`, those from `retrieve_from` on under `policy`, and calls `on_logits(row,
  // logits)` for each of the last `num_logits`, row 0 first; the span lives until the callback
  // returns. Errors: what the model's CheckPolicy, NewRetrievalState and Forward give. REQUIRES: 1
  // <= num_logits <= tokens.size() <= max_tokens().
  using OnLogits = std::function<void(int32_t row, std::span<const float> logits)>;
  absl::Status Run(std::span<const int32_t> tokens, int32_t num_logits,
                   const AttentionPolicy& policy, int32_t retrieve_from, const OnLogits& on_logits);

  // The next Run computes again from token `tokens` on: what it counts does not depend on what ran
  // before.
  void Forget(int32_t tokens) {
    if (tokens < static_cast<int32_t>(tokens_.size())) tokens_.resize(tokens);
  }
  // Of the tokens that the last Run computed.
  const RetrievalCounts& counts() const { return counts_; }
  int64_t computed_tokens() const { return computed_tokens_; }  // in all, without those reused

 private:
  absl::StatusOr<RetrievalState*> StateOf(const AttentionPolicy& policy);
  int32_t Reusable(std::span<const int32_t> tokens, const AttentionPolicy& policy,
                   int32_t retrieve_from) const;

  Model& model_;
  const std::vector<int32_t> blocks_;
  // Of every policy that ran: their indexes go on from where they are, as the KV before it is the
  // same.
  std::vector<std::unique_ptr<RetrievalState>> states_;
  std::vector<int32_t> tokens_;  // whose KV is in the blocks
  AttentionPolicy policy_;       // under which those from retrieve_from_ on were computed
  int32_t retrieve_from_ = 0;
  RetrievalCounts counts_;
  std::vector<float> logits_;
  int64_t computed_tokens_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SEQUENCE_KV_H_

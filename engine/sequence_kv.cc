#include "engine/sequence_kv.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "engine/base/status_macros.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

std::vector<int32_t> AllBlocks(int32_t count) {
  std::vector<int32_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), 0);
  return blocks;
}

}  // namespace

SequenceKv::SequenceKv(Model& model)
    : model_(model),
      blocks_(AllBlocks(model.num_blocks())),
      logits_(static_cast<size_t>(model.max_batch_logits()) * model.vocab_size()) {}

int32_t SequenceKv::max_tokens() const {
  return static_cast<int32_t>(std::min<int64_t>(
      model_.max_context(), int64_t{model_.num_blocks()} * model_.block_tokens()));
}

absl::StatusOr<RetrievalState*> SequenceKv::StateOf(const AttentionPolicy& policy) {
  if (policy.IsDense()) return nullptr;
  for (const auto& state : states_) {
    if (state->policy() == policy) return state.get();
  }
  WINNOW_RETURN_IF_ERROR(model_.CheckPolicy(policy));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<RetrievalState> state, model_.NewRetrievalState(policy));
  states_.push_back(std::move(state));
  return states_.back().get();
}

// How many of `tokens` have the KV that they would be computed to have. What comes before any token
// that retrieves is the same under every policy.
int32_t SequenceKv::Reusable(std::span<const int32_t> tokens, const AttentionPolicy& policy,
                             int32_t retrieve_from) const {
  const auto [mismatch, unused] =
      std::mismatch(tokens.begin(), tokens.end(), tokens_.begin(), tokens_.end());
  const int32_t alike = static_cast<int32_t>(mismatch - tokens.begin());
  if (policy == policy_ && (policy.IsDense() || retrieve_from == retrieve_from_)) return alike;
  const auto dense_until = [](const AttentionPolicy& of, int32_t from) {
    return of.IsDense() ? std::numeric_limits<int32_t>::max() : from;
  };
  return std::min(
      {alike, dense_until(policy, retrieve_from), dense_until(policy_, retrieve_from_)});
}

absl::Status SequenceKv::Run(std::span<const int32_t> tokens, int32_t num_logits,
                             const AttentionPolicy& policy, int32_t retrieve_from,
                             const OnLogits& on_logits) {
  const int32_t size = static_cast<int32_t>(tokens.size());
  WINNOW_CHECK(num_logits >= 1 && num_logits <= size && size <= max_tokens());
  const int32_t first_logit = size - num_logits;

  WINNOW_ASSIGN_OR_RETURN(RetrievalState* const retrieval, StateOf(policy));
  // Rows whose logits are wanted are always computed.
  int32_t position = std::min(first_logit, Reusable(tokens, policy, retrieve_from));
  policy_ = policy;
  retrieve_from_ = retrieve_from;
  tokens_.resize(position);
  for (const auto& state : states_) state->Rewind(position);

  while (position < size) {
    int32_t count = std::min(model_.max_batch_tokens(), size - position);
    int32_t wanted = std::max(0, position + count - std::max(position, first_logit));
    if (wanted > model_.max_batch_logits()) {
      count -= wanted - model_.max_batch_logits();
      wanted = model_.max_batch_logits();
    }
    const Batch batch{
        {{tokens.subspan(position, count), position, blocks_, wanted, retrieval, retrieve_from}}};
    WINNOW_RETURN_IF_ERROR(model_.Forward(batch, logits_));
    for (int32_t i = 0; i < wanted; ++i) {
      on_logits(position + count - wanted + i - first_logit,
                std::span(logits_).subspan(static_cast<size_t>(i) * model_.vocab_size(),
                                           model_.vocab_size()));
    }
    position += count;
    computed_tokens_ += count;
    tokens_.insert(tokens_.end(), tokens.begin() + position - count, tokens.begin() + position);
  }
  counts_ = retrieval != nullptr ? retrieval->TakeCounts() : RetrievalCounts();
  return absl::OkStatus();
}

}  // namespace winnow::engine

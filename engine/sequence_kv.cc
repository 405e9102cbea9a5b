#include "engine/sequence_kv.h"

#include <algorithm>
#include <numeric>

#include "engine/status_macros.h"
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

absl::Status SequenceKv::Run(std::span<const int32_t> tokens, int32_t num_logits,
                             const AttentionPolicy& policy, const OnLogits& on_logits) {
  const int32_t size = static_cast<int32_t>(tokens.size());
  WINNOW_CHECK(num_logits >= 1 && num_logits <= size && size <= max_tokens());
  const int32_t first_logit = size - num_logits;

  // KV depends on the policy it was computed under. Rows whose logits are wanted are always
  // computed.
  if (policy_ != policy) tokens_.clear();
  policy_ = policy;
  const auto [mismatch, unused] =
      std::mismatch(tokens.begin(), tokens.begin() + first_logit, tokens_.begin(), tokens_.end());
  int32_t position = static_cast<int32_t>(mismatch - tokens.begin());
  tokens_.resize(position);

  while (position < size) {
    int32_t count = std::min(model_.max_batch_tokens(), size - position);
    int32_t wanted = std::max(0, position + count - std::max(position, first_logit));
    if (wanted > model_.max_batch_logits()) {
      count -= wanted - model_.max_batch_logits();
      wanted = model_.max_batch_logits();
    }
    const Batch batch{{{tokens.subspan(position, count), position, blocks_, wanted, &policy}}};
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
  return absl::OkStatus();
}

}  // namespace winnow::engine

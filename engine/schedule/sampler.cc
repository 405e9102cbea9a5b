#include "engine/schedule/sampler.h"

#include <algorithm>

#include "engine/base/counter_random.h"

namespace winnow::engine {

TokenHistory::TokenHistory(const SamplingOptions& options, std::span<const int32_t> prompt)
    : prompt_counts_(options.repetition_penalty != 1.0f),
      generated_counts_(prompt_counts_ || options.presence_penalty != 0.0f ||
                        options.frequency_penalty != 0.0f) {
  for (const auto& [token, bias] : options.logit_bias) EditOf(token).bias += bias;
  if (!prompt_counts_) return;
  for (const int32_t token : prompt) EditOf(token).generated = 0;
}

void TokenHistory::AddGenerated(int32_t token) {
  if (!generated_counts_) return;
  kernels::LogitEdit& edit = EditOf(token);
  edit.generated = std::max(edit.generated, 0) + 1;
}

kernels::LogitEdit& TokenHistory::EditOf(int32_t token) {
  const auto [place, is_new] = places_.try_emplace(token, edits_.size());
  if (is_new) edits_.push_back({.token = token});
  return edits_[place->second];
}

kernels::SampleRow MakeSampleRow(const Request& request, const TokenHistory& history, int32_t index,
                                 std::span<const uint32_t> allowed) {
  const SamplingOptions& options = request.sampling;
  kernels::SampleRow row;
  row.edits = history.edits();
  row.allowed = allowed;
  if (index < request.stopping.min_tokens) row.masked = request.stopping.stop_token_ids;
  row.repetition_penalty = options.repetition_penalty;
  row.presence_penalty = options.presence_penalty;
  row.frequency_penalty = options.frequency_penalty;
  row.temperature = options.temperature;
  row.top_k = options.top_k;
  row.top_p = options.top_p;
  row.min_p = options.min_p;
  row.noise = CounterBits(options.seed, static_cast<uint64_t>(index));
  row.top_logprobs = request.top_logprobs;
  return row;
}

absl::StatusOr<OutputToken> ToOutputToken(const kernels::SampledToken& sampled) {
  switch (sampled.status) {
    case kernels::SampleStatus::kOk:
      break;
    case kernels::SampleStatus::kNan:
      return absl::InternalError("the model's logits hold NaN");
    case kernels::SampleStatus::kInfinity:
      return absl::InternalError("the model's logits hold infinity");
    case kernels::SampleStatus::kNothing:
      return absl::InternalError("no token may be chosen");
  }
  OutputToken token;
  token.token = sampled.token;
  token.logprob = sampled.logprob;
  for (const kernels::SampledLogprob& top : std::span(sampled.top).first(sampled.num_top)) {
    token.top.push_back({.token = top.token, .logprob = top.logprob});
  }
  return token;
}

}  // namespace winnow::engine

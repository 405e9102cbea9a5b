#include "engine/sampler.h"

#include <algorithm>
#include <array>

namespace winnow::engine {

double CounterRandom(uint64_t seed, uint64_t index) {
  std::array<uint32_t, 4> counter = {static_cast<uint32_t>(index),
                                     static_cast<uint32_t>(index >> 32), 0, 0};
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  const uint64_t bits = uint64_t{counter[1]} << 32 | counter[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

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
  row.random = CounterRandom(options.seed, static_cast<uint64_t>(index));
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

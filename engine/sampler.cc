#include "engine/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/check.h"

namespace winnow::engine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct RowFacts {
  float max = kMinusInfinity;
  bool has_nan = false;
};

// Independent lanes, so that the compiler makes vectors of them.
RowFacts Examine(std::span<const float> row) {
  constexpr size_t kLanes = 16;
  std::array<float, kLanes> max;
  std::array<int32_t, kLanes> nan{};
  max.fill(kMinusInfinity);
  size_t i = 0;
  for (; i + kLanes <= row.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float x = row[i + lane];
      max[lane] = x > max[lane] ? x : max[lane];
      nan[lane] |= x != x;
    }
  }
  for (; i < row.size(); ++i) {
    max[0] = row[i] > max[0] ? row[i] : max[0];
    nan[0] |= row[i] != row[i];
  }
  RowFacts facts;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    facts.max = std::max(facts.max, max[lane]);
    facts.has_nan |= nan[lane] != 0;
  }
  return facts;
}

absl::Status CheckRow(const RowFacts& facts) {
  if (facts.has_nan) return absl::InternalError("the model's logits hold NaN");
  if (facts.max == std::numeric_limits<float>::infinity()) {
    return absl::InternalError("the model's logits hold infinity");
  }
  if (facts.max == kMinusInfinity) return absl::InternalError("no token may be chosen");
  return absl::OkStatus();
}

}  // namespace

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
  if (!prompt_counts_) return;
  for (const int32_t token : prompt) counts_.try_emplace(token, 0);
}

void TokenHistory::AddGenerated(int32_t token) {
  if (generated_counts_) ++counts_[token];
}

Sampler::Sampler(int32_t vocab_size) : vocab_size_(vocab_size) {
  WINNOW_CHECK(vocab_size_ >= 1);
  order_.resize(vocab_size_);
  drawn_.reserve(vocab_size_);
  weights_.reserve(vocab_size_);
}

absl::StatusOr<OutputToken> Sampler::Sample(const SampleInput& input, std::span<float> logits) {
  WINNOW_CHECK(static_cast<int32_t>(logits.size()) == vocab_size_);
  RowFacts facts = Examine(logits);
  if (absl::Status status = CheckRow(facts); !status.ok()) return status;

  OutputToken out;
  double log_sum = 0;
  if (input.top_logprobs >= 0) {
    double sum = 0;
    for (const float logit : logits) sum += std::exp(logit - facts.max);
    log_sum = facts.max + std::log(sum);
    AddTopLogprobs(logits, input.top_logprobs, log_sum, &out);
  }

  edits_.clear();
  ApplyProcessors(input, logits);
  if (!edits_.empty()) {
    facts = Examine(logits);
    if (absl::Status status = CheckRow(facts); !status.ok()) return status;
  }

  const SamplingOptions& options = *input.options;
  out.token = options.temperature > 0
                  ? Draw(options, logits, facts.max, CounterRandom(options.seed, input.index))
                  : static_cast<int32_t>(std::find(logits.begin(), logits.end(), facts.max) -
                                         logits.begin());
  if (input.top_logprobs >= 0) {
    const auto edit = std::find_if(edits_.begin(), edits_.end(),
                                   [&out](const auto& e) { return e.first == out.token; });
    const float raw = edit == edits_.end() ? logits[out.token] : edit->second;
    out.logprob = static_cast<float>(raw - log_sum);
  }
  return out;
}

void Sampler::AddTopLogprobs(std::span<const float> logits, int32_t count, double log_sum,
                             OutputToken* out) {
  count = std::min(count, vocab_size_);
  if (count == 0) return;
  SortTop(logits, count);
  out->top.reserve(count);
  for (int32_t i = 0; i < count; ++i) {
    out->top.push_back(
        {.token = order_[i], .logprob = static_cast<float>(logits[order_[i]] - log_sum)});
  }
}

void Sampler::Edit(std::span<float> logits, int32_t token, float value) {
  WINNOW_CHECK(token >= 0 && token < vocab_size_);
  edits_.emplace_back(token, logits[token]);
  logits[token] = value;
}

void Sampler::ApplyProcessors(const SampleInput& input, std::span<float> logits) {
  const SamplingOptions& options = *input.options;
  for (const auto& [token, bias] : options.logit_bias) {
    WINNOW_CHECK(token >= 0 && token < vocab_size_);
    Edit(logits, token, logits[token] + bias);
  }
  // The history is empty where no penalty asked for it. Each token is edited alone, so the order of
  // the map does not matter.
  for (const auto& [token, generated] : input.history->counts()) {
    WINNOW_CHECK(token >= 0 && token < vocab_size_);
    float logit = logits[token];
    logit = logit < 0 ? logit * options.repetition_penalty : logit / options.repetition_penalty;
    if (generated > 0) {
      logit -= options.presence_penalty + options.frequency_penalty * static_cast<float>(generated);
    }
    Edit(logits, token, logit);
  }
  for (const int32_t token : input.masked_tokens) Edit(logits, token, kMinusInfinity);
}

void Sampler::SortTop(std::span<const float> logits, int32_t count) {
  // A heap of the best while one pass goes by, up to here; beyond, selection and a sort win.
  constexpr int32_t kHeapMax = 1024;
  const auto before = [logits](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  std::iota(order_.begin(), order_.end(), 0);
  const auto end = order_.begin() + count;
  if (count <= kHeapMax) {
    std::partial_sort(order_.begin(), end, order_.end(), before);
    return;
  }
  if (end != order_.end()) std::nth_element(order_.begin(), end, order_.end(), before);
  std::sort(order_.begin(), end, before);
}

double Sampler::Weigh(std::span<const int32_t> tokens, std::span<const float> logits, float max,
                      float temperature) {
  drawn_.assign(tokens.begin(), tokens.end());
  weights_.resize(tokens.size());
  double sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    weights_[i] = std::exp((logits[tokens[i]] - max) / temperature);
    sum += weights_[i];
  }
  return sum;
}

int32_t Sampler::Draw(const SamplingOptions& options, std::span<const float> logits, float max,
                      double random) {
  const bool top_k = options.top_k > 0 && options.top_k < vocab_size_;
  const bool top_p = options.top_p < 1.0f;
  // In the order of ids unless a filter needs the order of likelihood.
  int32_t sorted = top_k ? options.top_k : vocab_size_;
  if (top_k) {
    SortTop(logits, sorted);
  } else {
    std::iota(order_.begin(), order_.end(), 0);
  }
  double sum = Weigh(std::span(order_).first(sorted), logits, max, options.temperature);

  if (top_p) {
    // The smallest set of the most likely whose weight reaches p; never empty. The set is mostly
    // small: sort as much as is needed.
    const double enough = options.top_p * sum;
    double reached = 0;
    int32_t kept = 0;
    if (!top_k) sorted = 0;
    while (true) {
      while (kept < sorted && (kept == 0 || reached < enough)) reached += weights_[kept++];
      if (reached >= enough || sorted == vocab_size_ || top_k) break;
      sorted = std::min(vocab_size_, std::max(64, sorted * 8));
      SortTop(logits, sorted);
      Weigh(std::span(order_).first(sorted), logits, max, options.temperature);
    }
    drawn_.resize(kept);
    weights_.resize(kept);
  }

  // What min-p cuts, and what is masked or has vanished, which no rounding may draw.
  const double least = std::max<double>(options.min_p, std::numeric_limits<double>::min());
  size_t kept = 0;
  sum = 0;
  for (size_t i = 0; i < drawn_.size(); ++i) {
    if (weights_[i] < least) continue;
    sum += weights_[i];
    weights_[kept] = weights_[i];
    drawn_[kept++] = drawn_[i];
  }
  drawn_.resize(kept);
  weights_.resize(kept);

  const double target = random * sum;
  double passed = 0;
  for (size_t i = 0; i + 1 < kept; ++i) {
    passed += weights_[i];
    if (passed > target) return drawn_[i];
  }
  return drawn_.back();
}

std::vector<Sampler::Candidate> Sampler::last_candidates() const {
  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < drawn_.size(); ++i) {
    candidates.push_back({.token = drawn_[i], .probability = weights_[i] / sum});
  }
  return candidates;
}

}  // namespace winnow::engine

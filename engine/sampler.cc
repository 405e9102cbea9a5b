#include "engine/sampler.h"

#include <algorithm>
#include <array>
#include <bit>
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
  Normalizer raw;
  if (input.top_logprobs >= 0) {
    double sum = 0;
    for (const float logit : logits) sum += std::exp(logit - facts.max);
    raw = {.max = facts.max, .log_sum = std::log(sum)};
    AddTopLogprobs(logits, input.top_logprobs, raw, &out);
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
    out.logprob = raw.Logprob(edit == edits_.end() ? logits[out.token] : edit->second);
  }
  return out;
}

void Sampler::AddTopLogprobs(std::span<const float> logits, int32_t count, const Normalizer& raw,
                             OutputToken* out) {
  count = std::min(count, vocab_size_);
  if (count == 0) return;
  SortTop(logits, count);
  out->top.reserve(count);
  for (int32_t i = 0; i < count; ++i) {
    out->top.push_back({.token = order_[i], .logprob = raw.Logprob(logits[order_[i]])});
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

void Sampler::Weigh(std::span<const int32_t> tokens, std::span<const float> logits, float max,
                    float temperature) {
  drawn_.assign(tokens.begin(), tokens.end());
  weights_.resize(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    weights_[i] = std::exp((logits[tokens[i]] - max) / temperature);
  }
}

void Sampler::CutTopP(std::span<const float> logits, float top_p) {
  // The smallest set of the most likely whose weight reaches p; never empty. Weights are gathered
  // in buckets by their leading bits (exponent and four bits of mantissa, which order positive
  // floats); only the bucket in which p is reached needs sorting, however large the set is.
  constexpr int kShift = 19;
  const auto bucket_of = [](double weight) {
    return std::bit_cast<uint32_t>(static_cast<float>(weight)) >> kShift;
  };
  constexpr uint32_t kTop = std::bit_cast<uint32_t>(1.0f) >> kShift;
  buckets_.assign(kTop + 1, 0.0);
  for (const double weight : weights_) buckets_[bucket_of(weight)] += weight;
  const double enough = top_p * std::accumulate(buckets_.begin(), buckets_.end(), 0.0);
  uint32_t edge = kTop;
  double reached = 0;
  while (edge > 0 && reached + buckets_[edge] < enough) reached += buckets_[edge--];

  const auto before = [logits](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  edge_.clear();
  for (size_t i = 0; i < drawn_.size(); ++i) {
    if (bucket_of(weights_[i]) == edge) edge_.emplace_back(drawn_[i], weights_[i]);
  }
  std::sort(edge_.begin(), edge_.end(),
            [before](const auto& a, const auto& b) { return before(a.first, b.first); });
  size_t last = 0;
  for (; last + 1 < edge_.size(); ++last) {
    reached += edge_[last].second;
    if (reached >= enough) break;
  }
  Keep([&](size_t i) {
    const uint32_t bucket = bucket_of(weights_[i]);
    return bucket > edge || (bucket == edge && !before(edge_[last].first, drawn_[i]));
  });
}

void Sampler::Keep(auto condition) {
  size_t kept = 0;
  for (size_t i = 0; i < drawn_.size(); ++i) {
    if (!condition(i)) continue;
    weights_[kept] = weights_[i];
    drawn_[kept++] = drawn_[i];
  }
  drawn_.resize(kept);
  weights_.resize(kept);
}

int32_t Sampler::Draw(const SamplingOptions& options, std::span<const float> logits, float max,
                      double random) {
  // In the order of likelihood with top-k, in the order of ids without.
  int32_t count = vocab_size_;
  if (options.top_k > 0 && options.top_k < vocab_size_) {
    count = options.top_k;
    SortTop(logits, count);
  } else {
    std::iota(order_.begin(), order_.end(), 0);
  }
  Weigh(std::span(order_).first(count), logits, max, options.temperature);
  if (options.top_p < 1.0f) CutTopP(logits, options.top_p);
  // What min-p cuts, and what is masked or has vanished, which no rounding may draw.
  const double least = std::max<double>(options.min_p, std::numeric_limits<double>::min());
  Keep([this, least](size_t i) { return weights_[i] >= least; });

  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  const double target = random * sum;
  double passed = 0;
  for (size_t i = 0; i + 1 < drawn_.size(); ++i) {
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

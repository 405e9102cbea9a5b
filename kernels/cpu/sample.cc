// Sample of the CPU backend: a row is one thread's. Passes over a whole row are vectorised and end in sums of
// strips; what top-k, top-p and min-p may leave is collected by a bound on its logit, and from then on only
// those tokens are looked at, of which models leave few.
#include "kernels/sample.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/token_noise.h"

namespace winnow::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kStrip = 256;     // logits whose largest is kept
constexpr int64_t kChunk = 4096;    // logits that are weighed together
constexpr double kLeast = 0x1p-41;  // of a weight

LogitWeighing WeighingOf(float max, float temperature) {
  const double exact = 1.4426950408889634 / double{temperature};
  const auto high = static_cast<float>(std::min(exact, double{FLT_MAX}));
  return {max, high, exact < FLT_MAX ? static_cast<float>(exact - double{high}) : 0.0f};
}

// A logit such that none below it weighs `weight` or more, roundings included.
float BoundOf(float max, float temperature, double weight) {
  const double distance = -std::log(weight) * temperature * (1 + 1e-5) + 1e-5 * temperature;
  return static_cast<float>(double{max} - distance - std::abs(double{max}) * 1e-6 - FLT_MIN);
}

SampleStatus StatusOf(const LogitFacts& facts) {
  if (facts.has_nan) return SampleStatus::kNan;
  if (facts.max == kInfinity) return SampleStatus::kInfinity;
  return facts.max == -kInfinity ? SampleStatus::kNothing : SampleStatus::kOk;
}

// Calls f(token) for all tokens of the strips in which some logit is at least `bound`, in order of ids.
template <typename F>
void InStripsFrom(float bound, std::span<const float> logits, std::span<const float> strips, F f) {
  for (size_t strip = 0; strip < strips.size(); ++strip) {
    if (strips[strip] < bound) continue;
    const auto first = static_cast<int32_t>(strip * kStrip);
    const auto last =
        std::min(first + static_cast<int32_t>(kStrip), static_cast<int32_t>(logits.size()));
    for (int32_t token = first; token < last; ++token) f(token);
  }
}

// The tokens of logits that are at least `bound`, in order of ids.
void Collect(std::span<const float> logits, std::span<const float> strips, float bound,
             std::vector<int32_t>& tokens) {
  tokens.resize(logits.size());
  int32_t* out = tokens.data();
  InStripsFrom(bound, logits, strips, [&](int32_t token) {
    *out = token;
    out += logits[token] >= bound ? 1 : 0;
  });
  tokens.resize(out - tokens.data());
}

void KeepAllowed(std::span<const uint32_t> allowed, std::vector<float>& logits) {
  for (size_t word = 0; word < allowed.size(); ++word) {
    if (allowed[word] == ~0u) continue;
    const size_t end = std::min(32 * word + 32, logits.size());
    for (size_t token = 32 * word; token < end; ++token) {
      if (!IsAllowed(allowed, static_cast<int64_t>(token))) logits[token] = -kInfinity;
    }
  }
}

// Of two tokens, the more likely, and of equals the lower.
auto Before(std::span<const float> logits) {
  return [logits](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
}

// `tokens` becomes the `count` most likely, in any order. REQUIRES: count <= logits.size().
void CollectMostLikely(std::span<const float> logits, std::span<const float> strips, int32_t count,
                       std::vector<float>& ordered, std::vector<int32_t>& tokens) {
  // Where so many strips have a logit, so many tokens do.
  float bound = -kInfinity;
  if (count <= static_cast<int32_t>(strips.size())) {
    ordered.assign(strips.begin(), strips.end());
    std::nth_element(ordered.begin(), ordered.begin() + count - 1, ordered.end(),
                     std::greater<float>());
    bound = ordered[count - 1];
  }
  Collect(logits, strips, bound, tokens);
  if (count < static_cast<int32_t>(tokens.size())) {
    std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end(), Before(logits));
    tokens.resize(count);
  }
}

// Drops of two vectors what condition(index) is false for.
void Keep(std::vector<int32_t>& tokens, std::vector<float>& weights, auto condition) {
  size_t kept = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!condition(i)) continue;
    weights[kept] = weights[i];
    tokens[kept++] = tokens[i];
  }
  tokens.resize(kept);
  weights.resize(kept);
}

// The smallest set of the most likely whose weight reaches `enough`; never empty. Weights are gathered in
// buckets by their leading bits (exponent and four bits of mantissa, which order positive floats); only the
// bucket in which it is reached needs sorting, however large the set is.
void CutTopP(std::span<const float> logits, double enough, std::vector<int32_t>& tokens,
             std::vector<float>& weights, std::vector<double>& buckets,
             std::vector<int32_t>& edge_tokens) {
  constexpr int kShift = 19;
  const auto bucket_of = [](float weight) { return std::bit_cast<uint32_t>(weight) >> kShift; };
  constexpr uint32_t kTop = std::bit_cast<uint32_t>(1.0f) >> kShift;
  buckets.assign(kTop + 1, 0.0);
  for (const float weight : weights) buckets[bucket_of(weight)] += weight;
  uint32_t edge = kTop;
  double reached = 0;
  while (edge > 0 && reached + buckets[edge] < enough) reached += buckets[edge--];

  const auto before = Before(logits);
  edge_tokens.clear();
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (bucket_of(weights[i]) == edge) edge_tokens.push_back(static_cast<int32_t>(i));
  }
  std::sort(edge_tokens.begin(), edge_tokens.end(),
            [&](int32_t a, int32_t b) { return before(tokens[a], tokens[b]); });
  if (edge_tokens.empty()) return;  // all of them do not reach it
  size_t last = 0;
  for (; last + 1 < edge_tokens.size(); ++last) {
    reached += weights[edge_tokens[last]];
    if (reached >= enough) break;
  }
  const int32_t last_token = tokens[edge_tokens[last]];
  Keep(tokens, weights, [&](size_t i) {
    const uint32_t bucket = bucket_of(weights[i]);
    return bucket > edge || (bucket == edge && !before(last_token, tokens[i]));
  });
}

// The place of `token` in the order of likelihood: 1 is the likeliest, and of equals the lowest id comes first.
int32_t RankOf(std::span<const float> logits, std::span<const float> strips, int32_t token) {
  const auto before = Before(logits);
  int32_t rank = 1;
  InStripsFrom(logits[token], logits, strips,
               [&](int32_t other) { rank += before(other, token) ? 1 : 0; });
  return rank;
}

}  // namespace

LogitFacts CpuBackend::Examine(std::span<const float> logits, Sampling& work) const {
  const auto size = static_cast<int64_t>(logits.size());
  work.strips.clear();
  LogitFacts all = {-kInfinity, false};
  for (int64_t first = 0; first < size; first += kStrip) {
    const LogitFacts facts =
        ops_.examine_logits(logits.data() + first, std::min(kStrip, size - first));
    work.strips.push_back(facts.max);
    all.max = std::max(all.max, facts.max);
    all.has_nan = all.has_nan || facts.has_nan;
  }
  return all;
}

int32_t CpuBackend::Draw(std::span<const float> logits, float max, const SampleRow& row,
                         Sampling& work) const {
  const LogitWeighing weighing = WeighingOf(max, row.temperature);
  const auto size = static_cast<int64_t>(logits.size());
  const bool cuts_k = row.top_k > 0 && row.top_k < size;
  const bool cuts_p = row.top_p < 1;
  double all = 0;  // what top-p is a share of
  if (!cuts_k && cuts_p) {
    for (int64_t first = 0; first < size; first += kChunk) {
      all += ops_.weigh_logits(weighing, logits.data() + first, std::min(kChunk, size - first),
                               nullptr);
    }
  }
  DrawLead lead;
  if (cuts_k) {
    CollectMostLikely(logits, work.strips, row.top_k, work.ordered, work.tokens);
    std::sort(work.tokens.begin(), work.tokens.end());
  } else if (cuts_p || row.min_p > 0) {
    // If the smallest set held a lighter one, it and all after it, lighter still, would weigh less than
    // 1 - p of all.
    double least = std::max(kLeast, double{row.min_p});
    if (cuts_p)
      least = std::max(least, 0.99 * (1 - double{row.top_p}) * all / static_cast<double>(size));
    Collect(logits, work.strips, BoundOf(max, row.temperature, least), work.tokens);
  } else {
    work.weights.resize(kChunk);
    for (int64_t first = 0; first < size; first += kChunk) {
      const int64_t count = std::min(kChunk, size - first);
      ops_.weigh_logits(weighing, logits.data() + first, count, work.weights.data());
      ops_.draw_tokens(row.noise, static_cast<int32_t>(first), work.weights.data(), count, &lead);
    }
    return lead.token;
  }

  work.logits.resize(work.tokens.size());
  work.weights.resize(work.tokens.size());
  for (size_t i = 0; i < work.tokens.size(); ++i) work.logits[i] = logits[work.tokens[i]];
  const double collected = ops_.weigh_logits(
      weighing, work.logits.data(), static_cast<int64_t>(work.tokens.size()), work.weights.data());
  if (cuts_p) {
    CutTopP(logits, double{row.top_p} * (cuts_k ? collected : all), work.tokens, work.weights,
            work.buckets, work.edge);
  }
  // What min-p cuts, and what has vanished, which no rounding may draw.
  const double least = std::max(kLeast / 2, double{row.min_p});
  Keep(work.tokens, work.weights, [&](size_t i) { return work.weights[i] >= least; });
  for (size_t i = 0; i < work.tokens.size(); ++i) {
    const int32_t token = work.tokens[i];
    const double weight = work.weights[i];
    const double share = DrawShare(row.noise, static_cast<uint32_t>(token));
    if (weight <= lead.speed * share) continue;
    const double speed = weight / DrawTime(share);
    if (speed > lead.speed) lead = {speed, token};
  }
  return lead.token;
}

SampledToken CpuBackend::SampleOne(std::span<float> logits, const SampleRow& row,
                                   Sampling& work) const {
  SampledToken sampled{};
  LogitFacts facts = Examine(logits, work);
  sampled.status = StatusOf(facts);
  if (sampled.status != SampleStatus::kOk) return sampled;

  const auto size = static_cast<int64_t>(logits.size());
  const float raw_max = facts.max;
  double log_sum = 0;
  const auto logprob = [&](float logit) {
    return static_cast<float>(double{logit} - double{raw_max} - log_sum);
  };
  if (row.top_logprobs >= 0) {
    double sum = 0;
    for (int64_t first = 0; first < size; first += kChunk) {
      sum += ops_.weigh_logits(WeighingOf(raw_max, 1), logits.data() + first,
                               std::min(kChunk, size - first), nullptr);
    }
    log_sum = std::log(sum);
    sampled.num_top = static_cast<int32_t>(std::min<int64_t>(row.top_logprobs, size));
    if (sampled.num_top > 0) {
      CollectMostLikely(logits, work.strips, sampled.num_top, work.ordered, work.tokens);
      std::sort(work.tokens.begin(), work.tokens.end(), Before(logits));
    }
    for (int32_t i = 0; i < sampled.num_top; ++i) {
      sampled.top[i] = {work.tokens[i], logprob(logits[work.tokens[i]])};
    }
  }

  if (row.given >= 0) {
    sampled.token = row.given;
    sampled.rank = RankOf(logits, work.strips, row.given);
    if (row.top_logprobs >= 0) sampled.logprob = logprob(logits[row.given]);
    return sampled;
  }

  // A few tokens in place, and undone at the end; a mask of all in a copy.
  work.edited.clear();
  const auto edit = [&](int32_t token, float value) {
    work.edited.emplace_back(token, logits[token]);
    logits[token] = value;
  };
  for (const LogitEdit& e : row.edits) edit(e.token, EditedLogit(logits[e.token], e, row));
  for (const int32_t token : row.masked) edit(token, -kInfinity);
  std::span<const float> drawn = logits;
  if (!row.allowed.empty()) {
    work.allowed.assign(logits.begin(), logits.end());
    KeepAllowed(row.allowed, work.allowed);
    drawn = work.allowed;
  }
  if (!work.edited.empty() || !row.allowed.empty()) facts = Examine(drawn, work);
  sampled.status = StatusOf(facts);
  if (sampled.status == SampleStatus::kOk) {
    if (row.temperature > 0) {
      sampled.token = Draw(drawn, facts.max, row, work);
    } else {
      const auto strip = std::find(work.strips.begin(), work.strips.end(), facts.max);
      const auto from = drawn.begin() + (strip - work.strips.begin()) * kStrip;
      sampled.token = static_cast<int32_t>(std::find(from, drawn.end(), facts.max) - drawn.begin());
    }
  }
  for (size_t i = work.edited.size(); i > 0; --i) {
    logits[work.edited[i - 1].first] = work.edited[i - 1].second;
  }
  if (sampled.status == SampleStatus::kOk && row.top_logprobs >= 0) {
    sampled.logprob = logprob(logits[sampled.token]);
  }
  return sampled;
}

void CpuBackend::Sample(const Tensor& logits, std::span<const SampleRow> rows,
                        SampledToken* sampled) {
  WINNOW_CHECK(logits.dtype == DType::kF32 && logits.cols >= 1);
  WINNOW_CHECK(logits.rows == static_cast<int64_t>(rows.size()));
  for (const SampleRow& row : rows) CheckSampleRow(row, logits.cols);
  sampling_.resize(num_threads());
  threads_.ParallelFor(logits.rows, [&](int64_t row, int thread) {
    sampled[row] = SampleOne({logits.f32(row), static_cast<size_t>(logits.cols)}, rows[row],
                             sampling_[thread]);
  });
}

}  // namespace winnow::kernels

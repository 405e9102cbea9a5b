#include "kernels/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/check.h"
#include "kernels/token_noise.h"

namespace winnow::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> Edited(std::span<const float> logits, const SampleRow& row) {
  std::vector<float> edited(logits.begin(), logits.end());
  for (const LogitEdit& edit : row.edits) {
    edited[edit.token] = EditedLogit(edited[edit.token], edit, row);
  }
  for (const int32_t token : row.masked) edited[token] = -kInfinity;
  for (size_t token = 0; token < edited.size(); ++token) {
    if (!IsAllowed(row.allowed, static_cast<int64_t>(token))) edited[token] = -kInfinity;
  }
  return edited;
}

SampleStatus StatusOf(std::span<const float> row) {
  float max = -kInfinity;
  for (const float logit : row) {
    if (std::isnan(logit)) return SampleStatus::kNan;
    max = std::max(max, logit);
  }
  if (max == kInfinity) return SampleStatus::kInfinity;
  return max == -kInfinity ? SampleStatus::kNothing : SampleStatus::kOk;
}

// Token ids, the most likely first.
std::vector<int32_t> Order(std::span<const float> row) {
  std::vector<int32_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [row](int32_t a, int32_t b) { return row[a] > row[b]; });
  return order;
}

double Weight(float logit, float max, float temperature) {
  return std::exp(double{logit - max} / double{temperature});
}

int32_t Chosen(std::span<const float> logits, std::span<const float> edited, const SampleRow& row) {
  if (row.temperature == 0) {
    return static_cast<int32_t>(std::max_element(edited.begin(), edited.end()) - edited.begin());
  }
  int32_t token = -1;
  double best = 0;
  for (const SampleCandidate& c : SampleCandidatesRef(logits, row)) {
    const double speed =
        c.probability / DrawTime(DrawShare(row.noise, static_cast<uint32_t>(c.token)));
    if (speed <= best) continue;
    best = speed;
    token = c.token;
  }
  return token;
}

}  // namespace

std::vector<SampleCandidate> SampleCandidatesRef(std::span<const float> logits,
                                                 const SampleRow& row) {
  WINNOW_CHECK(row.temperature > 0);
  const std::vector<float> edited = Edited(logits, row);
  std::vector<int32_t> order = Order(edited);
  const float max = edited[order[0]];
  const auto weight = [&](int32_t token) { return Weight(edited[token], max, row.temperature); };
  if (row.top_k > 0 && row.top_k < static_cast<int32_t>(order.size())) order.resize(row.top_k);
  double sum = 0;
  for (const int32_t token : order) sum += weight(token);
  std::vector<SampleCandidate> kept;
  double reached = 0;
  for (const int32_t token : order) {
    if (row.top_p < 1 && !kept.empty() && reached >= double{row.top_p} * sum) break;
    reached += weight(token);
    kept.push_back({token, weight(token)});
  }
  const double least = std::max(double{row.min_p}, 0x1p-41);
  std::erase_if(kept, [least](const SampleCandidate& c) { return c.probability < least; });
  std::sort(kept.begin(), kept.end(),
            [](const auto& a, const auto& b) { return a.token < b.token; });
  double total = 0;
  for (const SampleCandidate& c : kept) total += c.probability;
  for (SampleCandidate& c : kept) c.probability /= total;
  return kept;
}

SampledToken SampleRef(std::span<const float> logits, const SampleRow& row) {
  WINNOW_CHECK(row.top_logprobs <= kMaxTopLogprobs);
  SampledToken result{};
  result.status = StatusOf(logits);
  if (result.status != SampleStatus::kOk) return result;
  if (row.given >= 0) {
    result.token = row.given;
    const std::vector<int32_t> order = Order(logits);
    result.rank =
        static_cast<int32_t>(std::find(order.begin(), order.end(), row.given) - order.begin()) + 1;
  } else {
    const std::vector<float> edited = Edited(logits, row);
    result.status = StatusOf(edited);
    if (result.status != SampleStatus::kOk) return result;
    result.token = Chosen(logits, edited, row);
  }
  if (row.top_logprobs < 0) return result;
  const std::vector<int32_t> order = Order(logits);
  const double max = logits[order[0]];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - max);
  const auto logprob = [&](int32_t token) {
    return static_cast<float>(logits[token] - max - std::log(sum));
  };
  result.logprob = logprob(result.token);
  result.num_top = std::min(row.top_logprobs, static_cast<int32_t>(logits.size()));
  for (int32_t i = 0; i < result.num_top; ++i) result.top[i] = {order[i], logprob(order[i])};
  return result;
}

}  // namespace winnow::kernels

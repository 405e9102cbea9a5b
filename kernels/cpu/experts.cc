// A layer of experts beside its products (kernels/experts.h). All instruction sets have the same bits: routing computes in
// double, and the rest is bound by memory.
#include "kernels/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"

namespace winnow::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float KeyOf(float value) { return std::isnan(value) ? -kInfinity : value; }

// Fewer experts are chosen than there are: so each is found by a pass over all of them.
void ChooseLargest(const float* values, int32_t experts, int32_t per_token, int32_t* ids) {
  for (int32_t slot = 0; slot < per_token; ++slot) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e) {
      if (best >= 0 && !(KeyOf(values[e]) > KeyOf(values[best]))) continue;
      if (std::find(ids, ids + slot, e) == ids + slot) best = e;
    }
    ids[slot] = best;
  }
}

void RouteRow(const float* logits, int32_t experts, int32_t per_token, const ExpertRouting& routing,
              int32_t* ids, float* weights) {
  const bool sigmoid = routing.scores == ExpertRouting::Scores::kSigmoid;
  double largest = -kInfinity;
  bool broken = false;
  for (int32_t e = 0; e < experts; ++e) {
    largest = std::max(largest, double{KeyOf(logits[e])});
    broken |= !(logits[e] < kInfinity);
  }
  const auto score = [&](int32_t expert) {
    const double logit = logits[expert];
    return sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit - largest);
  };
  double all = 1;
  if (!sigmoid && (routing.correction != nullptr || !routing.normalized)) {
    all = 0;
    for (int32_t e = 0; e < experts; ++e) all += score(e);
  }
  if (routing.correction == nullptr) {
    ChooseLargest(logits, experts, per_token, ids);
  } else {
    float corrected[kExpertsMax];
    for (int32_t e = 0; e < experts; ++e) {
      corrected[e] = static_cast<float>(score(e) / all) + routing.correction[e];
    }
    ChooseLargest(corrected, experts, per_token, ids);
  }
  double sum = all;
  if (routing.normalized) {
    sum = sigmoid ? double{kLeastSigmoids} : 0;
    for (int32_t slot = 0; slot < per_token; ++slot) sum += score(ids[slot]);
  }
  for (int32_t slot = 0; slot < per_token; ++slot) {
    const auto weight = static_cast<float>(routing.scale * (score(ids[slot]) / sum));
    weights[slot] = broken ? std::numeric_limits<float>::quiet_NaN() : weight;
  }
}

}  // namespace

void CpuBackend::RouteExperts(const Tensor& logits, const ExpertRouting& routing, int32_t* ids,
                              const Tensor& weights) {
  const int64_t per_token = weights.cols;
  WINNOW_CHECK(per_token >= 1 && per_token <= logits.cols && logits.cols <= kExpertsMax);
  WINNOW_CHECK(weights.rows >= logits.rows);
  constexpr int64_t kValuesPerLogit = 16;  // an exponential, and a look for each slot
  ForEachRow(logits.rows, logits.cols * kValuesPerLogit, [&](int64_t i) {
    RouteRow(logits.f32(i), static_cast<int32_t>(logits.cols), static_cast<int32_t>(per_token),
             routing, ids + i * per_token, weights.f32(i));
  });
}

void CpuBackend::GatherExpertRows(const Tensor& x, std::span<const int32_t> rows,
                                  const Tensor& out) {
  WINNOW_CHECK(out.cols == x.cols && out.rows >= static_cast<int64_t>(rows.size()));
  for (const int32_t row : rows) WINNOW_CHECK(row >= 0 && row < x.rows);
  ForEachRow(static_cast<int64_t>(rows.size()), x.cols, [&](int64_t i) {
    std::memcpy(out.f32(i), x.f32(rows[i]), static_cast<size_t>(x.cols) * sizeof(float));
  });
}

void CpuBackend::AddExpertRows(const Tensor& x, std::span<const int32_t> places,
                               const Tensor& weights, const Tensor& y) {
  const int64_t per_token = weights.cols, n = y.cols;
  WINNOW_CHECK(x.cols == n && y.rows >= weights.rows);
  WINNOW_CHECK(static_cast<int64_t>(places.size()) == weights.rows * per_token);
  for (const int32_t place : places) WINNOW_CHECK(place >= 0 && place < x.rows);
  ForEachRow(weights.rows, n * (per_token + 1), [&](int64_t i) {
    constexpr int64_t kPiece = 512;  // of a row, whose sum stays in the first-level cache
    float sum[kPiece];
    for (int64_t first = 0; first < n; first += kPiece) {
      const int64_t count = std::min(kPiece, n - first);
      for (int64_t slot = 0; slot < per_token; ++slot) {
        const float weight = weights.f32(i)[slot];
        const float* const from = x.f32(places[i * per_token + slot]) + first;
        if (slot == 0) {
          for (int64_t j = 0; j < count; ++j) sum[j] = weight * from[j];
        } else {
          for (int64_t j = 0; j < count; ++j) sum[j] += weight * from[j];
        }
      }
      float* const to = y.f32(i) + first;
      for (int64_t j = 0; j < count; ++j) to[j] += sum[j];
    }
  });
}

}  // namespace winnow::kernels

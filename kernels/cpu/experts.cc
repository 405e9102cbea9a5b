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

float KeyOf(float logit) {
  return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
}

// Fewer experts are chosen than there are: so each is found by a pass over all of them.
void RouteRow(const float* logits, int32_t experts, int32_t per_token, bool normalize, int32_t* ids,
              float* weights) {
  for (int32_t slot = 0; slot < per_token; ++slot) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; ++e) {
      if (best >= 0 && !(KeyOf(logits[e]) > KeyOf(logits[best]))) continue;
      if (std::find(ids, ids + slot, e) == ids + slot) best = e;
    }
    ids[slot] = best;
  }
  const double largest = KeyOf(logits[ids[0]]);
  const auto mass = [&](int32_t expert) { return std::exp(double{logits[expert]} - largest); };
  double all = 0, chosen = 0;
  for (int32_t e = 0; e < experts; ++e) all += mass(e);
  for (int32_t slot = 0; slot < per_token; ++slot) chosen += mass(ids[slot]);
  const double sum = std::isnan(all) || !normalize ? all : chosen;
  for (int32_t slot = 0; slot < per_token; ++slot) {
    weights[slot] = static_cast<float>(mass(ids[slot]) / sum);
  }
}

}  // namespace

void CpuBackend::RouteExperts(const Tensor& logits, bool normalize, int32_t* ids,
                              const Tensor& weights) {
  const int64_t per_token = weights.cols;
  WINNOW_CHECK(per_token >= 1 && per_token <= logits.cols && logits.cols <= kExpertsMax);
  WINNOW_CHECK(weights.rows >= logits.rows);
  constexpr int64_t kValuesPerLogit = 16;  // an exponential, and a look for each slot
  ForEachRow(logits.rows, logits.cols * kValuesPerLogit, [&](int64_t i) {
    RouteRow(logits.f32(i), static_cast<int32_t>(logits.cols), static_cast<int32_t>(per_token),
             normalize, ids + i * per_token, weights.f32(i));
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

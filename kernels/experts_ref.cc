#include "kernels/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace winnow::kernels {

void RouteExpertsRef(const Tensor& logits, const ExpertRouting& routing, int32_t* ids,
                     const Tensor& weights) {
  const bool sigmoid = routing.scores == ExpertRouting::Scores::kSigmoid;
  const int64_t experts = logits.cols, per_token = weights.cols;
  for (int64_t i = 0; i < logits.rows; ++i) {
    const float* const row = logits.f32(i);
    bool broken = false;
    double largest = -std::numeric_limits<double>::infinity(), all = 0;
    for (int64_t e = 0; e < experts; ++e) {
      broken |= std::isnan(row[e]) || row[e] == std::numeric_limits<float>::infinity();
      if (!std::isnan(row[e])) largest = std::max(largest, double{row[e]});
    }
    std::vector<double> scores(experts);
    for (int64_t e = 0; e < experts; ++e) {
      scores[e] = sigmoid ? 1 / (1 + std::exp(-double{row[e]})) : std::exp(row[e] - largest);
      all += scores[e];
    }
    std::vector<float> keys(row, row + experts);
    for (int64_t e = 0; e < experts; ++e) {
      if (routing.correction != nullptr) {
        keys[e] = static_cast<float>(sigmoid ? scores[e] : scores[e] / all) + routing.correction[e];
      }
      if (std::isnan(keys[e])) keys[e] = -std::numeric_limits<float>::infinity();
    }
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return keys[a] > keys[b]; });
    double sum = sigmoid ? 1 : all;
    if (routing.normalized) {
      sum = sigmoid ? double{kLeastSigmoids} : 0;
      for (int64_t s = 0; s < per_token; ++s) sum += scores[order[s]];
    }
    for (int64_t s = 0; s < per_token; ++s) {
      ids[i * per_token + s] = order[s];
      weights.f32(i)[s] =
          broken ? std::nanf("") : static_cast<float>(routing.scale * (scores[order[s]] / sum));
    }
  }
}

void GatherExpertRowsRef(const Tensor& x, std::span<const int32_t> rows, const Tensor& out) {
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(x.f32(rows[i]), x.cols, out.f32(static_cast<int64_t>(i)));
  }
}

void AddExpertRowsRef(const Tensor& x, std::span<const int32_t> places, const Tensor& weights,
                      const Tensor& y) {
  for (int64_t i = 0; i < weights.rows; ++i) {
    for (int64_t j = 0; j < y.cols; ++j) {
      double sum = 0;
      for (int64_t s = 0; s < weights.cols; ++s) {
        sum += double{weights.f32(i)[s]} * x.f32(places[i * weights.cols + s])[j];
      }
      y.f32(i)[j] = static_cast<float>(y.f32(i)[j] + sum);
    }
  }
}

}  // namespace winnow::kernels

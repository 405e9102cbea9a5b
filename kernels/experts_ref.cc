#include "kernels/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace winnow::kernels {

void RouteExpertsRef(const Tensor& logits, bool normalize, int32_t* ids, const Tensor& weights) {
  for (int64_t i = 0; i < logits.rows; ++i) {
    const float* const row = logits.f32(i);
    const auto key = [row](int32_t expert) {
      return std::isnan(row[expert]) ? -std::numeric_limits<float>::infinity() : row[expert];
    };
    std::vector<int32_t> order(logits.cols);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return key(a) > key(b); });
    const double largest = key(order[0]);
    double all = 0, chosen = 0;
    for (int64_t e = 0; e < logits.cols; ++e) all += std::exp(double{row[e]} - largest);
    for (int64_t s = 0; s < weights.cols; ++s) chosen += std::exp(double{row[order[s]]} - largest);
    const double sum = std::isnan(all) ? all : normalize ? chosen : all;
    for (int64_t s = 0; s < weights.cols; ++s) {
      ids[i * weights.cols + s] = order[s];
      weights.f32(i)[s] = static_cast<float>(std::exp(double{row[order[s]]} - largest) / sum);
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

#include "kernels/top_p.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/int4_keys.h"

namespace winnow::kernels {

std::vector<bool> TopPRef(std::span<const double> anchors, std::span<const double> candidates,
                          double p) {
  std::vector<int32_t> order(candidates.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return candidates[a] != candidates[b] ? candidates[a] > candidates[b] : a > b;
  });
  const double of_anchors = std::accumulate(anchors.begin(), anchors.end(), 0.0);
  const double needed =
      p * (of_anchors + std::accumulate(candidates.begin(), candidates.end(), 0.0)) - of_anchors;
  std::vector<bool> kept(candidates.size());
  double sum = 0;
  for (const int32_t i : order) {
    if (candidates[i] == 0 || (p < 1 && sum >= needed)) break;
    kept[i] = true;
    sum += candidates[i];
  }
  return kept;
}

std::vector<double> EstimatedWeightsRef(const Tensor& q, const RetrievalQuery& query,
                                        const void* int4_keys, const KvLayout& layout, float scale,
                                        int64_t head, std::span<const int32_t> tokens) {
  const int32_t d = layout.head_dim;
  const int64_t group = q.cols / d / layout.kv_heads;
  std::vector<double> weights;
  for (const int32_t t : tokens) {
    const std::byte* key =
        static_cast<const std::byte*>(int4_keys) +
        Int4KeyOffset(layout, query.block_table[t / layout.block_tokens],
                      static_cast<int32_t>(head / group), t % layout.block_tokens);
    double estimate = 0;
    for (int32_t c = 0; c < d; ++c) {
      estimate += static_cast<double>(q.f32(query.row)[head * d + c]) * Int4KeyValueRef(key, d, c);
    }
    weights.push_back(scale * estimate);
  }
  if (weights.empty()) return weights;
  const double max = *std::max_element(weights.begin(), weights.end());
  for (double& weight : weights) {
    weight = std::exp(weight - max);
    if (weight < 0x1p-126) weight = 0;
  }
  return weights;
}

void PruneSelectionRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                       const void* int4_keys, const KvLayout& layout, float scale, float p,
                       const Selection& candidates, const Selection& kept) {
  const int64_t group = q.cols / layout.head_dim / layout.kv_heads;
  for (size_t i = 0; i < queries.size(); ++i) {
    std::vector<int32_t> anchors;
    for (int32_t t = 0; t <= queries[i].position; ++t) {
      if (t < queries[i].mid.first || t >= queries[i].mid.last) anchors.push_back(t);
    }
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      const int32_t count = candidates.count(i, head);
      const std::vector<int32_t> tokens(candidates.chosen(i, head),
                                        candidates.chosen(i, head) + count);
      std::vector<int32_t> all = anchors;
      all.insert(all.end(), tokens.begin(), tokens.end());
      std::vector<bool> wanted(tokens.size());
      for (int64_t g = 0; g < group; ++g) {
        const std::vector<double> weights =
            EstimatedWeightsRef(q, queries[i], int4_keys, layout, scale, head * group + g, all);
        const std::span<const double> of_all(weights);
        const std::vector<bool> of_head =
            TopPRef(of_all.first(anchors.size()), of_all.subspan(anchors.size()), p);
        for (size_t j = 0; j < wanted.size(); ++j) wanted[j] = wanted[j] || of_head[j];
      }
      int32_t number = 0;
      for (size_t j = 0; j < tokens.size(); ++j) {
        if (wanted[j]) kept.chosen(i, head)[number++] = tokens[j];
      }
      kept.count(i, head) = number;
    }
  }
}

}  // namespace winnow::kernels

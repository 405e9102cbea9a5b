#include "kernels/logit_select.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/kv_row.h"

namespace winnow::kernels {

std::vector<double> LogitScoresRef(const Tensor& q, const RetrievalQuery& query, const void* pool,
                                   const KvLayout& layout, float scale, int32_t kv_head) {
  const int32_t d = layout.head_dim;
  const int64_t group = q.cols / d / layout.kv_heads;
  const int32_t n = query.position + 1;
  std::vector<double> scores(n), logits(n);
  for (int64_t g = 0; g < group; ++g) {
    const float* of_head = q.f32(query.row) + (kv_head * group + g) * d;
    for (int32_t t = 0; t < n; ++t) {
      const std::byte* row = static_cast<const std::byte*>(pool) +
                             layout.RowOffset(query.block_table[t / layout.block_tokens], kv_head,
                                              t % layout.block_tokens);
      logits[t] = 0;
      for (int32_t c = 0; c < d; ++c) {
        logits[t] += static_cast<double>(of_head[c]) * KeyAt(row, layout, c);
      }
      logits[t] *= scale;
    }
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double& logit : logits) sum += logit = std::exp(logit - max);
    for (int32_t t = 0; t < n; ++t) {
      const double mass = logits[t] / sum;
      scores[t] += mass < 0x1p-126 ? 0 : mass;
    }
  }
  return scores;
}

std::vector<int32_t> TopKRef(std::span<const double> scores, int64_t k) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a > b;
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

namespace {

std::vector<int32_t> ChooseRef(const std::vector<double>& scores, TokenRange mid, int32_t k) {
  if (mid.size() <= 0) return {};
  std::vector<int32_t> chosen = TopKRef(std::span(scores).subspan(mid.first, mid.size()), k);
  for (int32_t& token : chosen) token += mid.first;
  return chosen;
}

}  // namespace

void SelectByLogitsRef(const Tensor& q, std::span<const RetrievalQuery> queries, const void* pool,
                       const KvLayout& layout, float scale, const Selection& chosen) {
  for (size_t i = 0; i < queries.size(); ++i) {
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      const std::vector<int32_t> tokens = ChooseRef(
          LogitScoresRef(q, queries[i], pool, layout, scale, head), queries[i].mid, queries[i].k);
      chosen.count(i, head) = static_cast<int32_t>(tokens.size());
      std::copy(tokens.begin(), tokens.end(), chosen.chosen(i, head));
    }
  }
}

void MeasureSelectionRef(const Tensor& q, std::span<const RetrievalQuery> queries, const void* pool,
                         const KvLayout& layout, float scale, const Selection& chosen,
                         SelectionQuality* quality) {
  const int64_t group = q.cols / layout.head_dim / layout.kv_heads;
  for (size_t i = 0; i < queries.size(); ++i) {
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      const RetrievalQuery& query = queries[i];
      const std::vector<double> scores = LogitScoresRef(q, query, pool, layout, scale, head);
      const int32_t* first = chosen.chosen(i, head);
      const std::vector<int32_t> tokens(first, first + chosen.count(i, head));
      double covered = 0;
      for (int32_t t = 0; t <= query.position; ++t) {
        const bool anchor = t < query.mid.first || t >= query.mid.last;
        if (anchor || std::binary_search(tokens.begin(), tokens.end(), t)) covered += scores[t];
      }
      const std::vector<int32_t> wanted =
          ChooseRef(scores, query.mid, static_cast<int32_t>(tokens.size()));
      std::vector<int32_t> both;
      std::set_intersection(tokens.begin(), tokens.end(), wanted.begin(), wanted.end(),
                            std::back_inserter(both));
      SelectionQuality& result = quality[i * layout.kv_heads + head];
      result.coverage = static_cast<float>(covered / static_cast<double>(group));
      const double either = 2.0 * static_cast<double>(tokens.size()) - both.size();
      result.iou = tokens.empty() ? 1 : static_cast<float>(both.size() / either);
    }
  }
}

}  // namespace winnow::kernels

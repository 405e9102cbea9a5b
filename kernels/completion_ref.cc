#include "kernels/completion.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/attention_state.h"
#include "kernels/kv_row.h"

namespace winnow::kernels {
namespace {

// K and V of a row, widened.
std::vector<float> ReadRow(const std::byte* row, const KvLayout& layout) {
  std::vector<float> values;
  for (int32_t c = 0; c < layout.head_dim; ++c) values.push_back(KeyAt(row, layout, c));
  for (int32_t c = 0; c < layout.head_dim; ++c) values.push_back(ValueAt(row, layout, c));
  return values;
}

}  // namespace

void CompleteStatesRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                       const Selection& chosen, const void* pool, const KvLayout& layout,
                       const FeatureMapWeights& key_map, const FeatureMapWeights& query_map,
                       float* states) {
  const int32_t d = layout.head_dim, features = key_map.out.out;
  const int32_t heads = static_cast<int32_t>(q.cols / d), group = heads / layout.kv_heads;
  const int64_t state_floats = AttentionStateFloats(d);
  constexpr double kLog2E = 1.4426950408889634;
  for (size_t i = 0; i < queries.size(); ++i) {
    const RetrievalQuery& query = queries[i];
    for (int32_t kv_head = 0; kv_head < layout.kv_heads; ++kv_head) {
      const int32_t* first = chosen.chosen(static_cast<int64_t>(i), kv_head);
      const int32_t* last = first + chosen.count(static_cast<int64_t>(i), kv_head);
      std::vector<std::vector<double>> a;
      std::vector<std::vector<float>> rows;
      for (int32_t token = query.mid.first; token < query.mid.last; ++token) {
        if (std::find(first, last, token) != last) continue;
        const int32_t block = query.block_table[token / layout.block_tokens];
        rows.push_back(ReadRow(static_cast<const std::byte*>(pool) +
                                   layout.RowOffset(block, kv_head, token % layout.block_tokens),
                               layout));
        a.emplace_back(features);
        FeatureMapRef(key_map, kv_head, rows.back().data(), a.back().data());
      }
      if (rows.empty()) continue;
      for (int32_t g = 0; g < group; ++g) {
        const int32_t head = kv_head * group + g;
        std::vector<double> b(features);
        FeatureMapRef(query_map, kv_head, q.f32(query.row) + int64_t{head} * d, b.data());
        double max = -INFINITY;
        for (const auto& key : a) {
          for (int32_t j = 0; j < features; ++j) max = std::max(max, b[j] + key[j]);
        }
        double sum = 0;
        std::vector<double> o(d, 0);
        for (size_t t = 0; t < rows.size(); ++t) {
          double weight = 0;
          for (int32_t j = 0; j < features; ++j) weight += std::exp(b[j] + a[t][j] - max);
          sum += weight;
          for (int32_t c = 0; c < d; ++c) o[c] += weight * rows[t][d + c];
        }
        std::vector<float> part(state_floats);
        for (int32_t c = 0; c < d; ++c) part[c] = static_cast<float>(o[c]);
        part[d] = static_cast<float>(max * kLog2E);
        part[d + 1] = static_cast<float>(sum);
        MergeAttentionState(states + (static_cast<int64_t>(i) * heads + head) * state_floats,
                            part.data(), d);
      }
    }
  }
}

}  // namespace winnow::kernels

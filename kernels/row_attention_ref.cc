#include "kernels/row_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention_state.h"
#include "kernels/kv_row.h"

namespace winnow::kernels {

void AttendRowsRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                   std::span<const RowList> lists, const KvLayout& layout, float scale,
                   float* states) {
  const int32_t d = layout.head_dim;
  const int64_t heads = q.cols / d;
  const int64_t group = heads / layout.kv_heads;
  std::vector<double> weights;
  for (size_t i = 0; i < queries.size(); ++i) {
    for (int64_t head = 0; head < heads; ++head) {
      const RowList& list = lists[i * layout.kv_heads + head / group];
      const float* query = q.f32(queries[i].row) + head * d;
      float* state = states + (static_cast<int64_t>(i) * heads + head) * AttentionStateFloats(d);
      ResetAttentionState(state, d);
      if (list.count == 0) continue;
      weights.assign(list.count, 0);
      double max = -INFINITY;
      for (int32_t row = 0; row < list.count; ++row) {
        for (int32_t c = 0; c < d; ++c) {
          weights[row] += static_cast<double>(query[c]) * KeyAt(list.rows[row], layout, c);
        }
        weights[row] *= scale / std::log(2.0);
        max = std::max(max, weights[row]);
      }
      double sum = 0;
      for (double& weight : weights) sum += weight = std::exp2(weight - max);
      for (int32_t c = 0; c < d; ++c) {
        double value = 0;
        for (int32_t row = 0; row < list.count; ++row) {
          value += weights[row] * ValueAt(list.rows[row], layout, c);
        }
        state[c] = static_cast<float>(value);
      }
      state[d] = static_cast<float>(max);
      state[d + 1] = static_cast<float>(sum);
    }
  }
}

}  // namespace winnow::kernels

#include <cmath>
#include <cstddef>
#include <vector>

#include "kernels/attention.h"
#include "kernels/kv_row.h"

namespace winnow::kernels {

void AttendRef(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
               const KvLayout& layout, float scale, const Tensor& out) {
  const int32_t d = layout.head_dim;
  const int64_t heads = q.cols / d;
  const int64_t group = heads / layout.kv_heads;
  std::vector<double> weights;
  for (const AttentionChunk& chunk : chunks) {
    for (int32_t i = 0; i < chunk.num_tokens; ++i) {
      const int32_t seen = chunk.position + i + 1;
      const int32_t first = chunk.window > 0 ? std::max(0, seen - chunk.window) : 0;
      for (int64_t head = 0; head < heads; ++head) {
        const float* query = q.f32(chunk.first_row + i) + head * d;
        auto row = [&](int32_t position) {
          const int32_t block = chunk.block_table[position / layout.block_tokens];
          return static_cast<const std::byte*>(pool) +
                 layout.RowOffset(block, static_cast<int32_t>(head / group),
                                  position % layout.block_tokens);
        };
        weights.assign(seen, 0);
        double max = -INFINITY;
        for (int32_t t = first; t < seen; ++t) {
          double score = 0;
          for (int32_t j = 0; j < d; ++j)
            score += static_cast<double>(query[j]) * KeyAt(row(t), layout, j);
          weights[t] = score * scale;
          max = std::max(max, weights[t]);
        }
        double sum = 0;
        if (chunk.sinks != nullptr) {
          max = std::max<double>(max, chunk.sinks[head]);
          sum = std::exp(chunk.sinks[head] - max);
        }
        for (int32_t t = first; t < seen; ++t) sum += weights[t] = std::exp(weights[t] - max);
        for (int32_t j = 0; j < d; ++j) {
          double value = 0;
          for (int32_t t = first; t < seen; ++t) value += weights[t] * ValueAt(row(t), layout, j);
          out.f32(chunk.first_row + i)[head * d + j] = static_cast<float>(value / sum);
        }
      }
    }
  }
}

}  // namespace winnow::kernels

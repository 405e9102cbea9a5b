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
  std::vector<float> keys, values;  // [position][d], of one KV head of one chunk
  for (const AttentionChunk& chunk : chunks) {
    const int32_t length = chunk.position + chunk.num_tokens;
    for (int64_t head = 0; head < heads; ++head) {
      if (head % group == 0) {
        keys.assign(int64_t{length} * d, 0);
        values.assign(int64_t{length} * d, 0);
        for (int32_t t = chunk.FirstKey(); t < length; ++t) {
          const std::byte* row =
              static_cast<const std::byte*>(pool) +
              layout.RowOffset(chunk.block_table[t / layout.block_tokens],
                               static_cast<int32_t>(head / group), t % layout.block_tokens);
          for (int32_t j = 0; j < d; ++j) {
            keys[int64_t{t} * d + j] = KeyAt(row, layout, j);
            values[int64_t{t} * d + j] = ValueAt(row, layout, j);
          }
        }
      }
      for (int32_t i = 0; i < chunk.num_tokens; ++i) {
        const int32_t seen = chunk.position + i + 1;
        const int32_t first = chunk.window > 0 ? std::max(0, seen - chunk.window) : 0;
        const float* query = q.f32(chunk.first_row + i) + head * d;
        weights.assign(seen, 0);
        double max = -INFINITY;
        for (int32_t t = first; t < seen; ++t) {
          const float* key = &keys[int64_t{t} * d];
          double score = 0;
          for (int32_t j = 0; j < d; ++j) score += static_cast<double>(query[j]) * key[j];
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
          for (int32_t t = first; t < seen; ++t) value += weights[t] * values[int64_t{t} * d + j];
          out.f32(chunk.first_row + i)[head * d + j] = static_cast<float>(value / sum);
        }
      }
    }
  }
}

}  // namespace winnow::kernels

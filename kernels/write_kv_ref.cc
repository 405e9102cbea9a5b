#include <cstddef>
#include <cstring>

#include "kernels/write_kv.h"

namespace winnow::kernels {
namespace {

void Put(std::byte* to, DType dtype, const float* values, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(to + 4 * i, &values[i], 4);
    } else {
      const BF16 rounded = ToBF16(values[i]);
      std::memcpy(to + 2 * i, &rounded, 2);
    }
  }
}

}  // namespace

void WriteKvRef(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                void* pool, const KvLayout& layout) {
  for (const AttentionChunk& chunk : chunks) {
    for (int32_t i = 0; i < chunk.num_tokens; ++i) {
      const int32_t position = chunk.position + i;
      const int32_t block = chunk.block_table[position / layout.block_tokens];
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        std::byte* row = static_cast<std::byte*>(pool) +
                         layout.RowOffset(block, head, position % layout.block_tokens);
        const int64_t from = int64_t{head} * layout.head_dim;
        Put(row, layout.dtype, k.f32(chunk.first_row + i) + from, layout.head_dim);
        Put(row + layout.ValueOffsetInRow(), layout.dtype, v.f32(chunk.first_row + i) + from,
            layout.head_dim);
      }
    }
  }
}

}  // namespace winnow::kernels

#include "kernels/kv_row.h"
#include "kernels/write_kv.h"

namespace winnow::kernels {

void WriteKvRef(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                void* pool, const KvLayout& layout) {
  for (const AttentionChunk& chunk : chunks) {
    for (int32_t i = 0; i < chunk.num_tokens; ++i) {
      const int32_t position = chunk.position + i;
      const int32_t block = chunk.block_table[position / layout.block_tokens];
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        const int64_t from = int64_t{head} * layout.head_dim;
        PutKvRow(k.f32(chunk.first_row + i) + from, v.f32(chunk.first_row + i) + from, layout,
                 static_cast<std::byte*>(pool) +
                     layout.RowOffset(block, head, position % layout.block_tokens));
      }
    }
  }
}

}  // namespace winnow::kernels

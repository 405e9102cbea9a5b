// Where a key or a value lies: the only KV offset arithmetic in winnow.
//
//   row    K then V of one token for one layer and KV head: 2 * head_dim values
//   block  `block_tokens` tokens of one layer, all KV heads: [kv_heads][block_tokens] rows
//   layer  the pool of all blocks of one layer: [num_blocks] blocks
//
// Rows of one head are adjacent, so that neighbours in the text share a 4 KiB page (8 rows at
// head_dim 128 in bf16) when a block lies on disk.
#ifndef WINNOW_KERNELS_KV_LAYOUT_H_
#define WINNOW_KERNELS_KV_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace winnow::kernels {

struct KvLayout {
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 64;
  DType dtype = DType::kBF16;

  constexpr size_t RowBytes() const { return size_t{2} * head_dim * DTypeBytes(dtype); }
  constexpr size_t HeadBytes() const {
    return RowBytes() * block_tokens;
  }  // one head's rows of a block
  constexpr size_t BlockBytes() const { return HeadBytes() * kv_heads; }
  // Offset of the row of `token` (0..block_tokens-1) of `head`, from the start of its layer's pool.
  constexpr size_t RowOffset(int32_t block, int32_t head, int32_t token) const {
    return block * BlockBytes() + head * HeadBytes() + token * RowBytes();
  }
  constexpr size_t ValueOffsetInRow() const { return size_t{1} * head_dim * DTypeBytes(dtype); }
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_KV_LAYOUT_H_

// Where a key or a value lies: the only KV offset arithmetic in winnow.
//
//   row    K then V of one token for one layer and KV head: 2 * head_dim values; where they have 8 bits, then the scale
//          of K and that of V, each a bfloat16
//   block  `block_tokens` tokens of one layer, all KV heads: [kv_heads][block_tokens] rows
//   layer  the pool of all blocks of one layer: [num_blocks] blocks
//
// Rows of one head are adjacent, so that neighbours in the text share a 4 KiB page (8 rows at
// head_dim 128 in bf16) when a block lies on disk.
//
// Values of 8 bits. A value is scale * code, which float32 holds exactly; `largest` is 127 for kI8 and 448 for kF8:
//   scale   the smallest bfloat16 that is not below max(|x|) / largest, so that no value is cut off, and not below
//           kKvScaleFloor. K of a row has one, V another
//   code    x / scale in float32, rounded to the nearest value of the type, ties to even
//   zeros   a scale of 0, and codes of 0
//   a NaN or an infinity among the values: a scale of NaN, so that the row is NaN in whatever reads it
#ifndef WINNOW_KERNELS_KV_LAYOUT_H_
#define WINNOW_KERNELS_KV_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace winnow::kernels {

// Keeps one over a scale finite. Smaller values become multiples of it: their error is below 2^-100.
inline constexpr float kKvScaleFloor = 0x1p-100f;
inline constexpr size_t kKvScaleBytes = 2;

struct KvLayout {
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 64;
  DType dtype = DType::kBF16;

  constexpr size_t RowBytes() const {
    return ScaleOffsetInRow() + (HasScales(dtype) ? 2 * kKvScaleBytes : 0);
  }
  constexpr size_t HeadBytes() const {
    return RowBytes() * block_tokens;
  }  // one head's rows of a block
  constexpr size_t BlockBytes() const { return HeadBytes() * kv_heads; }
  // Offset of the row of `token` (0..block_tokens-1) of `head`, from the start of its layer's pool.
  constexpr size_t RowOffset(int32_t block, int32_t head, int32_t token) const {
    return block * BlockBytes() + head * HeadBytes() + token * RowBytes();
  }
  constexpr size_t ValueOffsetInRow() const { return size_t{1} * head_dim * DTypeBytes(dtype); }
  // Offset of K's scale; V's follows it.
  constexpr size_t ScaleOffsetInRow() const { return 2 * ValueOffsetInRow(); }
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_KV_LAYOUT_H_

// Writes keys and values of new tokens into their blocks, rounded (nearest even) to layout.dtype, with
// scales where that has them.
//
//   k, v [m][Hkv*d] f32; token i of a chunk goes to the row of its position, K then V
//   (kv_layout.h).
//
// Reads 8*m*Hkv*d bytes, writes m*Hkv rows; no FLOPs.
#ifndef WINNOW_KERNELS_WRITE_KV_H_
#define WINNOW_KERNELS_WRITE_KV_H_

#include <cstdint>
#include <span>

#include "kernels/kv_layout.h"
#include "kernels/kv_ops.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

constexpr double WriteKvFlops(int64_t, const KvLayout&) { return 0; }
constexpr double WriteKvBytes(int64_t m, const KvLayout& layout) {
  return static_cast<double>(m) * layout.kv_heads *
         (8.0 * layout.head_dim + static_cast<double>(layout.RowBytes()));
}

void WriteKvRef(const Tensor& k, const Tensor& v, std::span<const AttentionChunk> chunks,
                void* pool, const KvLayout& layout);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_WRITE_KV_H_

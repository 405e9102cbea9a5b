// Exact causal attention over paged KV: out = softmax(scale * q Kᵀ) V, for decode and prefill
// alike. With sinks the softmax's denominator has exp(sink) of the query head beside its scores'.
//
//   q, out [m][H*d] f32; keys and values in the blocks of each chunk's table (kv_layout.h)
//   d 64, 80, 96, 128 or 256; block_tokens a multiple of 16;
//   G = H/Hkv query heads read one KV head. Query i of a chunk sees keys 0..position+i, or the last `window` of them.
//
// Order, fixed by a query's position and the layout alone:
//   unit    up to 64 tokens of a block. A score is one chain over d in ascending order (pairs for
//           bf16); the unit's largest score updates the running maximum; weights 2^(score - max)
//           are summed per lane; o adds weight * value in ascending order of tokens.
//   split   AttentionSplitTokens(layout) tokens, from position 0 on: a fresh state
//   (attention_state.h).
//           States of splits are merged from left to right, and a sink into what comes of them.
// A unit is always taken whole: keys past the query, or before its window, have weight zero. Units of
// which a query sees nothing are left out. So one query's result is the same bits in decode and
// prefill, however the prompt was cut and however splits went to threads.
//
// With AMX the chains of KV in 16 and 8 bits are those of its tiles (cpu/amx_tiles_impl.h), from the unit's first token on.
//
// Precision: on AVX-512 and AMX q and the weights are rounded to bf16 (the rounded weights are what is summed, so that they
// add up to one), and values of 8 bits, too, once: the bits are those of kBF16 KV that holds these; everything else is f32. kF32 KV is
// f32 throughout, and elsewhere so is every type: values are widened before they are multiplied.
//
// Decode reads 2*n*Hkv*d values per sequence and does 4*H*n*d FLOPs: G FLOP/B in bf16, bound by
// memory. Prefill of T tokens reads each block once per tile of queries: bound by arithmetic.
#ifndef WINNOW_KERNELS_ATTENTION_H_
#define WINNOW_KERNELS_ATTENTION_H_

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/kv_layout.h"
#include "kernels/kv_ops.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// The whole blocks that fit in 512 tokens, or one block.
constexpr int32_t AttentionSplitTokens(const KvLayout& layout) {
  return std::max(1, 512 / layout.block_tokens) * layout.block_tokens;
}

// Operations of one chunk, counted by the keys that each query sees.
constexpr double AttentionFlops(const AttentionChunk& chunk, int64_t heads, int64_t d) {
  // So many of the first queries see all keys before them; the others see a window.
  const auto growing = static_cast<double>(
      chunk.window == 0 ? chunk.num_tokens
                        : std::clamp(chunk.window - chunk.position, 0, chunk.num_tokens));
  const double seen = growing * chunk.position + 0.5 * growing * (growing + 1) +
                      (chunk.num_tokens - growing) * chunk.window;
  return 4.0 * static_cast<double>(heads) * static_cast<double>(d) * seen;
}
// The chunk's keys and values once, q and out once.
constexpr double AttentionBytes(const AttentionChunk& chunk, int64_t heads,
                                const KvLayout& layout) {
  const int32_t keys = chunk.position + chunk.num_tokens - chunk.FirstKey();
  return static_cast<double>(keys) * layout.kv_heads * static_cast<double>(layout.RowBytes()) +
         8.0 * chunk.num_tokens * static_cast<double>(heads) * layout.head_dim;
}

void AttendRef(const Tensor& q, std::span<const AttentionChunk> chunks, const void* pool,
               const KvLayout& layout, float scale, const Tensor& out);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_ATTENTION_H_

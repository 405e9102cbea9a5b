// K in four bits, and logits estimated from it (Twilight, section 4.2: the estimator).
//
// Asymmetric, for each token and head (layout: retrieval.h):
//   zero   the smallest channel, rounded down to bf16; 0 for -0
//   scale  (largest - zero) / 15, rounded up to bf16, at least 2^-100; 0 if all channels equal zero
//   code   (channel - zero) * (1 / scale), rounded to nearest, halves to even, within 0..15
// Each step is one float32 operation, so every backend makes the same bits. Zero is rounded down
// and scale up so that no channel is cut off: a value is wrong by half a step at most.
//
//   estimate   of q . k: scale * dot(q, code) + zero * sum(q)
//
// QuantizeKeys reads d values of K and writes d/2 + 4 bytes per token and head. An estimate reads
// these d/2 + 4 bytes and does 2*G*d FLOPs.
#ifndef WINNOW_KERNELS_INT4_KEYS_H_
#define WINNOW_KERNELS_INT4_KEYS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"

namespace winnow::kernels {

constexpr double QuantizeKeysBytes(int64_t tokens, const KvLayout& layout) {
  return static_cast<double>(tokens) * layout.kv_heads *
         (static_cast<double>(layout.RowBytes()) / 2 +
          static_cast<double>(Int4KeyBytes(layout.head_dim)));
}
constexpr double QuantizeKeysFlops(int64_t tokens, const KvLayout& layout) {
  return static_cast<double>(tokens) * layout.kv_heads * 4.0 * layout.head_dim;
}

// Where the four-bit key of a token (0..block_tokens-1) of `head` lies, from the layer's start.
constexpr size_t Int4KeyOffset(const KvLayout& kv, int32_t block, int32_t head, int32_t token) {
  return block * Int4BlockBytes(kv) +
         (static_cast<size_t>(head) * kv.block_tokens + token) * Int4KeyBytes(kv.head_dim);
}

void QuantizeKeysRef(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                     void* int4_keys);

// Channel c of a four-bit key.
float Int4KeyValueRef(const std::byte* key, int32_t head_dim, int32_t c);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_INT4_KEYS_H_

#include "kernels/int4_keys.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/host_matrix.h"
#include "kernels/kv_row.h"

namespace winnow::kernels {
namespace {

void QuantizeKeyRef(const std::byte* row, const KvLayout& layout, std::byte* out) {
  const int32_t d = layout.head_dim;
  float low = KeyAt(row, layout, 0), high = low;
  for (int32_t c = 1; c < d; ++c) {
    low = std::min(low, KeyAt(row, layout, c));
    high = std::max(high, KeyAt(row, layout, c));
  }
  const BF16 zero = RoundDownToBF16(low + 0.0f);  // 0 for -0
  const float range = high - ToFloat(zero);
  const BF16 scale = range > 0 ? RoundUpToBF16(std::max(range / 15.0f, 0x1p-100f)) : BF16{0};
  const float inverse = range > 0 ? 1.0f / ToFloat(scale) : 0.0f;
  std::fill(out, out + d / 2, std::byte{0});
  for (int32_t c = 0; c < d; ++c) {
    const float step = (KeyAt(row, layout, c) - ToFloat(zero)) * inverse;
    const int code = static_cast<int>(std::nearbyint(std::clamp(step, 0.0f, 15.0f)));
    out[c / 2] |= static_cast<std::byte>(c % 2 == 0 ? code : code << 4);
  }
  std::memcpy(out + d / 2, &scale, 2);
  std::memcpy(out + d / 2 + 2, &zero, 2);
}

}  // namespace

void QuantizeKeysRef(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                     void* int4_keys) {
  for (const KeySpan& span : spans) {
    for (int32_t t = span.tokens.first; t < span.tokens.last; ++t) {
      const int32_t block = span.block_table[t / layout.block_tokens];
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        QuantizeKeyRef(static_cast<const std::byte*>(pool) +
                           layout.RowOffset(block, head, t % layout.block_tokens),
                       layout,
                       static_cast<std::byte*>(int4_keys) +
                           Int4KeyOffset(layout, span.IndexBlock(t / layout.block_tokens), head,
                                         t % layout.block_tokens));
      }
    }
  }
}

float Int4KeyValueRef(const std::byte* key, int32_t head_dim, int32_t c) {
  const int codes = static_cast<int>(key[c / 2]);
  const auto code = static_cast<float>(c % 2 == 0 ? codes & 15 : codes >> 4);
  const float scale = ElementAt(key + head_dim / 2, DType::kBF16, 0);
  const float zero = ElementAt(key + head_dim / 2, DType::kBF16, 1);
  return zero + scale * code;
}

}  // namespace winnow::kernels

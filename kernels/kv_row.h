// Rows of KV in the host's memory, value by value: the oracle of how a type of KV is stored (kv_layout.h). References,
// tests and noise for measurements use it; the leaves of kernels/cpu/ have their own and equal it to the bit.
#ifndef WINNOW_KERNELS_KV_ROW_H_
#define WINNOW_KERNELS_KV_ROW_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/host_matrix.h"
#include "kernels/kv_layout.h"

namespace winnow::kernels {

// Channel c of the row's K.
inline float KeyAt(const std::byte* row, const KvLayout& layout, int32_t c) {
  return ElementAt(row, layout.dtype, c);
}
// Channel c of the row's V.
inline float ValueAt(const std::byte* row, const KvLayout& layout, int32_t c) {
  return ElementAt(row + layout.ValueOffsetInRow(), layout.dtype, c);
}

// Writes a row of K [d] and V [d].
inline void PutKvRow(const float* key, const float* value, const KvLayout& layout, std::byte* row) {
  const auto put = [&](const float* from, std::byte* to) {
    for (int32_t c = 0; c < layout.head_dim; ++c) {
      if (layout.dtype == DType::kF32) {
        std::memcpy(to + 4 * c, from + c, 4);
      } else {
        const BF16 rounded = ToBF16(from[c]);
        std::memcpy(to + 2 * c, &rounded, 2);
      }
    }
  };
  put(key, row);
  put(value, row + layout.ValueOffsetInRow());
}

// Fills whole rows with values that `next` gives, one after the other. REQUIRES: size_bytes is a multiple of a row's.
template <typename Next>
inline void FillKvRows(const KvLayout& layout, std::byte* rows, size_t size_bytes, Next next) {
  float values[2 * 256];
  for (size_t at = 0; at < size_bytes; at += layout.RowBytes()) {
    for (int32_t c = 0; c < 2 * layout.head_dim; ++c) values[c] = next();
    PutKvRow(values, values + layout.head_dim, layout, rows + at);
  }
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_KV_ROW_H_

// Rows of KV in the host's memory, value by value: the oracle of how a type of KV is stored (kv_layout.h). References,
// tests and noise for measurements use it; the leaves of kernels/cpu/ have their own and equal it to the bit.
#ifndef WINNOW_KERNELS_KV_ROW_H_
#define WINNOW_KERNELS_KV_ROW_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/float8.h"
#include "kernels/host_matrix.h"
#include "kernels/kv_layout.h"

namespace winnow::kernels {

// The largest bfloat16 that is not above x, and the smallest that is not below it.
inline BF16 RoundDownToBF16(float x) {
  BF16 rounded = ToBF16(x);
  if (ToFloat(rounded) > x) {
    rounded = {static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16)};  // towards zero
    if (x < 0) ++rounded.bits;                                            // away from it
  }
  return rounded;
}
inline BF16 RoundUpToBF16(float x) {
  return {static_cast<uint16_t>(RoundDownToBF16(-x).bits ^ 0x8000)};
}

// Value c of `values`, whose scale lies at `scale` where the type has one.
inline float KvValueAt(const std::byte* values, const std::byte* scale, DType dtype, int32_t c) {
  if (!HasScales(dtype)) return ElementAt(values, dtype, c);
  const float factor = ElementAt(scale, DType::kBF16, 0);
  const auto code = static_cast<uint8_t>(values[c]);
  return factor * (dtype == DType::kI8 ? static_cast<float>(static_cast<int8_t>(code))
                                       : ToFloat(F8E4M3{code}));
}
// Channel c of the row's K.
inline float KeyAt(const std::byte* row, const KvLayout& layout, int32_t c) {
  return KvValueAt(row, row + layout.ScaleOffsetInRow(), layout.dtype, c);
}
// Channel c of the row's V.
inline float ValueAt(const std::byte* row, const KvLayout& layout, int32_t c) {
  return KvValueAt(row + layout.ValueOffsetInRow(), row + layout.ScaleOffsetInRow() + kKvScaleBytes,
                   layout.dtype, c);
}

// Writes `count` codes and their scale.
inline void PutScaled(const float* from, int32_t count, DType dtype, std::byte* to,
                      std::byte* scale_to) {
  float largest = 0;
  bool finite = true;
  for (int32_t c = 0; c < count; ++c) {
    finite = finite && std::isfinite(from[c]);
    largest = std::max(largest, std::abs(from[c]));
  }
  const bool is_int = dtype == DType::kI8;
  BF16 scale = {0};
  if (!finite) {
    scale = {0x7fc0};
  } else if (largest > 0) {
    scale = RoundUpToBF16(std::max(largest / (is_int ? 127.0f : kLargestF8), kKvScaleFloor));
  }
  std::memcpy(scale_to, &scale, 2);
  for (int32_t c = 0; c < count; ++c) {
    const float x = finite && largest > 0 ? from[c] / ToFloat(scale) : 0.0f;
    to[c] = is_int ? static_cast<std::byte>(static_cast<int8_t>(std::nearbyint(x)))
                   : static_cast<std::byte>(ToF8E4M3(x).bits);
  }
}

// Writes a row of K [d] and V [d].
inline void PutKvRow(const float* key, const float* value, const KvLayout& layout, std::byte* row) {
  const auto put = [&](const float* from, std::byte* to, std::byte* scale) {
    if (HasScales(layout.dtype)) {
      return PutScaled(from, layout.head_dim, layout.dtype, to, scale);
    }
    for (int32_t c = 0; c < layout.head_dim; ++c) {
      if (layout.dtype == DType::kF32) {
        std::memcpy(to + 4 * c, from + c, 4);
      } else {
        const BF16 rounded = ToBF16(from[c]);
        std::memcpy(to + 2 * c, &rounded, 2);
      }
    }
  };
  std::byte* scales = row + layout.ScaleOffsetInRow();
  put(key, row, scales);
  put(value, row + layout.ValueOffsetInRow(), scales + kKvScaleBytes);
}

// Fills whole rows with values that `next` gives, one after the other. REQUIRES: size_bytes is a multiple of a row's.
template <typename Next>
inline void FillKvRows(const KvLayout& layout, std::byte* rows, size_t size_bytes, Next next) {
  std::vector<float> values(size_t{2} * layout.head_dim);
  for (size_t at = 0; at < size_bytes; at += layout.RowBytes()) {
    for (float& value : values) value = next();
    PutKvRow(values.data(), values.data() + layout.head_dim, layout, rows + at);
  }
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_KV_ROW_H_

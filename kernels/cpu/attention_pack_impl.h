// How a unit's keys and values become panels. Included by attention_impl.h.
//
// Rows past `valid` have not been written: they are packed as zeros, because a weight of zero times
// whatever lies there may be NaN.
#ifndef WINNOW_KERNELS_CPU_ATTENTION_PACK_IMPL_H_
#define WINNOW_KERNELS_CPU_ATTENTION_PACK_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/panel.h"

namespace winnow::kernels {
namespace {

template <typename T>
inline T Min(T a, T b) {
  return a < b ? a : b;
}

inline float KvElement(const std::byte* row, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(row)[i];
  const uint32_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return __builtin_bit_cast(float, bits << 16);
}

// Keys: [tokens/16][d/step][16][step].
template <typename Panels>
inline void PackKeys(const std::byte* rows, size_t row_bytes, DType dtype, int32_t tokens,
                     int32_t valid, int64_t d, std::byte* panels) {
  const size_t panel_bytes = PanelBytes(Panels::kDType, d);
  for (int32_t t = 0; t < tokens; ++t) {
    std::byte* lane = panels + static_cast<size_t>(t / kPanelOutputs) * panel_bytes +
                      static_cast<size_t>(t % kPanelOutputs) * PanelStep(Panels::kDType) *
                          DTypeBytes(Panels::kDType);
    const std::byte* row = rows + static_cast<size_t>(t) * row_bytes;
    if constexpr (Panels::kDType == DType::kBF16) {
      for (int64_t s = 0; s < d / 2; ++s) {
        const uint32_t pair = t < valid ? reinterpret_cast<const uint32_t*>(row)[s] : 0;
        *reinterpret_cast<uint32_t*>(lane + s * 64) = pair;
      }
    } else {
      for (int64_t s = 0; s < d; ++s) {
        *reinterpret_cast<float*>(lane + s * 64) = t < valid ? KvElement(row, dtype, s) : 0.0f;
      }
    }
  }
}

// Values: [d/16][tokens/step][16][step].
template <typename Panels>
inline void PackValues(const std::byte* rows, size_t row_bytes, DType dtype, int32_t tokens,
                       int32_t valid, int64_t d, std::byte* panels) {
  const size_t panel_bytes = PanelBytes(Panels::kDType, tokens);
  for (int64_t panel = 0; panel < d / kPanelOutputs; ++panel) {
    std::byte* to = panels + static_cast<size_t>(panel) * panel_bytes;
    for (int32_t t = 0; t < tokens; ++t) {
      const std::byte* row = rows + static_cast<size_t>(t) * row_bytes;
      for (int64_t i = 0; i < kPanelOutputs; ++i) {
        const int64_t column = panel * kPanelOutputs + i;
        if constexpr (Panels::kDType == DType::kBF16) {
          const uint16_t value = t < valid ? reinterpret_cast<const uint16_t*>(row)[column] : 0;
          reinterpret_cast<uint16_t*>(to)[(t / 2 * kPanelOutputs + i) * 2 + t % 2] = value;
        } else {
          reinterpret_cast<float*>(to)[t * kPanelOutputs + i] =
              t < valid ? KvElement(row, dtype, column) : 0.0f;
        }
      }
    }
  }
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ATTENTION_PACK_IMPL_H_

// See kernels/write_kv.h. Compiled by write_kv_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"
#include "kernels/cpu/round_bf16_impl.h"
#include "kernels/cpu/row_pairs_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

inline uint32_t BitsOf(float x) { return __builtin_bit_cast(uint32_t, x); }

// Codes of values that are at most their type's largest, ties to even. A sum with a large number rounds as it stands:
// the steps of float32 between 2^23 and 2^24 are 1, and between 2^14 and 2^15 they are 2^-9, those of E4M3 below 2^-6.
inline uint8_t CodeI8(float x) {
  constexpr float kShift = 0x1.8p23f;
  return static_cast<uint8_t>(BitsOf(x + kShift) - BitsOf(kShift));
}
inline uint8_t CodeF8(float x) {
  constexpr float kShift = 0x1p14f;
  const uint32_t sign = BitsOf(x) >> 24 & 0x80u, magnitude = BitsOf(x) & 0x7fffffffu;
  const uint32_t small = BitsOf(__builtin_bit_cast(float, magnitude) + kShift) - BitsOf(kShift);
  const uint32_t large = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
  return static_cast<uint8_t>(sign | (magnitude < BitsOf(0x1p-6f) ? small : large));
}

// See kv_layout.h.
template <DType kKv>
inline void NarrowScaled(const float* values, int64_t d, std::byte* to, std::byte* scale_to) {
  constexpr float kLargest = kKv == DType::kI8 ? 127.0f : 448.0f;
  uint32_t most = 0;
  for (int64_t i = 0; i < d; ++i) {
    const uint32_t magnitude = BitsOf(values[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const bool finite = most < 0x7f800000u;
  uint16_t scale = finite ? 0 : 0x7fc0;
  if (finite && most != 0) {
    const float step = __builtin_bit_cast(float, most) / kLargest;
    scale = RoundUpToBF16(step > kKvScaleFloor ? step : kKvScaleFloor);
  }
  __builtin_memcpy(scale_to, &scale, 2);
  uint8_t* codes = reinterpret_cast<uint8_t*>(to);
  if (!finite || most == 0) {
    for (int64_t i = 0; i < d; ++i) codes[i] = 0;
    return;
  }
  const float divisor = FloatOf(scale);
  for (int64_t i = 0; i < d; ++i) {
    const float x = values[i] / divisor;
    codes[i] = kKv == DType::kI8 ? CodeI8(x) : CodeF8(x);
  }
}

template <DType kKv>
inline void Narrow(const float* values, int64_t d, std::byte* to, std::byte* scale_to) {
  if constexpr (HasScales(kKv)) {
    NarrowScaled<kKv>(values, d, to, scale_to);
  } else if constexpr (kKv == DType::kF32) {
    __builtin_memcpy(to, values, static_cast<size_t>(4 * d));
  } else {
    for (int64_t i = 0; i < d; i += Vec::kLanes) {
      Vec::StoreBF16(reinterpret_cast<uint16_t*>(to) + i, Vec::Load(values + i));
    }
  }
}

template <DType kKv>
inline void Widen(const std::byte* from, int64_t d, float scale, float* values) {
  for (int64_t i = 0; i < d; i += Vec::kLanes) {
    Vec::Store(values + i,
               LoadScaled<kKv>(from + i * static_cast<int64_t>(DTypeBytes(kKv)), scale));
  }
}

}  // namespace

void WriteKvRow(const float* key, const float* value, int64_t d, DType dtype, std::byte* row) {
  ForKvType(dtype, [&]<DType kKv>(KvType<kKv>) {
    constexpr int64_t kBytes = DTypeBytes(kKv);
    std::byte* scales = row + 2 * d * kBytes;
    Narrow<kKv>(key, d, row, scales);
    Narrow<kKv>(value, d, row + d * kBytes, scales + kKvScaleBytes);
  });
}

void ReadKvRow(const std::byte* row, int64_t d, DType dtype, float* key, float* value) {
  ForKvType(dtype, [&]<DType kKv>(KvType<kKv>) {
    constexpr int64_t kBytes = DTypeBytes(kKv);
    if (key != nullptr) Widen<kKv>(row, d, KeyScale<kKv>(row, d), key);
    if (value != nullptr) Widen<kKv>(row + d * kBytes, d, ValueScale<kKv>(row, d), value);
  });
}

}  // namespace winnow::kernels::WINNOW_ISA

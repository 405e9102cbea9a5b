// Directed rounding to bfloat16. Included after one vec_*.h; see there for why this is in an anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_ROUND_BF16_IMPL_H_
#define WINNOW_KERNELS_CPU_ROUND_BF16_IMPL_H_

#include <cstdint>

namespace winnow::kernels {
namespace {

// The largest bf16 that is not above x: towards zero where x > 0, away from it where x < 0.
inline uint16_t RoundDownToBF16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const bool away = (bits >> 31) != 0 && (bits & 0xffffu) != 0;
  return static_cast<uint16_t>((bits >> 16) + (away ? 1 : 0));
}
inline uint16_t RoundUpToBF16(float x) {
  return static_cast<uint16_t>(RoundDownToBF16(-x) ^ 0x8000u);
}
inline float FloatOf(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ROUND_BF16_IMPL_H_

// Floats of 8 bits: one sign, four bits of exponent, three of mantissa, as files call F8_E4M3 (OCP's E4M3, "fn"). There is
// no infinity; the largest value is 448, the smallest normal one 2^-6, subnormal ones count in steps of 2^-9, and all bits
// but the sign set is NaN. Every such value is a float16's and a bfloat16's.
#ifndef WINNOW_KERNELS_FLOAT8_H_
#define WINNOW_KERNELS_FLOAT8_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/dtype.h"

namespace winnow::kernels {

struct F8E4M3 {
  uint8_t bits;
};
inline constexpr float kLargestF8 = 448;

inline float ToFloat(F8E4M3 x) {
  const int sign = (x.bits & 0x80) << 8, rest = x.bits & 0x7f;
  if (rest == 0x7f) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    return sign != 0 ? -nan : nan;
  }
  // Exponents of float16 begin 8 lower.
  return ToFloat(F16{static_cast<uint16_t>(sign | rest << 7)}) * 256;
}

// Rounds to nearest even; beyond the largest value to that; NaN stays NaN.
inline F8E4M3 ToF8E4M3(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7f)};
  if (magnitude >= std::bit_cast<uint32_t>(kLargestF8)) return {static_cast<uint8_t>(sign | 0x7e)};
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    return {static_cast<uint8_t>(sign | static_cast<int>(std::nearbyint(std::abs(x) * 512)))};
  }
  const uint32_t rounded = magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1);
  return {static_cast<uint8_t>(sign | rounded >> 20)};
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_FLOAT8_H_

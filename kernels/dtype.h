// Element types of weights, activations and KV, and the scalar conversions between them.
#ifndef WINNOW_KERNELS_DTYPE_H_
#define WINNOW_KERNELS_DTYPE_H_

#include <bit>
#include <cstddef>
#include <cstdint>

namespace winnow::kernels {

// kI8 and kF8 (E4M3, kernels/float8.h) are types of KV alone: a value is a scale times one of them (kv_layout.h).
enum class DType : uint8_t { kF32, kF16, kBF16, kI8, kF8 };

constexpr bool HasScales(DType dtype) { return dtype == DType::kI8 || dtype == DType::kF8; }

constexpr size_t DTypeBytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : HasScales(dtype) ? 1 : 2;
}
constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kI8:
      return "int8";
    case DType::kF8:
      return "float8_e4m3";
  }
  return "";
}

// A bfloat16 is the upper half of a float32.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float ToFloat(BF16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest even; NaN stays a (quiet) NaN.
inline BF16 ToBF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

inline float ToFloat(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1f;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest even; beyond the largest float16 becomes infinity, NaN stays a (quiet) NaN.
inline F16 ToF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Below 2^-14 a float16 counts in steps of 2^-24, which are float32's at 0.5.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_DTYPE_H_

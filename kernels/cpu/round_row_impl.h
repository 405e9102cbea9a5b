// How values that share a scale are rounded to integers of 8 bits, for products that round their left-hand side: RoundActivations
// (kernels/quantized_matmul.h), in a form that compilers turn into vectors. In an anonymous namespace, as vec_*.h.
#ifndef WINNOW_KERNELS_CPU_ROUND_ROW_IMPL_H_
#define WINNOW_KERNELS_CPU_ROUND_ROW_IMPL_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/quantized_matmul.h"

namespace winnow::kernels {
namespace {

class Rounding {
 public:
  // x [count] share the scale. REQUIRES: count is a multiple of kRoundedValues.
  Rounding(const float* x, int64_t count) {
    // The bits of magnitudes are in their order, and those that are not finite come last.
    uint32_t largest_bits = 0;
    for (int64_t at = 0; at < count; at += kRoundedValues) {
      uint32_t bits[kRoundedValues];
      std::memcpy(bits, x + at, sizeof bits);
      for (int64_t i = 0; i < kRoundedValues; ++i) {
        const uint32_t magnitude = bits[i] & 0x7fffffffu;
        largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
      }
    }
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    const bool finite = largest_bits < 0x7f800000u;
    zero_ = !finite || largest < kLeastRounded;
    inverse_ = zero_ ? 0 : 127 / largest;
    scale_ = !finite ? NAN : zero_ ? 0 : largest / 127;
  }

  float scale() const { return scale_; }
  // kRoundedValues of them, which are added up in halves.
  void Round(const float* x, void* out, int32_t* half_sums) const {
    int8_t integers[kRoundedValues];
    for (int64_t i = 0; i < kRoundedValues; ++i) {
      // Adding 1.5 · 2^23 rounds to the nearest whole number, ties to even, and leaves it in the low bits.
      const float shifted = (zero_ ? 0 : x[i]) * inverse_ + 12582912.0f;
      int32_t whole;
      std::memcpy(&whole, &shifted, sizeof whole);
      integers[i] = static_cast<int8_t>(whole);
    }
    std::memcpy(out, integers, sizeof integers);
    constexpr int64_t kHalf = kRoundedValues / 2;
    for (int64_t half = 0; half < 2; ++half) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kHalf; ++i) sum += integers[half * kHalf + i];
      half_sums[half] = sum;
    }
  }

 private:
  float inverse_, scale_;
  bool zero_;
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ROUND_ROW_IMPL_H_

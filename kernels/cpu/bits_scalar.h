// Codes, comparisons and bit masks in plain C++: what hash_encode_impl.h and hamming_select_impl.h
// need besides vec_scalar.h. bits_avx2.h and bits_avx512.h have the same functions.
#ifndef WINNOW_KERNELS_CPU_BITS_SCALAR_H_
#define WINNOW_KERNELS_CPU_BITS_SCALAR_H_

#include <cstdint>

#include "kernels/cpu/one_distance_impl.h"
#include "kernels/hamming_select.h"

namespace winnow::kernels {
namespace {

struct Bits {
  // Rows, and vectors of weights for one row, that a tile of the encoder has in registers.
  static constexpr int kTileRows = 1, kRowVecs = 16;

  // Two bfloat16 in each word as floats: the lower halves, the upper halves.
  static void WidenPairs(const uint32_t* words, Vec::Reg* low, Vec::Reg* high) {
    const uint32_t low_bits = *words << 16, high_bits = *words & 0xffff0000u;
    __builtin_memcpy(low, &low_bits, 4);
    __builtin_memcpy(high, &high_bits, 4);
  }
  // Bit i: values[i] >= 0.
  static uint32_t NonNegative32(const float* values) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(values[i] >= 0) << i;
    return mask;
  }
  // Bit i: values[i] <= bound.
  static uint64_t AtMost64(const uint16_t* values, uint16_t bound) {
    uint64_t mask = 0;
    for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(values[i] <= bound) << i;
    return mask;
  }
  // The index of the lowest bit, 64 if there is none.
  static uint64_t LowestBit(uint64_t mask) {
    return mask == 0 ? 64 : static_cast<uint64_t>(__builtin_ctzll(mask));
  }
  // The distances of kCodesAtOnce adjacent codes to one pattern. There is one for each run of
  // codes: it keeps the pattern in registers.
  template <int kCodeBytes, int kPlanes>
  class Scanner {
   public:
    static constexpr int kCodesAtOnce = 1;

    explicit Scanner(const CodePattern& pattern) : pattern_(pattern) {}
    void Distances(const uint8_t* code, uint16_t* distance) const {
      *distance = OneDistance<kCodeBytes, kPlanes>(code, pattern_);
    }

   private:
    const CodePattern& pattern_;
  };
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_BITS_SCALAR_H_

// The k largest of float scores, exact and deterministic: a threshold is found digit by digit in
// the scores' bits, then everything above it is taken and of what equals it as much as is missing,
// from the end. O(count), where sorting is not.
#ifndef WINNOW_KERNELS_CPU_TOP_K_H_
#define WINNOW_KERNELS_CPU_TOP_K_H_

#include <bit>
#include <cstdint>
#include <span>

namespace winnow::kernels {

// Bits whose order as integers is that of the floats. -0 and 0 are equal; a NaN lies above infinity
// or below its negative, as its sign has it.
constexpr uint32_t OrderedBits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (bits == 0x80000000u) return 0x80000000u;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Of items with a score and a size: all whose score is above `threshold` are taken, and of those
// that equal it items of this size together.
struct TopThreshold {
  uint32_t threshold = 0;  // ordered bits
  int64_t of_equal = 0;
};

// So that sizes of `wanted` together are taken. sizes(i) >= 0 is the size of scores[i]. REQUIRES: 0
// < wanted <= the sum of all sizes.
template <typename Sizes>
TopThreshold FindTop(std::span<const float> scores, int64_t wanted, const Sizes& sizes) {
  constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
  uint32_t prefix = 0;
  // Digits of 11, 11 and 10 bits from the top.
  for (int known = 0; known < 32;) {
    const int digit_bits = known + kDigitBits <= 32 ? kDigitBits : 32 - known;
    const int shift = 32 - known - digit_bits;
    int64_t totals[kDigits] = {};
    for (size_t i = 0; i < scores.size(); ++i) {
      const uint32_t bits = OrderedBits(scores[i]);
      if (known == 0 || (bits ^ prefix) >> (32 - known) == 0) {
        totals[bits >> shift & ((1u << digit_bits) - 1)] += sizes(i);
      }
    }
    int digit = (1 << digit_bits) - 1;
    for (; digit > 0 && totals[digit] < wanted; --digit) wanted -= totals[digit];
    prefix |= static_cast<uint32_t>(digit) << shift;
    known += digit_bits;
  }
  return {prefix, wanted};
}

// Writes the indices of the k largest scores plus `first`, ascending; of equals the later ones are
// taken. REQUIRES: 0 <= k <= scores.size().
void SelectTopK(std::span<const float> scores, int64_t k, int32_t first, int32_t* chosen);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_TOP_K_H_

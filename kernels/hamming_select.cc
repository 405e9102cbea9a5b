#include "kernels/hamming_select.h"

#include <cstdlib>
#include <cstring>

namespace winnow::kernels {

void MakeCodePattern(const void* query_codes, int32_t group, int32_t bits, CodePattern* pattern) {
  const std::byte* codes = static_cast<const std::byte*>(query_codes);
  const int32_t code_bytes = bits / 8;
  const int32_t unit = group % 2 == 0 ? 2 : 1;
  for (int32_t at = 0; at < code_bytes; at += 4) {
    // Counters of 32 bits' n_b, one binary digit per word.
    uint32_t digits[5] = {};
    for (int32_t g = 0; g < group; ++g) {
      uint32_t carry = 0;
      std::memcpy(&carry, codes + int64_t{g} * code_bytes + at, 4);
      for (uint32_t& digit : digits) {
        const uint32_t sum = digit ^ carry;
        carry &= digit;
        digit = sum;
      }
    }
    uint32_t majority = 0, planes[kMaxCodePlanes] = {};
    for (int32_t n = 0; n <= group; ++n) {
      uint32_t here = ~0u;  // the bits with n_b = n
      for (int32_t i = 0; i < 5; ++i) here &= (n >> i & 1) != 0 ? digits[i] : ~digits[i];
      if (2 * n > group) majority |= here;
      const int32_t weight = std::abs(group - 2 * n) / unit;
      for (int32_t p = 0; p < kMaxCodePlanes; ++p) {
        if ((weight >> p & 1) != 0) planes[p] |= here;
      }
    }
    for (int32_t copy = at; copy < kMaxCodeBits / 8; copy += code_bytes) {
      std::memcpy(pattern->majority + copy, &majority, 4);
      for (int32_t p = 0; p < kMaxCodePlanes; ++p) {
        std::memcpy(pattern->planes[p] + copy, &planes[p], 4);
      }
    }
  }
}

}  // namespace winnow::kernels

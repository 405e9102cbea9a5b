// The functions of bits_scalar.h, which explains them, for AVX-512 F, BW, DQ and VPOPCNTDQ.
// Included only by *_avx512.cc, after vec_avx512.h.
#ifndef WINNOW_KERNELS_CPU_BITS_AVX512_H_
#define WINNOW_KERNELS_CPU_BITS_AVX512_H_

#include <cstdint>

#include "kernels/hamming_select.h"

namespace winnow::kernels {
namespace {

struct Bits {
  static constexpr int kTileRows = 12, kRowVecs = 4;

  static void WidenPairs(const uint32_t* words, __m512* low, __m512* high) {
    const __m512i pairs = _mm512_loadu_si512(words);
    *low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    *high = _mm512_castsi512_ps(
        _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static uint32_t NonNegative32(const float* values) {
    const __m512 zero = _mm512_setzero_ps();
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(values), zero, _CMP_GE_OQ) |
           uint32_t{_mm512_cmp_ps_mask(_mm512_loadu_ps(values + 16), zero, _CMP_GE_OQ)} << 16;
  }
  static uint64_t AtMost64(const uint16_t* values, uint16_t bound) {
    const __m512i bounds = _mm512_set1_epi16(static_cast<int16_t>(bound));
    return _mm512_cmple_epu16_mask(_mm512_loadu_si512(values), bounds) |
           uint64_t{_mm512_cmple_epu16_mask(_mm512_loadu_si512(values + 32), bounds)} << 32;
  }
  static uint64_t LowestBit(uint64_t mask) { return _tzcnt_u64(mask); }

  template <int kCodeBytes, int kPlanes>
  class Scanner {
   public:
    static constexpr int kCodesAtOnce = 16;

    explicit Scanner(const CodePattern& pattern) {
      for (int v = 0; v < kVecs; ++v) {
        majority_[v] = _mm512_loadu_si512(pattern.majority + 64 * v);
        for (int p = 0; p < kPlanes; ++p) {
          planes_[v][p] = _mm512_loadu_si512(pattern.planes[p] + 64 * v);
        }
      }
    }

    void Distances(const uint8_t* codes, uint16_t* distances) const {
      if constexpr (kCodeBytes == 4) {
        const __m256i narrow = _mm512_cvtepi32_epi16(Weigh(codes, 0));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(distances), narrow);
      } else {
        for (int i = 0; i < 16; i += 8) {
          const __m128i narrow = _mm512_cvtepi64_epi16(SumCodes<8>(codes + i * kCodeBytes));
          _mm_storeu_si128(reinterpret_cast<__m128i*>(distances + i), narrow);
        }
      }
    }

   private:
    static constexpr int kVecs = kCodeBytes <= 64 ? 1 : kCodeBytes / 64;

    // The distance of every word: of 64 bits, or of 32 where a code is no longer.
    __m512i Weigh(const uint8_t* codes, int v) const {
      const __m512i code = _mm512_loadu_si512(codes);
      __m512i sum = _mm512_setzero_si512();
      for (int p = kPlanes - 1; p >= 0; --p) {
        constexpr int kXorAnd = 0x28;  // (a ^ b) & c
        const __m512i bits = _mm512_ternarylogic_epi64(code, majority_[v], planes_[v][p], kXorAnd);
        const __m512i counts =
            kCodeBytes == 4 ? _mm512_popcnt_epi32(bits) : _mm512_popcnt_epi64(bits);
        sum = p == kPlanes - 1 ? counts : _mm512_add_epi64(_mm512_add_epi64(sum, sum), counts);
      }
      return sum;
    }
    // The sums of kCodes adjacent codes, in order; 8 / kCodes words of each are yet to be added.
    template <int kCodes>
    __m512i SumCodes(const uint8_t* codes) const {
      if constexpr (kCodes * kCodeBytes == 64 * kVecs) {
        __m512i sum = Weigh(codes, 0);
        for (int v = 1; v < kVecs; ++v) sum = _mm512_add_epi64(sum, Weigh(codes + 64 * v, v));
        return sum;
      } else {
        const __m512i a = SumCodes<kCodes / 2>(codes);
        const __m512i b = SumCodes<kCodes / 2>(codes + kCodes / 2 * kCodeBytes);
        const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
        const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
        return _mm512_add_epi64(_mm512_permutex2var_epi64(a, even, b),
                                _mm512_permutex2var_epi64(a, odd, b));
      }
    }

    __m512i majority_[kVecs];
    __m512i planes_[kVecs][kPlanes];
  };
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_BITS_AVX512_H_

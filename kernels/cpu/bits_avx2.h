// The functions of bits_scalar.h, which explains them, for AVX2. Included only by *_avx2.cc.
#ifndef WINNOW_KERNELS_CPU_BITS_AVX2_H_
#define WINNOW_KERNELS_CPU_BITS_AVX2_H_

#include <immintrin.h>

#include <cstdint>

#include "kernels/hamming_select.h"

namespace winnow::kernels {
namespace {

struct Bits {
  static constexpr int kTileRows = 6, kRowVecs = 4;

  static __m256i LoadBytes(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }

  static void WidenPairs(const uint32_t* words, __m256* low, __m256* high) {
    const __m256i pairs = LoadBytes(words);
    *low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    *high = _mm256_castsi256_ps(
        _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static uint32_t NonNegative32(const float* values) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; i += 8) {
      const __m256 set =
          _mm256_cmp_ps(_mm256_loadu_ps(values + i), _mm256_setzero_ps(), _CMP_GE_OQ);
      mask |= static_cast<uint32_t>(_mm256_movemask_ps(set)) << i;
    }
    return mask;
  }
  static uint32_t AtMost32(const uint16_t* values, __m256i bound) {
    const __m256i a = LoadBytes(values), b = LoadBytes(values + 16);
    const __m256i packed = _mm256_packs_epi16(_mm256_cmpeq_epi16(_mm256_min_epu16(a, bound), a),
                                              _mm256_cmpeq_epi16(_mm256_min_epu16(b, bound), b));
    return static_cast<uint32_t>(
        _mm256_movemask_epi8(_mm256_permute4x64_epi64(packed, 0b11011000)));
  }
  static uint64_t AtMost64(const uint16_t* values, uint16_t bound) {
    const __m256i bounds = _mm256_set1_epi16(static_cast<int16_t>(bound));
    return AtMost32(values, bounds) | uint64_t{AtMost32(values + 32, bounds)} << 32;
  }
  static uint64_t LowestBit(uint64_t mask) { return _tzcnt_u64(mask); }

  // Popcounts of half bytes come from a table in a register, one for each plane, whose entries are
  // the plane's weight times as large. A byte's distance is at most 8 * 15, so two fit in a byte.
  template <int kCodeBytes, int kPlanes>
  class Scanner {
   public:
    static constexpr int kCodesAtOnce = 16;

    explicit Scanner(const CodePattern& pattern) {
      const __m256i popcounts = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
      for (int p = 0; p < kPlanes; ++p) tables_[p] = _mm256_slli_epi16(popcounts, p);
      for (int v = 0; v < kVecs; ++v) {
        majority_[v] = LoadBytes(pattern.majority + 32 * v);
        for (int p = 0; p < kPlanes; ++p) {
          const __m256i plane = LoadBytes(pattern.planes[p] + 32 * v);
          low_[v][p] = _mm256_and_si256(plane, _mm256_set1_epi8(0x0f));
          high_[v][p] = _mm256_and_si256(_mm256_srli_epi16(plane, 4), _mm256_set1_epi8(0x0f));
        }
      }
    }

    void Distances(const uint8_t* codes, uint16_t* distances) const {
      if constexpr (kCodeBytes == 4) {
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i sums[2];
        for (int i = 0; i < 2; ++i) {
          const __m256i pairs = _mm256_maddubs_epi16(Weigh(codes + 32 * i, 0), _mm256_set1_epi8(1));
          sums[i] = _mm256_madd_epi16(pairs, ones);
        }
        Store(distances,
              _mm256_permute4x64_epi64(_mm256_packus_epi32(sums[0], sums[1]), 0b11011000));
      } else if constexpr (kCodeBytes == 8) {
        const __m256i packed = Pack(SumWords(Weigh(codes, 0)), SumWords(Weigh(codes + 32, 0)),
                                    SumWords(Weigh(codes + 64, 0)), SumWords(Weigh(codes + 96, 0)));
        Store(distances,
              _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
      } else if constexpr (kCodeBytes == 16) {
        // Even tokens in the lower half, odd ones in the upper.
        const __m256i packed =
            Pack(SumPair(codes, codes + 32), SumPair(codes + 64, codes + 96),
                 SumPair(codes + 128, codes + 160), SumPair(codes + 192, codes + 224));
        const __m128i even = _mm256_castsi256_si128(packed);
        const __m128i odd = _mm256_extracti128_si256(packed, 1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(distances), _mm_unpacklo_epi16(even, odd));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(distances + 8), _mm_unpackhi_epi16(even, odd));
      } else {
        for (int i = 0; i < 16; i += 8) {
          // What half of the words give for eight tokens, and the other half.
          const uint8_t* at = codes + i * kCodeBytes;
          const __m256i packed = Pack(SumCodes(at), SumCodes(at + 2 * kCodeBytes),
                                      SumCodes(at + 4 * kCodeBytes), SumCodes(at + 6 * kCodeBytes));
          _mm_storeu_si128(
              reinterpret_cast<__m128i*>(distances + i),
              _mm_add_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
        }
      }
    }

   private:
    static constexpr int kVecs = kCodeBytes <= 32 ? 1 : kCodeBytes / 32;

    static void Store(uint16_t* p, __m256i x) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
    }
    // Every byte's distance.
    __m256i Weigh(const uint8_t* codes, int v) const {
      const __m256i differing = _mm256_xor_si256(LoadBytes(codes), majority_[v]);
      const __m256i shifted = _mm256_srli_epi16(differing, 4);
      __m256i sum = _mm256_setzero_si256();
      for (int p = 0; p < kPlanes; ++p) {
        const __m256i low =
            _mm256_shuffle_epi8(tables_[p], _mm256_and_si256(differing, low_[v][p]));
        const __m256i high =
            _mm256_shuffle_epi8(tables_[p], _mm256_and_si256(shifted, high_[v][p]));
        sum = _mm256_add_epi8(sum, _mm256_add_epi8(low, high));
      }
      return sum;
    }
    // Of the bytes of each 64-bit word.
    static __m256i SumWords(__m256i bytes) {
      return _mm256_sad_epu8(bytes, _mm256_setzero_si256());
    }
    // Words (a0 + a1, b0 + b1 | a2 + a3, b2 + b3).
    static __m256i AddBytePairs(__m256i a, __m256i b) {
      return _mm256_add_epi8(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    // Four codes of 16 bytes: the first, third | second, fourth.
    __m256i SumPair(const uint8_t* a, const uint8_t* b) const {
      return SumWords(AddBytePairs(Weigh(a, 0), Weigh(b, 0)));
    }
    // Two codes of 32 bytes or more: of both a part, of both the rest.
    __m256i SumCodes(const uint8_t* codes) const {
      if constexpr (kVecs == 1) {
        return SumPair(codes, codes + kCodeBytes);
      } else {
        __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int i = 0; i < 2; ++i) {
          for (int v = 0; v < kVecs; v += 2) {
            const uint8_t* at = codes + i * kCodeBytes + 32 * v;
            const __m256i bytes = _mm256_add_epi8(Weigh(at, v), Weigh(at + 32, v + 1));
            sums[i] = _mm256_add_epi64(sums[i], SumWords(bytes));
          }
        }
        return _mm256_add_epi64(_mm256_unpacklo_epi64(sums[0], sums[1]),
                                _mm256_unpackhi_epi64(sums[0], sums[1]));
      }
    }
    // Of 64-bit words below 2^16: the lower halves of a, b, c, d, then their upper halves.
    static __m256i Pack(__m256i a, __m256i b, __m256i c, __m256i d) {
      return _mm256_packus_epi32(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    }

    __m256i majority_[kVecs];
    __m256i low_[kVecs][kPlanes], high_[kVecs][kPlanes];  // half bytes of the planes
    __m256i tables_[kPlanes];
  };
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_BITS_AVX2_H_

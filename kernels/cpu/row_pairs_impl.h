// Rows of K and V in registers, for every leaf that reads them. Included after one
// vec_*.h; see there for why this is in an anonymous namespace.
//
// ForKvType turns the type of a call into a constant, once for each call of a leaf: no inner loop asks for it.
//
// Leaves that multiply rows with queries load two registers at a time. Of bf16 these are the even and the odd values of 2 * kLanes:
// a shift and a mask of one load, where widening neighbours would take a shuffle each. What is
// multiplied with them must be in the same order: SplitPairs puts it there, JoinPairs takes a
// result back. Other types keep their order. If d is an odd multiple of kLanes, the last register has the
// natural order.
#ifndef WINNOW_KERNELS_CPU_ROW_PAIRS_IMPL_H_
#define WINNOW_KERNELS_CPU_ROW_PAIRS_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/kv_layout.h"

namespace winnow::kernels {
namespace {

constexpr int64_t kPairValues = 2 * Vec::kLanes;

struct RegPair {
  Vec::Reg first, second;
};

template <DType kType>
struct KvType {
  static constexpr DType kDType = kType;
};

// Calls f with the KvType of `dtype`. REQUIRES: CheckKvType holds of it (kernels/cpu/cpu_backend.h).
template <typename F>
inline __attribute__((always_inline)) auto ForKvType(DType dtype, F f) {
  if (dtype == DType::kF32) return f(KvType<DType::kF32>());
  if (dtype == DType::kI8) return f(KvType<DType::kI8>());
  if (dtype == DType::kF8) return f(KvType<DType::kF8>());
  return f(KvType<DType::kBF16>());
}

// One register of K or V in its natural order: the only place that knows how a type of KV lies in memory, but for the
// pairs of bf16 below. Of 8 bits these are codes, which KvScale makes values of.
template <DType kDType>
inline __attribute__((always_inline)) Vec::Reg LoadOne(const std::byte* p) {
  if constexpr (kDType == DType::kF32) {
    return Vec::Load(reinterpret_cast<const float*>(p));
  } else if constexpr (kDType == DType::kBF16) {
    return Vec::LoadBF16(reinterpret_cast<const uint16_t*>(p));
  } else if constexpr (kDType == DType::kI8) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return static_cast<float>(static_cast<int8_t>(*p));
#endif
  } else {
    static_assert(kDType == DType::kF8);
    // The bits of E4M3, moved to those of float16, whose exponents begin 8 higher: a 256th of the code.
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7),
                                            _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(
        _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
#else
    const auto code = static_cast<uint16_t>(*p);
    const auto half = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
    return Vec::LoadF16(&half);
#endif
  }
}

// The scale that lies at `at`, as LoadOne's registers want it; 1 for types without scales.
template <DType kDType>
inline __attribute__((always_inline)) float KvScale(const std::byte* at) {
  if constexpr (!HasScales(kDType)) return 1.0f;
  uint16_t bits;
  __builtin_memcpy(&bits, at, 2);
  const float scale = __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  return kDType == DType::kF8 ? scale * 256.0f : scale;
}
// Scales of a row's K and V, behind its values.
template <DType kDType>
inline __attribute__((always_inline)) float KeyScale(const std::byte* row, int64_t d) {
  return KvScale<kDType>(row + 2 * d);
}
template <DType kDType>
inline __attribute__((always_inline)) float ValueScale(const std::byte* row, int64_t d) {
  return KvScale<kDType>(row + 2 * d + kKvScaleBytes);
}

// One register of values. A product of a code and a scale is exact.
template <DType kDType>
inline __attribute__((always_inline)) Vec::Reg LoadScaled(const std::byte* p, float scale) {
  if constexpr (!HasScales(kDType)) return LoadOne<kDType>(p);
  return Vec::Mul(LoadOne<kDType>(p), Vec::Set1(scale));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The first and the second values of pairs of bfloat16.
inline __attribute__((always_inline)) RegPair WidenPairs(__m256i pairs) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(
              _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
#endif

template <DType kDType>
inline __attribute__((always_inline)) RegPair LoadPair(const std::byte* p) {
  if constexpr (kDType != DType::kBF16) {
    return {LoadOne<kDType>(p),
            LoadOne<kDType>(p + Vec::kLanes * static_cast<int64_t>(DTypeBytes(kDType)))};
  } else {
#if defined(__AVX512F__)
    const __m512i both = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
            _mm512_castsi512_ps(
                _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
#elif defined(__AVX2__)
    return WidenPairs(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    const uint16_t* values = reinterpret_cast<const uint16_t*>(p);
    return {Vec::LoadBF16(values), Vec::LoadBF16(values + 1)};
#endif
  }
}

// `to` and `from` are not the same memory.
template <DType kDType>
inline void SplitPairs(const float* from, int64_t d, float* to) {
  int64_t i = 0;
  if constexpr (kDType == DType::kBF16) {
    for (; i + kPairValues <= d; i += kPairValues) {
      for (int64_t j = 0; j < Vec::kLanes; ++j) {
        to[i + j] = from[i + 2 * j];
        to[i + Vec::kLanes + j] = from[i + 2 * j + 1];
      }
    }
  }
  if (i < d) __builtin_memcpy(to + i, from + i, static_cast<size_t>(d - i) * sizeof(float));
}
#if !defined(__AVX512F__)
// SplitPairs of two registers of columns.
template <DType kDType>
inline __attribute__((always_inline)) RegPair SplitPair(RegPair columns) {
  if constexpr (kDType != DType::kBF16) return columns;
#if defined(__AVX2__)
  const __m256 low = _mm256_permute2f128_ps(columns.first, columns.second, 0x20);
  const __m256 high = _mm256_permute2f128_ps(columns.first, columns.second, 0x31);
  return {_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)};
#else
  return columns;
#endif
}
#endif
// A pair back in the order of its 2 * kLanes columns.
template <DType kDType>
inline __attribute__((always_inline)) RegPair JoinPair(RegPair pair) {
  if constexpr (kDType != DType::kBF16) return pair;
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  return {_mm512_permutex2var_ps(pair.first, low, pair.second),
          _mm512_permutex2var_ps(pair.first, high, pair.second)};
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps(pair.first, pair.second);
  const __m256 high = _mm256_unpackhi_ps(pair.first, pair.second);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
#else
  return pair;
#endif
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ROW_PAIRS_IMPL_H_

// How a unit's keys and values become panels. Included by attention_impl.h.
//
// Only moves data, so each instruction set may do it in its own way without a change of results.
//
//   keys    outputs are tokens, the inner dimension is d: a transposition
//   values  outputs are d, the inner dimension is tokens: for bf16, tokens are interleaved in pairs
//
// Value rows past `valid` are packed as zeros: nobody has written them, and a weight of zero times
// what may lie there is NaN. Keys need no such care, their scores are replaced before use. With each two values `lines`
// lines are asked for.
#ifndef WINNOW_KERNELS_CPU_ATTENTION_PACK_IMPL_H_
#define WINNOW_KERNELS_CPU_ATTENTION_PACK_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/panel.h"
#include "kernels/cpu/row_pairs_impl.h"

namespace winnow::kernels {
namespace {

template <typename T>
inline T Min(T a, T b) {
  return a < b ? a : b;
}

// Prefetches cache lines one after the other, into L2: L1 keeps few misses in flight, and half of those beside a busy sibling
// thread (docs/results/kernels.md).
struct Prefetcher {
  const std::byte* next;
  const std::byte* end;
  int64_t LinesLeft() const { return (end - next + 63) / 64; }
  // (Inlined by force: GCC 12 takes a function that only prefetches for one without effects, and
  // drops the call.)
  inline __attribute__((always_inline)) void Lines(int count) {
    if (next >= end) return;
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) __builtin_prefetch(next + i * 64, 0, 2);
    next += count * 64;
  }
};

// The place of a unit's keys or values: rows of d values, row_bytes apart, and of 8 bits the scales of those.
struct UnitRows {
  const std::byte* data;
  const std::byte* scales;
  size_t row_bytes;
  const std::byte* row(int64_t t) const { return data + static_cast<size_t>(t) * row_bytes; }
};

template <DType kKv>
inline float ScaleOf(const UnitRows& rows, int64_t t) {
  return KvScale<kKv>(rows.scales + static_cast<size_t>(t) * rows.row_bytes);
}
template <DType kKv>
inline Vec::Reg LoadWidened(const UnitRows& rows, int64_t t, int64_t column, float scale) {
  return LoadScaled<kKv>(rows.row(t) + column * static_cast<int64_t>(DTypeBytes(kKv)), scale);
}

#if defined(__AVX512F__)

// Four 32-bit columns of 16 rows, transposed: 16 loads of 16 bytes and 8 shuffles inside lanes.
// (With whole rows loaded instead, a 16 x 16 transposition takes 64 shuffles, twice as many.)
inline __attribute__((always_inline)) void TransposeColumns4(const std::byte* rows,
                                                             size_t row_bytes,
                                                             __m512i (&columns)[4]) {
  __m512i quad[4];  // lane b of quad[r]: row 4b + r
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    const std::byte* row = rows + static_cast<size_t>(r) * row_bytes;
    auto load = [&](int b) __attribute__((always_inline)) {
      return _mm_loadu_si128(
          reinterpret_cast<const __m128i*>(row + static_cast<size_t>(4 * b) * row_bytes));
    };
    quad[r] = _mm512_castsi128_si512(load(0));
    quad[r] = _mm512_mask_broadcast_i32x4(quad[r], 0x00f0, load(1));
    quad[r] = _mm512_mask_broadcast_i32x4(quad[r], 0x0f00, load(2));
    quad[r] = _mm512_mask_broadcast_i32x4(quad[r], 0xf000, load(3));
  }
  const __m512i low01 = _mm512_unpacklo_epi32(quad[0], quad[1]),
                high01 = _mm512_unpackhi_epi32(quad[0], quad[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(quad[2], quad[3]),
                high23 = _mm512_unpackhi_epi32(quad[2], quad[3]);
  columns[0] = _mm512_unpacklo_epi64(low01, low23);
  columns[1] = _mm512_unpackhi_epi64(low01, low23);
  columns[2] = _mm512_unpacklo_epi64(high01, high23);
  columns[3] = _mm512_unpackhi_epi64(high01, high23);
}

// The first `count` rows of a unit of 8 bits as rows of d keys and d values in bfloat16, each rounded once. The next unit's
// lines are asked for evenly.
template <DType kKv>
inline void WidenRows(const UnitRows& keys, const UnitRows& values, int32_t count, int64_t d,
                      std::byte* to, Prefetcher& prefetch) {
  const int64_t lines = (prefetch.LinesLeft() + count - 1) / count;
  for (int32_t t = 0; t < count; ++t) {
    for (int64_t i = 0; i < lines; ++i) prefetch.Lines(1);
    for (const UnitRows* rows : {&keys, &values}) {
      const float scale = ScaleOf<kKv>(*rows, t);
      int64_t column = 0;
      for (; column + 32 <= d; column += 32, to += 64) {
        const __m512bh both = _mm512_cvtne2ps_pbh(LoadWidened<kKv>(*rows, t, column + 16, scale),
                                                  LoadWidened<kKv>(*rows, t, column, scale));
        _mm512_storeu_si512(to, (__m512i)both);
      }
      if (column < d) {
        const __m256bh last = _mm512_cvtneps_pbh(LoadWidened<kKv>(*rows, t, column, scale));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)last);
        to += 32;
      }
    }
  }
}

// A step of a key panel is 32 bits of each of 16 tokens, whether that is one f32 or two bf16. Panels are of the rows' type, which of
// KV in 8 bits is that of WidenRows().
template <typename Panels, DType kKv>
inline void PackKeys(const UnitRows& keys, int32_t tokens, int64_t d, std::byte* panels) {
  static_assert(Panels::kDType == kKv);
  const int64_t row_words = d * static_cast<int64_t>(DTypeBytes(Panels::kDType)) / 4;
  for (int32_t t = 0; t < tokens; t += 16) {
    for (int64_t word = 0; word < row_words; word += 4, panels += 256) {
      __m512i columns[4];
      TransposeColumns4(keys.row(t) + word * 4, keys.row_bytes, columns);
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(panels + 64 * i, columns[i]);
    }
  }
}

// Of two rows of 32 bf16: the pairs (even[i], odd[i]) of the first 16 columns, or of the last 16.
struct PairInterleaver {
  __m512i first, last;
  inline __attribute__((always_inline)) PairInterleaver() {
    const __m512i column = _mm512_cvtepu16_epi32(
        _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    first = _mm512_or_si512(column,
                            _mm512_slli_epi32(_mm512_add_epi32(column, _mm512_set1_epi32(32)), 16));
    last = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  }
  __m512i First16(__m512i even, __m512i odd) const {
    return _mm512_permutex2var_epi16(even, first, odd);
  }
  __m512i Last16(__m512i even, __m512i odd) const {
    return _mm512_permutex2var_epi16(even, last, odd);
  }
};

template <typename Panels, DType kKv>
inline void PackValues(const UnitRows& values, int32_t tokens, int32_t valid, int64_t d,
                       std::byte* panels, Prefetcher& prefetch, int lines) {
  static_assert(Panels::kDType == kKv);
  const size_t panel_bytes = PanelBytes(Panels::kDType, tokens);
  if constexpr (kKv == DType::kF32) {
    for (int32_t t = 0; t < tokens; ++t) {
      if (t % 2 == 0) {
        for (int i = 0; i < lines; ++i) prefetch.Lines(1);
      }
      const auto* const from = reinterpret_cast<const float*>(values.row(t));
      for (int64_t panel = 0; panel < d / 16; ++panel) {
        const Vec::Reg row = t < valid ? Vec::Load(from + panel * 16) : Vec::Zero();
        Vec::Store(
            reinterpret_cast<float*>(panels + static_cast<size_t>(panel) * panel_bytes) + t * 16,
            row);
      }
    }
  } else {
    const PairInterleaver interleave;
    for (int32_t t = 0; t < tokens; t += 2) {
      for (int i = 0; i < lines; ++i) prefetch.Lines(1);
      for (int64_t i = 0; i < d; i += 32) {  // two panels, or the last one
        const __mmask32 there = i + 32 <= d ? 0xffffffffu : 0xffffu;
        const __m512i even = _mm512_maskz_loadu_epi16(t < valid ? there : 0, values.row(t) + 2 * i);
        const __m512i odd =
            _mm512_maskz_loadu_epi16(t + 1 < valid ? there : 0, values.row(t + 1) + 2 * i);
        std::byte* to =
            panels + static_cast<size_t>(i / 16) * panel_bytes + static_cast<size_t>(t / 2) * 64;
        _mm512_storeu_si512(to, interleave.First16(even, odd));
        if (i + 32 <= d) _mm512_storeu_si512(to + panel_bytes, interleave.Last16(even, odd));
      }
    }
  }
}

#else

// Without a bf16 dot product panels are f32, whatever the KV is.
#if defined(__AVX2__)
// Four columns of 32 bits of eight rows, transposed.
inline __attribute__((always_inline)) void TransposeColumns4(const std::byte* rows,
                                                             size_t row_bytes,
                                                             __m256i (&columns)[4]) {
  __m256i quad[4];  // lane b of quad[r]: row 4b + r
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    const auto load = [&](int row) __attribute__((always_inline)) {
      return _mm_loadu_si128(
          reinterpret_cast<const __m128i*>(rows + static_cast<size_t>(row) * row_bytes));
    };
    quad[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(r)), load(4 + r), 1);
  }
  const __m256i low01 = _mm256_unpacklo_epi32(quad[0], quad[1]),
                high01 = _mm256_unpackhi_epi32(quad[0], quad[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(quad[2], quad[3]),
                high23 = _mm256_unpackhi_epi32(quad[2], quad[3]);
  columns[0] = _mm256_unpacklo_epi64(low01, low23);
  columns[1] = _mm256_unpackhi_epi64(low01, low23);
  columns[2] = _mm256_unpacklo_epi64(high01, high23);
  columns[3] = _mm256_unpackhi_epi64(high01, high23);
}

inline void Transpose8x8(__m256 (&r)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}
#else
inline void Transpose8x8(Vec::Reg (&)[1]) {}  // one lane: nothing to transpose
#endif

template <typename Panels, DType kKv>
inline void PackKeys(const UnitRows& keys, int32_t tokens, int64_t d, std::byte* panels) {
  constexpr int kLanes = Vec::kLanes;
  for (int32_t t = 0; t < tokens; t += kLanes) {
    float* to = reinterpret_cast<float*>(panels) + t / 16 * 16 * d + t % 16;
    float scales[kLanes];
    for (int i = 0; i < kLanes; ++i) scales[i] = ScaleOf<kKv>(keys, t + i);
    for (int64_t column = 0; column < d; column += kLanes) {
      Vec::Reg square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = LoadWidened<kKv>(keys, t + i, column, scales[i]);
      Transpose8x8(square);
      for (int i = 0; i < kLanes; ++i) Vec::Store(to + (column + i) * 16, square[i]);
    }
  }
}

template <typename Panels, DType kKv>
inline void PackValues(const UnitRows& values, int32_t tokens, int32_t valid, int64_t d,
                       std::byte* panels, Prefetcher& prefetch, int lines) {
  for (int32_t t = 0; t < tokens; ++t) {
    if (t % 2 == 0) {
      for (int i = 0; i < lines; ++i) prefetch.Lines(1);
    }
    const float scale = t < valid ? ScaleOf<kKv>(values, t) : 0.0f;
    for (int64_t column = 0; column < d; column += Vec::kLanes) {
      float* to = reinterpret_cast<float*>(panels) + (column / 16 * tokens + t) * 16 + column % 16;
      Vec::Store(to, t < valid ? LoadWidened<kKv>(values, t, column, scale) : Vec::Zero());
    }
  }
}

#endif

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ATTENTION_PACK_IMPL_H_

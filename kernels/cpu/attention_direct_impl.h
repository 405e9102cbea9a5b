// Scores and outputs of a few rows straight from the rows of K and V, for decode: there the panels
// of attention_impl.h would be written and read for one or two uses. The same numbers are
// multiplied and added in the same order, so the results are the same bits. Included by
// attention_impl.h.
//
// Each function also asks for a part of the unit that comes next, a few lines per iteration. All at
// once stalls: the core keeps some dozens of misses in flight.
//
// Measured at H 32, Hkv 8, d 64, per unit in L2: panels 500 ns, direct 335 ns (AVX-512). With AVX2 and two threads of a Zen 1, KV of
// 8 heads and 16K tokens, four layers, panels and direct in ms: bfloat16 26.4 and 6.8 for one query head each, 31.8 and 12.2 for
// four, 40 and 25 for eight; int8 16.5 and 8.4, 21 and 16, 31 and 29.
#ifndef WINNOW_KERNELS_CPU_ATTENTION_DIRECT_IMPL_H_
#define WINNOW_KERNELS_CPU_ATTENTION_DIRECT_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention_pack_impl.h"
#include "kernels/cpu/attention_scratch.h"
#include "kernels/cpu/tile_impl.h"

namespace winnow::kernels {
namespace {

#if defined(__AVX512BF16__)

// The largest number of rows that the functions below take: 16 sums, 8 weights and the rest fit 32
// registers. 0: none, of panels of another type.
template <typename Panels>
constexpr int kDirectRows = Panels::kDType == DType::kBF16 ? 8 : 0;

inline __attribute__((always_inline)) __m512bh BroadcastPair(const uint32_t* pair) {
  return (__m512bh)_mm512_set1_epi32(static_cast<int>(*pair));
}

// Scores of kRows queries with 16 * kGroups tokens.
template <int kRows, int kGroups>
inline void DirectScoresOf(const uint32_t* queries, int64_t query_stride, const std::byte* keys,
                           size_t row_bytes, int64_t d, float* scores, Prefetcher& prefetch) {
  Vec::Reg sums[kRows][kGroups];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) sums[r][g] = Vec::Zero();
  }
  for (int64_t word = 0; word < d / 2; word += 4) {
    __m512i columns[kGroups][4];
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      TransposeColumns4(keys + static_cast<size_t>(16 * g) * row_bytes + word * 4, row_bytes,
                        columns[g]);
    }
    prefetch.Lines(4 * kGroups);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512bh query = BroadcastPair(queries + r * query_stride + word + s);
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g)
          sums[r][g] = _mm512_dpbf16_ps(sums[r][g], query, (__m512bh)columns[g][s]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g)
      Vec::Store(scores + r * kAttentionUnitTokens + 16 * g, sums[r][g]);
  }
}

template <DType, int kRows>
inline void DirectScores(const uint32_t* queries, int64_t query_stride, const UnitRows& keys,
                         int32_t tokens, int64_t d, float* scores, Prefetcher& prefetch) {
  int32_t t = 0;
  for (; t + 32 <= tokens; t += 32) {
    DirectScoresOf<kRows, 2>(queries, query_stride, keys.row(t), keys.row_bytes, d, scores + t,
                             prefetch);
  }
  if (t < tokens) {
    DirectScoresOf<kRows, 1>(queries, query_stride, keys.row(t), keys.row_bytes, d, scores + t,
                             prefetch);
  }
}

// outputs = outputs * rescale + weights x values, for 16 * kPanels columns. REQUIRES: every value
// is written.
template <int kRows, int kPanels>
inline void DirectValuesOf(const uint32_t* weights, int64_t weight_stride, const float* rescale,
                           const std::byte* values, size_t row_bytes, int32_t tokens,
                           float* outputs, int64_t output_stride, Prefetcher& prefetch) {
  Vec::Reg sums[kRows][kPanels];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      sums[r][p] = Vec::Mul(Vec::Load(outputs + r * output_stride + p * 16),
                            Vec::Load(rescale + r * kPanelOutputs));
    }
  }
  const PairInterleaver interleave;
  for (int32_t t = 0; t < tokens; t += 2) {
    const std::byte* row = values + static_cast<size_t>(t) * row_bytes;
    __m512i pairs[kPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; p += 2) {
      if constexpr (kPanels > 1) {
        const __m512i even = _mm512_loadu_si512(row + 32 * p);
        const __m512i odd = _mm512_loadu_si512(row + row_bytes + 32 * p);
        pairs[p] = interleave.First16(even, odd);
        pairs[p + 1] = interleave.Last16(even, odd);
      } else {
        pairs[0] = interleave.First16(_mm512_maskz_loadu_epi16(0xffff, row),
                                      _mm512_maskz_loadu_epi16(0xffff, row + row_bytes));
      }
    }
    prefetch.Lines(kPanels);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh weight = BroadcastPair(weights + r * weight_stride + t / 2);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p)
        sums[r][p] = _mm512_dpbf16_ps(sums[r][p], weight, (__m512bh)pairs[p]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) Vec::Store(outputs + r * output_stride + p * 16, sums[r][p]);
  }
}

template <DType kKv, int kRows, int kPanels = kRows <= 4 ? 4 : 2>
inline void DirectValues(const uint32_t* weights, int64_t weight_stride, const float* rescale,
                         const UnitRows& values, int32_t tokens, int64_t d, float* outputs,
                         Prefetcher& prefetch, int64_t column = 0) {
  for (; column + 16 * kPanels <= d; column += 16 * kPanels) {
    DirectValuesOf<kRows, kPanels>(weights, weight_stride, rescale, values.data + 2 * column,
                                   values.row_bytes, tokens, outputs + column, d, prefetch);
  }
  if constexpr (kPanels > 1) {
    if (column < d) {
      DirectValues<kKv, kRows, kPanels / 2>(weights, weight_stride, rescale, values, tokens, d,
                                            outputs, prefetch, column);
    }
  }
}

#elif defined(__AVX2__)

// The largest number of rows that the functions below take: eight sums and what they are made of fit 16 registers.
template <typename>
constexpr int kDirectRows = 8;

// The scales of a unit's keys or values.
template <DType kKv>
struct UnitScales {
  UnitScales(const UnitRows& rows, int32_t tokens) {
    if constexpr (HasScales(kKv)) {
      for (int32_t t = 0; t < tokens; ++t) of_tokens[t] = ScaleOf<kKv>(rows, t);
    }
  }
  float At(int32_t t) const { return HasScales(kKv) ? of_tokens[t] : 1.0f; }
  float of_tokens[HasScales(kKv) ? kAttentionUnitTokens : 1];
};

// kColumns columns of eight tokens' keys: column i of all tokens is a register. Values that share a word stay together while they
// are turned.
template <DType kKv>
class TurnedKeys {
 public:
  static constexpr int kColumns = 8;
  inline __attribute__((always_inline)) void Load(const UnitRows& keys,
                                                  const UnitScales<kKv>& scales, int32_t token,
                                                  int64_t column) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      columns_[i] = LoadWidened<kKv>(keys, token + i, column, scales.At(token + i));
    }
    Transpose8x8(columns_);
  }
  inline __attribute__((always_inline)) Vec::Reg Column(int i) const { return columns_[i]; }

 private:
  Vec::Reg columns_[8];
};

template <>
class TurnedKeys<DType::kBF16> {
 public:
  static constexpr int kColumns = 8;
  inline __attribute__((always_inline)) void Load(const UnitRows& keys,
                                                  const UnitScales<DType::kBF16>&, int32_t token,
                                                  int64_t column) {
    TransposeColumns4(keys.row(token) + 2 * column, keys.row_bytes, pairs_);
  }
  inline __attribute__((always_inline)) Vec::Reg Column(int i) const {
    const RegPair pair = WidenPairs(pairs_[i / 2]);
    return i % 2 == 0 ? pair.first : pair.second;
  }

 private:
  __m256i pairs_[4];
};

template <>
class TurnedKeys<DType::kI8> {
 public:
  static constexpr int kColumns = 16;
  inline __attribute__((always_inline)) void Load(const UnitRows& keys,
                                                  const UnitScales<DType::kI8>& scales,
                                                  int32_t token, int64_t column) {
    scales_ = Vec::Load(scales.of_tokens + token);
    TransposeColumns4(keys.row(token) + column, keys.row_bytes, fours_);
  }
  inline __attribute__((always_inline)) Vec::Reg Column(int i) const {
    const __m256i code = _mm256_srai_epi32(_mm256_slli_epi32(fours_[i / 4], 24 - i % 4 * 8), 24);
    return Vec::Mul(_mm256_cvtepi32_ps(code), scales_);
  }

 private:
  __m256i fours_[4];
  Vec::Reg scales_;
};

// Scores of kRows queries with 8 * kGroups tokens.
template <DType kKv, int kRows, int kGroups>
inline void DirectScoresOf(const float* queries, int64_t query_stride, const UnitRows& keys,
                           const UnitScales<kKv>& scales, int32_t token, int64_t d, float* scores,
                           Prefetcher& prefetch) {
  Vec::Reg sums[kRows][kGroups];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) sums[r][g] = Vec::Zero();
  }
  constexpr int kColumns = TurnedKeys<kKv>::kColumns;
  for (int64_t column = 0; column < d; column += kColumns) {
    TurnedKeys<kKv> turned[kGroups];
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) turned[g].Load(keys, scales, token + 8 * g, column);
    prefetch.Lines(kGroups * kColumns * static_cast<int>(DTypeBytes(kKv)) / 8);
#pragma GCC unroll 16
    for (int i = 0; i < kColumns; ++i) {
      Vec::Reg of_groups[kGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) of_groups[g] = turned[g].Column(i);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec::Reg query = Vec::Set1(queries[r * query_stride + column + i]);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
          sums[r][g] = Vec::MulAdd(query, of_groups[g], sums[r][g]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      Vec::Store(scores + r * kAttentionUnitTokens + token + 8 * g, sums[r][g]);
    }
  }
}

// REQUIRES: tokens is a multiple of 16.
template <DType kKv, int kRows>
inline void DirectScores(const float* queries, int64_t query_stride, const UnitRows& keys,
                         int32_t tokens, int64_t d, float* scores, Prefetcher& prefetch) {
  constexpr int kGroups = kRows <= 4 ? 2 : 1;
  const UnitScales<kKv> scales(keys, tokens);
  for (int32_t t = 0; t < tokens; t += 8 * kGroups) {
    DirectScoresOf<kKv, kRows, kGroups>(queries, query_stride, keys, scales, t, d, scores,
                                        prefetch);
  }
}

// outputs = outputs * rescale + weights x values, for 8 * kRegs columns: two registers are a pair (row_pairs_impl.h). REQUIRES:
// every value is written.
template <DType kKv, int kRows, int kRegs>
inline void DirectValuesOf(const float* weights, int64_t weight_stride, const float* rescale,
                           const UnitRows& values, const UnitScales<kKv>& scales, int64_t column,
                           int32_t tokens, float* outputs, int64_t output_stride,
                           Prefetcher& prefetch) {
  constexpr int64_t kBytes = DTypeBytes(kKv);
  Vec::Reg sums[kRows][kRegs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const float* const output = outputs + r * output_stride + column;
    const Vec::Reg factor = Vec::Load(rescale + r * kPanelOutputs);
    sums[r][0] = Vec::Mul(Vec::Load(output), factor);
    if constexpr (kRegs == 2) {
      const RegPair split = SplitPair<kKv>({sums[r][0], Vec::Mul(Vec::Load(output + 8), factor)});
      sums[r][0] = split.first;
      sums[r][1] = split.second;
    }
  }
  for (int32_t t = 0; t < tokens; ++t) {
    const std::byte* const row = values.row(t) + column * kBytes;
    Vec::Reg of_token[kRegs];
    if constexpr (kRegs == 2) {
      const RegPair pair = LoadPair<kKv>(row);
      of_token[0] = pair.first;
      of_token[1] = pair.second;
    } else {
      of_token[0] = LoadOne<kKv>(row);
    }
    if constexpr (HasScales(kKv)) {
#pragma GCC unroll 2
      for (int i = 0; i < kRegs; ++i) of_token[i] = Vec::Mul(of_token[i], Vec::Set1(scales.At(t)));
    }
    if (t % (8 / kBytes) == 0) prefetch.Lines(kRegs);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec::Reg weight = Vec::Set1(weights[r * weight_stride + t]);
#pragma GCC unroll 2
      for (int i = 0; i < kRegs; ++i) sums[r][i] = Vec::MulAdd(weight, of_token[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* const output = outputs + r * output_stride + column;
    if constexpr (kRegs == 2) {
      const RegPair joined = JoinPair<kKv>({sums[r][0], sums[r][1]});
      Vec::Store(output, joined.first);
      Vec::Store(output + 8, joined.second);
    } else {
      Vec::Store(output, sums[r][0]);
    }
  }
}

template <DType kKv, int kRows>
inline void DirectValues(const float* weights, int64_t weight_stride, const float* rescale,
                         const UnitRows& values, int32_t tokens, int64_t d, float* outputs,
                         Prefetcher& prefetch) {
  constexpr int kRegs = kRows <= 4 ? 2 : 1;
  const UnitScales<kKv> scales(values, tokens);
  for (int64_t column = 0; column < d; column += 8 * kRegs) {
    DirectValuesOf<kKv, kRows, kRegs>(weights, weight_stride, rescale, values, scales, column,
                                      tokens, outputs, d, prefetch);
  }
}

#endif

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ATTENTION_DIRECT_IMPL_H_

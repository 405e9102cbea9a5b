// Dot products of a few queries with rows that lie anywhere, each row read once for all queries of
// a tile. Included after one vec_*.h; see there for why this is in an anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_ROW_SCORES_IMPL_H_
#define WINNOW_KERNELS_CPU_ROW_SCORES_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/row_pairs_impl.h"

namespace winnow::kernels {
namespace {

// Sums in flight, rows times queries: enough to hide the latency of a multiply-add, few enough to
// stay in registers, and what AddLanes takes at a time.
#if defined(__AVX512F__)
constexpr int kScoreSums = 16;
#elif defined(__AVX2__)
constexpr int kScoreSums = 8;
#else
constexpr int kScoreSums = 4;
#endif
constexpr int kScoreQueries = 4;

// totals[i] = the lanes of sums[i] added, in the same order for every i.
inline __attribute__((always_inline)) void AddLanes(const Vec::Reg (&sums)[kScoreSums],
                                                    float (&totals)[kScoreSums]) {
#if defined(__AVX512F__)
  // Columns of four of each 128 bits: (0 + 2) + (1 + 3); then the 128 bits: (0 + 1) + (2 + 3).
  __m512 two[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                           _mm512_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
    four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto add_neighbours = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  _mm512_storeu_ps(
      totals, add_neighbours(add_neighbours(four[0], four[1]), add_neighbours(four[2], four[3])));
#elif defined(__AVX2__)
  __m256 four[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    four[i] = _mm256_hadd_ps(_mm256_hadd_ps(sums[4 * i], sums[4 * i + 1]),
                             _mm256_hadd_ps(sums[4 * i + 2], sums[4 * i + 3]));
  }
  _mm256_storeu_ps(totals, _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                                         _mm256_permute2f128_ps(four[0], four[1], 0x31)));
#else
  for (int i = 0; i < kScoreSums; ++i) totals[i] = sums[i];
#endif
}

// How values of a row come into registers.
template <DType kDType>
struct KvValues {
  static RegPair Pair(const std::byte* row, int64_t i) {
    return LoadPair<kDType>(row + i * static_cast<int64_t>(DTypeBytes(kDType)));
  }
  static Vec::Reg One(const std::byte* row, int64_t i) {
    return LoadOne<kDType>(row + i * static_cast<int64_t>(DTypeBytes(kDType)));
  }
};

// Scores of codes become those of keys: the scale of a row is multiplied into its scores, not into its values.
template <DType kDType>
inline void ScaleScores(const std::byte* const* rows, int32_t count, int32_t num_queries, int64_t d,
                        float* scores, int64_t stride) {
  if constexpr (HasScales(kDType)) {
    for (int32_t i = 0; i < count; ++i) {
      const float scale = KeyScale<kDType>(rows[i], d);
      for (int32_t g = 0; g < num_queries; ++g) scores[g * stride + i] *= scale;
    }
  }
}

// How many rows a tile of so many queries takes.
template <int kQueries>
constexpr int kScoreRows = kScoreSums / kQueries < 4 ? kScoreSums / kQueries : 4;

// scores[g * stride + r] = q_g . row_r, for kQueries queries (prepared by SplitPairs, `d` apart).
template <int kQueries, typename Values>
inline __attribute__((always_inline)) void ScoreTile(Values of, const float* queries, int64_t d,
                                                     const std::byte* const* rows, float* scores,
                                                     int64_t stride) {
  constexpr int kRows = kScoreRows<kQueries>;
  Vec::Reg sums[kScoreSums];  // [kQueries][kRows]
#pragma GCC unroll 16
  for (Vec::Reg& sum : sums) sum = Vec::Zero();
  int64_t i = 0;
  for (; i + kPairValues <= d; i += kPairValues) {
    RegPair values[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) values[r] = of.Pair(rows[r], i);
#pragma GCC unroll 4
    for (int g = 0; g < kQueries; ++g) {
      const Vec::Reg first = Vec::Load(queries + g * d + i);
      const Vec::Reg second = Vec::Load(queries + g * d + i + Vec::kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Vec::Reg& sum = sums[g * kRows + r];
        sum = Vec::MulAdd(values[r].second, second, Vec::MulAdd(values[r].first, first, sum));
      }
    }
  }
  if (i < d) {
#pragma GCC unroll 4
    for (int g = 0; g < kQueries; ++g) {
      const Vec::Reg query = Vec::Load(queries + g * d + i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[g * kRows + r] = Vec::MulAdd(of.One(rows[r], i), query, sums[g * kRows + r]);
      }
    }
  }
  float totals[kScoreSums];
  AddLanes(sums, totals);
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {
    __builtin_memcpy(scores + g * stride, totals + g * kRows, kRows * sizeof(float));
  }
}

// Calls ahead(row) for each row as it comes.
template <int kQueries, typename Values, typename Ahead>
inline void ScoreRowsOf(Values of, const float* queries, int64_t d, const std::byte* const* rows,
                        int32_t count, float* scores, int64_t stride, Ahead ahead) {
  constexpr int kRows = kScoreRows<kQueries>;
  int32_t row = 0;
  for (; row + kRows <= count; row += kRows) {
    for (int r = 0; r < kRows; ++r) ahead(row + r);
    ScoreTile<kQueries>(of, queries, d, rows + row, scores + row, stride);
  }
  if (row == count) return;
  // The last row fills a tile up.
  const std::byte* last_rows[kRows];
  float last_scores[kQueries * kRows];
  for (int r = 0; r < kRows; ++r) last_rows[r] = rows[row + r < count ? row + r : count - 1];
  ScoreTile<kQueries>(of, queries, d, last_rows, last_scores, kRows);
  for (; row < count; ++row) {
    ahead(row);
    for (int g = 0; g < kQueries; ++g) {
      scores[g * stride + row] = last_scores[g * kRows + row % kRows];
    }
  }
}

template <typename Values, typename Ahead>
inline void ScoreRows(Values of, const float* queries, int32_t num_queries, int64_t d,
                      const std::byte* const* rows, int32_t count, float* scores, int64_t stride,
                      Ahead ahead) {
  const auto nothing = [](int32_t) {};
  if (num_queries >= 4) {
    ScoreRowsOf<4>(of, queries, d, rows, count, scores, stride, ahead);
  } else if (num_queries == 3) {
    ScoreRowsOf<3>(of, queries, d, rows, count, scores, stride, ahead);
  } else if (num_queries == 2) {
    ScoreRowsOf<2>(of, queries, d, rows, count, scores, stride, ahead);
  } else {
    ScoreRowsOf<1>(of, queries, d, rows, count, scores, stride, ahead);
  }
  for (int32_t g = kScoreQueries; g < num_queries; g += kScoreQueries) {
    const float* rest = queries + g * d;
    float* to = scores + g * stride;
    if (num_queries - g >= 4) {
      ScoreRowsOf<4>(of, rest, d, rows, count, to, stride, nothing);
    } else if (num_queries - g == 3) {
      ScoreRowsOf<3>(of, rest, d, rows, count, to, stride, nothing);
    } else if (num_queries - g == 2) {
      ScoreRowsOf<2>(of, rest, d, rows, count, to, stride, nothing);
    } else {
      ScoreRowsOf<1>(of, rest, d, rows, count, to, stride, nothing);
    }
  }
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ROW_SCORES_IMPL_H_

// Dot products of a few queries with rows that lie anywhere, each row read once for all queries of
// a tile. Included after one vec_*.h; see there for why this is in an anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_ROW_SCORES_IMPL_H_
#define WINNOW_KERNELS_CPU_ROW_SCORES_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/row_pairs_impl.h"

namespace winnow::kernels {
namespace {

// Sums in flight: rows times queries. Enough to hide the latency of a multiply-add, few enough to
// stay in registers.
#if defined(__AVX512F__)
constexpr int kScoreSums = 16;
#elif defined(__AVX2__)
constexpr int kScoreSums = 8;
#else
constexpr int kScoreSums = 4;
#endif
constexpr int kScoreQueries = 4;

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

// scores[g * stride + r] = q_g . row_r, for kQueries queries (prepared by SplitPairs, `d` apart).
template <typename Values, int kQueries, int kRows>
inline __attribute__((always_inline)) void ScoreTile(Values of, const float* queries, int64_t d,
                                                     const std::byte* const* rows, float* scores,
                                                     int64_t stride) {
  Vec::Reg sums[kRows][kQueries];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < kQueries; ++g) sums[r][g] = Vec::Zero();
  }
  int64_t i = 0;
  for (; i + kPairValues <= d; i += kPairValues) {
    RegPair values[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) values[r] = of.Pair(rows[r], i);
#pragma GCC unroll 4
    for (int g = 0; g < kQueries; ++g) {
      const Vec::Reg first = Vec::Load(queries + g * d + i);
      const Vec::Reg second = Vec::Load(queries + g * d + i + Vec::kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r][g] =
            Vec::MulAdd(values[r].second, second, Vec::MulAdd(values[r].first, first, sums[r][g]));
      }
    }
  }
  if (i < d) {
#pragma GCC unroll 4
    for (int g = 0; g < kQueries; ++g) {
      const Vec::Reg query = Vec::Load(queries + g * d + i);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r][g] = Vec::MulAdd(of.One(rows[r], i), query, sums[r][g]);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) scores[g * stride + r] = Vec::ReduceAdd(sums[r][g]);
  }
}

// Calls ahead(row) for each row as it comes.
template <typename Values, int kQueries, typename Ahead>
inline void ScoreRowsOf(Values of, const float* queries, int64_t d, const std::byte* const* rows,
                        int32_t count, float* scores, int64_t stride, Ahead ahead) {
  constexpr int kRows = kScoreSums / kQueries < 4 ? kScoreSums / kQueries : 4;
  int32_t row = 0;
  for (; row + kRows <= count; row += kRows) {
    for (int r = 0; r < kRows; ++r) ahead(row + r);
    ScoreTile<Values, kQueries, kRows>(of, queries, d, rows + row, scores + row, stride);
  }
  for (; row < count; ++row) {
    ahead(row);
    ScoreTile<Values, kQueries, 1>(of, queries, d, rows + row, scores + row, stride);
  }
}

template <typename Values, typename Ahead>
inline void ScoreRows(Values of, const float* queries, int32_t num_queries, int64_t d,
                      const std::byte* const* rows, int32_t count, float* scores, int64_t stride,
                      Ahead ahead) {
  const auto nothing = [](int32_t) {};
  int32_t g = 0;
  for (; g + kScoreQueries <= num_queries; g += kScoreQueries) {
    if (g == 0) {
      ScoreRowsOf<Values, kScoreQueries>(of, queries, d, rows, count, scores, stride, ahead);
    } else {
      ScoreRowsOf<Values, kScoreQueries>(of, queries + g * d, d, rows, count, scores + g * stride,
                                         stride, nothing);
    }
  }
  const auto rest = [&](auto next) {
    switch (num_queries - g) {
      case 3:
        return ScoreRowsOf<Values, 3>(of, queries + g * d, d, rows, count, scores + g * stride,
                                      stride, next);
      case 2:
        return ScoreRowsOf<Values, 2>(of, queries + g * d, d, rows, count, scores + g * stride,
                                      stride, next);
      case 1:
        return ScoreRowsOf<Values, 1>(of, queries + g * d, d, rows, count, scores + g * stride,
                                      stride, next);
      default:
        return;
    }
  };
  if (g == 0) {
    rest(ahead);
  } else {
    rest(nothing);
  }
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ROW_SCORES_IMPL_H_

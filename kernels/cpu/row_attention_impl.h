// See kernels/row_attention.h for the order of summation. Compiled by
// row_attention_{scalar,avx2,avx512}.cc.
#include "kernels/attention_state.h"
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/row_scores_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

constexpr int32_t kPart = kRowsPerPart;

// Asks for [data, data + size_bytes) into the cache.
inline __attribute__((always_inline)) void Prefetch(const std::byte* data, int64_t size_bytes) {
  for (int64_t i = 0; i < size_bytes; i += 64) __builtin_prefetch(data + i);
}

// While a part's keys are read the next part's keys are asked for, and its values while the values
// are read: so requests are spread over all of the work, and a part of both fits the first cache.
template <DType kDType>
struct PartWorker {
  static constexpr int64_t kValueBytes = DTypeBytes(kDType);

  const RowsCall& call;
  const float* queries;
  const RowList& list;
  const int32_t last_row;  // of the parts to run; nothing after it is asked for
  float* scores;           // [G][kPart], then weights

  // Weights of a part of `count` rows from scores; maximum and sum into the state.
  void Weigh(int32_t count, float* of_query, float* state) const {
    constexpr int kLanes = Vec::kLanes;
    const int64_t d = call.dim;
    for (int32_t t = count; t % kLanes != 0; ++t) of_query[t] = -__builtin_inff();
    Vec::Reg max = Vec::Load(of_query);
    for (int32_t t = kLanes; t < count; t += kLanes) max = Vec::Max(max, Vec::Load(of_query + t));
    const float part_max = Vec::ReduceMax(max) * call.scale_log2;
    const Vec::Reg scale = Vec::Set1(call.scale_log2);
    const Vec::Reg minus_max = Vec::Set1(-part_max);
    Vec::Reg sum = Vec::Zero();
    for (int32_t t = 0; t < count; t += kLanes) {
      const Vec::Reg weight = Exp2(Vec::MulAdd(Vec::Load(of_query + t), scale, minus_max));
      Vec::Store(of_query + t, weight);
      sum = Vec::Add(sum, weight);
    }
    state[d] = part_max;
    state[d + 1] = Vec::ReduceAdd(sum);
  }

  // Multiplies the scale of a row's values into its weights, whose sums the states have by now.
  void ScaleWeights(const std::byte* const* rows, int32_t count) const {
    for (int32_t t = 0; t < count; ++t) {
      const float scale = ValueScale<kDType>(rows[t], call.dim);
      for (int32_t g = 0; g < call.queries; ++g) scores[int64_t{g} * kPart + t] *= scale;
    }
  }

  // Adds up kPairs pairs of registers of columns from `column` for kQueries queries from g; `ahead`
  // is called for each row.
  template <int kQueries, int kPairs, typename Ahead>
  void AddValues(const std::byte* const* rows, int32_t count, int32_t g, int64_t column,
                 float* states, Ahead ahead) const {
    const int64_t d = call.dim;
    Vec::Reg sums[kQueries][2 * kPairs];
#pragma GCC unroll 4
    for (int j = 0; j < kQueries; ++j) {
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kPairs; ++i) sums[j][i] = Vec::Zero();
    }
    const float* weights = scores + int64_t{g} * kPart;
    for (int32_t t = 0; t < count; ++t) {
      const std::byte* values = rows[t] + (d + column) * kValueBytes;
      ahead(t);
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        const RegPair pair = LoadPair<kDType>(values + i * kPairValues * kValueBytes);
#pragma GCC unroll 4
        for (int j = 0; j < kQueries; ++j) {
          const Vec::Reg weight = Vec::Set1(weights[j * kPart + t]);
          sums[j][2 * i] = Vec::MulAdd(pair.first, weight, sums[j][2 * i]);
          sums[j][2 * i + 1] = Vec::MulAdd(pair.second, weight, sums[j][2 * i + 1]);
        }
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kQueries; ++j) {
      float* to = states + (g + j) * AttentionStateFloats(d) + column;
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        const RegPair joined = JoinPair<kDType>({sums[j][2 * i], sums[j][2 * i + 1]});
        Vec::Store(to + i * kPairValues, joined.first);
        Vec::Store(to + i * kPairValues + Vec::kLanes, joined.second);
      }
    }
  }

  // The register that is left where d is an odd multiple of the lanes.
  void AddLastValues(const std::byte* const* rows, int32_t count, int32_t g, int64_t column,
                     float* states) const {
    const int64_t d = call.dim;
    Vec::Reg sum = Vec::Zero();
    for (int32_t t = 0; t < count; ++t) {
      sum = Vec::MulAdd(LoadOne<kDType>(rows[t] + (d + column) * kValueBytes),
                        Vec::Set1(scores[int64_t{g} * kPart + t]), sum);
    }
    Vec::Store(states + g * AttentionStateFloats(d) + column, sum);
  }

#if defined(__AVX512F__)
  static constexpr int kMaxPairs = 2;
#else
  static constexpr int kMaxPairs = 1;
#endif

  template <int kQueries>
  void AddAllValues(const std::byte* const* rows, int32_t count, int32_t g, float* states,
                    const std::byte* const* next_rows, int32_t next_count) const {
    const int64_t d = call.dim;
    const bool first = g == 0;
    int64_t column = 0;
    const auto ahead_from = [&](int64_t begin, int64_t values) {
      // The lines in which these columns begin, so that each is asked for once.
      const int64_t from = (d + begin) * kValueBytes, until = from + values * kValueBytes;
      const int32_t limit = first ? next_count : 0;
      return [=](int32_t t) __attribute__((always_inline)) {
        if (t < limit) {
          for (int64_t at = (from + 63) / 64 * 64; at < until; at += 64)
            __builtin_prefetch(next_rows[t] + at);
        }
      };
    };
    for (; column + kMaxPairs * kPairValues <= d; column += kMaxPairs * kPairValues) {
      AddValues<kQueries, kMaxPairs>(rows, count, g, column, states,
                                     ahead_from(column, kMaxPairs * kPairValues));
    }
    if constexpr (kMaxPairs > 1) {
      for (; column + kPairValues <= d; column += kPairValues) {
        AddValues<kQueries, 1>(rows, count, g, column, states, ahead_from(column, kPairValues));
      }
    }
    if (column < d) {
      for (int j = 0; j < kQueries; ++j) AddLastValues(rows, count, g + j, column, states);
    }
  }

  // Leaves the states [G][d + 2] of a part.
  void Run(int32_t part, float* states) const {
    const int64_t d = call.dim;
    const int32_t first = part * kPart;
    const int32_t count = last_row - first < kPart ? last_row - first : kPart;
    const int32_t left = last_row - first - count;
    const int32_t next_count = left < kPart ? left : kPart;
    const std::byte* const* rows = list.rows + first;
    const std::byte* const* next_rows = rows + count;
    ScoreRows(
        KvValues<kDType>(), queries, call.queries, d, rows, count, scores,
        kPart, [=](int32_t t) __attribute__((always_inline)) {
          if (t < next_count) {
            Prefetch(next_rows[t], d * kValueBytes);
            if constexpr (HasScales(kDType)) __builtin_prefetch(next_rows[t] + 2 * d);
          }
        });
    ScaleScores<kDType>(rows, count, call.queries, d, scores, kPart);
    for (int32_t g = 0; g < call.queries; ++g) {
      Weigh(count, scores + int64_t{g} * kPart, states + g * AttentionStateFloats(d));
    }
    if constexpr (HasScales(kDType)) ScaleWeights(rows, count);
    int32_t g = 0;
    for (; g + 4 <= call.queries; g += 4) {
      AddAllValues<4>(rows, count, g, states, next_rows, next_count);
    }
    if (call.queries - g == 3) AddAllValues<3>(rows, count, g, states, next_rows, next_count);
    if (call.queries - g == 2) AddAllValues<2>(rows, count, g, states, next_rows, next_count);
    if (call.queries - g == 1) AddAllValues<1>(rows, count, g, states, next_rows, next_count);
  }
};

template <DType kDType>
void RunParts(const RowsCall& call, const float* queries, const RowList& list, int32_t first_part,
              int32_t last_part, bool merge, float* states, float* scratch) {
  const int64_t d = call.dim;
  const int64_t state_floats = AttentionStateFloats(d);
  float* part_states = scratch;
  float* scores = part_states + call.queries * state_floats;
  const int32_t last_row = list.count < int64_t{last_part} * kPart ? list.count : last_part * kPart;
  const PartWorker<kDType> worker{call, queries, list, last_row, scores};
  // Nobody has asked for the first part yet.
  for (int32_t row = first_part * kPart; row < last_row && row < (first_part + 1) * kPart; ++row) {
    Prefetch(list.rows[row], 2 * d * static_cast<int64_t>(DTypeBytes(kDType)));
    if constexpr (HasScales(kDType)) __builtin_prefetch(list.rows[row] + 2 * d);
  }
  if (merge) {
    for (int32_t g = 0; g < call.queries; ++g) ResetAttentionState(states + g * state_floats, d);
  }
  for (int32_t part = first_part; part < last_part; ++part) {
    if (!merge) {
      worker.Run(part, states + (part - first_part) * call.queries * state_floats);
      continue;
    }
    worker.Run(part, part_states);
    for (int32_t g = 0; g < call.queries; ++g) {
      MergeAttentionState(states + g * state_floats, part_states + g * state_floats, d);
    }
  }
}

}  // namespace

void SplitRowQueries(const RowsCall& call, const float* queries, float* split) {
  ForKvType(call.dtype, [&]<DType kKv>(KvType<kKv>) {
    for (int32_t g = 0; g < call.queries; ++g) {
      const int64_t at = int64_t{g} * call.dim;
      SplitPairs<kKv>(queries + at, call.dim, split + at);
    }
  });
}

void RowScores(const RowsCall& call, const float* queries, const std::byte* const* rows,
               int32_t count, float* scores, int64_t stride) {
  ForKvType(call.dtype, [&]<DType kKv>(KvType<kKv>) {
    ScoreRows(KvValues<kKv>(), queries, call.queries, call.dim, rows, count, scores, stride,
              [](int32_t) {});
    ScaleScores<kKv>(rows, count, call.queries, call.dim, scores, stride);
  });
}

void AttendParts(const RowsCall& call, const float* queries, const RowList& list,
                 int32_t first_part, int32_t last_part, bool merge, float* states, float* scratch) {
  ForKvType(call.dtype, [&]<DType kKv>(KvType<kKv>) {
    RunParts<kKv>(call, queries, list, first_part, last_part, merge, states, scratch);
  });
}

}  // namespace winnow::kernels::WINNOW_ISA

// Shared by the files of dense attention; no one else includes it.
//
//   dense_attention.cu               kInTurn and kSideBySide on any device
//   dense_attention_wgmma.cu         kInTurn on Hopper
//   dense_attention_splits_warp.cu   kSideBySide on Hopper, of up to eight rows
//   dense_attention_splits_wgmma.cu  kSideBySide on Hopper, of more than 16 rows
#ifndef WINNOW_KERNELS_CUDA_DENSE_ATTENTION_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_DENSE_ATTENTION_PARTS_CUH_

#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"

namespace winnow::kernels::cuda::dense {

inline constexpr int kLanes = 32;
inline constexpr int kWarpRows = kDenseTileRows;
inline constexpr int kInTurnWarps = 8;  // of a block that takes splits in turn, by rows
inline constexpr int kSplitWarps = 4;
inline constexpr int kUnitTiles = kDenseUnitTokens / 16;
inline constexpr int kTilesTogether = kDenseTilesTogether;
static_assert(kTilesTogether <= kSplitWarps);  // each is weighed by a warp

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceChunk* chunks;
  const uint8_t* pool;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes;
  int32_t kv_heads;
  FastDivider group;
  float scale_log2;
  float* out;
  int64_t out_stride;
  float* parts;       // [chunks][tiles][Hkv][16][splits][d]
  float2* part_ends;  // max and sum [chunks][tiles][Hkv][16][splits]
  int32_t tiles, splits;
  int32_t block_units;               // of whole splits
  int32_t tile_sets, tiles_per_set;  // of a chunk: tiles that a block takes together
  int32_t num_chunks;
};

// Where a warp's share of a unit's rows lies: a lane holds the address of every 32nd. Rows from
// `visible` on are not there.
template <int kHeadDim, int kWarps>
struct UnitRows {
  static constexpr int kRows = kDenseUnitTokens / kWarps;
  static constexpr int kHeld = (kRows + kLanes - 1) / kLanes;
  uint64_t held[kHeld];
  int32_t first;

  UnitRows() = default;
  __device__ __forceinline__ UnitRows(const Args& args, const int32_t* table, const uint8_t* head,
                                      int32_t unit, int32_t visible)
      : first(unit * kDenseUnitTokens + static_cast<int32_t>(threadIdx.x) / kLanes * kRows) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int32_t token = min(first + (i * kLanes + lane) % kRows, visible - 1);
      const int32_t block = args.block_tokens.Divide(token);
      held[i] = reinterpret_cast<uint64_t>(head + table[block] * args.block_bytes +
                                           int64_t{token - block * args.block_tokens.divisor()} *
                                               (4 * kHeadDim));
    }
  }
};

// A unit's rows of an 8-bit type as they lie in the pool, one behind the other, on their way to bfloat16.
template <DType kKv, int kHeadDim>
struct CodeRows {
  static constexpr int kRowBytes = KvRowBytes<kKv>(kHeadDim);
  static constexpr uint32_t kUnitBytes = kDenseUnitTokens * kRowBytes;
  static constexpr int kTogether = 4;  // rows that are a multiple of 16 bytes, and lie in one block
  static constexpr int kPieces = kTogether * kRowBytes / 16;  // of so many rows
  static constexpr int kGroups = kDenseUnitTokens / kTogether;
  static_assert(kTogether * kRowBytes % 16 == 0 && kGroups <= kLanes);

  // Places of rows 4 * (lane % kGroups) of a unit lie, or others where those are not visible.
  static __device__ __forceinline__ uint64_t Held(const Args& args, const int32_t* table,
                                                  const uint8_t* head, int32_t unit,
                                                  int32_t visible) {
    const auto group = static_cast<int32_t>(threadIdx.x) % kLanes % kGroups;
    const int32_t last = (visible - 1) / kTogether * kTogether;
    const int32_t token = min(unit * kDenseUnitTokens + group * kTogether, last);
    const int32_t block = args.block_tokens.Divide(token);
    return reinterpret_cast<uint64_t>(head + table[block] * args.block_bytes +
                                      int64_t{token - block * args.block_tokens.divisor()} *
                                          kRowBytes);
  }
  // `kThreads` threads start copying a unit; groups of rows that are not visible become zeros.
  template <int kThreads>
  static __device__ __forceinline__ void Start(uint64_t held, int32_t unit, int32_t visible,
                                               uint32_t to) {
    const auto thread = static_cast<int32_t>(threadIdx.x) % kThreads;
#pragma unroll 4
    for (int32_t first = 0; first < kGroups * kPieces; first += kThreads) {
      const int32_t i = first + thread, group = min(i / kPieces, kGroups - 1);
      const uint64_t from = __shfl_sync(kFullMask, held, group);
      if (i >= kGroups * kPieces) continue;
      CopyAsync16(to + i * 16, reinterpret_cast<const uint8_t*>(from) + i % kPieces * 16,
                  unit * kDenseUnitTokens + group * kTogether < visible);
    }
  }
  // Threads put the unit's values, rounded to bfloat16: put(row, is_value, word, pairs) channels 4 * word to 4 * word + 3
  // of a row's K or V. Rows from `seen` on, whatever lies there, are zeros.
  template <int kThreads, typename Put>
  static __device__ __forceinline__ void Widen(uint32_t unit, int32_t seen, Put put) {
    if (seen >= kDenseUnitTokens) {
      WidenRows<kThreads, true>(unit, seen, put);
    } else {
      WidenRows<kThreads, false>(unit, seen, put);
    }
  }

 private:
  template <int kThreads, bool kAllSeen, typename Put>
  static __device__ __forceinline__ void WidenRows(uint32_t unit, int32_t seen, Put put) {
    constexpr int kWords = kHeadDim / 2, kKeyWords = kHeadDim / 4;  // of a row
    constexpr int kMine = kDenseUnitTokens * kWords / kThreads;
    // Words that are loaded before the first is put: a load waits for stores before it.
    constexpr int kAtOnce = kHeadDim == 128 ? 8 : kMine % 4 == 0 ? 4 : 2;
    static_assert(kDenseUnitTokens * kWords % kThreads == 0 && kMine % kAtOnce == 0);
    const auto thread = static_cast<int32_t>(threadIdx.x) % kThreads;
    // A thread has the same word of all its rows where that is possible.
    constexpr bool kSameWord = kThreads % kWords == 0;
    const auto row_of = [&](int i) {
      return kSameWord ? i * (kThreads / kWords) + thread / kWords
                       : (i * kThreads + thread) / kWords;
    };
    const auto word_of = [&](int i) {
      return (kSameWord ? thread : i * kThreads + thread) % kWords;
    };
#pragma unroll 1
    for (int first = 0; first < kMine; first += kAtOnce) {
      uint32_t codes[kAtOnce], scales[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t row = unit + row_of(first + i) * kRowBytes;
        codes[i] = LoadShared(row + word_of(first + i) * 4);
        scales[i] = LoadShared(row + 2 * kHeadDim);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t row = row_of(first + i), word = word_of(first + i);
        const bool is_value = word >= kKeyWords;
        if (!kAllSeen && row >= seen) scales[i] = 0;
        put(row, is_value, is_value ? word - kKeyWords : word,
            PairsOf<kKv>(codes[i], TwiceScale<kKv>(scales[i], is_value)));
      }
    }
  }
};

// What weights are relative to, at most kSlack less than the largest score, and the sum of weights of a
// thread's rows, lane / 4 and 8 more, over a part of the keys. The
// sum is the thread's own share until it is joined.
struct RowSums {
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  __device__ __forceinline__ void Join() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(kFullMask, sum[r], 1));
      sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(kFullMask, sum[r], 2));
    }
  }
};

template <int kTiles>
__device__ __forceinline__ void Clear(float (&o)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] = 0.0f;
  }
}

// What two parts count for in their sum.
struct Shares {
  float max, left, right;
};
__device__ __forceinline__ Shares ShareOut(float left_max, float left_sum, float right_max) {
  if (left_sum == 0.0f) return {right_max, 0.0f, 1.0f};
  const float max = fmaxf(left_max, right_max);
  return {max, exp2f(left_max - max), exp2f(right_max - max)};
}
__device__ __forceinline__ float Mix(float left, float right, const Shares& shares) {
  return __fmaf_rn(left, shares.left, __fmul_rn(right, shares.right));
}

// 2^x, and zero where that is no normal number.
__device__ __forceinline__ float PowerOfTwo(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// How far a unit's largest score may exceed what weights are taken relative to before that is raised, as a
// power of two: nearly always once a split is enough, and the sums so far need not be multiplied.
constexpr float kSlack = 8.0f;

// A unit's scores become weights, as the second product wants them; `keep`: what the sums so far are
// to be multiplied by. `sees[r]`: the keys that row r sees.
__device__ __forceinline__ void Weigh(float (&scores)[2 * kUnitTiles][4], int32_t first_token,
                                      const int32_t (&sees)[2], RowSums& sums,
                                      uint32_t (&weights)[kUnitTiles][4], float (&keep)[2]) {
  const int pair = threadIdx.x % 4 * 2;
  if (first_token + kDenseUnitTokens > min(sees[0], sees[1])) {
#pragma unroll
    for (int n = 0; n < 2 * kUnitTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first_token + n * 8 + pair + e % 2 >= sees[e / 2]) scores[n][e] = -INFINITY;
      }
    }
  }
  float base[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float unit_max = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2 * kUnitTiles; ++n) {
      unit_max = fmaxf(unit_max, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
    }
    unit_max = fmaxf(unit_max, __shfl_xor_sync(kFullMask, unit_max, 1));
    unit_max = fmaxf(unit_max, __shfl_xor_sync(kFullMask, unit_max, 2));
    const float max = unit_max > sums.max[r] + kSlack ? unit_max : sums.max[r];
    // A row that has seen nothing so far: its weights are zero, not 2^(-inf + inf).
    base[r] = max == -INFINITY ? 0.0f : max;
    keep[r] = max == sums.max[r] ? 1.0f : PowerOfTwo(sums.max[r] - base[r]);
    sums.max[r] = max;
    sums.sum[r] = __fmul_rn(sums.sum[r], keep[r]);
  }
#pragma unroll
  for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // (row, tokens), (row + 8, tokens), and eight tokens on
      const int n = 2 * tile + i / 2, r = i % 2;
      const uint32_t pair_of = PackBf16(PowerOfTwo(__fsub_rn(scores[n][2 * r], base[r])),
                                        PowerOfTwo(__fsub_rn(scores[n][2 * r + 1], base[r])));
      weights[tile][i] = pair_of;
      sums.sum[r] = __fadd_rn(sums.sum[r], __fadd_rn(WidenLow(pair_of), WidenHigh(pair_of)));
    }
  }
}

// Rows `first_row` on of a chunk: what each sees, where it lies in out, and its query, scaled.
template <int kHeadDim>
__device__ __forceinline__ void LoadRows(const Args& args, const DeviceChunk& chunk,
                                         int32_t kv_head, int32_t first_row, int32_t (&sees)[2],
                                         int64_t (&at)[2], uint32_t (&q)[kHeadDim / 16][4]) {
  const int lane = threadIdx.x % kLanes;
  const int32_t group = args.group.divisor(), num_rows = chunk.num_tokens * group;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t row = first_row + lane / 4 + 8 * r;
    const bool exists = row < num_rows;
    const int32_t token = args.group.Divide(exists ? row : 0);
    const int32_t query_head = kv_head * group + (exists ? row - token * group : 0);
    sees[r] = exists ? chunk.position + token + 1 : 0;
    const int64_t token_row = chunk.first_row + token;
    at[r] = token_row * args.out_stride + int64_t{query_head} * kHeadDim;
    const float* from = args.q + token_row * args.q_stride + int64_t{query_head} * kHeadDim;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = step * 16 + half * 8 + lane % 4 * 2;
        q[step][half * 2 + r] = exists ? PackBf16(__fmul_rn(from[c], args.scale_log2),
                                                  __fmul_rn(from[c + 1], args.scale_log2))
                                       : 0;
      }
    }
  }
}

// A split is over: its sums join those of the splits before it.
template <int kHeadDim>
__device__ __forceinline__ void AddSplit(RowSums& sums, const float (&o)[kHeadDim / 8][4],
                                         RowSums& totals, float (&total)[kHeadDim / 8][4]) {
  sums.Join();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (sums.sum[r] == 0.0f) continue;
    const Shares shares = ShareOut(totals.max[r], totals.sum[r], sums.max[r]);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = total[n][2 * r + i];
        value = Mix(value, o[n][2 * r + i], shares);
      }
    }
    totals.sum[r] = Mix(totals.sum[r], sums.sum[r], shares);
    totals.max[r] = shares.max;
  }
}

template <int kHeadDim>
__device__ __forceinline__ void WriteRows(const Args& args, const int32_t (&sees)[2],
                                          const int64_t (&at)[2], const RowSums& totals,
                                          const float (&total)[kHeadDim / 8][4]) {
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (sees[r] == 0) continue;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        args.out[at[r] + n * 8 + pair + i] = __fdiv_rn(total[n][2 * r + i], totals.sum[r]);
      }
    }
  }
}

// Whether the code that runs on the current device has a kernel of Hopper's matrix instructions for such heads.
bool HasGroupAttention(int32_t head_dim);
// REQUIRES: HasGroupAttention(shape.layout.head_dim), kInTurn, and what AttendDense() checks.
[[nodiscard]] cudaError_t AttendInTurnByGroups(const DenseAttentionShape& shape, const Args& args,
                                               Stream stream);

}  // namespace winnow::kernels::cuda::dense

#endif  // WINNOW_KERNELS_CUDA_DENSE_ATTENTION_PARTS_CUH_

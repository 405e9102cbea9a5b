// Shared by the files of dense attention; no one else includes it.
//
//   dense_attention.cu               kInTurn and kSideBySide on any device
//   dense_attention_pairs.cu         kInTurn on Hopper, of bfloat16 in blocks of whole units
//   dense_attention_wgmma.cu         kInTurn on Hopper, of 8-bit types and of other blocks
//   dense_attention_widen.cu         kWidened: the copy in bfloat16 for one of these
//   dense_attention_splits_warp.cu   kSideBySide on Hopper, of up to eight rows
//   dense_attention_splits_wgmma.cu  kSideBySide on Hopper, of more than 16 rows
#ifndef WINNOW_KERNELS_CUDA_DENSE_ATTENTION_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_DENSE_ATTENTION_PARTS_CUH_

#include "kernels/cuda/attention_states.cuh"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/tensor_map.h"

namespace winnow::kernels::cuda::dense {

inline constexpr int kLanes = 32;
inline constexpr int kWarpRows = kDenseTileRows;
inline constexpr int kInTurnWarps = 8;  // of a block that takes splits in turn, by rows
inline constexpr int kSplitWarps = 4;
inline constexpr int kUnitTiles = kDenseUnitTokens / 16;
inline constexpr int kTilesTogether = kDenseTilesTogether;
static_assert(kTilesTogether <= kSplitWarps);  // each is weighed by a warp

// On Hopper a block that takes splits in turn is two warpgroups that multiply, of 64 rows each, and one that copies.
inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupWarps = kGroupThreads / kLanes;
inline constexpr int kGroups = 2;
inline constexpr int kGroupRows = 64;
inline constexpr int kBlockRows = kGroups * kGroupRows;
inline constexpr int kBlockThreads = (kGroups + 1) * kGroupThreads;
// A panel of their operands: 64 rows (queries, or a unit's keys or values) of 64 channels.
inline constexpr int kPanelBytes = kDenseUnitTokens * kTensorTileRowBytes;
static_assert(kBlockRows == kDenseBlockRows && kBlockRows == kInTurnWarps * kWarpRows &&
              kGroupRows == kDenseUnitTokens);

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
  const float* sinks;  // [H]; null: none
};

// A token's place: its block in the pool, and its row of a head there.
struct TokenPlace {
  int32_t block = 0, row = 0;
};
__device__ __forceinline__ TokenPlace PlaceOfToken(const Args& args, const int32_t* table,
                                                   int32_t token) {
  const int32_t block = args.block_tokens.Divide(token);
  return {table[block], token - block * args.block_tokens.divisor()};
}
// Its row; `head`: the head's rows of the pool's first block.
__device__ __forceinline__ const uint8_t* RowAt(const Args& args, const uint8_t* head,
                                                TokenPlace place, int32_t row_bytes) {
  return head + place.block * args.block_bytes + int64_t{place.row} * row_bytes;
}

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
      held[i] = reinterpret_cast<uint64_t>(
          RowAt(args, head, PlaceOfToken(args, table, token), 4 * kHeadDim));
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
  static constexpr int kFours = kDenseUnitTokens / kTogether;
  static_assert(kTogether * kRowBytes % 16 == 0 && kFours <= kLanes);

  // Places of rows 4 * (lane % kFours) of a unit lie, or others where those are not visible.
  static __device__ __forceinline__ uint64_t Held(const Args& args, const int32_t* table,
                                                  const uint8_t* head, int32_t unit,
                                                  int32_t visible) {
    const auto group = static_cast<int32_t>(threadIdx.x) % kLanes % kFours;
    const int32_t last = (visible - 1) / kTogether * kTogether;
    const int32_t token = min(unit * kDenseUnitTokens + group * kTogether, last);
    return reinterpret_cast<uint64_t>(
        RowAt(args, head, PlaceOfToken(args, table, token), kRowBytes));
  }
  // `kThreads` threads start copying a unit; groups of rows that are not visible become zeros.
  template <int kThreads>
  static __device__ __forceinline__ void Start(uint64_t held, int32_t unit, int32_t visible,
                                               uint32_t to) {
    const auto thread = static_cast<int32_t>(threadIdx.x) % kThreads;
#pragma unroll 4
    for (int32_t first = 0; first < kFours * kPieces; first += kThreads) {
      const int32_t i = first + thread, group = min(i / kPieces, kFours - 1);
      const uint64_t from = __shfl_sync(kFullMask, held, group);
      if (i >= kFours * kPieces) continue;
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

// A place of 16 bytes of an operand of a warpgroup's instructions, 64 rows by 64 channels a panel: `piece` of row `row`.
__device__ __forceinline__ uint32_t OperandPieceAt(int row, int piece) {
  return piece / 8 * kPanelBytes + row * kTensorTileRowBytes +
         ((piece % 8) ^ (row % kTensorSwizzleRows)) * 16;
}

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

// The largest score of a unit is `top`: what a row's weights of it are relative to. `max`: that of the units before, which
// becomes this one's. `keep`: what the sums so far are to be multiplied by.
__device__ __forceinline__ float BaseOf(float top, float& max, float& keep) {
  const float next = top > max + kSlack ? top : max;
  // A row that has seen nothing so far: its weights are zero, not 2^(-inf + inf).
  const float base = next == -INFINITY ? 0.0f : next;
  keep = next == max ? 1.0f : PowerOfTwo(max - base);
  max = next;
  return base;
}

// Weights of two tokens, rounded, which join the sum of their row.
__device__ __forceinline__ uint32_t AddWeights(float first, float second, float& sum) {
  const uint32_t pair = PackBf16(first, second);
  sum = __fadd_rn(sum, __fadd_rn(WidenLow(pair), WidenHigh(pair)));
  return pair;
}

// Scores of tokens from `first_token` on that a row does not see. `sees[r]`: the keys that row r sees.
template <int kTiles>
__device__ __forceinline__ void HideScores(float (&scores)[kTiles][4], int32_t first_token,
                                           const int32_t (&sees)[2]) {
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first_token + n * 8 + pair + e % 2 >= sees[e / 2]) scores[n][e] = -INFINITY;
    }
  }
}

// Keys of a chunk before the first that its token `token` sees.
__device__ __forceinline__ int32_t KeysBefore(const DeviceChunk& chunk, int32_t token) {
  return chunk.window > 0 ? max(chunk.position + token + 1 - chunk.window, 0) : 0;
}
// Scores of tokens from `first_token` on that lie before the rows' windows.
template <int kTiles>
__device__ __forceinline__ void HidePast(float (&scores)[kTiles][4], int32_t first_token,
                                         int32_t window, const int32_t (&sees)[2]) {
  if (window == 0 || first_token >= max(sees[0], sees[1]) - window) return;
  const int pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first_token + n * 8 + pair + e % 2 < sees[e / 2] - window) scores[n][e] = -INFINITY;
    }
  }
}

// A unit's scores become weights, as the second product wants them; `keep`: what the sums so far are
// to be multiplied by.
__device__ __forceinline__ void Weigh(float (&scores)[2 * kUnitTiles][4], int32_t first_token,
                                      const int32_t (&sees)[2], RowSums& sums,
                                      uint32_t (&weights)[kUnitTiles][4], float (&keep)[2]) {
  if (first_token + kDenseUnitTokens > min(sees[0], sees[1])) {
    HideScores(scores, first_token, sees);
  }
  float base[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2 * kUnitTiles; ++n) {
      top = fmaxf(top, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
    base[r] = BaseOf(top, sums.max[r], keep[r]);
    sums.sum[r] = __fmul_rn(sums.sum[r], keep[r]);
  }
#pragma unroll
  for (int tile = 0; tile < kUnitTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // (row, tokens), (row + 8, tokens), and eight tokens on
      const int n = 2 * tile + i / 2, r = i % 2;
      weights[tile][i] =
          AddWeights(PowerOfTwo(__fsub_rn(scores[n][2 * r], base[r])),
                     PowerOfTwo(__fsub_rn(scores[n][2 * r + 1], base[r])), sums.sum[r]);
    }
  }
}

// A row of a chunk: what it sees, where its token lies in q and out, and its first channel there. One that does not exist sees
// nothing, and lies where the chunk's last one does.
struct RowPlace {
  int32_t sees;
  int64_t token_row;
  int64_t channel;
};
template <int kHeadDim>
__device__ __forceinline__ RowPlace PlaceOfRow(const Args& args, const DeviceChunk& chunk,
                                               int32_t kv_head, int32_t row) {
  const int32_t group = args.group.divisor(), num_rows = chunk.num_tokens * group;
  const int32_t held = min(row, num_rows - 1), token = args.group.Divide(held);
  return {row < num_rows ? chunk.position + token + 1 : 0, chunk.first_row + token,
          int64_t{kv_head * group + held - token * group} * kHeadDim};
}

// Whether rows of floats lie so that two of even number can be reached in one access.
__device__ __forceinline__ bool InPairs(const float* rows, int64_t stride) {
  return reinterpret_cast<uint64_t>(rows) % 8 == 0 && stride % 2 == 0;
}

// Rows `first_row` on of a chunk: what each sees, where it lies in out, and its query, scaled.
template <int kHeadDim>
__device__ __forceinline__ void LoadRows(const Args& args, const DeviceChunk& chunk,
                                         int32_t kv_head, int32_t first_row, int32_t (&sees)[2],
                                         int64_t (&at)[2], uint32_t (&q)[kHeadDim / 16][4]) {
  const int lane = threadIdx.x % kLanes;
  const float* from[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowPlace place = PlaceOfRow<kHeadDim>(args, chunk, kv_head, first_row + lane / 4 + 8 * r);
    sees[r] = place.sees;
    at[r] = place.token_row * args.out_stride + place.channel;
    from[r] = args.q + place.token_row * args.q_stride + place.channel + lane % 4 * 2;
  }
  // All are asked for before the first is used.
  float2 loaded[2][kHeadDim / 8];
  const auto load = [&](auto pair_from) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) loaded[r][i] = pair_from(from[r] + i * 8);
    }
  };
  if (InPairs(args.q, args.q_stride)) {
    load([](const float* pair) { return *reinterpret_cast<const float2*>(pair); });
  } else {
    load([](const float* pair) { return make_float2(pair[0], pair[1]); });
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = loaded[i % 2][step * 2 + i / 2];
      q[step][i] = PackBf16(__fmul_rn(pair.x, args.scale_log2), __fmul_rn(pair.y, args.scale_log2));
    }
  }
}

// A warp's rows of queries, as LoadRows() gives them, become rows `first_row` on of a warpgroup's operand.
template <int kHeadDim>
__device__ __forceinline__ void StoreRows(const uint32_t (&q)[kHeadDim / 16][4], uint32_t operand,
                                          int first_row) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t piece = OperandPieceAt(first_row + lane / 4 + i % 2 * 8, step * 2 + i / 2);
      StoreShared(operand + piece + lane % 4 * 4, q[step][i]);
    }
  }
}

// Sums so far, before those of a unit whose weights are relative to more (Weigh()).
template <int kTiles>
__device__ __forceinline__ void Rescale(float (&o)[kTiles][4], const float (&keep)[2]) {
  if (keep[0] == 1.0f && keep[1] == 1.0f) return;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] = __fmul_rn(o[n][e], keep[e / 2]);
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

// Rows' sums, of all splits, with the sinks of their heads. `first_row`: as LoadRows() had it.
__device__ __forceinline__ void AddSinks(const Args& args, const DeviceChunk& chunk,
                                         int32_t kv_head, int32_t first_row, RowSums& totals) {
  if (args.sinks == nullptr) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto place = PlaceOfRow<1>(
        args, chunk, kv_head, first_row + static_cast<int32_t>(threadIdx.x) % kLanes / 4 + 8 * r);
    totals.sum[r] =
        SumWithSink(totals.sum[r], totals.max[r], args.sinks, static_cast<int32_t>(place.channel));
  }
}

template <int kHeadDim>
__device__ __forceinline__ void WriteRows(const Args& args, const int32_t (&sees)[2],
                                          const int64_t (&at)[2], const RowSums& totals,
                                          const float (&total)[kHeadDim / 8][4]) {
  const auto write = [&](auto write_pair) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sees[r] == 0) continue;
      float* to = args.out + at[r] + threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        write_pair(to + n * 8, make_float2(__fdiv_rn(total[n][2 * r], totals.sum[r]),
                                           __fdiv_rn(total[n][2 * r + 1], totals.sum[r])));
      }
    }
  };
  if (InPairs(args.out, args.out_stride)) {
    write([](float* to, float2 pair) { *reinterpret_cast<float2*>(to) = pair; });
  } else {
    write([](float* to, float2 pair) {
      to[0] = pair.x;
      to[1] = pair.y;
    });
  }
}

// Heads of more have no kernels of matrix instructions of a warpgroup, nor copies of whole units.
inline constexpr int32_t kMostGroupDim = 128;

template <int kSize>
struct HeadDim {
  static constexpr int kHeadDim = kSize;
};
// Calls f with the HeadDim of `head_dim`; cudaErrorInvalidValue for one that not all types of KV have.
template <typename F>
cudaError_t ForHeadDim(int32_t head_dim, F f) {
  switch (head_dim) {
    case 64:
      return f(HeadDim<64>());
    case 80:
      return f(HeadDim<80>());
    case 96:
      return f(HeadDim<96>());
    case 128:
      return f(HeadDim<128>());
    default:
      return cudaErrorInvalidValue;
  }
}

// A copy of `num_heads` KV heads in bfloat16, for the chunks of a call.
struct WidenedKv {
  uint2* rows = nullptr;          // [chunks][num_heads][tokens] rows
  DeviceChunk* chunks = nullptr;  // the call's, whose tables are those below
  int32_t* tables = nullptr;      // of a block each, that many tokens
  int32_t first_head = 0, num_heads = 0, tokens = 0, unused = 0;
};
// Makes the copy: rows of the tokens that a chunk sees, none behind them. REQUIRES: an 8-bit type, and what AttendDense() checks.
[[nodiscard]] cudaError_t WidenKv(const DenseAttentionShape& shape, const Args& args,
                                  const WidenedKv& to, Stream stream);

// Whether the code that runs on the current device has kernels of Hopper's matrix instructions for such heads.
bool HasPairAttention(int32_t head_dim);
bool HasGroupAttention(int32_t head_dim);
// `map`: of a pool of bfloat16 (tensor_map.h), kDenseUnitTokens rows a tile. REQUIRES: HasPairAttention(shape.layout.head_dim),
// kInTurn, blocks of whole units, and what AttendDense() checks.
[[nodiscard]] cudaError_t AttendInTurnByPairs(const DenseAttentionShape& shape, const Args& args,
                                              const CUtensorMap& map, Stream stream);
// REQUIRES: HasGroupAttention(shape.layout.head_dim), kInTurn, and what AttendDense() checks.
[[nodiscard]] cudaError_t AttendInTurnByGroups(const DenseAttentionShape& shape, const Args& args,
                                               Stream stream);

}  // namespace winnow::kernels::cuda::dense

#endif  // WINNOW_KERNELS_CUDA_DENSE_ATTENTION_PARTS_CUH_

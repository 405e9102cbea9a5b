// Mapping. The queries of a chunk that share a KV head are rows, token by token and of a token head by
// head, 16 to an instruction. kInTurn: a block is 8 warps with 16 rows each over the same keys, which
// are copied unit by unit into shared memory, the next while one is used. kSideBySide: a block is 16
// rows and one split, or several in turn where there are more than run at once, so that copies do not
// cease between them; of a unit each of its 4 warps scores 16 tokens, all hear of all scores through
// shared memory and weigh them alike, and each adds up its own channels. On Hopper its units come as
// tiles of a tensor map.
// There a block is one warp if there are up to eight rows of many units (decoding; dense_attention_splits_warp.cu), and takes up
// to 64 rows if there are more than 16 (a draft that is verified): with matrix instructions of a warpgroup for d 64 and 128
// (dense_attention_splits_wgmma.cu), with those of a warp for others (SplitTilesKernel).
//
// The two must agree to the bit, so everything that rounds is written with the rounding in its name
// where the compiler could choose (a * b + c), and both weigh a unit by the same function.
//
// Lost (H100, d 128, G 4, 128K tokens of 8 KV heads): a single warp for a split's 16 rows, as here. It waits for
// each of its instructions in turn, and three of them on a multiprocessor read 0.9 TB/s.
// Also lost (H200, the same shape, one row of it by this file's kernel): one stage in place of two and five blocks on a multiprocessor in
// place of three, 189 us instead of 172 more for 128K tokens than for 8K; three stages and two blocks, 190 us
// instead of 191, and 1031 instead of 864 for 24 sequences of 32K; a row at a time by the bulk copy engine,
// 157 us instead of 159 and 914 instead of 876, and three stages of that and two blocks 155 and 1080; a block's splits
// far from each other, so that all blocks together read one place after the other, or blocks head by head: the same.
// How copies are asked for (the same rings without arithmetic, 2 GiB of shuffled units, TB/s; a plain read 4.5 to 4.6): 16 bytes a
// thread, or a row by the copy engine, 4.2, whatever the stages; a unit as one bulk copy 4.5, but all its rows lie in the
// same banks; as tiles that swizzle 4.6, in any order and size, and 4.2 again where L2 is to bring 256 bytes at a time
// (tensor_map.cc). With arithmetic, in one run, 159 to 148 us at 128K, 1,207 to 1,165 at a million, 97 to 85 with d 64, and 877 to 882
// for 24 sequences.
// Of tiles, lost (other runs, in which what is here took 146, 1,131 and 874): three stages and two blocks, 150 us and 1,117 for
// a million; four and one, 173 and 1,342; a warp weighs only the 16 tokens that it scored and hears of the others' weights in
// place of scores, one meeting more: 147, 1,177, and 927 for 24;
// rows that do not exist (12 of 16 for one query of G 4) hide nothing, so that scores are not compared with what they see: the
// same within 2 %, by which cards differ.
// Merging: a thread that reads a channel of each split from L2, 32 ahead, took 33 us more of a layer of 128K tokens
// and 240 of a million, with all shares worked out in turn another 10.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/dense_attention_parts.cuh"
#include "kernels/cuda/dense_attention_splits.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.h"

namespace winnow::kernels::cuda {
namespace {

using namespace dense;  // NOLINT(google-build-using-namespace): the parts of this very file

// Scores of a unit, by row: 8 floats more than there are, so that rows lie in different banks.
constexpr int kScoreStride = kDenseUnitTokens + 8;

// Scores of 16 tokens from `keys_at` on, one chain over the channels each.
template <typename Rows, int kSteps>
__device__ __forceinline__ void ScoreTile(const uint32_t (&q)[kSteps][4], uint32_t keys_at,
                                          float (&first)[4], float (&second)[4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t keys[4];
    LoadMatrix4(Rows::Channels(keys_at, step), keys);
    MultiplyAdd16x8x16(first, q[step], keys[0], keys[1]);
    MultiplyAdd16x8x16(second, q[step], keys[2], keys[3]);
  }
}

// o [16 channels as two tiles] = o * keep + weights * values, from `values_at` on.
template <typename Rows>
__device__ __forceinline__ void AddValues(const uint32_t (&weights)[kUnitTiles][4],
                                          const float (&keep)[2], uint32_t values_at,
                                          float (&first)[4], float (&second)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    first[e] = __fmul_rn(first[e], keep[e / 2]);
    second[e] = __fmul_rn(second[e], keep[e / 2]);
  }
#pragma unroll
  for (int tile = 0; tile < kUnitTiles; ++tile) {
    uint32_t values[4];
    LoadMatrix4Transposed(values_at + tile * Rows::kTileBytes, values);
    MultiplyAdd16x8x16(first, weights[tile], values[0], values[1]);
    MultiplyAdd16x8x16(second, weights[tile], values[2], values[3]);
  }
}

// Channels of values that a block in turn adds up. Wider heads have several blocks, each of which scores all keys for itself:
// sums of all channels would not fit into a thread's registers.
template <int kHeadDim>
constexpr int kValueDim = kHeadDim <= 128 ? kHeadDim : 128;

// kWindowed: chunks have windows, so that units begin with the first that the block's first row sees.
template <DType kKv, int kHeadDim, bool kWindowed>
__global__ void __launch_bounds__(kInTurnWarps* kLanes)
    InTurnKernel(const __grid_constant__ Args args) {
  extern __shared__ uint4 shared4[];
  const uint32_t shared = SharedAddress(shared4);
  using Rows = PaddedRows<kHeadDim>;
  constexpr uint32_t kStageBytes = Rows::kUnitBytes;
  constexpr int kValues = kValueDim<kHeadDim>, kBlocksOfHead = kHeadDim / kValues;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto kv_head = static_cast<int32_t>(blockIdx.y) / kBlocksOfHead;
  const int32_t first_channel = static_cast<int32_t>(blockIdx.y) % kBlocksOfHead * kValues;
  const auto tile = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);  // those with most keys first
  const DeviceChunk chunk = args.chunks[blockIdx.z];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t first_row = tile * kInTurnWarps * kWarpRows;
  if (first_row >= num_rows) return;
  const int32_t last_row = min(first_row + kInTurnWarps * kWarpRows, num_rows) - 1;
  const int32_t visible = chunk.position + args.group.Divide(last_row) + 1;
  const int32_t units = (visible + kDenseUnitTokens - 1) / kDenseUnitTokens;
  int32_t first_unit = 0;
  if constexpr (kWindowed) {
    first_unit = KeysBefore(chunk, args.group.Divide(first_row)) / kDenseUnitTokens;
  }
  const uint8_t* head = args.pool + kv_head * args.head_bytes;
  using Codes = CodesRing<kKv, kHeadDim, kInTurnWarps * kLanes, false>;
  Codes codes(args, {}, chunk.block_table, kv_head, visible, shared);
  if constexpr (HasScales(kKv)) {
    codes.Begin(first_unit, units);
  } else {
    StartUnit<kHeadDim, kInTurnWarps>(args, chunk.block_table, head, first_unit, visible,
                                      shared + first_unit % 2 * kStageBytes);
    CommitCopies();
  }
  int32_t sees[2];
  int64_t at[2];
  uint32_t q[kHeadDim / 16][4];
  LoadRows<kHeadDim>(args, chunk, kv_head, first_row + warp * kWarpRows, sees, at, q);

#pragma unroll
  for (int64_t& place : at) place += first_channel;

  float o[kValues / 8][4], total[kValues / 8][4];  // of the split, and of those before it
  RowSums sums, totals;
  Clear(o);
  Clear(total);
  for (int32_t unit = first_unit; unit < units; ++unit) {
    uint32_t here = shared + unit % 2 * kStageBytes;
    if constexpr (HasScales(kKv)) {
      here = codes.Next(unit, units);
    } else {
      if (unit + 1 < units) {
        StartUnit<kHeadDim, kInTurnWarps>(args, chunk.block_table, head, unit + 1, visible,
                                          shared + (unit + 1) % 2 * kStageBytes);
      }
      CommitCopies();
      WaitForCopies<1>();
      __syncthreads();
    }
    float scores[2 * kUnitTiles][4] = {}, keep[2];
    uint32_t weights[kUnitTiles][4];
    const uint32_t keys_at = Rows::KeysAt(here, lane);
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
      ScoreTile<Rows>(q, keys_at + t * Rows::kTileBytes, scores[2 * t], scores[2 * t + 1]);
    }
    if constexpr (kWindowed) HidePast(scores, unit * kDenseUnitTokens, chunk.window, sees);
    Weigh(scores, unit * kDenseUnitTokens, sees, sums, weights, keep);
    const uint32_t values_at = Rows::ValuesAt(here, lane) + first_channel * 2;
#pragma unroll
    for (int n = 0; n < kValues / 8; n += 2) {
      AddValues<Rows>(weights, keep, Rows::Channels(values_at, n / 2), o[n], o[n + 1]);
    }
    if (unit + 1 == units || BeginsDenseSplit(unit + 1)) {
      AddSplit<kValues>(sums, o, totals, total);
      sums = RowSums();
      Clear(o);
    }
    __syncthreads();
  }
  AddSinks(args, chunk, kv_head, first_row + warp * kWarpRows, totals);
  WriteRows<kValues>(args, sees, at, totals, total);
}

template <int kHeadDim, typename Ring, bool kWindowed>
__global__ void __launch_bounds__(kSplitWarps* kLanes)
    SplitKernel(const __grid_constant__ Args args,
                const __grid_constant__ typename Ring::Source source) {
  static_assert(kSplitWarps == kUnitTiles);
  constexpr int kPairs = kHeadDim / 16;  // of channel tiles
  constexpr int kMine = (kPairs + kSplitWarps - 1) / kSplitWarps;
  extern __shared__ uint4 shared4[];
  __shared__ float exchanged[kWarpRows * kScoreStride];
  using Rows = typename Ring::Rows;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, pair = lane % 4 * 2;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const int32_t tile = static_cast<int32_t>(blockIdx.z) % args.tiles;
  const DeviceChunk chunk = args.chunks[static_cast<int32_t>(blockIdx.z) / args.tiles];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t first_row = tile * kWarpRows;
  LetNextStart();
  if (first_row >= num_rows) return WaitForEarlier();
  const int32_t last_row = min(first_row + kWarpRows, num_rows) - 1;
  auto [visible, first_unit, units] = UnitsOf(args, chunk, last_row);
  if constexpr (kWindowed) {
    const int32_t before = KeysBefore(chunk, args.group.Divide(first_row));
    first_unit = max(first_unit, before / kDenseUnitTokens);
  }
  if (first_unit >= units) return WaitForEarlier();
  PrefetchTokens<kSplitWarps * kLanes, 256>(args, chunk, kv_head, first_unit, visible,
                                            Ring::kRowBytes);
  Ring ring(args, source, chunk.block_table, kv_head, visible, SharedAddress(shared4));
  WaitForEarlier();
  ring.Begin(first_unit, units);
  int32_t sees[2];
  int64_t at[2];
  uint32_t q[kHeadDim / 16][4];
  LoadRows<kHeadDim>(args, chunk, kv_head, first_row, sees, at, q);

  float o[2 * kMine][4];
  RowSums sums;
  Clear(o);
  const auto end_split = [&](int32_t split) {
    sums.Join();
    const int64_t place = (int64_t{blockIdx.z} * args.kv_heads + kv_head) * kWarpRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sees[r] == 0) continue;
      const int64_t part = (place + lane / 4 + 8 * r) * args.splits + split;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int channels = warp + kSplitWarps * i;
        if (channels >= kPairs) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          *reinterpret_cast<float2*>(args.parts + part * kHeadDim + channels * 16 + n * 8 + pair) =
              make_float2(o[2 * i + n][2 * r], o[2 * i + n][2 * r + 1]);
        }
      }
      if (warp == 0 && pair == 0) args.part_ends[part] = make_float2(sums.max[r], sums.sum[r]);
    }
    sums = RowSums();
    Clear(o);
  };
  for (int32_t unit = first_unit; unit < units; ++unit) {
    const uint32_t here = ring.Next(unit, units);
    {
      float mine[2][4] = {};
      ScoreTile<Rows>(q, Rows::KeysAt(here, lane) + warp * Rows::kTileBytes, mine[0], mine[1]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          *reinterpret_cast<float2*>(exchanged + (lane / 4 + 8 * r) * kScoreStride + warp * 16 +
                                     n * 8 + pair) =
              make_float2(mine[n][2 * r], mine[n][2 * r + 1]);
        }
      }
    }
    __syncthreads();
    float scores[2 * kUnitTiles][4], keep[2];
    uint32_t weights[kUnitTiles][4];
#pragma unroll
    for (int n = 0; n < 2 * kUnitTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 two = *reinterpret_cast<const float2*>(
            exchanged + (lane / 4 + 8 * r) * kScoreStride + n * 8 + pair);
        scores[n][2 * r] = two.x;
        scores[n][2 * r + 1] = two.y;
      }
    }
    if constexpr (kWindowed) HidePast(scores, unit * kDenseUnitTokens, chunk.window, sees);
    Weigh(scores, unit * kDenseUnitTokens, sees, sums, weights, keep);
    const uint32_t values_at = Rows::ValuesAt(here, lane);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int channels = warp + kSplitWarps * i;
      if (channels >= kPairs) break;
      AddValues<Rows>(weights, keep, Rows::Channels(values_at, channels), o[2 * i], o[2 * i + 1]);
    }
    if (unit + 1 == units || BeginsDenseSplit(unit + 1)) end_split(DenseSplitOf(unit));
    __syncthreads();
  }
}

// Several tiles of 16 rows over the same units, each of which is read once: a draft that is verified. Each warp scores its 16
// tokens for all tiles; a tile's unit is weighed by one warp, which hears of its scores, and the others hear of the weights.
template <int kHeadDim>
struct TilesShared {
  static constexpr uint32_t kQueryRowBytes =
      2 * kHeadDim + 16;  // so that eight rows lie in different banks
  static constexpr uint32_t kQueryBytes = kWarpRows * kQueryRowBytes;
  static constexpr uint32_t kScoreBytes = kWarpRows * kScoreStride * 4;
  static constexpr uint32_t kKeepBytes = kWarpRows * 4;
  static constexpr uint32_t kTileBytes = kQueryBytes + kScoreBytes + kKeepBytes;

  // Weights of a row take the place of its scores: eight tokens, 16 bytes, from token 8 * `eight` on. Rows are two times 16
  // bytes apart as banks go, so every other four rows change places within pairs.
  static __device__ __forceinline__ uint32_t WeightsAt(int row, int eight) {
    return row * (kScoreStride * 4) + (eight ^ row / 4 % 2) * 16;
  }
};

template <int kHeadDim, typename Ring>
__global__ void __launch_bounds__(kSplitWarps* kLanes, 2)
    SplitTilesKernel(const __grid_constant__ Args args,
                     const __grid_constant__ typename Ring::Source source) {
  static_assert(kSplitWarps == kUnitTiles);
  constexpr int kPairs = kHeadDim / 16;  // of channel tiles
  constexpr int kMine = (kPairs + kSplitWarps - 1) / kSplitWarps;
  extern __shared__ uint4 shared4[];
  using Rows = typename Ring::Rows;
  using Shared = TilesShared<kHeadDim>;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, pair = lane % 4 * 2;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const int32_t set = static_cast<int32_t>(blockIdx.z) % args.tile_sets;
  const int32_t chunk_index = static_cast<int32_t>(blockIdx.z) / args.tile_sets;
  const DeviceChunk chunk = args.chunks[chunk_index];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t first_tile = set * args.tiles_per_set;
  LetNextStart();
  const int32_t tiles =
      min(args.tiles_per_set, (num_rows + kWarpRows - 1) / kWarpRows - first_tile);
  if (tiles <= 0) return WaitForEarlier();
  // The last row of a tile, and the keys that it sees.
  const auto last_row_of = [&](int32_t tile) {
    return min((first_tile + tile + 1) * kWarpRows, num_rows) - 1;
  };
  const auto visible_to = [&](int32_t tile) { return VisibleTo(args, chunk, last_row_of(tile)); };
  const auto [visible, first_unit, units] = UnitsOf(args, chunk, last_row_of(tiles - 1));
  if (first_unit >= units) return WaitForEarlier();
  PrefetchTokens<kSplitWarps * kLanes, 256>(args, chunk, kv_head, first_unit, visible,
                                            Ring::kRowBytes);
  Ring ring(args, source, chunk.block_table, kv_head, visible, SharedAddress(shared4));
  WaitForEarlier();
  ring.Begin(first_unit, units);

  const auto queries_of = [&](int tile) {
    return reinterpret_cast<uint8_t*>(shared4) + Ring::kSharedBytes + tile * Shared::kTileBytes;
  };
  const auto scores_of = [&](int tile) { return queries_of(tile) + Shared::kQueryBytes; };
  const auto keep_of = [&](int tile) {
    return reinterpret_cast<float*>(scores_of(tile) + Shared::kScoreBytes);
  };
  const auto score_of = [&](int tile, int row, int token) {
    return reinterpret_cast<float2*>(scores_of(tile) + (row * kScoreStride + token) * 4);
  };
  int32_t sees[2] = {0, 0};  // of the tile that this warp weighs
  if (warp < tiles) {
    int64_t at[2];
    uint32_t q[kHeadDim / 16][4];
    LoadRows<kHeadDim>(args, chunk, kv_head, (first_tile + warp) * kWarpRows, sees, at, q);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i % 2 * 8, byte = step * 32 + i / 2 * 16 + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(queries_of(warp) + row * Shared::kQueryRowBytes + byte) =
            q[step][i];
      }
    }
  }
  __syncthreads();

  float o[kTilesTogether][2 * kMine][4];
#pragma unroll
  for (int t = 0; t < kTilesTogether; ++t) Clear(o[t]);
  RowSums sums;  // of the tile that this warp weighs
  const int row_of_matrix = lane % 16,
            half_of_matrix = lane / 16;  // where a lane reads 16 rows of 32 bytes
  for (int32_t unit = first_unit; unit < units; ++unit) {
    const uint32_t here = ring.Next(unit, units);
    const int32_t first_token = unit * kDenseUnitTokens;
    {
      float mine[kTilesTogether][2][4] = {};
      const uint32_t keys_at = Rows::KeysAt(here, lane) + warp * Rows::kTileBytes;
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t keys[4];
        LoadMatrix4(Rows::Channels(keys_at, step), keys);
#pragma unroll
        for (int t = 0; t < kTilesTogether; ++t) {
          if (t >= tiles) break;
          uint32_t q[4];
          LoadMatrix4(SharedAddress(queries_of(t)) + row_of_matrix * Shared::kQueryRowBytes +
                          step * 32 + half_of_matrix * 16,
                      q);
          MultiplyAdd16x8x16(mine[t][0], q, keys[0], keys[1]);
          MultiplyAdd16x8x16(mine[t][1], q, keys[2], keys[3]);
        }
      }
#pragma unroll
      for (int t = 0; t < kTilesTogether; ++t) {
        if (t >= tiles) break;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            *score_of(t, lane / 4 + 8 * r, warp * 16 + n * 8 + pair) =
                make_float2(mine[t][n][2 * r], mine[t][n][2 * r + 1]);
          }
        }
      }
    }
    __syncthreads();
    const auto ends_split = [&](int32_t tile_units) {
      return unit + 1 == tile_units || BeginsDenseSplit(unit + 1);
    };
    const auto units_of = [&](int32_t tile) {
      return min((visible_to(tile) + kDenseUnitTokens - 1) / kDenseUnitTokens, units);
    };
    const int64_t place_of_chunk = int64_t{chunk_index} * args.tiles + first_tile;
    // The place of a row's part of this unit's split.
    const auto part_of = [&](int32_t tile, int r) {
      const int64_t place =
          ((place_of_chunk + tile) * args.kv_heads + kv_head) * kWarpRows + lane / 4 + 8 * r;
      return place * args.splits + DenseSplitOf(unit);
    };
    if (warp < tiles && first_token < visible_to(warp)) {
      float scores[2 * kUnitTiles][4], keep[2];
      uint32_t weights[kUnitTiles][4];
#pragma unroll
      for (int n = 0; n < 2 * kUnitTiles; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 two = *score_of(warp, lane / 4 + 8 * r, n * 8 + pair);
          scores[n][2 * r] = two.x;
          scores[n][2 * r + 1] = two.y;
        }
      }
      __syncwarp();  // weights take the place of scores
      Weigh(scores, first_token, sees, sums, weights, keep);
#pragma unroll
      for (int n = 0; n < kUnitTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t at = Shared::WeightsAt(lane / 4 + i % 2 * 8, 2 * n + i / 2);
          *reinterpret_cast<uint32_t*>(scores_of(warp) + at + lane % 4 * 4) = weights[n][i];
        }
      }
      if (pair == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          keep_of(warp)[lane / 4 + 8 * r] = keep[r];
        }
      }
      if (ends_split(units_of(warp))) {
        sums.Join();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (sees[r] != 0 && pair == 0) {
            args.part_ends[part_of(warp, r)] = make_float2(sums.max[r], sums.sum[r]);
          }
        }
        sums = RowSums();
      }
    }
    __syncthreads();
    uint32_t weights[kTilesTogether][kUnitTiles][4];
#pragma unroll
    for (int t = 0; t < kTilesTogether; ++t) {
      if (t >= tiles) break;
      float keep[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) keep[r] = keep_of(t)[lane / 4 + 8 * r];
#pragma unroll
      for (int n = 0; n < kUnitTiles; ++n) {
        LoadMatrix4(
            SharedAddress(scores_of(t)) + Shared::WeightsAt(row_of_matrix, 2 * n + half_of_matrix),
            weights[t][n]);
      }
      if (first_token >= visible_to(t)) continue;
#pragma unroll
      for (int i = 0; i < 2 * kMine; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[t][i][e] = __fmul_rn(o[t][i][e], keep[e / 2]);
      }
    }
    const uint32_t values_at = Rows::ValuesAt(here, lane);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int channels = warp + kSplitWarps * i;
      if (channels >= kPairs) break;
      const uint32_t at = Rows::Channels(values_at, channels);
#pragma unroll
      for (int n = 0; n < kUnitTiles; ++n) {
        uint32_t values[4];
        LoadMatrix4Transposed(at + n * Rows::kTileBytes, values);
#pragma unroll
        for (int t = 0; t < kTilesTogether; ++t) {
          if (t >= tiles) break;
          if (first_token >= visible_to(t)) continue;  // later tiles see more
          MultiplyAdd16x8x16(o[t][2 * i], weights[t][n], values[0], values[1]);
          MultiplyAdd16x8x16(o[t][2 * i + 1], weights[t][n], values[2], values[3]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTilesTogether; ++t) {
      if (t >= tiles) break;
      const int32_t tile_units = units_of(t);
      if (unit >= tile_units || !ends_split(tile_units)) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if ((first_tile + t) * kWarpRows + lane / 4 + 8 * r >= num_rows) continue;
        float* const part = args.parts + part_of(t, r) * kHeadDim;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          const int channels = warp + kSplitWarps * i;
          if (channels >= kPairs) break;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            *reinterpret_cast<float2*>(part + channels * 16 + n * 8 + pair) =
                make_float2(o[t][2 * i + n][2 * r], o[t][2 * i + n][2 * r + 1]);
          }
        }
      }
      Clear(o[t]);
    }
    __syncthreads();
  }
}

// Splits whose states make up a row of `token`: from the one on with the first key that it sees, and before this one. Where states have gaps (SplitByWarps), the sum of those that the row sees may be at
// one that only the chunk's later rows see; what it sees nothing of weighs nothing.
__device__ __forceinline__ int32_t SplitsToMerge(const DeviceChunk& chunk, int32_t token,
                                                 bool have_gaps) {
  return DenseSplits(chunk.position + (have_gaps ? chunk.num_tokens : token + 1));
}
__device__ __forceinline__ int32_t FirstSplitToMerge(const DeviceChunk& chunk, int32_t token) {
  return DenseSplitOf(KeysBefore(chunk, token) / kDenseUnitTokens);
}

// A block merges 32 channels of a row's splits, from left to right. What a split and those before it count for
// follows from the largest score so far, which is found for many splits side by side: only multiply-adds are left
// to do one after the other, by one warp, over values that are in shared memory by then. A split that weighs
// nothing is left out; `have_gaps`: many do, and their values need not be read.
constexpr int kMergeThreads = 128;
constexpr int kMergeSplits = 2 * kMergeThreads;  // at a time, and as many on their way
constexpr int kMergeChannels = 32;
constexpr float kLeftOut = -1.0f;

__global__ void __launch_bounds__(kMergeThreads)
    MergeSplitsKernel(const __grid_constant__ Args args, int32_t head_dim, int32_t have_gaps) {
  LetNextStart();
  extern __shared__ uint4 shared4[];  // values [2][min(splits, kMergeSplits)][32]
  __shared__ float lefts[kMergeSplits], rights[kMergeSplits], right_sums[kMergeSplits];
  __shared__ float warp_max[kMergeThreads / kLanes];
  const int32_t chunk_index = static_cast<int32_t>(blockIdx.z) / args.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.z) % args.tiles;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const DeviceChunk chunk = args.chunks[chunk_index];
  const int32_t group = args.group.divisor();
  const int32_t sets = (head_dim + kMergeChannels - 1) / kMergeChannels;
  const int32_t row_of_tile = static_cast<int32_t>(blockIdx.x) / sets;
  const int32_t row = tile * kWarpRows + row_of_tile;
  const int32_t channel = static_cast<int32_t>(blockIdx.x) % sets * kMergeChannels;
  WaitForEarlier();
  if (row >= chunk.num_tokens * group) return;
  const int32_t token = args.group.Divide(row);
  const int32_t splits = SplitsToMerge(chunk, token, have_gaps != 0);
  const int32_t first_split = FirstSplitToMerge(chunk, token);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int warp = thread / kLanes, lane = thread % kLanes;
  const int64_t place =
      ((int64_t{blockIdx.z} * args.kv_heads + kv_head) * kWarpRows + row_of_tile) * args.splits;
  const float* parts = args.parts + place * head_dim + channel;
  const float2* part_ends = args.part_ends + place;
  const int32_t pieces = min(kMergeChannels, head_dim - channel) / 4;  // of 16 bytes
  const int32_t buffer = min(args.splits, kMergeSplits) * kMergeChannels;
  auto* values = reinterpret_cast<float*>(shared4);
  const auto start = [&](int32_t first, int which) {
    const int32_t count = min(kMergeSplits, splits - first);
    const uint32_t to = SharedAddress(values + which * buffer);
    for (int32_t i = thread; i < count * 8; i += kMergeThreads) {
      const int32_t split = i / 8, piece = i % 8;
      if (piece < pieces) {
        CopyAsync16(to + i * 16, parts + int64_t{first + split} * head_dim + piece * 4,
                    have_gaps == 0 || part_ends[first + split].y != 0.0f);
      }
    }
    CommitCopies();
  };
  constexpr int kEnds = kMergeSplits / kMergeThreads;
  float2 next_ends[kEnds];
  const auto load_ends = [&](int32_t first) {
#pragma unroll
    for (int i = 0; i < kEnds; ++i) {
      const int32_t split = first + kEnds * thread + i;
      next_ends[i] = split < splits ? part_ends[split] : make_float2(0.0f, 0.0f);
    }
  };
  load_ends(first_split);
  start(first_split, 0);
  float value = 0.0f, sum = 0.0f, max_before = -INFINITY;
  int which = 0;
  for (int32_t first = first_split; first < splits; first += kMergeSplits, which ^= 1) {
    const int32_t count = min(kMergeSplits, splits - first);
    float maxima[kEnds], sums[kEnds], mine = -INFINITY;
#pragma unroll
    for (int i = 0; i < kEnds; ++i) {
      sums[i] = next_ends[i].y;
      maxima[i] = sums[i] == 0.0f ? -INFINITY : next_ends[i].x;
      mine = fmaxf(mine, maxima[i]);
    }
    if (first + kMergeSplits < splits) {
      load_ends(first + kMergeSplits);
      start(first + kMergeSplits, which ^ 1);
    } else {
      CommitCopies();
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      const float below = __shfl_up_sync(kFullMask, mine, offset);
      if (lane >= offset) mine = fmaxf(mine, below);
    }
    if (lane == kLanes - 1) warp_max[warp] = mine;
    float before = __shfl_up_sync(kFullMask, mine, 1);
    before = fmaxf(max_before, lane == 0 ? -INFINITY : before);
    __syncthreads();
    for (int w = 0; w < kMergeThreads / kLanes; ++w) {
      if (w < warp) before = fmaxf(before, warp_max[w]);
      max_before = fmaxf(max_before, warp_max[w]);
    }
#pragma unroll
    for (int i = 0; i < kEnds; ++i) {
      const float max = fmaxf(before, maxima[i]);
      const float right = exp2f(maxima[i] - max);
      lefts[kEnds * thread + i] = before == -INFINITY ? 0.0f : exp2f(before - max);
      rights[kEnds * thread + i] = sums[i] == 0.0f ? kLeftOut : right;
      right_sums[kEnds * thread + i] = __fmul_rn(sums[i], right);
      before = max;
    }
    WaitForCopies<1>();
    __syncthreads();
    if (warp == 0) {
      const float* of_channel = values + which * buffer + lane;
#pragma unroll 8
      for (int32_t i = 0; i < count; ++i) {
        if (rights[i] == kLeftOut) continue;
        value = __fmaf_rn(value, lefts[i], __fmul_rn(of_channel[i * kMergeChannels], rights[i]));
        sum = __fmaf_rn(sum, lefts[i], right_sums[i]);
      }
    }
    __syncthreads();
  }
  if (warp != 0 || channel + lane >= head_dim) return;
  const int32_t head = kv_head * group + row - token * group;
  args.out[(chunk.first_row + token) * args.out_stride + int64_t{head} * head_dim + channel +
           lane] = __fdiv_rn(value, SumWithSink(sum, max_before, args.sinks, head));
}

// Merging of few splits: a warp merges a row, four channels to a lane at a time, of several rows to a block.
constexpr int kMergeWarps = 4;
constexpr int32_t kFewSplits = 8;

__global__ void __launch_bounds__(kMergeWarps* kLanes)
    MergeFewSplitsKernel(const __grid_constant__ Args args, int32_t head_dim, int32_t tile_rows,
                         int32_t have_gaps) {
  LetNextStart();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int32_t index = static_cast<int32_t>(blockIdx.x) * kMergeWarps + warp;
  const int32_t row_of_tile = index % tile_rows, kv_head = index / tile_rows;
  const DeviceChunk chunk = args.chunks[static_cast<int32_t>(blockIdx.z) / args.tiles];
  const int32_t tile = static_cast<int32_t>(blockIdx.z) % args.tiles;
  const int32_t group = args.group.divisor(), row = tile * kWarpRows + row_of_tile;
  WaitForEarlier();
  if (kv_head >= args.kv_heads || row >= chunk.num_tokens * group) return;
  const int32_t token = args.group.Divide(row);
  const int32_t splits = SplitsToMerge(chunk, token, have_gaps != 0);
  const int64_t place =
      ((int64_t{blockIdx.z} * args.kv_heads + kv_head) * kWarpRows + row_of_tile) * args.splits;
  const float2* part_ends = args.part_ends + place;
  const int32_t head = kv_head * group + row - token * group;
  float* out = args.out + (chunk.first_row + token) * args.out_stride + int64_t{head} * head_dim;
  for (int32_t channel = 4 * lane; channel < head_dim; channel += 4 * kLanes) {
    const float* parts = args.parts + place * head_dim + channel;
    float value[4] = {}, sum = 0.0f, max = -INFINITY;
    constexpr int kAtOnce = 8;
    for (int32_t first = FirstSplitToMerge(chunk, token); first < splits; first += kAtOnce) {
      float4 parts_of[kAtOnce];
      float2 ends[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        ends[i] = first + i < splits ? part_ends[first + i] : make_float2(0.0f, 0.0f);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (ends[i].y == 0.0f) continue;
        parts_of[i] = *reinterpret_cast<const float4*>(parts + int64_t{first + i} * head_dim);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (ends[i].y == 0.0f) continue;
        const Shares shares = ShareOut(max, sum, ends[i].x);
        value[0] = Mix(value[0], parts_of[i].x, shares);
        value[1] = Mix(value[1], parts_of[i].y, shares);
        value[2] = Mix(value[2], parts_of[i].z, shares);
        value[3] = Mix(value[3], parts_of[i].w, shares);
        sum = Mix(sum, ends[i].y, shares);
        max = shares.max;
      }
    }
    sum = SumWithSink(sum, max, args.sinks, head);
    *reinterpret_cast<float4*>(out + channel) =
        make_float4(__fdiv_rn(value[0], sum), __fdiv_rn(value[1], sum), __fdiv_rn(value[2], sum),
                    __fdiv_rn(value[3], sum));
  }
}

int32_t TilesOf(const DenseAttentionShape& shape) {
  return static_cast<int32_t>(CeilDiv(int64_t{shape.max_chunk_tokens} * shape.group, kWarpRows));
}
// Of splits, kSideBySide.
size_t NumParts(const DenseAttentionShape& shape) {
  return size_t{1} * shape.num_chunks * TilesOf(shape) * shape.layout.kv_heads * kWarpRows *
         DenseSplits(shape.max_keys);
}

// kTogether: on Hopper, of whole units; there is room in shared memory for several tiles' scores. Not kWindowed.
template <int kHeadDim, typename Ring, bool kTogether, bool kWindowed = false>
cudaError_t LaunchSideBySide(const DenseAttentionShape& shape, Args& args,
                             const typename Ring::Source& source, Stream stream) {
  args.part_ends = reinterpret_cast<float2*>(args.parts + NumParts(shape) * kHeadDim);
  cudaError_t error = cudaSuccess;
  const CUtensorMap* map = nullptr;
  if constexpr (std::is_same_v<typename Ring::Source, CUtensorMap>) map = &source;
  const bool by_warps = kTogether && HasWarpSplits(shape);
  if (by_warps) {
    error = SplitByWarps(shape, args, map, stream);
  } else if (kTogether && args.tiles > 1) {
    if constexpr (kTogether) {
      args.tile_sets = static_cast<int32_t>(CeilDiv(args.tiles, kTilesTogether));
      args.tiles_per_set = static_cast<int32_t>(CeilDiv(args.tiles, args.tile_sets));
      if (HasGroupSplits(kHeadDim)) {
        error = SplitByGroups(shape, args, map, stream);
      } else {
        error = LaunchSplits(
            SplitTilesKernel<kHeadDim, Ring>, kSplitWarps * kLanes,
            Ring::kSharedBytes + size_t{TilesShared<kHeadDim>::kTileBytes} * args.tiles_per_set,
            args.tile_sets, shape, args, source, stream);
      }
    }
  } else {
    error = LaunchSplits(SplitKernel<kHeadDim, Ring, kWindowed>, kSplitWarps * kLanes,
                         Ring::kSharedBytes, args.tiles, shape, args, source, stream);
  }
  if (error != cudaSuccess) return error;
  const int64_t tile_rows =
      std::min<int64_t>(int64_t{shape.max_chunk_tokens} * shape.group, kWarpRows);
  if (args.splits <= kFewSplits && args.out_stride % 4 == 0 &&
      reinterpret_cast<uintptr_t>(args.out) % 16 == 0) {
    const int64_t warps = tile_rows * shape.layout.kv_heads;
    return Launch(
        MergeFewSplitsKernel,
        dim3(static_cast<unsigned>(CeilDiv(warps, kMergeWarps)), 1, shape.num_chunks * args.tiles),
        kMergeWarps * kLanes, 0, stream, false, args, kHeadDim, static_cast<int32_t>(tile_rows),
        static_cast<int32_t>(by_warps));
  }
  const size_t merge_bytes = size_t{2} * 4 * kMergeChannels * std::min(args.splits, kMergeSplits);
  const auto blocks = static_cast<unsigned>(tile_rows * CeilDiv(kHeadDim, kMergeChannels));
  return Launch(MergeSplitsKernel,
                dim3(blocks, shape.layout.kv_heads, shape.num_chunks * args.tiles), kMergeThreads,
                merge_bytes, stream, false, args, kHeadDim, static_cast<int32_t>(by_warps));
}

// Launches the kernels that any device has.
template <DType kKv, int kHeadDim, bool kWindowed>
cudaError_t LaunchInTurn(const DenseAttentionShape& shape, const Args& args, Stream stream) {
  constexpr int kThreads = kInTurnWarps * kLanes;
  const dim3 grid(static_cast<unsigned>(CeilDiv(int64_t{shape.max_chunk_tokens} * shape.group,
                                                kInTurnWarps * kWarpRows)),
                  shape.layout.kv_heads * (kHeadDim / kValueDim<kHeadDim>), shape.num_chunks);
  constexpr size_t kBytes = HasScales(kKv) ? CodesRing<kKv, kHeadDim, kThreads, false>::kSharedBytes
                                           : SharedBytes<PaddedRows<kHeadDim>>();
  return LaunchBehind(InTurnKernel<kKv, kHeadDim, kWindowed>, grid, kThreads, kBytes, stream, args);
}
template <DType kKv, int kHeadDim, bool kWindowed>
cudaError_t LaunchApart(const DenseAttentionShape& shape, Args& args, Stream stream) {
  using Ring =
      std::conditional_t<HasScales(kKv), CodesRing<kKv, kHeadDim, kSplitWarps * kLanes, false>,
                         PaddedRing<kHeadDim>>;
  return LaunchSideBySide<kHeadDim, Ring, false, kWindowed>(shape, args, {}, stream);
}

template <DType kKv, int kHeadDim>
cudaError_t LaunchOf(const DenseAttentionShape& shape, Args& args, Stream stream) {
  const bool in_turn = shape.way == DenseWay::kInTurn;
  if (shape.windowed) {
    return in_turn ? LaunchInTurn<kKv, kHeadDim, true>(shape, args, stream)
                   : LaunchApart<kKv, kHeadDim, true>(shape, args, stream);
  }
  if constexpr (kHeadDim > kMostGroupDim) {
    return in_turn ? LaunchInTurn<kKv, kHeadDim, false>(shape, args, stream)
                   : LaunchApart<kKv, kHeadDim, false>(shape, args, stream);
  } else {
    const bool whole_units = !shape.portable && CurrentDevice().hopper &&
                             shape.layout.block_tokens % kDenseUnitTokens == 0;
    if (in_turn) {
      CUtensorMap map;
      if (!HasScales(kKv) && whole_units && HasPairAttention(kHeadDim) &&
          MakeTensorMap(args.pool, 2 * kHeadDim, kDenseUnitTokens, &map)) {
        return AttendInTurnByPairs(shape, args, map, stream);
      }
      if (!shape.portable && HasGroupAttention(kHeadDim)) {
        return AttendInTurnByGroups(shape, args, stream);
      }
      return LaunchInTurn<kKv, kHeadDim, false>(shape, args, stream);
    }
    if constexpr (HasScales(kKv)) {
      if (whole_units) {
        using Ring = CodesRing<kKv, kHeadDim, kSplitWarps * kLanes, true>;
        return LaunchSideBySide<kHeadDim, Ring, true>(shape, args, {}, stream);
      }
    } else {
      if constexpr (2 * kHeadDim % kTensorTileRowBytes == 0) {
        CUtensorMap map;
        if (whole_units && MakeTensorMap(args.pool, 2 * kHeadDim, kDenseUnitTokens, &map)) {
          return LaunchSideBySide<kHeadDim, SwizzledRing<kHeadDim>, true>(shape, args, map, stream);
        }
      }
    }
    return LaunchApart<kKv, kHeadDim, false>(shape, args, stream);
  }
}

// Bytes of a chunk behind the copy in the workspace of kWidened.
constexpr size_t kWidenedChunkBytes = sizeof(DeviceChunk) + sizeof(int32_t);
WidenedShape WidenedShapeOf(const DenseAttentionShape& shape) {
  return ShapeOfWidened(shape.layout, std::max(shape.num_chunks, 1), std::max(shape.max_keys, 1),
                        shape.widened_bytes);
}

// The copy, some heads at a time, and attention in turn over it.
cudaError_t AttendCopy(const DenseAttentionShape& shape, const Args& args, float scale,
                       void* workspace, const Stream& stream) {
  const KvLayout& layout = shape.layout;
  const WidenedShape widened = WidenedShapeOf(shape);
  WidenedKv to;
  to.rows = static_cast<uint2*>(workspace);
  to.chunks = reinterpret_cast<DeviceChunk*>(static_cast<std::byte*>(workspace) + widened.bytes);
  to.tables = reinterpret_cast<int32_t*>(to.chunks + shape.num_chunks);
  to.tokens = widened.tokens;
  DenseAttentionShape of_copy = shape;
  of_copy.way = DenseWay::kInTurn;
  of_copy.layout.dtype = DType::kBF16;
  of_copy.layout.block_tokens = widened.tokens;
  for (int32_t first = 0; first < layout.kv_heads; first += widened.heads) {
    to.first_head = first;
    to.num_heads = of_copy.layout.kv_heads = std::min(widened.heads, layout.kv_heads - first);
    const int64_t channel = int64_t{first} * shape.group * layout.head_dim;
    if (shape.sinks != nullptr) of_copy.sinks = shape.sinks + int64_t{first} * shape.group;
    cudaError_t error = WidenKv(shape, args, to, stream);
    if (error == cudaSuccess) {
      error = AttendDense(of_copy, args.q + channel, args.q_stride, to.chunks, to.rows, scale,
                          args.out + channel, args.out_stride, nullptr, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

bool HasWideHeads() {
  return SharedBytes<PaddedRows<kWideHeadDim>>() <= CurrentDevice().block_shared_bytes;
}

size_t DenseAttentionWorkspaceBytes(const DenseAttentionShape& shape) {
  switch (shape.way) {
    case DenseWay::kInTurn:
      return 0;
    case DenseWay::kWidened:
      return WidenedShapeOf(shape).bytes + shape.num_chunks * kWidenedChunkBytes;
    case DenseWay::kSideBySide:
      break;
  }
  return size_t{4} * NumParts(shape) * (shape.layout.head_dim + 2);
}

cudaError_t AttendDense(const DenseAttentionShape& shape, const float* q, int64_t q_stride,
                        const DeviceChunk* chunks, const void* pool, float scale, float* out,
                        int64_t out_stride, void* workspace, Stream stream) {
  const KvLayout& layout = shape.layout;
  if (!HasKvRows(layout) || (shape.windowed && shape.way == DenseWay::kWidened) ||
      shape.group < 1 || layout.kv_heads < 1 || layout.kv_heads > 65535 || shape.num_chunks < 0 ||
      layout.block_tokens < 1 || int64_t{shape.max_chunk_tokens} * shape.group > 0x7fffffff ||
      int64_t{shape.num_chunks} *
              (shape.way != DenseWay::kSideBySide ? 1 : std::max(TilesOf(shape), 1)) >
          65535) {
    return cudaErrorInvalidValue;
  }
  if (shape.num_chunks == 0 || shape.max_chunk_tokens <= 0) return cudaSuccess;
  Args args{q,
            q_stride,
            chunks,
            static_cast<const uint8_t*>(pool),
            FastDivider(layout.block_tokens),
            static_cast<int64_t>(layout.BlockBytes()),
            static_cast<int64_t>(layout.HeadBytes()),
            layout.kv_heads,
            FastDivider(shape.group),
            scale * kLog2E,
            out,
            out_stride,
            static_cast<float*>(workspace),
            nullptr,
            TilesOf(shape),
            DenseSplits(shape.max_keys),
            0,
            1,
            1,
            shape.num_chunks,
            shape.sinks};
  if (shape.way == DenseWay::kWidened) return AttendCopy(shape, args, scale, workspace, stream);
  if (layout.head_dim == kWideHeadDim) {
    return layout.dtype == DType::kBF16 ? LaunchOf<DType::kBF16, kWideHeadDim>(shape, args, stream)
                                        : cudaErrorInvalidValue;
  }
  return ForHeadDim(layout.head_dim, [&]<int kHeadDim>(HeadDim<kHeadDim>) {
    return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
      return LaunchOf<kKv, kHeadDim>(shape, args, stream);
    });
  });
}

}  // namespace winnow::kernels::cuda

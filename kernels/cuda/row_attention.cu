// Mapping. A list is 64 chains of tiles of 16 rows: tile k belongs to chain k mod 64. Eight blocks of eight
// warps share it, a warp a chain, neighbouring tiles different blocks. Of short lists only a block's first chains have tiles:
// where there are many such lists, blocks have two or four warps, so that more of them have room (on an H200 the anchors of 24
// sequences, 144 rows a list, took as long as 512 rows). Each chain has its own running
// maximum and its own part of shared memory, so that nothing waits for another warp until the end. A tile's
// rows, K and V, are copied with 16-byte asynchronous copies, a lane per 16 bytes, into rows padded by 16
// bytes (no bank conflicts for ldmatrix); the addresses of a warp's second tile are found while the first
// one flies, and where few lists are attended its rows fly too.
//
// The product. mma.m16n8k16 has 16 rows for queries; a group has up to 8. Rows 0 to 7 are the high
// halves of the group's queries (bfloat16), rows 8 to 15 the low halves. The accumulator's two
// halves lie in the same thread, so adding them costs one addition, and the fragment of scores is
// already the fragment of weights for the second product, V's.
//
// The eight blocks, the list's parts, are a cluster (Hopper, few lists): each has its share of the result, and each
// stores what it has of the others' shares into their shared memory. So the parts meet once, and no result
// goes through L2, where in a decode step the weights of the next product are on their way. Elsewhere they
// go through memory, and the list's last part merges them (a ticket that wraps to zero, so that nothing
// has to be cleared): the same additions.
//
// What was tried and lost (H200, 8 heads, G 4, d 128):
//   merging with one thread per head and channel, each reading maxima and sums itself: 20 of the
//   26 us for 2192 rows a head, all of it waiting for L2
//   up to 48 splits of 64 rows or more, a block of four warps each, merged through memory by the list's
//   last one: at 128K, where the next product's weights fill HBM's queues, 19.3 us of a layer from the end of
//   selection to that product, of which 12 from the last row's arrival on
//   clusters for the 192 lists of 24 sequences: 53 in place of 46 us for 656 rows a head, 90 of 82 for 2192
//   reading rows in pinned memory in place: 27 GB/s where row_gather.h copies at 50
//   8-bit types, eight words of a tile loaded before one is stored, without clusters: 121 in place of 111 us for 24 lists of 2192
//   rows, for want of registers. With clusters 9.8 us where loads that wait for stores took 12.4
#include <algorithm>

#include "kernels/attention_state.h"
#include "kernels/cuda/attention_states.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_attention.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kParts = 8;  // blocks of a list
constexpr int kMostWarps = 8;
constexpr int kTileRows = 16;
constexpr int kRowsPerRound = kParts * kMostWarps * kTileRows;  // 1024: a tile of each chain
constexpr int kPackedHeads = 8;
// So many lists leave multiprocessors to spare: a warp has two tiles of rows in shared memory, and parts are a
// cluster. More of them wait longer for eight places at once than they gain by it.
constexpr int64_t kFewLists = 16;

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  const RowList* lists;  // gathered
  Selection chosen;      // chosen
  const uint8_t* pool;   // chosen
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes;
  int32_t kv_heads, group, head_sets, stages;
  int32_t q_in_pairs;  // 1: 8-byte aligned
  float scale_log2;
  AttentionOutput output;
  // Without clusters, of a list and set of heads:
  float2* parts;      // o [kParts][kPackedHeads * d / 2]
  float2* part_ends;  // max and sum [kParts][kPackedHeads]
  uint32_t* tickets;
};

template <int kHeadDim>
__host__ __device__ constexpr int PaddedRowBytes() {
  return 4 * kHeadDim + 16;
}

// Where a list's rows lie.
enum class Source { kGathered, kChosen };

// Where row i lies, or any row that exists where there is none, in two steps: what Ask reads from memory
// need not have arrived before Address, which may read more.
struct GatheredRows {
  const std::byte* const* rows;
  int32_t count;
  __device__ uint64_t Ask(int32_t i) const {
    return count > 0 ? reinterpret_cast<uint64_t>(rows[min(i, count - 1)]) : 0;
  }
  __device__ uint64_t Address(int32_t /*i*/, uint64_t address) const { return address; }
};
// The tokens before mid, those chosen, those after mid.
template <int kRowBytes>
struct ChosenRows {
  const int32_t* table;
  const uint8_t* head;  // of block 0
  FastDivider block_tokens;
  int64_t block_bytes;
  const int32_t* tokens;
  int32_t capacity, before, chosen, after_first, count;
  // In any case, so that it need not wait for how many there are.
  __device__ int32_t Ask(int32_t i) const { return tokens[min(max(i - before, 0), capacity - 1)]; }
  __device__ uint64_t Address(int32_t i, int32_t token) const {
    if (i < before) token = i;
    if (i >= before + chosen) token = after_first + (i - before - chosen);
    if (i >= count) token = 0;
    const int32_t block = block_tokens.Divide(token);
    return reinterpret_cast<uint64_t>(head + table[block] * block_bytes +
                                      (token - block * block_tokens.divisor()) * kRowBytes);
  }
};

// Starts copying the tile's rows [first, last), of which 16 fit, the lane's at `address`; the rest become zeros.
template <int kHeadDim>
__device__ __forceinline__ void StartTile(uint64_t address, int32_t first, int32_t last,
                                          uint32_t shared, int lane) {
  constexpr int kPieces = kHeadDim / 4;  // of 16 bytes in a row
#pragma unroll
  for (int i = 0; i < kTileRows * kPieces / 32; ++i) {
    const int index = i * 32 + lane;
    const int row = index / kPieces, piece = index % kPieces;
    const uint64_t from = __shfl_sync(kFullMask, address, row);
    CopyAsync16(shared + row * PaddedRowBytes<kHeadDim>() + piece * 16,
                reinterpret_cast<const uint8_t*>(from) + piece * 16, first + row < last);
  }
}

// For 8-bit types: the windows of 16 bytes that the tile's rows lie in (kv_rows.cuh), one behind the other.
template <DType kKv, int kHeadDim>
__device__ __forceinline__ void StartCodes(uint64_t address, int32_t first, int32_t last,
                                           uint32_t shared, int lane) {
  constexpr int kPieces = KvWindowBytes<kKv>(kHeadDim) / 16;
#pragma unroll
  for (int i = 0; i < (kTileRows * kPieces + 31) / 32; ++i) {
    const int index = i * 32 + lane;
    const int row = index / kPieces, piece = index % kPieces;
    const uint64_t from = __shfl_sync(kFullMask, address, row % kTileRows) & ~uint64_t{15};
    if (row < kTileRows) {
      CopyAsync16(shared + index * 16, reinterpret_cast<const uint8_t*>(from) + piece * 16,
                  first + row < last);
    }
  }
}
// Makes a tile of bfloat16 of them. The lane's row, as in StartCodes, begins `offset` bytes behind its window.
// `kAtOnce` words are loaded before the first is stored, as many as there are registers for: a load waits for stores before it.
template <DType kKv, int kHeadDim, int kAtOnce>
__device__ __forceinline__ void WidenTile(uint32_t codes_at, uint32_t offset, uint32_t tile,
                                          int lane) {
  constexpr int kWords = kHeadDim / 2;  // of a row's codes, half of them K's
  static_assert(kTileRows * kWords % (32 * kAtOnce) == 0);
#pragma unroll 1
  for (int first = 0; first < kTileRows * kWords / 32; first += kAtOnce) {
    uint32_t codes[kAtOnce], scales[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = (first + i) * 32 + lane, row = at / kWords;
      const uint32_t from =
          codes_at + row * KvWindowBytes<kKv>(kHeadDim) + __shfl_sync(kFullMask, offset, row);
      codes[i] = LoadShared(from + at % kWords * 4);
      scales[i] = LoadShared(from + 2 * kHeadDim);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = (first + i) * 32 + lane, word = at % kWords;
      StoreShared(tile + at / kWords * PaddedRowBytes<kHeadDim>() + word * 8,
                  PairsOf<kKv>(codes[i], TwiceScale<kKv>(scales[i], word >= kWords / 2)));
    }
  }
}

// A warp's shared memory: what was copied of `stages` tiles, and of 8-bit types a tile of bfloat16 behind it.
template <DType kKv, int kHeadDim>
__host__ __device__ constexpr uint32_t StageBytes() {
  return kTileRows * (HasScales(kKv) ? KvWindowBytes<kKv>(kHeadDim) : PaddedRowBytes<kHeadDim>());
}
template <DType kKv, int kHeadDim>
__host__ __device__ constexpr uint32_t WarpBytes(int32_t stages) {
  return stages * StageBytes<kKv, kHeadDim>() +
         (HasScales(kKv) ? kTileRows * PaddedRowBytes<kHeadDim>() : 0);
}

// What a state of maximum `ends.x` and sum `ends.y` counts for beside one of maximum `max`.
__device__ __forceinline__ float KeepOf(float2 ends, float max) {
  return ends.y == 0.0f ? 0.0f : exp2f(ends.x - max);  // 0: of no rows
}

// kWarps: of a block. With fewer than kMostWarps no list has more than a tile for each of their chains.
template <DType kKv, int kHeadDim, Source kSource, bool kCluster, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kCluster&& HasScales(kKv) || kHeadDim > 128
                                                   ? 1
                                                   : 2 * kMostWarps / kWarps)
    AttendKernel(const __grid_constant__ Args args) {
  static_assert(kWarps == kMostWarps || !kCluster);
  constexpr int kThreads = 32 * kWarps;
  if constexpr (kCluster) ArriveAtParts<kParts>();
  constexpr int kRowBytes = PaddedRowBytes<kHeadDim>();
  constexpr int kSteps = kHeadDim / 16;
  constexpr int kPairs = kHeadDim / 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto part = static_cast<int32_t>(blockIdx.x % kParts);
  const auto piece =
      static_cast<int32_t>(blockIdx.x / kParts);  // of the work: a list and a set of heads
  const int32_t list_index = piece / args.head_sets, query_index = list_index / args.kv_heads;
  const int32_t kv_head = list_index % args.kv_heads;
  const int32_t first_head = piece % args.head_sets * kPackedHeads;
  const int32_t heads_here = min(args.group - first_head, kPackedHeads);
  const int64_t all_heads = int64_t{args.kv_heads} * args.group;
  const int64_t out_head = int64_t{kv_head} * args.group + first_head;

  const DeviceQuery query = args.queries[query_index];
  const int head = lane / 4, pair = lane % 4 * 2;
  const float* of_q = args.q + query.row * args.q_stride + (out_head + head) * kHeadDim + pair;
  WaitForEarlier();
  // All that follows from nothing else is asked for at once: q, how many rows, where the first lie.
  float2 q_values[kSteps][2];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = of_q + step * 16 + half * 8;
      float2& to = q_values[step][half];
      to = make_float2(0.0f, 0.0f);
      if (head >= heads_here) continue;
      to = args.q_in_pairs != 0 ? __ldcg(reinterpret_cast<const float2*>(from))
                                : make_float2(__ldcg(from), __ldcg(from + 1));
    }
  }
  const auto rows = [&] {
    if constexpr (kSource == Source::kGathered) {
      const RowList list = args.lists[list_index];
      return GatheredRows{list.rows, list.count};
    } else {
      const int32_t before = min(query.mid.first, query.position + 1);
      const int32_t after_first = max(query.mid.last, before);
      const int32_t chosen = args.chosen.counts[list_index];
      return ChosenRows<KvRowBytes<kKv>(kHeadDim)>{
          query.block_table,
          args.pool + kv_head * args.head_bytes,
          args.block_tokens,
          args.block_bytes,
          args.chosen.tokens + int64_t{list_index} * args.chosen.capacity,
          args.chosen.capacity,
          before,
          chosen,
          after_first,
          before + chosen + max(query.position + 1 - after_first, 0)};
    }
  }();
  const int32_t count = rows.count;
  if (kWarps < kMostWarps && count > kParts * kWarps * kTileRows)
    __trap();  // the caller said otherwise
  const int32_t first = (part + kParts * warp) * kTileRows;
  const auto ask = [&](int32_t tile) { return rows.Ask(tile + lane % kTileRows); };
  const auto address_of = [&](int32_t tile, auto asked) {
    return rows.Address(tile + lane % kTileRows, asked);
  };

  extern __shared__ uint4 shared4[];
  constexpr uint32_t kStageBytes = StageBytes<kKv, kHeadDim>();
  const uint32_t mine = SharedAddress(shared4) + warp * WarpBytes<kKv, kHeadDim>(args.stages);
  uint32_t offsets = 0;  // of the lane's row in each stage, four bits each
  // The tile that is started next; where its rows lie and those of the one after it, and what was asked for the
  // one after that: each load has the time of a tile.
  int32_t next = first;
  const auto first_asked = ask(next), second_asked = ask(next + kRowsPerRound);
  auto asked = ask(next + 2 * kRowsPerRound);
  uint64_t addresses[2] = {address_of(next, first_asked),
                           address_of(next + kRowsPerRound, second_asked)};
  const auto start_next = [&](int stage) {
    if (next < count) {
      const uint32_t to = mine + stage * kStageBytes;
      if constexpr (HasScales(kKv)) {
        StartCodes<kKv, kHeadDim>(addresses[0], next, count, to, lane);
        offsets = (offsets & ~(15u << 4 * stage)) | static_cast<uint32_t>(addresses[0] & 15)
                                                        << 4 * stage;
      } else {
        StartTile<kHeadDim>(addresses[0], next, count, to, lane);
      }
    }
    CommitCopies();
    addresses[0] = addresses[1];
    addresses[1] = address_of(next + 2 * kRowsPerRound, asked);
    asked = ask(next + 3 * kRowsPerRound);
    next += kRowsPerRound;
  };
  for (int stage = 0; stage < args.stages; ++stage) start_next(stage);
  WINNOW_TIMELINE_MARK("the first rows are asked for");
  // Not earlier: the next product begins with 25 MB of weights, and rows behind them in HBM's queues come late. And not before
  // WaitForEarlier, on which AnchorMasses::just_attended (transform_code.h) relies.
  LetNextStart();

  // The group's queries, scaled to base 2: high halves in rows 0 to 7, low halves in 8 to 15.
  uint32_t q_fragments[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 values = make_float2(q_values[step][half].x * args.scale_log2,
                                        q_values[step][half].y * args.scale_log2);
      const uint32_t high = PackBf16(values.x, values.y);
      q_fragments[step][half * 2] = high;
      q_fragments[step][half * 2 + 1] = PackBf16Rest(values.x, values.y, high);
    }
  }

  float sums[kHeadDim / 8][4] = {};  // o, high and low halves of the weights
  float running_max = -INFINITY, running_sum = 0.0f;
  const uint32_t key_lane = (lane % 8 + lane / 16 * 8) * kRowBytes + lane / 8 % 2 * 16;
  const uint32_t value_lane = (lane % 16) * kRowBytes + kHeadDim * 2 + lane / 16 * 16;
  int stage = 0;
  for (int32_t tile = first; tile < count; tile += kRowsPerRound) {
    if (args.stages > 1) {
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncwarp();
    uint32_t here = mine + stage * kStageBytes;
    if constexpr (HasScales(kKv)) {
      const uint32_t tile_at = mine + args.stages * kStageBytes;
      WidenTile<kKv, kHeadDim, kCluster && kHeadDim % 64 == 0 ? 8 : 4>(
          here, offsets >> 4 * stage & 15, tile_at, lane);
      here = tile_at;
      __syncwarp();
      start_next(stage);
    }
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t keys[4];
      LoadMatrix4(here + key_lane + step * 32, keys);
      MultiplyAdd16x8x16(scores[0], q_fragments[step], keys[0], keys[1]);
      MultiplyAdd16x8x16(scores[1], q_fragments[step], keys[2], keys[3]);
    }
    float weights[2][2];
    float tile_max = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[n][i] =
            tile + n * 8 + pair + i < count ? scores[n][i] + scores[n][i + 2] : -INFINITY;
        tile_max = fmaxf(tile_max, weights[n][i]);
      }
    }
    tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullMask, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullMask, tile_max, 2));
    const float new_max = fmaxf(running_max, tile_max);
    // A tile has at least one row, so new_max is finite unless scores are not.
    const float keep = new_max == running_max ? 1.0f : exp2f(running_max - new_max);
    if (__any_sync(kFullMask, keep != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= keep;
      }
    }
    running_max = new_max;
    running_sum *= keep;
    uint32_t w[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[n][i] = exp2f(weights[n][i] - new_max);
        running_sum += weights[n][i];
      }
      w[n * 2] = PackBf16(weights[n][0], weights[n][1]);
      w[n * 2 + 1] = PackBf16Rest(weights[n][0], weights[n][1], w[n * 2]);
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      uint32_t values[4];
      LoadMatrix4Transposed(here + value_lane + n * 16, values);
      MultiplyAdd16x8x16(sums[n], w, values[0], values[1]);
      MultiplyAdd16x8x16(sums[n + 1], w, values[2], values[3]);
    }
    if constexpr (!HasScales(kKv)) {
      __syncwarp();
      start_next(stage);
    }
    stage = stage + 1 == args.stages ? 0 : stage + 1;
  }
  running_sum += __shfl_xor_sync(kFullMask, running_sum, 1);
  running_sum += __shfl_xor_sync(kFullMask, running_sum, 2);
  WaitForCopies<0>();

  WINNOW_TIMELINE_MARK("its rows are attended");
  // The block's chains, brought to one maximum, go to shared memory where the tiles were.
  constexpr int kChainFloats = kHeadDim + 8;  // of a head: no bank conflicts
  __shared__ float2 chain_ends[kWarps][kPackedHeads];
  if (pair == 0) chain_ends[warp][head] = make_float2(running_max, running_sum);
  __syncthreads();
  const auto max_of = []<int kEnds>(const float2(&ends)[kEnds][kPackedHeads], int of_head) {
    float max = ends[0][of_head].x;
#pragma unroll
    for (int i = 1; i < kEnds; ++i) max = fmaxf(max, ends[i][of_head].x);
    return max;
  };
  auto* chains = reinterpret_cast<float*>(shared4);  // [kWarps][kPackedHeads][kChainFloats]
  if (head < heads_here) {
    const float keep = KeepOf(make_float2(running_max, running_sum), max_of(chain_ends, head));
    float* chain = chains + (warp * kPackedHeads + head) * kChainFloats + pair;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<float2*>(chain + n * 8) =
          make_float2((sums[n][0] + sums[n][2]) * keep, (sums[n][1] + sums[n][3]) * keep);
    }
  }
  if constexpr (kCluster) WaitForParts<kParts>();  // all have begun
  __syncthreads();

  // What the part has of each part's share of the result, and the maxima and sums of all heads.
  static_assert(kThreads >= kParts * kPackedHeads);
  __shared__ float2 received[kParts][kPackedHeads * kPairs / kParts];
  __shared__ float2 part_ends[kParts][kPackedHeads];
  __shared__ bool is_last;
  const int32_t items = heads_here * kPairs, share = items / kParts;  // pairs of channels
  float2* of_piece = args.parts + (int64_t{piece} * kParts + part) * (kPackedHeads * kPairs);
  float2* ends_of_piece = args.part_ends + (int64_t{piece} * kParts + part) * kPackedHeads;
  for (int i = threadIdx.x; i < items; i += kThreads) {
    const float* of_head = chains + i / kPairs * kChainFloats + i % kPairs * 2;
    float2 value = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 of_chain =
          *reinterpret_cast<const float2*>(of_head + w * (kPackedHeads * kChainFloats));
      value.x += of_chain.x;
      value.y += of_chain.y;
    }
    if constexpr (kCluster) {
      const int32_t owner = i / share;
      StoreTo<kParts>(&received[part][i - owner * share], owner, value);
    } else {
      of_piece[i] = value;
    }
  }
  if (threadIdx.x < kParts * kPackedHeads) {
    const int of_head = threadIdx.x % kPackedHeads;
    const float max = max_of(chain_ends, of_head);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += chain_ends[w][of_head].y * KeepOf(chain_ends[w][of_head], max);
    }
    if constexpr (kCluster) {
      StoreTo<kParts>(&part_ends[part][of_head], threadIdx.x / kPackedHeads, make_float2(max, sum));
    } else if (threadIdx.x < kPackedHeads) {
      ends_of_piece[of_head] = make_float2(max, sum);
    }
  }

  const auto put = [&](int32_t item, const float2(&ends)[kParts][kPackedHeads], auto value_of) {
    const int of_head = item / kPairs, c = item % kPairs * 2;
    const float max = max_of(ends, of_head);
    float2 value = make_float2(0.0f, 0.0f);
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const float keep = KeepOf(ends[p][of_head], max);
      const float2 of_part = value_of(p);
      value.x += of_part.x * keep;
      value.y += of_part.y * keep;
      sum += ends[p][of_head].y * keep;
    }
    if (args.output.out != nullptr) {
      float* to = args.output.out + query.row * args.output.out_stride +
                  (out_head + of_head) * kHeadDim + c;
      const bool any = sum > 0 || sum != sum;
      const float all = SumWithSink(sum, max, args.output.sinks, out_head + of_head);
      to[0] = any ? value.x / all : 0.0f;
      to[1] = any ? value.y / all : 0.0f;
      return;
    }
    float* state =
        args.output.states + (query_index * all_heads + out_head + of_head) * (kHeadDim + 2);
    state[c] = value.x;
    state[c + 1] = value.y;
    if (c == 0) {
      state[kHeadDim] = max;
      state[kHeadDim + 1] = sum;
    }
  };
  if constexpr (kCluster) {
    MeetParts<kParts>();
    WINNOW_TIMELINE_MARK("parts have met");
    for (int i = threadIdx.x; i < share; i += kThreads) {
      put(part * share + i, part_ends, [&](int p) { return received[p][i]; });
    }
    return;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(&args.tickets[piece], kParts - 1) == kParts - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x < kParts * kPackedHeads) {
    part_ends[threadIdx.x / kPackedHeads][threadIdx.x % kPackedHeads] =
        __ldcg(args.part_ends + int64_t{piece} * kParts * kPackedHeads + threadIdx.x);
  }
  __syncthreads();
  const float2* all = args.parts + int64_t{piece} * kParts * (kPackedHeads * kPairs);
  for (int i = threadIdx.x; i < items; i += kThreads) {
    put(i, part_ends, [&](int p) { return __ldcg(all + p * (kPackedHeads * kPairs) + i); });
  }
}

__global__ void FinishStatesKernel(const float* states, const DeviceQuery* queries,
                                   int32_t head_dim, const float* sinks, float* out,
                                   int64_t out_stride) {
  LetNextStart();
  WaitForEarlier();
  const int64_t heads = gridDim.x, query = blockIdx.y, head = blockIdx.x;
  const float* state = states + (query * heads + head) * (head_dim + 2);
  float* to = out + queries[query].row * out_stride + head * head_dim;
  for (int c = threadIdx.x; c < head_dim; c += blockDim.x) {
    to[c] = AttentionOf({state[c], state[head_dim], state[head_dim + 1]}, sinks,
                        static_cast<int32_t>(head));
  }
}

__global__ void StateMassesKernel(const float* states, int64_t count, int32_t head_dim,
                                  float* masses) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  masses[i] = MassOf(states, i, head_dim);
}

// Offsets in the workspace.
struct Plan {
  size_t part_ends, tickets, size_bytes;
};
Plan MakePlan(const RowAttentionShape& shape) {
  const size_t pieces = size_t{1} * shape.num_queries * shape.layout.kv_heads *
                        static_cast<size_t>(CeilDiv(shape.group, kPackedHeads));
  const size_t heads = pieces * kParts * kPackedHeads;
  Plan plan;
  plan.part_ends = AlignUp(heads * 4 * shape.layout.head_dim, 256);
  plan.tickets = plan.part_ends + AlignUp(heads * sizeof(float2), 256);
  plan.size_bytes = plan.tickets + AlignUp(pieces * 4, 256);
  return plan;
}

// Warps of a block for lists of so many rows, where there are many of them.
int WarpsFor(int32_t max_rows) {
  for (const int warps : {2, 4}) {
    if (max_rows > 0 && max_rows <= kParts * warps * kTileRows) return warps;
  }
  return kMostWarps;
}

template <DType kKv, int kHeadDim, Source kSource>
cudaError_t LaunchOf(unsigned pieces, const Args& args, bool cluster, int warps, Stream stream) {
  const size_t warp_bytes = WarpBytes<kKv, kHeadDim>(args.stages);
  static_assert(size_t{kTileRows} * PaddedRowBytes<kHeadDim>() >=
                size_t{4} * kPackedHeads * (kHeadDim + 8));  // chains
  if (cluster) {
    return LaunchClusters(AttendKernel<kKv, kHeadDim, kSource, true, kMostWarps>, pieces, kParts,
                          32 * kMostWarps, kMostWarps * warp_bytes, stream, args);
  }
  const auto kernel = warps == 2   ? AttendKernel<kKv, kHeadDim, kSource, false, 2>
                      : warps == 4 ? AttendKernel<kKv, kHeadDim, kSource, false, 4>
                                   : AttendKernel<kKv, kHeadDim, kSource, false, kMostWarps>;
  return Launch(kernel, pieces * kParts, 32 * warps, warps * warp_bytes, stream, false, args);
}

template <Source kSource>
cudaError_t Attend(const RowAttentionShape& shape, const float* q, int64_t q_stride,
                   const DeviceQuery* queries, const RowList* lists, const Selection& chosen,
                   const void* pool, float scale, const AttentionOutput& output, void* workspace,
                   Stream stream) {
  const KvLayout& layout = shape.layout;
  if (!HasKvRows(layout) || shape.group < 1 || layout.kv_heads < 1 || shape.num_queries < 0 ||
      (output.states == nullptr) == (output.out == nullptr)) {
    return cudaErrorInvalidValue;
  }
  const int64_t num_lists = int64_t{shape.num_queries} * layout.kv_heads;
  const auto head_sets = static_cast<int32_t>(CeilDiv(shape.group, kPackedHeads));
  if (num_lists * head_sets * kParts > 0x7fffffff) return cudaErrorInvalidValue;
  if (num_lists == 0) return cudaSuccess;
  auto* memory = static_cast<std::byte*>(workspace);
  const Plan plan = MakePlan(shape);
  const Args args{q,
                  q_stride,
                  queries,
                  lists,
                  chosen,
                  static_cast<const uint8_t*>(pool),
                  FastDivider(layout.block_tokens),
                  static_cast<int64_t>(layout.BlockBytes()),
                  static_cast<int64_t>(layout.HeadBytes()),
                  layout.kv_heads,
                  shape.group,
                  head_sets,
                  num_lists <= kFewLists && layout.head_dim <= 128 ? 2 : 1,
                  q_stride % 2 == 0 && reinterpret_cast<uintptr_t>(q) % 8 == 0 ? 1 : 0,
                  scale * kLog2E,
                  output,
                  reinterpret_cast<float2*>(memory),
                  reinterpret_cast<float2*>(memory + plan.part_ends),
                  reinterpret_cast<uint32_t*>(memory + plan.tickets)};
  const auto pieces = static_cast<unsigned>(num_lists * head_sets);
  const bool cluster = num_lists <= kFewLists && !shape.portable && CurrentDevice().hopper;
  const int warps = num_lists <= kFewLists ? kMostWarps : WarpsFor(shape.max_rows);
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    switch (layout.head_dim) {
      case 64:
        return LaunchOf<kKv, 64, kSource>(pieces, args, cluster, warps, stream);
      case 80:
        return LaunchOf<kKv, 80, kSource>(pieces, args, cluster, warps, stream);
      case 96:
        return LaunchOf<kKv, 96, kSource>(pieces, args, cluster, warps, stream);
      case 128:
        return LaunchOf<kKv, 128, kSource>(pieces, args, cluster, warps, stream);
      case 256:
        if constexpr (!HasScales(kKv)) {
          return LaunchOf<kKv, 256, kSource>(pieces, args, cluster, warps, stream);
        }
        return cudaErrorInvalidValue;
      default:
        return cudaErrorInvalidValue;
    }
  });
}

}  // namespace

size_t RowAttentionWorkspaceBytes(const RowAttentionShape& shape) {
  return MakePlan(shape).size_bytes;
}
ZeroedPart RowAttentionZeroedPart(const RowAttentionShape& shape) {
  const Plan plan = MakePlan(shape);
  return {plan.tickets, plan.size_bytes - plan.tickets};
}

cudaError_t AttendRows(const RowAttentionShape& shape, const float* q, int64_t q_stride,
                       const DeviceQuery* queries, const RowList* lists, float scale,
                       const AttentionOutput& output, void* workspace, Stream stream) {
  return Attend<Source::kGathered>(shape, q, q_stride, queries, lists, {}, nullptr, scale, output,
                                   workspace, stream);
}

cudaError_t AttendChosen(const RowAttentionShape& shape, const float* q, int64_t q_stride,
                         const DeviceQuery* queries, const Selection& chosen, const void* pool,
                         float scale, const AttentionOutput& output, void* workspace,
                         Stream stream) {
  if (chosen.kv_heads != shape.layout.kv_heads || chosen.capacity < 1) return cudaErrorInvalidValue;
  return Attend<Source::kChosen>(shape, q, q_stride, queries, nullptr, chosen, pool, scale, output,
                                 workspace, stream);
}

cudaError_t StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses,
                        Stream stream) {
  if (count == 0) return cudaSuccess;
  return LaunchBehind(StateMassesKernel, dim3(static_cast<unsigned>(CeilDiv(count, 128))), 128, 0,
                      stream, states, count, head_dim, masses);
}

cudaError_t FinishStates(const float* states, const DeviceQuery* queries, int32_t num_queries,
                         int32_t heads, int32_t head_dim, const float* sinks, float* out,
                         int64_t out_stride, Stream stream) {
  if (num_queries == 0) return cudaSuccess;
  return Launch(FinishStatesKernel, dim3(heads, num_queries), 128, 0, stream, false, states,
                queries, head_dim, sinks, out, out_stride);
}

}  // namespace winnow::kernels::cuda

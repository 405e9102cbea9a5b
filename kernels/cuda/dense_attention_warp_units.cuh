// The parts of dense_attention_splits_warp.cu, which alone includes it: the units of keys and values that a block of one warp
// takes, how they come to shared memory, and what the warp makes of one.
#ifndef WINNOW_KERNELS_CUDA_DENSE_ATTENTION_WARP_UNITS_CUH_
#define WINNOW_KERNELS_CUDA_DENSE_ATTENTION_WARP_UNITS_CUH_

#include "kernels/cuda/dense_attention_splits.cuh"
#include "kernels/cuda/read_once.cuh"

namespace winnow::kernels::cuda::dense {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A unit of a chunk's KV head, in the order in which blocks share them out: chunk by chunk, head by head.
class UnitCursor {
 public:
  DeviceChunk chunk;
  int32_t index, kv_head = 0, unit = 0, units;  // `index`: the chunk's

  // At a chunk's first unit.
  __device__ UnitCursor(const Args& args, int32_t index) : index(index) { Load(args); }
  __device__ int32_t visible() const { return chunk.position + chunk.num_tokens; }
  // To the next one, which exists.
  __device__ void Advance(const Args& args) {
    if (++unit < units) return;
    unit = 0;
    if (++kv_head < args.kv_heads) return;
    kv_head = 0;
    do {
      ++index;
      Load(args);
    } while (units == 0);
  }

  static __device__ int32_t UnitsOf(const DeviceChunk& chunk) {
    return chunk.num_tokens == 0 ? 0 : DenseUnits(chunk.position + chunk.num_tokens);
  }

 private:
  __device__ void Load(const Args& args) {
    chunk = args.chunks[index];
    units = UnitsOf(chunk);
  }
};

// A block's part of all units: `count` of them, from `first` on.
struct UnitShare {
  UnitCursor first;
  int32_t count;
};
// All lanes have the same.
__device__ __forceinline__ UnitShare ShareOfBlock(const Args& args) {
  const int lane = threadIdx.x % kLanes;
  const auto units_of = [&](int32_t index) -> int64_t {
    return index < args.num_chunks
               ? int64_t{args.kv_heads} * UnitCursor::UnitsOf(args.chunks[index])
               : 0;
  };
  int64_t all = 0;
  for (int32_t i = lane; i < args.num_chunks; i += kLanes) all += units_of(i);
  all = WarpSum(all);
  const int64_t ends[2] = {all * blockIdx.x / gridDim.x, all * (blockIdx.x + 1) / gridDim.x};
  int64_t moved[2] = {ends[0], ends[1]};
  UnitShare share = {UnitCursor(args, 0), 0};
  int64_t before = 0;
  for (int32_t first = 0; first < args.num_chunks && before < ends[1]; first += kLanes) {
    const int64_t mine = units_of(first + lane);
    const int64_t end = before + WarpInclusiveScan(mine, lane);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      // The chunk that has the unit, if it is one of these.
      const unsigned here =
          __ballot_sync(kFullMask, ends[which] >= end - mine && ends[which] < end);
      if (here == 0) continue;
      const int source = __ffs(static_cast<int>(here)) - 1;
      UnitCursor cursor(args, first + source);
      const auto in_chunk =
          static_cast<int32_t>(ends[which] - __shfl_sync(kFullMask, end - mine, source));
      cursor.kv_head = in_chunk / cursor.units;
      cursor.unit = in_chunk - cursor.kv_head * cursor.units;
      // On to where a split begins, at the latest the next head's first.
      const int32_t to = min(NextDenseSplit(cursor.unit), cursor.units);
      moved[which] += to - cursor.unit;
      if (which == 0) {
        share.first = cursor;
        if (to > cursor.unit) {
          share.first.unit = to - 1;
          if (moved[0] < all) share.first.Advance(args);
        }
      }
    }
    before = __shfl_sync(kFullMask, end, kLanes - 1);
  }
  share.count = static_cast<int32_t>(moved[1] - moved[0]);
  return share;
}

#endif

// Matrices are loaded so many steps ahead of the instructions that take them: the warp has nothing else to do meanwhile.
inline constexpr int kLoadsAhead = 2;

// Units of a KV type: how they are copied and lie, and products with them. Keys are the left side of the first product,
// values, transposed, that of the second.
//
//   kParts, kStages    pieces of a unit that are copied and given back by themselves, keys' first; and those on their way
//   QueryChannel(...)  the channel that q's pair `half` of a step begins with, of row lane / 4
//   SumChannel(...)    that of o[n][2 * half + {0, 1}], of rows lane % 4 * 2 + {0, 1}
//   Score(...)         scores += keys q
//   AddValues(...)     o += values weights; tokens from `seen` on weigh nothing, whatever lies there
//
// Bfloat16, in tiles of a tensor map: matrix loads make the left sides.
template <int kDim>
struct PlainUnits {
  static constexpr int kHeadDim = kDim;
  using Source = CUtensorMap;
  using Rows = SwizzledRows<kHeadDim>;
  static constexpr int kParts = 2, kSteps = kHeadDim / 16;
  static constexpr uint32_t kPartBytes = Rows::kUnitBytes / kParts;
  static constexpr uint32_t kAlignment = Rows::kStageAlignment;
  static constexpr int kStages = kHeadDim == 128 ? 3 : 6;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ int QueryChannel(int step, int half, int lane) {
    return step * 16 + half * 8 + lane % 4 * 2;
  }
  static __device__ __forceinline__ int SumChannel(int n, int half, int lane) {
    return n * 16 + half * 8 + lane / 4;
  }

  static __device__ __forceinline__ void StartCopy(const Args& args, const CUtensorMap& map,
                                                   int32_t block, int32_t kv_head, int32_t token,
                                                   int part, uint32_t to, uint32_t barrier,
                                                   uint64_t policy) {
    constexpr int kTiles = Rows::kTensorTiles / kParts;
    const auto rows_of = [](int64_t bytes) { return static_cast<int32_t>(bytes / (4 * kHeadDim)); };
    const int32_t row =
        block * rows_of(args.block_bytes) + kv_head * rows_of(args.head_bytes) + token;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      BulkCopyTile(to + i * Rows::kTensorTileBytes, &map, (part * kTiles + i) * Rows::kTileChannels,
                   row, barrier, policy);
    }
  }

  static __device__ __forceinline__ void Score(uint32_t keys, const uint32_t (&q)[kSteps][2],
                                               float (&scores)[kUnitTiles][4]) {
    const uint32_t at = Rows::DownFirst(keys, threadIdx.x % kLanes);
    uint32_t left[kLoadsAhead + 1][kUnitTiles][4];
    const auto load = [&](int step) {
#pragma unroll
      for (int t = 0; t < kUnitTiles; ++t) {
        LoadMatrix4(Rows::Channels(at, step) + t * Rows::kTileBytes,
                    left[step % (kLoadsAhead + 1)][t]);
      }
    };
#pragma unroll
    for (int step = 0; step < kLoadsAhead; ++step) load(step);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + kLoadsAhead < kSteps) load(step + kLoadsAhead);
#pragma unroll
      for (int t = 0; t < kUnitTiles; ++t) {
        MultiplyAdd16x8x16(scores[t], left[step % (kLoadsAhead + 1)][t], q[step][0], q[step][1]);
      }
    }
  }

  static __device__ __forceinline__ void AddValues(uint32_t values, int32_t seen,
                                                   const uint32_t (&weights)[kUnitTiles][2],
                                                   float (&o)[kSteps][4]) {
    if (seen < kDenseUnitTokens) {  // weights of zero take what lies there, too
      constexpr int kPieces = kTensorTileRowBytes / 16;
      for (int i = seen * kPieces + static_cast<int>(threadIdx.x); i < kDenseUnitTokens * kPieces;
           i += kLanes) {
#pragma unroll
        for (int tile = 0; tile < Rows::kTensorTiles / 2; ++tile) {
          ClearShared16(values + tile * Rows::kTensorTileBytes + i * 16);
        }
      }
      FenceSharedWrites();  // another part comes there
      __syncwarp();
    }
    constexpr int kAtOnce = 4, kLoads = kUnitTiles * kSteps / kAtOnce;
    const uint32_t at = Rows::AlongFirst(values, threadIdx.x % kLanes);
    uint32_t left[kLoadsAhead + 1][kAtOnce][4];
    const auto load = [&](int i) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int t = i * kAtOnce / kSteps, n = i * kAtOnce % kSteps + j;
        LoadMatrix4Transposed(Rows::Channels(at, n) + t * Rows::kTileBytes,
                              left[i % (kLoadsAhead + 1)][j]);
      }
    };
#pragma unroll
    for (int i = 0; i < kLoadsAhead; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (i + kLoadsAhead < kLoads) load(i + kLoadsAhead);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int t = i * kAtOnce / kSteps, n = i * kAtOnce % kSteps + j;
        MultiplyAdd16x8x16(o[n], left[i % (kLoadsAhead + 1)][j], weights[t][0], weights[t][1]);
      }
    }
  }
#endif
};

// 8-bit types, a unit's rows one behind the other: codes become left sides in registers. A word is four channels of a token,
// which a step takes in another order than they lie in, within 16 channels; a matrix instruction adds its 16 products at
// once, so their order is nobody's business. Of two tokens' words four pairs of values are made, one for each channel.
template <DType kKv, int kDim>
struct CodeUnits {
  static constexpr int kHeadDim = kDim;
  struct Source {
    int32_t unused = 0;
  };
  using Codes = CodeRows<kKv, kHeadDim>;
  static constexpr int kParts = 1, kSteps = kHeadDim / 16, kRowBytes = Codes::kRowBytes;
  static constexpr uint32_t kPartBytes = Codes::kUnitBytes;
  static constexpr uint32_t kAlignment = 16;
  static constexpr int kStages = 1;  // making values takes warps, more of which have room so

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ int QueryChannel(int step, int half, int lane) {
    return step * 16 + lane % 4 * 4 + half * 2;
  }
  static __device__ __forceinline__ int SumChannel(int n, int half, int lane) {
    return n / 2 * 32 + lane / 4 * 4 + n % 2 * 2 + half;
  }

  static __device__ __forceinline__ void StartCopy(const Args& args, const Source&, int32_t block,
                                                   int32_t kv_head, int32_t token, int /*part*/,
                                                   uint32_t to, uint32_t barrier, uint64_t policy) {
    BulkCopy(to,
             args.pool + block * args.block_bytes + kv_head * args.head_bytes +
                 int64_t{token} * kRowBytes,
             kPartBytes, barrier, policy);
  }

  static __device__ __forceinline__ void Score(uint32_t unit, const uint32_t (&q)[kSteps][2],
                                               float (&scores)[kUnitTiles][4]) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
      const uint32_t rows[2] = {unit + (t * 16 + lane / 4) * kRowBytes,
                                unit + (t * 16 + 8 + lane / 4) * kRowBytes};
      const uint32_t scales[2] = {TwiceScale<kKv>(LoadShared(rows[0] + 2 * kHeadDim), false),
                                  TwiceScale<kKv>(LoadShared(rows[1] + 2 * kHeadDim), false)};
      uint32_t codes[kSteps][2];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int r = 0; r < 2; ++r) codes[step][r] = LoadShared(rows[r] + step * 16 + lane % 4 * 4);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint2 upper = PairsOf<kKv>(codes[step][0], scales[0]);
        const uint2 lower = PairsOf<kKv>(codes[step][1], scales[1]);
        MultiplyAdd16x8x16(scores[t], {upper.x, lower.x, upper.y, lower.y}, q[step][0], q[step][1]);
      }
    }
  }

  static __device__ __forceinline__ void AddValues(uint32_t unit, int32_t seen,
                                                   const uint32_t (&weights)[kUnitTiles][2],
                                                   float (&o)[kSteps][4]) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
      uint32_t rows[4], scales[2];  // of tokens lane % 4 * 2 + {0, 1}, and eight more
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t of_rows[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int token = t * 16 + half * 8 + lane % 4 * 2 + i;
          rows[2 * half + i] = unit + token * kRowBytes + lane / 4 * 4 + kHeadDim;
          of_rows[i] = token < seen ? LoadShared(unit + token * kRowBytes + 2 * kHeadDim) : 0;
        }
        scales[half] = PairScales<kKv>(__byte_perm(of_rows[0], of_rows[1], 0x7632));
      }
      uint32_t codes[kSteps / 2][4];
#pragma unroll
      for (int g = 0; g < kSteps / 2; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[g][i] = LoadShared(rows[i] + g * 32);
      }
#pragma unroll
      for (int g = 0; g < kSteps / 2; ++g) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int which = j == 0 ? 0x5140 : 0x7362;
          const uint2 upper = PairsOf<kKv>(__byte_perm(codes[g][0], codes[g][1], which), scales[0]);
          const uint2 lower = PairsOf<kKv>(__byte_perm(codes[g][2], codes[g][3], which), scales[1]);
          MultiplyAdd16x8x16(o[2 * g + j], {upper.x, upper.y, lower.x, lower.y}, weights[t][0],
                             weights[t][1]);
        }
      }
    }
  }
#endif
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Parts of a block's units come to shared memory, the next as soon as a place is free. Called by all lanes of the warp, which
// is alone in its block.
template <typename Units>
class UnitRing {
 public:
  __device__ UnitRing(const Args& args, const typename Units::Source& source,
                      const UnitShare& share, uint32_t shared)
      : args_(args),
        source_(source),
        next_(share.first),
        left_(Units::kParts * share.count),
        shared_((shared + Units::kAlignment - 1) / Units::kAlignment * Units::kAlignment) {
    __shared__ alignas(8) uint64_t barriers[Units::kStages];
    barriers_ = SharedAddress(barriers);
    InitBarriers<Units::kStages>(barriers_);
    read_once_ = ReadOnce();
    Look();
  }

  __device__ void Begin() {
    for (int i = 0; i < Units::kStages && left_ > 0; ++i) Start(i);
  }
  // The place of the next part, once it is there.
  __device__ uint32_t Part() const {
    WaitForPhase(barriers_ + stage_ * 8, parity_);
    return shared_ + stage_ * Units::kPartBytes;
  }
  // All lanes have read it: another one may come there.
  __device__ void PartIsRead() {
    __syncwarp();
    if (left_ > 0) Start(stage_);
    if (++stage_ == Units::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  // Asks for the place of the next unit's block, which Start() waits for.
  __device__ void Look() {
    const int32_t token = next_.unit * kDenseUnitTokens, block = args_.block_tokens.Divide(token);
    token_of_block_ = token - block * args_.block_tokens.divisor();
    block_ = next_.chunk.block_table[block];
  }
  __device__ void Start(int stage) {
    if (threadIdx.x == 0) {
      const uint32_t barrier = barriers_ + stage * 8;
      ArriveExpecting(barrier, Units::kPartBytes);
      Units::StartCopy(args_, source_, block_, next_.kv_head, token_of_block_,
                       left_ % Units::kParts == 0 ? 0 : 1, shared_ + stage * Units::kPartBytes,
                       barrier, read_once_);
    }
    if (--left_ % Units::kParts != 0 || left_ == 0) return;
    next_.Advance(args_);
    Look();
  }

  const Args& args_;
  const typename Units::Source& source_;
  UnitCursor next_;
  int32_t left_, block_ = 0, token_of_block_ = 0;  // left: parts
  uint64_t read_once_;
  uint32_t shared_, barriers_;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

#endif

}  // namespace winnow::kernels::cuda::dense

#endif  // WINNOW_KERNELS_CUDA_DENSE_ATTENTION_WARP_UNITS_CUH_

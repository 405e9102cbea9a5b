// Shared by the kernels of dense attention that take splits side by side: how units of keys and values come to shared memory
// and lie there, and the launch. No one else includes it.
//
//   dense_attention.cu               16 rows, or up to 64 by matrix instructions of a warp
//   dense_attention_splits_warp.cu   up to eight rows, a warp alone
//   dense_attention_splits_wgmma.cu  up to 64 rows by matrix instructions of a warpgroup
#ifndef WINNOW_KERNELS_CUDA_DENSE_ATTENTION_SPLITS_CUH_
#define WINNOW_KERNELS_CUDA_DENSE_ATTENTION_SPLITS_CUH_

#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/dense_attention.h"
#include "kernels/cuda/dense_attention_parts.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace winnow::kernels::cuda::dense {

// How a unit's rows, keys and values beside each other, lie in shared memory: so that the eight rows that a matrix load
// reads 16 bytes of lie in different banks. A lane's address is made once and moved to other tokens and channels.
//
// With 16 bytes between them.
template <int kHeadDim>
struct PaddedRows {
  static constexpr int kRowBytes = 4 * kHeadDim + 16;
  static constexpr uint32_t kUnitBytes = kDenseUnitTokens * kRowBytes;
  static constexpr uint32_t kTileBytes = 16 * kRowBytes;  // of 16 tokens
  static constexpr size_t kStageAlignment = 16;

  // Address of channels 4 * word to 4 * word + 3 of a unit's row.
  static __device__ __forceinline__ uint32_t WordAt(int row, bool is_value, int word) {
    return row * kRowBytes + (is_value ? 2 * kHeadDim : 0) + word * 8;
  }

  // Where a lane reads keys and values of a unit, from token 0 and channel 0 on.
  static __device__ __forceinline__ uint32_t KeysAt(uint32_t unit, int lane) {
    return unit + (lane % 8 + lane / 16 * 8) * kRowBytes + lane / 8 % 2 * 16;
  }
  static __device__ __forceinline__ uint32_t ValuesAt(uint32_t unit, int lane) {
    return unit + lane % 16 * kRowBytes + kHeadDim * 2 + lane / 16 * 16;
  }
  // From channel 16 * i on.
  static __device__ __forceinline__ uint32_t Channels(uint32_t at, int i) { return at + i * 32; }
};
// As a tensor map's tiles of 64 channels (tensor_map.h), keys' first, which is how matrix instructions of a warpgroup read
// them (wgmma.cuh).
template <int kHeadDim>
struct SwizzledRows {
  static constexpr int kTileChannels = kTensorTileRowBytes / 2;
  static constexpr uint32_t kTensorTileBytes = kDenseUnitTokens * kTensorTileRowBytes;
  static constexpr int kTensorTiles = 2 * kHeadDim / kTileChannels;
  static constexpr uint32_t kUnitBytes = kTensorTiles * kTensorTileBytes;
  static constexpr uint32_t kTileBytes = 16 * kTensorTileRowBytes;
  static constexpr size_t kStageAlignment = kTensorSwizzleRows * kTensorTileRowBytes;

  static __device__ __forceinline__ uint32_t WordAt(int row, bool is_value, int word) {
    return (is_value ? kUnitBytes / 2 : 0) + word / 16 * kTensorTileBytes +
           row * kTensorTileRowBytes + (word / 2 % 8 ^ row % kTensorSwizzleRows) * 16 +
           word % 2 * 8;
  }

  // The address that a lane gives to a load of four matrices of 8 tokens by 8 channels, from token 0 and channel 0 of keys or
  // values on: the second lies down the tokens from the first, or along the channels.
  static __device__ __forceinline__ uint32_t DownFirst(uint32_t half, int lane) {
    return half + lane % 16 * kTensorTileRowBytes + (lane / 16 ^ lane % kTensorSwizzleRows) * 16;
  }
  static __device__ __forceinline__ uint32_t AlongFirst(uint32_t half, int lane) {
    return half + (lane % 8 + lane / 16 * 8) * kTensorTileRowBytes +
           (lane / 8 % 2 ^ lane % kTensorSwizzleRows) * 16;
  }
  static __device__ __forceinline__ uint32_t KeysAt(uint32_t unit, int lane) {
    return AlongFirst(unit, lane);
  }
  static __device__ __forceinline__ uint32_t ValuesAt(uint32_t unit, int lane) {
    return DownFirst(unit + kUnitBytes / 2, lane);
  }
  static __device__ __forceinline__ uint32_t Channels(uint32_t at, int i) {
    return (at ^ i % (kTileChannels / 16) * 32) + i / (kTileChannels / 16) * kTensorTileBytes;
  }
};
template <typename Rows>
constexpr size_t SharedBytes() {
  return 2 * size_t{Rows::kUnitBytes} + (Rows::kStageAlignment - 16);
}

// Starts copying them; those that are not there become zeros.
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void CopyRows(const UnitRows<kHeadDim, kWarps>& rows, int32_t visible,
                                         uint32_t shared) {
  constexpr int kRows = UnitRows<kHeadDim, kWarps>::kRows;
  constexpr int kPieces = kHeadDim / 4;  // of 16 bytes in a row
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kLanes; ++i) {
    const int index = i * kLanes + lane;
    const int row = index / kPieces, piece = index % kPieces;
    const uint64_t from =
        __shfl_sync(kFullMask, rows.held[rows.kHeld == 1 ? 0 : i / kPieces], row % kLanes);
    CopyAsync16(shared + (warp * kRows + row) * PaddedRows<kHeadDim>::kRowBytes + piece * 16,
                reinterpret_cast<const uint8_t*>(from) + piece * 16, rows.first + row < visible);
  }
}
template <int kHeadDim, int kWarps>
__device__ __forceinline__ void StartUnit(const Args& args, const int32_t* table,
                                          const uint8_t* head, int32_t unit, int32_t visible,
                                          uint32_t shared) {
  CopyRows(UnitRows<kHeadDim, kWarps>(args, table, head, unit, visible), visible, shared);
}

// Once all threads have met, matrix instructions of a warpgroup may read from shared memory what they wrote.
__device__ __forceinline__ void FenceForGroups() {
#ifdef WINNOW_WGMMA
  FenceSharedWrites();
#endif
}

// The place of a unit's first token. Asked for a unit before its copy, which so need not wait for the table.
__device__ __forceinline__ TokenPlace PlaceOfUnit(const Args& args, const int32_t* table,
                                                  int32_t unit) {
  return PlaceOfToken(args, table, unit * kDenseUnitTokens);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Barriers of copies, 8 bytes each; called by all threads of a block.
template <int kCount>
__device__ __forceinline__ void InitBarriers(uint32_t barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kCount; ++i) InitBarrier(barriers + 8 * i);
    FenceBarriers();
  }
  __syncthreads();
}
#endif

// Units come to shared memory, the next while one is used. Begin() once, behind WaitForEarlier(), then for each unit
// Next(), between which all threads meet when they have used what it gave. 16 bytes a thread:
template <int kHeadDim>
class PaddedRing {
 public:
  using Rows = PaddedRows<kHeadDim>;
  static constexpr int kRowBytes = 4 * kHeadDim;
  static constexpr size_t kSharedBytes = SharedBytes<Rows>();
  struct Source {
    int32_t unused = 0;
  };

  __device__ PaddedRing(const Args& args, const Source&, const int32_t* table, int32_t kv_head,
                        int32_t visible, uint32_t shared)
      : args_(args),
        table_(table),
        head_(args.pool + kv_head * args.head_bytes),
        visible_(visible),
        shared_(shared) {}

  __device__ void Begin(int32_t first, int32_t /*units*/) {
    first_ = first;
    CopyRows(Of(first), visible_, shared_);
    CommitCopies();
    next_ = Of(first + 1);
  }
  // The place of `unit` in shared memory.
  __device__ uint32_t Next(int32_t unit, int32_t units) {
    if (unit + 1 < units) {
      CopyRows(next_, visible_, Stage(unit + 1));
      next_ = Of(unit + 2);  // so that its copy need not wait for the table
    }
    CommitCopies();
    WaitForCopies<1>();
    __syncthreads();
    return Stage(unit);
  }

 private:
  using Addresses = UnitRows<kHeadDim, kSplitWarps>;
  __device__ Addresses Of(int32_t unit) const {
    return Addresses(args_, table_, head_, unit, visible_);
  }
  __device__ uint32_t Stage(int32_t unit) const {
    return shared_ + (unit - first_) % 2 * Rows::kUnitBytes;
  }

  const Args& args_;
  const int32_t* table_;
  const uint8_t* head_;
  int32_t visible_, first_ = 0;
  uint32_t shared_;
  Addresses next_;
};

// By the copy engine, in tiles of a tensor map of all rows there are from the pool on: whole units, so a block of the
// pool has a multiple of their tokens. Places of rows are 32 bits: 512 GiB of a layer's KV with d 64.
template <int kHeadDim, int kStages = 2>
class SwizzledRing {
 public:
  using Rows = SwizzledRows<kHeadDim>;
  static constexpr int kRowBytes = 4 * kHeadDim;
  static constexpr size_t kSharedBytes =
      kStages * size_t{Rows::kUnitBytes} + (Rows::kStageAlignment - 16);
  using Source = CUtensorMap;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ SwizzledRing(const Args& args, const Source& map, const int32_t* table,
                          int32_t kv_head, int32_t visible, uint32_t shared)
      : args_(args),
        map_(map),
        table_(table),
        head_row_(static_cast<int32_t>(kv_head * args.head_bytes / kRowBytes)),
        block_rows_(static_cast<int32_t>(args.block_bytes / kRowBytes)),
        visible_(visible),
        shared_((shared + Rows::kStageAlignment - 1) / Rows::kStageAlignment *
                Rows::kStageAlignment) {
    __shared__ alignas(8) uint64_t barriers[kStages];
    barriers_ = SharedAddress(barriers);
    InitBarriers<kStages>(barriers_);
  }

  __device__ void Begin(int32_t first, int32_t units) {
    first_ = first;
    if (threadIdx.x != 0) return;
    next_ = PlaceOfUnit(args_, table_, first);
    for (int32_t i = 0; i < kStages - 1 && first + i < units; ++i) Start(first + i, units);
  }
  __device__ uint32_t Next(int32_t unit, int32_t units) {
    constexpr int32_t kAhead = kStages - 1;
    if (threadIdx.x == 0 && unit + kAhead < units) Start(unit + kAhead, units);
    const uint32_t stage = Stage(unit);
    WaitForPhase(BarrierOf(unit), static_cast<uint32_t>(unit - first_) / kStages % 2);
    const int32_t seen = visible_ - unit * kDenseUnitTokens;
    if (seen < kDenseUnitTokens) ClearValues(stage, seen);
    return stage;
  }

 private:
  __device__ uint32_t Stage(int32_t unit) const {
    return shared_ + (unit - first_) % kStages * Rows::kUnitBytes;
  }
  __device__ uint32_t BarrierOf(int32_t unit) const {
    return barriers_ + (unit - first_) % kStages * 8;
  }
  __device__ void Start(int32_t unit, int32_t units) {
    const uint32_t to = Stage(unit), barrier = BarrierOf(unit);
    const int32_t row = next_.block * block_rows_ + head_row_ + next_.row;
    ArriveExpecting(barrier, Rows::kUnitBytes);
#pragma unroll
    for (int i = 0; i < Rows::kTensorTiles; ++i) {
      BulkCopyTile(to + i * Rows::kTensorTileBytes, &map_, i * Rows::kTileChannels, row, barrier);
    }
    if (unit + 1 < units) next_ = PlaceOfUnit(args_, table_, unit + 1);
  }
  // Values of tokens from `seen` on may be anything, and weights of zero take them too.
  __device__ void ClearValues(uint32_t stage, int32_t seen) const {
    constexpr int kPieces = kTensorTileRowBytes / 16;
    for (int i = threadIdx.x; i < (kDenseUnitTokens - seen) * kPieces; i += kSplitWarps * kLanes) {
#pragma unroll
      for (int tile = Rows::kTensorTiles / 2; tile < Rows::kTensorTiles; ++tile) {
        ClearShared16(stage + tile * Rows::kTensorTileBytes + seen * kTensorTileRowBytes + i * 16);
      }
    }
    FenceForGroups();
    __syncthreads();
  }

  const Args& args_;
  const Source& map_;
  const int32_t* table_;
  int32_t head_row_, block_rows_, visible_, first_ = 0;
  TokenPlace next_;
  uint32_t shared_, barriers_;
#else  // never launched there
  __device__ SwizzledRing(const Args&, const Source&, const int32_t*, int32_t, int32_t, uint32_t) {}
  __device__ void Begin(int32_t, int32_t) {}
  __device__ uint32_t Next(int32_t, int32_t) { return 0; }
#endif
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One thread starts copying the unit of codes that lies at `place` of a head, in one piece; `barrier` hears of it.
template <typename Codes>
__device__ __forceinline__ void StartUnitOfCodes(const Args& args, const uint8_t* head,
                                                 TokenPlace place, uint32_t to, uint32_t barrier) {
  ArriveExpecting(barrier, Codes::kUnitBytes);
  BulkCopy(to, RowAt(args, head, place, Codes::kRowBytes), Codes::kUnitBytes, barrier);
}
#endif

// For 8-bit types: codes come to shared memory, two units of them, and become the rows of bfloat16 of one unit there,
// which all threads make when they meet. kBulk: by the copy engine, where a unit lies in one piece.
template <DType kKv, int kHeadDim, int kThreads, bool kBulk>
class CodesRing {
 public:
  using Rows = PaddedRows<kHeadDim>;
  using Codes = CodeRows<kKv, kHeadDim>;
  struct Source {
    int32_t unused = 0;
  };
  static constexpr int kRowBytes = Codes::kRowBytes;
  static constexpr size_t kSharedBytes = 2 * size_t{Codes::kUnitBytes} + Rows::kUnitBytes;

  __device__ CodesRing(const Args& args, const Source&, const int32_t* table, int32_t kv_head,
                       int32_t visible, uint32_t shared)
      : args_(args),
        table_(table),
        head_(args.pool + kv_head * args.head_bytes),
        visible_(visible),
        rows_(shared) {
    if constexpr (kBulk) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      __shared__ alignas(8) uint64_t barriers[2];
      barriers_ = SharedAddress(barriers);
      InitBarriers<2>(barriers_);
#endif
    }
  }

  __device__ void Begin(int32_t first, int32_t units) {
    first_ = first;
    Start(first, units);
    Start(first + 1, units);
  }
  __device__ uint32_t Next(int32_t unit, int32_t units) {
    if constexpr (kBulk) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      WaitForPhase(BarrierOf(unit), static_cast<uint32_t>(unit - first_) / 2 % 2);
#endif
    } else {
      WaitForCopies<1>();
      __syncthreads();
    }
    Codes::template Widen<kThreads>(Stage(unit), visible_ - unit * kDenseUnitTokens,
                                    [&](int32_t row, bool is_value, int32_t word, uint2 pairs) {
                                      StoreShared(rows_ + Rows::WordAt(row, is_value, word), pairs);
                                    });
    __syncthreads();
    Start(unit + 2, units);
    return rows_;
  }

 private:
  __device__ uint32_t Stage(int32_t unit) const {
    return rows_ + Rows::kUnitBytes + (unit - first_) % 2 * Codes::kUnitBytes;
  }
  __device__ uint32_t BarrierOf(int32_t unit) const { return barriers_ + (unit - first_) % 2 * 8; }
  __device__ void Start(int32_t unit, int32_t units) {
    if constexpr (kBulk) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      if (threadIdx.x != 0 || unit >= units) return;
      StartUnitOfCodes<Codes>(args_, head_, PlaceOfUnit(args_, table_, unit), Stage(unit),
                              BarrierOf(unit));
#endif
    } else {
      if (unit < units) {
        Codes::template Start<kThreads>(Codes::Held(args_, table_, head_, unit, visible_), unit,
                                        visible_, Stage(unit));
      }
      CommitCopies();
    }
  }

  const Args& args_;
  const int32_t* table_;
  const uint8_t* head_;
  int32_t visible_, first_ = 0;
  uint32_t rows_, barriers_ = 0;  // a unit's rows, behind which lie the codes
};

// Keys that a row of queries of `chunk` sees.
__device__ __forceinline__ int32_t VisibleTo(const Args& args, const DeviceChunk& chunk,
                                             int32_t row) {
  return chunk.position + args.group.Divide(row) + 1;
}

// Keys that a block's last row sees, and the block's units of them, [first, end): none where `first` is not below `end`.
struct UnitRange {
  int32_t visible, first, end;
};
__device__ __forceinline__ UnitRange UnitsOf(const Args& args, const DeviceChunk& chunk,
                                             int32_t last_row) {
  const int32_t visible = VisibleTo(args, chunk, last_row);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * args.block_units;
  return {visible, first, min(DenseUnits(visible), first + args.block_units)};
}

// Rows of a block's first tokens come nearer while the queries are still being made. They are not read yet: this step's are
// among them. All blocks' together are less than L2.
template <int kThreads, int kTokens>
__device__ __forceinline__ void PrefetchTokens(const Args& args, const DeviceChunk& chunk,
                                               int32_t kv_head, int32_t first_unit, int32_t visible,
                                               int32_t row_bytes) {
  const int32_t lines = (row_bytes + 127) / 128;  // of a row
  const uint8_t* head = args.pool + kv_head * args.head_bytes;
  const int32_t last_token = min(visible, first_unit * kDenseUnitTokens + kTokens);
  for (int32_t i = threadIdx.x; i < kTokens * lines; i += kThreads) {
    const int32_t token = first_unit * kDenseUnitTokens + i / lines;
    if (token >= last_token) break;
    const uint8_t* row = RowAt(args, head, PlaceOfToken(args, chunk.block_table, token), row_bytes);
    PrefetchLine(row + i % lines * 128);
  }
}

// `sets`: blocks of a chunk's tiles.
template <typename Source>
cudaError_t LaunchSplits(void (*kernel)(Args, Source), unsigned threads, size_t shared_bytes,
                         unsigned sets, const DenseAttentionShape& shape, Args& args,
                         const Source& source, Stream stream) {
  const unsigned heads = shape.layout.kv_heads, tiles = shape.num_chunks * sets;
  int at_once = 0;
  if (const cudaError_t error = BlocksPerMultiprocessor(kernel, threads, shared_bytes, &at_once);
      error != cudaSuccess) {
    return error;
  }
  const int32_t units = DenseUnits(std::max(shape.max_keys, 1));
  args.block_units = DenseBlockUnits(units, int64_t{heads} * tiles,
                                     int64_t{at_once} * CurrentDevice().multiprocessors);
  const dim3 grid(static_cast<unsigned>(CeilDiv(units, args.block_units)), heads, tiles);
  return Launch(kernel, grid, threads, shared_bytes, stream, false, args, source);
}

// Rows that a warp alone takes.
inline constexpr int kSplitWarpRows = 8;
// Whether there is such a kernel for chunks of this shape.
bool HasWarpSplits(const DenseAttentionShape& shape);
// States of the splits of chunks of one tile; of several from the first on there may be one, at the last of them, and the others
// weigh nothing. `map`: of a pool of bfloat16. REQUIRES: Hopper, HasWarpSplits(shape), blocks of whole units, and what
// AttendDense() checks.
[[nodiscard]] cudaError_t SplitByWarps(const DenseAttentionShape& shape, const Args& args,
                                       const CUtensorMap* map, Stream stream);

// Whether the code that runs on the current device has the warpgroup's kernel for such heads.
bool HasGroupSplits(int32_t head_dim);
// States of the splits of args.tile_sets sets of args.tiles_per_set tiles. `map`: of a pool of bfloat16.
// REQUIRES: HasGroupSplits(shape.layout.head_dim), blocks of whole units, and what AttendDense() checks.
[[nodiscard]] cudaError_t SplitByGroups(const DenseAttentionShape& shape, Args& args,
                                        const CUtensorMap* map, Stream stream);

}  // namespace winnow::kernels::cuda::dense

#endif  // WINNOW_KERNELS_CUDA_DENSE_ATTENTION_SPLITS_CUH_

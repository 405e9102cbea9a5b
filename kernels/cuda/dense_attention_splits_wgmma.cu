// Mapping, kSideBySide on Hopper, of more than 16 rows: a draft that is verified. A block is one warpgroup with up to 64
// rows, a tile of 16 to each warp, and one split or several in turn. A unit's scores are one product of the warpgroup, each
// warp weighs those of its rows in registers, and the weights are the other product's left side as they are. A block does
// one of these at a time; the others on its multiprocessor do another meanwhile, and a unit of each is on its way.
// The same units, splits and roundings as dense_attention.cu's kernels; so the same bits.
//
// H200, 128K tokens of 8 KV heads, d 128, G 4: with splits of 256 tokens 174 us for 5 tokens, 198 for 9, 244 for 16, where one
// took 146, and 9 took 307 with matrix instructions of a warp. The rest was states of splits, of which longer ones have a third
// (dense_splits.h). With those of four splits of 256 merged here the order of sums has another level, for which the kernel of
// prompts has no registers: its sums waited in `out`, and prompts of 32K went at 0.87 of their speed. Two blocks with three stages each, because three would spill with d 128.
//
// The same of int8, 9 tokens: 243, where one warpgroup made a unit's bfloat16 and multiplied it by turns; with a second one that
// makes them 175; all that a thread loads before what it stores 160; fewer instructions to a word (kv_rows.cuh) 141; no divisions
// to find where splits begin 132; blocks asked for a unit earlier, and nothing hidden from rows that are not there, 131.
//
// Time of 9 tokens of bfloat16, 160 us, by leaving out: without copies 123, without weighing 155, without both 86; copies
// without arithmetic 137; without writing states 150; reading alone 119.
// Lost, bfloat16 and int8 at 128K, and bfloat16 of 24 sequences of 32K (162, 141 and 985 then):
//   as many blocks as run at once, with equal shares of all units (as dense_attention_splits_warp.cu's)     167, 140, 1033
//   the same, which add up a head's splits themselves, in registers                                         175, 181, 1022
//   the same in memory, where the first split's state would be                                              195, 153, 1071
// And in other runs:
//   two units at a time (as dense_attention_pairs.cu's), in seven parts of 16 KiB that a fifth warp copies   160 for 160, 962 for 961
//   the same, and keys and values first to leave L2, states last                                            160 for 162, 989 for 982
#include "kernels/cuda/dense_attention_splits.cuh"

namespace winnow::kernels::cuda::dense {
namespace {

constexpr int kThreads = kSplitWarps * kLanes;  // that multiply
constexpr int kBlocks = 2;                      // of a multiprocessor
static_assert(kSplitWarps == 4 && kTilesTogether == kSplitWarps);

// How a block's units come to shared memory:
//
//   kFillers             threads of the block beside those that multiply
//   Begin(first, units)  called by those that multiply, Fill(first, units) by the fillers
//   Next(unit, units)    the unit's place, once it is there
//   Done(unit)           the thread has waited for what reads it
//
// Bfloat16, by the copy engine alone.
template <int kHeadDim>
class PlainUnits : public SwizzledRing<kHeadDim, 3> {
 public:
  static constexpr int kFillers = 0;
  using SwizzledRing<kHeadDim, 3>::SwizzledRing;
#ifdef WINNOW_WGMMA
  __device__ void Done(int32_t /*unit*/) { __syncthreads(); }
#endif
};
// 8-bit types: a second warpgroup makes bfloat16 of a unit's codes while the first multiplies the unit before.
template <DType kKv, int kHeadDim>
class WidenedUnits {
 public:
  using Rows = SwizzledRows<kHeadDim>;
  using Codes = CodeRows<kKv, kHeadDim>;
  struct Source {
    int32_t unused = 0;
  };
  static constexpr int kFillers = kThreads, kStages = 2;
  static constexpr size_t kSharedBytes =
      kStages * (size_t{Rows::kUnitBytes} + Codes::kUnitBytes) + (Rows::kStageAlignment - 16);

#ifdef WINNOW_WGMMA
  static constexpr int kRowBytes = Codes::kRowBytes;

  __device__ WidenedUnits(const Args& args, const Source&, const int32_t* table, int32_t kv_head,
                          int32_t visible, uint32_t shared)
      : args_(args),
        table_(table),
        head_(args.pool + kv_head * args.head_bytes),
        visible_(visible),
        rows_((shared + Rows::kStageAlignment - 1) / Rows::kStageAlignment *
              Rows::kStageAlignment) {
    __shared__ alignas(8) uint64_t barriers[3 * kStages];
    barriers_ = SharedAddress(barriers);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        InitBarrier(barriers_ + kCopied + i * 8);
        InitBarrier(barriers_ + kFilled + i * 8, kFillers);
        InitBarrier(barriers_ + kEmptied + i * 8, kSplitWarps);
      }
      FenceBarriers();
    }
    __syncthreads();
  }

  __device__ void Begin(int32_t first, int32_t /*units*/) { first_ = first; }
  __device__ uint32_t Next(int32_t unit, int32_t /*units*/) const {
    WaitForPhase(barriers_ + kFilled + StageOf(unit) * 8, ParityOf(unit));
    return rows_ + StageOf(unit) * Rows::kUnitBytes;
  }
  __device__ void Done(int32_t unit) const {
    __syncwarp();
    if (threadIdx.x % kLanes == 0) Arrive(barriers_ + kEmptied + StageOf(unit) * 8);
  }

  __device__ void Fill(int32_t first, int32_t units) {
    first_ = first;
    next_ = PlaceOfUnit(args_, table_, first);
    for (int32_t i = 0; i < kStages; ++i) StartCopy(first + i, units);
    for (int32_t unit = first; unit < units; ++unit) {
      const uint32_t stage = StageOf(unit), parity = ParityOf(unit);
      WaitForPhase(barriers_ + kCopied + stage * 8, parity);
      WaitForPhase(barriers_ + kEmptied + stage * 8, parity ^ 1);
      Codes::template Widen<kFillers>(
          CodesAt(stage), visible_ - unit * kDenseUnitTokens,
          [&](int32_t row, bool is_value, int32_t word, uint2 pairs) {
            StoreShared(rows_ + stage * Rows::kUnitBytes + Rows::WordAt(row, is_value, word),
                        pairs);
          });
      FenceSharedWrites();
      Arrive(barriers_ + kFilled + stage * 8);
      // All fillers have read the codes.
      asm volatile("bar.sync 1, %0;" ::"n"(kFillers) : "memory");
      StartCopy(unit + kStages, units);
    }
  }

 private:
  static constexpr uint32_t kCopied = 0, kFilled = 8 * kStages, kEmptied = 16 * kStages;

  __device__ uint32_t StageOf(int32_t unit) const { return (unit - first_) % kStages; }
  __device__ uint32_t ParityOf(int32_t unit) const { return (unit - first_) / kStages % 2; }
  __device__ uint32_t CodesAt(uint32_t stage) const {
    return rows_ + kStages * Rows::kUnitBytes + stage * Codes::kUnitBytes;
  }
  __device__ void StartCopy(int32_t unit, int32_t units) {
    if (threadIdx.x != kThreads || unit >= units) return;
    const uint32_t stage = StageOf(unit);
    StartUnitOfCodes<Codes>(args_, head_, next_, CodesAt(stage), barriers_ + kCopied + stage * 8);
    if (unit + 1 < units) next_ = PlaceOfUnit(args_, table_, unit + 1);
  }

  const Args& args_;
  const int32_t* table_;
  const uint8_t* head_;
  int32_t visible_, first_ = 0;
  TokenPlace next_;
  uint32_t rows_, barriers_;  // [kStages] units' rows, behind which lie the codes
#endif
};

template <int kHeadDim, typename Units>
__global__ void __launch_bounds__(kThreads + Units::kFillers, kBlocks)
    SplitGroupKernel(const __grid_constant__ Args args,
                     const __grid_constant__ typename Units::Source source) {
#ifdef WINNOW_WGMMA
  using Rows = typename Units::Rows;
  extern __shared__ uint4 shared4[];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, pair = lane % 4 * 2;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const int32_t set = static_cast<int32_t>(blockIdx.z) % args.tile_sets;
  const int32_t chunk_index = static_cast<int32_t>(blockIdx.z) / args.tile_sets;
  const DeviceChunk chunk = args.chunks[chunk_index];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t tile = set * args.tiles_per_set + warp;
  const int32_t first_row = set * args.tiles_per_set * kWarpRows;
  LetNextStart();
  if (first_row >= num_rows) return WaitForEarlier();
  const int32_t last_row = min(first_row + args.tiles_per_set * kWarpRows, num_rows) - 1;
  const auto [visible, first_unit, units] = UnitsOf(args, chunk, last_row);
  if (first_unit >= units) return WaitForEarlier();
  PrefetchTokens<kThreads + Units::kFillers, 256>(args, chunk, kv_head, first_unit, visible,
                                                  Units::kRowBytes);
  Units ring(args, source, chunk.block_table, kv_head, visible, SharedAddress(shared4));
  WaitForEarlier();
  if constexpr (Units::kFillers > 0) {
    if (threadIdx.x >= kThreads) {
      GiveUpRegisters<64>();
      return ring.Fill(first_unit, units);
    }
    TakeRegisters<184>();
  }
  ring.Begin(first_unit, units);

  // A warp without rows takes part in the products alone.
  const bool has_rows = tile * kWarpRows <= last_row;
  int32_t sees[2];
  uint32_t q[kHeadDim / 16][4];
  {
    int64_t at[2];
    LoadRows<kHeadDim>(args, chunk, kv_head, has_rows ? tile * kWarpRows : num_rows, sees, at, q);
  }
  // Rows that are not there see all, so that nothing need be hidden from them, and are not written.
  const bool is_there[2] = {sees[0] > 0, sees[1] > 0};
#pragma unroll
  for (int r = 0; r < 2; ++r) sees[r] = is_there[r] ? sees[r] : visible;
  float o[kHeadDim / 8][4];
  uint32_t weights[kUnitTiles][4] = {};
  RowSums sums;
  for (int32_t unit = first_unit; unit < units; ++unit) {
    // The same in all threads of a warp, which the compiler cannot know.
    const uint32_t here = __shfl_sync(kFullMask, ring.Next(unit, units), 0);
    const uint64_t keys = SharedMatrix(here, 1024);
    const uint64_t values = SharedMatrix(here + Rows::kUnitBytes / 2, 1024, Rows::kTensorTileBytes);
    float scores[2 * kUnitTiles][4];
    FenceGroup();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint32_t offset = step / 4 * Rows::kTensorTileBytes + step % 4 * 32;
      GroupMultiplyAdd(scores, q[step], Further(keys, offset), step > 0);
    }
    CommitGroup();
    WaitForGroups<0>();
    const bool begins = BeginsDenseSplit(unit);
    if (has_rows) {
      float keep[2];
      Weigh(scores, unit * kDenseUnitTokens, sees, sums, weights, keep);
      if (!begins) Rescale(o, keep);
    }
    FenceGroup();
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
      GroupMultiplyAdd<true>(o, weights[t], Further(values, t * Rows::kTileBytes),
                             t > 0 || !begins);
    }
    CommitGroup();
    WaitForGroups<0>();
    if (unit + 1 == units || BeginsDenseSplit(unit + 1)) {
      sums.Join();
      const int64_t tile_rows =
          ((int64_t{chunk_index} * args.tiles + tile) * args.kv_heads + kv_head) * kWarpRows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_there[r]) continue;
        const int64_t part = (tile_rows + lane / 4 + 8 * r) * args.splits + DenseSplitOf(unit);
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          *reinterpret_cast<float2*>(args.parts + part * kHeadDim + n * 8 + pair) =
              make_float2(o[n][2 * r], o[n][2 * r + 1]);
        }
        if (pair == 0) args.part_ends[part] = make_float2(sums.max[r], sums.sum[r]);
      }
      sums = RowSums();
    }
    ring.Done(unit);
  }
#endif
}

template <DType kKv, int kHeadDim>
cudaError_t LaunchOf(const DenseAttentionShape& shape, Args& args, const CUtensorMap* map,
                     Stream stream) {
  const auto launch = [&]<typename Units>(const typename Units::Source& source) {
    return LaunchSplits(SplitGroupKernel<kHeadDim, Units>, kThreads + Units::kFillers,
                        Units::kSharedBytes, static_cast<unsigned>(args.tile_sets), shape, args,
                        source, stream);
  };
  if constexpr (HasScales(kKv)) {
    return launch.template operator()<WidenedUnits<kKv, kHeadDim>>({});
  } else {
    if (map == nullptr) return cudaErrorInvalidValue;
    return launch.template operator()<PlainUnits<kHeadDim>>(*map);
  }
}

}  // namespace

bool HasGroupSplits(int32_t head_dim) {
  if (head_dim != 64 && head_dim != 128) return false;
  thread_local CodeHere code;
  // The kernel that takes the most.
  constexpr size_t kMost =
      std::max(PlainUnits<128>::kSharedBytes, WidenedUnits<DType::kI8, 128>::kSharedBytes);
  return code.Has(SplitGroupKernel<128, PlainUnits<128>>, kMost);
}

cudaError_t SplitByGroups(const DenseAttentionShape& shape, Args& args, const CUtensorMap* map,
                          Stream stream) {
  return ForKvType(shape.layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return shape.layout.head_dim == 64 ? LaunchOf<kKv, 64>(shape, args, map, stream)
                                       : LaunchOf<kKv, 128>(shape, args, map, stream);
  });
}

}  // namespace winnow::kernels::cuda::dense

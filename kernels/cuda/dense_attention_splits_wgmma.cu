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
#include "kernels/cuda/dense_attention_splits.cuh"

namespace winnow::kernels::cuda::dense {
namespace {

constexpr int kThreads = kSplitWarps * kLanes;
constexpr int kBlocks = 2;  // of a multiprocessor
template <int kHeadDim>
using PlainRing = SwizzledRing<kHeadDim, 3>;
static_assert(kSplitWarps == 4 && kTilesTogether == kSplitWarps);

template <int kHeadDim, typename Ring>
__global__ void __launch_bounds__(kThreads, kBlocks)
    SplitGroupKernel(const __grid_constant__ Args args,
                     const __grid_constant__ typename Ring::Source source) {
#ifdef WINNOW_WGMMA
  using Rows = typename Ring::Rows;
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
  PrefetchTokens<kSplitWarps * kLanes, 256>(args, chunk, kv_head, first_unit, visible,
                                            Ring::kRowBytes);
  Ring ring(args, source, chunk.block_table, kv_head, visible, SharedAddress(shared4));
  WaitForEarlier();
  ring.Begin(first_unit, units);

  // A warp without rows takes part in the products alone.
  const bool has_rows = tile * kWarpRows <= last_row;
  int32_t sees[2];
  uint32_t q[kHeadDim / 16][4];
  {
    int64_t at[2];
    LoadRows<kHeadDim>(args, chunk, kv_head, has_rows ? tile * kWarpRows : num_rows, sees, at, q);
  }
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
      if (!begins && (keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n][e] = __fmul_rn(o[n][e], keep[e / 2]);
        }
      }
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
        if (sees[r] == 0) continue;
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
    __syncthreads();
  }
#endif
}

template <DType kKv, int kHeadDim>
cudaError_t LaunchOf(const DenseAttentionShape& shape, Args& args, const CUtensorMap* map,
                     Stream stream) {
  const auto launch = [&]<typename Ring>(const typename Ring::Source& source) {
    return LaunchSplits(SplitGroupKernel<kHeadDim, Ring>, kThreads, Ring::kSharedBytes,
                        static_cast<unsigned>(args.tile_sets), shape, args, source, stream);
  };
  if constexpr (HasScales(kKv)) {
    using Ring = CodesRing<kKv, kHeadDim, kThreads, true, SwizzledRows<kHeadDim>>;
    return launch.template operator()<Ring>({});
  } else {
    if (map == nullptr) return cudaErrorInvalidValue;
    return launch.template operator()<PlainRing<kHeadDim>>(*map);
  }
}

}  // namespace

bool HasGroupSplits(int32_t head_dim) {
  if (head_dim != 64 && head_dim != 128) return false;
  thread_local CodeHere code;
  // The kernel that takes the most.
  using Ring = CodesRing<DType::kI8, 128, kThreads, true, SwizzledRows<128>>;
  constexpr size_t kMost = std::max(PlainRing<128>::kSharedBytes, Ring::kSharedBytes);
  return code.Has(SplitGroupKernel<128, PlainRing<128>>, kMost);
}

cudaError_t SplitByGroups(const DenseAttentionShape& shape, Args& args, const CUtensorMap* map,
                          Stream stream) {
  return ForKvType(shape.layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return shape.layout.head_dim == 64 ? LaunchOf<kKv, 64>(shape, args, map, stream)
                                       : LaunchOf<kKv, 128>(shape, args, map, stream);
  });
}

}  // namespace winnow::kernels::cuda::dense

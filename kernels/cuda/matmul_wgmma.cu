// Mapping, kTensor for many rows on Hopper: matrix instructions of a warpgroup (wgmma.cuh), which round as
// those of a warp do, so the chains are those of matmul.cu.
//
// Both operands come from shared memory, as they lie: W is the left one, in tiles, x the right one, a panel of
// the order (matmul_order.cuh). So a stage of either is a few bulk copies of whole pieces of memory; 64 outputs of W are one
// box of a tensor map (tensor_map.h).
//
// A block is two warpgroups of 64 outputs each by 128, 176 or 192 rows, with two sets of sums in registers (the segment's,
// and those of the segments before), and a warp that copies: up to six stages of 64 inner values ahead, over the borders
// of the tiles that the block takes one after the other. Two blocks are a cluster that shares outputs: each copies
// half of their weights to both. The number of rows is the one that leaves the fewest multiprocessors without work at the end.
//
// Gates and ups of an MLP (MatmulGated): a box of W is eight gates and the eight ups that belong to them by turns, which a tensor map of
// five dimensions makes of W as it lies for every other kernel. So the accumulators of a thread are gates and their ups,
// and writes take 2 bytes a pair in place of 8. The chains are the same.
//
// A bulk copy that both blocks hear of takes 50 cycles, whatever its size. In cycles of the kernel, at 1.4 GHz (H100, 2048 rows,
// 4096 x 14336, of which the matrix instructions themselves take 459,000):
//   W from registers, copies of 2 KiB, 128 rows           674,000; without copies at all 559,000
//   the same, 192 rows                                    599,000; without copies 578,000
//   W from shared memory, copies of 1, 2, 4 and 8 KiB     805,000; 635,000; 543,000; 544,000
//   the same, 192 rows                                    684,000; 592,000; - ; 596,000
//   one chain for all inner values, 256 rows, 2 KiB       521,000 (other bits than the kernels for few rows have)
// With many rows it is power that bounds: the card, at its 700 W, runs at 1.3 to 1.6 GHz.
//
// Tiles of rows that have a W each (MatmulTiles): blocks alone, of 64 or 128 rows, and a map of W for each, in memory.
//
// Tried and lost:
//   any device's kernel (matmul.cu), H200, TFLOP/s at 2048 rows, 4096 x 4096 and 4096 x 14336   229, 245
//   blocks alone, W and x from L2 for each, and W from registers                                495, 511; 561, 606 with clusters
//   clusters that share rows and not outputs              499, 546; with large copies within 2 %
//   clusters of four that share both                      488, 545; 30 of them find room, so 12 of 132
//                                                         multiprocessors idle
//   telling others of a free stage with release at cluster     238, 239, of four: each waits for all its reads
//   the same and a wait with acquire at cluster, of two         a prompt's products: 239 instead of 438
//   bands of 3, 4, 6 or 16 tiles of rows in place of 8         within 3 % at 2048 rows, no better at 8192
//   the second warpgroup two stages behind the first           2 to 8 % slower
//   a tile's outputs written in six pieces, each beside one of the next tile's first stages    6144 x 4096 702, now 709;
//     28672 x 4096 gated 605 and 612, now 586 and 592 (H200, 2048 rows)
//   W in pieces of 64 outputs by 64 inner values, one behind the other: as fast here, but streaming 16 outputs (matmul.cu) up to
//     9 % slower
#include <algorithm>
#include <cstring>

#include "kernels/cuda/matmul_wgmma_parts.cuh"
#include "kernels/cuda/tensor_map.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kMostBlockRows = 192;
constexpr int32_t kBandRows = 8;
[[maybe_unused]] constexpr int kMultiplyRegisters = 232, kFillRegisters = 40;
static_assert(SharesRegisters(kMultiplyRegisters, kFillRegisters));

constexpr int32_t kGroupTiles = kGroupsOutputs / 16 / kGroups;  // of W, that a warpgroup takes

// A stage: rows of a panel of x, and [kGroups][kStageSlices][4] tiles of W. kStageSlices: 2, or 1 where a segment is an odd
// number of slices; then a panel is copied for either half.
template <int kStageSlices, int kBlockRows>
struct Stage {
  static constexpr uint32_t kXBytes = kBlockRows * (kPanelBytes / kPanelRows);
  static constexpr uint32_t kGroupWBytes = kStageSlices * kGroupTiles * kWTileBytes;
  static constexpr uint32_t kWBytes = kGroups * kGroupWBytes;
  static constexpr int kCount =
      std::min(6, static_cast<int>((kGroupsSharedBytes - 1024) / (kXBytes + kWBytes)));
  static constexpr size_t kAllBytes = size_t{1024} + kCount * (kXBytes + kWBytes);
};

#ifdef WINNOW_WGMMA
// The place of a block's tile: clusters share outputs, its blocks have rows of their own.
template <int kBlockRows, int kClusterBlocks, bool kOfRows>
__device__ __forceinline__ void PlaceTile(const Raster& raster, int32_t tile, int rank,
                                          int32_t& first_row, int32_t& first_output) {
  if constexpr (kOfRows) {
    const TileOfRows at(tile, 0, raster.output_tiles, /*many=*/true);
    first_row = at.rows * kBlockRows;
    first_output = at.outputs * kGroupsOutputs;
    return;
  }
  int32_t row_tile, output_tile;
  raster.Place(tile, row_tile, output_tile);
  first_row = (row_tile * kClusterBlocks + rank) * kBlockRows;
  first_output = output_tile * kGroupsOutputs;
}

// The warpgroups that multiply: all tiles of this block, as their stages are filled, and what becomes of them. `x_at`, `w_at`: those
// parts of the stages. `filled` and `emptied`: their barriers, of which the second hears of all warps of the cluster.
template <int kStageSlices, int kBlockRows, int kClusterBlocks, bool kGated, bool kOfRows>
__device__ __forceinline__ void MultiplyTiles(const Operands& args, const Raster& raster,
                                              int32_t all_tiles, int rank, uint32_t x_at,
                                              uint32_t w_at, uint64_t* filled, uint64_t* emptied) {
  using S = Stage<kStageSlices, kBlockRows>;
  constexpr int kRowTiles = kBlockRows / 8;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto first_tile = static_cast<int32_t>(blockIdx.x) / kClusterBlocks;
  const auto clusters = static_cast<int32_t>(gridDim.x) / kClusterBlocks;
  InTurn<S::kCount> stage;
  // The same in all threads of a warp, which the compiler cannot know.
  const uint32_t my_w = __shfl_sync(kFullMask, w_at + warp / 4 * S::kGroupWBytes, 0);
  const uint32_t my_x = __shfl_sync(kFullMask, x_at, 0);
  // All who write here hear that a stage may be filled again.
  const auto release = [&](int of_stage) {
    __syncwarp();  // all lanes have waited for what reads it
    if constexpr (kClusterBlocks == 1) {
      if (lane == 0) Arrive(SharedAddress(emptied + of_stage));
    } else {
      if (lane < kClusterBlocks) ArriveAt(SharedAddress(emptied + of_stage), lane);
    }
  };
  float sums[kRowTiles][4], totals[kRowTiles][4];
  // Starts to multiply a stage; kBegins: the first of a segment. That is known when this is compiled, or else the
  // compiler lets each instruction wait for the one before.
  const auto start = [&]<bool kBegins>(int32_t slice) {
    WaitForPhase(SharedAddress(filled + stage.index), stage.parity);
    const uint64_t x = SharedMatrix(
        my_x + stage.index * S::kXBytes + (kStageSlices == 1 ? slice % 2 * 64 : 0), 1024);
    const uint32_t w_stage = my_w + stage.index * S::kWBytes;
    const uint64_t w = SharedMatrixOf64(w_stage);
    FenceGroup();
#pragma unroll
    for (int i = 0; i < kStageSlices * 2; ++i) {
      GroupMultiplyAdd(sums, Further(w, i / 2 * (kGroupTiles * kWTileBytes) + i % 2 * 32),
                       Further(x, i * 32), !kBegins || i > 0);
    }
    CommitGroup();
  };
  for (int32_t tile = first_tile; tile < all_tiles; tile += clusters) {
    SetTile(totals, -0.0f);
    for (int32_t slice = 0; slice < args.slices;) {
      const int32_t end = min(slice + args.slices_per_segment, args.slices);
      start.template operator()<true>(slice);
      stage.Next();
      for (slice += kStageSlices; slice < end; slice += kStageSlices) {
        start.template operator()<false>(slice);
        WaitForGroups<1>();
        release(stage.before());
        stage.Next();
      }
      WaitForGroups<0>();
      release(stage.before());
      AddToTile(totals, sums);
    }
    int32_t first_row, first_output;
    PlaceTile<kBlockRows, kClusterBlocks, kOfRows>(raster, tile, rank, first_row, first_output);
    // This thread's outputs: two of W, or a gate and its up.
    const int32_t output =
        kGated ? first_output / 2 + warp * 8 + lane / 4 : first_output + warp * 16 + lane / 4;
    const int32_t outputs = kGated ? args.out / 2 : args.out;
    const int32_t other = kGated ? outputs + output : output + 8;
    // Finish() in steps, each of which all values take before the next.
    AddEmptySegments(args, totals);
    AddBias(args, output < outputs ? output : args.out, other, totals);
    if constexpr (kGated) {
      WriteGated(args, output - lane / 4, first_row, lane, totals);
    } else {
      const int32_t row = first_row + lane % 4 * 2;
      if (first_output + kGroupsOutputs <= args.out && first_row + kBlockRows <= args.m) {
        WriteTile<true>(args, output, row, totals);
      } else {
        WriteTile<false>(args, output, row, totals);
      }
    }
  }
}
#endif

// kGated: `args.gated` is written; W comes eight gates and their eight ups by turns, so that a thread has both.
// kOfRows: tiles of rows have a W each, whose maps lie in memory.
template <int kStageSlices, int kBlockRows, int kClusterBlocks, bool kGated, bool kOfRows>
__global__ void __launch_bounds__(kGroupsThreads, 1)
    GroupsKernel(const __grid_constant__ Operands args, const __grid_constant__ CUtensorMap of_w,
                 const RowTiles of_rows, const Raster raster) {
#ifdef WINNOW_WGMMA
  using S = Stage<kStageSlices, kBlockRows>;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t filled[S::kCount], emptied[S::kCount];
  const uint32_t x_at = (SharedAddress(dynamic) + 1023) / 1024 * 1024;  // [kCount] rows of panels
  const uint32_t w_at = x_at + S::kCount * S::kXBytes;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int rank = kClusterBlocks == 1 ? 0 : static_cast<int>(RankInCluster());
  const int32_t all_tiles =
      kOfRows ? raster.output_tiles * of_rows.Count() : static_cast<int32_t>(raster.count());
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kCount; ++i) {
      InitBarrier(SharedAddress(filled + i));
      InitBarrier(SharedAddress(emptied + i), kClusterBlocks * kGroupsWarps);
    }
    FenceBarriers();
  }
  if constexpr (kClusterBlocks == 1) {
    __syncthreads();
  } else {
    SynchronizeCluster();
  }
  if (warp < kGroupsWarps) {
    TakeRegisters<kMultiplyRegisters>();
    MultiplyTiles<kStageSlices, kBlockRows, kClusterBlocks, kGated, kOfRows>(
        args, raster, all_tiles, rank, x_at, w_at, filled, emptied);
  } else {
    GiveUpRegisters<kFillRegisters>();
    // Copies: the last lanes W for a warpgroup each, others the rows of a panel. Of W what does not exist is zero.
    static_assert(kBlockRows / kPanelRows + 2 <= kLanes - kGroups);
    static_assert(kTensorTileBytes == kWTileBytes);
    static_assert(kClusterBlocks == 1 || kClusterBlocks == kGroups);
    static_assert(!kOfRows || kClusterBlocks == 1);
    const int group = lane - (kLanes - kGroups);
    const auto clusters = static_cast<int32_t>(gridDim.x) / kClusterBlocks;
    const int32_t tiles = warp == kGroupsWarps ? all_tiles : 0;
    InTurn<S::kCount> stage;
    for (auto tile = static_cast<int32_t>(blockIdx.x) / kClusterBlocks; tile < tiles;
         tile += clusters) {
      int32_t first_row, first_output;
      PlaceTile<kBlockRows, kClusterBlocks, kOfRows>(raster, tile, rank, first_row, first_output);
      const void* map = &of_w;
      if constexpr (kOfRows) {
        map = of_rows.W(first_row / kBlockRows);
        FenceTensorMap(map);
      }
      const int32_t w_tile = (first_output / 16 + group * kGroupTiles) / (kGated ? 2 : 1);
      const RowsOfLane<kBlockRows> rows(args, first_row, lane);
      for (int32_t slice = 0; slice < args.slices; slice += kStageSlices) {
        const uint32_t barrier = SharedAddress(filled + stage.index);
        WaitForPhase(SharedAddress(emptied + stage.index), stage.parity ^ 1);
        if (lane == 0) ArriveExpecting(barrier, S::kXBytes + S::kWBytes);
        __syncwarp();
        rows.Copy(x_at + stage.index * S::kXBytes, slice, barrier);
        if (group >= 0) {
          const uint32_t to = w_at + stage.index * S::kWBytes + group * S::kGroupWBytes;
          if constexpr (kClusterBlocks == 1 && kGated) {
            BulkCopyGatedTiles(to, map, w_tile, slice, barrier);
          } else if constexpr (kClusterBlocks == 1) {
            BulkCopyTiles(to, map, w_tile, slice, barrier);
          } else if (group != rank) {
          } else if constexpr (kGated) {
            BulkCopyGatedTilesToAll(to, map, w_tile, slice, barrier, (1 << kClusterBlocks) - 1);
          } else {
            BulkCopyTilesToAll(to, map, w_tile, slice, barrier, (1 << kClusterBlocks) - 1);
          }
        }
        stage.Next();
      }
    }
  }
  if constexpr (kClusterBlocks > 1) SynchronizeCluster();  // others may still write here
#endif
}

template <int kBlockRows, int kClusterBlocks>
Raster RasterOfRows(const Operands& operands) {
  return RasterOf(operands, kBlockRows * kClusterBlocks, kGroupsOutputs, kBandRows);
}

// A map of W, of `out` outputs: gates and ups by turns, or outputs as they lie.
bool MakeMap(const void* w, int64_t out, int32_t slices, int32_t stage_slices, bool gated,
             CUtensorMap* map) {
  return gated ? MakeGatedTilesMap(w, static_cast<int32_t>(out / 32), slices, kGroupTiles / 2,
                                   stage_slices, map)
               : MakeTilesMap(w, static_cast<int32_t>((out + 15) / 16), slices, kGroupTiles,
                              stage_slices, map);
}

template <int kStageSlices, int kBlockRows, int kClusterBlocks, bool kGated>
cudaError_t LaunchGroups(const Operands& operands, Stream stream) {
  CUtensorMap of_w = {};
  if (!MakeMap(operands.w, operands.out, operands.slices, kStageSlices, kGated, &of_w)) {
    return cudaErrorNotSupported;
  }
  thread_local ClustersAtOnce at_once;
  return LaunchRaster<kClusterBlocks>(
      GroupsKernel<kStageSlices, kBlockRows, kClusterBlocks, kGated, false>,
      Stage<kStageSlices, kBlockRows>::kAllBytes,
      RasterOfRows<kBlockRows, kClusterBlocks>(operands), at_once, stream, operands, of_w,
      RowTiles{});
}

// Whether a stage is a panel: segments are whole ones then.
bool StagesArePanels(int32_t slices) {
  return slices % 2 == 0 && CeilDiv(slices, kMatmulSegments) % 2 == 0;
}

template <int kStageSlices, int kBlockRows, bool kGated>
cudaError_t LaunchOfRows(const Operands& operands, const RowTiles& rows, Stream stream) {
  const Raster raster = RasterOfRows<kBlockRows, 1>(operands);
  if (raster.count() > 0x7fffffff / 64) return cudaErrorInvalidValue;
  const int64_t at_once = CurrentDevice().multiprocessors;
  return LaunchBehind(GroupsKernel<kStageSlices, kBlockRows, 1, kGated, true>,
                      static_cast<unsigned>(std::min(raster.count(), at_once)), kGroupsThreads,
                      Stage<kStageSlices, kBlockRows>::kAllBytes, stream, operands, CUtensorMap{},
                      rows, raster);
}

template <int kStageSlices, int kBlockRows>
cudaError_t LaunchPairs(const Operands& operands, Stream stream) {
  return operands.gated == nullptr
             ? LaunchGroups<kStageSlices, kBlockRows, 2, false>(operands, stream)
             : LaunchGroups<kStageSlices, kBlockRows, 2, true>(operands, stream);
}

template <int kBlockRows>
int64_t CostOf(const Operands& operands) {
  return PairsCost(RasterOfRows<kBlockRows, 2>(operands), kBlockRows);
}

}  // namespace

bool HasGroupMatmul() {
  thread_local CodeHere code;
  return code.Has(GroupsKernel<2, kMostBlockRows, 2, false, false>,
                  Stage<2, kMostBlockRows>::kAllBytes);
}

cudaError_t MatmulManyRowsByGroups(const Operands& operands, Stream stream) {
  if (!StagesArePanels(operands.slices)) {
    return operands.m <= 128 ? LaunchGroups<1, 128, 1, false>(operands, stream)
                             : LaunchPairs<1, 128>(operands, stream);
  }
  if (operands.m <= 128) return LaunchGroups<2, 128, 1, false>(operands, stream);
  const int64_t small = CostOf<128>(operands), middle = CostOf<176>(operands),
                large = CostOf<kMostBlockRows>(operands);
  if (small <= std::min(middle, large)) return LaunchPairs<2, 128>(operands, stream);
  if (middle < large) return LaunchPairs<2, 176>(operands, stream);
  return LaunchPairs<2, kMostBlockRows>(operands, stream);
}

bool MakeTileMap(const DeviceWeights& w, bool gates, std::byte* map) {
  static_assert(sizeof(CUtensorMap) == kTileMapBytes);
  CUtensorMap made = {};
  const int32_t slices = SlicesOf(w.in);
  if (w.way != DeviceWeights::Way::kTensor || w.out > INT32_MAX ||
      !MakeMap(w.data, w.out, slices, StagesArePanels(slices) ? 2 : 1, gates, &made)) {
    return false;
  }
  std::memcpy(map, &made, sizeof made);
  return true;
}

cudaError_t MatmulTilesByGroups(const Operands& operands, const RowTiles& rows, int32_t tile_rows,
                                Stream stream) {
  const auto of_stages = [&]<int kStageSlices>() {
    const auto of_rows = [&]<int kBlockRows>() {
      return operands.gated == nullptr
                 ? LaunchOfRows<kStageSlices, kBlockRows, false>(operands, rows, stream)
                 : LaunchOfRows<kStageSlices, kBlockRows, true>(operands, rows, stream);
    };
    return tile_rows == kPanelRows ? of_rows.template operator()<kPanelRows>()
                                   : of_rows.template operator()<2 * kPanelRows>();
  };
  return StagesArePanels(operands.slices) ? of_stages.template operator()<2>()
                                          : of_stages.template operator()<1>();
}

}  // namespace winnow::kernels::cuda

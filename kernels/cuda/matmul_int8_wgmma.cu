// Mapping, kInt8 on Hopper. W is the left operand of a warpgroup's matrix instructions and x the right one; both come from shared
// memory, as panels (matmul_int8_parts.cuh). A stage is a group: four instructions make its exact sums, which then are added to a
// thread's float32 sums while the instructions of the next group run.
//
// A prompt's rows: two warpgroups that multiply, of 64 outputs each by 128 rows; two blocks are a cluster that shares rows, and each
// copies one of the two panels to both. Up to kMatmulBatchRows: one warpgroup and no cluster, 64 outputs by 8 to 128 rows, so that more
// multiprocessors take part in reading W. One warp fills stages, over the borders of tiles, and W of the first ones while the
// kernel before still runs.
//
// One H200, us, and what was tried and lost (HBM takes 27 and 13 for W):
//
//   outputs, inner values; rows                            28672, 4096; 1, 64, 2048   4096, 14336; 1, 64, 2048
//   as it is                                                -   39   604               -    -    -
//   an integer made a float by two additions (as in all below)   32   40   636         28   36   301
//   the warpgroups of a prompt taking turns                 -    -    630              -    -    300
//   four sums of a group side by side, added at the end     32   40   -                30   37   -
//   scales of W read by threads, from where they lie        44   57   639              35   44   307
//   W from registers, 176 rows of a prompt, a copy of 2 KiB for each warp   -   40   681   -   48   333
//   the same, taking turns                                  -    -    746              -    -    358
//   few rows by m16n8k32, a warp for 16 outputs, x asked of L1 a group ahead   29   -   -   33   -   -
//   the same, x by the copy engine, too                     42   -    -                28   -    -
//
// Left: a multiprocessor takes some 32 GB/s by these copies, and 4,096 outputs are 64 blocks; with x as the left operand a tile
// could have 32 outputs. Of a prompt, matrix instructions take 40 % of the time: additions of the second group of two wait for them.
#include "kernels/cuda/matmul_int8_parts.cuh"
#include "kernels/cuda/matmul_wgmma_parts.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int32_t kBandRows = 16;
constexpr int kFillRegisters = 40;

// kMultipliers: warpgroups that multiply; kRows: of a tile.
template <int kMultiplierGroups, int kTileRows>
struct Shape {
  static constexpr int kMultipliers = kMultiplierGroups, kRows = kTileRows;
  static constexpr int kClusterBlocks = kMultipliers == 2 ? 2 : 1;
  static constexpr int kPanels = (kRows + kPanelRows - 1) / kPanelRows;
  static constexpr int kMyPanels = kPanels / kClusterBlocks;  // that a block copies
  static constexpr int kPanelsRows = kRows / kPanels;         // of a panel that are wanted
  static_assert(kMyPanels * kClusterBlocks == kPanels && kPanelsRows * kPanels == kRows);
  static constexpr int kThreads = (kMultipliers + 1) * kGroupThreads;
  static constexpr int kWarps = kMultipliers * kGroupThreads / kLanes;  // that multiply
  static constexpr int kOutputs = kMultipliers * kPanelRows;
  static constexpr int kRowTiles = kRows / 8;
  // Registers of a thread that multiplies; 0: as many as it was launched with.
  static constexpr int kMultiplyRegisters = kMultipliers == 2 ? 232 : 0;
  static_assert(kMultiplyRegisters == 0 || SharesRegisters(kMultiplyRegisters, kFillRegisters));
  // A stage: panels of W, integers of the rows, their scales.
  static constexpr uint32_t kWPanelBytes = (kRoundedPanelBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kWBytes = kMultipliers * kWPanelBytes;
  static constexpr uint32_t kXBytes = kPanelsRows * kGroupValues, kXScaleBytes = kPanelsRows * 4;
  static constexpr uint32_t kScalesAt = kWBytes + kPanels * kXBytes;
  static constexpr uint32_t kStageBytes = (kScalesAt + kPanels * kXScaleBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kCopiedBytes =
      kMultipliers * kRoundedPanelBytes + kPanels * (kXBytes + kXScaleBytes);
  static_assert(kCopiedBytes % 16 == 0 && kWarps % 4 == 0 && kRowTiles * 8 == kRows);
  static constexpr int kStages = std::min<int>(24, (kGroupsSharedBytes - 1024) / kStageBytes);
  static constexpr size_t kSharedBytes = kStages * kStageBytes + 1024;
};

template <typename S>
__device__ __forceinline__ void PlaceTile(const Raster& raster, int32_t tile, int rank,
                                          int32_t& first_row, int32_t& outputs) {
  int32_t row_tile, output_tile;
  raster.Place(tile, row_tile, output_tile);
  first_row = row_tile * S::kRows;
  outputs = output_tile * S::kClusterBlocks + rank;
}

template <int kMultiplierGroups, int kTileRows>
__global__ void __launch_bounds__(Shape<kMultiplierGroups, kTileRows>::kThreads, 1)
    Int8GroupsKernel(const __grid_constant__ Int8Operands operands, const Raster raster) {
#ifdef WINNOW_WGMMA
  using S = Shape<kMultiplierGroups, kTileRows>;
  constexpr int kClusterBlocks = S::kClusterBlocks, kRowTiles = S::kRowTiles;
  const Operands& args = operands.product;
  const int32_t groups = operands.groups;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t filled[S::kStages], emptied[S::kStages];
  const uint32_t stages_at = (SharedAddress(dynamic) + 1023) / 1024 * 1024;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto rank = kClusterBlocks == 1 ? 0 : static_cast<int>(RankInCluster());
  if (threadIdx.x < S::kStages) {
    InitBarrier(SharedAddress(filled + threadIdx.x));
    InitBarrier(SharedAddress(emptied + threadIdx.x), kClusterBlocks * S::kWarps);
  }
  FenceBarriers();
  if constexpr (kClusterBlocks == 1) {
    __syncthreads();
  } else {
    SynchronizeCluster();
  }
  const auto first_tile = static_cast<int32_t>(blockIdx.x) / kClusterBlocks;
  const auto clusters = static_cast<int32_t>(gridDim.x) / kClusterBlocks;
  const auto all_tiles = static_cast<int32_t>(raster.count());
  if (warp >= S::kWarps) {
    if constexpr (S::kMultiplyRegisters > 0) GiveUpRegisters<kFillRegisters>();
    // Lanes: W of the warpgroups, integers of this block's panels, their scales. Of what does not exist the last that does.
    constexpr int kCopies = S::kMultipliers + 2 * S::kMyPanels;
    const bool fills = warp == S::kWarps && lane < kCopies, of_w = lane < S::kMultipliers;
    const bool of_scales = lane >= S::kMultipliers + S::kMyPanels;
    const int my_panel = rank * S::kMyPanels + (lane - S::kMultipliers) % S::kMyPanels;
    const uint32_t bytes = of_w ? kRoundedPanelBytes : of_scales ? S::kXScaleBytes : S::kXBytes;
    const uint32_t my_place = of_w        ? lane * S::kWPanelBytes
                              : of_scales ? S::kScalesAt + my_panel * S::kXScaleBytes
                                          : S::kWBytes + my_panel * S::kXBytes;
    const int32_t last_panel = (args.m - 1) / kPanelRows, last_w = (args.out - 1) / kPanelRows;
    InTurn<S::kStages> stage;
    const auto first_of = [&](int32_t tile) {
      int32_t first_row, outputs;
      PlaceTile<S>(raster, tile, rank, first_row, outputs);
      return of_w ? operands.w + int64_t{min(outputs * S::kMultipliers + lane, last_w)} * groups *
                                     kRoundedPanelBytes
                  : reinterpret_cast<const uint8_t*>(args.x) +
                        int64_t{min(first_row / kPanelRows + my_panel, last_panel)} * groups *
                            kRoundedPanelBytes +
                        (of_scales ? kIntegerBytes : 0);
    };
    const auto copy = [&](const uint8_t* from) {
      const uint32_t barrier = SharedAddress(filled + stage.index);
      const uint32_t to = stages_at + stage.index * S::kStageBytes + my_place;
      if (lane == 0) ArriveExpecting(barrier, S::kCopiedBytes);
      if (kClusterBlocks == 1 || of_w) {
        BulkCopy(to, from, bytes, barrier);
      } else {
        BulkCopyToAll(to, from, bytes, barrier, (1 << kClusterBlocks) - 1);
      }
      stage.Next();
    };
    // W does not wait for the kernel before, as far as stages are free. All tiles have rows: the first has a group.
    const int32_t early = fills && of_w && !args.new_weights ? min(S::kStages, groups) : 0;
    const uint8_t* from = fills && first_tile < all_tiles ? first_of(first_tile) : nullptr;
    for (int32_t group = 0; group < early && from != nullptr; ++group)
      copy(from + group * kRoundedPanelBytes);
    WaitForEarlier();
    LetNextStart();
    for (int32_t tile = first_tile; fills && tile < all_tiles; tile += clusters) {
      const bool is_first = tile == first_tile;
      if (!is_first) from = first_of(tile);
      for (int32_t group = is_first ? early : 0; group < groups; ++group) {
        WaitForPhase(SharedAddress(emptied + stage.index), stage.parity ^ 1);
        copy(from + int64_t{group} * kRoundedPanelBytes);
      }
    }
  } else {
    if constexpr (S::kMultiplyRegisters > 0) TakeRegisters<S::kMultiplyRegisters>();
    WaitForEarlier();
    LetNextStart();
    const uint32_t my_stages = __shfl_sync(kFullMask, stages_at, 0);  // as all in a warp have it
    const uint32_t my_w = __shfl_sync(kFullMask, stages_at + warp / 4 * S::kWPanelBytes, 0);
    InTurn<S::kStages> started, stage;  // of the groups that are multiplied, and added
    for (int32_t tile = first_tile; tile < all_tiles; tile += clusters) {
      int32_t first_row, outputs;
      PlaceTile<S>(raster, tile, rank, first_row, outputs);
      float sums[kRowTiles][4];
      SetTile(sums, 0.0f);
      // Sums of a group that is multiplied, and of the next.
      int32_t products[2][kRowTiles][4];
      const auto start = [&]<int kSet>() {
        WaitForPhase(SharedAddress(filled + started.index), started.parity);
        const uint64_t w = SharedMatrix(my_w + started.index * S::kStageBytes, 1024);
        const uint64_t x =
            SharedMatrix(my_stages + started.index * S::kStageBytes + S::kWBytes, 1024);
        started.Next();
        FenceGroup();
#pragma unroll
        for (int s = 0; s < kGroupSlices; ++s) {
          GroupMultiplyAdd(products[kSet], Further(w, s * 32), Further(x, s * 32), s > 0);
        }
        CommitGroup();
      };
      const auto finish = [&]<int kSet>() {
        const uint32_t of_rows =
            my_stages + stage.index * S::kStageBytes + S::kScalesAt + lane % 4 * 8;
        const float2 scales =
            LoadSharedPair(my_w + stage.index * S::kStageBytes + WScalesAt(warp % 4, lane / 4));
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
          AddGroup(products[kSet][j], scales, LoadSharedPair(of_rows + j * 32), sums[j]);
        }
        __syncwarp();  // all lanes have read the stage
        if constexpr (kClusterBlocks == 1) {
          if (lane == 0) Arrive(SharedAddress(emptied + stage.index));
        } else {
          if (lane < kClusterBlocks) ArriveAt(SharedAddress(emptied + stage.index), lane);
        }
        stage.Next();
      };
      int32_t group = 0;
      for (; group + 1 < groups; group += 2) {
        start.template operator()<0>();
        start.template operator()<1>();
        WaitForGroups<1>();
        finish.template operator()<0>();
        WaitForGroups<0>();
        finish.template operator()<1>();
      }
      if (group < groups) {
        start.template operator()<0>();
        WaitForGroups<0>();
        finish.template operator()<0>();
      }
      const int32_t output = outputs * S::kOutputs + warp * 16 + lane / 4;
      const int32_t row = first_row + lane % 4 * 2;
      AddBias(args, output, output + 8, sums);
      if ((outputs + 1) * S::kOutputs <= args.out && first_row + S::kRows <= args.m) {
        WriteTile<true>(args, output, row, sums);
      } else {
        WriteTile<false>(args, output, row, sums);
      }
    }
  }
  if constexpr (kClusterBlocks > 1) SynchronizeCluster();  // others may still write here
#endif
}

template <typename S>
Raster RasterFor(const Int8Operands& operands) {
  return RasterOf(operands.product, S::kRows, S::kClusterBlocks * S::kOutputs, kBandRows);
}

template <int kTileRows>
cudaError_t LaunchBatch(const Int8Operands& operands, const Stream& stream) {
  using S = Shape<1, kTileRows>;
  const Raster raster = RasterFor<S>(operands);
  const int64_t at_once = CurrentDevice().multiprocessors;
  return LaunchAs({.starts_early = true}, Int8GroupsKernel<1, kTileRows>,
                  dim3(static_cast<unsigned>(std::min(raster.count(), at_once))), S::kThreads,
                  S::kSharedBytes, stream, operands, raster);
}

cudaError_t LaunchPrompt(const Int8Operands& operands, const Stream& stream) {
  using S = Shape<2, 2 * kPanelRows>;
  static_assert(S::kThreads == kGroupsThreads);
  thread_local ClustersAtOnce at_once;
  return LaunchRaster<S::kClusterBlocks>(Int8GroupsKernel<2, 2 * kPanelRows>, S::kSharedBytes,
                                         RasterFor<S>(operands), at_once, stream, operands);
}

}  // namespace

bool HasInt8GroupMatmul() {
  thread_local CodeHere code;
  return code.Has(Int8GroupsKernel<2, 2 * kPanelRows>, kGroupsSharedBytes);
}

cudaError_t MatmulInt8ByGroups(const Int8Operands& operands, Stream stream) {
  const int32_t m = operands.product.m;
  if (m <= 8) return LaunchBatch<8>(operands, stream);
  if (m <= 16) return LaunchBatch<16>(operands, stream);
  if (m <= 32) return LaunchBatch<32>(operands, stream);
  if (m <= 64) return LaunchBatch<64>(operands, stream);
  return m <= kMatmulBatchRows ? LaunchBatch<128>(operands, stream)
                               : LaunchPrompt(operands, stream);
}

}  // namespace winnow::kernels::cuda

// Mapping, kBlocks for many rows on Hopper: matmul_wgmma.cu with fewer bytes. W is the left operand of a warpgroup's matrix
// instructions and comes from registers, where a lane makes its fragments of a record (block_order.h), once for a tile's rows;
// x is the right one and comes from shared memory as panels. The chains of matrix instructions are those of plain weights, and
// so are the bits.
//
// A block has 128 outputs by 128 or 176 rows, its warpgroups and sums as matmul_wgmma.cu has them. Two blocks are a cluster that
// shares rows: each copies half of their panels to both. A warp has a ring of records, of its 16 outputs. One warp copies panels
// and one records, over the borders of tiles. While matrix instructions multiply a panel, a warp makes its weights of the next,
// also over the border of segments. The two sets of fragments change places in a pattern that is known when this is compiled, or
// else the compiler lets each instruction wait for the one before: so a segment is an even number of panels.
//
// Gates and ups (MatmulGated): the first warpgroup has 64 gates, the second the ups that belong to them, and warps meet in
// shared memory (GateTile).
//
// With many rows it is power that bounds, as there, and making weights takes its share: 130 to 250 instructions a panel and warp.
// One H200, 28,672 outputs by 4,096, us:
//
//   rows                                      256   512   1024   2048
//   plain weights                             104   176    365    786
//   the same and widening, of which 84 to 100 194   266    455    876
//   L4x32                                     114   193    424    808
//   I4x128                                    123   209    448    883
//   Q4_0                                      130   222    458    900
//   F8x128                                    132   225    468    932
//   Q8_0                                      142   241    514    961
//   Q6_K                                      148   251    546  1,043
//   Q4_1                                      162   276    549  1,041
//   Q4_K                                      166   285    569  1,110
//
// Tried and lost (TFLOP/s of 2048 rows, 28,672 by 4,096 and 4,096 by 14,336, F8x128 and L4x32; as it is 516, 602; 595, 713):
//   weights of a segment's first panel made when the segment before has ended      509, 605; 571, 682
//   160 rows, and outputs written beside the next tile's first panels              479, 526; 589, 636
//   the third warpgroup makes tiles in shared memory, each block of the cluster half of them for both, and the others multiply them
//     as matmul_wgmma.cu does: it is late, 1,200 to 1,500 cycles a stage of 768    378, 399; 458, 495
#include <limits>

#include "kernels/cuda/matmul_blocks_parts.cuh"
#include "kernels/cuda/matmul_wgmma_parts.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kClusterBlocks = 2;
constexpr int kPanelSlices = 2, kPairSlices = 2 * kPanelSlices;
constexpr int kMostBlockRows = 176;
constexpr int32_t kBandRows = 16;
[[maybe_unused]] constexpr int kMultiplyRegisters = 232, kFillRegisters = 40;
static_assert(SharesRegisters(kMultiplyRegisters, kFillRegisters));

template <WeightType kType, int kBlockRows>
struct Rings {
  static constexpr BlockFormat kFormat = BlockFormatOf(kType);
  static constexpr int kRowTiles = kBlockRows / 8;
  static constexpr int kSlots = 3;  // of a warp's ring of records
  // Tiles of 16 outputs; the warp of an up comes so many after its gate's.
  static constexpr int kWTiles = kGroupsWarps, kWarpsToUp = kWTiles / 2;
  static constexpr uint32_t kXBytes = kBlockRows * (kPanelBytes / kPanelRows);
  static constexpr uint32_t kSlotBytes = kFormat.most_record_bytes();
  static constexpr uint32_t kRingBytes = kSlots * kSlotBytes;
  static constexpr uint32_t kGatesBytes = kWarpsToUp * GateBytes(kRowTiles);
  static constexpr uint32_t kOtherBytes = 1024 + kWTiles * kRingBytes + kGatesBytes;
  static constexpr int kStages = std::min<int>(6, (kGroupsSharedBytes - kOtherBytes) / kXBytes);
  static constexpr size_t kSharedBytes = kStages * kXBytes + kOtherBytes;
  static_assert(kSlotBytes % 16 == 0 && kStages >= 3);
  static_assert(kFormat.stage_slices() % kPairSlices == 0);
  static_assert(kFormat.block_slices == 1 || kFormat.block_slices % kPairSlices == 0);
};

// A block's tile: its rows, and which 128 outputs.
template <int kBlockRows>
__device__ __forceinline__ void PlaceTile(const Raster& raster, int32_t tile, int rank,
                                          int32_t& first_row, int32_t& outputs) {
  int32_t row_tile, output_tile;
  raster.Place(tile, row_tile, output_tile);
  first_row = row_tile * kBlockRows;
  outputs = output_tile * kClusterBlocks + rank;
}

template <WeightType kType, int kBlockRows>
__global__ void __launch_bounds__(kGroupsThreads, 1)
    BlocksGroupsKernel(const __grid_constant__ BlockOperands operands, const Raster raster) {
#ifdef WINNOW_WGMMA
  using R = Rings<kType, kBlockRows>;
  constexpr BlockFormat kFormat = BlockFormatOf(kType);
  constexpr int kRecordSlices = kFormat.stage_slices(), kRowTiles = R::kRowTiles;
  const Operands& args = operands.product;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t x_filled[R::kStages], x_emptied[R::kStages];
  __shared__ uint64_t w_filled[kGroupsWarps][R::kSlots], w_emptied[kGroupsWarps][R::kSlots];
  const uint32_t shared_at = SharedAddress(dynamic);
  const uint32_t x_at = (shared_at + 1023) / 1024 * 1024;    // [kStages] rows of panels
  const uint32_t rings_at = x_at + R::kStages * R::kXBytes;  // [warps][kSlots] records
  const uint32_t gates_at = rings_at + R::kWTiles * R::kRingBytes;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto rank = static_cast<int>(RankInCluster());
  if (threadIdx.x < R::kStages) {
    InitBarrier(SharedAddress(x_filled + threadIdx.x));
    InitBarrier(SharedAddress(x_emptied + threadIdx.x), kClusterBlocks * kGroupsWarps);
  }
  if (warp < kGroupsWarps && lane < R::kSlots) {
    InitBarrier(SharedAddress(w_filled[warp] + lane));
    InitBarrier(SharedAddress(w_emptied[warp] + lane));
  }
  FenceBarriers();
  SynchronizeCluster();
  const auto first_tile = static_cast<int32_t>(blockIdx.x) / kClusterBlocks;
  const auto clusters = static_cast<int32_t>(gridDim.x) / kClusterBlocks;
  const auto all_tiles = static_cast<int32_t>(raster.count());
  if (warp >= kGroupsWarps) {
    GiveUpRegisters<kFillRegisters>();
    if (warp == kGroupsWarps) {
      constexpr int kMyRows = kBlockRows / kClusterBlocks;
      static_assert(kMyRows % 8 == 0);  // as a panel's pieces come again
      InTurn<R::kStages> stage;
      for (int32_t tile = first_tile; tile < all_tiles; tile += clusters) {
        int32_t first_row, outputs;
        PlaceTile<kBlockRows>(raster, tile, rank, first_row, outputs);
        const RowsOfLane<kMyRows> rows(args, first_row + rank * kMyRows, lane);
        for (int32_t slice = 0; slice < args.slices; slice += kPanelSlices) {
          const uint32_t barrier = SharedAddress(x_filled + stage.index);
          WaitForPhase(SharedAddress(x_emptied + stage.index), stage.parity ^ 1);
          if (lane == 0) ArriveExpecting(barrier, R::kXBytes);
          __syncwarp();
          rows.CopyToAll(x_at + stage.index * R::kXBytes + rank * (R::kXBytes / kClusterBlocks),
                         slice, barrier, (1 << kClusterBlocks) - 1);
          stage.Next();
        }
      }
    } else if (warp == kGroupsWarps + 1) {
      // A lane copies the records of a warp's 16 outputs, of the last that exist where they do not.
      const int32_t tiles = lane < kGroupsWarps ? all_tiles : 0;
      const uint32_t ring_at = rings_at + lane * R::kRingBytes;
      InTurn<R::kSlots> slot;
      for (int32_t tile = first_tile; tile < tiles; tile += clusters) {
        int32_t first_row, outputs;
        PlaceTile<kBlockRows>(raster, tile, rank, first_row, outputs);
        const std::byte* record =
            operands.blocks + WTileOf<R>(args, outputs, lane) * operands.tile_bytes;
        for (int32_t slice = 0; slice < args.slices;) {
          const int32_t end = min(slice + args.slices_per_segment, args.slices);
          while (slice < end) {
            const int32_t count = min(kRecordSlices, end - slice);
            const int32_t bytes = RecordBytes(kFormat, operands.coarse, count);
            const uint32_t barrier = SharedAddress(w_filled[lane] + slot.index);
            WaitForPhase(SharedAddress(w_emptied[lane] + slot.index), slot.parity ^ 1);
            ArriveExpecting(barrier, bytes);
            BulkCopy(ring_at + slot.index * R::kSlotBytes, record, bytes, barrier);
            record += bytes;
            slice += count;
            slot.Next();
          }
        }
      }
    }
  } else {
    TakeRegisters<kMultiplyRegisters>();
    const std::byte* const ring =
        reinterpret_cast<const std::byte*>(dynamic) + (rings_at - shared_at) + warp * R::kRingBytes;
    const uint32_t my_x = __shfl_sync(kFullMask, x_at, 0);  // the same in all threads of a warp
    InTurn<R::kStages> stage;
    InTurn<R::kSlots> slot;
    // All who write here hear that the stage before this one may be filled again.
    const auto release_before = [&] {
      __syncwarp();  // all lanes have waited for what reads it
      if (lane < kClusterBlocks) ArriveAt(SharedAddress(x_emptied + stage.before()), lane);
    };
    // Sums of the segment that is multiplied, and of those before it.
    float sums[kRowTiles][4], totals[kRowTiles][4];
    bool multiplies = false;  // a panel, whose stage is not released yet
    const auto end_segment = [&] {
      WaitForGroups<0>();
      if (multiplies) release_before();
      AddToTile(totals, sums);
    };
    WFragments w[2][kPanelSlices];
    for (int32_t tile = first_tile; tile < all_tiles; tile += clusters) {
      SetTile(totals, -0.0f);
      SetTile(sums, -0.0f);
      for (int32_t slice = 0; slice < args.slices;) {
        const int32_t segment_end = min(slice + args.slices_per_segment, args.slices);
        bool begins = true;
        while (slice < segment_end) {
          const int32_t begin = slice, count = min(kRecordSlices, segment_end - slice);
          const std::byte* const record = ring + slot.index * R::kSlotBytes;
          const std::byte* const fine = record + count * (kLanes * kFormat.value_bytes);
          const std::byte* const coarse = record + count * kFormat.slice_bytes();
          WaitForPhase(SharedAddress(w_filled[warp] + slot.index), slot.parity);
#pragma unroll 1
          for (int k = 0; k < count; k += kPairSlices) {
            decltype(ScalesOfLane<kType>(fine, coarse, lane)) scales;
            const int32_t block = kFormat.block_slices == 1 ? 0
                                                            : (begin + k) / kFormat.block_slices -
                                                                  begin / kFormat.block_slices;
            const auto make = [&](int panel) {
#pragma unroll
              for (int s = 0; s < kPanelSlices; ++s) {
                const int of_pair = panel * kPanelSlices + s;
                if (kFormat.fine_bytes > 0 || of_pair == 0) {
                  scales = ScalesOfLane<kType>(
                      fine + (k + of_pair) * (kTileOutputs * kFormat.fine_bytes),
                      coarse + block * (kTileOutputs * kFormat.coarse_bytes), lane);
                }
                MakeFragments<kType>(record + (k + of_pair) * (kLanes * kFormat.value_bytes),
                                     scales, lane, w[panel][s].of);
              }
            };
            const auto start = [&](int panel) {
              WaitForPhase(SharedAddress(x_filled + stage.index), stage.parity);
              const uint64_t x = SharedMatrix(my_x + stage.index * R::kXBytes, 1024);
              FenceGroup();
#pragma unroll
              for (int i = 0; i < kPanelSlices * 2; ++i) {
                GroupMultiplyAdd(sums, w[panel][i / 2].of[i % 2], Further(x, i * 32), true);
              }
              CommitGroup();
            };
            make(0);
            if (begins) {
              end_segment();
              SetTile(sums, 0.0f);
            }
            start(0);
            WaitForGroups<1>();
            if (!begins) release_before();
            stage.Next();
            begins = false;
            multiplies = true;
            make(1);
            start(1);
            WaitForGroups<1>();
            release_before();
            stage.Next();
          }
          slice += count;
          __syncwarp();  // all lanes have read the record
          if (lane == 0) Arrive(SharedAddress(w_emptied[warp] + slot.index));
          slot.Next();
        }
      }
      end_segment();
      multiplies = false;
      int32_t first_row, outputs;
      PlaceTile<kBlockRows>(raster, tile, rank, first_row, outputs);
      AddEmptySegments(args, totals);
      if (args.gated != nullptr) {
        const int pair = warp % R::kWarpsToUp;
        GateTile<kRowTiles>(args, (outputs * R::kWarpsToUp + pair) * 16, first_row,
                            warp >= R::kWarpsToUp, gates_at + pair * GateBytes(kRowTiles), totals,
                            [] { MeetMultipliers(); });
        continue;
      }
      const int32_t output = outputs * kGroupsOutputs + warp * 16 + lane / 4;
      const int32_t row = first_row + lane % 4 * 2;
      AddBias(args, output, output + 8, totals);
      if ((outputs + 1) * kGroupsOutputs <= args.out && first_row + kBlockRows <= args.m) {
        WriteTile<true>(args, output, row, totals);
      } else {
        WriteTile<false>(args, output, row, totals);
      }
    }
  }
  SynchronizeCluster();  // others may still write here
#endif
}

// Rows up to which weights that are made for each tile of rows are there sooner than those of the whole matrix that are made once
// and written (WidenBlocks), by the table above.
int64_t MostRows(const BlockFormat& format) {
  switch (format.scales) {
    case BlockScales::kBrainPair:
      return std::numeric_limits<int64_t>::max();
    case BlockScales::kHalfZero:
    case BlockScales::kFloat:
      return 1024;
    case BlockScales::kHalf:
      return MadeInPairs(format) ? 1024 : 768;
    case BlockScales::kSignedCodes:
      return 768;
    case BlockScales::kHalfPair:
    case BlockScales::kCodes:
    default:
      return 384;
  }
}

template <int kBlockRows>
Raster RasterOfRows(const Operands& operands) {
  return RasterOf(operands, kBlockRows, kClusterBlocks * kGroupsOutputs, kBandRows);
}
template <int kBlockRows>
int64_t CostOf(const Operands& operands) {
  return PairsCost(RasterOfRows<kBlockRows>(operands), kBlockRows);
}

template <WeightType kType, int kBlockRows>
cudaError_t LaunchBlocks(const BlockOperands& operands, Stream stream) {
  thread_local ClustersAtOnce at_once;
  return LaunchRaster<kClusterBlocks>(
      BlocksGroupsKernel<kType, kBlockRows>, Rings<kType, kBlockRows>::kSharedBytes,
      RasterOfRows<kBlockRows>(operands.product), at_once, stream, operands);
}

}  // namespace

bool TakesBlocksOfManyRows(int64_t m, const DeviceWeights& w) {
  const int64_t slices = SlicesOf(w.in);
  thread_local CodeHere code;
  return m > kMatmulBatchRows && m <= MostRows(BlockFormatOf(w.type)) &&
         slices % kPairSlices == 0 && CeilDiv(slices, kMatmulSegments) % kPairSlices == 0 &&
         code.Has(BlocksGroupsKernel<WeightType::kQ4_1, kMostBlockRows>, kGroupsSharedBytes);
}

cudaError_t MatmulBlocksOfManyRows(const Operands& operands, const DeviceWeights& w,
                                   Stream stream) {
  const BlockOperands all = BlockOperandsOf(operands, w);
  const bool small = CostOf<128>(operands) <= CostOf<kMostBlockRows>(operands);
  return WithBlockType(w.type, [&]<WeightType kType>() {
    return small ? LaunchBlocks<kType, 128>(all, stream)
                 : LaunchBlocks<kType, kMostBlockRows>(all, stream);
  });
}

}  // namespace winnow::kernels::cuda

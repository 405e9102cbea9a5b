// Mapping, kTensor for many rows on Hopper: matrix instructions of a warpgroup (wgmma.cuh), which round as
// those of a warp do, so the chains are those of matmul.cu.
//
// W is the left operand and comes from registers: its packed fragments are what those instructions take, as
// they are. x is the right one and comes from shared memory: a panel of the order (matmul_order.cuh) is what they
// read, as it is. So a stage of either is a few bulk copies of whole pieces of memory.
//
// A block is two warpgroups of 64 outputs each by 128 rows, with two sets of sums in registers (the segment's,
// and those of the segments before), and a warp that copies: six stages of 64 inner values ahead, over the borders
// of the tiles that the block takes one after the other. Two blocks are a cluster that shares outputs: each copies
// half of their weights to both.
//
// What L2 gives is what bounds it: alone, a block of 128 x 128 needs 6 TB/s of it for 400 TFLOP/s.
//
// What was tried and lost (H200; TFLOP/s at 2048 rows, 4096 x 4096 and 4096 x 14336, where it reaches 561 and 606):
//   any device's kernel (matmul.cu)                            229, 245
//   blocks alone, W and x from L2 for each                     495, 511
//   clusters that share rows and not outputs                   499, 546
//   clusters of four that share both                           488, 545; 30 of them find room, so 12 of 132
//                                                              multiprocessors idle
//   telling others of a free stage with release at cluster     238, 239, of four: each waits for all its reads
//   the same and a wait with acquire at cluster, of two         a prompt's products: 239 instead of 438
//   bands of 3, 4, 6 or 16 tiles of rows in place of 8         within 3 % at 2048 rows, no better at 8192
//
// compute-sanitizer's racecheck reports copies into a stage against the reads of W from it by the warps that used it
// before, of blocks alone and of clusters, with and without __syncwarp before the arrival and with arrivals at cluster scope.
// Those reads are over by then: a warp arrives after it has waited for the matrix instructions that took what its
// lanes had read. Why the tool does not follow that is not known.
#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_parts.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kGroups = 2;  // that multiply
constexpr int kBlockThreads = (kGroups + 1) * kGroupThreads;
constexpr int kBlockOutputs = kGroups * 64;
constexpr int kBlockRows = 128;
constexpr int kWTiles = kBlockOutputs / 16;
constexpr int kXPanels = kBlockRows / kPanelRows;
constexpr int kTileBytes = 2 * kLanes * 16;  // of W, a slice
constexpr int kStages = 6;
[[maybe_unused]] constexpr int kBandRows = 8;  // tiles of a cluster side by side

template <int kStageSlices>
constexpr uint32_t StageBytes() {
  return kXPanels * kPanelBytes + kWTiles * kStageSlices * kTileBytes;
}
template <int kStageSlices>
constexpr size_t SharedBytes() {
  return size_t{1024} + kStages * StageBytes<kStageSlices>();
}

// Tiles of clusters: `kBandRows` of the rows side by side, then the next outputs, so that what runs at once
// reads little of either operand.
struct Raster {
  int32_t row_tiles, output_tiles;

#ifdef WINNOW_WGMMA
  __device__ int32_t count() const { return row_tiles * output_tiles; }
  __device__ void Place(int32_t tile, int32_t& row_tile, int32_t& output_tile) const {
    const int32_t band = tile / (kBandRows * output_tiles);
    const int32_t in_band = tile - band * kBandRows * output_tiles;
    const int32_t rows = min(kBandRows, row_tiles - band * kBandRows);
    row_tile = band * kBandRows + in_band % rows;
    output_tile = in_band / rows;
  }
#endif
};

// A thread's values of a tile to y; kWhole: all of them exist. What is added to is read sixteen at a time, so that
// they do not wait for one another.
template <bool kWhole>
__device__ __forceinline__ void WriteTile(const Operands& args, int32_t output, int32_t row,
                                          float (&values)[kBlockRows / 8][4]) {
  float* y = args.y + row * args.y_stride + output;
  const auto exists = [&](int j, int e) {
    return kWhole || (row + j * 8 + e % 2 < args.m && output + e / 2 * 8 < args.out);
  };
#pragma unroll
  for (int first = 0; first < kBlockRows / 8; first += 4) {
    float* const at[2] = {y + first * 8 * args.y_stride, y + (first * 8 + 1) * args.y_stride};
    if (args.accumulate) {
      float before[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          before[i][e] = 0.0f;
          if (exists(first + i, e)) before[i][e] = at[e % 2][i * 8 * args.y_stride + e / 2 * 8];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          values[first + i][e] = __fadd_rn(values[first + i][e], before[i][e]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (exists(first + i, e)) {
          at[e % 2][i * 8 * args.y_stride + e / 2 * 8] = values[first + i][e];
        }
      }
    }
  }
}

// kStageSlices: 2, or 1 where a segment is an odd number of slices; then a panel is copied for either half.
template <int kStageSlices, int kClusterBlocks>
__global__ void __launch_bounds__(kBlockThreads, 1)
    GroupsKernel(const __grid_constant__ Operands args, const Raster raster) {
#ifdef WINNOW_WGMMA
  constexpr uint32_t kWBytes = kStageSlices * kTileBytes;
  constexpr uint32_t kXBytes = kXPanels * kPanelBytes;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t filled[kStages], emptied[kStages];
  const uint32_t x_at = (SharedAddress(dynamic) + 1023) / 1024 * 1024;  // [kStages] of panels
  const uint32_t w_at = x_at + kStages * kXBytes;  // [kStages][kWTiles][kStageSlices][2][32]
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int rank = kClusterBlocks == 1 ? 0 : static_cast<int>(RankInCluster());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(SharedAddress(filled + i));
      InitBarrier(SharedAddress(emptied + i), kClusterBlocks * kGroups * (kGroupThreads / kLanes));
    }
    FenceBarriers();
  }
  if constexpr (kClusterBlocks == 1) {
    __syncthreads();
  } else {
    SynchronizeCluster();
  }
  const auto first_tile = static_cast<int32_t>(blockIdx.x) / kClusterBlocks;
  const auto clusters = static_cast<int32_t>(gridDim.x) / kClusterBlocks;
  int stage = 0;
  uint32_t parity = 0;
  const auto next_stage = [&] {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  };
  if (warp >= kGroups * kGroupThreads / kLanes) {
    GiveUpRegisters<40>();
    // Copies. Of what does not exist, the last that does in its place: so all stages have the same size.
    const int32_t w_tiles = (args.out + 15) / 16, panels = (args.m + kPanelRows - 1) / kPanelRows;
    const int32_t panel_slices = (args.slices + 1) / 2;
    const int32_t tiles = warp == kGroups * kGroupThreads / kLanes ? raster.count() : 0;
    for (int32_t tile = first_tile; tile < tiles; tile += clusters) {
      int32_t row_tile, output_tile;
      raster.Place(tile, row_tile, output_tile);
      const int32_t first_w = output_tile * kWTiles;
      const int32_t first_panel = (row_tile * kClusterBlocks + rank) * kXPanels;
      const bool is_w = lane < kWTiles;
      const int piece = is_w ? lane : lane - kWTiles;
      const bool mine = is_w ? piece % kClusterBlocks == rank : piece < kXPanels;
      const uint4* from =
          is_w ? args.w + int64_t{min(first_w + piece, w_tiles - 1)} * args.slices * 2 * kLanes
               : args.x + int64_t{min(first_panel + piece, panels - 1)} * panel_slices *
                              (kPanelBytes / 16);
      const uint32_t to = is_w ? w_at + piece * kWBytes : x_at + piece * kPanelBytes;
      for (int32_t slice = 0; slice < args.slices; slice += kStageSlices) {
        const uint32_t barrier = SharedAddress(filled + stage);
        WaitForPhase(SharedAddress(emptied + stage), parity ^ 1);
        if (lane == 0) ArriveExpecting(barrier, StageBytes<kStageSlices>());
        __syncwarp();
        if (mine) {
          const uint4* at = from + (is_w ? slice * 2 * kLanes : slice / 2 * (kPanelBytes / 16));
          const uint32_t there = to + stage * (is_w ? kWTiles * kWBytes : kXBytes);
          const uint32_t bytes = is_w ? kWBytes : kPanelBytes;
          if (is_w && kClusterBlocks > 1) {
            BulkCopyToAll(there, at, bytes, barrier, (1 << kClusterBlocks) - 1);
          } else {
            BulkCopy(there, at, bytes, barrier);
          }
        }
        next_stage();
      }
    }
  } else {
    TakeRegisters<232>();
    const uint32_t my_w = w_at + warp * kWBytes + lane * 16;
    // All who write here hear that a stage may be filled again.
    const auto release = [&](int of_stage) {
      __syncwarp();  // all lanes have read it
      if constexpr (kClusterBlocks == 1) {
        if (lane == 0) Arrive(SharedAddress(emptied + of_stage));
      } else {
        if (lane < kClusterBlocks) ArriveAt(SharedAddress(emptied + of_stage), lane);
      }
    };
    float sums[kBlockRows / 8][4], totals[kBlockRows / 8][4];
    uint32_t w[2][kStageSlices * 2][4];
    bool add = false;
    // Multiplies a stage; those before have ended when it returns.
    const auto use = [&](int32_t slice, uint32_t(&of_w)[kStageSlices * 2][4]) {
      WaitForPhase(SharedAddress(filled + stage), parity);
      const uint32_t w_stage = my_w + stage * (kWTiles * kWBytes);
#pragma unroll
      for (int i = 0; i < kStageSlices * 2; ++i) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(of_w[i][0]), "=r"(of_w[i][1]), "=r"(of_w[i][2]), "=r"(of_w[i][3])
                     : "r"(w_stage + i * (kLanes * 16))
                     : "memory");
      }
      const uint32_t x_stage = x_at + stage * kXBytes + (kStageSlices == 1 ? slice % 2 * 64 : 0);
      const uint64_t of_x = SharedMatrix(x_stage, 1024);
      FenceGroup();
#pragma unroll
      for (int i = 0; i < kStageSlices * 2; ++i) {
        GroupMultiplyAdd(sums, of_w[i], Further(of_x, i * 32), add);
        add = true;
      }
      CommitGroup();
      WaitForGroups<1>();
      next_stage();
    };
    const auto before = [&] { return stage == 0 ? kStages - 1 : stage - 1; };
    const auto before_that = [&] { return stage < 2 ? stage + kStages - 2 : stage - 2; };
    for (int32_t tile = first_tile; tile < raster.count(); tile += clusters) {
      for (int32_t slice = 0; slice < args.slices;) {
        const bool is_first = slice == 0;
        const int32_t end = min(slice + args.slices_per_segment, args.slices);
        add = false;
        use(slice, w[0]);
        slice += kStageSlices;
        while (slice + kStageSlices < end) {
          use(slice, w[1]);
          release(before_that());
          use(slice + kStageSlices, w[0]);
          release(before_that());
          slice += 2 * kStageSlices;
        }
        if (slice < end) {
          use(slice, w[1]);
          release(before_that());
          slice += kStageSlices;
        }
        WaitForGroups<0>();
        release(before());
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            totals[j][e] = is_first ? sums[j][e] : __fadd_rn(totals[j][e], sums[j][e]);
          }
        }
      }
      int32_t row_tile, output_tile;
      raster.Place(tile, row_tile, output_tile);
      const int32_t first_output = output_tile * kBlockOutputs;
      const int32_t first_row = (row_tile * kClusterBlocks + rank) * kBlockRows;
      const int32_t output = first_output + warp * 16 + lane / 4;
      const int32_t row = first_row + lane % 4 * 2;
      // What Finish() does, one step for all values after the other.
      const auto for_all = [&](const auto& change) {
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) change(totals[j][e], e / 2);
        }
      };
      if (args.HasEmptySegments()) {
        for_all([](float& value, int) { value = __fadd_rn(value, 0.0f); });
      }
      if (args.bias != nullptr) {
        const float bias[2] = {output < args.out ? args.bias[output] : 0.0f,
                               output + 8 < args.out ? args.bias[output + 8] : 0.0f};
        for_all([&](float& value, int half) { value = __fadd_rn(value, bias[half]); });
      }
      if (first_output + kBlockOutputs <= args.out && first_row + kBlockRows <= args.m) {
        WriteTile<true>(args, output, row, totals);
      } else {
        WriteTile<false>(args, output, row, totals);
      }
    }
  }
  if constexpr (kClusterBlocks > 1) SynchronizeCluster();  // others may still write here
#endif
}

template <int kStageSlices, int kClusterBlocks>
cudaError_t LaunchGroups(const Operands& operands, Stream stream) {
  const auto kernel = GroupsKernel<kStageSlices, kClusterBlocks>;
  const Raster raster{static_cast<int32_t>(CeilDiv(operands.m, kBlockRows * kClusterBlocks)),
                      static_cast<int32_t>(CeilDiv(operands.out, kBlockOutputs))};
  const int64_t tiles = int64_t{raster.row_tiles} * raster.output_tiles;
  if (tiles > 0x7fffffff / 64) return cudaErrorInvalidValue;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kClusterBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kClusterBlocks);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = SharedBytes<kStageSlices>();
  config.attrs = &attribute;
  config.numAttrs = 1;
  // How many clusters run at once; asked of the driver once per thread and device.
  thread_local int device = -1, clusters = 0;
  if (const int current = CurrentDevice().device; current != device || clusters == 0) {
    if (const cudaError_t error =
            AllowShared(reinterpret_cast<const void*>(kernel), config.dynamicSmemBytes);
        error != cudaSuccess) {
      return error;
    }
    if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
        error != cudaSuccess) {
      return error;
    }
    if (clusters < 1) return cudaErrorLaunchOutOfResources;
    device = current;
  }
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, clusters)) * kClusterBlocks;
  return LaunchAs({.cluster_blocks = kClusterBlocks}, kernel, dim3(blocks), kBlockThreads,
                  config.dynamicSmemBytes, stream, operands, raster);
}

template <int kClusterBlocks>
cudaError_t LaunchGroups(const Operands& operands, Stream stream) {
  if (operands.slices % 2 == 0 && operands.slices_per_segment % 2 == 0) {
    return LaunchGroups<2, kClusterBlocks>(operands, stream);
  }
  return LaunchGroups<1, kClusterBlocks>(operands, stream);
}

}  // namespace

bool HasGroupMatmul() {
  thread_local CodeHere code;
  return code.Has(GroupsKernel<2, 2>, SharedBytes<2>());
}

cudaError_t MatmulManyRowsByGroups(const Operands& operands, Stream stream) {
  return operands.m <= kBlockRows ? LaunchGroups<1>(operands, stream)
                                  : LaunchGroups<2>(operands, stream);
}

}  // namespace winnow::kernels::cuda

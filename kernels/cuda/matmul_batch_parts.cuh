// Shared by products of a batch's rows, of plain weights (matmul_batch.cu) and of quantised ones
// (matmul_blocks_batch.cu): the tile of a block, how segments' sums are added, and how kernels are launched. No one else
// includes it.
//
// A tile is 128 outputs by 64 rows, or 64 by 128; a block is two warpgroups of 64 by 64 each, of which a warp has 16 outputs,
// and two blocks stay on a multiprocessor.
//
//   whole   a block takes all inner values of a tile and adds segments up in registers: many tiles
//   split   a cluster of four takes a tile, two segments a block, so that 32 tiles are enough for the device. At the end each
//           block gets, of all eight segments, the sums of a quarter of the rows, in the memory of its stages, and adds
//           them from left to right. This costs 3 us: 64 KB a block, and a multiprocessor sends some 25 GB/s to others
//
// A whole tile may be gated (MatmulGated): half of its outputs are gates, half the ups that belong to them, of two warps of a
// warpgroup or of two warpgroups, which meet in the memory of the stages.
//
// Split is what fits the device at once when it is split. A cluster's blocks are placed by load
// (cudaClusterSchedulingPolicyLoadBalancing): otherwise 128 of them lie on 84 of 132 multiprocessors, which take in no more than
// 60 GB/s each.
#ifndef WINNOW_KERNELS_CUDA_MATMUL_BATCH_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_MATMUL_BATCH_PARTS_CUH_

#include <algorithm>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_parts.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace winnow::kernels::cuda {

inline constexpr int kBatchThreads = 256;
inline constexpr int kBatchResident = 2;       // blocks of a multiprocessor
inline constexpr int kBatchClusterBlocks = 4;  // of a split tile
inline constexpr int kPanelRowTiles = kPanelRows / 8;

// A block's: warpgroups side by side over outputs or over rows, each with rows of `kPanels` panels.
template <int kOutputGroups, int kPanels = 1>
struct BatchTile {
  static constexpr int kRowGroups = 2 / kOutputGroups;
  static constexpr int kOutputs = kOutputGroups * 64;
  static constexpr int kWTiles = kOutputs / 16;
  // The warp of an up comes so many after its gate's.
  static constexpr int kWarpsToUp = kWTiles / 2;
  static constexpr int kRowTiles = kPanels * kPanelRowTiles;  // of a warpgroup
  // A piece of x of 64 inner values.
  static constexpr uint32_t kXBytes = kRowGroups * kPanels * kPanelBytes;
  // Shared memory that the segments' sums of a split tile need: 16 bytes a thread for each tile of rows of a block's share.
  static constexpr size_t kSumsBytes =
      size_t{kMatmulSegments} * (kRowTiles / kBatchClusterBlocks) * kBatchThreads * 16;
  static_assert(size_t{kBatchThreads / kLanes / 2} * GateBytes(kRowTiles) <= kSumsBytes);
};

#ifdef WINNOW_WGMMA
// A block's part of a tile: slices [first, last) of its outputs, `rank` among the blocks of a split one.
struct BatchPart {
  int32_t rank, tile, first, last;
};
template <int kSplit>
__device__ __forceinline__ BatchPart PartOfBlock(const Operands& args) {
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t rank = block % kSplit, slices = kMatmulSegments / kSplit * args.slices_per_segment;
  const int32_t first = min(rank * slices, args.slices);
  return {rank, block / kSplit, first, min(first + slices, args.slices)};
}

// Adds a tile's segments and writes its outputs, of rows `first_row` on. `multiply(slice, end, sums)` makes sums of a warpgroup's slices; calls follow
// one another in the order of slices, this block's. `memory`: kSumsBytes at a multiple of 16 from
// `shared_base` on, where copies that have arrived may lie, but none that are on their way.
template <typename T, int kSplit, typename MultiplySlices>
__device__ __forceinline__ void FinishBatchTile(const Operands& args, int32_t first_row,
                                                const BatchPart& part, const void* shared_base,
                                                uint32_t memory, const MultiplySlices& multiply) {
  constexpr int kOutputGroups = T::kOutputs / 64, kRowTiles = T::kRowTiles;
  constexpr int kSegments = kMatmulSegments / kSplit;  // of a block
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int output_group = warp / 4 % kOutputGroups, row_group = warp / 4 / kOutputGroups;
  const int32_t rank = part.rank, tile = part.tile, first = part.first, last = part.last;
  const int32_t segment_slices = args.slices_per_segment;
  const int32_t output = tile * T::kOutputs + output_group * 64 + warp % 4 * 16 + lane / 4;
  const int32_t row = first_row + row_group * kRowTiles * 8 + lane % 4 * 2;
  // Segments without slices are added as zeros, as the kernels for few rows do.
  if constexpr (kSplit == 1) {
    float sums[kRowTiles][4], totals[kRowTiles][4];
    multiply(0, min(segment_slices, last), totals);
#pragma unroll 1
    for (int s = 1; s < kMatmulSegments; ++s) {
      multiply(min(s * segment_slices, last), min((s + 1) * segment_slices, last), sums);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) totals[j][e] = __fadd_rn(totals[j][e], sums[j][e]);
      }
    }
    if (args.gated != nullptr) {
      const int index = warp % T::kWTiles, pair = index % T::kWarpsToUp;
      GateTile<kRowTiles>(args, tile * (T::kOutputs / 2) + pair * 16,
                          first_row + row_group * kRowTiles * 8, index >= T::kWarpsToUp,
                          memory + (row_group * T::kWarpsToUp + pair) * GateBytes(kRowTiles),
                          totals, [] { __syncthreads(); });
      return;
    }
    AddBias(args, output, output + 8, totals);
    WriteTile<false>(args, output, row, totals);
  } else {
    // A block's share of a warpgroup's tiles of rows.
    constexpr int kShare = kRowTiles / kSplit;
    float sums[kSegments][kRowTiles][4];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      multiply(min(first + s * segment_slices, last), min(first + (s + 1) * segment_slices, last),
               sums[s]);
    }
    // In the place of stages, [kMatmulSegments][kShare][threads] of 16 bytes, once all of the cluster have read their last.
    const auto at = [&](int segment, int j) {
      return ((segment * kShare + j) * kBatchThreads + static_cast<int>(threadIdx.x)) * 16;
    };
    MeetParts<kSplit>();
#pragma unroll
    for (int owner = 0; owner < kSplit; ++owner) {
      const uint32_t there =
          AddressIn<kSplit>(shared_base, owner) + memory - SharedAddress(shared_base);
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
#pragma unroll
        for (int j = 0; j < kShare; ++j) {
          const float(&values)[4] = sums[s][owner * kShare + j];
          asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                           there + at(rank * kSegments + s, j)),
                       "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
                       : "memory");
        }
      }
    }
    MeetParts<kSplit>();
    float totals[kShare][4];
#pragma unroll
    for (int j = 0; j < kShare; ++j) {
      LoadShared(memory + at(0, j), totals[j]);
#pragma unroll
      for (int s = 1; s < kMatmulSegments; ++s) {
        float part[4];
        LoadShared(memory + at(s, j), part);
#pragma unroll
        for (int e = 0; e < 4; ++e) totals[j][e] = __fadd_rn(totals[j][e], part[e]);
      }
    }
    AddBias(args, output, output + 8, totals);
    WriteTile<false>(args, output, row + rank * kShare * 8, totals);
  }
}
#endif

// Launches `kernel`, kSplit blocks a tile along x; `told` is of the kernel and the thread.
template <int kSplit, typename Args>
cudaError_t LaunchBatchTiles(void (*kernel)(Args), dim3 grid, size_t shared_bytes,
                             bool starts_early, int& told, const Stream& stream, const Args& args) {
  // Told to the driver once per thread and device.
  if (const int current = CurrentDevice().device; kSplit > 1 && current != told) {
    if (const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeClusterSchedulingPolicyPreference,
                                 cudaClusterSchedulingPolicyLoadBalancing);
        error != cudaSuccess) {
      return error;
    }
    told = current;
  }
  return LaunchAs({.starts_early = starts_early, .cluster_blocks = kSplit}, kernel, grid,
                  kBatchThreads, shared_bytes, stream, args);
}

// Whether so many tiles are split.
inline bool SplitsBatchTiles(int64_t tiles) {
  return tiles * kBatchClusterBlocks <= int64_t{CurrentDevice().multiprocessors} * kBatchResident;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_MATMUL_BATCH_PARTS_CUH_

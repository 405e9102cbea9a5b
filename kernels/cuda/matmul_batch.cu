// Mapping, kTensor for the rows of a batch on Hopper, 33 to kMatmulBatchRows: W comes from HBM once, and all
// multiprocessors read it at any time, with much of it on its way.
//
// W is the left operand of a warpgroup's matrix instructions and comes from registers, x the right one and comes from
// shared memory as panels. A tile is 128 outputs by 64 rows, or 64 by 128; a block is two warpgroups
// of 64 by 64 each, and two blocks stay on a multiprocessor. Each warp copies a piece of each stage of 64 inner values,
// four stages ahead: its own 16 outputs of W, as soon as it has read those before, or one of W or x that others read too,
// one stage later.
//
//   whole   a block takes all inner values of a tile and adds segments up in registers: many tiles
//   split   a cluster of four takes a tile, two segments a block, so that 32 tiles are enough for the device. At the end each
//           block gets, of all eight segments, the sums of a quarter of the rows, in the memory of its stages, and adds
//           them from left to right. This costs 3 us: 64 KB a block, and a multiprocessor sends some 25 GB/s to others
//
// Split is what fits the device at once when it is split. A cluster's blocks are placed by load
// (cudaClusterSchedulingPolicyLoadBalancing): otherwise 128 of them lie on 84 of 132 multiprocessors, which take in no more than
// 60 GB/s each.
//
// Tried and lost (H100, Llama-3.1-8B's shapes; qkv, o, gate_up, down in us; a plain read of W: 17.7, 12.5, 76.3, 39.1;
// as it is: 64 rows 24.4, 18.9, 85.5, 48.4 to 52.5, 128 rows 28.9, 19.4, 86.8, 49.0 to 50.3):
//   64 rows   any device's kernel                                   51.3, 52.1, 106.9, 170.8
//             split                                                 24.5, 19.3, 103.0,  48.4
//             whole                                                 31.2, 31.0,  85.3,  99.8
//             the first warp copies all pieces of a stage: split    25.8, 21.8, 106.4,  54.8; whole 43.2, 44.0, 87.4, 144.4
//             split, where the driver puts blocks by default        25.9, 21.7, 100.7,  54.7
//             split, sums sent by st.async                          26.1, 19.8, 105.3,  49.4
//             split, a block's own share not sent                   24.4, 19.2,     -,  49.1
//             split, 256 outputs, one block                         24.7, 20.2,  97.8,  50.5
//             split, 128 rows of which half exist                   34.5, 19.2, 126.7,  48.8
//   128 rows  matmul_wgmma.cu                                       34.0, 34.6,  90.9, 104.3
//             split                                                 35.7, 19.8, 135.3,  49.9
//             whole                                                 30.2, 29.3,  87.7,  90.5
//             128 outputs, four warpgroups, one block: split        35.8, 32.1, 139.5,  74.9: 30 clusters find room
//             the same, whole                                       35.6, 35.5,  87.1, 113.3
//   192 rows  matmul_wgmma.cu                                       31.5, 31.3, 127.3,  93.0
//             split, two tiles of rows                              51.2, 34.3, 235.9,  81.2
//             whole, two tiles of rows                              35.6, 29.3, 148.0,  99.0
//   32 rows   FewRowsKernel (matmul.cu)                             20.6, 13.5,  84.0,  43.1
//             split, or whole for gate_up                           24.8, 21.2,  84.3,  53.5
//
// compute-sanitizer's racecheck reports copies of W into a stage against the reads of the warps that used it before, of the
// kernel whose warps share what they copy. Those reads are over by then: a warp arrives after it has waited for the matrix
// instructions that took what its lanes had read. Why the tool does not follow that is not known.
#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_parts.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kBlockThreads = 2 * kGroupThreads;
[[maybe_unused]] constexpr int kBlockWarps = kBlockThreads / kLanes;
constexpr int kGroupOutputs = 64;
constexpr int kGroupRowTiles = kPanelRows / 8;
constexpr int kStages = 4;
constexpr int kResident = 2;       // blocks of a multiprocessor
constexpr int kClusterBlocks = 4;  // of a split tile

// A block's: warpgroups side by side over outputs or over rows.
template <int kOutputGroups, int kStageSlices>
struct Tile {
  static constexpr int kRowGroups = 2 / kOutputGroups;
  static constexpr int kOutputs = kOutputGroups * kGroupOutputs;
  static constexpr int kWTiles = kOutputs / 16;
  static constexpr uint32_t kWBytes = kStageSlices * kWTileBytes;
  static constexpr uint32_t kWStageBytes = kWTiles * kWBytes;
  static constexpr uint32_t kXStageBytes = kRowGroups * kPanelBytes;
  // Panels are aligned. The segments' sums find room where stages were: 16 bytes a thread for each tile of rows of a
  // block's share.
  static constexpr size_t kSharedBytes = size_t{1024} + kStages * (kXStageBytes + kWStageBytes);
  static_assert(kMatmulSegments * (kGroupRowTiles / kClusterBlocks) * kBlockThreads * 16 <=
                kStages * (kXStageBytes + kWTileBytes * kWTiles));
};

// kStageSlices: 2, or 1 where a segment is an odd number of slices; then a panel is copied for either half. kSplit:
// kClusterBlocks or 1.
template <int kOutputGroups, int kSplit, int kStageSlices>
__global__ void __launch_bounds__(kBlockThreads, kResident)
    BatchKernel(const __grid_constant__ Operands args) {
#ifdef WINNOW_WGMMA
  using T = Tile<kOutputGroups, kStageSlices>;
  constexpr int kSegments = kMatmulSegments / kSplit;  // of a block
  constexpr bool kOwnW = T::kRowGroups == 1;           // what a warp copies of W no other reads
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t filled[kStages], emptied[kStages];
  const uint32_t x_at = (SharedAddress(dynamic) + 1023) / 1024 * 1024;  // [kStages] of panels
  const uint32_t w_at = x_at + kStages * T::kXStageBytes;  // [kStages][kWTiles][kStageSlices] tiles
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int rank = static_cast<int>(blockIdx.x) % kSplit;
  const int32_t tile = static_cast<int32_t>(blockIdx.x) / kSplit;
  const int32_t segment_slices = args.slices_per_segment;
  const int32_t first = min(rank * kSegments * segment_slices, args.slices);
  const int32_t last = min(first + kSegments * segment_slices, args.slices);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(SharedAddress(filled + i), T::kWTiles + (args.m + kPanelRows - 1) / kPanelRows);
      InitBarrier(SharedAddress(emptied + i), kBlockWarps);
    }
    FenceBarriers();
  }
  __syncthreads();

  // A warp's piece of W, of the last tile that exists where its own does not, and one of x: rows that exist.
  const bool copies_w = warp < T::kWTiles;
  const int panel = kOwnW ? warp : warp - T::kWTiles;
  const int32_t rows = min(args.m - panel * kPanelRows, kPanelRows);
  const bool copies_x = panel >= 0 && panel < T::kRowGroups && rows > 0;
  const uint32_t x_bytes = (rows + 7) / 8 * (kPanelBytes / kGroupRowTiles);
  const uint4* of_w = args.w + int64_t{min(tile * T::kWTiles + warp, (args.out + 15) / 16 - 1)} *
                                   args.slices * kWTilePieces;
  const uint4* of_x = args.x + int64_t{panel} * ((args.slices + 1) / 2) * (kPanelBytes / 16);
  uint64_t read_once;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once));
  const auto copy_w = [&](int stage, int32_t slice) {
    if (!copies_w || lane != 0) return;
    const uint32_t barrier = SharedAddress(filled + stage);
    ArriveExpecting(barrier, T::kWBytes);
    BulkCopy(w_at + stage * T::kWStageBytes + warp * T::kWBytes,
             of_w + int64_t{slice} * kWTilePieces, T::kWBytes, barrier, read_once);
  };
  const auto copy_x = [&](int stage, int32_t slice) {
    if (!copies_x || lane != 0) return;
    const uint32_t barrier = SharedAddress(filled + stage);
    ArriveExpecting(barrier, x_bytes);
    BulkCopy(x_at + stage * T::kXStageBytes + panel * kPanelBytes,
             of_x + int64_t{slice / 2} * (kPanelBytes / 16), x_bytes, barrier);
  };
  for (int i = 0; i < kStages && first + i * kStageSlices < last; ++i) {
    copy_w(i, first + i * kStageSlices);
  }
  WaitForEarlier();
  LetNextStart();
  for (int i = 0; i < kStages && first + i * kStageSlices < last; ++i) {
    copy_x(i, first + i * kStageSlices);
  }
  __syncwarp();

  const int group = warp / 4;
  const int output_group = group % kOutputGroups, row_group = group / kOutputGroups;
  const uint32_t my_w = w_at + (output_group * 4 + warp % 4) * T::kWBytes;

  const uint32_t my_x = x_at + row_group * kPanelBytes;
  int stage = 0;
  uint32_t parity = 0;
  // The sums of slices of a segment.
  const auto multiply = [&](int32_t slice, int32_t end, float(&sums)[kGroupRowTiles][4]) {
#pragma unroll
    for (int j = 0; j < kGroupRowTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
    }
    for (; slice < end; slice += kStageSlices) {
      WaitForPhase(SharedAddress(filled + stage), parity);
      uint32_t w[kStageSlices * 2][4];
#pragma unroll
      for (int i = 0; i < kStageSlices * 2; ++i) {
        LoadMatrix4(my_w + stage * T::kWStageBytes + i / 2 * kWTileBytes + WFragmentAt(lane, i % 2),
                    w[i]);
      }
      const uint64_t x = SharedMatrix(
          my_x + stage * T::kXStageBytes + (kStageSlices == 1 ? slice % 2 * 64 : 0), 1024);
      FenceGroup();
#pragma unroll
      for (int i = 0; i < kStageSlices * 2; ++i) {
        GroupMultiplyAdd(sums, w[i], Further(x, i * 32), true);
      }
      CommitGroup();
      WaitForGroups<0>();
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) Arrive(SharedAddress(emptied + stage));
      const int32_t ahead = slice + kStages * kStageSlices;
      if constexpr (kOwnW) {
        if (ahead < last) copy_w(stage, ahead);
      }
      // Pieces that other warps read, too: those warps are done with the stage before by now.
      if (const int32_t next = ahead - kStageSlices;
          slice > first && next < last && (copies_x || !kOwnW)) {
        const int before = stage == 0 ? kStages - 1 : stage - 1;
        WaitForPhase(SharedAddress(emptied + before), stage == 0 ? parity ^ 1 : parity);
        if constexpr (!kOwnW) copy_w(before, next);
        copy_x(before, next);
      }
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };
  const auto finish = [&](const float(&values)[4], int row_tile) {
    const int32_t output =
        tile * T::kOutputs + output_group * kGroupOutputs + warp % 4 * 16 + lane / 4;
    const int32_t row = row_group * kPanelRows + row_tile * 8 + lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (output + e / 2 * 8 < args.out && row + e % 2 < args.m) {
        Finish(values[e], output + e / 2 * 8, row + e % 2, args.bias, args.accumulate, args.y,
               args.y_stride);
      }
    }
  };
  // Segments without slices are added as zeros, as the kernels for few rows do.
  if constexpr (kSplit == 1) {
    float sums[kGroupRowTiles][4], totals[kGroupRowTiles][4];
    multiply(0, min(segment_slices, last), totals);
#pragma unroll 1
    for (int s = 1; s < kMatmulSegments; ++s) {
      multiply(min(s * segment_slices, last), min((s + 1) * segment_slices, last), sums);
#pragma unroll
      for (int j = 0; j < kGroupRowTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) totals[j][e] = __fadd_rn(totals[j][e], sums[j][e]);
      }
    }
#pragma unroll
    for (int j = 0; j < kGroupRowTiles; ++j) finish(totals[j], j);
  } else {
    // A block's share of a warpgroup's tiles of rows.
    constexpr int kShare = kGroupRowTiles / kSplit;
    float sums[kSegments][kGroupRowTiles][4];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      multiply(min(first + s * segment_slices, last), min(first + (s + 1) * segment_slices, last),
               sums[s]);
    }
    // Where the stages were, [kMatmulSegments][kShare][threads] of 16 bytes, once all of the cluster have read their last.
    const auto at = [&](int segment, int j) {
      return ((segment * kShare + j) * kBlockThreads + static_cast<int>(threadIdx.x)) * 16;
    };
    MeetParts<kSplit>();
#pragma unroll
    for (int owner = 0; owner < kSplit; ++owner) {
      const uint32_t there = AddressIn<kSplit>(dynamic, owner) + x_at - SharedAddress(dynamic);
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
#pragma unroll
    for (int j = 0; j < kShare; ++j) {
      float total[4];
#pragma unroll
      for (int s = 0; s < kMatmulSegments; ++s) {
        float part[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                     : "r"(x_at + at(s, j))
                     : "memory");
#pragma unroll
        for (int e = 0; e < 4; ++e) total[e] = s == 0 ? part[e] : __fadd_rn(total[e], part[e]);
      }
      finish(total, rank * kShare + j);
    }
  }
#endif
}

template <int kOutputGroups, int kSplit, int kStageSlices>
cudaError_t LaunchBatch(const Operands& operands, Stream stream) {
  using T = Tile<kOutputGroups, kStageSlices>;
  const auto kernel = BatchKernel<kOutputGroups, kSplit, kStageSlices>;
  // Told to the driver once per thread and device.
  thread_local int device = -1;
  if (const int current = CurrentDevice().device; kSplit > 1 && current != device) {
    if (const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeClusterSchedulingPolicyPreference,
                                 cudaClusterSchedulingPolicyLoadBalancing);
        error != cudaSuccess) {
      return error;
    }
    device = current;
  }
  const auto tiles = static_cast<unsigned>(CeilDiv(operands.out, T::kOutputs));
  return LaunchAs({.starts_early = !operands.new_weights, .cluster_blocks = kSplit}, kernel,
                  dim3(tiles * kSplit), kBlockThreads, T::kSharedBytes, stream, operands);
}

template <int kOutputGroups, int kSplit>
cudaError_t LaunchBatch(const Operands& operands, Stream stream) {
  if (operands.slices % 2 == 0 && operands.slices_per_segment % 2 == 0) {
    return LaunchBatch<kOutputGroups, kSplit, 2>(operands, stream);
  }
  return LaunchBatch<kOutputGroups, kSplit, 1>(operands, stream);
}

template <int kOutputGroups>
cudaError_t LaunchBatch(const Operands& operands, Stream stream) {
  const int64_t tiles = CeilDiv(operands.out, Tile<kOutputGroups, 2>::kOutputs);
  return tiles * kClusterBlocks <= int64_t{CurrentDevice().multiprocessors} * kResident
             ? LaunchBatch<kOutputGroups, kClusterBlocks>(operands, stream)
             : LaunchBatch<kOutputGroups, 1>(operands, stream);
}

}  // namespace

bool TakesBatchMatmul(int64_t m, int64_t out) {
  // 128 rows of so many outputs, a vocabulary's, the larger tiles of matmul_wgmma.cu read 3 to 5 % faster.
  constexpr int64_t kMostOutputs = 512;  // of a multiprocessor, of more than 64 rows
  if (m <= kMatmulFewRows || m > kMatmulBatchRows) return false;
  if (m > kPanelRows && out > kMostOutputs * CurrentDevice().multiprocessors) return false;
  thread_local CodeHere code;
  return code.Has(BatchKernel<2, kClusterBlocks, 2>, Tile<2, 2>::kSharedBytes);
}

cudaError_t MatmulOfBatch(const Operands& operands, Stream stream) {
  return operands.m <= kPanelRows ? LaunchBatch<2>(operands, stream)
                                  : LaunchBatch<1>(operands, stream);
}

}  // namespace winnow::kernels::cuda

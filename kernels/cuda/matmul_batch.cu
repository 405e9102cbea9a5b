// Mapping, kTensor for the rows of a batch on Hopper, 33 to kMatmulBatchRows: W comes from HBM once, and all
// multiprocessors read it at any time, with much of it on its way.
//
// W is the left operand of a warpgroup's matrix instructions and comes from registers, x the right one and comes from
// shared memory as panels. Each warp copies a piece of each stage of 64 inner values, four stages ahead: its own 16 outputs
// of W, as soon as it has read those before, or one of W or x that others read too, one stage later. Tiles, and how their
// segments are added: matmul_batch_parts.cuh.
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
//             split, eight stages, one block                        a step of 64 sequences at 2K 13.8 ms in place of 12.9
//             nothing of x read, nothing multiplied (to see)        23.8, 17.7,  83.3,  45.4: neither bounds it
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
// and on an H200 (2026-11-29; a plain read of W: 11.0, 7.3, 51, 25.6), where blocks all begin and end at the same time, and HBM waits:
//   64 rows   as it is                                              19.8, 16.1,  65.5,  41.0
//             W's next copy asked for before the instructions end   19.7, 16.1,  64.5,  40.1
//             two stages' instructions on their way, W twice in registers   19.2, 16.1, 64.3, 40.6: a step 9.47 ms as before (9.49)
//             the same with three stages                            19.6, 16.2,  63.9,  40.8: not what is on its way bounds it
//             x copied to the blocks of two tiles by halves         19.5, 17.3,  65.2,  43.3
//             (to see) no x 19.3, 15.4, 64.3, 37.5; nothing multiplied 19.3, 14.4, 63.5, 33.0; neither 18.8, 14.0, 63.0, 32.4;
//             sums not sent 16.4, 13.3, 65.4, 35.6
//   128 rows  as it is                                              27.4, 16.8,  73.3,  37.7
//             two stages' instructions on their way                 26.4, 16.4,  73.8,  37.5: a step 14.72 ms as before (14.72)
//             x copied to the blocks of two tiles by halves         26.5, 26.9,  77.5,  67.3
//
// compute-sanitizer's racecheck reports copies of W into a stage against the reads of the warps that used it before, of the
// kernel whose warps share what they copy. Those reads are over by then: a warp arrives after it has waited for the matrix
// instructions that took what its lanes had read. Why the tool does not follow that is not known.
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/matmul_batch_parts.cuh"
#include "kernels/cuda/read_once.cuh"

namespace winnow::kernels::cuda {
namespace {

[[maybe_unused]] constexpr int kBlockWarps = kBatchThreads / kLanes;
constexpr int kStages = 4;

template <int kOutputGroups, int kStageSlices>
struct Tile : BatchTile<kOutputGroups> {
  using Base = BatchTile<kOutputGroups>;
  static constexpr uint32_t kWBytes = kStageSlices * kWTileBytes;
  static constexpr uint32_t kWStageBytes = Base::kWTiles * kWBytes;
  // Panels are aligned.
  static constexpr size_t kSharedBytes = size_t{1024} + kStages * (Base::kXBytes + kWStageBytes);
  static_assert(Base::kSumsBytes + 1024 <= kSharedBytes);
};

// kStageSlices: 2, or 1 where a segment is an odd number of slices; then a panel is copied for either half. kSplit:
// kBatchClusterBlocks or 1.
template <int kOutputGroups, int kSplit, int kStageSlices>
__global__ void __launch_bounds__(kBatchThreads, kBatchResident)
    BatchKernel(const __grid_constant__ Operands args) {
#ifdef WINNOW_WGMMA
  using T = Tile<kOutputGroups, kStageSlices>;
  constexpr bool kOwnW = T::kRowGroups == 1;  // what a warp copies of W no other reads
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t filled[kStages], emptied[kStages];
  const uint32_t x_at = (SharedAddress(dynamic) + 1023) / 1024 * 1024;  // [kStages] of panels
  const uint32_t w_at = x_at + kStages * T::kXBytes;  // [kStages][kWTiles][kStageSlices] tiles
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const BatchPart part = PartOfBlock<kSplit>(args);
  const int32_t tile = part.tile, first = part.first, last = part.last;
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
  const uint32_t x_bytes = (rows + 7) / 8 * (kPanelBytes / kPanelRowTiles);
  const uint4* of_w = args.w + int64_t{WTileOf<T>(args, tile, min(warp, T::kWTiles - 1))} *
                                   args.slices * kWTilePieces;
  const uint4* of_x = args.x + int64_t{panel} * ((args.slices + 1) / 2) * (kPanelBytes / 16);
  const uint64_t read_once = ReadOnce();
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
    BulkCopy(x_at + stage * T::kXBytes + panel * kPanelBytes,
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
  const auto multiply = [&](int32_t slice, int32_t end, float(&sums)[kPanelRowTiles][4]) {
#pragma unroll
    for (int j = 0; j < kPanelRowTiles; ++j) {
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
      const uint64_t x =
          SharedMatrix(my_x + stage * T::kXBytes + (kStageSlices == 1 ? slice % 2 * 64 : 0), 1024);
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
  FinishBatchTile<BatchTile<kOutputGroups>, kSplit>(args, 0, part, dynamic, x_at, multiply);
#endif
}

template <int kOutputGroups, int kSplit, int kStageSlices>
cudaError_t LaunchBatch(const Operands& operands, int64_t tiles, Stream stream) {
  thread_local int told = -1;
  return LaunchBatchTiles<kSplit>(BatchKernel<kOutputGroups, kSplit, kStageSlices>,
                                  dim3(static_cast<unsigned>(tiles * kSplit)),
                                  Tile<kOutputGroups, kStageSlices>::kSharedBytes,
                                  !operands.new_weights, told, stream, operands);
}

template <int kOutputGroups, int kSplit>
cudaError_t LaunchBatch(const Operands& operands, int64_t tiles, Stream stream) {
  if (operands.slices % 2 == 0 && operands.slices_per_segment % 2 == 0) {
    return LaunchBatch<kOutputGroups, kSplit, 2>(operands, tiles, stream);
  }
  return LaunchBatch<kOutputGroups, kSplit, 1>(operands, tiles, stream);
}

template <int kOutputGroups>
cudaError_t LaunchBatch(const Operands& operands, Stream stream) {
  const int64_t tiles = CeilDiv(operands.out, BatchTile<kOutputGroups>::kOutputs);
  return SplitsBatchTiles(tiles)
             ? LaunchBatch<kOutputGroups, kBatchClusterBlocks>(operands, tiles, stream)
             : LaunchBatch<kOutputGroups, 1>(operands, tiles, stream);
}

}  // namespace

bool TakesBatchMatmul(int64_t m, int64_t out) {
  // 128 rows of so many outputs, a vocabulary's, the larger tiles of matmul_wgmma.cu read 3 to 5 % faster.
  constexpr int64_t kMostOutputs = 512;  // of a multiprocessor, of more than 64 rows
  if (m <= kMatmulFewRows || m > kMatmulBatchRows) return false;
  if (m > kPanelRows && out > kMostOutputs * CurrentDevice().multiprocessors) return false;
  thread_local CodeHere code;
  return code.Has(BatchKernel<2, kBatchClusterBlocks, 2>, Tile<2, 2>::kSharedBytes);
}

bool GatesBatchMatmul(int64_t m, int64_t out) {
  const int outputs = m <= kPanelRows ? BatchTile<2>::kOutputs : BatchTile<1>::kOutputs;
  return !SplitsBatchTiles(CeilDiv(out, outputs));
}

cudaError_t MatmulOfBatch(const Operands& operands, Stream stream) {
  return operands.m <= kPanelRows ? LaunchBatch<2>(operands, stream)
                                  : LaunchBatch<1>(operands, stream);
}

}  // namespace winnow::kernels::cuda

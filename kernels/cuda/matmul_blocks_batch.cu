// Mapping, kBlocks for the rows of a batch on Hopper, 33 to kMatmulBatchRows: matmul_batch.cu with fewer bytes. W is the left
// operand of a warpgroup's matrix instructions and comes from registers, where a lane makes its fragments of a record
// (block_order.h), once for 64 rows; x is the right one and comes from shared memory as panels. Tiles, and how their segments
// are added: matmul_batch_parts.cuh. The chains of matrix instructions are those of plain weights, and so are the bits.
//
// A warp has a ring of records, of its 16 outputs; panels of x have another, filled by a warp for each 64 rows. While a
// warpgroup waits for its matrix instructions, the others of a multiprocessor make their weights.
//
//   up to 64 rows   two blocks on a multiprocessor
//   more            two such tiles of rows, which read and make the same weights, where that many blocks fit the device at once; or
//                   one of 128 rows, whose weights are made once, and one block: stages of two panels, the weights of the
//                   second made while the matrix instructions multiply the first
//
// Making weights bounds it: 260 instructions a panel and warp for 8-bit floats, and conversions take two turns each.
//
// H200, Llama-3.1-8B's qkv, o, gate_up, down in us; bf16 64 rows 19.6, 16.3, 66, 41, 128 rows 28.2, 17, 76, 38:
//   64 rows, as it is         F8x128   20.9, 18.7,  56, 53   Q4_1  22.7, 21.4,  69, 63   Q4_0  19.7, 17.3,  51, 50
//   stages of two panels               20.2, 17.6,  57, 49         24.0, 21.9,  78, 64         18.8, 16.5,  53, 46
//   128 rows, as it is                 34.9, 22.5,  89, 57         38.4, 25.5, 100, 68         33.5, 21.3,  83, 52
//   64 outputs by 128 rows, both warpgroups make the same weights
//                                      40.7, 21.6, 117, 58         44.6, 24.5, 140, 67         36.4, 20.4, 107, 55
//   128 outputs by 128 rows split, too: clusters of blocks that fill a multiprocessor, of which 30 find room
//                                      35.3, 32.4,  90, 83         38.1, 35.3,  99, 92         33.8, 30.8,  83, 77
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/matmul_batch_parts.cuh"
#include "kernels/cuda/matmul_blocks_parts.cuh"
#include "kernels/cuda/read_once.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kPanelSlices = 2;
[[maybe_unused]] constexpr int kWarps = kBatchThreads / kLanes;

// kPanels: of rows.
template <WeightType kType, int kPanels>
struct Rings : BatchTile<2, kPanels> {
  using Base = BatchTile<2, kPanels>;
  static constexpr BlockFormat kFormat = BlockFormatOf(kType);
  static constexpr int kResident = kPanels == 1 ? kBatchResident : 1;
  static constexpr int kMostBytes = kBatchResident / kResident * kHalfSharedBytes;
  static constexpr int kStagePanels = kPanels;  // of a stage of x, side by side over inner values
  static constexpr int kStageSlices = kStagePanels * kPanelSlices;
  static constexpr int kStages = kPanels == 1 ? 4 : 3;
  static constexpr int kXStageBytes = kStagePanels * Base::kXBytes;
  static constexpr int kSlotBytes = kFormat.most_record_bytes();
  static constexpr int kOtherBytes = 2048;  // barriers, and what aligns panels
  static constexpr int kSlots = std::min(
      4, (kMostBytes - kOtherBytes - kStages * kXStageBytes) / (Base::kWTiles * kSlotBytes));
  static constexpr size_t kSharedBytes =
      size_t{1024} + kStages * kXStageBytes + size_t{kSlots} * Base::kWTiles * kSlotBytes;
  static_assert(kSlots >= 2 && kSlotBytes % 16 == 0);
  static_assert(kFormat.stage_slices() % kStageSlices == 0);
  static_assert(Base::kSumsBytes + 1024 <= kSharedBytes);
};

// kSplit: kBatchClusterBlocks or 1.
template <WeightType kType, int kPanels, int kSplit>
__global__ void __launch_bounds__(kBatchThreads, (Rings<kType, kPanels>::kResident))
    BlocksBatchKernel(const __grid_constant__ BlockOperands operands) {
#ifdef WINNOW_WGMMA
  using R = Rings<kType, kPanels>;
  constexpr BlockFormat kFormat = BlockFormatOf(kType);
  constexpr int kRecordSlices = kFormat.stage_slices();
  const Operands& args = operands.product;
  // This block's rows.
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * (kPanels * kPanelRows);
  const int32_t panels = min((args.m - first_row + kPanelRows - 1) / kPanelRows, kPanels);
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t x_filled[R::kStages], x_emptied[R::kStages];
  __shared__ uint64_t w_filled[kWarps][R::kSlots];
  const uint32_t shared_at = SharedAddress(dynamic);
  const uint32_t x_at =
      (shared_at + 1023) / 1024 * 1024;  // [kStages][kStagePanels][kPanels] of panels
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const BatchPart part = PartOfBlock<kSplit>(args);
  const int32_t first = part.first, last = part.last, segment_slices = args.slices_per_segment;
  if (threadIdx.x < R::kStages) {
    InitBarrier(SharedAddress(x_filled + threadIdx.x), panels);
    InitBarrier(SharedAddress(x_emptied + threadIdx.x), kWarps);
  }
  if (lane < R::kSlots) InitBarrier(SharedAddress(w_filled[warp] + lane));
  FenceBarriers();
  __syncthreads();

  // Records of this warp's 16 outputs, of the last that exist where they do not, in the order in which they are used.
  std::byte* const ring = reinterpret_cast<std::byte*>(dynamic) + (x_at - shared_at) +
                          R::kStages * R::kXStageBytes + warp * (R::kSlots * R::kSlotBytes);
  const uint32_t ring_at = SharedAddress(ring);
  const std::byte* asked_record = operands.blocks +
                                  WTileOf<R>(args, part.tile, warp) * operands.tile_bytes +
                                  part.rank * (kMatmulSegments / kSplit) * operands.segment_bytes;
  int32_t asked_slice = first, asked_end = min(first + segment_slices, last), asked_slot = 0;
  const uint64_t read_once = ReadOnce();
  const auto ask = [&] {
    if (asked_slice >= last) return;
    const int32_t count = min(kRecordSlices, asked_end - asked_slice);
    const int32_t bytes = RecordBytes(kFormat, operands.coarse, count);
    if (lane == 0) {
      const uint32_t barrier = SharedAddress(w_filled[warp] + asked_slot);
      ArriveExpecting(barrier, bytes);
      BulkCopy(ring_at + asked_slot * R::kSlotBytes, asked_record, bytes, barrier, read_once);
    }
    asked_record += bytes;
    asked_slice += count;
    if (asked_slice == asked_end) asked_end = min(asked_end + segment_slices, last);
    asked_slot = asked_slot + 1 == R::kSlots ? 0 : asked_slot + 1;
  };
  for (int i = 0; i < R::kSlots; ++i) ask();
  WaitForEarlier();
  LetNextStart();
  // A warp's rows of x, those that exist. Of a stage the second panel is not there where a segment ends with its first.
  const int32_t my_row = first_row + warp * kPanelRows;
  const int32_t rows = min(args.m - my_row, kPanelRows);
  const bool copies_x = warp < panels;
  const uint32_t x_bytes = (rows + 7) / 8 * (kPanelBytes / kPanelRowTiles);
  const uint4* of_x =
      args.x + int64_t{my_row / kPanelRows} * (args.slices / kPanelSlices) * (kPanelBytes / 16);
  int32_t x_slice = first, x_end = min(first + segment_slices, last), x_stage = 0;
  const auto copy_x = [&] {
    if (x_slice >= last) return;
    const uint32_t barrier = SharedAddress(x_filled + x_stage);
    const int32_t count = min(R::kStageSlices, x_end - x_slice) / kPanelSlices;
    if (lane == 0) {
      ArriveExpecting(barrier, count * x_bytes);
      for (int32_t i = 0; i < count; ++i) {
        BulkCopy(x_at + x_stage * R::kXStageBytes + i * R::kXBytes + warp * kPanelBytes,
                 of_x + int64_t{x_slice / kPanelSlices + i} * (kPanelBytes / 16), x_bytes, barrier);
      }
    }
    x_slice += count * kPanelSlices;
    if (x_slice == x_end) x_end = min(x_end + segment_slices, last);
    x_stage = x_stage + 1 == R::kStages ? 0 : x_stage + 1;
  };
  if (copies_x) {
    for (int i = 0; i < R::kStages; ++i) copy_x();
  }
  __syncwarp();

  int stage = 0, slot = 0;
  uint32_t x_parity = 0, w_parity = 0;
  // The sums of slices of a segment.
  const auto multiply = [&](int32_t slice, const int32_t end, float(&sums)[R::kRowTiles][4]) {
#pragma unroll
    for (int j = 0; j < R::kRowTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
    }
    while (slice < end) {
      const int32_t begin = slice, count = min(kRecordSlices, end - slice);
      const std::byte* const record = ring + slot * R::kSlotBytes;
      const std::byte* const fine = record + count * (kLanes * kFormat.value_bytes);
      const std::byte* const coarse = record + count * kFormat.slice_bytes();
      WaitForPhase(SharedAddress(w_filled[warp] + slot), w_parity);
      decltype(ScalesOfLane<kType>(fine, coarse, lane)) scales;
      // Two slices of the record from slice `k` on.
      const auto make = [&](int k, WFragments(&w)[kPanelSlices]) {
#pragma unroll
        for (int s = 0; s < kPanelSlices; ++s) {
          // A block's scales are made ready once in a record.
          const int32_t here = begin + k + s;
          if (kFormat.fine_bytes > 0 || k + s == 0 || here % kFormat.block_slices == 0) {
            const int32_t block = kFormat.block_slices == 1
                                      ? 0
                                      : here / kFormat.block_slices - begin / kFormat.block_slices;
            scales =
                ScalesOfLane<kType>(fine + (k + s) * (kTileOutputs * kFormat.fine_bytes),
                                    coarse + block * (kTileOutputs * kFormat.coarse_bytes), lane);
          }
          MakeFragments<kType>(record + (k + s) * (kLanes * kFormat.value_bytes), scales, lane,
                               w[s].of);
        }
      };
      const auto start = [&](const WFragments(&w)[kPanelSlices], uint32_t at) {
        const uint64_t x = SharedMatrix(at, 1024);
        FenceGroup();
#pragma unroll
        for (int i = 0; i < kPanelSlices * 2; ++i) {
          GroupMultiplyAdd(sums, w[i / 2].of[i % 2], Further(x, i * 32), true);
        }
        CommitGroup();
      };
#pragma unroll 1
      for (int k = 0; k < count; k += R::kStageSlices) {
        const uint32_t x = x_at + stage * R::kXStageBytes;
        WFragments w[R::kStagePanels][kPanelSlices];
        make(k, w[0]);
        WaitForPhase(SharedAddress(x_filled + stage), x_parity);
        start(w[0], x);
        if constexpr (R::kStagePanels > 1) {
          if (k + kPanelSlices < count) {
            make(k + kPanelSlices, w[1]);
            start(w[1], x + R::kXBytes);
          }
        }
        WaitForGroups<0>();
        __syncwarp();
        if (lane == 0) Arrive(SharedAddress(x_emptied + stage));
        // Other warps read panels, too: they are done with the stage before by now.
        if (copies_x && begin + k > first && x_slice < last) {
          const int before = stage == 0 ? R::kStages - 1 : stage - 1;
          WaitForPhase(SharedAddress(x_emptied + before), stage == 0 ? x_parity ^ 1 : x_parity);
          copy_x();
        }
        if (++stage == R::kStages) {
          stage = 0;
          x_parity ^= 1;
        }
      }
      slice += count;
      ask();  // all lanes have read the record
      if (++slot == R::kSlots) {
        slot = 0;
        w_parity ^= 1;
      }
    }
  };
  FinishBatchTile<R, kSplit>(args, first_row, part, dynamic, x_at, multiply);
#endif
}

template <WeightType kType, int kPanels, int kSplit>
cudaError_t LaunchBlocks(const BlockOperands& operands, int64_t tiles, Stream stream) {
  thread_local int told = -1;
  const dim3 grid(static_cast<unsigned>(tiles * kSplit),
                  static_cast<unsigned>(CeilDiv(operands.product.m, kPanels * kPanelRows)));
  return LaunchBatchTiles<kSplit>(BlocksBatchKernel<kType, kPanels, kSplit>, grid,
                                  Rings<kType, kPanels>::kSharedBytes, /*starts_early=*/true, told,
                                  stream, operands);
}

}  // namespace

bool TakesBlocksBatch(int64_t m, const DeviceWeights& w) {
  const int64_t slices = SlicesOf(w.in);
  if (m <= kMatmulFewRows || m > kMatmulBatchRows || slices % kPanelSlices != 0 ||
      CeilDiv(slices, kMatmulSegments) % kPanelSlices != 0) {
    return false;
  }
  thread_local CodeHere code;
  return code.Has(BlocksBatchKernel<WeightType::kQ4_1, 2, kBatchClusterBlocks>,
                  Rings<WeightType::kQ4_1, 2>::kSharedBytes);
}

bool GatesBlocks(int64_t m, const DeviceWeights& w) {
  return m > kMatmulBatchRows || !SplitsBatchTiles(CeilDiv(w.out, BatchTile<2>::kOutputs));
}

cudaError_t MatmulBlocksOfBatch(const Operands& operands, const DeviceWeights& w, Stream stream) {
  const BlockOperands all = BlockOperandsOf(operands, w);
  const int64_t tiles = CeilDiv(operands.out, Rings<WeightType::kQ4_1, 1>::kOutputs);
  const bool few = operands.m <= kPanelRows;
  return WithBlockType(w.type, [&]<WeightType kType>() {
    if (SplitsBatchTiles(tiles * CeilDiv(operands.m, kPanelRows))) {
      return LaunchBlocks<kType, 1, kBatchClusterBlocks>(all, tiles, stream);
    }
    if (few) return LaunchBlocks<kType, 1, 1>(all, tiles, stream);
    if (SplitsBatchTiles(tiles)) {
      return LaunchBlocks<kType, 2, kBatchClusterBlocks>(all, tiles, stream);
    }
    return LaunchBlocks<kType, 2, 1>(all, tiles, stream);
  });
}

}  // namespace winnow::kernels::cuda

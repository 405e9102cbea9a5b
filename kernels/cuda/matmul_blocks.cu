// Mapping, kBlocks. Up to kMatmulFewRows rows on Hopper BlockStreamKernel, StreamKernel of matmul.cu with fewer bytes: two
// blocks stay on each multiprocessor and take tile after tile of 16 outputs; a block's eight warps are the eight segments
// of the inner dimension; the bulk copy engine brings a warp's records (block_order.h) through a ring. Here a lane makes
// its fragments itself: its integers are 8 or 16 bytes in a row, and widening them takes two to five instructions a
// weight, about as long as HBM takes to bring 4 bits. The chains of matrix instructions are those of plain weights, and so
// are the bits.
// x comes from L1, which both blocks share: one row's products take 1 to 7 % less than from L2 (H200, 2026-11-27). Tried and lost in
// a step with L4x32 at 8K (H100, 2.84 ms): x of two records asked for into L1 at once 2.84; records two by two while the kernel
// before still runs 2.93, three by three 2.93, all at once 2.96.
//
// The rows of a batch on Hopper: matmul_blocks_batch.cu, and more: matmul_blocks_wgmma.cu. Many rows of most types, and other
// devices: the matrix is widened into plain tiles, in pieces of outputs, and the kernels of kTensor read those. WidenKernel is a
// warp a tile.
#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_blocks_parts.cuh"
#include "kernels/cuda/read_once.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 2;  // of a multiprocessor

template <WeightType kType, int kRowTiles>
struct Ring {
  static constexpr BlockFormat kFormat = BlockFormatOf(kType);
  static constexpr int kSlotBytes = kFormat.most_record_bytes();
  // The tile's sums, and those of the one before where there is room.
  static constexpr int kPartBuffers = kRowTiles == 1 ? 2 : 1;
  static constexpr int kPartBytes = kPartBuffers * kMatmulSegments * kRowTiles * kLanes * 16;
  static constexpr int kOtherBytes = 512;  // barriers
  static constexpr int kSlots =
      std::min(6, (kHalfSharedBytes - kPartBytes - kOtherBytes) / (kMatmulSegments * kSlotBytes));
  static constexpr size_t kDynamicBytes = size_t{kMatmulSegments} * kSlots * kSlotBytes;
  static_assert(kSlots >= 3 && kSlotBytes % 16 == 0);
};

// kDirect: x as it is, float32; one tile of rows.
// kOfRows: tiles of rows that have a W each.
template <WeightType kType, int kRowTiles, bool kDirect, bool kOfRows>
__global__ void __launch_bounds__(kThreads, kBlocks)
    BlockStreamKernel(const __grid_constant__ BlockOperands operands, const RowTiles of_rows) {
  static_assert(!kOfRows || !kDirect);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using R = Ring<kType, kRowTiles>;
  constexpr BlockFormat kFormat = BlockFormatOf(kType);
  constexpr int kStageSlices = kFormat.stage_slices();
  constexpr int kStep = kRowTiles == 1 ? 2 : 1;  // slices whose x is read at a time
  static_assert(kStageSlices / kStep % 2 == 0);
  const Operands& args = operands.product;
  extern __shared__ uint4 rings[];  // [warps][kSlots] of kSlotBytes
  __shared__ uint64_t barriers[kMatmulSegments][R::kSlots];
  __shared__ float4 parts[R::kPartBuffers][kMatmulSegments][kRowTiles][kLanes];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int32_t row_tiles = kOfRows ? of_rows.Count() : 1;
  const int32_t output_tiles = (args.out + 15) / 16, tiles = output_tiles * row_tiles;
  const int32_t blocks = static_cast<int32_t>(gridDim.x);
  const int32_t first = min(warp * args.slices_per_segment, args.slices);
  const int32_t last = min(first + args.slices_per_segment, args.slices);
  const int32_t my_tiles = (tiles - static_cast<int32_t>(blockIdx.x) + blocks - 1) / blocks;
  const int32_t stages = my_tiles * ((last - first + kStageSlices - 1) / kStageSlices);
  std::byte* const ring = reinterpret_cast<std::byte*>(rings) + warp * (R::kSlots * R::kSlotBytes);
  const uint32_t ring_at = SharedAddress(ring);
  const uint32_t barriers_at = SharedAddress(barriers[warp]);

  if (lane == 0) {
    for (int i = 0; i < R::kSlots; ++i) InitBarrier(barriers_at + 8 * i);
    FenceBarriers();
  }
  __syncwarp();
  const uint64_t read_once = ReadOnce();
  // Records are asked for in the order in which they are used, over the borders of tiles.
  int32_t asked = 0, asked_slice = first, asked_slot = 0;
  auto asked_number = static_cast<int32_t>(blockIdx.x);
  const auto w_of = [&](int32_t tile) {
    const std::byte* blocks_of = operands.blocks;
    int32_t outputs = tile;
    if constexpr (kOfRows) {
      // Beyond the last tile, which nobody asks for, there is none.
      const TileOfRows at(min(tile, tiles - 1), row_tiles, output_tiles, kRowTiles > 1);
      blocks_of = static_cast<const std::byte*>(of_rows.W(at.rows));
      outputs = at.outputs;
    }
    return blocks_of + int64_t{outputs} * operands.tile_bytes +
           int64_t{warp} * operands.segment_bytes;
  };
  const std::byte* asked_tile = w_of(asked_number);
  const std::byte* asked_record = asked_tile;
  const auto ask = [&] {
    if (asked == stages) return;
    ++asked;
    const int32_t bytes =
        RecordBytes(kFormat, operands.coarse, min(kStageSlices, last - asked_slice));
    if (lane == 0) {
      ArriveExpecting(barriers_at + 8 * asked_slot, bytes);
      BulkCopy(ring_at + asked_slot * R::kSlotBytes, asked_record, bytes,
               barriers_at + 8 * asked_slot, read_once);
    }
    asked_slice += kStageSlices;
    asked_record += bytes;
    if (asked_slice >= last) {
      asked_slice = first;
      asked_number += blocks;
      asked_tile = w_of(asked_number);
      asked_record = asked_tile;
    }
    asked_slot = asked_slot + 1 == R::kSlots ? 0 : asked_slot + 1;
  };
  // One after the other while the kernel ahead still runs, as in StreamKernel.
  for (int i = 0; i < R::kSlots; ++i) {
    if (i > 0 && i <= stages) WaitForPhase(barriers_at + 8 * (i - 1), 0);
    ask();
  }
  WaitForEarlier();
  LetNextStart();

  // With one tile of rows, those past the last one are read as the first: their sums are not used. Slices past a segment's
  // last are not read, nor multiplied.
  const bool has_row = lane / 4 < args.m;
  const uint4* ordered = kDirect ? nullptr : args.x + (kRowTiles > 1 || has_row ? lane : lane % 4);
  const float* const row =
      kDirect ? args.x_rows + (has_row ? lane / 4 * args.x_stride : 0) + lane % 4 * 2 : nullptr;
  struct Inputs {
    uint4 ordered[kRowTiles];
    float2 pairs[4];
  };
  // Slices from `slice` + `k` on; `sure`: they are in the segment.
  const auto load = [&](Inputs(&to)[kStep], int32_t slice, int k, bool sure) {
#pragma unroll
    for (int s = 0; s < kStep; ++s) {
      const bool exists = sure || slice + k + s < last;
      if constexpr (kDirect) {
        const float* const from = row + slice * kOrderedSlice;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (exists) {
            to[s].pairs[i] =
                __ldca(reinterpret_cast<const float2*>(from + (k + s) * kOrderedSlice + i * 8));
          }
        }
      } else if constexpr (kRowTiles == 1) {
        const uint4* const from = ordered + slice * kLanes;
        if (exists) to[s].ordered[0] = __ldca(from + (k + s) * kLanes);
      } else {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          // Neighbours on the multiprocessor read the same rows.
          const uint4* const from = ordered + (int64_t{i} * args.slices + slice + k + s) * kLanes;
          to[s].ordered[i] =
              exists && i * 8 + lane / 4 < args.m ? __ldca(from) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  int32_t slot = 0;
  uint32_t parity = 0;
  for (int32_t t = 0; t < my_tiles; ++t) {
    const TileOfRows here_at(static_cast<int32_t>(blockIdx.x) + t * blocks, row_tiles, output_tiles,
                             kRowTiles > 1);
    if constexpr (kOfRows) {
      ordered = args.x + lane + int64_t{here_at.rows} * kRowTiles * args.slices * kLanes;
    }
    float sums[kRowTiles][4] = {};
    Inputs x[2][kStep];
    load(x[0], first, 0, false);
    for (int32_t slice = first; slice < last; slice += kStageSlices) {
      const int32_t count = min(kStageSlices, last - slice);
      const std::byte* const stage = ring + slot * R::kSlotBytes;
      const std::byte* const fine = stage + count * (kLanes * kFormat.value_bytes);
      const std::byte* const coarse = stage + count * kFormat.slice_bytes();
      WaitForPhase(barriers_at + 8 * slot, parity);
      decltype(ScalesOfLane<kType>(fine, coarse, lane)) scales;
      const auto multiply = [&](int k, const Inputs& here) {
        // A block's scales are made ready once in a record.
        if (kFormat.fine_bytes > 0 || k == 0 || (slice + k) % kFormat.block_slices == 0) {
          const int32_t block = kFormat.block_slices == 1 ? 0
                                                          : (slice + k) / kFormat.block_slices -
                                                                slice / kFormat.block_slices;
          scales =
              ScalesOfLane<kType>(fine + k * (kTileOutputs * kFormat.fine_bytes),
                                  coarse + block * (kTileOutputs * kFormat.coarse_bytes), lane);
        }
        WFragments w;
        MakeFragments<kType>(stage + k * (kLanes * kFormat.value_bytes), scales, lane, w.of);
        if constexpr (kDirect) {
          const float2* pairs = here.pairs;
          MultiplyAddTile(
              sums[0], w,
              make_uint4(PackBf16(pairs[0].x, pairs[0].y), PackBf16(pairs[1].x, pairs[1].y),
                         PackBf16(pairs[2].x, pairs[2].y), PackBf16(pairs[3].x, pairs[3].y)));
        } else {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) MultiplyAddTile(sums[i], w, here.ordered[i]);
        }
      };
      if constexpr (kRowTiles > 1) {
        static_assert(kStep == 1);
#pragma unroll
        for (int k = 0; k < kStageSlices; ++k) {
          if (k >= count) break;
          load(x[(k + 1) % 2], slice, k + 1, false);
          multiply(k, x[k % 2][0]);
        }
      } else if (count == kStageSlices) {
#pragma unroll
        for (int k = 0; k < kStageSlices; k += kStep) {
          load(x[(k / kStep + 1) % 2], slice, k + kStep, k + kStep < kStageSlices);
#pragma unroll
          for (int s = 0; s < kStep; ++s) multiply(k + s, x[k / kStep % 2][s]);
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < count; k += kStep) {
          load(x[1], slice, k + kStep, false);
#pragma unroll
          for (int s = 0; s < kStep; ++s) {
            if (k + s < count) multiply(k + s, x[0][s]);
            x[0][s] = x[1][s];
          }
        }
      }
      __syncwarp();  // all have read the record: its slot may be filled again
      ask();
      if (++slot == R::kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
    if (R::kPartBuffers == 1 && t > 0) __syncthreads();  // those of the tile before have been added
    auto& of_tile = parts[t % R::kPartBuffers];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      of_tile[warp][i][lane] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    }
    __syncthreads();
    // Each tile other warps: what they add up here they do not stream.
    if constexpr (kOfRows) {
      AddSegments(of_tile, OfRowTile(args, here_at.rows * kRowTiles * 8), here_at.outputs,
                  (warp + t) % kMatmulSegments, lane);
    } else {
      AddSegments(of_tile, args, static_cast<int32_t>(blockIdx.x) + t * blocks,
                  (warp + t) % kMatmulSegments, lane);
    }
  }
#endif
}

template <WeightType kType, int kRowTiles, bool kDirect>
cudaError_t StreamBlocks(const BlockOperands& operands, const Stream& stream) {
  const auto tiles = static_cast<unsigned>(CeilDiv(operands.product.out, kTileOutputs));
  const auto most = static_cast<unsigned>(CurrentDevice().multiprocessors * kBlocks);
  return Launch(BlockStreamKernel<kType, kRowTiles, kDirect, false>, std::min(tiles, most),
                kThreads, Ring<kType, kRowTiles>::kDynamicBytes, stream, false, operands,
                RowTiles{});
}

// ---- widening ----

constexpr int kWarps = kThreads / kLanes;

// Outputs [first, first + 16 * tiles) as plain tiles. A warp takes a tile of 16 outputs by 32 inner values at a time.
template <WeightType kType>
__global__ void __launch_bounds__(kThreads)
    WidenKernel(const std::byte* blocks, const __grid_constant__ BlockOrder order,
                int64_t first_tile, int64_t tiles, uint4* to) {
  LetNextStart();
  WaitForEarlier();
  constexpr BlockFormat kFormat = BlockFormatOf(kType);
  __shared__ uint4 plain[kWarps][kWTilePieces];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  auto* const words = reinterpret_cast<uint32_t*>(plain[warp]);
  const int64_t count = tiles * order.slices;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < count;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t tile = i / order.slices;
    const auto slice = static_cast<int32_t>(i - tile * order.slices);
    const BlockPlace place = PlaceOf(kFormat, order, first_tile + tile, slice);
    const std::byte* const record = blocks + place.record;
    WFragments w;
    MakeFragments<kType>(
        record + place.slice * (kLanes * kFormat.value_bytes),
        ScalesOfLane<kType>(record + place.slices * (kLanes * kFormat.value_bytes) +
                                place.slice * (kTileOutputs * kFormat.fine_bytes),
                            record + place.slices * kFormat.slice_bytes() +
                                place.coarse * (kTileOutputs * kFormat.coarse_bytes),
                            lane),
        lane, w.of);
    __syncwarp();  // the tile before has been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[WPiece(lane / 4 + j % 2 * 8, half * 2 + j / 2) * 4 + lane % 4] = w.of[half][j];
      }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kWTilePieces; j += kLanes) {
      to[i * kWTilePieces + j + lane] = plain[warp][j + lane];
    }
  }
}

template <WeightType kType>
cudaError_t Widen(const DeviceWeights& w, const BlockOrder& order, int64_t first_tile,
                  int64_t tiles, void* to, const Stream& stream) {
  const auto most = static_cast<int64_t>(CurrentDevice().multiprocessors) * 16;
  const int64_t wanted = CeilDiv(tiles * order.slices, kWarps);
  return Launch(WidenKernel<kType>, static_cast<unsigned>(std::min(wanted, most)), kThreads, 0,
                stream, false, static_cast<const std::byte*>(w.data), order, first_tile, tiles,
                static_cast<uint4*>(to));
}

// ---- packing ----

// A thread is a slice of a row. The type is known when this is compiled: where it was an argument, nvcc 13.0 packed the types
// that follow Q8_0 wrongly once PutSlice had changed (CudaMatmulBlocksTest found it; the host's code was right).
template <WeightType kType>
__global__ void __launch_bounds__(kThreads)
    PackKernel(const uint8_t* rows, int64_t row_bytes, int64_t block_bytes, int64_t first_row,
               int64_t count, const __grid_constant__ BlockOrder order, uint8_t* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / order.slices;
    PutSlice(kType, order, rows + row * row_bytes, block_bytes, first_row + row,
             static_cast<int32_t>(i - row * order.slices), to);
  }
}

}  // namespace

cudaError_t PackBlocks(const std::byte* source, int64_t first_row, int64_t rows,
                       const DeviceWeights& packed, Stream stream) {
  if (packed.way != DeviceWeights::Way::kBlocks || PlainType(packed.type) || first_row < 0 ||
      first_row + rows > packed.out) {
    return cudaErrorInvalidValue;
  }
  if (rows <= 0) return cudaSuccess;
  const BlockOrder order = BlockOrderOf(BlockFormatOf(packed.type), packed.in);
  const int64_t count = rows * order.slices;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(count, kThreads), 8192));
  const auto pack = [&]<WeightType kType>() {
    return LaunchBehind(PackKernel<kType>, blocks, kThreads, 0, stream,
                        reinterpret_cast<const uint8_t*>(source), WeightRowBytes(kType, packed.in),
                        BlockSizeOf(kType).bytes, first_row, count, order,
                        static_cast<uint8_t*>(const_cast<void*>(packed.data)));
  };
  if (packed.type == WeightType::kQ5_0) return pack.template operator()<WeightType::kQ5_0>();
  return WithBlockType(packed.type, pack);
}

cudaError_t WidenBlocks(const DeviceWeights& w, int64_t first_output, int64_t outputs, void* to,
                        Stream stream) {
  if (w.way != DeviceWeights::Way::kBlocks || first_output % kTileOutputs != 0 || outputs < 1 ||
      first_output + outputs > w.out) {
    return cudaErrorInvalidValue;
  }
  const BlockOrder order = BlockOrderOf(BlockFormatOf(w.type), w.in);
  return WithBlockType(w.type, [&]<WeightType kType>() {
    return Widen<kType>(w, order, first_output / kTileOutputs, CeilDiv(outputs, kTileOutputs), to,
                        stream);
  });
}

bool StreamsBlocks(int64_t m, const DeviceWeights& w) {
  if (m > kMatmulBatchRows) return TakesBlocksOfManyRows(m, w);
  if (m > kMatmulFewRows) return TakesBlocksBatch(m, w);
  return CurrentDevice().hopper && kHalfSharedBytes <= CurrentDevice().block_shared_bytes;
}

cudaError_t MatmulBlocks(const Operands& operands, const DeviceWeights& w, Stream stream) {
  if (!StreamsBlocks(operands.m, w)) return cudaErrorInvalidValue;
  if (operands.m > kMatmulBatchRows) return MatmulBlocksOfManyRows(operands, w, stream);
  if (operands.m > kMatmulFewRows) return MatmulBlocksOfBatch(operands, w, stream);
  const BlockOperands all = BlockOperandsOf(operands, w);
  return WithBlockType(w.type, [&]<WeightType kType>() {
    if (operands.x == nullptr) return StreamBlocks<kType, 1, true>(all, stream);
    if (operands.m <= 8) return StreamBlocks<kType, 1, false>(all, stream);
    if (operands.m <= 16) return StreamBlocks<kType, 2, false>(all, stream);
    return StreamBlocks<kType, 4, false>(all, stream);
  });
}

cudaError_t MatmulBlocksOfTiles(const Operands& operands, const RowTiles& rows, int64_t most,
                                const DeviceWeights& w, Stream stream) {
  const BlockOperands all = BlockOperandsOf(operands, w);
  const int64_t tiles = most * CeilDiv(operands.out, kTileOutputs);
  const int64_t at_once = CurrentDevice().multiprocessors * kBlocks;
  return WithBlockType(w.type, [&]<WeightType kType>() {
    const auto launch = [&]<int kRowTiles>() {
      return Launch(BlockStreamKernel<kType, kRowTiles, false, true>,
                    static_cast<unsigned>(std::min(tiles, at_once)), kThreads,
                    Ring<kType, kRowTiles>::kDynamicBytes, stream, false, all, rows);
    };
    return operands.m <= kMatmulTileRows ? launch.template operator()<1>()
                                         : launch.template operator()<kMatmulFewRows / 8>();
  });
}

}  // namespace winnow::kernels::cuda

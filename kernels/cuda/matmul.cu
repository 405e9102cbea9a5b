// Mapping, kTensor. W lies in tiles (matmul_order.cuh), x of few rows in the order in which the matrix instruction
// m16n8k16 wants its fragments, so that a lane's share is 16 bytes and a warp's 512 bytes in a row.
//
//   x  up to 32 rows: [m / 8][in / 32] tiles, [32 lanes] of 16 bytes, two fragments of 8x16 each; more:
//      panels (matmul_order.cuh), from which ldmatrix makes the same fragments
//
// Few rows: a block takes tiles of 16 outputs, its eight warps are the eight segments of the inner
// dimension. x, small, comes from L2. The warps' sums meet in shared memory. There are two such kernels:
//   FewRowsKernel  a block is one tile; each warp copies its W through a small ring of its own
//   StreamKernel   up to 16 rows, Hopper: two blocks stay on each multiprocessor and take tile after tile.
//                  A warp's share of a tile's W is one piece of memory, which the bulk copy engine brings
//                  through a ring of six times 2 KiB: 25 MB are on their way at any time; that many, one
//                  stage after the other, also come while the kernel before, which makes x, still runs
// Up to 2 rows StreamKernel takes x as it is, float32, and saves the launch that would order it.
//
// Many rows: a block is 128 outputs by 64 or 128 rows, a warp 64 by 16 or 32. Slices of 32 inner
// values of both operands are copied four stages ahead. Two sets of sums: the segment's, and those of
// the segments before. On Hopper matmul_batch.cu and matmul_wgmma.cu have them instead (matmul.h says which).
//
// What was tried and lost (H200, Llama-3.1-8B's shapes, m = 1; qkv, o, gate_up, down, logits in us, and
// a plain read of the same bytes: 12.9, 10.2, 52.6, 27.2, 227.7):
//   FewRowsKernel                                      14.9, 11.9, 56.6, 33.9, 232
//   the same, 8 slices ahead in place of 4             18.9, 12.4, 67.6, 31.5, 283: registers
//   StreamKernel, a ring of 12, one block              16.1, 12.3, 59.3, 30.6, 239
//   StreamKernel, a ring of 6, two blocks, cp.async    15.8, 11.0, 57.4, 29.3, 237
//   StreamKernel as it is                              14.3, 10.3, 54.8, 28.6, 231; one after the other
//   with programmatic launch                           13.4,  9.2, 52.7, 27.0, 230
//   a ring of 4, three blocks                          13.5, 10.1, 54.3, 28.4, 231; 36.8 for down when
//   the next kernel stands ready: its blocks keep the third one out
//   StreamKernel for 32 rows: 95 us for gate_up where FewRowsKernel takes 62; for 16, with a ring of five, a step of 9 sequences
//     at 2K takes 6.70 ms in place of 6.98 on an H100, of 16 7.75 in place of 7.98: it begins earlier
// of StreamKernel for more than eight rows, a step of 9 and of 16 rows at 2K on an H200:
//   a ring of five                                     4.92, 4.86 ms
//   of six (as it is)                                  4.41, 4.71
//   of five, x two stages further ahead                4.84, 5.08; of six 4.46, 4.79
//   of five, x by way of the first-level cache         4.88, 5.01
//   of five, two tiles of outputs together, which halves what is read of x   5.19, 5.19
// of StreamKernel in a step at 128K with `lsh:k=2048`:
//   the ring filled at once while the kernel before runs   5.31 ms: its loads, and x, take 3 us in place of 0.8
//   five of its stages one after the other                 5.03; four 5.05, three 5.17, five two by two 5.19
//   all six one after the other (as it is)                 5.00
//   five, and all that a warp needs of x read at once and kept in registers   5.10
//   blocks that norm their rows themselves, in place of a launch before: 4.84 where it was 4.81. The product's first tile is
//     done 4 us earlier and its last one when it was: HBM is busy with the ring meanwhile. With 8 KiB more of shared memory
//     for that 5.30: where blocks of two products are not of one size, the second of a multiprocessor finds holes but no room
//   for o a ring of four and three blocks, which find room beside attention's: 4.85 where it was 4.81; of three 4.90
// of StreamKernel and of BlockStreamKernel (matmul_blocks.cu) at 8K on an H100 (2026-11-28): gates and ups gated by the warp that adds
//   them, in place of a launch between: bf16 5.62 ms where it was 5.55, fp8 3.65 and 3.60, 8 sequences at 2K 6.16 and 6.11, int4 2.82 and
//   2.89. While that launch runs, the first weights of the next product come
// and of one kernel that stays for o, norm, gates and ups, gate, down, norm, q, k and v: its rings go on over the borders of products, and
//   its blocks meet there (H200, 2026-11-30; a step at 2K): bf16 5.46 ms where it was 3.99, fp8 3.69 and 2.93, int4 3.03 and
//   2.40. With a norm's squares left by the product before, and one record of each warp asked for at a time while blocks meet: 5.57,
//   3.66, 2.90. Of int4's layer products are 37 % of the time, waiting for the slowest block and meeting 22, rows that come
//   from L2 into every block 15. A launch that stands ready costs less than that
// and of FewRowsKernel for 32 rows, when W lay in fragments and went to registers (qkv, o, gate_up, down in us, m = 32):
//   four slices of both operands read, then used      18.6, 13.5, 71.8, 54.3
//   three ahead, two blocks (as it is)                16.8,  8.0, 63.0, 30.9
//   two ahead, three blocks (as it is where it helps) 16.0, 10.1, 62.8, 37.1
//   four ahead, two blocks                            17.1,  8.4, 64.0, 32.5
//   one ahead, four blocks                            16.8,  9.9, 62.9, 37.7
//   W four ahead, x one, two blocks                   22.5,  9.7, 81.2, 38.2: x comes from L2 late
//   two tiles a block, two ahead, two blocks          16.3,  9.3, 60.4, 33.6
//   two tiles a block, three ahead, one block         17.7,  8.4, 65.1, 30.8
// and since it lies in tiles (H100; m = 16, m = 32; a plain read of the same bytes: 17.7, 12.5, 76.3, 39.1):
//   fragments, to registers (as it was)               18.0, 13.5, 76.6, 41.4; 19.2, 13.8, 79.9, 42.6
//   tiles, to registers, words exchanged between four lanes   19.6, 14.0, 77.9, 42.6; 25.9, 13.9, 81.2, 43.8
//   rings of the warps, a slice at a time, where tiles of 64 outputs lay in one piece   18.6, 15.9, 84.3, 50.5; 19.3, 16.0, 88.1, 47.1
//   two slices at a time, four ahead (as it is)       19.0, 13.9, 79.3, 42.5; 19.8, 14.6, 83.0, 44.3
//   two slices at a time, eight ahead                 19.6, 14.4, 79.8, 42.1; 19.7, 15.9, 86.6, 44.9
#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/matmul_int8.h"
#include "kernels/cuda/matmul_parts.cuh"
#include "kernels/cuda/read_once.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kSlice = kOrderedSlice;  // inner values of a tile
constexpr int kThreads = 256;

// Two slices at a time. kAhead: such steps of W, in shared memory, that are there or on their way when one is used, which
// nobody writes: the first before the kernel ahead has ended; kXAhead: the same of x, in registers. kBlocks: of a
// multiprocessor.
template <int kRowTiles, int kAhead, int kXAhead, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    FewRowsKernel(const __grid_constant__ Operands args) {
  static_assert(kAhead % kXAhead == 0);
  LetNextStart();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto tile = static_cast<int32_t>(blockIdx.x);
  const int32_t first = min(warp * args.slices_per_segment, args.slices);
  const int32_t last = min(first + args.slices_per_segment, args.slices);
  const uint4* of_w = args.w + int64_t{tile} * args.slices * kWTilePieces + lane;
  const uint4* of_x = args.x + lane;
  const int32_t next_tile = args.slices * kLanes;  // 32 rows: offsets have 32 bits
  // Of tiles of rows that do not exist nothing is read, and rows past the last of one that does are nobody's.
  const int32_t row_tiles = (args.m + 7) / 8;

  extern __shared__ uint4 dynamic[];  // rings [warps][kAhead][2 * kWTilePieces]; then parts
  const uint32_t ring_at =
      SharedAddress(dynamic) + warp * (kAhead * 2 * kWTilePieces) * static_cast<int>(sizeof(uint4));

  const auto load_w = [&](int32_t slice, int slot) {
#pragma unroll
    for (int i = 0; i < 2 * kWTilePieces; i += kLanes) {
      if (slice + i / kWTilePieces < last) {
        CopyAsync16(ring_at + ((slot * 2 * kWTilePieces + i) + lane) * 16,
                    of_w + int64_t{slice} * kWTilePieces + i, true);
      }
    }
    CommitCopies();
  };
  uint4 x[kXAhead][2][kRowTiles] = {};
  const auto load_x = [&](int32_t slice, uint4(&to)[2][kRowTiles]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        if (i < row_tiles && slice + s < last) {
          to[s][i] = of_x[i * next_tile + (slice + s) * kLanes];
        }
      }
    }
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load_w(first + 2 * a, a);
  WaitForEarlier();
#pragma unroll
  for (int a = 0; a < kXAhead; ++a) load_x(first + 2 * a, x[a]);
  float sums[kRowTiles][4] = {};
  for (int32_t slice = first; slice < last; slice += 2 * kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int32_t here = slice + 2 * a;
      if (here >= last) break;
      WaitForCopies<kAhead - 1>();
      __syncwarp();
      WFragments w[2];  // of what is not there none are used
#pragma unroll
      for (int s = 0; s < 2; ++s) w[s] = LoadWFragments(ring_at + (a * 2 + s) * kWTileBytes, lane);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (here + s >= last) continue;

#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) MultiplyAddTile(sums[i], w[s], x[a % kXAhead][s][i]);
      }
      __syncwarp();  // all have read the step
      load_w(here + 2 * kAhead, a);
      load_x(here + 2 * kXAhead, x[a % kXAhead]);
    }
  }
  using Parts = float4[kMatmulSegments][kRowTiles][kLanes];
  auto& parts = *reinterpret_cast<Parts*>(dynamic + kMatmulSegments * kAhead * 2 * kWTilePieces);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    parts[warp][i][lane] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  }
  __syncthreads();
  AddSegments(parts, args, tile, warp, lane);
}

template <int kRowTiles, int kAhead, int kXAhead, int kBlocks>
cudaError_t FewRows(const Operands& operands, Stream stream) {
  constexpr size_t kUsed =
      sizeof(uint4) * kMatmulSegments * (kAhead * 2 * kWTilePieces + kRowTiles * kLanes);
  // So much that no more blocks fit: those of the next kernel come early, and would be many on a few multiprocessors.
  const DeviceTraits& device = CurrentDevice();
  const size_t bytes = std::max(
      kUsed, std::min(device.shared_bytes / (kBlocks + 1) + 1024, device.block_shared_bytes));
  return LaunchAs(
      {.starts_early = !operands.new_weights}, FewRowsKernel<kRowTiles, kAhead, kXAhead, kBlocks>,
      static_cast<unsigned>(CeilDiv(operands.out, 16)), kThreads, bytes, stream, operands);
}

// ---- the few rows of a decode step, on Hopper ----

constexpr int kStreamRows = 16;
constexpr int kDirectRows = 2;    // whose x is read as it is
constexpr int kStreamBlocks = 2;  // of a multiprocessor
constexpr int kStageSlices = 2;
constexpr int kStageBytes = kStageSlices * kWTileBytes;

constexpr int kStreamRing = 6;  // stages of a warp
constexpr size_t kStreamSharedBytes = size_t{kMatmulSegments} * kStreamRing * kStageBytes;

// kOfRows: tiles of rows that have a W each.
template <bool kDirect, int kRowTiles, bool kOfRows>
__global__ void __launch_bounds__(kThreads, kStreamBlocks)
    StreamKernel(const __grid_constant__ Operands args, const RowTiles of_rows) {
  static_assert(!kDirect || kRowTiles == 1);
  static_assert(!kOfRows || (!kDirect && kRowTiles == 1));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kRing = kStreamRing;
  extern __shared__ uint4 rings[];  // [warps][kRing] of kStageBytes
  __shared__ uint64_t barriers[kMatmulSegments][kRing];
  __shared__ float4
      parts[2][kMatmulSegments][kRowTiles][kLanes];  // of this tile and of the one before
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int32_t row_tiles = kOfRows ? of_rows.Count() : 1;
  const int32_t tiles = (args.out + 15) / 16 * row_tiles;
  const int32_t blocks = static_cast<int32_t>(gridDim.x);
  const int32_t first = min(warp * args.slices_per_segment, args.slices);
  const int32_t last = min(first + args.slices_per_segment, args.slices);
  const int32_t my_tiles = (tiles - static_cast<int32_t>(blockIdx.x) + blocks - 1) / blocks;
  const int32_t stages = my_tiles * ((last - first + kStageSlices - 1) / kStageSlices);
  const uint32_t ring_at = SharedAddress(rings) + warp * (kRing * kStageBytes);
  const uint32_t barriers_at = SharedAddress(barriers[warp]);

  if (lane == 0) {
    for (int i = 0; i < kRing; ++i) InitBarrier(barriers_at + 8 * i);
    FenceBarriers();
  }
  __syncwarp();
  const uint64_t read_once = ReadOnce();
  // Stages are asked for in the order in which they are used, over the borders of tiles.
  int32_t asked = 0, asked_slice = first, asked_slot = 0;
  auto asked_number = static_cast<int32_t>(blockIdx.x);
  const auto w_of = [&](int32_t tile) {
    if constexpr (kOfRows) {
      const TileOfRows at(tile, row_tiles, 0, /*many=*/false);
      return static_cast<const uint4*>(of_rows.W(at.rows)) +
             int64_t{at.outputs} * args.slices * kWTilePieces;
    } else {
      return args.w + int64_t{tile} * args.slices * kWTilePieces;
    }
  };
  const uint4* asked_tile = w_of(asked_number);
  const auto ask = [&] {
    if (asked == stages) return;
    ++asked;
    if (lane == 0) {
      const int32_t bytes = min(kStageSlices, last - asked_slice) * kWTileBytes;
      ArriveExpecting(barriers_at + 8 * asked_slot, bytes);
      BulkCopy(ring_at + asked_slot * kStageBytes, asked_tile + int64_t{asked_slice} * kWTilePieces,
               bytes, barriers_at + 8 * asked_slot, read_once);
    }
    asked_slice += kStageSlices;
    if (asked_slice >= last) {
      asked_slice = first;
      asked_number += blocks;
      asked_tile = w_of(asked_number);
    }
    asked_slot = asked_slot + 1 == kRing ? 0 : asked_slot + 1;
  };
  // One stage after the other, while the kernel ahead still runs: 4 MB on their way keep HBM busy, and what that
  // kernel reads would wait behind 25.
  for (int i = 0; i < kRing; ++i) {
    if (i > 0 && i <= stages) WaitForPhase(barriers_at + 8 * (i - 1), 0);
    ask();
  }
  WaitForEarlier();
  LetNextStart();

  const uint4* ordered = kDirect ? nullptr : args.x + lane;
  const int32_t next_tile = args.slices * kLanes;
  const float* row = kDirect ? args.x_rows + lane / 4 * args.x_stride + lane % 4 * 2 : nullptr;
  struct Inputs {
    uint4 ordered[kRowTiles];
    float2 pairs[4];
  };
  const auto load = [&](Inputs(&to)[kStageSlices], int32_t slice) {
#pragma unroll
    for (int s = 0; s < kStageSlices; ++s) {
      const auto exists = [&](int tile) {
        return tile * 8 + lane / 4 < args.m && slice + s < last;
      };
      if constexpr (kDirect) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[s].pairs[i] =
              exists(0)
                  ? __ldcg(reinterpret_cast<const float2*>(row + (slice + s) * kSlice + i * 8))
                  : make_float2(0.0f, 0.0f);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          to[s].ordered[i] = exists(i) ? __ldcg(ordered + i * next_tile + (slice + s) * kLanes)
                                       : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  int32_t slot = 0;
  uint32_t parity = 0;
  for (int32_t t = 0; t < my_tiles; ++t) {
    const TileOfRows here_at(static_cast<int32_t>(blockIdx.x) + t * blocks, row_tiles, 0,
                             /*many=*/false);
    if constexpr (kOfRows) ordered = args.x + lane + int64_t{here_at.rows} * next_tile;
    float sums[kRowTiles][4] = {};
    Inputs x[2][kStageSlices];
    load(x[0], first);
    const auto use = [&](int32_t slice, const Inputs(&here)[kStageSlices],
                         Inputs(&next)[kStageSlices]) {
      load(next, slice + kStageSlices);
      WaitForPhase(barriers_at + 8 * slot, parity);
      const uint32_t stage = ring_at + slot * kStageBytes;
      WFragments w[kStageSlices];  // of what is not there none are used
#pragma unroll
      for (int s = 0; s < kStageSlices; ++s) w[s] = LoadWFragments(stage + s * kWTileBytes, lane);
#pragma unroll
      for (int s = 0; s < kStageSlices; ++s) {
        if (slice + s >= last) continue;
        if constexpr (kDirect) {
          const float2* pairs = here[s].pairs;
          MultiplyAddTile(
              sums[0], w[s],
              make_uint4(PackBf16(pairs[0].x, pairs[0].y), PackBf16(pairs[1].x, pairs[1].y),
                         PackBf16(pairs[2].x, pairs[2].y), PackBf16(pairs[3].x, pairs[3].y)));
        } else {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) MultiplyAddTile(sums[i], w[s], here[s].ordered[i]);
        }
      }
      __syncwarp();  // all have read the stage: it may be filled again
      ask();
      if (++slot == kRing) {
        slot = 0;
        parity ^= 1;
      }
    };
    for (int32_t slice = first; slice < last; slice += 2 * kStageSlices) {
      use(slice, x[0], x[1]);
      if (slice + kStageSlices < last) use(slice + kStageSlices, x[1], x[0]);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      parts[t % 2][warp][i][lane] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    }
    __syncthreads();
    // Each tile another warp: what it adds up here it does not stream.
    if constexpr (kOfRows) {
      AddSegments(parts[t % 2], OfRowTile(args, here_at.rows * kMatmulTileRows), here_at.outputs,
                  (warp + t) % kMatmulSegments, lane);
    } else {
      AddSegments(parts[t % 2], args, static_cast<int32_t>(blockIdx.x) + t * blocks,
                  (warp + t) % kMatmulSegments, lane);
    }
    if (t == 0) WINNOW_TIMELINE_MARK("its first tile is done");
  }
  WINNOW_TIMELINE_MARK("its tiles are done");
#endif
}

constexpr int kStages = 4;
constexpr int kBlockOutputs = 128;

template <int kBlockRows>
constexpr size_t ManyRowsSharedBytes() {
  return size_t{kStages} * (kBlockOutputs + kBlockRows) * kSlice * 2;
}

template <int kBlockRows>
__global__ void __launch_bounds__(kThreads, 1)
    ManyRowsKernel(const __grid_constant__ Operands args) {
  constexpr int kWTiles = kBlockOutputs / 16;  // of the block
  constexpr int kXTiles = kBlockRows / 8;
  constexpr int kMyXTiles = kXTiles / 4;            // of the warp: 4 warps share the rows
  constexpr int kWPieces = kWTiles * kWTilePieces;  // of 16 bytes in a stage
  constexpr int kXPieces = kBlockRows * 4;
  extern __shared__ uint4 shared[];  // [kStages][kWPieces + kXPieces]
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int32_t w_tiles = (args.out + 15) / 16, x_tiles = (args.m + 7) / 8;
  const int32_t first_w = static_cast<int32_t>(blockIdx.y) * kWTiles;
  const int32_t first_x = static_cast<int32_t>(blockIdx.x) * kXTiles;
  const int32_t panels_of_row = (args.slices + 1) / 2;

  const auto start = [&](int32_t slice) {
    uint4* stage = shared + slice % kStages * (kWPieces + kXPieces);
    if (slice < args.slices) {
#pragma unroll
      for (int i = 0; i < kWPieces / kThreads; ++i) {
        const int piece = i * kThreads + static_cast<int>(threadIdx.x);
        const int32_t tile = first_w + piece / kWTilePieces;
        const bool exists = tile < w_tiles;
        CopyAsync16(SharedAddress(stage + piece),
                    args.w + (int64_t{exists ? tile : 0} * args.slices + slice) * kWTilePieces +
                        piece % kWTilePieces,
                    exists);
      }
#pragma unroll
      for (int i = 0; i < kXPieces / kThreads; ++i) {
        const int piece = i * kThreads + static_cast<int>(threadIdx.x);
        const int row_of_block = piece / 4, part = piece % 4;
        const int32_t row = first_x * 8 + row_of_block;
        const bool exists = row / 8 < x_tiles;
        const int32_t panel = (exists ? row / kPanelRows : 0) * panels_of_row + slice / 2;
        CopyAsync16(
            SharedAddress(stage + kWPieces + row_of_block * 4 + (part ^ (row_of_block / 2 % 4))),
            args.x + (int64_t{panel} * kPanelRows + row % kPanelRows) * 8 +
                ((slice % 2 * 4 + part) ^ (row % 8)),
            exists);
      }
    }
    CommitCopies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) start(i);

  const int my_w = warp / 4 * 4, my_x = warp % 4 * kMyXTiles;
  float sums[4][kMyXTiles][4] = {}, totals[4][kMyXTiles][4];
  int32_t segment_end = args.slices_per_segment;
  bool has_total = false;
  const auto end_segment = [&] {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kMyXTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          totals[i][j][e] = has_total ? __fadd_rn(totals[i][j][e], sums[i][j][e]) : sums[i][j][e];
          sums[i][j][e] = 0.0f;
        }
      }
    }
    has_total = true;
  };
  for (int32_t slice = 0; slice < args.slices; ++slice) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    start(slice + kStages - 1);
    const uint32_t of_w = SharedAddress(shared + slice % kStages * (kWPieces + kXPieces));
    const uint32_t of_x =
        of_w + kWPieces * static_cast<int>(sizeof(uint4)) +
        (lane % 8 * 4 + (lane / 8 ^ lane % 8 / 2)) * static_cast<int>(sizeof(uint4));
    uint4 x[kMyXTiles];
#pragma unroll
    for (int j = 0; j < kMyXTiles; ++j) {
      uint32_t parts[4];
      LoadMatrix4(of_x + (my_x + j) * 8 * 64, parts);
      x[j] = make_uint4(parts[0], parts[1], parts[2], parts[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const WFragments w = LoadWFragments(of_w + (my_w + i) * kWTileBytes, lane);
#pragma unroll
      for (int j = 0; j < kMyXTiles; ++j) MultiplyAddTile(sums[i][j], w, x[j]);
    }
    if (slice + 1 == segment_end) {
      end_segment();
      segment_end += args.slices_per_segment;
    }
  }
  if (args.slices % args.slices_per_segment != 0) end_segment();  // the last one is short
  const bool has_empty = args.HasEmptySegments();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < kMyXTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t output = (first_w + my_w + i) * 16 + lane / 4 + e / 2 * 8;
        const int32_t row = (first_x + my_x + j) * 8 + lane % 4 * 2 + e % 2;
        if (output >= args.out || row >= args.m) continue;
        const float sum = has_empty ? __fadd_rn(totals[i][j][e], 0.0f) : totals[i][j][e];
        Finish(sum, output, row, args.bias, args.accumulate, args.y, args.y_stride);
      }
    }
  }
}

// x rounded and in order: a thread makes the 16 bytes of one lane.
__global__ void __launch_bounds__(kThreads)
    OrderRowsKernel(const float* x, int64_t stride, int32_t m, int32_t in, int32_t slices,
                    bool panels, uint4* to) {
  LetNextStart();
  WaitForEarlier();
  const int32_t slice = static_cast<int32_t>(blockIdx.x) * (kThreads / kLanes) +
                        static_cast<int32_t>(threadIdx.x) / kLanes;
  if (slice >= slices) return;
  const int lane = threadIdx.x % kLanes;
  const int32_t row = static_cast<int32_t>(blockIdx.y) * 8 + lane / 4;
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t column = slice * kSlice + i * 8 + lane % 4 * 2;
    const float* from = x + row * stride + column;
    pairs[i] = PackBf16(row < m && column < in ? from[0] : 0.0f,
                        row < m && column + 1 < in ? from[1] : 0.0f);
  }
  PutOrdered(to, panels, slices, row, slice, lane % 4, pairs);
}

template <int kBlockRows>
cudaError_t ManyRows(const Operands& operands, Stream stream) {
  constexpr size_t kSharedBytes = ManyRowsSharedBytes<kBlockRows>();
  // Neighbouring blocks share outputs, of which there is more to read than of rows.
  const dim3 grid(static_cast<unsigned>(CeilDiv(operands.m, kBlockRows)),
                  static_cast<unsigned>(CeilDiv(operands.out, kBlockOutputs)));
  if (grid.y > 65535) return cudaErrorInvalidValue;
  return LaunchBehind(ManyRowsKernel<kBlockRows>, grid, kThreads, kSharedBytes, stream, operands);
}

}  // namespace

size_t MatmulWorkspaceBytes(int64_t m, const DeviceWeights& w) {
  if (w.way == DeviceWeights::Way::kExact) return 0;
  return w.way == DeviceWeights::Way::kInt8 ? RoundedBytes(m, w.in) : OrderedBytes(m, w.in);
}

size_t OrderedBytes(int64_t m, int64_t in) {
  if (OrderedInPanels(m)) {
    return static_cast<size_t>(CeilDiv(m, kPanelRows) * CeilDiv(SlicesOf(in), 2)) * kPanelBytes;
  }
  return static_cast<size_t>(CeilDiv(m, 8) * SlicesOf(in)) * kLanes * sizeof(uint4);
}

namespace {

// Whether StreamKernel takes m rows on this device: newer ones may have less shared memory.
bool Streams(int64_t m) {
  constexpr size_t kOtherSharedBytes = 18 * 1024;  // its variables, at most
  return m <= kStreamRows && CurrentDevice().hopper &&
         kStreamSharedBytes + kOtherSharedBytes <= CurrentDevice().block_shared_bytes;
}

// x in `operands`, one way or the other.
cudaError_t Tensor(const Operands& operands, bool portable, Stream stream) {
  const auto tiles = static_cast<unsigned>(CeilDiv(operands.out, 16));
  const int32_t m = operands.m;
  if (!portable && Streams(m)) {
    const auto kernel = operands.x == nullptr ? StreamKernel<true, 1, false>
                        : m <= 8              ? StreamKernel<false, 1, false>
                                              : StreamKernel<false, 2, false>;
    const auto most = static_cast<unsigned>(CurrentDevice().multiprocessors * kStreamBlocks);
    return LaunchAs({.starts_early = !operands.new_weights}, kernel, std::min(tiles, most),
                    kThreads, kStreamSharedBytes, stream, operands, RowTiles{});
  }
  if (m <= 8) return FewRows<1, 2, 2, 2>(operands, stream);
  if (m <= 16) return FewRows<2, 2, 2, 2>(operands, stream);
  if (m <= kMatmulFewRows) {
    // What takes three blocks to run at once has no second wave then.
    const unsigned slots = static_cast<unsigned>(CurrentDevice().multiprocessors) * 2;
    return tiles > slots && tiles <= slots / 2 * 3 ? FewRows<4, 2, 1, 3>(operands, stream)
                                                   : FewRows<4, 2, 2, 2>(operands, stream);
  }
  if (!portable && TakesBatchMatmul(m, operands.out)) return MatmulOfBatch(operands, stream);
  if (m <= 64) return ManyRows<64>(operands, stream);
  if (!portable && HasGroupMatmul()) return MatmulManyRowsByGroups(operands, stream);
  return ManyRows<128>(operands, stream);
}

constexpr int64_t kMostRows = 65535 * 8;  // of OrderRowsKernel's grid

bool IsRefused(const MatmulArgs& args, const DeviceWeights& w) {
  return args.m < 0 || args.m > kMostRows || w.out < 1 || w.in < 1;
}

// x in `operands`, one way or the other, and W of kTensor or kBlocks.
cudaError_t Multiply(const Operands& operands, const DeviceWeights& w, bool portable,
                     Stream stream) {
  if (w.way == DeviceWeights::Way::kTensor) return Tensor(operands, portable, stream);
  return portable ? cudaErrorInvalidValue : MatmulBlocks(operands, w, stream);
}

Operands OperandsOf(const MatmulArgs& args, const DeviceWeights& w) {
  const int32_t slices = SlicesOf(w.in);
  return {static_cast<const uint4*>(w.data),
          nullptr,
          nullptr,
          args.x_stride,
          slices,
          static_cast<int32_t>(CeilDiv(slices, kMatmulSegments)),
          static_cast<int32_t>(w.out),
          static_cast<int32_t>(args.m),
          args.y,
          args.y_stride,
          nullptr,
          args.bias,
          args.accumulate,
          args.new_weights,
          {}};
}

}  // namespace

cudaError_t OrderRows(const float* x, int64_t stride, int64_t m, int64_t in, void* ordered,
                      Stream stream) {
  if (m < 1 || m > kMostRows || in < 1) return cudaErrorInvalidValue;
  const int32_t slices = SlicesOf(in);
  const dim3 grid(static_cast<unsigned>(CeilDiv(slices, kThreads / kLanes)),
                  static_cast<unsigned>(CeilDiv(m, 8)));
  return Launch(OrderRowsKernel, grid, kThreads, 0, stream, false, x, stride,
                static_cast<int32_t>(m), static_cast<int32_t>(in), slices, OrderedInPanels(m),
                static_cast<uint4*>(ordered));
}

cudaError_t Matmul(const MatmulArgs& args, const DeviceWeights& w, void* workspace, Stream stream) {
  if (IsRefused(args, w)) return cudaErrorInvalidValue;
  if (args.m == 0) return cudaSuccess;
  if (w.way == DeviceWeights::Way::kExact) return MatmulExact(args, w, stream);
  if (w.way == DeviceWeights::Way::kInt8) {
    const DeviceMatrix x = {const_cast<float*>(args.x), args.m, w.in, args.x_stride};
    if (const cudaError_t error = RoundRows(x, workspace, stream); error != cudaSuccess) {
      return error;
    }
    return MatmulRounded(args, w, workspace, stream);
  }
  Operands operands = OperandsOf(args, w);
  const bool pairs = args.x_stride % 2 == 0 && reinterpret_cast<uintptr_t>(args.x) % 8 == 0;
  if (!args.portable && Streams(args.m) && args.m <= kDirectRows && w.in % kSlice == 0 && pairs) {
    operands.x_rows = args.x;
  } else if (const cudaError_t error =
                 OrderRows(args.x, args.x_stride, args.m, w.in, workspace, stream);
             error != cudaSuccess) {
    return error;
  } else {
    operands.x = static_cast<const uint4*>(workspace);
  }
  return Multiply(operands, w, args.portable, stream);
}

cudaError_t MatmulOrdered(const MatmulArgs& args, const DeviceWeights& w, const void* ordered,
                          Stream stream) {
  if (IsRefused(args, w) || w.way == DeviceWeights::Way::kExact ||
      w.way == DeviceWeights::Way::kInt8) {
    return cudaErrorInvalidValue;
  }
  if (args.m == 0) return cudaSuccess;
  Operands operands = OperandsOf(args, w);
  operands.x = static_cast<const uint4*>(ordered);
  return Multiply(operands, w, args.portable, stream);
}

bool GatesProducts(int64_t m, const DeviceWeights& w) {
  if (m <= kMatmulFewRows || w.out % (2 * kOrderedSlice) != 0) return false;
  if (w.way == DeviceWeights::Way::kBlocks) return StreamsBlocks(m, w) && GatesBlocks(m, w);
  if (w.way != DeviceWeights::Way::kTensor) return false;
  return TakesBatchMatmul(m, w.out) ? GatesBatchMatmul(m, w.out)
                                    : m > kPanelRows && HasGroupMatmul();
}

cudaError_t MatmulGated(const MatmulArgs& args, const DeviceWeights& w, const void* ordered,
                        void* gated, Stream stream) {
  if (IsRefused(args, w) || args.portable || args.accumulate || !GatesProducts(args.m, w)) {
    return cudaErrorInvalidValue;
  }
  Operands operands = OperandsOf(args, w);
  operands.x = static_cast<const uint4*>(ordered);
  operands.gated = static_cast<uint32_t*>(gated);
  return Multiply(operands, w, false, stream);
}

bool FillsDevice(const DeviceWeights& w) {
  return CeilDiv(w.out, kBlockOutputs) >= CurrentDevice().multiprocessors;
}

bool MultipliesTiles(const DeviceWeights& w, int32_t tile_rows) {
  if (w.out < 1 || w.in < 1) return false;
  const bool many = tile_rows == 64 || tile_rows == 128;
  switch (w.way) {
    case DeviceWeights::Way::kTensor:
      return many ? HasGroupMatmul() : tile_rows == kMatmulTileRows && Streams(tile_rows);
    case DeviceWeights::Way::kBlocks:
      return (tile_rows == kMatmulTileRows || tile_rows == kMatmulFewRows) &&
             StreamsBlocks(tile_rows, w);
    case DeviceWeights::Way::kInt8:
      return (tile_rows == kMatmulTileRows || many) && HasInt8GroupMatmul() &&
             MultipliesAsItLies(tile_rows, w);
    case DeviceWeights::Way::kExact:
      break;
  }
  return false;
}

bool GatesTiles(const DeviceWeights& w, int32_t tile_rows) {
  return w.way == DeviceWeights::Way::kTensor && tile_rows > kMatmulTileRows &&
         w.out % (2 * kOrderedSlice) == 0 && MultipliesTiles(w, tile_rows);
}

size_t OrderedTilesBytes(int64_t tiles, int32_t tile_rows, const DeviceWeights& w) {
  const int64_t rows = tiles * tile_rows, slices = SlicesOf(w.in);
  if (w.way == DeviceWeights::Way::kInt8) return RoundedBytes(rows, w.in);
  if (!TilesInPanels(tile_rows)) return static_cast<size_t>(rows / 8 * slices) * kLanes * 16;
  return static_cast<size_t>(rows / kPanelRows * CeilDiv(slices, 2)) * kPanelBytes;
}

cudaError_t MatmulTiles(const TiledMatmulArgs& args, const DeviceWeights& w, Stream stream) {
  const int64_t all_rows = args.most * args.tile_rows;
  if (!MultipliesTiles(w, args.tile_rows) || args.most < 1 || all_rows > kMostTiledRows ||
      args.most * CeilDiv(w.out, 16) > INT32_MAX ||
      (args.gated != nullptr && !GatesTiles(w, args.tile_rows))) {
    return cudaErrorInvalidValue;
  }
  const RowTiles rows = {args.count, args.w};
  MatmulArgs product = {.m = all_rows, .y = args.y, .y_stride = args.y_stride};
  if (w.way == DeviceWeights::Way::kInt8) {
    return MatmulRoundedTiles(product, w, args.x, rows, args.tile_rows, stream);
  }
  if (args.tile_rows <= kMatmulFewRows) product.m = args.tile_rows;
  Operands operands = OperandsOf(product, w);
  operands.x = static_cast<const uint4*>(args.x);
  operands.gated = static_cast<uint32_t*>(args.gated);
  if (w.way == DeviceWeights::Way::kBlocks) {
    return MatmulBlocksOfTiles(operands, rows, args.most, w, stream);
  }
  if (args.tile_rows > kMatmulTileRows) {
    return MatmulTilesByGroups(operands, rows, args.tile_rows, stream);
  }
  const int64_t at_once = CurrentDevice().multiprocessors * kStreamBlocks;
  return Launch(StreamKernel<false, 1, true>,
                static_cast<unsigned>(std::min(args.most * CeilDiv(w.out, 16), at_once)), kThreads,
                kStreamSharedBytes, stream, false, operands, rows);
}

}  // namespace winnow::kernels::cuda

// Mapping, kInt8 with integers of 4 bits, one row or two, on Hopper. As StreamKernel (matmul.cu): two blocks stay on each
// multiprocessor and take tile after tile of 16 outputs; a block's eight warps have an eighth of the groups each, and the bulk copy
// engine brings a warp's through a ring, over the borders of tiles.
//
// A group's sums are exact, so it does not matter which warp makes them. They meet in shared memory, with their scales,
// and one warp adds the groups in ascending order, as matmul_int8.h wants it, while the others stream the next tile.
//
// A lane makes 64 weights of a group ready by 24 instructions (matmul_int8_parts.cuh), where bfloat16 of 4 bits takes 2.6 a weight
// (matmul_blocks.cu).
//
// A layer of Llama-3.1-8B's shape without attention, one row (winnow_cuda_bench --filter layer), H200, 2026-11-30, us; HBM takes 25:
//   rings of 10 groups (as it is); of 6             48.8; 53.3
//   the output's rows rounded by its product in place of a launch, rings of 10; 8; 6; 4   50.4; 50.0; 48.6; 48.6
//   the same with 10, before rows are there one group on its way at a time; two; four; six; ten   54.2; 50.3; 50.2; 50.4; 50.8
#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_int8_parts.cuh"
#include "kernels/cuda/read_once.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kBlocks = 2;      // of a multiprocessor
constexpr int kMostSlots = 10;  // of a warp's ring, of a group
constexpr int kLeastSlots = 4;
constexpr int kAtOnce = 3;  // groups on their way while the kernel ahead still runs
constexpr int kOtherBytes = 2048;
constexpr int kSumLanes = 8;  // that have sums of rows: of outputs i and i + 8
static_assert(kInt4StreamRows == 2);

// A group's exact sums and scales of W: of lane i outputs i and i + 8, of each two rows.
struct GroupSums {
  int4 sums[kSumLanes];
  float2 scales[kSumLanes];
};

// Shared memory: rings [warps][slots] of a tile's group; the groups' sums [buffers][groups]; integers of rows
// [groups][m][4 lanes][8 words]; their scales [groups][m].
struct Room {
  int32_t slots = 0, buffers = 1;
  size_t bytes = 0;

  Room(int64_t m, int32_t groups) {
    const int64_t of_rows = groups * m * (kGroupValues + 4), of_sums = groups * sizeof(GroupSums);
    const int64_t slot = int64_t{kWarps} * kFourBitTileBytes;
    const int64_t most = kHalfSharedBytes - kOtherBytes - of_rows;
    // Two buffers save a barrier a tile, where they cost no depth that matters.
    buffers = most - 2 * of_sums >= 8 * slot ? 2 : 1;
    slots =
        static_cast<int32_t>(std::clamp<int64_t>((most - buffers * of_sums) / slot, 0, kMostSlots));
    bytes = static_cast<size_t>(slots * slot + buffers * of_sums + of_rows);
  }
};

struct StreamArgs {
  Int8Operands operands;
  int32_t slots, buffers;
};

__global__ void __launch_bounds__(kThreads, kBlocks)
    Int4StreamKernel(const __grid_constant__ StreamArgs all) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const Int8Operands& operands = all.operands;
  const Operands& args = operands.product;
  const int32_t groups = operands.groups, m = args.m, slots = all.slots;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t barriers[kWarps][kMostSlots];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  auto* const memory = reinterpret_cast<std::byte*>(dynamic);
  std::byte* const ring = memory + warp * (slots * kFourBitTileBytes);
  auto* const sums = reinterpret_cast<GroupSums*>(memory + kWarps * slots * kFourBitTileBytes);
  auto* const x = reinterpret_cast<uint4*>(sums + all.buffers * groups);
  auto* const x_scales = reinterpret_cast<float*>(x + groups * m * (kGroupValues / 16));
  const uint32_t ring_at = SharedAddress(ring), barriers_at = SharedAddress(barriers[warp]);
  const int32_t tiles = (args.out + kFourBitTileOutputs - 1) / kFourBitTileOutputs;
  const auto blocks = static_cast<int32_t>(gridDim.x);
  const int32_t share = (groups + kWarps - 1) / kWarps;
  const int32_t first = min(warp * share, groups), last = min(first + share, groups);
  const int32_t my_tiles = (tiles - static_cast<int32_t>(blockIdx.x) + blocks - 1) / blocks;
  const int32_t stages = my_tiles * (last - first);

  if (lane == 0) {
    for (int i = 0; i < slots; ++i) InitBarrier(barriers_at + 8 * i);
    FenceBarriers();
  }
  __syncwarp();
  const uint64_t read_once = ReadOnce();
  // Groups are asked for in the order in which they are used, over the borders of tiles.
  int32_t asked = 0, asked_group = first, asked_slot = 0;
  auto asked_tile = static_cast<int32_t>(blockIdx.x);
  const auto ask = [&] {
    if (asked == stages) return;
    ++asked;
    if (lane == 0) {
      const uint8_t* const from =
          operands.w + (int64_t{asked_tile / 4} * groups + asked_group) * kFourBitPanelBytes +
          asked_tile % 4 * kFourBitTileBytes;
      ArriveExpecting(barriers_at + 8 * asked_slot, kFourBitTileBytes);
      BulkCopy(ring_at + asked_slot * kFourBitTileBytes, from, kFourBitTileBytes,
               barriers_at + 8 * asked_slot, read_once);
    }
    if (++asked_group == last) {
      asked_group = first;
      asked_tile += blocks;
    }
    asked_slot = asked_slot + 1 == slots ? 0 : asked_slot + 1;
  };
  // A few at a time while the kernel ahead still runs, as in StreamKernel.
  for (int i = 0; i < slots; ++i) {
    if (i >= kAtOnce && i - kAtOnce < stages) WaitForPhase(barriers_at + 8 * (i - kAtOnce), 0);
    ask();
  }
  WaitForEarlier();
  LetNextStart();

  // This warp's groups of the rows, as the matrix instruction wants them, and their scales for whoever adds.
  const auto* const rounded = reinterpret_cast<const uint8_t*>(args.x);
  for (int32_t i = lane; i < (last - first) * m * 8; i += kLanes) {
    const int32_t piece = i % 8, row = i / 8 % m, group = first + i / 8 / m;
    const uint8_t* const panel = rounded + int64_t{group} * kRoundedPanelBytes;
    const uint4 words = __ldcg(
        reinterpret_cast<const uint4*>(panel + row * kGroupValues + (piece ^ (row % 8)) * 16));
    auto* const to =
        reinterpret_cast<uint32_t*>(x) + (group * m + row) * (kGroupValues / 4) + piece;
    to[0] = words.x;
    to[8] = words.y;
    to[16] = words.z;
    to[24] = words.w;
    if (piece == 0) {
      x_scales[group * m + row] =
          __ldcg(reinterpret_cast<const float*>(panel + kIntegerBytes) + row);
    }
  }
  __syncwarp();

  // Rows past the last one are read as the first: their sums are not used.
  const int32_t my_row = lane / 4 < m ? lane / 4 : 0;
  int32_t slot = 0;
  uint32_t parity = 0;
  for (int32_t t = 0; t < my_tiles; ++t) {
    GroupSums* const of_tile = sums + (all.buffers == 2 ? t % 2 * groups : 0);
    if (all.buffers == 1 && t > 0) __syncthreads();  // those of the tile before have been added
    for (int32_t group = first; group < last; ++group) {
      const uint4* const of_rows = x + (group * m + my_row) * 8 + lane % 4 * 2;
      const uint4 rows[2] = {of_rows[0], of_rows[1]};
      WaitForPhase(barriers_at + 8 * slot, parity);
      const std::byte* const tile = ring + slot * kFourBitTileBytes;
      const uint4 words[2] = {*reinterpret_cast<const uint4*>(tile + FourBitWordAt(lane, 0)),
                              *reinterpret_cast<const uint4*>(tile + FourBitWordAt(lane, 4))};
      int32_t products[4] = {};
#pragma unroll
      for (int s = 0; s < kGroupSlices; ++s) {
        const uint4 &w = words[s / 2], &of_x = rows[s / 2];
        uint32_t a[4];
        FourBitFragments(s % 2 == 0 ? w.x : w.z, s % 2 == 0 ? w.y : w.w, a);
        MultiplyAdd16x8x32(products, a, s % 2 == 0 ? of_x.x : of_x.z, s % 2 == 0 ? of_x.y : of_x.w);
      }
      if (lane % 4 == 0) {
        of_tile[group].sums[lane / 4] =
            make_int4(products[0], products[1], products[2], products[3]);
        of_tile[group].scales[lane / 4] =
            reinterpret_cast<const float2*>(tile + kFourBitScalesAt)[lane / 4];
      }
      __syncwarp();  // all have read the group: its slot may be filled again
      ask();
      if (++slot == slots) {
        slot = 0;
        parity ^= 1;
      }
    }
    __syncthreads();
    // Each tile another warp. A lane has an output and a row.
    if (warp != t % kWarps) continue;
    const int i = lane % kSumLanes, e = lane / kSumLanes, row = e % 2;
    const int32_t scale_row = min(row, m - 1);
    float sum = 0.0f;
#pragma unroll 8
    for (int32_t group = 0; group < groups; ++group) {
      const GroupSums& of_group = of_tile[group];
      const int32_t product = reinterpret_cast<const int32_t*>(&of_group.sums[i])[e];
      const float scale = __fmul_rn(reinterpret_cast<const float*>(&of_group.scales[i])[e / 2],
                                    x_scales[group * m + scale_row]);
      sum = __fmaf_rn(__int2float_rn(product), scale, sum);
    }
    const int32_t output =
        (static_cast<int32_t>(blockIdx.x) + t * blocks) * kFourBitTileOutputs + i + e / 2 * 8;
    if (output < args.out && row < m) {
      Finish(sum, output, row, args.bias, args.accumulate, args.y, args.y_stride);
    }
  }
#endif
}

}  // namespace

bool StreamsInt4(int64_t m, int64_t in) {
  return m >= 1 && m <= kInt4StreamRows && CurrentDevice().hopper &&
         kHalfSharedBytes <= CurrentDevice().block_shared_bytes &&
         Room(m, GroupsOf(in)).slots >= kLeastSlots;
}

cudaError_t MatmulInt4Stream(const Int8Operands& operands, Stream stream) {
  const int32_t m = operands.product.m, out = operands.product.out;
  const Room room(m, operands.groups);
  const auto tiles = static_cast<unsigned>(CeilDiv(out, kFourBitTileOutputs));
  const auto most = static_cast<unsigned>(CurrentDevice().multiprocessors * kBlocks);
  return LaunchAs({.starts_early = !operands.product.new_weights}, Int4StreamKernel,
                  std::min(tiles, most), kThreads, room.bytes, stream,
                  StreamArgs{operands, room.slots, room.buffers});
}

}  // namespace winnow::kernels::cuda

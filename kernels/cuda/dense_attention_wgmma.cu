// Mapping, kInTurn on Hopper, for heads of 64 and 128 channels of 8-bit types (few rows; more are kWidened), and of bfloat16 in blocks
// that are not whole units (others: dense_attention_pairs.cu). The same rows to a block, the same units and splits as dense_attention.cu's kernel, with
// matrix instructions of a warpgroup (wgmma.cuh), which round as those of a warp do; so the same bits.
//
// A block is two warpgroups of 64 rows each and one that copies: its threads find the rows of a unit by the block
// table and bring them, 16 bytes at a time, into the places where the instructions read them, several units ahead.
// Queries lie in shared memory, weights are made where they are used, in registers. While one warpgroup weighs a
// unit's scores, the matrix instructions of the other run.
//
// H200, 8192 tokens, d 128, G 4, bfloat16: 450 TFLOP/s where any device's kernel has 225; 46 % of what the tensor cores could do
// (469 since queries are loaded at once). Weighing is what takes the time, and only two warps to a scheduler could take turns,
// because two sets of sums fill the registers.
//
// What was tried: weights relative to the largest score itself, so that the sums so far are multiplied in nearly
// each unit, and a descriptor built for each instruction: 398. Lost (448 to 449 TFLOP/s, that is nothing): weighing a unit
// while the values of the one before are added up, which needs a branch that depends on the weights, or else the
// compiler puts all of it behind the wait; and the warpgroups taking turns by named barriers.
// Also lost (H200, 2026-11-26, the same shape, 449 to 451 in the same runs; TFLOP/s, 8192 tokens and 512 before 131072, 484 there):
//   a unit weighed while the scores of the next and the values of the one before are made; sums of the splits before
//     in shared memory; whole units by the copy engine, keys and values in rings of their own                       368, 384
//     the same, sums of the splits before left out                                                                   393
//     the same, queries from registers                                                                               391
//     the same, both                                                                                                 427
//     the same, both, and no weighing: what matrix instructions of 64 by 64 and their waits leave                    606
//   two units at a time, 128 keys to a matrix instruction, all sums in registers, whole units by the copy engine     425, 456
// And on 2026-11-27 (449; 494 for 2048 before 131072; 526 for 512, which this kernel's tiles fill the device with):
//   three warpgroups of 64 rows, sums of the splits before in `out`                                                  333, 432, 332
//   the same, sums of the splits before left out                                                                     542, 527, 420
//   two warpgroups, sums of the splits before in `out`                                                               309, 424, 429
//
// 8-bit types, TFLOP/s for 8192 tokens of int8, d 128; d 64: 192; 162, since the copying warpgroup loads all before it stores and
// takes fewer instructions to a word (kv_rows.cuh) 280; 234.
#include <algorithm>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/dense_attention_parts.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace winnow::kernels::cuda::dense {
namespace {

[[maybe_unused]] constexpr int kAhead =
    2;  // units on their way before the first of them is waited for

template <DType kKv, int kHeadDim>
constexpr int kStages = HasScales(kKv)    ? 3 * 128 / kHeadDim
                        : kHeadDim == 128 ? 5
                                          : 8;
// Units of codes: one that becomes bfloat16 while another may still be read, and those ahead.
[[maybe_unused]] constexpr int kCodeStages = kAhead + 2;
template <int kHeadDim>
constexpr int kOperandBytes =
    kHeadDim / 64 * kPanelBytes;  // queries of a warpgroup, or keys, or values
template <DType kKv, int kHeadDim>
constexpr size_t kSharedBytes = 1024 + size_t{kOperandBytes<kHeadDim>} *
                                           (kGroups + 2 * kStages<kKv, kHeadDim>)+(
                                               HasScales(kKv)
                                                   ? size_t{kCodeStages} *
                                                         kDenseUnitTokens* KvRowBytes<kKv>(kHeadDim)
                                                   : 0);

template <DType kKv, int kHeadDim>
__global__ void __launch_bounds__(kBlockThreads, 1)
    GroupsKernel(const __grid_constant__ Args args) {
#ifdef WINNOW_WGMMA
  constexpr int kRing = kStages<kKv, kHeadDim>;
  constexpr uint32_t kOperand = kOperandBytes<kHeadDim>;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t filled[kRing], emptied[kRing];
  const uint32_t queries = (SharedAddress(dynamic) + 1023) / 1024 * 1024;
  const uint32_t units_at = queries + kGroups * kOperand;  // [kRing] of keys and values
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const auto tile = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);  // those with most keys first
  const DeviceChunk chunk = args.chunks[blockIdx.z];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t first_row = tile * kBlockRows;
  if (first_row >= num_rows) return;
  const int32_t last_row = min(first_row + kBlockRows, num_rows) - 1;
  const int32_t visible = chunk.position + args.group.Divide(last_row) + 1;
  const int32_t units = DenseUnits(visible);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRing; ++i) {
      InitBarrier(SharedAddress(filled + i), kGroupThreads);
      InitBarrier(SharedAddress(emptied + i), kGroups * kGroupWarps);
    }
    FenceBarriers();
  }
  __syncthreads();
  int stage = 0;
  uint32_t parity = 0;
  const auto next_stage = [&] {
    if (++stage == kRing) {
      stage = 0;
      parity ^= 1;
    }
  };
  if (warp < kGroupWarps) {
    GiveUpRegisters<40>();
    const uint8_t* head = args.pool + kv_head * args.head_bytes;
    int told = 0;  // stages before this one are known to be filled
    const auto tell = [&] {
      FenceSharedWrites();
      Arrive(SharedAddress(filled + told));
      if (++told == kRing) told = 0;
    };
    if constexpr (HasScales(kKv)) {
      using Codes = CodeRows<kKv, kHeadDim>;
      const uint32_t codes_at = units_at + kRing * 2 * kOperand;  // [kCodeStages]
      for (int32_t unit = 0; unit < units + kAhead; ++unit) {
        if (unit < units) {
          Codes::template Start<kGroupThreads>(
              Codes::Held(args, chunk.block_table, head, unit, visible), unit, visible,
              codes_at + unit % kCodeStages * Codes::kUnitBytes);
        }
        CommitCopies();
        const int32_t ready = unit - kAhead;
        if (ready < 0) continue;
        WaitForCopies<kAhead>();
        // All have the unit's codes; and have made those of the unit before, whose place the next copy takes.
        asm volatile("bar.sync 2, %0;" ::"n"(kGroupThreads) : "memory");
        WaitForPhase(SharedAddress(emptied + stage), parity ^ 1);
        const uint32_t to = units_at + stage * 2 * kOperand;
        Codes::template Widen<kGroupThreads>(
            codes_at + ready % kCodeStages * Codes::kUnitBytes, visible - ready * kDenseUnitTokens,
            [&](int32_t row, bool is_value, int32_t word, uint2 pairs) {
              StoreShared(
                  to + (is_value ? kOperand : 0) + OperandPieceAt(row, word / 2) + word % 2 * 8,
                  pairs);
            });
        tell();
        next_stage();
      }
    } else {
      constexpr int kRows = kDenseUnitTokens / kGroupWarps;
      constexpr int kPieces = kHeadDim / 4;  // of 16 bytes in a row
      constexpr int kRowBytes = 4 * kHeadDim;
      // Whether a warp's rows always lie in one block, one behind the other.
      const bool together = args.block_tokens.divisor() % kRows == 0;
      constexpr int kAtOnce = kLanes / kPieces;  // rows of a warp
      const int my_row = lane / kPieces, my_piece = lane % (kPieces / 2);
      const uint32_t my_place = lane % kPieces / (kPieces / 2) * kOperand +
                                OperandPieceAt(warp * kRows + my_row, my_piece);
      // Place of a lane's i-th 16 bytes, of a unit from `my_place` on: OperandPieceAt() of rows further on.
      const auto place = [](uint32_t from, int i) {
        return (from + i * kAtOnce * 128) ^ (i * kAtOnce % 8 * 16);
      };
      for (int32_t unit = 0; unit < units; ++unit) {
        const uint32_t to = units_at + stage * 2 * kOperand + my_place;
        const int32_t first = unit * kDenseUnitTokens + warp * kRows;
        if (together && first + kRows <= visible) {
          const int32_t block = args.block_tokens.Divide(first);
          const uint8_t* from = head + chunk.block_table[block] * args.block_bytes +
                                int64_t{first - block * args.block_tokens.divisor()} * kRowBytes +
                                lane * 16;
          WaitForPhase(SharedAddress(emptied + stage), parity ^ 1);
#pragma unroll
          for (int i = 0; i < kRows * kPieces / kLanes; ++i) {
            CopyAsync16(place(to, i), from + i * kLanes * 16, true);
          }
        } else {
          const UnitRows<kHeadDim, kGroupWarps> rows(args, chunk.block_table, head, unit, visible);
          WaitForPhase(SharedAddress(emptied + stage), parity ^ 1);
#pragma unroll
          for (int i = 0; i < kRows * kPieces / kLanes; ++i) {
            const int row = i * kAtOnce + my_row;
            const uint64_t from = __shfl_sync(kFullMask, rows.held[0], row);
            CopyAsync16(place(to, i), reinterpret_cast<const uint8_t*>(from) + lane % kPieces * 16,
                        first + row < visible);
          }
        }
        CommitCopies();
        next_stage();
        if (unit >= kAhead) {
          WaitForCopies<kAhead>();
          tell();
        }
      }
      WaitForCopies<0>();
      for (int32_t unit = max(units - kAhead, 0); unit < units; ++unit) tell();
    }
  } else {
    TakeRegisters<232>();
    const int group = warp / kGroupWarps - 1;
    const int group_row = warp % kGroupWarps * kWarpRows;
    const uint32_t my_queries = queries + group * kOperand;
    int32_t sees[2];
    int64_t at[2];
    {
      uint32_t q[kHeadDim / 16][4];
      LoadRows<kHeadDim>(args, chunk, kv_head, first_row + group * kGroupRows + group_row, sees, at,
                         q);
      StoreRows<kHeadDim>(q, my_queries, group_row);
      FenceSharedWrites();
      asm volatile("bar.sync 1, %0;" ::"n"(kGroups * kGroupThreads) : "memory");
    }
    float scores[2 * kUnitTiles][4], keep[2] = {1.0f, 1.0f};
    float o[kHeadDim / 8][4], total[kHeadDim / 8][4];  // of the split, and of those before it
    uint32_t weights[kUnitTiles][4];
    RowSums sums, totals;
    Clear(total);
    // The same in all threads of a warp, which the compiler cannot know.
    const uint64_t of_queries = SharedMatrix(__shfl_sync(kFullMask, my_queries, 0), 1024);
    const uint64_t of_keys = SharedMatrix(units_at, 1024);
    const uint64_t of_values = SharedMatrix(units_at + kOperand, 1024, kPanelBytes);
    const auto start_scores = [&] {  // of the unit at `stage`
      WaitForPhase(SharedAddress(filled + stage), parity);
      const uint64_t keys = Further(of_keys, stage * 2 * kOperand);
      FenceGroup();
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        const uint32_t offset = step / 4 * kPanelBytes + step % 4 * 32;
        GroupMultiplyAdd(scores, Further(of_queries, offset), Further(keys, offset), step > 0);
      }
      CommitGroup();
    };
    const auto start_values = [&](int of_stage, bool begins) {
      const uint64_t values = Further(of_values, of_stage * 2 * kOperand);
      FenceGroup();
#pragma unroll
      for (int t = 0; t < kUnitTiles; ++t) {
        GroupMultiplyAdd<true>(o, weights[t], Further(values, t * 16 * 128), t > 0 || !begins);
      }
      CommitGroup();
    };
    start_scores();
    WaitForGroups<0>();
    Weigh(scores, 0, sees, sums, weights, keep);
    for (int32_t unit = 0; unit < units; ++unit) {
      const bool begins = BeginsDenseSplit(unit), is_last = unit + 1 == units;
      if (!begins) Rescale(o, keep);
      if (is_last) {
        start_values(stage, begins);
        WaitForGroups<0>();
        AddSplit<kHeadDim>(sums, o, totals, total);
        break;
      }
      const int my_stage = stage;
      next_stage();
      start_scores();
      start_values(my_stage, begins);
      WaitForGroups<0>();
      if (lane == 0) Arrive(SharedAddress(emptied + my_stage));
      if (BeginsDenseSplit(unit + 1)) {
        AddSplit<kHeadDim>(sums, o, totals, total);
        sums = RowSums();
      }
      Weigh(scores, (unit + 1) * kDenseUnitTokens, sees, sums, weights, keep);
    }
    AddSinks(args, chunk, kv_head, first_row + group * kGroupRows + group_row, totals);
    WriteRows<kHeadDim>(args, sees, at, totals, total);
  }
#endif
}

template <DType kKv, int kHeadDim>
cudaError_t LaunchOf(const DenseAttentionShape& shape, const Args& args, Stream stream) {
  const auto kernel = GroupsKernel<kKv, kHeadDim>;
  const dim3 grid(
      static_cast<unsigned>(CeilDiv(int64_t{shape.max_chunk_tokens} * shape.group, kBlockRows)),
      shape.layout.kv_heads, shape.num_chunks);
  return LaunchBehind(kernel, grid, kBlockThreads, kSharedBytes<kKv, kHeadDim>, stream, args);
}

}  // namespace

bool HasGroupAttention(int32_t head_dim) {
  if (head_dim != 64 && head_dim != 128) return false;
  thread_local CodeHere code;
  // The kernel that takes the most.
  constexpr size_t kMost =
      std::max({kSharedBytes<DType::kBF16, 64>, kSharedBytes<DType::kBF16, 128>,
                kSharedBytes<DType::kI8, 64>, kSharedBytes<DType::kI8, 128>});
  return code.Has(GroupsKernel<DType::kBF16, 128>, kMost);
}

cudaError_t AttendInTurnByGroups(const DenseAttentionShape& shape, const Args& args,
                                 Stream stream) {
  return ForKvType(shape.layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return shape.layout.head_dim == 64 ? LaunchOf<kKv, 64>(shape, args, stream)
                                       : LaunchOf<kKv, 128>(shape, args, stream);
  });
}

}  // namespace winnow::kernels::cuda::dense

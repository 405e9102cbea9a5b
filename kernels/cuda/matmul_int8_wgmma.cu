// Mapping, kInt8 on Hopper. W is the left operand of a warpgroup's matrix instructions and x the right one; both come from shared
// memory, as panels (matmul_int8_parts.cuh). A stage is a group: four instructions make its exact sums, which then are added to a
// thread's float32 sums while the instructions of later groups run.
//
// A prompt's rows: two warpgroups that multiply, of 64 outputs each by 128 rows; two blocks are a cluster that shares rows, and each
// copies one of the two panels to both. Up to kMatmulBatchRows: one warpgroup and no cluster, 64 outputs by 8 to 128 rows, so that more
// multiprocessors take part in reading W. Up to kNarrowRows tiles have 32 outputs where that gives every tile a multiprocessor of its own.
// The instructions read 64 outputs all the same; the sums of what lies behind the 32 are not used.
//
// Gates and ups of a prompt (MatmulRoundedGated): a block's panels of W are 64 gates and their ups, and each warpgroup takes both by 64
// rows of 128, so that a thread has a gate and its up. The two blocks of a cluster have the two halves of a group of what is written.
// They tell each other the largest magnitudes of their rows, through shared memory, and then each rounds its half.
//
// Four warps fill stages, each by copies of its own, over the borders of tiles, and W of the first ones while the kernel before still
// runs. It is one thread of a warp that copies, and a warp's number comes from a shuffle: then the compiler computes addresses once for
// a warp, in uniform registers, and a copy is no loop over lanes.
//
// One H200, us, and what was tried and lost (HBM takes 27 and 13 for W). With 2,048 rows and more the card is at its limit of power, and
// 3 % are noise.
//
//   outputs, inner values; rows                            28672, 4096; 1, 64, 2048   4096, 14336; 1, 64, 2048
//   as it is                                               28   35   592              17   25   255
//   tiles of 64 outputs for all rows                        28    -    -               17    -    -
//   of 32 for all rows of a batch                           31   51    -               17   27    -
//   a group's instructions before the additions of the last, also from two to two   28   35   596   17   25   256: spills
//   warps' numbers and descriptors computed by each lane    29   36   582              18   26   267
//   the same, and lanes of one warp make all copies         32   39   606              28   35   277
//   so, tiles of 32, 48 and 16 outputs (250 to 320 ns a stage, however small)   53, 46, 101   67, 56, 161   -   33, 36, 65   41, 45, 80   -
// and of that last form:
//   an integer made a float by two additions (as in all below)   32   40   636        28   36   301
//   the warpgroups of a prompt taking turns                 -    -    630              -    -    300
//   four sums of a group side by side, added at the end     32   40   -                30   37   -
//   scales of W read by threads, from where they lie        44   57   639              35   44   307
//   W from registers, 176 rows of a prompt, a copy of 2 KiB for each warp   -   40   681   -   48   333
//   the same, taking turns                                  -    -    746              -    -    358
//   few rows by m16n8k32, a warp for 16 outputs, x asked of L1 a group ahead   29   -   -   33   -   -
//   the same, x by the copy engine, too                     42   28    -                28   -    -
//
// Where one product follows another, the next one's blocks run on multiprocessors that the last one leaves idle, and few tiles cost
// little. In a layer a product waits for its rows. A layer of Llama-3.1-8B's shape without attention (winnow_cuda_bench --filter layer;
// HBM takes 52), 1, 4, 8, 16, 64, 128 and 2048 rows:
//   lanes of one warp make all copies                      87, 88, 88, 92, 113, 157, 1283
//   tiles of 64 outputs for all rows                       71, 70, 69, 72, 93, 136, 1213
//   of 32 for o and down, up to 8 rows                     66, 69, 71, 72; up to 16 rows 77
//   as it is                                               66, 70, 70, 72, 93, 137, 1213
//   of 32 for all products of a batch                      69, 71, 72, 79, 117, 182, -
//   stages of 112 KiB, so that the next product's block finds room   72, 74, 75, 79, 125, 145, -
//     and tiles of 32                                      77, 79, 79, 87, 171, 178, -
//   of 72 KiB; and tiles of 32                             87, 88, 90, 99, 171, 227, -; 80, 78, 80, 88, 173, 260, -
//
// The same layer with gates and ups gated by a launch of their own, and by the product; 256, 512, 2048 and 8192 rows:
//   product, SiluMulRounded                                235, 339, 1215, 4970
//   gated product, as it is                                229, 328, 1244, 4755
//   the same, magnitudes told by release at cluster, and waited for with acquire   -, 338, 1230, 4797
//
// Integers of 4 bits of W come from registers, where a lane makes its fragments (matmul_int8_parts.cuh). A group takes a warpgroup longer
// than its bytes take to come, so two blocks stay on a multiprocessor where their registers find room. That layer, 2026-11-30, us,
// 4, 8, 16, 32 and 64 rows (8 bits: 68, 68, 71, 75, 91):
//   one block                                              63, 60, 65, 71, 98
//   two up to 32 rows                                      59, 53, 64, 87, -
//   two up to 16, and tiles of 64 outputs for 4 rows, too (as it is; one row or two: matmul_int4_stream.cu)
//
// Left: of a prompt, matrix instructions take 40 % of the time.
#include <utility>

#include "kernels/cuda/matmul_int8_parts.cuh"
#include "kernels/cuda/matmul_wgmma_parts.cuh"
#include "kernels/cuda/read_once.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int32_t kBandRows = 16;
constexpr int kFillRegisters = 40;
[[maybe_unused]] constexpr int kFillWarps = kGroupThreads / kLanes;

// Rows up to which tiles of 32 outputs pay: each block reads all rows beside its part of W.
constexpr int32_t kNarrowRows = 4;

// kMultipliers: warpgroups that multiply; kRows: of a tile; kTileOutputs: outputs of a warpgroup, 64 or 32; kOfRows: tiles of rows
// that have a W each; kBits: of W's integers.
template <int kMultiplierGroups, int kTileRows, int kTileOutputs = kPanelRows, bool kGates = false,
          bool kTilesOfRows = false, int kIntegerBits = 8>
struct Shape {
  static constexpr int kBits = kIntegerBits;
  static_assert(kBits == 8 ||
                (kBits == 4 && kMultiplierGroups == 1 && !kGates && kTileOutputs == kPanelRows));
  static constexpr int kWSourceBytes = WPanelBytes(kBits);  // of a panel in memory
  static constexpr int kMultipliers = kMultiplierGroups, kRows = kTileRows;
  static constexpr int kClusterBlocks = kMultipliers == 2 ? 2 : 1;
  static constexpr bool kWholePanels = kTileOutputs == kPanelRows;
  static constexpr bool kOfRows = kTilesOfRows;
  static_assert(!kOfRows || (kWholePanels && kMultipliers == 1));
  static_assert(kWholePanels || (kMultipliers == 1 && kTileOutputs < kPanelRows));
  static constexpr int kPanels = (kRows + kPanelRows - 1) / kPanelRows;
  static constexpr int kMyPanels = kPanels / kClusterBlocks;  // that a block copies
  static constexpr int kPanelsRows = kRows / kPanels;         // of a panel that are wanted
  static_assert(kMyPanels * kClusterBlocks == kPanels && kPanelsRows * kPanels == kRows);
  static constexpr int kThreads = (kMultipliers + 1) * kGroupThreads;
  static constexpr int kWarps = kMultipliers * kGroupThreads / kLanes;  // that multiply
  static constexpr int kOutputs = kMultipliers * kTileOutputs;
  // Panels of W for a warpgroup: gates and ups, or one. With two it takes half of the rows.
  static constexpr bool kGated = kGates;
  static constexpr int kParts = kGated ? 2 : 1;
  static_assert(!kGated || (kMultipliers == 2 && kPanels == 2));
  static constexpr int kRowTiles = kRows / kParts / 8;
  // Groups whose products a warpgroup starts before it adds the first one's.
  static constexpr int kSets = kRowTiles <= 4 ? 4 : 2;
  // Registers of a thread that multiplies; 0: as many as it was launched with.
  static constexpr int kMultiplyRegisters = kMultipliers == 2 ? 232 : 0;
  static_assert(kMultiplyRegisters == 0 || SharesRegisters(kMultiplyRegisters, kFillRegisters));
  // Copies of W. Whole panels come with their scales; those of fewer outputs come by a copy of their own.
  static constexpr int kPanelTiles = kPanelRows / kTileOutputs;
  static constexpr int kWCopies = kWholePanels ? kMultipliers : 2;
  static_assert(kPanelTiles * kTileOutputs == kPanelRows && kSets >= 2 && kWCopies >= 1);
  // A stage: W, with its scales where those come along, integers of the rows, their scales, and other scales of W.
  static constexpr uint32_t kWCopyBytes =
      kWholePanels ? kWSourceBytes : kTileOutputs * kGroupValues;
  static constexpr uint32_t kWPanelBytes = (kWCopyBytes + 1023) / 1024 * 1024;
  static constexpr uint32_t kWBytes = kMultipliers * kWPanelBytes;
  static constexpr uint32_t kXBytes = kPanelsRows * kGroupValues, kXScaleBytes = kPanelsRows * 4;
  static constexpr uint32_t kScalesAt = kWBytes + kPanels * kXBytes;
  static constexpr uint32_t kWScalesAt = kScalesAt + kPanels * kXScaleBytes;
  static constexpr uint32_t kWScaleBytes = kTileOutputs * 4;
  static constexpr uint32_t kStageBytes =
      (kWScalesAt + (kWholePanels ? 0 : kWScaleBytes) + 1023) / 1024 * 1024;
  // Bytes of W that a stage takes.
  static constexpr uint32_t kWCopiedBytes =
      kMultipliers * kWCopyBytes + (kWholePanels ? 0 : kWScaleBytes);
  static_assert(kWCopiedBytes % 16 == 0 && kWarps % 4 == 0 && kRowTiles * 8 * kParts == kRows);
  // Matrix instructions read 64 outputs from where a stage begins, also where it has fewer.
  static constexpr uint32_t kReadPast =
      kWholePanels || kStageBytes >= kIntegerBytes ? 0 : kIntegerBytes - kStageBytes;
  // Blocks of a multiprocessor. A stage of 4 bits takes a warpgroup longer than its bytes take to come.
  static constexpr int kResident = kBits == 4 && kRows <= 16 ? 2 : 1;
  static constexpr int kBlockBytes = kResident == 2 ? kHalfSharedBytes - 1024 : kGroupsSharedBytes;
  static constexpr int kStages = (kBlockBytes - 1024 - kReadPast) / kStageBytes;
  static constexpr size_t kSharedBytes = kStages * kStageBytes + kReadPast + 1024;
};

template <typename S>
__device__ __forceinline__ void PlaceTile(const Raster& raster, int32_t row_tiles, int32_t tile,
                                          int rank, int32_t& first_row, int32_t& outputs) {
  if constexpr (S::kOfRows) {
    const TileOfRows at(tile, row_tiles, raster.output_tiles, S::kRows >= kPanelRows);
    first_row = at.rows * S::kRows;
    outputs = at.outputs;
    return;
  }
  int32_t row_tile, output_tile;
  raster.Place(tile, row_tile, output_tile);
  first_row = row_tile * S::kRows;
  outputs = output_tile * S::kClusterBlocks + rank;
}

#ifdef WINNOW_WGMMA
// Largest magnitudes of 64 rows in the 16 outputs of each warp of both blocks; a place has two rows.
struct RowMaxima {
  uint2 of_warps[8][kLanes];
};

// Rounds and writes silu(gate) * up of a warpgroup: 64 rows by 64 outputs, half of a group. The other block of the cluster has the
// other half. `outputs`: number of the 64 outputs; `warp`: in the warpgroup; `barrier`: its phase ends when all of `maxima` are here.
__device__ __forceinline__ void WriteRounded(const Int8Operands& operands, int32_t outputs,
                                             int rank, int32_t first_row, int warp, int lane,
                                             RowMaxima& maxima, uint32_t barrier, uint32_t parity,
                                             float (&gates)[8][4], const float (&ups)[8][4]) {
  uint32_t most[8][2];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) gates[j][e] = SiluOf(gates[j][e], ups[j][e]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[j][r] = max(MagnitudeBits(gates[j][r]), MagnitudeBits(gates[j][2 + r]));
    }
  }
  // Lanes with the same lane % 4 have the same rows. Each step halves what they have of them; then lane i has the i-th two rows.
#pragma unroll
  for (int count = 4; count > 0; count /= 2) {
    const bool upper = (lane & (count * 4)) != 0;
#pragma unroll
    for (int j = 0; j < count; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t kept = upper ? most[count + j][r] : most[j][r];
        const uint32_t given = upper ? most[j][r] : most[count + j][r];
        most[j][r] = max(kept, __shfl_xor_sync(kFullMask, given, count * 4));
      }
    }
  }
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    StoreAt(SharedAddress(&maxima.of_warps[rank * 4 + warp][lane]),
            make_uint2(most[0][0], most[0][1]), barrier, block);
  }
  if (warp == 0 && lane == 0) ArriveExpecting(barrier, sizeof(RowMaxima));
  WaitForPhase(barrier, parity);
  uint2 largest = maxima.of_warps[0][lane];
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const uint2 other = maxima.of_warps[i][lane];
    largest = make_uint2(max(largest.x, other.x), max(largest.y, other.y));
  }
  const Rounding roundings[2] = {Rounding(largest.x), Rounding(largest.y)};
  const RoundedRows& to = operands.gated;
  const int32_t group = outputs / 2, m = operands.product.m;
  const int32_t my_row = first_row + lane * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (rank == 0 && warp == 0 && my_row + r < m) {
      to.Scale(my_row + r, group) = roundings[r].scale;
    }
  }
  uint8_t* const integers =
      FourOf(to, first_row + lane / 4, group, rank * 16 + warp * 4 + lane % 2 * 2 + lane % 4 / 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    // Integers of outputs lane / 4 and 8 more side by side, of two rows; exchanged, of row lane / 4 and two outputs.
    uint32_t word = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = __shfl_sync(kFullMask, roundings[r].inverse, j * 4 + lane % 4);
      const bool zero = __shfl_sync(kFullMask, roundings[r].zero, j * 4 + lane % 4);
      const Rounding rounding(inverse, zero);
      word |= (rounding.Of(gates[j][r]) | rounding.Of(gates[j][2 + r]) << 8) << (16 * r);
    }
    word = Transposed8x8(word);
    const uint32_t low = __byte_perm(word, 0, 0x4420), high = __byte_perm(word, 0, 0x4431);
    // Two lanes exchange halves: one has four of the first eight outputs, the other four of the last.
    const bool last = lane % 2 == 1;
    const uint32_t taken = __shfl_xor_sync(kFullMask, last ? low : high, 1);
    word = last ? __byte_perm(taken, high, 0x5410) : __byte_perm(low, taken, 0x5410);
    if (first_row + j * 8 + lane / 4 < m) {
      *reinterpret_cast<uint32_t*>(integers + j * 8 * kGroupValues) = word;
    }
  }
}
#endif

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    Int8GroupsKernel(const __grid_constant__ Int8Operands operands, const Raster raster) {
#ifdef WINNOW_WGMMA
  constexpr int kClusterBlocks = S::kClusterBlocks, kRowTiles = S::kRowTiles;
  const Operands& args = operands.product;
  const int32_t groups = operands.groups;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t filled[S::kStages], emptied[S::kStages];
  // Places of a gated product, two for each warpgroup: a warp may begin with the next tile's before others have read this one's.
  constexpr int kMaxima = S::kGated ? 2 : 0;
  __shared__ RowMaxima maxima[S::kMultipliers][std::max(kMaxima, 1)];
  __shared__ uint64_t largest_known[S::kMultipliers][std::max(kMaxima, 1)];
  const uint32_t stages_at = (SharedAddress(dynamic) + 1023) / 1024 * 1024;
  // A warp's number is the same in all its threads, which the compiler cannot know of threadIdx: addresses are computed once then.
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kLanes, 0);
  const int lane = threadIdx.x % kLanes;
  const auto rank = kClusterBlocks == 1 ? 0 : static_cast<int>(RankInCluster());
  if (threadIdx.x < S::kStages) {
    InitBarrier(SharedAddress(filled + threadIdx.x));
    InitBarrier(SharedAddress(emptied + threadIdx.x), kClusterBlocks * S::kWarps);
  }
  if (S::kGated && threadIdx.x < S::kMultipliers * kMaxima) {
    InitBarrier(SharedAddress(&largest_known[0][0] + threadIdx.x));
  }
  FenceBarriers();
  if constexpr (kClusterBlocks == 1) {
    __syncthreads();
  } else {
    SynchronizeCluster();
  }
  const auto first_tile = static_cast<int32_t>(blockIdx.x) / kClusterBlocks;
  const auto clusters = static_cast<int32_t>(gridDim.x) / kClusterBlocks;
  const int32_t row_tiles = S::kOfRows ? operands.of_rows.Count() : 1;
  const int32_t all_tiles =
      S::kOfRows ? raster.output_tiles * row_tiles : static_cast<int32_t>(raster.count());
  if (warp >= S::kWarps) {
    if constexpr (S::kMultiplyRegisters > 0) GiveUpRegisters<kFillRegisters>();
    // A stage's copies: those of W, then of this block's panels their integers, then their scales. A warp makes one of W, which need
    // not wait for the kernel before, or one or two of the others.
    constexpr int kCopies = S::kWCopies + 2 * S::kMyPanels;
    constexpr int kRowWarps = kFillWarps - S::kWCopies;
    static_assert(kRowWarps > 0);
    constexpr int kMost = (kCopies - S::kWCopies + kRowWarps - 1) / kRowWarps;  // of a warp
    const int filler = warp - S::kWarps;
    const int32_t last_panel = (args.m - 1) / kPanelRows, last_w = (args.out - 1) / kPanelRows;
    // A tile's rows of a panel. A batch is one tile, of which no more is copied than exists.
    const auto rows_of = [&](int panel) {
      return kClusterBlocks > 1 || S::kOfRows ? S::kPanelsRows
                                              : min(args.m - panel * kPanelRows, S::kPanelsRows);
    };
    uint32_t stage_bytes = S::kWCopiedBytes;
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      stage_bytes += rows_of(panel) * kGroupValues + (rows_of(panel) + 3) / 4 * 16;
    }
    // A batch is one tile of rows, which reads W once.
    const uint64_t policy = S::kMultipliers == 1 ? ReadOnce() : 0;
    const auto copy_w = [&](uint32_t to, const uint8_t* source, uint32_t bytes, uint32_t barrier) {
      if (S::kMultipliers == 1) {
        BulkCopy(to, source, bytes, barrier, policy);
      } else {
        BulkCopy(to, source, bytes, barrier);
      }
    };
    InTurn<S::kStages> stage;
    // Calls with the index of each of this warp's copies.
    const auto each = [&](const auto& call) {
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i > 0 && filler < S::kWCopies) break;
        if (const int copy = filler + i * kRowWarps; copy < kCopies) call(i, copy);
      }
    };
    // Begins of this warp's copies of a tile. In place of what does not exist the last that does is copied.
    const uint8_t* from[kMost];
    const auto begin = [&](int32_t tile) {
      int32_t first_row, outputs;
      PlaceTile<S>(raster, row_tiles, tile, rank, first_row, outputs);
      const uint8_t* w = operands.w;
      if constexpr (S::kOfRows) {
        w = static_cast<const uint8_t*>(operands.of_rows.W(first_row / S::kRows));
      }
      each([&](int i, int copy) {
        if (S::kOfRows && copy >= S::kWCopies) {
          const int panel = (copy - S::kWCopies) % S::kMyPanels;
          const int32_t in_panel = first_row % kPanelRows;
          from[i] = reinterpret_cast<const uint8_t*>(args.x) +
                    int64_t{first_row / kPanelRows + panel} * groups * kRoundedPanelBytes +
                    (copy >= S::kWCopies + S::kMyPanels ? kIntegerBytes + in_panel * 4
                                                        : in_panel * kGroupValues);
        } else if (copy >= S::kWCopies) {
          const int panel = rank * S::kMyPanels + (copy - S::kWCopies) % S::kMyPanels;
          from[i] = reinterpret_cast<const uint8_t*>(args.x) +
                    int64_t{min(first_row / kPanelRows + panel, last_panel)} * groups *
                        kRoundedPanelBytes +
                    (copy >= S::kWCopies + S::kMyPanels ? kIntegerBytes : 0);
        } else if (S::kGated) {
          from[i] =
              w + int64_t{outputs + copy * (args.out / 2 / kPanelRows)} * groups * S::kWSourceBytes;
        } else if (S::kWholePanels) {
          from[i] = w + int64_t{min(outputs * S::kMultipliers + copy, last_w)} * groups *
                            S::kWSourceBytes;
        } else {
          from[i] = w + int64_t{outputs / S::kPanelTiles} * groups * S::kWSourceBytes +
                    (copy == 0 ? 0 : kIntegerBytes) +
                    outputs % S::kPanelTiles * (copy == 0 ? S::kWCopyBytes : S::kWScaleBytes);
        }
      });
    };
    const auto copy_group = [&](int32_t group) {
      const uint32_t barrier = SharedAddress(filled + stage.index);
      const uint32_t to = stages_at + stage.index * S::kStageBytes;
      if (filler == 0) ArriveExpecting(barrier, stage_bytes);
      each([&](int i, int copy) {
        const uint8_t* const source =
            from[i] + int64_t{group} * (copy < S::kWCopies ? S::kWSourceBytes : kRoundedPanelBytes);
        if (copy < S::kWCopies) {
          if (S::kWholePanels) {
            copy_w(to + copy * S::kWPanelBytes, source, S::kWCopyBytes, barrier);
          } else {
            copy_w(to + (copy == 0 ? 0 : S::kWScalesAt), source,
                   copy == 0 ? S::kWCopyBytes : S::kWScaleBytes, barrier);
          }
          return;
        }
        const int panel = rank * S::kMyPanels + (copy - S::kWCopies) % S::kMyPanels;
        const bool scales = copy >= S::kWCopies + S::kMyPanels;
        const int32_t rows = rows_of(panel);
        const uint32_t bytes = scales ? (rows + 3) / 4 * 16 : rows * kGroupValues;
        const uint32_t place =
            scales ? S::kScalesAt + panel * S::kXScaleBytes : S::kWBytes + panel * S::kXBytes;
        if (kClusterBlocks == 1) {
          BulkCopy(to + place, source, bytes, barrier);
        } else {
          BulkCopyToAll(to + place, source, bytes, barrier, (1 << kClusterBlocks) - 1);
        }
      });
      stage.Next();
    };
    // W does not wait for the kernel before, as far as stages are free. All tiles have rows: the first has a group.
    const int32_t early = filler < S::kWCopies && !args.new_weights ? min(S::kStages, groups) : 0;
    if (filler < kCopies && first_tile < all_tiles && IsElected()) {
      begin(first_tile);
      for (int32_t group = 0; group < early; ++group) copy_group(group);
    }
    WaitForEarlier();
    LetNextStart();
    if (filler < kCopies && IsElected()) {
      for (int32_t tile = first_tile; tile < all_tiles; tile += clusters) {
        const bool is_first = tile == first_tile;
        if (!is_first) begin(tile);
        for (int32_t group = is_first ? early : 0; group < groups; ++group) {
          WaitForPhase(SharedAddress(emptied + stage.index), stage.parity ^ 1);
          copy_group(group);
        }
      }
    }
  } else {
    if constexpr (S::kMultiplyRegisters > 0) TakeRegisters<S::kMultiplyRegisters>();
    WaitForEarlier();
    LetNextStart();
    const uint32_t my_stages = __shfl_sync(kFullMask, stages_at, 0);  // as all in a warp have it
    const int my_group = warp / 4;
    const uint32_t my_w = my_stages + (S::kGated ? 0 : my_group * S::kWPanelBytes);
    const uint32_t my_x = my_stages + S::kWBytes + (S::kGated ? my_group * S::kXBytes : 0);
    const uint32_t my_scales = S::kScalesAt + (S::kGated ? my_group * S::kXScaleBytes : 0);
    // The halves of SharedMatrix() that are the same in all stages, and those that differ, of the first stage: 32 bits
    // are added faster than 64.
    constexpr uint64_t kHigh = 0xffffffff00000000;
    const uint64_t matrices = SharedMatrix(0, 1024) & kHigh;
    const auto my_w_matrix = static_cast<uint32_t>(SharedMatrix(my_w, 1024));
    const auto my_x_matrix = static_cast<uint32_t>(SharedMatrix(my_x, 1024));
    InTurn<S::kStages> started, stage;    // of the groups that are multiplied, and added
    [[maybe_unused]] InTurn<2> exchange;  // of largest magnitudes
    for (int32_t tile = first_tile; tile < all_tiles; tile += clusters) {
      int32_t first_row, outputs;
      PlaceTile<S>(raster, row_tiles, tile, rank, first_row, outputs);
      float sums[S::kParts][kRowTiles][4];
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) SetTile(sums[part], 0.0f);
      int32_t products[S::kSets][S::kParts][kRowTiles][4];  // sums of groups that are multiplied
      const auto start = [&]<int kSet>() {
        WaitForPhase(SharedAddress(filled + started.index), started.parity);
        const uint32_t at = started.index * (S::kStageBytes / 16);
        if constexpr (S::kBits == 4) {
          const uint32_t words_at = my_w + started.index * S::kStageBytes +
                                    warp * kFourBitTileBytes + FourBitWordAt(lane, 0);
          const uint4 words[2] = {LoadShared16(words_at),
                                  LoadShared16(words_at + FourBitWordAt(0, 4))};
          uint32_t a[kGroupSlices][4];
#pragma unroll
          for (int s = 0; s < kGroupSlices; ++s) {
            const uint4& of_slice = words[s / 2];
            FourBitFragments(s % 2 == 0 ? of_slice.x : of_slice.z,
                             s % 2 == 0 ? of_slice.y : of_slice.w, a[s]);
          }
          started.Next();
          FenceGroup();
#pragma unroll
          for (int s = 0; s < kGroupSlices; ++s) {
            GroupMultiplyAdd(products[kSet][0], a[s], matrices | (my_x_matrix + at + s * 2), s > 0);
          }
          CommitGroup();
          return;
        }
        started.Next();
        FenceGroup();
#pragma unroll
        for (int s = 0; s < kGroupSlices; ++s) {
#pragma unroll
          for (int part = 0; part < S::kParts; ++part) {
            GroupMultiplyAdd(products[kSet][part],
                             matrices | (my_w_matrix + at + part * (S::kWPanelBytes / 16) + s * 2),
                             matrices | (my_x_matrix + at + s * 2), s > 0);
          }
        }
        CommitGroup();
      };
      const auto finish = [&]<int kSet>() {
        const uint32_t of_stage = my_stages + stage.index * S::kStageBytes;
        const uint32_t of_rows = of_stage + my_scales + lane % 4 * 8;
        float2 scales[S::kParts];
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          scales[part] = LoadSharedPair(
              S::kBits == 4 ? my_w + stage.index * S::kStageBytes + warp * kFourBitTileBytes +
                                  kFourBitScalesAt + lane / 4 * static_cast<int>(sizeof(float2))
              : S::kWholePanels ? my_w + stage.index * S::kStageBytes + part * S::kWPanelBytes +
                                      kIntegerBytes + WScalesAt(warp % 4, lane / 4)
                                : of_stage + S::kWScalesAt + WScalesAt(warp, lane / 4));
        }
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
          const float2 row_scales = LoadSharedPair(of_rows + j * 32);
#pragma unroll
          for (int part = 0; part < S::kParts; ++part) {
            AddGroup(products[kSet][part][j], scales[part], row_scales, sums[part][j]);
          }
        }
        __syncwarp();  // all lanes have read the stage
        if constexpr (kClusterBlocks == 1) {
          if (lane == 0) Arrive(SharedAddress(emptied + stage.index));
        } else {
          if (lane < kClusterBlocks) ArriveAt(SharedAddress(emptied + stage.index), lane);
        }
        stage.Next();
      };
      const auto add_groups = [&]<int... i>(std::integer_sequence<int, i...>) {
        (start.template operator()<i>(), ...);
        ((WaitForGroups<S::kSets - 1 - i>(), finish.template operator()<i>()), ...);
      };
      int32_t group = 0;
      for (; group + S::kSets <= groups; group += S::kSets) {
        add_groups(std::make_integer_sequence<int, S::kSets>());
      }
      for (; group < groups; ++group) {
        start.template operator()<0>();
        WaitForGroups<0>();
        finish.template operator()<0>();
      }
      if constexpr (S::kGated) {
        const int32_t output = outputs * kPanelRows + warp % 4 * 16 + lane / 4;
        const int32_t up = args.out / 2 + output;
        AddBias(args, output, output + 8, sums[0]);
        AddBias(args, up, up + 8, sums[1]);
        WriteRounded(operands, outputs, rank, first_row + my_group * kPanelRows, warp % 4, lane,
                     maxima[my_group][exchange.index],
                     SharedAddress(&largest_known[my_group][exchange.index]), exchange.parity,
                     sums[0], sums[1]);
        exchange.Next();
      } else {
        // A tile of fewer than 64 outputs has none for its last warps: theirs count as outputs that W does not have.
        const bool has_outputs = warp * 16 < S::kOutputs;
        const int32_t output =
            has_outputs ? outputs * S::kOutputs + warp * 16 + lane / 4 : args.out;
        AddBias(args, output, output + 8, sums[0]);
        const int32_t row = first_row + lane % 4 * 2;
        if (has_outputs && (outputs + 1) * S::kOutputs <= args.out &&
            first_row + S::kRows <= args.m) {
          WriteTile<true>(args, output, row, sums[0]);
        } else {
          WriteTile<false>(args, output, row, sums[0]);
        }
      }
    }
  }
  if constexpr (kClusterBlocks > 1) SynchronizeCluster();  // others may still write here
#endif
}

template <typename S>
Raster RasterFor(const Int8Operands& operands) {
  return RasterOf(operands.product, S::kRows, S::kClusterBlocks * S::kOutputs, kBandRows);
}

template <typename S>
cudaError_t LaunchTiles(const Int8Operands& operands, const Stream& stream) {
  const Raster raster = RasterFor<S>(operands);
  const int64_t at_once = int64_t{CurrentDevice().multiprocessors} * S::kResident;
  return LaunchAs({.starts_early = true}, Int8GroupsKernel<S>,
                  dim3(static_cast<unsigned>(std::min(raster.count(), at_once))), S::kThreads,
                  S::kSharedBytes, stream, operands, raster);
}

template <int kTileRows, int kBits = 8>
cudaError_t LaunchBatch(const Int8Operands& operands, const Stream& stream) {
  if constexpr (kTileRows == 8 && kBits == 8) {
    using Narrow = Shape<1, kTileRows, kPanelRows / 2>;
    if (operands.product.m <= kNarrowRows &&
        RasterFor<Narrow>(operands).count() <= CurrentDevice().multiprocessors) {
      return LaunchTiles<Narrow>(operands, stream);
    }
  }
  return LaunchTiles<Shape<1, kTileRows, kPanelRows, false, false, kBits>>(operands, stream);
}

template <bool kGated>
using PromptShape = Shape<2, 2 * kPanelRows, kPanelRows, kGated>;

template <bool kGated>
cudaError_t LaunchPrompt(const Int8Operands& operands, const Stream& stream) {
  using S = PromptShape<kGated>;
  static_assert(S::kThreads == kGroupsThreads);
  thread_local ClustersAtOnce at_once;
  return LaunchRaster<S::kClusterBlocks>(Int8GroupsKernel<S>, S::kSharedBytes,
                                         RasterFor<S>(operands), at_once, stream, operands);
}

}  // namespace

bool HasInt8GroupMatmul() {
  thread_local CodeHere code;
  return code.Has(Int8GroupsKernel<PromptShape<true>>, PromptShape<true>::kSharedBytes);
}

cudaError_t MatmulInt8ByGroups(const Int8Operands& operands, Stream stream) {
  const int32_t m = operands.product.m;
  if (operands.integer_bits == 4) {
    static_assert(kFourBitRows == 64);
    if (m <= 8) return LaunchBatch<8, 4>(operands, stream);
    if (m <= 16) return LaunchBatch<16, 4>(operands, stream);
    return m <= 32 ? LaunchBatch<32, 4>(operands, stream) : LaunchBatch<64, 4>(operands, stream);
  }
  if (m <= 8) return LaunchBatch<8>(operands, stream);
  if (m <= 16) return LaunchBatch<16>(operands, stream);
  if (m <= 32) return LaunchBatch<32>(operands, stream);
  if (m <= 64) return LaunchBatch<64>(operands, stream);
  if (m <= kMatmulBatchRows) return LaunchBatch<128>(operands, stream);
  return operands.gated.panels == nullptr ? LaunchPrompt<false>(operands, stream)
                                          : LaunchPrompt<true>(operands, stream);
}

cudaError_t MatmulInt8OfTiles(const Int8Operands& operands, int32_t tile_rows, Stream stream) {
  const auto launch = [&]<int kRows, int kBits>() {
    return LaunchTiles<Shape<1, kRows, kPanelRows, /*kGates=*/false, /*kTilesOfRows=*/true, kBits>>(
        operands, stream);
  };
  if (operands.integer_bits == 4) {
    switch (tile_rows) {
      case kMatmulTileRows:
        return launch.template operator()<kMatmulTileRows, 4>();
      case kPanelRows:
        return launch.template operator()<kPanelRows, 4>();
      default:
        return cudaErrorInvalidValue;
    }
  }
  switch (tile_rows) {
    case kMatmulTileRows:
      return launch.template operator()<kMatmulTileRows, 8>();
    case kPanelRows:
      return launch.template operator()<kPanelRows, 8>();
    case 2 * kPanelRows:
      return launch.template operator()<2 * kPanelRows, 8>();
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace winnow::kernels::cuda

// Mapping, kInTurn on Hopper, of bfloat16 in blocks of whole units, for heads of 64 and 128 channels: the units and splits of
// dense_attention.cu's kernel and the same roundings, so the same bits.
//
// A block is two warpgroups of 64 rows each and a warp that copies, two units at a time (a pair) by a tensor map. With 128 keys to
// a matrix instruction a warpgroup waits half as often for what depends on one another as with a unit, and has more powers to
// make at once. Its scores take the registers of the sums of the splits before, which therefore lie in shared memory.
//
// A warpgroup's turn with a pair, whose units are a and b:
//
//   values of a             added to the sums
//   scores of the next pair
//   values of b             between them and a's the sums are multiplied, if b's weights are relative to more than a's
//
// and while the other has its turn, weights of the next pair. Without turns, which named barriers give, both weigh at once and
// then wait for the matrix units at once.
//
// H200, d 128, G 4, TFLOP/s in four calls from rest, 2048 queries before 8192, 32768 and 131072, and all of 8192:
//
//   this kernel                                        504   576   611   507
//   a unit at a time (dense_attention_wgmma.cu)        457   502   525   469
//
// Prompts, for which power lets the device run at 1.75 GHz in place of 1.97: 480 and 432 at 32768. By the clock a pair takes 3030
// cycles, of which its matrix instructions need 2048, a split's end 820, and a block's beginning and end 17,000. Weights take
// 1300 to 1400, whatever else runs: 64 powers a thread of 8.3 each, and the largest scores and sums before and after.
//
// Lost (131072, where the same in other files reached 609 to 622):
//   three warpgroups of 64 rows, a unit at a time, sums of splits before in shared memory                    540
//   two of them, a unit at a time, the same                                                                 519
//   values of b and then the next scores, so that nothing is on its way while weights are made               589
//   scores unit by unit, those of a weighed while those of b are made: 607; 570 where the compiler is made to keep that order,
//     since a warp that asks for matrix instructions waits until all but the last few have begun
//   turns from the scores on                                                                                 610
//   no turns                                                                                                 597
//   queries from registers                                                                                   611
//   a split's end while the next scores are made                                                             560
//   three stages of keys                                                                                     571 (573 with two)
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/dense_attention_parts.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace winnow::kernels::cuda::dense {
namespace {

[[maybe_unused]] constexpr int kPairTokens = 2 * kDenseUnitTokens;
constexpr int kStages = 2;  // pairs of keys, and of values
[[maybe_unused]] constexpr int kPairTiles = 2 * kUnitTiles;

// Shared memory: [kGroups] queries, [kStages] pairs of keys, of values, [kGroups] sums of splits.
template <int kHeadDim>
struct Layout {
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr uint32_t kUnitBytes = kPanels * kPanelBytes;  // or a group's queries
  static constexpr uint32_t kPairBytes = 2 * kUnitBytes;
  static constexpr uint32_t kKeys = kGroups * kUnitBytes;
  static constexpr uint32_t kValues = kKeys + kStages * kPairBytes;
  static constexpr uint32_t kSums = kValues + kStages * kPairBytes;
  static constexpr uint32_t kGroupSums = kGroupRows * kHeadDim * sizeof(float);
  static constexpr size_t kBytes = 1024 + kSums + kGroups * kGroupSums;
};

#ifdef WINNOW_WGMMA

// A barrier for each stage, for four purposes.
struct Barriers {
  uint32_t at;
  __device__ uint32_t KeysFilled(int32_t pair) const { return at + pair % kStages * 8; }
  __device__ uint32_t KeysEmptied(int32_t pair) const { return KeysFilled(pair) + kStages * 8; }
  __device__ uint32_t ValuesFilled(int32_t pair) const { return KeysFilled(pair) + kStages * 16; }
  __device__ uint32_t ValuesEmptied(int32_t pair) const { return KeysFilled(pair) + kStages * 24; }
  __device__ static uint32_t Parity(int32_t pair) { return pair / kStages % 2; }
};

// The warp that copies.
template <int kHeadDim>
class Copies {
 public:
  using L = Layout<kHeadDim>;
  __device__ Copies(const Args& args, const CUtensorMap& map, const int32_t* table, int32_t kv_head,
                    int32_t visible, uint32_t shared, Barriers barriers, uint32_t last)
      : args_(args),
        map_(map),
        table_(table),
        head_row_(static_cast<int32_t>(kv_head * args.head_bytes / (4 * kHeadDim))),
        block_rows_(static_cast<int32_t>(args.block_bytes / (4 * kHeadDim))),
        visible_(visible),
        units_(DenseUnits(visible)),
        shared_(shared),
        last_(last),
        barriers_(barriers) {}

  // Halves of a pair's keys lie panel by panel, so that a matrix instruction finds 128 keys in a panel.
  __device__ void PutKeys(int32_t pair) const {
    WaitForPhase(barriers_.KeysEmptied(pair), Barriers::Parity(pair) ^ 1);
    Start(pair, shared_ + L::kKeys + pair % kStages * L::kPairBytes, 0, kPanelBytes,
          2 * kPanelBytes, barriers_.KeysFilled(pair));
  }
  __device__ void PutValues(int32_t pair) const {
    const uint32_t to = shared_ + L::kValues + pair % kStages * L::kPairBytes;
    const uint32_t filled = barriers_.ValuesFilled(pair);
    WaitForPhase(barriers_.ValuesEmptied(pair), Barriers::Parity(pair) ^ 1);
    const int32_t seen = visible_ - (units_ - 1) * kDenseUnitTokens;
    if ((pair + 1) * 2 < units_ || seen == kDenseUnitTokens) {
      return Start(pair, to, kHeadDim, L::kUnitBytes, kPanelBytes, filled);
    }
    // Values of tokens from `visible` on may be anything, and weights of zero take them too.
    Start(pair, to, kHeadDim, L::kUnitBytes, kPanelBytes, last_);
    WaitForPhase(last_, 0);
    const uint32_t unit = to + (units_ - 1) % 2 * L::kUnitBytes;
    for (int32_t i = threadIdx.x; i < (kDenseUnitTokens - seen) * 8; i += kLanes) {
#pragma unroll
      for (int panel = 0; panel < L::kPanels; ++panel) {
        ClearShared16(unit + panel * kPanelBytes + seen * kTensorTileRowBytes + i * 16);
      }
    }
    FenceSharedWrites();
    __syncwarp();
    if (threadIdx.x == 0) Arrive(filled);
  }

 private:
  // Channels `channel` on of the units that there are of a pair.
  __device__ void Start(int32_t pair, uint32_t to, int32_t channel, uint32_t unit_step,
                        uint32_t panel_step, uint32_t barrier) const {
    if (threadIdx.x != 0) return;
    const int32_t first = 2 * pair, count = min(units_ - first, 2);
    ArriveExpecting(barrier, count * L::kUnitBytes);
    for (int32_t unit = first; unit < first + count; ++unit) {
      const TokenPlace place = PlaceOfToken(args_, table_, unit * kDenseUnitTokens);
      const int32_t row = place.block * block_rows_ + head_row_ + place.row;
#pragma unroll
      for (int panel = 0; panel < L::kPanels; ++panel) {
        BulkCopyTile(to + (unit - first) * unit_step + panel * panel_step, &map_,
                     channel + panel * 64, row, barrier);
      }
    }
  }

  const Args& args_;
  const CUtensorMap& map_;
  const int32_t* table_;
  int32_t head_row_, block_rows_, visible_, units_;
  uint32_t shared_, last_;
  Barriers barriers_;
};

// Warpgroups take turns to multiply: who takes a turn waits until the other has passed it. Each takes as many and passes each on;
// group 1 also passes the first, which nobody had, so that its last stays untaken.
__device__ __forceinline__ void TakeTurn(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroups * kGroupThreads) : "memory");
}
__device__ __forceinline__ void PassTurn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(2 - group), "n"(kGroups * kGroupThreads) : "memory");
}
// Threads of a group meet.
__device__ __forceinline__ void MeetGroup(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(kGroupThreads) : "memory");
}

// Factors of the sums so far, of rows lane / 4 and 8 more, before those of a unit are added.
struct Keeps {
  float a[2], b[2];
};

// Scores of a pair become weights, not rounded yet; sums.sum waits for RoundPair().
template <bool kHidden>
__device__ __forceinline__ void WeighPair(float (&scores)[2 * kPairTiles][4], int32_t first_token,
                                          const int32_t (&sees)[2], RowSums& sums, Keeps& keeps) {
  if constexpr (kHidden) HideScores(scores, first_token, sees);
  float top[2][2];  // [units][rows]
#pragma unroll
  for (int unit = 0; unit < 2; ++unit) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& first = scores[unit * kPairTiles + i];
        const auto& second = scores[unit * kPairTiles + i + 4];
        four[i] =
            fmaxf(fmaxf(first[2 * r], first[2 * r + 1]), fmaxf(second[2 * r], second[2 * r + 1]));
      }
      top[unit][r] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
    }
  }
#pragma unroll
  for (int apart = 1; apart <= 2; ++apart) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i / 2][i % 2] =
          fmaxf(top[i / 2][i % 2], __shfl_xor_sync(kFullMask, top[i / 2][i % 2], apart));
    }
  }
  float base[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    base[0][r] = BaseOf(top[0][r], sums.max[r], keeps.a[r]);
    base[1][r] = BaseOf(top[1][r], sums.max[r], keeps.b[r]);
  }
#pragma unroll
  for (int n = 0; n < 2 * kPairTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = PowerOfTwo(__fsub_rn(scores[n][e], base[n / kPairTiles][e / 2]));
    }
  }
}

__device__ __forceinline__ void RoundPair(const float (&scores)[2 * kPairTiles][4],
                                          const Keeps& keeps, RowSums& sums,
                                          uint32_t (&weights)[kPairTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kPairTiles; ++tile) {
    if (tile % kUnitTiles == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums.sum[r] = __fmul_rn(sums.sum[r], tile == 0 ? keeps.a[r] : keeps.b[r]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // (row, tokens), (row + 8, tokens), and eight tokens on
      const int n = 2 * tile + i / 2, r = i % 2;
      weights[tile][i] = AddWeights(scores[n][2 * r], scores[n][2 * r + 1], sums.sum[r]);
    }
  }
}

// AddSplit() with the sums of the splits before in shared memory, 16 bytes of a thread at `at` and every `kGroupThreads` * 16
// after, zeros at first. kLast: they become `o`.
template <int kHeadDim, bool kLast>
__device__ __forceinline__ void AddSplitToShared(RowSums sums, float (&o)[kHeadDim / 8][4],
                                                 RowSums& totals, uint32_t at) {
  sums.Join();
  Shares shares[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) shares[r] = ShareOut(totals.max[r], totals.sum[r], sums.max[r]);
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    float total[4];
    LoadShared(at + n * kGroupThreads * 16, total);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (sums.sum[e / 2] != 0.0f) total[e] = Mix(total[e], o[n][e], shares[e / 2]);
      if constexpr (kLast) o[n][e] = total[e];
    }
    if constexpr (!kLast) StoreShared(at + n * kGroupThreads * 16, total);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (sums.sum[r] == 0.0f) continue;
    totals.sum[r] = Mix(totals.sum[r], sums.sum[r], shares[r]);
    totals.max[r] = shares[r].max;
  }
}

#endif

template <int kHeadDim>
__global__ void __launch_bounds__(kBlockThreads, 1)
    PairsKernel(const __grid_constant__ Args args, const __grid_constant__ CUtensorMap map) {
#ifdef WINNOW_WGMMA
  using L = Layout<kHeadDim>;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t barrier_words[4 * kStages + 1];
  const uint32_t shared = (SharedAddress(dynamic) + 1023) / 1024 * 1024;
  const Barriers barriers{SharedAddress(barrier_words)};
  const uint32_t last = SharedAddress(barrier_words + 4 * kStages);
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const auto tile = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x);  // those with most keys first
  const DeviceChunk chunk = args.chunks[blockIdx.z];
  const int32_t num_rows = chunk.num_tokens * args.group.divisor();
  const int32_t first_row = tile * kBlockRows;
  if (first_row >= num_rows) return;
  const int32_t last_row = min(first_row + kBlockRows, num_rows) - 1;
  const int32_t visible = chunk.position + args.group.Divide(last_row) + 1;
  const int32_t units = DenseUnits(visible), pairs = (units + 1) / 2;
  if (threadIdx.x == 0) {
    for (int32_t stage = 0; stage < kStages; ++stage) {
      InitBarrier(barriers.KeysFilled(stage));
      InitBarrier(barriers.ValuesFilled(stage));
      InitBarrier(barriers.KeysEmptied(stage), kGroups * kGroupWarps);
      InitBarrier(barriers.ValuesEmptied(stage), kGroups * kGroupWarps);
    }
    InitBarrier(last);
    FenceBarriers();
  }
  __syncthreads();
  if (warp < kGroupWarps) {
    GiveUpRegisters<24>();
    if (warp > 0) return;
    const Copies<kHeadDim> copies(args, map, chunk.block_table, kv_head, visible, shared, barriers,
                                  last);
    copies.PutKeys(0);
    for (int32_t pair = 0; pair < pairs; ++pair) {
      if (pair + 1 < pairs) copies.PutKeys(pair + 1);
      copies.PutValues(pair);
    }
    return;
  }
  TakeRegisters<240>();
  const int group = warp / kGroupWarps - 1;
  const int32_t group_row = first_row + group * kGroupRows;
  const int32_t warp_row = warp % kGroupWarps * kWarpRows;  // of the group's
  const uint32_t my_queries = shared + group * L::kUnitBytes;
  const uint32_t my_sums =
      shared + L::kSums + group * L::kGroupSums + threadIdx.x % kGroupThreads * 16;
  int32_t sees[2];
  {
    int64_t at[2];
    uint32_t q[kHeadDim / 16][4];
    LoadRows<kHeadDim>(args, chunk, kv_head, group_row + warp_row, sees, at, q);
    StoreRows<kHeadDim>(q, my_queries, warp_row);
    FenceSharedWrites();
    MeetGroup(group);
  }
  constexpr float kNothing[4] = {};
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) StoreShared(my_sums + n * kGroupThreads * 16, kNothing);

  float scores[2 * kPairTiles][4], o[kHeadDim / 8][4];
  uint32_t weights[kPairTiles][4];
  RowSums sums, totals;  // of the split, and of those before it
  Keeps keeps;
  // A warp's threads have the same address, which the compiler cannot know.
  const uint64_t of_queries = SharedMatrix(__shfl_sync(kFullMask, my_queries, 0), 1024);
  const uint64_t of_keys = SharedMatrix(shared + L::kKeys, 1024);
  const uint64_t of_values = SharedMatrix(shared + L::kValues, 1024, kPanelBytes);
  const auto start_scores = [&](int32_t pair) {
    WaitForPhase(barriers.KeysFilled(pair), Barriers::Parity(pair));
    const uint64_t keys = Further(of_keys, pair % kStages * L::kPairBytes);
    FenceGroup();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      GroupMultiplyAdd(scores, Further(of_queries, step / 4 * kPanelBytes + step % 4 * 32),
                       Further(keys, step / 4 * (2 * kPanelBytes) + step % 4 * 32), step > 0);
    }
    CommitGroup();
  };
  const auto start_values = [&](int32_t pair, int unit, bool begins) {
    const uint64_t values =
        Further(of_values, pair % kStages * L::kPairBytes + unit * L::kUnitBytes);
    FenceGroup();
#pragma unroll
    for (int t = 0; t < kUnitTiles; ++t) {
      GroupMultiplyAdd<true>(o, weights[unit * kUnitTiles + t],
                             Further(values, t * 16 * kTensorTileRowBytes), t > 0 || !begins);
    }
    CommitGroup();
  };
  // Copies may take the place: this warp has read it.
  const auto release = [&](uint32_t emptied) {
    if (lane == 0) Arrive(emptied);
  };
  if (group == 1) PassTurn(group);
  TakeTurn(group);
  start_scores(0);
  PassTurn(group);
  WaitForGroups<0>();
  release(barriers.KeysEmptied(0));
  WeighPair<true>(scores, 0, sees, sums, keeps);
  RoundPair(scores, keeps, sums, weights);
  // `pair`, whose weights are there, and the weights of the next.
  const auto step = [&]<bool kHidden>(int32_t pair) {
    const bool begins = BeginsDenseSplit(2 * pair), next_begins = BeginsDenseSplit(2 * pair + 2);
    if (!begins) Rescale(o, keeps.a);
    WaitForPhase(barriers.ValuesFilled(pair), Barriers::Parity(pair));
    TakeTurn(group);
    start_values(pair, 0, begins);
    start_scores(pair + 1);
    WaitForGroups<1>();
    Rescale(o, keeps.b);
    start_values(pair, 1, false);
    PassTurn(group);
    WaitForGroups<1>();
    release(barriers.KeysEmptied(pair + 1));
    const RowSums ended = sums;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums.max[r] = next_begins ? -INFINITY : sums.max[r];
      sums.sum[r] = next_begins ? 0.0f : sums.sum[r];
    }
    WeighPair<kHidden>(scores, (pair + 1) * kPairTokens, sees, sums, keeps);
    // An instruction that is on its way must not find its operands overwritten.
    WaitForGroups<0>();
    release(barriers.ValuesEmptied(pair));
    RoundPair(scores, keeps, sums, weights);
    if (next_begins) AddSplitToShared<kHeadDim, false>(ended, o, totals, my_sums);
  };
  // Pairs of which the group's first row, and so each, sees all.
  const int32_t whole = (chunk.position + args.group.Divide(group_row) + 1) / kPairTokens;
  int32_t pair = 0;
  for (; pair + 1 < min(whole, pairs); ++pair) step.template operator()<false>(pair);
  for (; pair + 1 < pairs; ++pair) step.template operator()<true>(pair);
  {
    const bool begins = BeginsDenseSplit(2 * pair);
    if (!begins) Rescale(o, keeps.a);
    WaitForPhase(barriers.ValuesFilled(pair), Barriers::Parity(pair));
    start_values(pair, 0, begins);
    WaitForGroups<0>();
    if (2 * pair + 1 < units) {
      Rescale(o, keeps.b);
      start_values(pair, 1, false);
      WaitForGroups<0>();
    }
  }
  AddSplitToShared<kHeadDim, true>(sums, o, totals, my_sums);
  AddSinks(args, chunk, kv_head, group_row + warp_row, totals);
  int64_t at[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowPlace place =
        PlaceOfRow<kHeadDim>(args, chunk, kv_head, group_row + warp_row + lane / 4 + 8 * r);
    at[r] = place.token_row * args.out_stride + place.channel;
  }
  WriteRows<kHeadDim>(args, sees, at, totals, o);
#endif
}

template <int kHeadDim>
cudaError_t LaunchOf(const DenseAttentionShape& shape, const Args& args, const CUtensorMap& map,
                     Stream stream) {
  const dim3 grid(
      static_cast<unsigned>(CeilDiv(int64_t{shape.max_chunk_tokens} * shape.group, kBlockRows)),
      shape.layout.kv_heads, shape.num_chunks);
  return LaunchBehind(PairsKernel<kHeadDim>, grid, kBlockThreads, Layout<kHeadDim>::kBytes, stream,
                      args, map);
}

}  // namespace

bool HasPairAttention(int32_t head_dim) {
  if (head_dim != 64 && head_dim != 128) return false;
  thread_local CodeHere code;
  return code.Has(PairsKernel<128>, Layout<128>::kBytes);  // which takes the most
}

cudaError_t AttendInTurnByPairs(const DenseAttentionShape& shape, const Args& args,
                                const CUtensorMap& map, Stream stream) {
  return shape.layout.head_dim == 64 ? LaunchOf<64>(shape, args, map, stream)
                                     : LaunchOf<128>(shape, args, map, stream);
}

}  // namespace winnow::kernels::cuda::dense

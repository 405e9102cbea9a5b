// Selection by estimated mass in passes, for rows of any number and length (transform_select.cu says when). No block waits
// for another, so that each multiprocessor has blocks in all states of the work.
//
// Pieces is the first half of the launch whose blocks meet (transform_select_fused.cuh): as many blocks as run at once have
// the chunks of all rows in turn. It leaves steps and cells in the workspace, 2 bytes a token and head and 1 a token, which
// cost less than dots that are made again: until 2026-11-29 exponentials needed more than 2 bytes of a dot, and the second
// pass made it from the codes. Masses makes keys of steps, a thread for two tokens at a time. Count and Compact: a block of
// 256 threads a chunk of 4096 tokens, a thread 16 neighbours, so that what it reads is asked for at once. Compact has the
// tail, too, of the tokens that it does not choose.
//
// The last block of a row to finish does what needs the whole row (a ticket, as in hamming_select.cu): no launch of its
// own.
#ifndef WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PASSES_CUH_
#define WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PASSES_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transform_select_fused.cuh"
#include "kernels/cuda/transform_select_parts.cuh"

namespace winnow::kernels::cuda::masses {

constexpr int kTokens = 16;  // of a thread
constexpr int32_t kChunkTokens = kThreads * kTokens;
constexpr int kPassBlocks = 3;  // of a multiprocessor
// Tiles of a warp: half as many as in a block of the one launch, so that more blocks have room.
template <int kGroup>
constexpr int kPieceTiles = kGroup <= 4 ? 16 : 128 / kGroup;

// ---- pieces, masses ----

template <int kSlots, int kGroup>
__global__ void __launch_bounds__(kThreads, kGroup <= 4 ? kPassBlocks : 2)
    PiecesKernel(const __grid_constant__ Args args) {
  using Blocks = Fused<kSlots, kGroup, kPieceTiles<kGroup>, /*kAll=*/false>;
  __shared__ typename Blocks::Shared shared;
  LetNextStart();
  Blocks(args, shared).RunPieces();
}

// Steps of a thread's two tokens side by side.
template <int kGroup>
struct TwoTokens {
  static constexpr int kWords = kGroup / 2;  // of a token
  __device__ __forceinline__ void Load(const uint32_t* from) {
    if constexpr (kGroup == 2) {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      words[0][0] = both.x;
      words[1][0] = both.y;
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kWords; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + i);
        const uint32_t all[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) words[(i + w) / kWords][(i + w) % kWords] = all[w];
      }
    }
  }
  uint32_t words[2][kWords];
};
// Weighs the steps of a row.
template <int kGroup>
struct RowHeads {
  __device__ __forceinline__ RowHeads(const Args& args, int32_t row) {
    const PreparedQuery* prepared = args.prepared + int64_t{row} * args.group;
    int32_t references[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const bool has = g < args.group;
      references[g] = has ? prepared[g].reference : 0;
      inverses[g] = has ? prepared[g].inverse : 0;
    }
#pragma unroll
    for (int w = 0; w < kGroup / 2; ++w)
      ups[w] = PowersUp(references[2 * w], references[2 * w + 1]);
  }
  uint32_t ups[kGroup / 2];
  float inverses[kGroup];
};

// Keys go to the workspace, and are counted by their upper 9 bits. The row's last block finds the cut's bin.
template <int kGroup>
__global__ void __launch_bounds__(kThreads) MassesKernel(const __grid_constant__ Args args) {
  using Two = TwoTokens<kGroup>;
  constexpr int32_t kStride = 2 * kThreads;
  constexpr int kTwos = kChunkTokens / kStride;  // of a thread
  constexpr int kAhead = kGroup <= 4 ? 4 : 2;    // asked for at once
  __shared__ uint32_t counts[kCoarseBins];
  __shared__ uint32_t warp_sums[kWarps];
  __shared__ uint32_t is_last;
  __shared__ uint2 found;
  LetNextStart();
  const auto row = static_cast<int32_t>(blockIdx.y);
  const DeviceQuery query = args.queries[row / args.kv_heads];
  const int32_t base = BaseOf(query);
  const int32_t begin = base + static_cast<int32_t>(blockIdx.x) * kChunkTokens;
  for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) counts[bin] = 0;
  WaitForEarlier();
  if (begin >= query.mid.last || query.mid.first >= query.mid.last) return;
  const RowHeads<kGroup> heads(args, row);
  __syncthreads();
  // Rows have room for whole chunks.
  const int64_t at = row * args.row_tokens + (begin - base) + 2 * static_cast<int32_t>(threadIdx.x);
#pragma unroll 1
  for (int first = 0; first < kTwos; first += kAhead) {
    Two twos[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      twos[i].Load(args.steps + (at + (first + i) * kStride) * Two::kWords);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      uint32_t keys[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float mass = 0;
#pragma unroll
        for (int w = 0; w < Two::kWords; ++w) {
          const uint32_t powers = PowersOf(twos[i].words[h][w], heads.ups[w]);
          mass = __fmaf_rn(LowPower(powers), heads.inverses[2 * w], mass);
          mass = __fmaf_rn(HighPower(powers), heads.inverses[2 * w + 1], mass);
        }
        keys[h] = MassKeyOf(mass);
        const int32_t token =
            begin + (first + i) * kStride + 2 * static_cast<int32_t>(threadIdx.x) + h;
        if (IsInside(query, token)) atomicAdd(&counts[keys[h] >> kFineBits], 1u);
      }
      *reinterpret_cast<uint32_t*>(&args.keys[at + (first + i) * kStride]) = keys[0] | keys[1]
                                                                                           << 16;
    }
  }
  __syncthreads();
  uint32_t* coarse = args.coarse + int64_t{row} * kCoarseBins;
  for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) {
    if (counts[bin] != 0) atomicAdd(&coarse[bin], counts[bin]);
  }
  const auto blocks =
      static_cast<uint32_t>((query.mid.last - base + kChunkTokens - 1) / kChunkTokens);
  if (!IsLast(&args.tickets[4 * row + 1], blocks, &is_last)) return;
  for (int32_t bin = threadIdx.x; bin < kCoarseBins; bin += kThreads) {
    counts[bin] = __ldcg(&coarse[bin]);
    coarse[bin] = 0;
  }
  __syncthreads();
  uint2 cut = make_uint2(kNoBin, 0);
  const uint32_t selected = SelectedOf(query, counts, warp_sums);
  if (selected > 0) cut = FindFromTop<kCoarseBins>(counts, selected, warp_sums, &found);
  if (threadIdx.x != 0) return;
  args.cuts[row].coarse = cut.x;
  args.cuts[row].above = cut.y;
  args.chosen_counts[row] = static_cast<int32_t>(selected);
}

// ---- the cut ----

__device__ __forceinline__ uint32_t ChunksOf(const DeviceQuery& query) {
  return static_cast<uint32_t>((query.mid.last - BaseOf(query) + kChunkTokens - 1) / kChunkTokens);
}

// The beginning of Count and Compact: whether the block has tokens, and which are its thread's.
struct Chunk {
  DeviceQuery query;
  int32_t row, base, begin, mine;  // `mine`: the thread's first token
  bool has_tokens, whole;          // `whole`: all of them lie in mid
};
__device__ __forceinline__ Chunk ChunkOf(const Args& args) {
  Chunk chunk;
  chunk.row = blockIdx.y;
  chunk.query = args.queries[chunk.row / args.kv_heads];
  chunk.base = BaseOf(chunk.query);
  const int32_t begin = chunk.base + static_cast<int32_t>(blockIdx.x) * kChunkTokens;
  chunk.begin = begin;
  chunk.mine = begin + static_cast<int32_t>(threadIdx.x) * kTokens;
  chunk.whole = begin >= chunk.query.mid.first && begin + kChunkTokens <= chunk.query.mid.last;
  chunk.has_tokens = begin < chunk.query.mid.last && chunk.query.mid.first < chunk.query.mid.last;
  return chunk;
}

// The keys of a thread's tokens.
struct Keys {
  __device__ __forceinline__ Keys(const Args& args, const Chunk& chunk) {
    const auto* from = reinterpret_cast<const uint4*>(
        &args.keys[chunk.row * args.row_tokens + (chunk.mine - chunk.base)]);
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) eight[i] = from[i];
  }
  __device__ __forceinline__ uint32_t Of(int i) const {
    const uint4& four_words = eight[i / 8];
    const uint32_t words[4] = {four_words.x, four_words.y, four_words.z, four_words.w};
    return words[i % 8 / 2] >> i % 2 * 16 & 0xffffu;
  }
  uint4 eight[kTokens / 8];
};

__global__ void __launch_bounds__(kThreads) CountKernel(const __grid_constant__ Args args) {
  __shared__ uint32_t counts[kFineBins];  // in the cut's bin
  __shared__ uint32_t above_shared;
  __shared__ uint32_t warp_sums[kWarps];
  __shared__ uint32_t is_last;
  __shared__ uint2 found;
  LetNextStart();
  WaitForEarlier();
  const Chunk chunk = ChunkOf(args);
  if (!chunk.has_tokens) return;
  const DeviceQuery& query = chunk.query;
  const int32_t row = chunk.row;
  if (threadIdx.x < kFineBins) counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) above_shared = 0;
  __syncthreads();
  const uint32_t coarse = args.cuts[row].coarse;
  const Keys keys(args, chunk);
  uint32_t above = 0;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const uint32_t key = keys.Of(i);
    if (!chunk.whole && !IsInside(query, chunk.mine + i)) continue;
    above += key >> kFineBits > coarse ? 1 : 0;
    if (key >> kFineBits == coarse) atomicAdd(&counts[key & (kFineBins - 1)], 1u);
  }
  above = __reduce_add_sync(kFullMask, above);
  if (threadIdx.x % 32 == 0 && above != 0) atomicAdd(&above_shared, above);
  __syncthreads();
  uint32_t* of_row = args.counts + int64_t{row} * args.chunks * kFineBins;
  const bool has_bin = threadIdx.x < kFineBins;
  const int32_t bin = kFineBins - 1 - static_cast<int32_t>(threadIdx.x);  // from the top
  const uint32_t count = has_bin ? counts[bin] : 0;
  uint32_t total;
  const uint32_t higher = BlockExclusiveScan<kWarps>(count, warp_sums, &total);
  if (has_bin) {
    of_row[int64_t{blockIdx.x} * kFineBins + bin] = (above_shared + higher) << 16 | count;
    if (count != 0) atomicAdd(&args.fine[row * kFineBins + bin], count);
  }
  const uint32_t chunks = ChunksOf(query);
  if (!IsLast(&args.tickets[4 * row + 2], chunks, &is_last)) return;
  if (has_bin) {
    counts[bin] = __ldcg(&args.fine[row * kFineBins + bin]);
    args.fine[row * kFineBins + bin] = 0;
  }
  __syncthreads();
  const auto k = static_cast<uint32_t>(__ldcg(&args.chosen_counts[row]));
  uint32_t threshold = kMassKeyBins, skip = 0, least = 0;
  if (k > 0) {
    const uint32_t left = k - args.cuts[row].above;  // of the cut's bin
    const uint2 cut = FindFromTop<kFineBins>(counts, left, warp_sums, &found);
    least = cut.x;
    threshold = coarse << kFineBits | least;
    skip = counts[least] - (left - cut.y);
  }
  // Where each chunk's selected tokens go: 256 chunks at a time.
  uint32_t higher_before = 0, ties_before = 0;
  for (uint32_t first = 0; first < chunks; first += kThreads) {
    const uint32_t other = first + threadIdx.x;
    const uint32_t record =
        other < chunks && k > 0 ? __ldcg(&of_row[int64_t{other} * kFineBins + least]) : 0;
    uint32_t all_higher, all_ties;
    const uint32_t higher_here =
        higher_before + BlockExclusiveScan<kWarps>(record >> 16, warp_sums, &all_higher);
    const uint32_t ties_here =
        ties_before + BlockExclusiveScan<kWarps>(record & 0xffffu, warp_sums, &all_ties);
    if (other < chunks) {
      uint32_t* to = &args.places[(int64_t{row} * args.chunks + other) * 2];
      to[0] = higher_here;
      to[1] = ties_here;
    }
    higher_before += all_higher;
    ties_before += all_ties;
  }
  if (threadIdx.x == 0) {
    args.cuts[row].threshold = threshold;
    args.cuts[row].skip = skip;
  }
}

// Adds the masses of the block's tokens of `is_left` (a bit for each of a thread's 16 neighbours) to their cells.
template <int kGroup>
__device__ __forceinline__ void AddTail(const Args& args, const Chunk& chunk,
                                        const uint16_t* is_left,
                                        uint32_t (*masses)[2][kTransformCells]) {
  using Two = TwoTokens<kGroup>;
  constexpr int32_t kStride = 2 * kThreads;
  constexpr int kTwos = kChunkTokens / kStride;
  constexpr int kAhead = kGroup <= 4 ? 4 : 2;
  const RowHeads<kGroup> heads(args, chunk.row);
  const int32_t place = 2 * static_cast<int32_t>(threadIdx.x);
  const int64_t at = chunk.row * args.row_tokens + (chunk.begin - chunk.base) + place;
#pragma unroll 1
  for (int first = 0; first < kTwos; first += kAhead) {
    Two twos[kAhead];
    uint32_t cells[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t from = at + (first + i) * kStride;
      twos[i].Load(args.steps + from * Two::kWords);
      cells[i] = *reinterpret_cast<const uint16_t*>(&args.cells[from]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t of_block = (first + i) * kStride + place;
      const uint32_t left = is_left[of_block / kTokens] >> of_block % kTokens;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale = (left >> h & 1) != 0 ? 0x1p30f : 0.0f;
        const uint32_t cell = cells[i] >> 8 * h & 0xffu;
#pragma unroll
        for (int w = 0; w < Two::kWords; ++w) {
          const uint32_t powers = PowersOf(twos[i].words[h][w], heads.ups[w]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int g = 2 * w + j;
            if (g >= args.group) break;
            const uint32_t mass =
                __float2uint_rz(__fmul_rn(j == 0 ? LowPower(powers) : HighPower(powers), scale));
            AddUnlessZero(&masses[g][0][cell], mass & 0x7fffu);
            AddUnlessZero(&masses[g][1][cell], mass >> 15);
          }
        }
      }
    }
  }
  __syncthreads();
  auto* to = reinterpret_cast<unsigned long long*>(args.tail_masses) +
             int64_t{chunk.row} * args.group * kTransformCells;
  for (int32_t i = threadIdx.x; i < args.group * kTransformCells; i += kThreads) {
    const int32_t g = i / kTransformCells, cell = i % kTransformCells;
    const unsigned long long mass =
        masses[g][0][cell] + (static_cast<unsigned long long>(masses[g][1][cell]) << 15);
    if (mass != 0) atomicAdd(&to[i], mass);
  }
}

// kGroup 0: no tail.
template <int kGroup>
__global__ void __launch_bounds__(kThreads) CompactKernel(const __grid_constant__ Args args) {
  constexpr bool kTail = kGroup > 0;
  __shared__ uint32_t masses[kTail ? kGroup : 1][2][kTail ? kTransformCells : 1];
  __shared__ uint16_t is_left[kTail ? kThreads : 1];
  __shared__ uint32_t warp_sums[kWarps];
  LetNextStart();
  if constexpr (kTail) {
    for (int32_t i = threadIdx.x; i < kGroup * 2 * kTransformCells; i += kThreads)
      (&masses[0][0][0])[i] = 0;
  }
  WaitForEarlier();
  const Chunk chunk = ChunkOf(args);
  if (!chunk.has_tokens) return;
  const DeviceQuery& query = chunk.query;
  const int32_t row = chunk.row;
  const MassCut cut = args.cuts[row];
  const int64_t place = int64_t{row} * args.chunks + blockIdx.x;
  const uint32_t higher_before = args.places[2 * place], ties_before = args.places[2 * place + 1];
  const Keys keys(args, chunk);
  uint32_t inside = 0, higher = 0, ties = 0;  // bit i is the thread's token i
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const uint32_t key = keys.Of(i);
    if (!chunk.whole && !IsInside(query, chunk.mine + i)) continue;
    inside |= 1u << i;
    higher |= (key > cut.threshold ? 1u : 0u) << i;
    ties |= (key == cut.threshold ? 1u : 0u) << i;
  }
  uint32_t all;
  const uint32_t before =
      BlockExclusiveScan<kWarps>(__popc(higher) | __popc(ties) << 16, warp_sums, &all);
  uint32_t my_ties = ties_before + (before >> 16);
  uint32_t to = higher_before + (before & 0xffffu) + (my_ties > cut.skip ? my_ties - cut.skip : 0);
  int32_t* tokens = args.chosen_tokens + row * args.capacity;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if ((ties >> i & 1) != 0 && my_ties++ >= cut.skip) higher |= 1u << i;
    if ((higher >> i & 1) != 0) tokens[to++] = chunk.mine + i;
  }
  if constexpr (kTail) {
    is_left[threadIdx.x] = static_cast<uint16_t>(args.tail_of_all != 0 ? inside : inside & ~higher);
    __syncthreads();
    AddTail<kGroup>(args, chunk, is_left, masses);
  }
}

}  // namespace winnow::kernels::cuda::masses

#endif  // WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PASSES_CUH_

// Selection by estimated mass in passes, for rows of any number and length (transform_select.cu says when). No block waits
// for another, so that each multiprocessor has blocks in all states of the work.
//
// Pieces and Masses are the first and the second half of the launch whose blocks meet (transform_select_fused.cuh), and
// both make the dots: they cost less again than 4 bytes a token and query head cost through memory. A block of Masses
// takes several chunks in turn, so that it adds its cells' masses to the row's once for all of them. They are of all
// tokens: those of what was selected are subtracted at the end (TakeFromTailKernel). Count and Compact: a block of 256
// threads a chunk of 4096 tokens, a thread 16 neighbours, so that what it reads is asked for at once.
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
constexpr int kMassTiles = 8;   // of a warp, at a time
constexpr int kMassChunks = 8;  // of a block
constexpr int kPassBlocks = 3;  // of a multiprocessor
// Tiles of a warp: half as many as in a block that keeps its dots, so that more blocks have room.
template <int kGroup>
constexpr int kPieceTiles = kGroup <= 4 ? 16 : 128 / kGroup;

// ---- pieces, masses ----

template <int kSlots, int kGroup>
__global__ void __launch_bounds__(kThreads, kGroup <= 4 ? kPassBlocks : 2)
    PiecesKernel(const __grid_constant__ Args args) {
  using Blocks = Fused<kSlots, kGroup, kPieceTiles<kGroup>>;
  __shared__ typename Blocks::Shared shared;
  LetNextStart();
  Blocks(args, shared).RunPieces();
}

template <int kSlots, int kGroup>
__global__ void __launch_bounds__(kThreads, kGroup <= 4 ? kPassBlocks : 2)
    MassesKernel(const __grid_constant__ Args args) {
  using Blocks = Fused<kSlots, kGroup, kMassTiles, kMassChunks>;
  __shared__ typename Blocks::Shared shared;
  LetNextStart();
  Blocks(args, shared).RunMasses();
}

// ---- the cut ----

__device__ __forceinline__ uint32_t ChunksOf(const DeviceQuery& query) {
  return static_cast<uint32_t>((query.mid.last - BaseOf(query) + kChunkTokens - 1) / kChunkTokens);
}

// The beginning of Count and Compact: whether the block has tokens, and which are its thread's.
struct Chunk {
  DeviceQuery query;
  int32_t row, base, mine;  // `mine`: the thread's first token
  bool has_tokens, whole;   // `whole`: all of them lie in mid
};
__device__ __forceinline__ Chunk ChunkOf(const Args& args) {
  Chunk chunk;
  chunk.row = blockIdx.y;
  chunk.query = args.queries[chunk.row / args.kv_heads];
  chunk.base = BaseOf(chunk.query);
  const int32_t begin = chunk.base + static_cast<int32_t>(blockIdx.x) * kChunkTokens;
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

__global__ void __launch_bounds__(kThreads) CompactKernel(const __grid_constant__ Args args) {
  __shared__ uint32_t warp_sums[kWarps];
  LetNextStart();
  WaitForEarlier();
  const Chunk chunk = ChunkOf(args);
  if (!chunk.has_tokens) return;
  const DeviceQuery& query = chunk.query;
  const int32_t row = chunk.row;
  const MassCut cut = args.cuts[row];
  const int64_t place = int64_t{row} * args.chunks + blockIdx.x;
  const uint32_t higher_before = args.places[2 * place], ties_before = args.places[2 * place + 1];
  const Keys keys(args, chunk);
  uint32_t higher = 0, ties = 0;  // bit i is the thread's token i
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const uint32_t key = keys.Of(i);
    if (!chunk.whole && !IsInside(query, chunk.mine + i)) continue;
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
}

}  // namespace winnow::kernels::cuda::masses

#endif  // WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PASSES_CUH_

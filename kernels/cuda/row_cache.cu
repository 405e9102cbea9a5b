// FetchRows finds rows, looks them up and gathers in one launch: a block takes 64 entries of a list,
// a thread finds the place of each, and then the block's 256 threads together copy the rows that were
// missing: 32 KiB at most, all of it on the bus at a time. Blocks do not wait for each other, so the rows
// of one are on the bus while another looks up.
//
// What was tried and lost (H200): blocks of 256 entries, which leave the bus half idle where lists are
// short (2,048 rows in 8 lists: 43 us instead of 28). Measured and not done: the copy as a launch of its own, by few
// blocks and in the order of addresses over all heads, gains nothing where a layer's KV is 512 MiB (128K tokens), and 40 of
// 160 us where it is 2 GiB (512K) (winnow_cuda_bench --filter far).
#include "kernels/cuda/copy_pieces.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_cache.h"
#include "kernels/cuda/row_cache_slots.cuh"

namespace winnow::kernels::cuda {
namespace {

constexpr int kFetchThreads = 256;
constexpr int kFetchEntries = 64;  // of a list, that a block takes at a time
constexpr int kPiecesInFlight = 8;
constexpr int kWriteThreads = 256;
constexpr int kBringThreads = 512;
constexpr int kBringInFlight = 8;

struct FetchArgs {
  const DeviceQuery* queries;
  Selection chosen;
  DeviceRowCache cache;
  FastDivider block_tokens;
  int32_t kv_heads, capacity;
  const std::byte** rows;
  RowList* lists;
  SharedKvReads* reads;
};

__global__ void __launch_bounds__(kFetchThreads)
    FetchKernel(const __grid_constant__ FetchArgs args) {
  __shared__ int2 moves[kFetchEntries];  // row, slot
  __shared__ int32_t num_moves;
  WaitForEarlier();
  LetNextStart();
  const DeviceRowCache& cache = args.cache;
  const int32_t list = blockIdx.y, head = list % args.kv_heads;
  const DeviceQuery query = args.queries[list / args.kv_heads];
  const int32_t before = min(query.mid.first, query.position + 1);
  const int32_t chosen = args.chosen.counts[list];
  const int32_t after_first = max(query.mid.last, before);
  const int32_t count = before + chosen + max(query.position + 1 - after_first, 0);
  const int32_t* tokens = args.chosen.tokens + int64_t{list} * args.chosen.capacity;
  const std::byte** rows = args.rows + int64_t{list} * args.capacity;
  const uint32_t call = cache.state->call, begin = cache.state->hand_begin;
  const int32_t block_tokens = args.block_tokens.divisor();
  const auto row_pieces = static_cast<int32_t>(SlotRowBytes(cache.row_bytes) / 16);

  int32_t cached = 0, taken = 0, in_place = 0;
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kFetchEntries;
  // The whole block goes round together.
  for (int32_t first = static_cast<int32_t>(blockIdx.x) * kFetchEntries; first < count;
       first += stride) {
    if (threadIdx.x == 0) num_moves = 0;
    __syncthreads();
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    if (threadIdx.x < kFetchEntries && i < count) {
      const int32_t token = i < before            ? i
                            : i < before + chosen ? tokens[i - before]
                                                  : after_first + (i - before - chosen);
      const int32_t block = args.block_tokens.Divide(token);
      const int32_t row = (query.block_table[block] * args.kv_heads + head) * block_tokens +
                          (token - block * block_tokens);
      int32_t slot = -1;
      const Found found = FindSlot(cache, call, begin, row, /*may_take=*/true, &slot);
      rows[i] = found == Found::kNowhere ? RowInPool(cache, row) : RowInSlot(cache, slot, row);
      if (found == Found::kTaken) moves[atomicAdd(&num_moves, 1)] = make_int2(row, slot);
      cached += found == Found::kCached;
      taken += found == Found::kTaken;
      in_place += found == Found::kNowhere;
    }
    __syncthreads();
    // As CopyPieces does it, which would cost this kernel a spilled register.
    const int32_t pieces = num_moves * row_pieces;
    for (int32_t round = threadIdx.x; round < pieces; round += kFetchThreads * kPiecesInFlight) {
      uint4 values[kPiecesInFlight];
      std::byte* to[kPiecesInFlight];
#pragma unroll
      for (int p = 0; p < kPiecesInFlight; ++p) {
        const int32_t piece = round + p * kFetchThreads;
        if (piece >= pieces) continue;
        const int2 move = moves[piece / row_pieces];
        const int32_t in_row = piece % row_pieces * 16;
        to[p] = WindowInSlot(cache, move.y) + in_row;
        values[p] = LoadStreamed(RowInPool(cache, move.x) - WindowOffset(cache, move.x) + in_row);
      }
#pragma unroll
      for (int p = 0; p < kPiecesInFlight; ++p) {
        if (round + p * kFetchThreads < pieces) *reinterpret_cast<uint4*>(to[p]) = values[p];
      }
    }
    __syncthreads();
  }

  const int lane = threadIdx.x % 32;
  cached = __reduce_add_sync(kFullMask, cached);
  taken = __reduce_add_sync(kFullMask, taken);
  in_place = __reduce_add_sync(kFullMask, in_place);
  SharedKvReads& reads = args.reads[query.row];
  if (lane == 0 && cached > 0) atomicAdd(&reads.cached, static_cast<uint32_t>(cached));
  if (lane == 0 && taken > 0) atomicAdd(&reads.fetched, static_cast<uint32_t>(taken));
  if (lane == 0 && in_place > 0) atomicAdd(&reads.in_place, static_cast<uint32_t>(in_place));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.lists[list] = {rows, count, before, before + chosen};
  }
  EndCall(cache, gridDim.x * gridDim.y);
}

template <DType kKv>
__global__ void __launch_bounds__(kWriteThreads)
    WriteThroughKernel(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                       const DeviceChunk* chunks, const DeviceRowCache cache,
                       const FastDivider block_tokens, int32_t kv_heads, int32_t head_dim) {
  const DeviceChunk chunk = chunks[blockIdx.y];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t of_chunk = static_cast<int32_t>(blockIdx.x) * (kWriteThreads / 32) + warp;
  const int32_t i = of_chunk / kv_heads, head = of_chunk % kv_heads;
  if (i < chunk.num_tokens) {
    const int32_t position = chunk.position + i, block = block_tokens.Divide(position);
    const int32_t row = (chunk.block_table[block] * kv_heads + head) * block_tokens.divisor() +
                        (position - block * block_tokens.divisor());
    int32_t slot = -1;
    if (lane == 0) {
      const uint32_t call = cache.state->call, begin = cache.state->hand_begin;
      if (FindSlot(cache, call, begin, row, /*may_take=*/chunk.num_tokens == 1, &slot) ==
          Found::kNowhere) {
        slot = -1;
      }
    }
    slot = __shfl_sync(kFullMask, slot, 0);
    const float* from_k = k + (chunk.first_row + i) * k_stride + int64_t{head} * head_dim;
    const float* from_v = v + (chunk.first_row + i) * v_stride + int64_t{head} * head_dim;
    std::byte* in_pool = RowInPool(cache, row);
    std::byte* in_cache = RowInSlot(cache, slot, row);
    if constexpr (HasScales(kKv)) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float* from = part == 0 ? from_k : from_v;
        const FourCodes four = WriteCodes<kKv>(reinterpret_cast<uint8_t*>(in_pool), head_dim, part,
                                               [&](int32_t c) { return from[c]; });
        if (slot >= 0) PutCodes(reinterpret_cast<uint8_t*>(in_cache), head_dim, part, four);
      }
    } else {
      for (int32_t piece = lane; piece < cache.row_bytes / 16; piece += 32) {
        const int32_t c = piece * 8;
        const float* from = c < head_dim ? from_k + c : from_v + (c - head_dim);
        uint32_t packed[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          packed[p] = RoundBf16(from[2 * p]) | uint32_t{RoundBf16(from[2 * p + 1])} << 16;
        }
        const uint4 values = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        *reinterpret_cast<uint4*>(in_pool + piece * 16) = values;
        if (slot >= 0) *reinterpret_cast<uint4*>(in_cache + piece * 16) = values;
      }
    }
  }
  __syncthreads();
  EndCall(cache, gridDim.x * gridDim.y);
}

__global__ void __launch_bounds__(kWriteThreads)
    ForgetKernel(const int32_t* blocks, const DeviceRowCache cache, int32_t block_rows) {
  const int64_t first = int64_t{blocks[blockIdx.x]} * block_rows;
  for (int32_t i = threadIdx.x; i < block_rows; i += kWriteThreads) {
    const auto row = static_cast<int32_t>(first + i);
    const int32_t slot = cache.slot_of_row[row];
    if (slot < 0) continue;
    if (OwnerOf(cache.slots[slot]) == row) cache.slots[slot] = kFreeSlot;
    cache.slot_of_row[row] = -1;
  }
}

__global__ void __launch_bounds__(kBringThreads)
    BringKernel(const std::byte* pool, const BlockMove* moves, int64_t block_pieces, int64_t pieces,
                std::byte* staging) {
  CopyPieces<kBringInFlight>(int64_t{blockIdx.x} * kBringThreads + threadIdx.x,
                             int64_t{gridDim.x} * kBringThreads, pieces, [&](int64_t piece) {
                               const BlockMove move = moves[piece / block_pieces];
                               const int64_t in_block = piece % block_pieces;
                               return PieceMove{pool + (move.from * block_pieces + in_block) * 16,
                                                staging + (move.to * block_pieces + in_block) * 16};
                             });
}

}  // namespace

cudaError_t FetchRows(const DeviceQuery* queries, int32_t num_queries, const Selection& chosen,
                      const DeviceRowCache& cache, const KvLayout& layout, int32_t capacity,
                      const std::byte** rows, RowList* lists, SharedKvReads* reads, Stream stream) {
  const int64_t num_lists = int64_t{num_queries} * layout.kv_heads;
  if (num_lists > 65535 || chosen.kv_heads != layout.kv_heads || cache.row_bytes % 4 != 0 ||
      cache.row_bytes != static_cast<int32_t>(layout.RowBytes())) {
    return cudaErrorInvalidValue;
  }
  if (num_lists == 0) return cudaSuccess;
  const FetchArgs args{
      queries, chosen, cache, FastDivider(layout.block_tokens), layout.kv_heads, capacity,
      rows,    lists,  reads};
  const auto blocks = static_cast<unsigned>(CeilDiv(capacity < 1 ? 1 : capacity, kFetchEntries));
  // Not by Launch(): blocks that stand ready beside those of the kernel ahead lie where that leaves room, some
  // multiprocessors have many and others none, and 16,384 rows take 276 us in place of 168.
  return LaunchBehind(FetchKernel, dim3(blocks, static_cast<unsigned>(num_lists)), kFetchThreads, 0,
                      stream, args);
}

cudaError_t WriteKvThrough(const DeviceMatrix& k, const DeviceMatrix& v, const DeviceChunk* chunks,
                           int32_t num_chunks, int32_t max_chunk_tokens,
                           const DeviceRowCache& cache, const KvLayout& layout, Stream stream) {
  if (!HasKvRows(layout) || num_chunks < 0 || num_chunks > 65535 || layout.head_dim % 8 != 0 ||
      k.cols != int64_t{layout.kv_heads} * layout.head_dim || v.cols != k.cols) {
    return cudaErrorInvalidValue;
  }
  if (num_chunks == 0 || max_chunk_tokens <= 0) return cudaSuccess;
  const int64_t rows = int64_t{max_chunk_tokens} * layout.kv_heads;
  const dim3 grid(static_cast<unsigned>(CeilDiv(rows, kWriteThreads / 32)),
                  static_cast<unsigned>(num_chunks));
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return LaunchBehind(WriteThroughKernel<kKv>, grid, kWriteThreads, 0, stream, k.data, k.stride,
                        v.data, v.stride, chunks, cache, FastDivider(layout.block_tokens),
                        layout.kv_heads, layout.head_dim);
  });
}

cudaError_t ForgetRows(const int32_t* blocks, int32_t num_blocks, const DeviceRowCache& cache,
                       const KvLayout& layout, Stream stream) {
  if (num_blocks < 0) return cudaErrorInvalidValue;
  if (num_blocks == 0) return cudaSuccess;
  return LaunchBehind(ForgetKernel, dim3(static_cast<unsigned>(num_blocks)), kWriteThreads, 0,
                      stream, blocks, cache, layout.kv_heads * layout.block_tokens);
}

cudaError_t BringBlocks(const std::byte* pool, const BlockMove* moves, int32_t num_moves,
                        int64_t block_bytes, std::byte* staging, int32_t num_blocks,
                        Stream stream) {
  if (block_bytes <= 0 || block_bytes % 16 != 0 || num_moves < 0 || num_blocks < 1) {
    return cudaErrorInvalidValue;
  }
  if (num_moves == 0) return cudaSuccess;
  return LaunchBehind(BringKernel, dim3(static_cast<unsigned>(num_blocks)), kBringThreads, 0,
                      stream, pool, moves, block_bytes / 16, num_moves * (block_bytes / 16),
                      staging);
}

}  // namespace winnow::kernels::cuda

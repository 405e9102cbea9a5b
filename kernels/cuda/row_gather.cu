// GatherRows: a round of a block is 512 threads times four pieces of 16 bytes. Addresses of a round
// are loaded first, then all its pieces, then all are stored: four loads per thread are on the bus
// at a time, 512 KiB in all with 16 blocks, and a bus of 55 GB/s and 2 us of latency needs 110.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/row_gather.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kResolveThreads = 256;
constexpr int kGatherThreads = 512;
constexpr int kPiecesInFlight = 4;

struct ResolveArgs {
  const DeviceQuery* queries;
  Selection chosen;
  const std::byte* pool;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes, row_bytes;
  int32_t kv_heads, capacity;
  const std::byte** rows;
  RowList* lists;
};

__global__ void __launch_bounds__(kResolveThreads) ResolveKernel(const ResolveArgs args) {
  const int32_t list = blockIdx.y, head = list % args.kv_heads;
  const DeviceQuery query = args.queries[list / args.kv_heads];
  const int32_t before = min(query.mid.first, query.position + 1);
  const int32_t chosen = args.chosen.counts[list];
  const int32_t after_first = max(query.mid.last, before);
  const int32_t count = before + chosen + max(query.position + 1 - after_first, 0);
  const int32_t* tokens = args.chosen.tokens + int64_t{list} * args.chosen.capacity;
  const std::byte** rows = args.rows + int64_t{list} * args.capacity;
  const std::byte* pool = args.pool + head * args.head_bytes;
  const auto thread = static_cast<int32_t>(blockIdx.x * kResolveThreads + threadIdx.x);
  for (int32_t i = thread; i < count; i += static_cast<int32_t>(gridDim.x) * kResolveThreads) {
    const int32_t token = i < before            ? i
                          : i < before + chosen ? tokens[i - before]
                                                : after_first + (i - before - chosen);
    const int32_t block = args.block_tokens.Divide(token);
    rows[i] = pool + query.block_table[block] * args.block_bytes +
              (token - block * args.block_tokens.divisor()) * args.row_bytes;
  }
  if (thread == 0) args.lists[list] = {rows, count, before, before + chosen};
}

__global__ void __launch_bounds__(kGatherThreads)
    GatherKernel(const std::byte* const* sources, std::byte* const* targets, const int32_t* count,
                 int32_t row_pieces) {
  const int64_t pieces = int64_t{*count} * row_pieces;
  const int64_t stride = int64_t{gridDim.x} * kGatherThreads;
  const int64_t thread = int64_t{blockIdx.x} * kGatherThreads + threadIdx.x;
  for (int64_t round = thread; round < pieces; round += stride * kPiecesInFlight) {
    uint4 values[kPiecesInFlight];
    std::byte* to[kPiecesInFlight];
#pragma unroll
    for (int i = 0; i < kPiecesInFlight; ++i) {
      const int64_t piece = round + i * stride;
      if (piece >= pieces) continue;
      const int64_t row = piece / row_pieces, in_row = piece % row_pieces;
      to[i] = targets[row] + in_row * 16;
      values[i] = LoadStreamed(sources[row] + in_row * 16);
    }
#pragma unroll
    for (int i = 0; i < kPiecesInFlight; ++i) {
      if (round + i * stride < pieces) *reinterpret_cast<uint4*>(to[i]) = values[i];
    }
  }
}

}  // namespace

cudaError_t ResolveRows(const DeviceQuery* queries, int32_t num_queries, const Selection& chosen,
                        const void* pool, const KvLayout& layout, int32_t capacity,
                        const std::byte** rows, RowList* lists, cudaStream_t stream) {
  const int64_t num_lists = int64_t{num_queries} * layout.kv_heads;
  if (num_lists > 65535 || chosen.kv_heads != layout.kv_heads) return cudaErrorInvalidValue;
  if (num_lists == 0) return cudaSuccess;
  const ResolveArgs args{queries,
                         chosen,
                         static_cast<const std::byte*>(pool),
                         FastDivider(layout.block_tokens),
                         static_cast<int64_t>(layout.BlockBytes()),
                         static_cast<int64_t>(layout.HeadBytes()),
                         static_cast<int64_t>(layout.RowBytes()),
                         layout.kv_heads,
                         capacity,
                         rows,
                         lists};
  const auto blocks =
      static_cast<unsigned>(CeilDiv(capacity < 1 ? 1 : capacity, 4 * kResolveThreads));
  ResolveKernel<<<dim3(blocks, static_cast<unsigned>(num_lists)), kResolveThreads, 0, stream>>>(
      args);
  return cudaGetLastError();
}

cudaError_t GatherRows(const std::byte* const* sources, std::byte* const* targets,
                       const int32_t* count, int32_t row_bytes, int32_t num_blocks,
                       cudaStream_t stream) {
  if (row_bytes <= 0 || row_bytes % 16 != 0 || num_blocks < 1) return cudaErrorInvalidValue;
  GatherKernel<<<num_blocks, kGatherThreads, 0, stream>>>(sources, targets, count, row_bytes / 16);
  return cudaGetLastError();
}

}  // namespace winnow::kernels::cuda

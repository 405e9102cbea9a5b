// Mapping, kWidened (dense_attention.h): a block makes bfloat16 of a unit of a head, for the kernels that take bfloat16. A thread
// has the same words of four codes of several rows, and asks for all of them before it uses the first.
//
// Prompts of int8: a block of queries that widens what it reads, for itself (dense_attention_wgmma.cu), does so 64 times for
// each key of 2048 queries of G 4. Here it is once, for 1 byte read, 2 written and 2 read of each value.
#include "kernels/cuda/dense_attention_parts.cuh"
#include "kernels/cuda/launch.cuh"

namespace winnow::kernels::cuda::dense {
namespace {

constexpr int kThreads = 256;

template <DType kKv, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    WidenKernel(const __grid_constant__ Args args, const __grid_constant__ WidenedKv to) {
  constexpr int kRowBytes = KvRowBytes<kKv>(kHeadDim);
  constexpr int kWords = kHeadDim / 2, kKeyWords = kHeadDim / 4;  // of a row
  constexpr int kMine = kDenseUnitTokens * kWords / kThreads;
  static_assert(kDenseUnitTokens * kWords % kThreads == 0);
  const auto chunk_index = static_cast<int32_t>(blockIdx.z);
  const auto head = static_cast<int32_t>(blockIdx.y), thread = static_cast<int32_t>(threadIdx.x);
  DeviceChunk chunk = args.chunks[chunk_index];
  const int32_t* table = chunk.block_table;
  if (blockIdx.x == 0 && head == 0 && thread == 0) {
    to.tables[chunk_index] = chunk_index;
    chunk.block_table = to.tables + chunk_index;
    to.chunks[chunk_index] = chunk;
  }
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kDenseUnitTokens;
  const int32_t seen = chunk.position + chunk.num_tokens - first;
  if (seen <= 0) return;
  const uint8_t* of_head = args.pool + (to.first_head + head) * args.head_bytes;
  uint32_t codes[kMine], scales[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int32_t row = (i * kThreads + thread) / kWords, word = (i * kThreads + thread) % kWords;
    const int32_t token = first + min(row, seen - 1), block = args.block_tokens.Divide(token);
    const uint8_t* from = of_head + table[block] * args.block_bytes +
                          int64_t{token - block * args.block_tokens.divisor()} * kRowBytes;
    codes[i] = *reinterpret_cast<const uint32_t*>(from + word * 4);
    scales[i] = ScalesOf<kKv>(from, kHeadDim);
  }
  const int64_t first_row =
      (int64_t{chunk_index} * static_cast<int32_t>(gridDim.y) + head) * to.tokens + first;
  uint2* rows = to.rows + first_row * kWords;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int32_t row = (i * kThreads + thread) / kWords, word = (i * kThreads + thread) % kWords;
    if (row >= seen) continue;
    rows[i * kThreads + thread] =
        PairsOf<kKv>(codes[i], TwiceScale<kKv>(scales[i], word >= kKeyWords));
  }
}

}  // namespace

cudaError_t WidenKv(const DenseAttentionShape& shape, const Args& args, const WidenedKv& to,
                    Stream stream) {
  const dim3 grid(static_cast<unsigned>(DenseUnits(shape.max_keys)), to.num_heads,
                  shape.num_chunks);
  return ForKvType(shape.layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    if constexpr (HasScales(kKv)) {
      return ForHeadDim(shape.layout.head_dim, [&]<int kHeadDim>(HeadDim<kHeadDim>) {
        return LaunchBehind(WidenKernel<kKv, kHeadDim>, grid, kThreads, 0, stream, args, to);
      });
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace winnow::kernels::cuda::dense

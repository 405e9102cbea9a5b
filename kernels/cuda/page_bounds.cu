// Mapping. BoundKeys: a block is a page of one KV head, a thread a channel. SelectByBounds: a block is
// 64 pages of one query and KV head, a warp a page at a time; the group's queries are added first
// (page_bounds.h), into shared memory.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/page_bounds.h"
#include "kernels/cuda/top_k.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPagesPerBlock = 64;
constexpr int kMaxHeadDim = 1024;

__device__ __forceinline__ uint16_t UpperHalf(float x) {
  return static_cast<uint16_t>(__float_as_uint(x) >> 16);
}

template <DType kKv>
__global__ void BoundKernel(const DeviceKeySpan* spans, const uint8_t* pool, int64_t block_bytes,
                            int64_t head_bytes, const FastDivider block_tokens, int32_t head_dim,
                            int32_t pages_per_block, uint16_t* bounds) {
  const DeviceKeySpan span = spans[blockIdx.z];
  if (span.tokens.size() <= 0) return;
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int32_t first =
      (span.tokens.first / kBoundPageTokens + static_cast<int32_t>(blockIdx.x)) * kBoundPageTokens;
  if (first >= span.tokens.last) return;
  const int32_t count = min(kBoundPageTokens, span.tokens.last - first);
  const int32_t logical = block_tokens.Divide(first);
  const int32_t in_block = first - logical * block_tokens.divisor();
  const int64_t row_bytes = KvRowBytes<kKv>(head_dim);
  const uint8_t* rows =
      pool + span.block_table[logical] * block_bytes + head * head_bytes + in_block * row_bytes;
  const int64_t heads = gridDim.y;
  uint16_t* page = bounds + ((span.index_table[logical] * heads + head) * pages_per_block +
                             in_block / kBoundPageTokens) *
                                (2 * head_dim);
  for (int32_t c = threadIdx.x; c < head_dim; c += blockDim.x) {
    float low = KeyAt<kKv>(rows, head_dim, c), high = low;
    for (int32_t t = 1; t < count; ++t) {
      const float value = KeyAt<kKv>(rows + t * row_bytes, head_dim, c);
      if (value < low) low = value;
      if (value > high) high = value;
    }
    // A bfloat16 is its own bound.
    page[c] = HasScales(kKv) ? RoundBf16Down(low) : UpperHalf(low);
    page[head_dim + c] = HasScales(kKv) ? RoundBf16Up(high) : UpperHalf(high);
  }
}

struct ScoreArgs {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  const uint16_t* bounds;
  FastDivider pages_per_block;
  int32_t group, head_dim;
  float* scores;
  int64_t stride;
};

__global__ void __launch_bounds__(kThreads) ScoreKernel(const __grid_constant__ ScoreArgs args) {
  __shared__ float above[kMaxHeadDim], below[kMaxHeadDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t heads = static_cast<int32_t>(gridDim.y), head = static_cast<int32_t>(blockIdx.y);
  const int32_t d = args.head_dim;
  const DeviceQuery query = args.queries[blockIdx.z];
  const int32_t first =
      query.mid.first / kBoundPageTokens + static_cast<int32_t>(blockIdx.x) * kPagesPerBlock;
  const int32_t last =
      min((query.mid.last + kBoundPageTokens - 1) / kBoundPageTokens, first + kPagesPerBlock);
  if (query.mid.size() <= 0 || first >= last) return;
  const float* q = args.q + query.row * args.q_stride + int64_t{head} * args.group * d;
  for (int32_t c = threadIdx.x; c < d; c += kThreads) {
    float high = 0.0f, low = 0.0f;
    for (int32_t g = 0; g < args.group; ++g) {
      high = __fadd_rn(high, fmaxf(q[int64_t{g} * d + c], 0.0f));
      low = __fadd_rn(low, fminf(q[int64_t{g} * d + c], 0.0f));
    }
    above[c] = high;
    below[c] = low;
  }
  __syncthreads();
  for (int32_t page = first + warp; page < last; page += kThreads / 32) {
    const int32_t logical = args.pages_per_block.Divide(page);
    const int64_t at =
        (int64_t{query.block_table[logical]} * heads + head) * args.pages_per_block.divisor() +
        page - logical * args.pages_per_block.divisor();
    const auto* low = reinterpret_cast<const uint32_t*>(args.bounds + at * 2 * d);
    const uint32_t* high = low + d / 2;
    float score = 0.0f;
    for (int32_t c = lane; c < d / 2; c += 32) {
      const uint32_t of_low = low[c], of_high = high[c];
      score = __fmaf_rn(above[2 * c], WidenLow(of_high), score);
      score = __fmaf_rn(below[2 * c], WidenLow(of_low), score);
      score = __fmaf_rn(above[2 * c + 1], WidenHigh(of_high), score);
      score = __fmaf_rn(below[2 * c + 1], WidenHigh(of_low), score);
    }
    score = WarpSum(score);
    if (lane == 0) {
      args.scores[(int64_t{blockIdx.z} * heads + head) * args.stride + page] = score;
    }
  }
}

int64_t PagesOf(const BoundSelectShape& shape) {
  return CeilDiv(shape.max_mid_last, kBoundPageTokens);
}

bool IsRefused(const KvLayout& layout) {
  return !HasKvRows(layout) || layout.head_dim < 2 || layout.head_dim > kMaxHeadDim ||
         layout.head_dim % 2 != 0 || layout.block_tokens < kBoundPageTokens ||
         layout.block_tokens % kBoundPageTokens != 0 || layout.kv_heads < 1 ||
         layout.kv_heads > 65535;
}

}  // namespace

cudaError_t BoundKeys(const DeviceKeySpan* spans, int32_t num_spans, int32_t max_span_tokens,
                      const void* pool, const KvLayout& layout, void* bounds, Stream stream) {
  if (IsRefused(layout) || num_spans < 0 || num_spans > 65535) return cudaErrorInvalidValue;
  if (num_spans == 0 || max_span_tokens <= 0) return cudaSuccess;
  // A span that begins inside a page touches one page more.
  const auto pages = static_cast<unsigned>(CeilDiv(max_span_tokens, kBoundPageTokens) + 1);
  return ForKvType(layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    return LaunchBehind(
        BoundKernel<kKv>, dim3(pages, layout.kv_heads, num_spans), 128, 0, stream, spans,
        static_cast<const uint8_t*>(pool), static_cast<int64_t>(layout.BlockBytes()),
        static_cast<int64_t>(layout.HeadBytes()), FastDivider(layout.block_tokens), layout.head_dim,
        layout.block_tokens / kBoundPageTokens, static_cast<uint16_t*>(bounds));
  });
}

size_t BoundSelectWorkspaceBytes(const BoundSelectShape& shape) {
  return size_t{4} * shape.num_queries * shape.layout.kv_heads * PagesOf(shape);
}

cudaError_t SelectByBounds(const BoundSelectShape& shape, const float* q, int64_t q_stride,
                           const DeviceQuery* queries, const void* bounds, const Selection& chosen,
                           void* workspace, Stream stream) {
  const KvLayout& layout = shape.layout;
  if (IsRefused(layout) || shape.num_queries < 0 || shape.num_queries > 65535 || shape.group < 1 ||
      chosen.kv_heads != layout.kv_heads) {
    return cudaErrorInvalidValue;
  }
  if (shape.num_queries == 0) return cudaSuccess;
  const int64_t pages = PagesOf(shape);
  const ScoreArgs args{q,
                       q_stride,
                       queries,
                       static_cast<const uint16_t*>(bounds),
                       FastDivider(layout.block_tokens / kBoundPageTokens),
                       shape.group,
                       layout.head_dim,
                       static_cast<float*>(workspace),
                       pages};
  if (pages > 0) {
    const dim3 grid(static_cast<unsigned>(CeilDiv(pages, kPagesPerBlock)), layout.kv_heads,
                    shape.num_queries);
    if (const cudaError_t error = LaunchBehind(ScoreKernel, grid, kThreads, 0, stream, args);
        error != cudaSuccess) {
      return error;
    }
  }
  return SelectTopK(queries, shape.num_queries, {args.scores, pages, kBoundPageTokens}, nullptr,
                    chosen, stream);
}

}  // namespace winnow::kernels::cuda

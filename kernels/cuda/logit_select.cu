// Mapping. A block is a split of 512 tokens of one query and KV head; a warp takes a token at a time,
// reads its key once for all heads of the group, and leaves their logits in shared memory. The first
// launch yields each split's maximum and sum, a second merges them, a third computes the logits again
// and adds up the masses: 4 bytes a token instead of 4 G, and no second kernel to keep in step.
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/kv_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/logit_select.h"
#include "kernels/cuda/top_k.h"
#include "kernels/logit_select.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxPairs = kMaxHeadDim / 64;  // of channels, of a lane

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  const uint8_t* pool;
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes;
  int32_t group, head_dim, splits;
  float scale_log2;
  float2* stats;   // [queries][Hkv][splits][G] maximum and sum
  float2* totals;  // [queries][Hkv][G]
  float* masses;   // [queries][Hkv][stride]
  int64_t stride;
};

// Channels 2 * (lane + 32 * j) and the next of the row's K.
template <DType kKv>
__device__ __forceinline__ void LoadPairs(const uint8_t* row, int32_t d, int lane,
                                          float2 (&pairs)[kMaxPairs]) {
  if constexpr (kKv == DType::kBF16) {
    const auto* key = reinterpret_cast<const uint32_t*>(row);
    uint32_t loaded[kMaxPairs];
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      loaded[j] = lane + 32 * j < d / 2 ? key[lane + 32 * j] : 0;
    }
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      pairs[j] = make_float2(WidenLow(loaded[j]), WidenHigh(loaded[j]));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      const int32_t c = 2 * (lane + 32 * j);
      pairs[j] = c < d ? make_float2(KeyAt<kKv>(row, d, c), KeyAt<kKv>(row, d, c + 1))
                       : make_float2(0.0f, 0.0f);
    }
  }
}

// logits [G][kLogitSplitTokens] of the block's tokens; the number of them.
template <DType kKv>
__device__ __forceinline__ int32_t ComputeLogits(const Args& args, const DeviceQuery& query,
                                                 int32_t head, int32_t first, float* logits) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t d = args.head_dim;
  const int32_t count = min(kLogitSplitTokens, query.position + 1 - first);
  const float* q = args.q + query.row * args.q_stride + int64_t{head} * args.group * d;
  for (int32_t i = warp; i < count; i += kWarps) {
    const int32_t token = first + i;
    const int32_t logical = args.block_tokens.Divide(token);
    const uint8_t* row =
        args.pool + query.block_table[logical] * args.block_bytes + head * args.head_bytes +
        int64_t{token - logical * args.block_tokens.divisor()} * KvRowBytes<kKv>(d);
    float2 pairs[kMaxPairs];
    LoadPairs<kKv>(row, d, lane, pairs);
    for (int32_t g = 0; g < args.group; ++g) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kMaxPairs; ++j) {
        const int32_t c = 2 * (lane + 32 * j);
        if (c >= d) continue;
        sum = __fmaf_rn(q[int64_t{g} * d + c], pairs[j].x, sum);
        sum = __fmaf_rn(q[int64_t{g} * d + c + 1], pairs[j].y, sum);
      }
      sum = WarpSum(sum);
      if (lane == 0) logits[g * kLogitSplitTokens + i] = __fmul_rn(sum, args.scale_log2);
    }
  }
  __syncthreads();
  return count;
}

template <DType kKv>
__global__ void __launch_bounds__(kThreads) StatsKernel(const __grid_constant__ Args args) {
  extern __shared__ float logits[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const DeviceQuery query = args.queries[blockIdx.z];
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kLogitSplitTokens;
  if (first > query.position) return;
  const int32_t count = ComputeLogits<kKv>(args, query, head, first, logits);
  for (int32_t g = warp; g < args.group; g += kWarps) {
    const float* of_head = logits + g * kLogitSplitTokens;
    float max = -INFINITY, sum = 0.0f;
    for (int32_t i = lane; i < count; i += 32) max = fmaxf(max, of_head[i]);
    max = WarpMax(max);
    for (int32_t i = lane; i < count; i += 32) sum = __fadd_rn(sum, exp2f(of_head[i] - max));
    sum = WarpSum(sum);
    if (lane == 0) {
      const int64_t list = int64_t{blockIdx.z} * gridDim.y + head;
      args.stats[(list * args.splits + blockIdx.x) * args.group + g] = make_float2(max, sum);
    }
  }
}

__global__ void MergeStatsKernel(const __grid_constant__ Args args) {
  const int64_t list = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int32_t g = static_cast<int32_t>(threadIdx.x);
  if (g >= args.group) return;
  const int32_t splits = args.queries[blockIdx.y].position / kLogitSplitTokens + 1;
  const float2* stats = args.stats + list * args.splits * args.group + g;
  float2 total = stats[0];
#pragma unroll 8
  for (int32_t s = 1; s < splits; ++s) {
    const float2 part = stats[int64_t{s} * args.group];
    const float max = fmaxf(total.x, part.x);
    total.y = __fmaf_rn(total.y, exp2f(total.x - max), __fmul_rn(part.y, exp2f(part.x - max)));
    total.x = max;
  }
  args.totals[list * args.group + g] = total;
}

template <DType kKv>
__global__ void __launch_bounds__(kThreads) MassKernel(const __grid_constant__ Args args) {
  extern __shared__ float logits[];
  const DeviceQuery query = args.queries[blockIdx.z];
  const auto head = static_cast<int32_t>(blockIdx.y);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kLogitSplitTokens;
  if (first > query.position) return;
  const int32_t count = ComputeLogits<kKv>(args, query, head, first, logits);
  const int64_t list = int64_t{blockIdx.z} * gridDim.y + head;
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    float score = 0.0f;
    for (int32_t g = 0; g < args.group; ++g) {
      const float2 total = args.totals[list * args.group + g];
      const float mass = __fdiv_rn(exp2f(logits[g * kLogitSplitTokens + i] - total.x), total.y);
      // Where masses fade away they are equal, on any device.
      score = __fadd_rn(score, mass < 0x1p-126f ? 0.0f : mass);
    }
    args.masses[list * args.stride + first + i] = score;
  }
}

// A block is a list. `wanted`: as many tokens, of the largest mass.
__global__ void __launch_bounds__(kThreads)
    QualityKernel(const __grid_constant__ Args args, const Selection chosen, const Selection wanted,
                  SelectionQuality* quality) {
  __shared__ double sums[kWarps];
  __shared__ int32_t counts[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto list = static_cast<int32_t>(blockIdx.x);
  const DeviceQuery query = args.queries[list / chosen.kv_heads];
  const float* masses = args.masses + int64_t{list} * args.stride;
  const int32_t seen = query.position + 1;
  const int32_t mid_first = min(query.mid.first, seen);
  const int32_t mid_last = min(max(query.mid.last, mid_first), seen);
  const int32_t count = chosen.counts[list];
  const int32_t* tokens = chosen.tokens + int64_t{list} * chosen.capacity;
  const int32_t* best = wanted.tokens + int64_t{list} * wanted.capacity;
  double covered = 0;
  for (int32_t t = threadIdx.x; t < mid_first; t += kThreads) covered += masses[t];
  for (int32_t t = mid_last + static_cast<int32_t>(threadIdx.x); t < seen; t += kThreads) {
    covered += masses[t];
  }
  int32_t both = 0;
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    const int32_t token = tokens[i];
    covered += masses[token];
    int32_t low = 0, high = count;  // the first of `best` that is not before the token
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (best[middle] < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    both += low < count && best[low] == token;
  }
  covered = WarpSum(covered);
  both = __reduce_add_sync(kFullMask, both);
  if (lane == 0) {
    sums[warp] = covered;
    counts[warp] = both;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) {
    covered += sums[w];
    both += counts[w];
  }
  quality[list].coverage = static_cast<float>(covered / args.group);
  quality[list].iou =
      count == 0 ? 1.0f : static_cast<float>(both) / static_cast<float>(2 * count - both);
}

struct Plan {
  int32_t splits;
  int64_t stride;
  size_t totals, masses, size_bytes;
};
Plan MakePlan(const LogitSelectShape& shape) {
  const size_t lists = size_t{1} * shape.num_queries * shape.layout.kv_heads;
  Plan plan;
  plan.splits = static_cast<int32_t>(CeilDiv(shape.max_keys, kLogitSplitTokens));
  plan.stride = shape.max_keys;
  plan.totals = AlignUp(lists * plan.splits * shape.group * sizeof(float2), 256);
  plan.masses = plan.totals + AlignUp(lists * shape.group * sizeof(float2), 256);
  plan.size_bytes = plan.masses + AlignUp(lists * plan.stride * 4, 256);
  return plan;
}

bool IsRefused(const LogitSelectShape& shape) {
  const KvLayout& layout = shape.layout;
  return !HasKvRows(layout) || layout.head_dim < 2 || layout.head_dim > kMaxHeadDim ||
         layout.head_dim % 2 != 0 || layout.kv_heads < 1 || layout.kv_heads > 65535 ||
         shape.num_queries < 0 || shape.num_queries > 65535 || shape.group < 1 ||
         shape.group > kMaxLogitGroup;
}

Args MakeArgs(const LogitSelectShape& shape, const Plan& plan, const float* q, int64_t q_stride,
              const DeviceQuery* queries, const void* pool, float scale, void* workspace) {
  auto* memory = static_cast<std::byte*>(workspace);
  const KvLayout& layout = shape.layout;
  return {q,
          q_stride,
          queries,
          static_cast<const uint8_t*>(pool),
          FastDivider(layout.block_tokens),
          static_cast<int64_t>(layout.BlockBytes()),
          static_cast<int64_t>(layout.HeadBytes()),
          shape.group,
          layout.head_dim,
          plan.splits,
          scale * kLog2E,
          reinterpret_cast<float2*>(memory),
          reinterpret_cast<float2*>(memory + plan.totals),
          reinterpret_cast<float*>(memory + plan.masses),
          plan.stride};
}

cudaError_t ComputeMasses(const LogitSelectShape& shape, const Plan& plan, const Args& args,
                          Stream stream) {
  const size_t shared_bytes = size_t{4} * shape.group * kLogitSplitTokens;
  const dim3 grid(plan.splits, shape.layout.kv_heads, shape.num_queries);
  return ForKvType(shape.layout.dtype, [&]<DType kKv>(KvType<kKv>) {
    if (const cudaError_t error =
            LaunchBehind(StatsKernel<kKv>, grid, kThreads, shared_bytes, stream, args);
        error != cudaSuccess) {
      return error;
    }
    if (const cudaError_t error =
            LaunchBehind(MergeStatsKernel, dim3(grid.y, grid.z), 32, 0, stream, args);
        error != cudaSuccess) {
      return error;
    }
    return LaunchBehind(MassKernel<kKv>, grid, kThreads, shared_bytes, stream, args);
  });
}

}  // namespace

size_t LogitSelectWorkspaceBytes(const LogitSelectShape& shape) {
  return MakePlan(shape).size_bytes;
}

cudaError_t SelectByLogits(const LogitSelectShape& shape, const float* q, int64_t q_stride,
                           const DeviceQuery* queries, const void* pool, float scale,
                           const Selection& chosen, void* workspace, Stream stream) {
  if (IsRefused(shape) || chosen.kv_heads != shape.layout.kv_heads) return cudaErrorInvalidValue;
  if (shape.num_queries == 0) return cudaSuccess;
  const Plan plan = MakePlan(shape);
  const Args args = MakeArgs(shape, plan, q, q_stride, queries, pool, scale, workspace);
  if (const cudaError_t error = ComputeMasses(shape, plan, args, stream); error != cudaSuccess) {
    return error;
  }
  return SelectTopK(queries, shape.num_queries, {args.masses, plan.stride, 1}, nullptr, chosen,
                    stream);
}

size_t MeasureSelectionWorkspaceBytes(const LogitSelectShape& shape, int32_t max_chosen) {
  const size_t lists = size_t{1} * shape.num_queries * shape.layout.kv_heads;
  return MakePlan(shape).size_bytes + AlignUp(lists * 4, 256) + lists * 4 * max_chosen;
}

cudaError_t MeasureSelection(const LogitSelectShape& shape, int32_t max_chosen, const float* q,
                             int64_t q_stride, const DeviceQuery* queries, const void* pool,
                             float scale, const Selection& chosen, SelectionQuality* quality,
                             void* workspace, Stream stream) {
  if (IsRefused(shape) || chosen.kv_heads != shape.layout.kv_heads || max_chosen < 0) {
    return cudaErrorInvalidValue;
  }
  if (shape.num_queries == 0) return cudaSuccess;
  const Plan plan = MakePlan(shape);
  const Args args = MakeArgs(shape, plan, q, q_stride, queries, pool, scale, workspace);
  if (const cudaError_t error = ComputeMasses(shape, plan, args, stream); error != cudaSuccess) {
    return error;
  }
  const int32_t lists = shape.num_queries * shape.layout.kv_heads;
  std::byte* memory = static_cast<std::byte*>(workspace) + plan.size_bytes;
  const Selection wanted{
      shape.layout.kv_heads, max_chosen, reinterpret_cast<int32_t*>(memory),
      reinterpret_cast<int32_t*>(memory + AlignUp(size_t{4} * static_cast<size_t>(lists), 256))};
  if (const cudaError_t error = SelectTopK(
          queries, shape.num_queries, {args.masses, plan.stride, 1}, chosen.counts, wanted, stream);
      error != cudaSuccess) {
    return error;
  }
  return LaunchBehind(QualityKernel, dim3(lists), kThreads, 0, stream, args, chosen, wanted,
                      quality);
}

}  // namespace winnow::kernels::cuda

// Mapping. Block (split, list, eight heads) has four warps; a warp takes every fourth tile of 16
// rows of its split, each with its own running maximum and its own part of shared memory, so that
// nothing waits for another warp until the end. A tile's rows, K and V, are copied with 16-byte
// asynchronous copies, a lane per 16 bytes, into rows padded by 16 bytes (no bank conflicts for
// ldmatrix); with several tiles per warp the next one flies while one is used.
//
// The product. mma.m16n8k16 has 16 rows for queries; a group has up to 8. Rows 0 to 7 are the high
// halves of the group's queries (bfloat16), rows 8 to 15 the low halves. The accumulator's two
// halves lie in the same thread, so adding them costs one addition, and the fragment of scores is
// already the fragment of weights for the second product, V's.
//
// The list's last block merges its splits (a ticket that wraps to zero, so that nothing has to be
// cleared), which saves a launch. At most 48 splits, because 8 heads times 48 blocks are all
// resident at once on an H200 at d 128.
//
// What was tried and lost (H200, 8 heads, G 4, d 128):
//   64 splits: a second wave of blocks that is nearly empty; 176 us for 128K dense
//   merging with one thread per head and channel, each reading maxima and sums itself: 20 of the
//   26 us for 2192 rows a head, all of it waiting for L2
//   reading rows in pinned memory in place: 27 GB/s where row_gather.h copies at 50
#include <algorithm>

#include "kernels/attention_state.h"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_attention.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 16;
constexpr int kRowsPerRound = kWarps * kTileRows;  // 64
constexpr int kPackedHeads = 8;

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  const RowList* lists;  // gathered
  Selection chosen;      // chosen
  const uint8_t* pool;   // paged, chosen
  FastDivider block_tokens;
  int64_t block_bytes, head_bytes;
  int32_t kv_heads, group, stages;
  float scale_log2;
  AttentionOutput output;
  float* parts;       // o [lists][kMaxAttentionSplits][G][d],
  float2* part_sums;  // max and sum [lists][kMaxAttentionSplits][G]
  uint32_t* tickets;  // [lists][ceil(G / 8)]
};

__host__ __device__ constexpr int32_t RowsPerSplit(int32_t count) {
  const int32_t most = kRowsPerRound * kMaxAttentionSplits;
  return kRowsPerRound * (count > most ? (count + most - 1) / most : 1);
}

template <int kHeadDim>
__host__ __device__ constexpr int PaddedRowBytes() {
  return 4 * kHeadDim + 16;
}

// Where a list's rows lie.
enum class Source { kGathered, kPaged, kChosen };

struct GatheredRows {
  const std::byte* const* rows;
  __device__ const uint8_t* operator()(int32_t i) const {
    return reinterpret_cast<const uint8_t*>(rows[i]);
  }
};
template <int kHeadDim>
struct PagedRows {
  const int32_t* table;
  const uint8_t* head;  // of block 0
  FastDivider block_tokens;
  int64_t block_bytes;
  __device__ const uint8_t* operator()(int32_t i) const {
    const int32_t block = block_tokens.Divide(i);
    return head + table[block] * block_bytes +
           (i - block * block_tokens.divisor()) * (4 * kHeadDim);
  }
};

// The tokens before mid, those chosen, those after mid.
template <int kHeadDim>
struct ChosenRows {
  PagedRows<kHeadDim> paged;
  const int32_t* tokens;
  int32_t capacity, before, chosen, after_first;
  __device__ const uint8_t* operator()(int32_t i) const {
    // Read in any case, so that it need not wait for how many there are.
    const int32_t token = tokens[min(max(i - before, 0), capacity - 1)];
    if (i < before) return paged(i);
    return paged(i < before + chosen ? token : after_first + (i - before - chosen));
  }
};

// Starts copying the tile's rows [first, last), of which 16 fit; the rest become zeros.
template <int kHeadDim, typename Rows>
__device__ __forceinline__ void StartTile(const Rows& rows, int32_t first, int32_t last,
                                          uint32_t shared, int lane) {
  constexpr int kPieces = kHeadDim / 4;  // of 16 bytes in a row
  const int32_t mine = first + lane % kTileRows;
  const auto address = reinterpret_cast<uint64_t>(rows(mine < last ? mine : first));
#pragma unroll
  for (int i = 0; i < kTileRows * kPieces / 32; ++i) {
    const int index = i * 32 + lane;
    const int row = index / kPieces, piece = index % kPieces;
    const uint64_t from = __shfl_sync(kFullMask, address, row);
    CopyAsync16(shared + row * PaddedRowBytes<kHeadDim>() + piece * 16,
                reinterpret_cast<const uint8_t*>(from) + piece * 16, first + row < last);
  }
}

// One head's state in the output.
template <int kHeadDim>
__device__ __forceinline__ void PutState(const AttentionOutput& output, const DeviceQuery* queries,
                                         int32_t query, int64_t heads, int64_t head, int c,
                                         float value, float max, float sum) {
  if (output.out != nullptr) {
    output.out[queries[query].row * output.out_stride + head * kHeadDim + c] =
        sum > 0 || sum != sum ? value / sum : 0.0f;
    return;
  }
  float* state = output.states + (query * heads + head) * (kHeadDim + 2);
  state[c] = value;
  if (c == 0) {
    state[kHeadDim] = max;
    state[kHeadDim + 1] = sum;
  }
}

template <int kHeadDim, Source kSource>
__global__ void __launch_bounds__(kThreads) AttendKernel(const __grid_constant__ Args args) {
  LetNextStart();
  constexpr int kRowBytes = PaddedRowBytes<kHeadDim>();
  constexpr int kSteps = kHeadDim / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t list_index = blockIdx.y, query_index = list_index / args.kv_heads;
  const int32_t kv_head = list_index % args.kv_heads;
  const int32_t first_head = static_cast<int32_t>(blockIdx.z) * kPackedHeads;
  const int32_t heads_here = min(args.group - first_head, kPackedHeads);
  const int64_t all_heads = int64_t{args.kv_heads} * args.group;
  const int64_t out_head = int64_t{kv_head} * args.group + first_head;

  const DeviceQuery query = args.queries[query_index];
  const uint8_t* of_head = args.pool + kv_head * args.head_bytes;
  WaitForEarlier();
  int32_t count;
  const auto rows = [&] {
    if constexpr (kSource == Source::kGathered) {
      const RowList list = args.lists[list_index];
      count = list.count;
      return GatheredRows{list.rows};
    } else {
      const PagedRows<kHeadDim> paged{query.block_table, of_head, args.block_tokens,
                                      args.block_bytes};
      if constexpr (kSource == Source::kPaged) {
        count = query.position + 1;
        return paged;
      } else {
        const int32_t before = min(query.mid.first, query.position + 1);
        const int32_t after_first = max(query.mid.last, before);
        const int32_t chosen = args.chosen.counts[list_index];
        count = before + chosen + max(query.position + 1 - after_first, 0);
        return ChosenRows<kHeadDim>{paged,
                                    args.chosen.tokens + int64_t{list_index} * args.chosen.capacity,
                                    args.chosen.capacity,
                                    before,
                                    chosen,
                                    after_first};
      }
    }
  }();
  const int32_t per_split = RowsPerSplit(count);
  const int32_t splits = (count + per_split - 1) / per_split;
  const auto split = static_cast<int32_t>(blockIdx.x);
  if (split >= max(splits, 1)) return;
  if (splits == 0) {
    for (int i = threadIdx.x; i < heads_here * kHeadDim; i += kThreads) {
      PutState<kHeadDim>(args.output, args.queries, query_index, all_heads, out_head + i / kHeadDim,
                         i % kHeadDim, 0.0f, -INFINITY, 0.0f);
    }
    return;
  }
  const int32_t split_last = min((split + 1) * per_split, count);
  int32_t tile = split * per_split + warp * kTileRows;

  extern __shared__ uint4 shared4[];
  auto* shared = reinterpret_cast<uint8_t*>(shared4);
  const uint32_t mine = SharedAddress(shared) + warp * args.stages * kTileRows * kRowBytes;
  for (int stage = 0; stage < args.stages; ++stage) {
    if (tile + stage * kRowsPerRound < split_last) {
      StartTile<kHeadDim>(rows, tile + stage * kRowsPerRound, split_last,
                          mine + stage * kTileRows * kRowBytes, lane);
    }
    CommitCopies();
  }

  // The group's queries, scaled to base 2: high halves in rows 0 to 7, low halves in 8 to 15.
  const int head = lane / 4, pair = lane % 4 * 2;
  uint32_t q_fragments[kSteps][4];
  {
    const float* q = args.q + query.row * args.q_stride + (out_head + head) * kHeadDim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 values = make_float2(0.0f, 0.0f);
        if (head < heads_here) {
          const float* from = q + step * 16 + half * 8 + pair;
          values = make_float2(from[0] * args.scale_log2, from[1] * args.scale_log2);
        }
        const uint32_t high = PackBf16(values.x, values.y);
        q_fragments[step][half * 2] = high;
        q_fragments[step][half * 2 + 1] = PackBf16Rest(values.x, values.y, high);
      }
    }
  }

  float sums[kHeadDim / 8][4] = {};  // o, high and low halves of the weights
  float running_max = -INFINITY, running_sum = 0.0f;
  const uint32_t key_lane = (lane % 8 + lane / 16 * 8) * kRowBytes + lane / 8 % 2 * 16;
  const uint32_t value_lane = (lane % 16) * kRowBytes + kHeadDim * 2 + lane / 16 * 16;
  for (int stage = 0; tile < split_last; tile += kRowsPerRound) {
    if (args.stages > 1) {
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncwarp();
    const uint32_t here = mine + stage * kTileRows * kRowBytes;
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t keys[4];
      LoadMatrix4(here + key_lane + step * 32, keys);
      MultiplyAdd16x8x16(scores[0], q_fragments[step], keys[0], keys[1]);
      MultiplyAdd16x8x16(scores[1], q_fragments[step], keys[2], keys[3]);
    }
    float weights[2][2];
    float tile_max = -INFINITY;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[n][i] =
            tile + n * 8 + pair + i < split_last ? scores[n][i] + scores[n][i + 2] : -INFINITY;
        tile_max = fmaxf(tile_max, weights[n][i]);
      }
    }
    tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullMask, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(kFullMask, tile_max, 2));
    const float new_max = fmaxf(running_max, tile_max);
    // A tile has at least one row, so new_max is finite unless scores are not.
    const float keep = new_max == running_max ? 1.0f : exp2f(running_max - new_max);
    if (__any_sync(kFullMask, keep != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= keep;
      }
    }
    running_max = new_max;
    running_sum *= keep;
    uint32_t w[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[n][i] = exp2f(weights[n][i] - new_max);
        running_sum += weights[n][i];
      }
      w[n * 2] = PackBf16(weights[n][0], weights[n][1]);
      w[n * 2 + 1] = PackBf16Rest(weights[n][0], weights[n][1], w[n * 2]);
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      uint32_t values[4];
      LoadMatrix4Transposed(here + value_lane + n * 16, values);
      MultiplyAdd16x8x16(sums[n], w, values[0], values[1]);
      MultiplyAdd16x8x16(sums[n + 1], w, values[2], values[3]);
    }
    if (args.stages > 1) {
      __syncwarp();
      const int32_t next = tile + args.stages * kRowsPerRound;
      if (next < split_last) StartTile<kHeadDim>(rows, next, split_last, here, lane);
      CommitCopies();
      stage = stage + 1 == args.stages ? 0 : stage + 1;
    }
  }
  running_sum += __shfl_xor_sync(kFullMask, running_sum, 1);
  running_sum += __shfl_xor_sync(kFullMask, running_sum, 2);

  // The four chains become one, through shared memory: [warp][8][d + 2].
  WaitForCopies<0>();
  __syncthreads();
  float* chains = reinterpret_cast<float*>(shared);
  float* chain = chains + (warp * kPackedHeads + head) * (kHeadDim + 2);
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    chain[n * 8 + pair] = sums[n][0] + sums[n][2];
    chain[n * 8 + pair + 1] = sums[n][1] + sums[n][3];
  }
  if (pair == 0) {
    chain[kHeadDim] = running_max;
    chain[kHeadDim + 1] = running_sum;
  }
  __syncthreads();
  const int64_t first_part = int64_t{list_index} * kMaxAttentionSplits * args.group + first_head;
  float* parts = args.parts + first_part * kHeadDim;
  float2* part_sums = args.part_sums + first_part;
  for (int i = threadIdx.x; i < heads_here * kHeadDim; i += kThreads) {
    const int h = i / kHeadDim, c = i % kHeadDim;
    const float* of_head = chains + h * (kHeadDim + 2);
    constexpr int kNext = kPackedHeads * (kHeadDim + 2);
    float max = of_head[kHeadDim];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, of_head[w * kNext + kHeadDim]);
    float value = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float of_chain = of_head[w * kNext + kHeadDim + 1];
      if (of_chain == 0.0f) continue;  // a chain without tiles
      const float keep = exp2f(of_head[w * kNext + kHeadDim] - max);
      value += of_head[w * kNext + c] * keep;
      sum += of_chain * keep;
    }
    if (splits == 1) {
      PutState<kHeadDim>(args.output, args.queries, query_index, all_heads, out_head + h, c, value,
                         max, sum);
    } else {
      parts[(int64_t{split} * args.group + h) * kHeadDim + c] = value;
      if (c == 0) part_sums[int64_t{split} * args.group + h] = make_float2(max, sum);
    }
  }
  if (splits == 1) return;

  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto last = static_cast<uint32_t>(splits - 1);
    is_last = atomicInc(&args.tickets[list_index * gridDim.z + blockIdx.z], last) == last;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  // What each split counts for: a warp takes every fourth head, a lane two splits at most.
  __shared__ float keeps[kMaxAttentionSplits][kPackedHeads];
  __shared__ float2 totals[kPackedHeads];
  for (int h = warp; h < heads_here; h += kWarps) {
    float2 mine[2];
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int s = lane + 32 * i;
      mine[i] = s < splits ? __ldcg(part_sums + int64_t{s} * args.group + h)
                           : make_float2(-INFINITY, 0.0f);
      max = fmaxf(max, mine[i].x);
    }
    max = WarpMax(max);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int s = lane + 32 * i;
      if (s >= splits) continue;
      const float keep = exp2f(mine[i].x - max);
      keeps[s][h] = keep;
      sum += mine[i].y * keep;
    }
    sum = WarpSum(sum);
    if (lane == 0) totals[h] = make_float2(max, sum);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads_here * (kHeadDim / 4); i += kThreads) {
    const int h = i / (kHeadDim / 4), c = i % (kHeadDim / 4) * 4;
    const float4* of_head = reinterpret_cast<const float4*>(parts + h * kHeadDim + c);
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 18
    for (int s = 0; s < splits; ++s) {
      const float4 part = __ldcg(of_head + int64_t{s} * args.group * (kHeadDim / 4));
      const float keep = keeps[s][h];
      value.x += part.x * keep;
      value.y += part.y * keep;
      value.z += part.z * keep;
      value.w += part.w * keep;
    }
    const float values[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      PutState<kHeadDim>(args.output, args.queries, query_index, all_heads, out_head + h, c + j,
                         values[j], totals[h].x, totals[h].y);
    }
  }
}

__global__ void FinishStatesKernel(const float* states, const DeviceQuery* queries,
                                   int32_t head_dim, float* out, int64_t out_stride) {
  LetNextStart();
  WaitForEarlier();
  const int64_t heads = gridDim.x, query = blockIdx.y, head = blockIdx.x;
  const float* state = states + (query * heads + head) * (head_dim + 2);
  const float sum = state[head_dim + 1];
  float* to = out + queries[query].row * out_stride + head * head_dim;
  for (int c = threadIdx.x; c < head_dim; c += blockDim.x) {
    to[c] = sum == 0.0f ? 0.0f : state[c] / sum;
  }
}

__global__ void StateMassesKernel(const float* states, int64_t count, int32_t head_dim,
                                  float* masses) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float* end = states + i * (head_dim + 2) + head_dim;
  constexpr float kLn2 = 0.6931471805599453f;
  masses[i] = end[1] == 0.0f ? -INFINITY : (end[0] + log2f(end[1])) * kLn2;
}

// Offsets in the workspace.
struct Plan {
  size_t part_sums, tickets, size_bytes;
};
Plan MakePlan(const RowAttentionShape& shape) {
  const size_t lists = size_t{1} * shape.num_queries * shape.layout.kv_heads;
  const size_t parts = lists * kMaxAttentionSplits * shape.group;
  Plan plan;
  plan.part_sums = AlignUp(parts * 4 * shape.layout.head_dim, 256);
  plan.tickets = plan.part_sums + AlignUp(parts * 8, 256);
  plan.size_bytes = plan.tickets + AlignUp(lists * 4 * CeilDiv(shape.group, kPackedHeads), 256);
  return plan;
}

template <int kHeadDim, Source kSource>
cudaError_t LaunchOf(const RowAttentionShape& shape, const Args& args, cudaStream_t stream) {
  const size_t shared_bytes =
      std::max<size_t>(size_t{1} * kWarps * args.stages * kTileRows * PaddedRowBytes<kHeadDim>(),
                       size_t{4} * kWarps * kPackedHeads * (kHeadDim + 2));
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(AttendKernel<kHeadDim, kSource>,
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  const int32_t per_split = RowsPerSplit(shape.max_rows);
  // A shorter list may have more splits than the longest.
  const int64_t splits = shape.max_rows > kRowsPerRound * kMaxAttentionSplits
                             ? kMaxAttentionSplits
                             : std::max<int64_t>(CeilDiv(shape.max_rows, per_split), 1);
  const dim3 grid(static_cast<unsigned>(splits), shape.num_queries * shape.layout.kv_heads,
                  static_cast<unsigned>(CeilDiv(shape.group, kPackedHeads)));
  return Launch(AttendKernel<kHeadDim, kSource>, grid, kThreads, shared_bytes, stream, false, args);
}

template <Source kSource>
cudaError_t Attend(const RowAttentionShape& shape, const float* q, int64_t q_stride,
                   const DeviceQuery* queries, const RowList* lists, const Selection& chosen,
                   const void* pool, float scale, const AttentionOutput& output, void* workspace,
                   cudaStream_t stream) {
  const KvLayout& layout = shape.layout;
  const int64_t num_lists = int64_t{shape.num_queries} * layout.kv_heads;
  if (layout.dtype != DType::kBF16 || shape.group < 1 || layout.kv_heads < 1 ||
      shape.num_queries < 0 || num_lists > 65535 || shape.max_rows < 0 || layout.block_tokens < 1 ||
      (output.states == nullptr) == (output.out == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (num_lists == 0) return cudaSuccess;
  auto* memory = static_cast<std::byte*>(workspace);
  const Plan plan = MakePlan(shape);
  const Args args{q,
                  q_stride,
                  queries,
                  lists,
                  chosen,
                  static_cast<const uint8_t*>(pool),
                  FastDivider(layout.block_tokens),
                  static_cast<int64_t>(layout.BlockBytes()),
                  static_cast<int64_t>(layout.HeadBytes()),
                  layout.kv_heads,
                  shape.group,
                  shape.max_rows > kRowsPerRound * kMaxAttentionSplits ? 2 : 1,
                  scale * kLog2E,
                  output,
                  reinterpret_cast<float*>(memory),
                  reinterpret_cast<float2*>(memory + plan.part_sums),
                  reinterpret_cast<uint32_t*>(memory + plan.tickets)};
  switch (layout.head_dim) {
    case 64:
      return LaunchOf<64, kSource>(shape, args, stream);
    case 80:
      return LaunchOf<80, kSource>(shape, args, stream);
    case 96:
      return LaunchOf<96, kSource>(shape, args, stream);
    case 128:
      return LaunchOf<128, kSource>(shape, args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

size_t RowAttentionWorkspaceBytes(const RowAttentionShape& shape) {
  return MakePlan(shape).size_bytes;
}
ZeroedPart RowAttentionZeroedPart(const RowAttentionShape& shape) {
  const Plan plan = MakePlan(shape);
  return {plan.tickets, plan.size_bytes - plan.tickets};
}

cudaError_t AttendRows(const RowAttentionShape& shape, const float* q, int64_t q_stride,
                       const DeviceQuery* queries, const RowList* lists, float scale,
                       const AttentionOutput& output, void* workspace, cudaStream_t stream) {
  return Attend<Source::kGathered>(shape, q, q_stride, queries, lists, {}, nullptr, scale, output,
                                   workspace, stream);
}

cudaError_t AttendChosen(const RowAttentionShape& shape, const float* q, int64_t q_stride,
                         const DeviceQuery* queries, const Selection& chosen, const void* pool,
                         float scale, const AttentionOutput& output, void* workspace,
                         cudaStream_t stream) {
  if (chosen.kv_heads != shape.layout.kv_heads || chosen.capacity < 1) return cudaErrorInvalidValue;
  return Attend<Source::kChosen>(shape, q, q_stride, queries, nullptr, chosen, pool, scale, output,
                                 workspace, stream);
}

cudaError_t AttendPaged(const RowAttentionShape& shape, const float* q, int64_t q_stride,
                        const DeviceQuery* queries, const void* pool, float scale,
                        const AttentionOutput& output, void* workspace, cudaStream_t stream) {
  return Attend<Source::kPaged>(shape, q, q_stride, queries, nullptr, {}, pool, scale, output,
                                workspace, stream);
}

cudaError_t StateMasses(const float* states, int64_t count, int32_t head_dim, float* masses,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  StateMassesKernel<<<static_cast<unsigned>(CeilDiv(count, 128)), 128, 0, stream>>>(
      states, count, head_dim, masses);
  return cudaGetLastError();
}

cudaError_t FinishStates(const float* states, const DeviceQuery* queries, int32_t num_queries,
                         int32_t heads, int32_t head_dim, float* out, int64_t out_stride,
                         cudaStream_t stream) {
  if (num_queries == 0) return cudaSuccess;
  return Launch(FinishStatesKernel, dim3(heads, num_queries), 128, 0, stream, false, states,
                queries, head_dim, out, out_stride);
}

}  // namespace winnow::kernels::cuda

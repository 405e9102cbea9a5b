// Mapping. Estimate: a thread is one anchor or candidate of one KV head; its key is some 17 words,
// which it reads itself (rows are scattered, but each is read whole), and the group's queries come
// from shared memory, four or eight heads to a channel, the same address for the whole warp.
//
// Cut: a block is one query head. The logits of the row are read once into shared memory (up to some
// 57,000 on Hopper; longer rows are read from L2 again) and become weights; beside them lie, for up to
// some 28,000, the weights as multiples of 2^-31, whose sums are exact in any order. The threshold is looked for among the
// bits of the weight, which order as the weights do: 15 rounds of three sums each leave one value.
// A sum is two integer reductions of a warp and one of the warps.
//
// Each head leaves a bit per candidate; the group's last block (a ticket that wraps to zero) writes
// the tokens that any head keeps.
//
// What was tried and lost (H200, 8 heads, G 4, d 128, 8192 candidates, 62 us in all): 30 rounds of
// one sum in double, about 0.7 us each; the union made from the group's logits, 512 candidates at
// a time, 20 us.
#include <algorithm>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/top_p.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kEstimateThreads = 128;
constexpr int kCutThreads = 512;
constexpr int kCutWarps = kCutThreads / 32;
constexpr size_t kOtherSharedBytes = 2 * 1024;  // of a block, at most: its variables
constexpr uint32_t kOneBits = 0x3f800000;       // the largest weight

struct HeadCut {
  uint32_t threshold;  // weights of more bits are kept,
  int32_t first_tie;   // and of as many those of candidates from this one on
};

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  const uint8_t* int4_keys;
  FastDivider block_tokens;
  int64_t key_bytes;
  int32_t kv_heads, group, head_dim, max_tokens, max_words;
  float scale_log2, p;
  Selection candidates, kept;
  float* logits;      // [queries][H][max_tokens]: anchors, then candidates
  uint32_t* masks;    // [queries][H][max_words]: a bit per candidate
  uint32_t* tickets;  // [queries][Hkv]
};

struct Anchors {
  int32_t before, after_first, count;
  __device__ explicit Anchors(const DeviceQuery& query)
      : before(min(query.mid.first, query.position + 1)),
        after_first(max(query.mid.last, before)),
        count(before + max(query.position + 1 - after_first, 0)) {}
  __device__ int32_t operator[](int32_t i) const {
    return i < before ? i : after_first + (i - before);
  }
};

template <int kHeads>
__global__ void __launch_bounds__(kEstimateThreads)
    EstimateKernel(const __grid_constant__ Args args) {
  const int32_t kv_head = blockIdx.y, query_index = blockIdx.z;
  const DeviceQuery query = args.queries[query_index];
  const int32_t list = query_index * args.kv_heads + kv_head;
  const int32_t candidates = args.candidates.counts[list];
  const Anchors anchors(query);
  if (candidates <= 0 ||
      static_cast<int32_t>(blockIdx.x) * kEstimateThreads >= anchors.count + candidates) {
    return;
  }
  const auto i = static_cast<int32_t>(blockIdx.x * kEstimateThreads + threadIdx.x);
  const bool inside = i < anchors.count + candidates;
  const int32_t words = args.head_dim / 8;
  uint32_t key[16], scale_zero = 0;
  if (inside) {
    const int32_t token =
        i < anchors.count
            ? anchors[i]
            : args.candidates.tokens[int64_t{list} * args.candidates.capacity + i - anchors.count];
    const int32_t block = args.block_tokens.Divide(token);
    const auto* from = reinterpret_cast<const uint32_t*>(
        args.int4_keys + ((int64_t{query.block_table[block]} * args.kv_heads + kv_head) *
                              args.block_tokens.divisor() +
                          (token - block * args.block_tokens.divisor())) *
                             args.key_bytes);
#pragma unroll
    for (int w = 0; w < 16; ++w) {
      if (w < words) key[w] = __ldg(from + w);
    }
    scale_zero = __ldg(from + words);
  }
  __shared__ float4 q4[128 * kHeads / 4];  // [channel][head]
  __shared__ float q_sums[kHeads];
  float* q = reinterpret_cast<float*>(q4);
  for (int32_t first = 0; first < args.group; first += kHeads) {
    const int32_t heads = min(args.group - first, kHeads);
    const float* from = args.q + query.row * args.q_stride +
                        (int64_t{kv_head} * args.group + first) * args.head_dim;
    __syncthreads();
    for (int32_t j = threadIdx.x; j < kHeads * args.head_dim; j += kEstimateThreads) {
      const int32_t h = j / args.head_dim, c = j % args.head_dim;
      q[c * kHeads + h] = h < heads ? from[h * args.head_dim + c] : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < kHeads) {
      float sum = 0.0f;
      for (int32_t c = 0; c < args.head_dim; ++c) sum += q[c * kHeads + threadIdx.x];
      q_sums[threadIdx.x] = sum;
    }
    float dots[kHeads] = {};
#pragma unroll
    for (int w = 0; w < 16; ++w) {
      if (w >= words || !inside) continue;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        // 2^23 + code as bits; less 2^23 it is the code.
        const float code = __uint_as_float(0x4b000000u | (key[w] >> (4 * c) & 15u)) - 8388608.0f;
#pragma unroll
        for (int h = 0; h < kHeads; h += 4) {
          const float4 of_channel = q4[((w * 8 + c) * kHeads + h) / 4];
          dots[h] = __fmaf_rn(of_channel.x, code, dots[h]);
          dots[h + 1] = __fmaf_rn(of_channel.y, code, dots[h + 1]);
          dots[h + 2] = __fmaf_rn(of_channel.z, code, dots[h + 2]);
          dots[h + 3] = __fmaf_rn(of_channel.w, code, dots[h + 3]);
        }
      }
    }
    __syncthreads();
    const int64_t out = (int64_t{list} * args.group + first) * args.max_tokens + i;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (!inside || h >= heads) continue;
      args.logits[out + int64_t{h} * args.max_tokens] =
          args.scale_log2 *
          __fmaf_rn(WidenHigh(scale_zero), q_sums[h], WidenLow(scale_zero) * dots[h]);
    }
  }
}

__device__ __forceinline__ float Weight(float logit, float max) {
  const float weight = exp2f(logit - max);
  return weight < 0x1p-126f ? 0.0f : weight;
}

// The same for every thread; `shared` has kCutWarps places. Begins with a barrier.
__device__ double BlockSum(double x, double* shared) {
  x = WarpSum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
#pragma unroll
  for (int w = 0; w < kCutWarps; ++w) sum += shared[w];
  return sum;
}
__device__ uint32_t BlockExclusiveScan(uint32_t x, uint32_t* shared, uint32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t inclusive = WarpInclusiveScan(x, lane);
  __syncthreads();
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kCutWarps; ++w) {
    if (w < warp) before += shared[w];
    all += shared[w];
  }
  *total = all;
  return before + inclusive - x;
}

// A weight as a multiple of 2^-31.
__device__ __forceinline__ uint32_t Fixed(float weight) {
  return __float2uint_rn(weight * 0x1p31f);
}
__device__ __forceinline__ uint64_t WarpSum(uint64_t x) {
  const uint32_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x & 0xfffff));
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 20));
  return (high << 20) + low;
}

// What of a row lies in shared memory.
enum class Holds { kNothing, kWeights, kWeightsAndFixed };

template <Holds kHolds>
__global__ void __launch_bounds__(kCutThreads) CutKernel(const __grid_constant__ Args args) {
  const int32_t head = blockIdx.x, query_index = blockIdx.y, kv_head = head / args.group;
  const int32_t list = query_index * args.kv_heads + kv_head;
  const DeviceQuery query = args.queries[query_index];
  const int32_t candidates = args.candidates.counts[list];
  if (candidates <= 0) {
    if (threadIdx.x == 0 && head % args.group == 0) args.kept.counts[list] = 0;
    return;
  }
  const int32_t anchors = Anchors(query).count, all = anchors + candidates;
  const int64_t head_index = int64_t{query_index} * args.kv_heads * args.group + head;
  const float* logits = args.logits + head_index * args.max_tokens;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  constexpr bool kInShared = kHolds != Holds::kNothing;
  constexpr bool kFixed = kHolds == Holds::kWeightsAndFixed;
  extern __shared__ float row[];  // [max_tokens] weights, then the candidates' fixed weights
  auto* fixed = reinterpret_cast<uint32_t*>(row + args.max_tokens);
  __shared__ double sums[kCutWarps];
  __shared__ uint64_t fixed_sums[2][3][kCutWarps];
  __shared__ uint32_t counts[kCutWarps];
  __shared__ float maxima[kCutWarps];
  __shared__ int32_t found;
  __shared__ bool is_last;
  float max = -INFINITY;
  for (int32_t i = threadIdx.x; i < all; i += kCutThreads) {
    const float logit = __ldcg(logits + i);
    if (kInShared) row[i] = logit;
    max = fmaxf(max, logit);
  }
  max = WarpMax(max);
  if (lane == 0) maxima[warp] = max;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kCutWarps; ++w) max = fmaxf(max, maxima[w]);
  double of_anchors = 0, of_candidates = 0;
  for (int32_t i = threadIdx.x; i < all; i += kCutThreads) {
    const float weight = Weight(kInShared ? row[i] : __ldcg(logits + i), max);
    if (kInShared) {
      row[i] = weight;
      if (kFixed && i >= anchors) fixed[i - anchors] = Fixed(weight);
    }
    if (i < anchors) {
      of_anchors += weight;
    } else {
      of_candidates += weight;
    }
  }
  of_anchors = BlockSum(of_anchors, sums);
  of_candidates = BlockSum(of_candidates, sums);
  const auto weight_of = [&](int32_t candidate) {
    return kInShared ? row[anchors + candidate] : Weight(__ldcg(logits + anchors + candidate), max);
  };
  // The weight of candidates whose bits are `points[i]` and more, for three points.
  int turn = 0;
  const auto weights_from = [&](const uint32_t(&points)[3], double(&result)[3]) {
    uint64_t mine[3] = {};
    for (int32_t i = threadIdx.x; i < candidates; i += kCutThreads) {
      const float weight = weight_of(i);
      const uint32_t bits = __float_as_uint(weight), value = kFixed ? fixed[i] : Fixed(weight);
#pragma unroll
      for (int j = 0; j < 3; ++j) mine[j] += bits >= points[j] ? value : 0;
    }
    turn ^= 1;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      mine[j] = WarpSum(mine[j]);
      if (lane == 0) fixed_sums[turn][j][warp] = mine[j];
    }
    __syncthreads();  // the other half is written next: no second barrier
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      result[j] =
          static_cast<double>(WarpSum(lane < kCutWarps ? fixed_sums[turn][j][lane] : 0)) * 0x1p-31;
    }
  };
  const double p = args.p;
  const double needed = p * (of_anchors + of_candidates) - of_anchors;
  // Keep nothing, or everything that is not zero, unless the search says otherwise.
  HeadCut cut{needed > 0 || p >= 1 ? 0 : kFullMask, candidates};
  if (p < 1 && needed > 0 && of_candidates >= needed) {
    uint32_t low = 0, high = kOneBits + 1;  // weights from `low` on suffice, from `high` on do not
    double above = 0;                       // weight from `high` on
    while (high - low > 1) {
      const uint32_t span = high - low;
      const uint32_t points[3] = {low + span / 4, low + span / 2,
                                  low + span * 3 / 4};  // below 2^32
      double weights[3];
      weights_from(points, weights);
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (weights[j] >= needed) low = points[j];
      }
#pragma unroll
      for (int j = 2; j >= 0; --j) {
        if (weights[j] < needed) {
          high = points[j];
          above = weights[j];
        }
      }
    }
    if (low == 0) {
      cut = {0, candidates};  // rounding: all that are not zero
    } else {
      // Of those at the threshold as many as are needed, the later first. A thread's candidates are
      // adjacent here.
      const int32_t per_thread = (candidates + kCutThreads - 1) / kCutThreads;
      const int32_t first = min(static_cast<int32_t>(threadIdx.x) * per_thread, candidates);
      const int32_t last = min(first + per_thread, candidates);
      uint32_t ties = 0, all_ties;
      for (int32_t i = first; i < last; ++i) ties += __float_as_uint(weight_of(i)) == low;
      const uint32_t before = BlockExclusiveScan(ties, counts, &all_ties);
      const double tie = Fixed(__uint_as_float(low)) * 0x1p-31;
      auto taken = static_cast<uint32_t>(fmin(ceil((needed - above) / tie), 1.0 * all_ties));
      if (taken > 1 && above + (taken - 1) * tie >= needed) --taken;
      if (taken < all_ties && above + taken * tie < needed) ++taken;
      const uint32_t skip = all_ties - taken;
      if (threadIdx.x == 0) found = candidates;
      __syncthreads();
      if (before <= skip && skip < before + ties) {
        uint32_t rank = before;
        for (int32_t i = first; i < last; ++i) {
          if (__float_as_uint(weight_of(i)) == low && rank++ == skip) found = i;
        }
      }
      __syncthreads();
      cut = {low, found};
    }
  }
  const int32_t words = (candidates + 31) / 32;
  uint32_t* masks = args.masks + int64_t{list} * args.group * args.max_words;
  for (int32_t i = threadIdx.x; i < words * 32; i += kCutThreads) {
    bool wanted = false;
    if (i < candidates) {
      const uint32_t bits = __float_as_uint(weight_of(i));
      wanted = bits > cut.threshold || (bits == cut.threshold && i >= cut.first_tie);
    }
    const uint32_t mask = __ballot_sync(kFullMask, wanted);
    if (lane == 0) masks[int64_t{head % args.group} * args.max_words + i / 32] = mask;
  }

  // The group's last head writes the union.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto last = static_cast<uint32_t>(args.group - 1);
    is_last = atomicInc(&args.tickets[list], last) == last;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  const int32_t* tokens = args.candidates.tokens + int64_t{list} * args.candidates.capacity;
  int32_t* kept = args.kept.tokens + int64_t{list} * args.kept.capacity;
  const auto mask_of = [&](int32_t word) {
    uint32_t mask = 0;
    for (int32_t g = 0; g < args.group; ++g) {
      mask |= __ldcg(masks + int64_t{g} * args.max_words + word);
    }
    return mask;
  };
  // `kept` may be where the candidates are: all of a pass are read before any is written.
  uint32_t number = 0, of_pass;
  if (kInShared) {
    auto* staged = reinterpret_cast<int32_t*>(row);
    for (int32_t pass = 0; pass < words; pass += kCutThreads) {
      const int32_t word = pass + static_cast<int32_t>(threadIdx.x);
      uint32_t mask = word < words ? mask_of(word) : 0;
      uint32_t at = number + BlockExclusiveScan(__popc(mask), counts, &of_pass);
      for (; mask != 0; mask &= mask - 1) {
        staged[at++] = tokens[word * 32 + __ffs(static_cast<int>(mask)) - 1];
      }
      number += of_pass;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < number; i += kCutThreads) kept[i] = staged[i];
  } else {
    for (int32_t pass = 0; pass < candidates; pass += kCutThreads) {
      const int32_t i = pass + static_cast<int32_t>(threadIdx.x);
      const bool wanted = i < candidates && (mask_of(i / 32) >> (i % 32) & 1) != 0;
      const int32_t token = wanted ? tokens[i] : 0;
      const uint32_t before = BlockExclusiveScan(wanted, counts, &of_pass);
      if (wanted) kept[number + before] = token;
      number += of_pass;
    }
  }
  if (threadIdx.x == 0) args.kept.counts[list] = static_cast<int32_t>(number);
}

struct Plan {
  int32_t max_tokens, max_words;
  size_t masks, tickets, size_bytes;
};

Plan MakePlan(const TopPShape& shape) {
  Plan plan;
  plan.max_tokens = static_cast<int32_t>(
      AlignUp(static_cast<size_t>(shape.max_anchors) + shape.max_candidates, 4));
  const size_t lists = size_t{1} * shape.num_queries * shape.layout.kv_heads;
  plan.max_words = static_cast<int32_t>(CeilDiv(shape.max_candidates, 32));
  plan.masks = AlignUp(lists * shape.group * plan.max_tokens * 4, 256);
  plan.tickets = plan.masks + AlignUp(lists * shape.group * plan.max_words * 4, 256);
  plan.size_bytes = plan.tickets + AlignUp(lists * 4, 256);
  return plan;
}

template <Holds kHolds>
cudaError_t LaunchCut(dim3 grid, size_t shared_bytes, const Args& args, cudaStream_t stream) {
  if (shared_bytes > 40 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(CutKernel<kHolds>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  CutKernel<kHolds><<<grid, kCutThreads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

size_t TopPWorkspaceBytes(const TopPShape& shape) { return MakePlan(shape).size_bytes; }
ZeroedPart TopPZeroedPart(const TopPShape& shape) {
  const Plan plan = MakePlan(shape);
  return {plan.tickets, plan.size_bytes - plan.tickets};
}

cudaError_t PruneSelection(const TopPShape& shape, const float* q, int64_t q_stride,
                           const DeviceQuery* queries, const void* int4_keys, float scale, float p,
                           const Selection& candidates, const Selection& kept, void* workspace,
                           cudaStream_t stream) {
  const KvLayout& layout = shape.layout;
  if (layout.head_dim % 8 != 0 || layout.head_dim < 8 || layout.head_dim > 128 || shape.group < 1 ||
      shape.num_queries < 0 || shape.num_queries > 65535 || layout.kv_heads < 1 ||
      layout.kv_heads > 65535 || candidates.kv_heads != layout.kv_heads ||
      kept.kv_heads != layout.kv_heads) {
    return cudaErrorInvalidValue;
  }
  const Plan plan = MakePlan(shape);
  if (shape.num_queries == 0) return cudaSuccess;
  auto* memory = static_cast<std::byte*>(workspace);
  const Args args{q,
                  q_stride,
                  queries,
                  static_cast<const uint8_t*>(int4_keys),
                  FastDivider(layout.block_tokens),
                  static_cast<int64_t>(Int4KeyBytes(layout.head_dim)),
                  layout.kv_heads,
                  shape.group,
                  layout.head_dim,
                  plan.max_tokens,
                  plan.max_words,
                  scale * kLog2E,
                  p,
                  candidates,
                  kept,
                  reinterpret_cast<float*>(memory),
                  reinterpret_cast<uint32_t*>(memory + plan.masks),
                  reinterpret_cast<uint32_t*>(memory + plan.tickets)};
  if (plan.max_tokens > 0) {
    const dim3 grid(static_cast<unsigned>(CeilDiv(plan.max_tokens, kEstimateThreads)),
                    layout.kv_heads, shape.num_queries);
    if (shape.group <= 4) {
      EstimateKernel<4><<<grid, kEstimateThreads, 0, stream>>>(args);
    } else {
      EstimateKernel<8><<<grid, kEstimateThreads, 0, stream>>>(args);
    }
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  const dim3 grid(layout.kv_heads * shape.group, shape.num_queries);
  const size_t weights = size_t{4} * plan.max_tokens, fixed = size_t{4} * shape.max_candidates;
  const auto fits = [](size_t bytes) {
    return bytes + kOtherSharedBytes <= CurrentDevice().block_shared_bytes;
  };
  if (fits(weights + fixed)) {
    return LaunchCut<Holds::kWeightsAndFixed>(grid, weights + fixed, args, stream);
  }
  if (fits(weights)) return LaunchCut<Holds::kWeights>(grid, weights, args, stream);
  return LaunchCut<Holds::kNothing>(grid, 0, args, stream);
}

}  // namespace winnow::kernels::cuda

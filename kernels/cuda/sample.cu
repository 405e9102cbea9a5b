// Mapping. A cluster of blocks is a row, each block of 1024 threads a part of it, each warp a run of
// ascending ids. A part is copied once from L2, where the product before has just left it, into shared
// memory; everything after works there. What the parts must agree about goes through distributed shared
// memory: each leaves its value in its own, the cluster's barrier follows, each reads all (Exchange).
//
// Cut finds where a filter ends in the order of likelihood: of counts for top-k and the most likely tokens,
// of weights for top-p. 1024 buckets, linear in the distance from the largest logit, are counted; the bucket
// in which the target is reached is divided again, now linearly in the bits of the logit, which order as
// logits do, until it is one logit: two or three rounds more. Among equals of that logit ids decide.
//
// Weights are multiples of 2^-40 in 64 bits, so every sum is exact. A bucket is two words in shared memory:
// the upper one is touched only by a carry, or by a weight above 2^-8.
#include <algorithm>
#include <cfloat>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sample.h"

namespace winnow::kernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kBuckets = kThreads;  // a thread each when they are added up
constexpr float kBucketsPerUnit =
    32;  // of the distance from the largest logit, over the temperature
constexpr int kFixedBits = 40;
constexpr int kMostParts = 8;                   // of a cluster, everywhere
constexpr size_t kOtherSharedBytes = 18 << 10;  // of a block, at most: its variables

struct Args {
  const float* logits;
  int64_t stride;
  const DeviceSampleRow* rows;
  SampledToken* results;
  float* workspace;  // [rows][kParts][part], where parts do not fit in shared memory
  int32_t vocab;
  int32_t part;  // ids of a block, a multiple of kThreads
};

// ---- what the blocks of a row share, beside cluster.cuh ----

template <int kParts>
__device__ __forceinline__ void Store64(uint64_t* shared, uint32_t part, uint64_t value) {
  if constexpr (kParts == 1) {
    *shared = value;
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(AddressIn<kParts>(shared, part)),
                 "l"(value)
                 : "memory");
#endif
  }
}
template <int kParts>
__device__ __forceinline__ uint32_t AddOne(uint32_t* shared, uint32_t part) {
  if constexpr (kParts == 1) return atomicAdd(shared, 1u);
  uint32_t before = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "r"(AddressIn<kParts>(shared, part))
               : "memory");
#endif
  return before;
}

// ---- numbers ----

// Orders as logits do, -0 and 0 the same.
__device__ __forceinline__ uint32_t KeyOf(float logit) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float LogitOf(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
constexpr uint32_t kLeastKey = 0x007fffff;     // of minus infinity
constexpr uint32_t kInfinityKey = 0xff800000;  // of infinity
constexpr uint32_t kNanKey = 0xffffffff;       // NaNs, of either sign, are given this one

// exp((logit - max) / temperature) as a multiple of 2^-40.
struct Weigher {
  float max, high, low;  // high + low = log2(e) / temperature
  __device__ Weigher(float largest, float temperature) : max(largest) {
    const double exact = 1.4426950408889634 / static_cast<double>(temperature);
    high = static_cast<float>(fmin(exact, static_cast<double>(FLT_MAX)));
    low = exact < FLT_MAX ? static_cast<float>(exact - static_cast<double>(high)) : 0.0f;
  }
  __device__ __forceinline__ uint64_t operator()(float logit) const {
    const float distance = logit - max;
    const float product = distance * high;
    if (!(product > -41.0f)) return 0;
    const float rest = __fmaf_rn(distance, high, -product) + distance * low;
    const float whole = rintf(product);
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((product - whole) + rest));
    const uint32_t bits = __float2uint_rn(power * 0x1p30f);
    const int shift = static_cast<int>(whole) + kFixedBits - 30;
    return shift >= 0 ? static_cast<uint64_t>(bits) << shift
                      : (bits + (1u << (-shift - 1))) >> -shift;
  }
};

// Of values below 2^42.
__device__ __forceinline__ uint64_t WarpSumOfWeights(uint64_t x) {
  const uint32_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x & 0x1fffff));
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 21));
  return (high << 21) + low;
}
__device__ __forceinline__ uint64_t WarpMax(uint64_t x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullMask, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// ---- a row ----

// Which tokens a filter leaves: those of larger logits than `key`, and of equals those up to `last_id`.
struct Edge {
  uint32_t key = 0;
  int32_t last_id = INT32_MAX;
  __device__ __forceinline__ bool Keeps(uint32_t of_key, int32_t id) const {
    return of_key > key || (of_key == key && id <= last_id);
  }
};

struct Variables {
  uint32_t low[2][kBuckets], high[2][kBuckets];
  uint64_t exchanged[2];
  uint64_t of_warps[kWarps];
  uint64_t before;  // the found bucket: what lies above it, and in it
  uint64_t inside;
  uint32_t bucket;
  uint32_t num_top;
  uint64_t top[kMaxTopLogprobs];  // key, and id inverted: the larger comes first
};
static_assert(sizeof(Variables) <= kOtherSharedBytes);

template <int kParts>
class Row {
 public:
  // `values`: those of this part, ids [first, first + count).
  __device__ Row(Variables& variables, float* values, int32_t first, int32_t count)
      : v_(variables),
        values_(values),
        first_(first),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    const int32_t run = (count + kThreads - 1) / kThreads * 32;
    begin_ = min(warp_ * run, count);
    end_ = min(begin_ + run, count);
  }

  // Calls visit(inside, i, logit) for the warp's ids first + i, 32 at a time; the logit of what is not
  // inside is minus infinity.
  template <typename Visit>
  __device__ __forceinline__ void Each(Visit visit) const {
#pragma unroll 4
    for (int32_t i = begin_; i < end_; i += 32) {
      const bool inside = i + lane_ < end_;
      visit(inside, i + lane_, inside ? values_[i + lane_] : -INFINITY);
    }
  }

  // The largest (or the sum) of what the threads of all parts give; the same for each of them.
  __device__ uint64_t Max(uint64_t mine) {
    return Exchange(WarpMax(mine), [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }
  __device__ uint64_t Sum(uint64_t mine) {
    return Exchange(WarpSum(mine), [](uint64_t a, uint64_t b) { return a + b; });
  }

  // The largest logit's key and, inverted, the lowest id that has it. A NaN is larger than all.
  __device__ uint64_t Largest() {
    float best = -INFINITY;
    int32_t best_id = 0;
    bool nan = false;
    Each([&](bool inside, int32_t i, float logit) {
      nan = nan || logit != logit;
      if (logit > best) {
        best = logit;
        best_id = first_ + i;
      }
    });
    return Max(nan ? Pack(kNanKey, 0) : Pack(KeyOf(best), best_id));
  }
  static __device__ uint64_t Pack(uint32_t key, int32_t id) {
    return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(id);
  }

  // The fewest tokens, of those that `all` keeps in the order of likelihood, whose measure(logit) together
  // is at least target_of(measure of all); it is at least 1. `scale`: buckets per distance from `largest`.
  // kCounts: every token measures 1, `all` keeps every token, and target_of is given 0.
  template <bool kCounts, typename Measure, typename TargetOf>
  __device__ Edge Cut(float largest, float scale, const Edge& all, Measure measure,
                      TargetOf target_of) {
    const auto bucket_of = [largest, scale](float logit) {
      return min(static_cast<uint32_t>(__float2int_rz((largest - logit) * scale)), kBuckets - 1);
    };
    ClearBuckets();
    Each([&](bool inside, int32_t i, float logit) {
      const uint32_t bucket = bucket_of(logit);
      uint64_t amount = 0;
      if constexpr (kCounts) {
        amount = inside && bucket < kBuckets - 1 ? 1 : 0;  // of the last, see below
      } else if (inside && all.Keeps(KeyOf(logit), first_ + i)) {
        amount = measure(logit);
      }
      Add(bucket, amount);
    });
    uint64_t in_bucket = SumBuckets();
    // The least likely are many: not counted one by one, but known to be more than any target.
    if (kCounts && threadIdx.x == kBuckets - 1) in_bucket = uint64_t{1} << 40;
    const uint64_t target = Find(in_bucket, 0, target_of);

    // The logits of the bucket: between the largest in it or beyond, and the smallest in it or before.
    const uint32_t found = v_.bucket;
    uint32_t low = Least(kLeastKey, KeyOf(largest),
                         [&](uint32_t key) { return bucket_of(LogitOf(key)) <= found; });
    uint32_t high =
        found == 0 ? KeyOf(largest) : Least(kLeastKey, KeyOf(largest), [&](uint32_t key) {
                                        return bucket_of(LogitOf(key)) < found;
                                      }) - 1;
    while (low < high) {
      const int bits = 32 - __clz(high - low);
      const int shift = bits > 10 ? bits - 10 : 0;
      const uint64_t above = v_.before;
      ClearBuckets();
      Each([&](bool inside, int32_t i, float logit) {
        const uint32_t key = KeyOf(logit);
        uint64_t amount = 0;
        if (inside && key >= low && key <= high && all.Keeps(key, first_ + i)) {
          amount = measure(logit);
        }
        Add((high - key) >> shift, amount);
      });
      Find(SumBuckets(), above, [target](uint64_t) { return target; });
      high -= v_.bucket << shift;
      low = max(low, high - min(high, (1u << shift) - 1));
    }
    // Of equals as many as are needed.
    Edge edge{low, all.key == low ? all.last_id : INT32_MAX};
    const uint64_t of_one = measure(LogitOf(low));
    const uint64_t needed = (target - v_.before + of_one - 1) / of_one;
    if (needed * of_one < v_.inside) {
      const Edge equals = edge;
      edge.last_id = FindInOrder(
          [&](float logit, int32_t id) -> uint64_t {
            const uint32_t key = KeyOf(logit);
            return key == low && equals.Keeps(key, id) ? 1 : 0;
          },
          [needed](uint64_t) { return needed - 1; });
    }
    return edge;
  }

  // The first id with which the sum of amount(logit, id) over ids is more than target_of(the sum of all).
  // Amounts are below 2^42.
  template <typename Amount, typename TargetOf>
  __device__ int32_t FindInOrder(Amount amount, TargetOf target_of) {
    uint64_t of_warp = 0;
    Each([&](bool inside, int32_t i, float logit) {
      if (inside) of_warp += amount(logit, first_ + i);
    });
    of_warp = WarpSum(of_warp);
    __syncthreads();
    if (lane_ == 0) v_.of_warps[warp_] = of_warp;
    __syncthreads();
    const uint64_t inclusive = WarpInclusiveScan(v_.of_warps[lane_], lane_);
    uint64_t before = __shfl_sync(kFullMask, inclusive, warp_) - of_warp;  // of this part's warps
    const uint64_t of_part = __shfl_sync(kFullMask, inclusive, 31);
    uint64_t* slot = &v_.exchanged[turn_];
    turn_ ^= 1;
    if (threadIdx.x == 0) *slot = of_part;
    MeetParts<kParts>();
    uint64_t sum = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t other = LoadFrom<kParts>(slot, part);
      if (part < static_cast<int>(PartIndex<kParts>())) before += other;
      sum += other;
    }
    const uint64_t target = target_of(sum);
    uint64_t answer = 0;
    if (before <= target && target < before + of_warp) {
      for (int32_t i = begin_; i < end_; i += 32) {
        const bool inside = i + lane_ < end_;
        const uint64_t mine = inside ? amount(values_[i + lane_], first_ + i + lane_) : 0;
        const uint64_t of_all = WarpSumOfWeights(mine);
        if (before + of_all <= target) {
          before += of_all;
          continue;
        }
        const uint64_t passed = before + WarpInclusiveScan(mine, lane_);
        const uint32_t beyond = __ballot_sync(kFullMask, passed > target);
        answer = static_cast<uint64_t>(first_ + i + __ffs(static_cast<int>(beyond)) - 1);
        break;
      }
    }
    return static_cast<int32_t>(Max(answer));
  }

  // The tokens that `edge` keeps, kMaxTopLogprobs at most, in v_.top of part 0, in any order.
  // REQUIRES: v_.num_top of part 0 is 0, and all parts know.
  __device__ void Gather(const Edge& edge) {
    Each([&](bool inside, int32_t i, float logit) {
      const uint32_t key = KeyOf(logit);
      if (inside && edge.Keeps(key, first_ + i)) {
        const uint32_t place = AddOne<kParts>(&v_.num_top, 0);
        if (place < kMaxTopLogprobs) Store64<kParts>(&v_.top[place], 0, Pack(key, first_ + i));
      }
    });
    MeetParts<kParts>();
  }

 private:
  // `of_warp` is the same for the lanes of a warp.
  template <typename Join>
  __device__ uint64_t Exchange(uint64_t of_warp, Join join) {
    __syncthreads();
    if (lane_ == 0) v_.of_warps[warp_] = of_warp;
    __syncthreads();
    uint64_t* slot = &v_.exchanged[turn_];
    turn_ ^= 1;
    if (warp_ == 0) {
      uint64_t x = v_.of_warps[lane_];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        x = join(x, __shfl_xor_sync(kFullMask, x, offset));
      }
      if (lane_ == 0) *slot = x;
    }
    MeetParts<kParts>();
    uint64_t all = LoadFrom<kParts>(slot, 0);
#pragma unroll
    for (int part = 1; part < kParts; ++part) all = join(all, LoadFrom<kParts>(slot, part));
    return all;
  }

  // Two sets of buckets take turns: while one is filled, other parts may still read the other. A set is
  // filled again only after the barrier that follows those reads.
  __device__ void ClearBuckets() {
    v_.low[turn_][threadIdx.x] = 0;
    v_.high[turn_][threadIdx.x] = 0;
    __syncthreads();
  }
  // Called by whole warps.
  __device__ __forceinline__ void Add(uint32_t bucket, uint64_t amount) {
    const uint32_t adding = __ballot_sync(kFullMask, amount != 0);
    if (adding == 0) return;
    // Where all go to one bucket, as equals do, they would wait for each other.
    const uint32_t common = __shfl_sync(kFullMask, bucket, __ffs(static_cast<int>(adding)) - 1);
    if (__all_sync(kFullMask, amount == 0 || bucket == common)) {
      amount = WarpSumOfWeights(amount);
      bucket = common;
      if (lane_ != 0) return;
    }
    if (amount == 0) return;
    const auto low = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&v_.low[turn_][bucket], low);
    const uint32_t high = static_cast<uint32_t>(amount >> 32) + (before + low < before ? 1 : 0);
    if (high != 0) atomicAdd(&v_.high[turn_][bucket], high);
  }
  // What is in bucket threadIdx.x of all parts.
  __device__ uint64_t SumBuckets() {
    const uint32_t* low = &v_.low[turn_][threadIdx.x];
    const uint32_t* high = &v_.high[turn_][threadIdx.x];
    turn_ ^= 1;
    MeetParts<kParts>();
    uint64_t sum = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      sum += static_cast<uint64_t>(LoadFrom<kParts>(high, part)) << 32;
      sum += LoadFrom<kParts>(low, part);
    }
    return sum;
  }
  // The bucket in which `above` and the buckets' sums in order reach the target: v_.bucket, .before, .inside.
  template <typename TargetOf>
  __device__ uint64_t Find(uint64_t in_bucket, uint64_t above, TargetOf target_of) {
    const uint64_t in_warp = WarpInclusiveScan(in_bucket, lane_);
    __syncthreads();
    if (lane_ == 31) v_.of_warps[warp_] = in_warp;
    __syncthreads();
    const uint64_t of_warp = v_.of_warps[lane_];
    const uint64_t warps = WarpInclusiveScan(of_warp, lane_);
    const uint64_t inclusive = above + __shfl_sync(kFullMask, warps - of_warp, warp_) + in_warp;
    const uint64_t target = target_of(__shfl_sync(kFullMask, warps, 31));
    if (inclusive >= target && inclusive - in_bucket < target) {
      v_.bucket = threadIdx.x;
      v_.before = inclusive - in_bucket;
      v_.inside = in_bucket;
    }
    __syncthreads();
    return target;
  }
  // The least key of [low, high] that is good; those above a good one are, and `high` is.
  template <typename Good>
  static __device__ uint32_t Least(uint32_t low, uint32_t high, Good good) {
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (good(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  Variables& v_;
  float* const values_;
  const int32_t first_;
  const int warp_, lane_;
  int32_t begin_, end_;  // the warp's run
  int turn_ = 0;
};

__device__ __forceinline__ SampleStatus StatusOf(uint64_t largest) {
  const auto key = static_cast<uint32_t>(largest >> 32);
  if (key == kNanKey) return SampleStatus::kNan;
  if (key == kInfinityKey) return SampleStatus::kInfinity;
  return key == kLeastKey ? SampleStatus::kNothing : SampleStatus::kOk;
}

__device__ __forceinline__ float Edited(float logit, const LogitEdit& edit,
                                        const DeviceSampleRow& row) {
  logit = __fadd_rn(logit, edit.bias);
  if (edit.generated < 0) return logit;
  logit = logit < 0 ? __fmul_rn(logit, row.repetition_penalty)
                    : __fdiv_rn(logit, row.repetition_penalty);
  if (edit.generated == 0) return logit;
  return __fsub_rn(logit,
                   __fadd_rn(row.presence_penalty,
                             __fmul_rn(row.frequency_penalty, static_cast<float>(edit.generated))));
}

template <int kParts, bool kInShared>
__global__ void __launch_bounds__(kThreads, 1) SampleKernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (kParts > 1) return;  // never launched
#endif
  __shared__ Variables v;
  extern __shared__ float4 part_memory[];
  const int32_t row_index = static_cast<int32_t>(blockIdx.x) / kParts;
  const auto part = static_cast<int32_t>(PartIndex<kParts>());
  const int32_t first = min(part * args.part, args.vocab);
  const int32_t count = min(args.part, args.vocab - first);
  float* values = kInShared ? reinterpret_cast<float*>(part_memory)
                            : args.workspace + int64_t{blockIdx.x} * args.part;
  if (threadIdx.x == 0) v.num_top = 0;
  LetNextStart();
  WaitForEarlier();

  const float* logits = args.logits + row_index * args.stride;
  const DeviceSampleRow row = args.rows[row_index];
  SampledToken& result = args.results[row_index];
  const float* from = logits + first;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll 4
    for (int32_t i = 4 * static_cast<int32_t>(threadIdx.x); i + 4 <= count; i += 4 * kThreads) {
      *reinterpret_cast<float4*>(values + i) = __ldcg(reinterpret_cast<const float4*>(from + i));
    }
    for (int32_t i = count / 4 * 4 + static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
      values[i] = __ldcg(from + i);
    }
  } else {
#pragma unroll 4
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
      values[i] = __ldcg(from + i);
    }
  }
  __syncthreads();

  Row<kParts> r(v, values, first, count);
  uint64_t largest = r.Largest();
  SampleStatus status = StatusOf(largest);
  const float raw_max = LogitOf(static_cast<uint32_t>(largest >> 32));
  double log_sum = 0;
  int32_t num_top = 0;
  const Edge everything;
  if (status == SampleStatus::kOk && row.top_logprobs >= 0) {
    const Weigher weigh(raw_max, 1.0f);
    uint64_t sum = 0;
    r.Each([&](bool inside, int32_t, float logit) { sum += inside ? weigh(logit) : 0; });
    log_sum = log(static_cast<double>(r.Sum(sum)) * 0x1p-40);
    num_top = min(min(row.top_logprobs, kMaxTopLogprobs), args.vocab);
    if (num_top > 0) {
      const auto wanted = static_cast<uint64_t>(num_top);
      r.Gather(num_top == args.vocab
                   ? everything
                   : r.template Cut<true>(
                         raw_max, kBucketsPerUnit, everything, [](float) { return uint64_t{1}; },
                         [wanted](uint64_t) { return wanted; }));
    }
  }

  if (status == SampleStatus::kOk && row.num_edits + row.num_masked > 0) {
    __syncthreads();
    for (int32_t e = static_cast<int32_t>(threadIdx.x); e < row.num_edits; e += kThreads) {
      const LogitEdit edit = row.edits[e];
      const int32_t i = edit.token - first;
      if (i >= 0 && i < count) values[i] = Edited(values[i], edit, row);
    }
    __syncthreads();
    for (int32_t e = static_cast<int32_t>(threadIdx.x); e < row.num_masked; e += kThreads) {
      const int32_t i = row.masked[e] - first;
      if (i >= 0 && i < count) values[i] = -INFINITY;
    }
    __syncthreads();
    largest = r.Largest();
    status = StatusOf(largest);
  }

  int32_t token = static_cast<int32_t>(~static_cast<uint32_t>(largest));
  if (status == SampleStatus::kOk && row.temperature > 0) {
    const float max = LogitOf(static_cast<uint32_t>(largest >> 32));
    const Weigher weigh(max, row.temperature);
    const float scale = fminf(kBucketsPerUnit / row.temperature, FLT_MAX);
    Edge edge;
    if (row.top_k > 0 && row.top_k < args.vocab) {
      const auto wanted = static_cast<uint64_t>(row.top_k);
      edge = r.template Cut<true>(
          max, scale, edge, [](float) { return uint64_t{1}; },
          [wanted](uint64_t) { return wanted; });
    }
    if (row.top_p < 1.0f) {
      const double p = row.top_p;
      edge = r.template Cut<false>(max, scale, edge, weigh, [p](uint64_t sum) {
        const auto target = static_cast<uint64_t>(ceil(p * static_cast<double>(sum)));
        return target < 1 ? 1 : target > sum ? sum : target;
      });
    }
    const auto least = static_cast<uint64_t>(ceil(static_cast<double>(row.min_p) * 0x1p40));
    const double random = row.random;
    token = r.FindInOrder(
        [&](float logit, int32_t id) -> uint64_t {
          if (!edge.Keeps(KeyOf(logit), id)) return 0;
          const uint64_t weight = weigh(logit);
          return weight >= least ? weight : 0;
        },
        [random](uint64_t sum) {
          const auto target = static_cast<uint64_t>(random * static_cast<double>(sum));
          return target < sum ? target : sum - 1;
        });
  }

  if (part == 0 && threadIdx.x < 32) {
    const auto logprob = [&](float logit) {
      return static_cast<float>(static_cast<double>(logit) - static_cast<double>(raw_max) -
                                log_sum);
    };
    const bool good = status == SampleStatus::kOk;
    if (threadIdx.x == 0) {
      result.status = status;
      result.token = good ? token : 0;
      result.logprob = good && row.top_logprobs >= 0 ? logprob(__ldcg(logits + token)) : 0.0f;
      result.num_top = good ? num_top : 0;
    }
    if (good && static_cast<int32_t>(threadIdx.x) < num_top) {
      const uint64_t mine = v.top[threadIdx.x];
      int place = 0;
      for (int32_t i = 0; i < num_top; ++i) place += v.top[i] > mine ? 1 : 0;
      result.top[place] = {static_cast<int32_t>(~static_cast<uint32_t>(mine)),
                           logprob(LogitOf(static_cast<uint32_t>(mine >> 32)))};
    }
  }
  MeetParts<kParts>();  // no part goes while another may still read from it
}

// ---- launch ----

struct Plan {
  int parts = 1;
  int32_t part = 0;
  bool in_shared = false;
  size_t shared_bytes = 0;
};
Plan MakePlan(const SampleShape& shape) {
  const DeviceTraits& traits = CurrentDevice();
  const auto with = [&](int parts) {
    Plan plan;
    plan.parts = parts;
    plan.part = static_cast<int32_t>(AlignUp(CeilDiv(shape.vocab_size, parts), kThreads));
    plan.shared_bytes = size_t{4} * plan.part;
    plan.in_shared = plan.shared_bytes + kOtherSharedBytes <= traits.block_shared_bytes;
    if (!plan.in_shared) plan.shared_bytes = 0;
    return plan;
  };
  if (!traits.hopper) return with(1);
  // As many parts as the rows leave room for, side by side.
  const Plan half = with(kMostParts / 2);
  return shape.num_rows * kMostParts > traits.multiprocessors && half.in_shared ? half
                                                                                : with(kMostParts);
}

template <int kParts, bool kInShared>
cudaError_t LaunchRows(const Plan& plan, const Args& args, int32_t num_rows, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(SampleKernel<kParts, kInShared>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(plan.shared_bytes));
  if (error != cudaSuccess) return error;
  return LaunchClusters(SampleKernel<kParts, kInShared>, num_rows, kParts, kThreads,
                        plan.shared_bytes, stream, args);
}

}  // namespace

size_t SampleWorkspaceBytes(const SampleShape& shape) {
  const Plan plan = MakePlan(shape);
  return plan.in_shared ? 0 : size_t{4} * shape.num_rows * plan.parts * plan.part;
}

cudaError_t Sample(const SampleShape& shape, const float* logits, int64_t stride,
                   const DeviceSampleRow* rows, SampledToken* results, void* workspace,
                   cudaStream_t stream) {
  // Counts of a row and its runs of ids stay below 2^31, sums of weights below 2^63.
  if (shape.num_rows < 0 || shape.num_rows > 65535 || shape.vocab_size < 1 ||
      shape.vocab_size > 1 << 22 || stride < shape.vocab_size) {
    return cudaErrorInvalidValue;
  }
  if (shape.num_rows == 0) return cudaSuccess;
  const Plan plan = MakePlan(shape);
  const Args args{logits,           stride,   rows, results, static_cast<float*>(workspace),
                  shape.vocab_size, plan.part};
  if (plan.parts == kMostParts) {
    return plan.in_shared ? LaunchRows<kMostParts, true>(plan, args, shape.num_rows, stream)
                          : LaunchRows<kMostParts, false>(plan, args, shape.num_rows, stream);
  }
  if (plan.parts == kMostParts / 2) {
    return LaunchRows<kMostParts / 2, true>(plan, args, shape.num_rows, stream);
  }
  return plan.in_shared ? LaunchRows<1, true>(plan, args, shape.num_rows, stream)
                        : LaunchRows<1, false>(plan, args, shape.num_rows, stream);
}

}  // namespace winnow::kernels::cuda

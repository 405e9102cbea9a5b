// A row of logits whose parts lie before the blocks of a cluster: where filters end, sums and
// largest values over all parts, and the most likely tokens.
//
// Cut finds where a filter ends in the order of likelihood: of counts for top-k and the most likely tokens,
// of weights for top-p. 1024 buckets, linear in the distance from the largest logit, are counted; the bucket
// in which the target is reached is divided again, now linearly in the bits of the logit, which order as
// logits do, until it is one logit: two or three rounds more. Among equals of that logit ids decide.
//
// Weights are multiples of 2^-40 in 64 bits, so every sum is exact. A bucket is two words in shared memory:
// the upper one is touched only by a carry, or by a weight above 2^-8.
//
// sample.cu includes it, and no one else.
#ifndef WINNOW_KERNELS_CUDA_SAMPLE_ROW_CUH_
#define WINNOW_KERNELS_CUDA_SAMPLE_ROW_CUH_

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/sample.h"

namespace winnow::kernels::cuda::sample {

inline constexpr int kThreads = 1024;
inline constexpr int kWarps = kThreads / 32;
inline constexpr uint32_t kBuckets = kThreads;  // a thread each when they are added up
inline constexpr float kBucketsPerUnit =
    32;  // of the distance from the largest logit, over the temperature
inline constexpr int kFixedBits = 40;

// ---- what the blocks of a row share, beside cluster.cuh ----

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

// Keys of logits (KeyOf).
inline constexpr uint32_t kLeastKey = 0x007fffff;     // of minus infinity
inline constexpr uint32_t kInfinityKey = 0xff800000;  // of infinity
inline constexpr uint32_t kNanKey = 0xffffffff;       // NaNs, of either sign, are given this one

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

// In shared memory.
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

// By all threads of all parts; each finds the same.
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
                         [&](uint32_t key) { return bucket_of(FloatOfKey(key)) <= found; });
    uint32_t high =
        found == 0 ? KeyOf(largest) : Least(kLeastKey, KeyOf(largest), [&](uint32_t key) {
                                        return bucket_of(FloatOfKey(key)) < found;
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
    const uint64_t of_one = measure(FloatOfKey(low));
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
        if (place < kMaxTopLogprobs) StoreTo<kParts>(&v_.top[place], 0, Pack(key, first_ + i));
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

}  // namespace winnow::kernels::cuda::sample

#endif  // WINNOW_KERNELS_CUDA_SAMPLE_ROW_CUH_

// Where the cut of a top-p selection lies: which weights are too light to be kept.
//
// A radix search over the bits of the weight, which order as weights do: 16 buckets to an octave, the
// found one in 1024, that one in 512, or less far where one candidate is left. A bucket is the sum of
// mantissas of one exponent, exact in two words of which a carry alone touches the upper. A part
// publishes the sums of 32 buckets each; a warp looks among those of all parts, then among the 32 buckets
// themselves: 512 bytes a head and part, where all 1024 buckets would be 8 KB. Candidates lighter than
// (1 - p) / 2n of the largest cannot be kept, because together they weigh less than what may be left out:
// they are added up in registers.
//
// top_p.cu includes it, and no one else.
#ifndef WINNOW_KERNELS_CUDA_TOP_P_CUT_CUH_
#define WINNOW_KERNELS_CUDA_TOP_P_CUT_CUH_

#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda::top_p {

inline constexpr int kThreads = 1024;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kHeads = 4;    // searched together
inline constexpr int kGroups = 32;  // of 32 buckets: a lane each
inline constexpr uint32_t kBuckets = kGroups * 32;

// A weight's key is larger for smaller weights, and weights of keys that are equal but for their low
// bits have one exponent: weights are 1 at most.
inline constexpr uint32_t kTopBits = 0x3fffffff;
inline constexpr int kLevels = 3;
// Of the key, to a bucket of a level.
__device__ constexpr int ShiftOf(int level) { return level == 0 ? 19 : level == 1 ? 9 : 0; }
inline constexpr uint32_t kNotSearched = 0x80000000;  // as first bucket: no key has it
inline constexpr int32_t kNoTies = INT32_MAX;
// Lighter weights are multiples of 2^-40 when added to this, and the heavier ones are in the first
// 1024 buckets, 64 octaves.
inline constexpr float kMostLight = 0x1p-17f, kLeastHeavy = 0x1p-60f;
// Of a list, so that a bucket's sum, and that of 32 in the smallest unit, stay below 2^53.
inline constexpr int32_t kMostTokens = 1 << 22;

// What a head keeps of a part's candidates: those whose weight has more bits than `threshold`, and of
// as many those from `first_tie` on.
struct HeadCut {
  uint32_t threshold;
  int32_t first_tie;
  uint32_t skip;  // not 0: `first_tie` is the tie that so many come before, still to be found
};
struct Search {
  double needed, above;  // above: the weight of heavier buckets than the first of this level
  uint32_t first;        // bucket: key >> shift
  uint32_t least;        // bits of weight from which on all together suffice
};

// In shared memory. Two sets take turns: while other parts may still read one, the other, which they have
// left before they came to the meeting, is cleared for the next level.
struct CutState {
  uint32_t low[2][kHeads][kBuckets], high[2][kHeads][kBuckets];
  double of_groups[2][kHeads][kGroups];
  uint64_t anchors[2][kHeads], light[2][kHeads];  // multiples of 2^-40
  uint64_t anchors_of_warps[kHeads][kWarps], light_of_warps[kHeads][kWarps];
  Search search[kHeads];
  HeadCut cut[kHeads];
};
static_assert(sizeof(CutState) % 16 == 0);

__device__ __forceinline__ uint32_t LightWeight(float weight) {
  return __float_as_uint(__fadd_rn(weight, kMostLight)) - __float_as_uint(kMostLight);
}
__device__ __forceinline__ uint32_t Mantissa(uint32_t bits) { return (bits & 0x7fffff) | 0x800000; }
// Of weights that have the exponent of `bits`: what one more of the mantissa adds.
__device__ __forceinline__ double Ulp(uint32_t bits) {
  return __longlong_as_double(static_cast<int64_t>((bits >> 23) + (1023 - 150)) << 52);
}
__device__ __forceinline__ uint32_t LeastBits(uint32_t bucket, int shift) {
  return ((kTopBits >> shift) - bucket) << shift;
}

// Over a warp, of values below 2^46.
__device__ __forceinline__ uint64_t WarpSumOfLight(uint64_t x) {
  const uint32_t low = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x & 0xfffff));
  const uint64_t high = __reduce_add_sync(kFullMask, static_cast<uint32_t>(x >> 20));
  return (high << 20) + low;
}

// Of kHeads heads, by all threads of all parts. Each part counts its weights, and all find the same cut.
// Called in this order: Clear and Begin; for each level, from 0 on, Add for every weight that counts there
// and, of level 0, AddOfWarp, then Narrow, until that says no. Then CutState::cut has it.
template <int kParts>
class CutSearch {
 public:
  __device__ CutSearch(CutState& state, float p)
      : v_(state),
        p_(p),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Before the first search: later ones find clear what the one before has left so.
  __device__ void Clear() {
    if (warp_ >= kHeads) ClearBuckets(turn_);
  }
  // With `all` nothing is searched, and every weight that is not zero is kept. `heavy`: the least weight
  // that gets a bucket. Threads have to meet before what comes next.
  __device__ void Begin(int heads, bool all, float heavy) {
    if (static_cast<int>(threadIdx.x) < kHeads) {
      const bool searched = static_cast<int>(threadIdx.x) < heads && !all;
      v_.search[threadIdx.x] = {0, 0, searched ? 0 : kNotSearched, __float_as_uint(heavy)};
      v_.cut[threadIdx.x] = {static_cast<int>(threadIdx.x) < heads && all ? 0 : kFullMask, kNoTies,
                             0};
    }
  }
  // A weight's bucket is (key >> ShiftOf(level)) - FirstBucket. It holds for a level.
  __device__ uint32_t FirstBucket(int h) const { return v_.search[h].first; }
  // A weight of each head to its bucket, if it has one.
  __device__ __forceinline__ void Add(const uint32_t (&bits)[kHeads],
                                      const uint32_t (&buckets)[kHeads]) {
    uint32_t before[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      before[h] =
          buckets[h] < kBuckets ? atomicAdd(&v_.low[turn_][h][buckets[h]], Mantissa(bits[h])) : 0;
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (before[h] + Mantissa(bits[h]) < before[h]) atomicAdd(&v_.high[turn_][h][buckets[h]], 1u);
    }
  }

  // By one lane of each warp: the warp's anchors and its weights without a bucket, in multiples of 2^-40.
  __device__ void AddOfWarp(int h, uint64_t anchors, uint64_t light) {
    v_.light_of_warps[h][warp_] = light;
    v_.anchors_of_warps[h][warp_] = anchors;
  }

  // Whether some head's cut is still to be found, among the weights of its new FirstBucket.
  __device__ __forceinline__ bool Narrow(int level) {
    __syncthreads();
    AddUp(level);
    MeetParts<kParts>();
    if (warp_ < kHeads) {
      Find(level, warp_);
    } else {
      ClearBuckets(turn_ ^ 1);
    }
    turn_ ^= 1;
    __syncthreads();
    bool searching = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) searching |= v_.search[h].first != kNotSearched;
    return searching;
  }

 private:
  // By the warps that find nothing.
  __device__ void ClearBuckets(int set) {
    auto* low = reinterpret_cast<uint4*>(v_.low[set]);
    auto* high = reinterpret_cast<uint4*>(v_.high[set]);
    for (int i = static_cast<int>(threadIdx.x) - 32 * kHeads;
         i < static_cast<int>(kHeads * kBuckets / 4); i += kThreads - 32 * kHeads) {
      low[i] = high[i] = make_uint4(0, 0, 0, 0);
    }
  }
  // What other parts read first: sums of 32 buckets, and at the first level what is in none.
  __device__ void AddUp(int level) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const uint32_t bucket = warp_ * 32 + lane_;
      const uint64_t sum =
          (static_cast<uint64_t>(v_.high[turn_][h][bucket]) << 32) + v_.low[turn_][h][bucket];
      double of_group = 0;
      if (__any_sync(kFullMask, sum != 0)) {
        of_group = WarpSum(ValueOf(sum, LeastBits(v_.search[h].first + bucket, ShiftOf(level))));
      }
      if (lane_ == 0) v_.of_groups[turn_][h][warp_] = of_group;
    }
    if (level == 0 && warp_ < kHeads) {
      const uint64_t anchors = WarpSum(v_.anchors_of_warps[warp_][lane_]);
      const uint64_t light = WarpSum(v_.light_of_warps[warp_][lane_]);
      if (lane_ == 0) {
        v_.anchors[turn_][warp_] = anchors;
        v_.light[turn_][warp_] = light;
      }
    }
  }
  __device__ __forceinline__ uint64_t SumIn(int h, uint32_t bucket, uint32_t part) const {
    const uint64_t high = LoadFrom<kParts>(&v_.high[turn_][h][bucket], part);
    return (high << 32) + LoadFrom<kParts>(&v_.low[turn_][h][bucket], part);
  }
  // Exact, as are sums of the 32 buckets of a group: below 2^53 of the smallest unit.
  static __device__ __forceinline__ double ValueOf(uint64_t sum, uint32_t bits) {
    return sum == 0 ? 0.0 : static_cast<double>(sum) * Ulp(bits);
  }

  // By one warp: in which bucket head h has what it needs. That is the next level's search, or the cut.
  __device__ void Find(int level, int h) {
    Search search = v_.search[h];
    __syncwarp();  // all lanes have read it before one writes it
    if (search.first == kNotSearched) return;
    const int shift = ShiftOf(level);
    double of_group = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      of_group += __longlong_as_double(static_cast<int64_t>(LoadFrom<kParts>(
          reinterpret_cast<const uint64_t*>(&v_.of_groups[turn_][h][lane_]), part)));
    }
    const double groups = WarpInclusiveScan(of_group, lane_);
    if (level == 0) {
      uint64_t anchors = 0, light = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        anchors += LoadFrom<kParts>(&v_.anchors[turn_][h], part);
        light += LoadFrom<kParts>(&v_.light[turn_][h], part);
      }
      const double of_anchors = static_cast<double>(anchors) * 0x1p-40;
      const double of_candidates =
          __shfl_sync(kFullMask, groups, 31) + static_cast<double>(light) * 0x1p-40;
      search.needed = static_cast<double>(p_) * (of_anchors + of_candidates) - of_anchors;
    }
    HeadCut cut{kFullMask, kNoTies, 0};
    bool found = true;
    // Where rounding says that all are not enough, all are kept.
    const uint32_t enough = __ballot_sync(kFullMask, search.above + groups >= search.needed);
    if (!(search.needed > 0)) {
      // Anchors are enough.
    } else if (enough == 0) {
      cut.threshold = search.least - 1;
    } else {
      const int group = __ffs(static_cast<int>(enough)) - 1;
      search.above += __shfl_sync(kFullMask, groups - of_group, group);
      const uint32_t bucket = group * 32 + lane_;
      uint64_t sum = 0, before = 0, mine = 0;  // before: in the parts before this one
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint64_t of_part = SumIn(h, bucket, part);
        if (part < static_cast<int>(PartIndex<kParts>())) before += of_part;
        if (part == static_cast<int>(PartIndex<kParts>())) mine = of_part;
        sum += of_part;
      }
      const uint32_t bits = LeastBits(search.first + bucket, shift);
      const double value = ValueOf(sum, bits), buckets = WarpInclusiveScan(value, lane_);
      const uint32_t reached =
          __ballot_sync(kFullMask, sum != 0 && search.above + buckets >= search.needed);
      const uint32_t filled = __ballot_sync(kFullMask, sum != 0);
      const int last = 31 - __clz(static_cast<int>(filled));
      const int at = reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : last < 0 ? 31 : last;
      // The lane of that bucket decides.
      search.above += buckets - value;
      search.least = bits;
      cut.threshold = bits - 1;
      if (reached != 0 && sum >= 2 * uint64_t{Mantissa(bits)}) {  // more than one
        if (level + 1 < kLevels) {
          search.first = (search.first + bucket) << (shift - ShiftOf(level + 1));
          found = false;
        } else {
          cut = CutTies(search, sum, before, mine);
        }
      }
      if (lane_ == at) {
        if (found) search.first = kNotSearched;
        v_.search[h] = search;
        if (found) v_.cut[h] = cut;
      }
      return;
    }
    if (lane_ == 0) {
      v_.search[h].first = kNotSearched;
      v_.cut[h] = cut;
    }
  }

  // Of those of one weight, search.least, as many as are needed, the later first.
  static __device__ HeadCut CutTies(const Search& search, uint64_t sum, uint64_t before,
                                    uint64_t mine) {
    const uint32_t bits = search.least, mantissa = Mantissa(bits);
    const double tie = __uint_as_float(bits);
    const auto ties = static_cast<uint32_t>(sum / mantissa);
    auto taken = static_cast<uint32_t>(
        fmax(0.0, fmin(ceil((search.needed - search.above) / tie), static_cast<double>(ties))));
    if (taken > 1 && search.above + (taken - 1) * tie >= search.needed) --taken;
    if (taken < ties && search.above + taken * tie < search.needed) ++taken;
    const uint32_t skip = ties - taken, skipped = static_cast<uint32_t>(before / mantissa);
    if (skip <= skipped) return {bits, 0, 0};
    if (skip - skipped >= static_cast<uint32_t>(mine / mantissa)) return {bits, kNoTies, 0};
    return {bits, kNoTies, skip - skipped};
  }

  CutState& v_;
  const float p_;
  const int warp_, lane_;
  int turn_ = 0;
};

}  // namespace winnow::kernels::cuda::top_p

#endif  // WINNOW_KERNELS_CUDA_TOP_P_CUT_CUH_

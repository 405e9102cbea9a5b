// Mapping. A cluster of blocks is one KV head of one query, each block of 1024 threads a part of its
// candidates and of its anchors; a warp takes 16 of them at a time. Logits stay in shared memory, those of
// four heads beside each other, and become weights there; larger groups take their heads four by four and
// gather what they keep in a bit per candidate. Parts read what the others found through distributed
// shared memory (cluster.cuh), and each looks for the cut by itself, so a step of the search is one
// meeting. Where a part does not fit in shared memory (some 9,800 candidates on Hopper, 78,000 a head), its
// logits lie in the workspace; where there are no clusters, there is one part.
//
// Estimate: the matrix instruction of 8-bit integers. A word of a key is two of its operands after two
// masks: the low four bits of the bytes are even channels, the high ones odd. A query head is a
// fixed-point number of 31 bits, four signed digits of 8; four heads of four digits are the columns of two
// operands, and a lane ends up with all digits of one head. The sums are exact, and their accumulators start
// as the bits of 1.5 * 2^23, so that they end as floats. A multiply-add per head, channel and thread was
// 8 instructions for half a byte of key.
//
// Cut: top_p_cut.cuh.
//
// What was tried and lost (H200, 8 heads, G 4, d 128): one launch for the logits and one for the cut, a
// block a query head: 15 rounds of three sums over all candidates took 24.6, 45.5 and 126 us in all for
// 2,048, 8,192 and 32,768 of them, 30 rounds of one sum in double 62 us for 8,192; there the union made
// from the group's logits, 512 candidates at a time, was 20 us. Now it is 18.5, 23.6 and 38.4; keys of two
// tiles on their way 18.8, 25.4 and 44.8, as that spills.
#include <algorithm>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/top_p.h"
#include "kernels/cuda/top_p_cut.cuh"

namespace winnow::kernels::cuda {
namespace {

using namespace top_p;  // NOLINT(google-build-using-namespace): one kernel in two files

constexpr int kMostParts = 8;                    // of a cluster, everywhere
constexpr int32_t kOnePartCandidates = 1024;     // up to which parts do not pay (a guess)
constexpr int32_t kTile = 16;                    // keys of one matrix operand
constexpr float kAccumulatorZero = 12582912.0f;  // 1.5 * 2^23

struct Args {
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  const uint8_t* int4_keys;
  FastDivider block_tokens;
  int64_t key_bytes;
  int32_t kv_heads, group, head_dim, unused;
  float scale_log2, p;
  Selection candidates, kept;
  int32_t part_items, part_words;  // at most
  // [lists][parts] what a Pruner holds, where that does not fit in shared memory.
  std::byte* workspace;
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

constexpr int kMostSlices = 8;  // of 32 channels

struct alignas(16) Variables {
  CutState search;
  uint32_t max[2][kHeads];  // bits of a float; two sets take turns, as in the search
  uint4 q[kMostSlices]
         [32];  // [32 channels] the lanes' operands: digits 0 and 1 even, odd, digits 2 and 3
  float q_sums[kHeads], q_units[kHeads];
  float max_of_warps[kHeads][kWarps];
  uint32_t scan[kWarps];
  uint32_t kept;
};

__device__ __forceinline__ float Weight(float logit, float max) {
  const float weight = exp2f(logit - max);
  return weight >= 0x1p-126f ? weight : 0.0f;  // NaN is zero
}
template <int kParts>
class Pruner {
 public:
  // items [part_items], words [part_words] twice. Candidates come first, then anchors.
  __device__ Pruner(const Args& args, Variables& variables, std::byte* memory)
      : args_(args),
        v_(variables),
        search_(variables.search, args.p),
        items_(reinterpret_cast<uint4*>(memory)),
        wanted_(reinterpret_cast<uint32_t*>(items_ + args.part_items)),
        places_(wanted_ + args.part_words),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        all_candidates_(args.candidates.counts[List()]),
        all_anchors_(Anchors(Query()).count) {
    const auto part = static_cast<int32_t>(PartIndex<kParts>());
    const int32_t candidates = ((all_candidates_ + kParts - 1) / kParts + 31) / 32 * 32;
    const int32_t anchors = (all_anchors_ + kParts - 1) / kParts;
    first_ = min(part * candidates, all_candidates_);
    candidates_ = min(candidates, all_candidates_ - first_);
    first_anchor_ = min(part * anchors, all_anchors_);
    items_count_ = candidates_ + min(anchors, all_anchors_ - first_anchor_);
  }

  __device__ void Prune() {
    if (all_candidates_ <= 0) {
      if (PartIndex<kParts>() == 0 && threadIdx.x == 0) args_.kept.counts[List()] = 0;
      return;
    }
    search_.Clear();
    for (int32_t first = 0; first < args_.group; first += kHeads) {
      heads_ = min(args_.group - first, kHeads);
      __syncthreads();
      FindRows();
      if (warp_ < kHeads) LoadQuery(first + warp_, warp_);
      __syncthreads();
      Estimate(first / kHeads % 2);
      Cut(first / kHeads % 2);
      Mark(first == 0);
    }
    Write();
  }

 private:
  // Asked for where needed, rather than held in registers.
  __device__ int32_t List() const { return static_cast<int32_t>(blockIdx.x) / kParts; }
  __device__ int32_t KvHead() const { return List() % args_.kv_heads; }
  __device__ const DeviceQuery& Query() const { return args_.queries[List() / args_.kv_heads]; }
  __device__ const int32_t* Tokens() const {
    return args_.candidates.tokens + int64_t{List()} * args_.candidates.capacity + first_;
  }

  // Rows of the pool, in the place of the first head's logits. Few enough that 32 bits name one.
  __device__ void FindRows() {
    constexpr int kAtOnce = 4;
    const Anchors anchors(Query());
    const int32_t* candidates = Tokens();
    const int32_t* block_table = Query().block_table;
    const int32_t kv_head = KvHead();
    for (int32_t base = threadIdx.x; base < items_count_; base += kAtOnce * kThreads) {
      int32_t token[kAtOnce];
      uint32_t row[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t i = base + j * kThreads;
        token[j] = i < candidates_    ? candidates[i]
                   : i < items_count_ ? anchors[first_anchor_ + i - candidates_]
                                      : 0;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t block = args_.block_tokens.Divide(token[j]);
        const auto tokens = static_cast<uint32_t>(args_.block_tokens.divisor());
        row[j] = (static_cast<uint32_t>(block_table[block]) * args_.kv_heads + kv_head) * tokens +
                 (token[j] - block * tokens);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t i = base + j * kThreads;
        if (i < items_count_) items_[i].x = row[j];
      }
    }
  }

  // By one warp: head `head` of the group becomes digits in the places of head h.
  __device__ void LoadQuery(int32_t head, int h) {
    float x[kMostSlices], sum = 0, most = 0;
#pragma unroll
    for (int j = 0; j < kMostSlices; ++j) {
      const int32_t c = j * 32 + lane_;
      x[j] = head < args_.group && c < args_.head_dim
                 ? args_.q[Query().row * args_.q_stride +
                           (int64_t{KvHead()} * args_.group + head) * args_.head_dim + c]
                 : 0.0f;
      sum += x[j];
      most = fmaxf(most, fabsf(x[j]));
    }
    sum = WarpSum(sum);
    most = WarpMax(most);
    // In units of which the largest is below 2^30; of a query of 2^-87 and less nothing is left.
    const uint32_t exponent = max(__float_as_uint(most) >> 23, 40u);
    const float per_unit = __uint_as_float((283 - exponent) << 23);
    if (lane_ == 0) {
      v_.q_sums[h] = sum;
      v_.q_units[h] = __uint_as_float((exponent - 29) << 23);
    }
    auto* bytes = reinterpret_cast<int8_t*>(v_.q);
#pragma unroll
    for (int j = 0; j < kMostSlices; ++j) {
      if (32 * j >= args_.head_dim) break;
      const int32_t c = j * 32 + lane_, word = c / 8;
      int32_t rest = __float2int_rn(x[j] * per_unit);
#pragma unroll
      for (int digit = 0; digit < 4; ++digit) {
        const auto value = static_cast<int8_t>(rest);
        rest = (rest - value) >> 8;
        const int32_t lane = (2 * h + digit % 2) * 4 + word % 4;
        bytes[((word / 4 * 32 + lane) * 4 + digit / 2 * 2 + c % 2) * 4 + c % 8 / 2] = value;
      }
    }
  }

  // The logits of all items, and the largest of each head over all parts: v_.max[set].
  __device__ void Estimate(int set) {
    const int32_t words = args_.head_dim / 8, tiles = (items_count_ + kTile - 1) / kTile;
    const int h = lane_ % 4;
    const float q_sum = v_.q_sums[h], q_unit = v_.q_units[h];
    auto* logits = reinterpret_cast<float*>(items_);
    float most = -INFINITY;
    for (int32_t tile = warp_; tile < tiles; tile += kWarps) {
      const int32_t first = tile * kTile;
      // A lane's share of 16 keys: words of two, every fourth.
      uint32_t key_words[2][kMostSlices], scale_zero[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t i = min(first + lane_ / 4 + 8 * r, items_count_ - 1);
        const auto* key = reinterpret_cast<const uint32_t*>(
            args_.int4_keys + static_cast<int64_t>(items_[i].x) * args_.key_bytes);
#pragma unroll
        for (int s = 0; s < kMostSlices; ++s) {
          const int32_t w = 4 * s + h;
          key_words[r][s] = w < words ? __ldg(key + w) : 0;
        }
        scale_zero[r] = __ldg(key + words);
      }
      // Rows have been read where logits come to lie.
      __syncwarp();
      int32_t lower[4], upper[4];  // digits 0 and 1 of a key, of the other; digits 2 and 3
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        lower[c] = upper[c] = static_cast<int32_t>(__float_as_uint(kAccumulatorZero));
      }
#pragma unroll
      for (int s = 0; s < kMostSlices; ++s) {
        if (4 * s >= words) break;
        const uint32_t a = key_words[0][s], b = key_words[1][s];
        const uint32_t codes[4] = {a & 0x0f0f0f0fu, b & 0x0f0f0f0fu, a >> 4 & 0x0f0f0f0fu,
                                   b >> 4 & 0x0f0f0f0fu};
        const uint4 q = v_.q[s][lane_];
        MultiplyAdd16x8x32(lower, codes, q.x, q.y);
        MultiplyAdd16x8x32(upper, codes, q.z, q.w);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto digit = [](int32_t accumulator) {
          return __int_as_float(accumulator) - kAccumulatorZero;
        };
        const float dot =
            __fmaf_rn(__fmaf_rn(__fmaf_rn(digit(upper[2 * r + 1]), 256.0f, digit(upper[2 * r])),
                                256.0f, digit(lower[2 * r + 1])),
                      256.0f, digit(lower[2 * r]));
        const float logit = args_.scale_log2 * __fmaf_rn(WidenHigh(scale_zero[r]), q_sum,
                                                         WidenLow(scale_zero[r]) * (dot * q_unit));
        const int32_t i = first + lane_ / 4 + 8 * r;
        if (i < items_count_) {
          logits[4 * i + h] = logit;
          most = fmaxf(most, logit);
        }
      }
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kFullMask, most, offset));
    }
    if (lane_ < kHeads) v_.max_of_warps[lane_][warp_] = most;
    __syncthreads();
    if (warp_ < kHeads) {
      most = WarpMax(v_.max_of_warps[warp_][lane_]);
      if (lane_ == 0) v_.max[set][warp_] = __float_as_uint(most);
    }
    MeetParts<kParts>();
  }

  // v_.search.cut of every head.
  __device__ void Cut(int set) {
    float max[kHeads];
    {
      float most = __uint_as_float(LoadFrom<kParts>(
          &v_.max[set][lane_ % kHeads], static_cast<uint32_t>(lane_) / kHeads % kParts));
#pragma unroll
      for (int offset = kHeads; offset < 32; offset *= 2) {
        most = fmaxf(most, __shfl_xor_sync(kFullMask, most, offset));
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) max[h] = __shfl_sync(kFullMask, most, h);
    }
    const float share =
        (1.0f - args_.p) * 0.5f / static_cast<float>(all_anchors_ + all_candidates_);
    const float heavy = fmaxf(fminf(share, kMostLight), kLeastHeavy);
    const bool all = args_.p >= 1;
    search_.Begin(heads_, all, heavy);
    __syncthreads();
#pragma unroll 1
    for (int level = 0; level < kLevels; ++level) {
      if (level == 0) {
        Weigh(max, heavy);
        if (all) break;
      } else {
        Count(ShiftOf(level));
      }
      if (!search_.Narrow(level)) break;
    }
    __syncthreads();
    for (int h = 0; h < heads_; ++h) {
      if (v_.search.cut[h].skip != 0) FindFirstTie(h);
    }
  }

  // Logits become weights, and the heavy ones are counted.
  __device__ void Weigh(const float (&max)[kHeads], float heavy) {
    uint64_t of_anchors[kHeads] = {}, light[kHeads] = {};
    const auto weigh = [&](int32_t i, uint32_t(&bits)[kHeads]) {
      const uint4 logits = items_[i];
      const uint32_t of_heads[kHeads] = {logits.x, logits.y, logits.z, logits.w};
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        bits[h] = h < heads_ ? __float_as_uint(Weight(__uint_as_float(of_heads[h]), max[h])) : 0;
      }
    };
    for (int32_t i = threadIdx.x; i < candidates_; i += kThreads) {
      uint32_t bits[kHeads];
      weigh(i, bits);
      items_[i] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
      uint32_t buckets[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = __uint_as_float(bits[h]);
        const bool is_heavy = weight >= heavy;
        buckets[h] = is_heavy ? (kTopBits ^ bits[h]) >> ShiftOf(0) : kBuckets;
        light[h] += is_heavy ? 0 : LightWeight(weight);
      }
      search_.Add(bits, buckets);
    }
    for (int32_t i = candidates_ + static_cast<int32_t>(threadIdx.x); i < items_count_;
         i += kThreads) {
      uint32_t bits[kHeads];
      weigh(i, bits);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        of_anchors[h] += __float2ull_rn(__uint_as_float(bits[h]) * 0x1p40f);
      }
    }
    const bool has_anchors = warp_ * 32 < items_count_ - candidates_;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const uint64_t sum = WarpSumOfLight(light[h]);
      const uint64_t anchors = has_anchors ? WarpSum(of_anchors[h]) : 0;
      if (lane_ == 0) search_.AddOfWarp(h, anchors, sum);
    }
  }
  // The buckets of a level below the first. Those beyond the found one may be counted, too: they are lighter.
  __device__ void Count(int shift) {
    uint32_t first[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) first[h] = search_.FirstBucket(h);
    for (int32_t i = threadIdx.x; i < candidates_; i += kThreads) {
      const uint4 weights = items_[i];
      const uint32_t bits[kHeads] = {weights.x, weights.y, weights.z, weights.w};
      uint32_t buckets[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) buckets[h] = ((kTopBits ^ bits[h]) >> shift) - first[h];
      search_.Add(bits, buckets);
    }
  }

  // By the whole part, whose ties the cut goes through. A thread's candidates are adjacent here.
  __device__ void FindFirstTie(int h) {
    const uint32_t threshold = v_.search.cut[h].threshold, skip = v_.search.cut[h].skip;
    const auto* bits = reinterpret_cast<const uint32_t*>(items_) + h;
    const int32_t per_thread = (candidates_ + kThreads - 1) / kThreads;
    const int32_t first = min(static_cast<int32_t>(threadIdx.x) * per_thread, candidates_);
    const int32_t last = min(first + per_thread, candidates_);
    uint32_t ties = 0, all_ties;
    for (int32_t i = first; i < last; ++i) ties += bits[4 * i] == threshold;
    uint32_t rank = BlockExclusiveScan<kWarps>(ties, v_.scan, &all_ties);
    if (rank <= skip && skip < rank + ties) {
      for (int32_t i = first; i < last; ++i) {
        if (bits[4 * i] == threshold && rank++ == skip) v_.search.cut[h].first_tie = i;
      }
    }
    __syncthreads();
  }

  // Which candidates the heads of this round keep, beside those that others kept before.
  __device__ void Mark(bool first_round) {
    HeadCut cut[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) cut[h] = v_.search.cut[h];
    const int32_t words = (candidates_ + 31) / 32;
#pragma unroll 2
    for (int32_t word = warp_; word < words; word += kWarps) {
      const int32_t i = word * 32 + lane_;
      bool wanted = false;
      if (i < candidates_) {
        const uint4 weights = items_[i];
        const uint32_t bits[kHeads] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          wanted |=
              bits[h] > cut[h].threshold || (bits[h] == cut[h].threshold && i >= cut[h].first_tie);
        }
      }
      const uint32_t mask = __ballot_sync(kFullMask, wanted);
      if (lane_ == 0) wanted_[word] = first_round ? mask : wanted_[word] | mask;
    }
  }

  // `kept` may be where the candidates are: the tokens of all parts are read before any is written.
  __device__ void Write() {
    __syncthreads();
    const int32_t words = (candidates_ + 31) / 32;
    uint32_t number = 0, of_pass;
    for (int32_t pass = 0; pass < words; pass += kThreads) {
      const int32_t word = pass + static_cast<int32_t>(threadIdx.x);
      const uint32_t mine = word < words ? __popc(wanted_[word]) : 0;
      const uint32_t before = BlockExclusiveScan<kWarps>(mine, v_.scan, &of_pass);
      if (word < words) places_[word] = number + before;
      number += of_pass;
    }
    if (threadIdx.x == 0) v_.kept = number;
    __syncthreads();
    const int32_t* tokens = Tokens();
    auto* staged = reinterpret_cast<int32_t*>(items_);
#pragma unroll 4
    for (int32_t word = warp_; word < words; word += kWarps) {
      const uint32_t mask = wanted_[word];
      if ((mask >> lane_ & 1) == 0) continue;
      staged[places_[word] + __popc(mask & ((1u << lane_) - 1))] = tokens[word * 32 + lane_];
    }
    MeetParts<kParts>();
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t of_part = LoadFrom<kParts>(&v_.kept, part);
      if (part < static_cast<int>(PartIndex<kParts>())) before += of_part;
      all += of_part;
    }
    int32_t* kept = args_.kept.tokens + int64_t{List()} * args_.kept.capacity + before;
    for (uint32_t i = threadIdx.x; i < number; i += kThreads) kept[i] = staged[i];
    if (PartIndex<kParts>() == 0 && threadIdx.x == 0) {
      args_.kept.counts[List()] = static_cast<int32_t>(all);
    }
    MeetParts<kParts>();  // no part goes while another may still read from it
  }

  const Args& args_;
  Variables& v_;
  CutSearch<kParts> search_;
  uint4* const items_;      // rows, then logits, then bits of weights, of four heads
  uint32_t* const wanted_;  // a bit per candidate
  uint32_t* const places_;  // of a word's first kept candidate
  const int warp_, lane_;
  const int32_t all_candidates_, all_anchors_;
  int32_t first_, candidates_, first_anchor_, items_count_;  // of this part
  int32_t heads_ = 0;
};

template <int kParts, bool kInShared>
__global__ void __launch_bounds__(kThreads, 1) PruneKernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (kParts > 1) return;  // never launched
#endif
  extern __shared__ uint4 shared[];
  LetNextStart();
  WaitForEarlier();
  auto* memory = reinterpret_cast<std::byte*>(shared);
  std::byte* items = kInShared
                         ? memory + sizeof(Variables)
                         : args.workspace + int64_t{blockIdx.x} * (int64_t{args.part_items} * 16 +
                                                                   int64_t{args.part_words} * 8);
  Pruner<kParts>(args, *reinterpret_cast<Variables*>(memory), items).Prune();
}

struct Plan {
  int parts = 1;
  int32_t part_items = 0, part_words = 0;
  bool in_shared = false;
  size_t shared_bytes = 0, workspace_bytes = 0;
};
Plan MakePlan(const TopPShape& shape) {
  const DeviceTraits& traits = CurrentDevice();
  Plan plan;
  plan.parts = traits.hopper && shape.max_candidates > kOnePartCandidates ? kMostParts : 1;
  plan.part_words =
      static_cast<int32_t>(AlignUp(CeilDiv(CeilDiv(shape.max_candidates, plan.parts), 32), 2));
  plan.part_items =
      static_cast<int32_t>(plan.part_words * 32 + CeilDiv(shape.max_anchors, plan.parts));
  const size_t items = size_t{16} * plan.part_items + size_t{8} * plan.part_words;
  plan.in_shared = sizeof(Variables) + items <= traits.block_shared_bytes;
  plan.shared_bytes = sizeof(Variables) + (plan.in_shared ? items : 0);
  if (!plan.in_shared) {
    plan.workspace_bytes = items * plan.parts * shape.num_queries * shape.layout.kv_heads;
  }
  return plan;
}

template <int kParts, bool kInShared>
cudaError_t LaunchLists(const Plan& plan, const Args& args, int32_t lists, Stream stream) {
  return LaunchClusters(PruneKernel<kParts, kInShared>, lists, kParts, kThreads, plan.shared_bytes,
                        stream, args);
}

}  // namespace

size_t TopPWorkspaceBytes(const TopPShape& shape) { return MakePlan(shape).workspace_bytes; }

cudaError_t PruneSelection(const TopPShape& shape, const float* q, int64_t q_stride,
                           const DeviceQuery* queries, const void* int4_keys, float scale, float p,
                           const Selection& candidates, const Selection& kept, void* workspace,
                           Stream stream) {
  const KvLayout& layout = shape.layout;
  if (layout.head_dim % 8 != 0 || layout.head_dim < 8 || layout.head_dim > 32 * kMostSlices ||
      shape.group < 1 || shape.num_queries < 0 || shape.num_queries > 65535 ||
      layout.kv_heads < 1 || layout.kv_heads > 65535 ||
      shape.num_queries * int64_t{layout.kv_heads} > INT32_MAX / 8 || shape.max_anchors < 0 ||
      shape.max_anchors > kMostTokens || shape.max_candidates < 0 ||
      shape.max_candidates > kMostTokens || candidates.kv_heads != layout.kv_heads ||
      kept.kv_heads != layout.kv_heads) {
    return cudaErrorInvalidValue;
  }
  const Plan plan = MakePlan(shape);
  if (shape.num_queries == 0) return cudaSuccess;
  const Args args{q,
                  q_stride,
                  queries,
                  static_cast<const uint8_t*>(int4_keys),
                  FastDivider(layout.block_tokens),
                  static_cast<int64_t>(Int4KeyBytes(layout.head_dim)),
                  layout.kv_heads,
                  shape.group,
                  layout.head_dim,
                  0,
                  scale * kLog2E,
                  p,
                  candidates,
                  kept,
                  plan.part_items,
                  plan.part_words,
                  static_cast<std::byte*>(workspace)};
  const int32_t lists = shape.num_queries * layout.kv_heads;
  if (plan.parts == kMostParts) {
    return plan.in_shared ? LaunchLists<kMostParts, true>(plan, args, lists, stream)
                          : LaunchLists<kMostParts, false>(plan, args, lists, stream);
  }
  return plan.in_shared ? LaunchLists<1, true>(plan, args, lists, stream)
                        : LaunchLists<1, false>(plan, args, lists, stream);
}

}  // namespace winnow::kernels::cuda

// Re-ranking of candidates by both codes (kernels/transform_code.h), in the place where they lie.
//
// Prepare makes the coefficients of both codes. Then a row, one query and KV head, has two kernels. In the first a block has
// a part of its candidates: their logits by both codes, and the part's peak and sum of the first code's masses. Codes of
// candidates are scattered, and a thread reads its words one by one, so that this takes nearly all of the time and as many
// multiprocessors as there are. In the second a block has the row, a thread every 512th candidate: weights and their sum;
// keys, which are counted in shared memory by their upper 9 bits. The lower 7 bits of those in the cut's bin follow, and
// candidates are compacted in order. Logits and keys lie in the workspace, because a row may have any number of candidates.
#include <cstddef>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transform_code.h"
#include "kernels/cuda/transform_select_parts.cuh"
#include "kernels/transform_code.h"

namespace winnow::kernels::cuda {
namespace {

using masses::Exp2;
using masses::FloatOf;
using masses::kCoarseBins;
using masses::kFineBins;
using masses::kFineBits;
using masses::kIntegerBits;
using masses::PreparedQuery;

constexpr int kLogitThreads = 128;  // of a part, which has as many candidates
constexpr int kLogitWarps = kLogitThreads / 32;
constexpr int kRerankThreads = 512;
constexpr int kRerankWarps = kRerankThreads / 32;
static_assert(kRerankWarps >= kTransformGroupMax);

int32_t PartsOf(int32_t candidates) { return (candidates + kLogitThreads - 1) / kLogitThreads; }

// Codes as a block reads them.
struct CodePool {
  const DeviceTransformHead* heads = nullptr;
  const uint32_t* codes = nullptr;
  int64_t block_words = 0, head_words = 0;
  const PreparedQuery* prepared = nullptr;  // [rows][group]
  int32_t words = 0, unused = 0;
};

struct RerankArgs {
  CodePool first, residual;
  const DeviceQuery* queries;
  FastDivider block_tokens;
  MassScales scales;
  Selection selection;
  float* logits;           // [rows][group][capacity]
  uint16_t* keys;          // [rows][capacity]
  float* part_peaks;       // [rows][parts][group]
  long long* part_masses;  // the same
  int32_t kv_heads, group;
  int32_t parts, unused = 0;  // of a row of `capacity` candidates
};

// Dots of a token's code with the queries of a row.
template <int kGroup>
__device__ __forceinline__ void AddDots(const CodePool& pool, int32_t head, int32_t block,
                                        int32_t at, const uint32_t (*coefs)[kGroup],
                                        int32_t (&dots)[kGroup]) {
  const DeviceTransformHead& of_head = pool.heads[head];
  const uint32_t* code = pool.codes + block * pool.block_words + head * pool.head_words +
                         int64_t{at / kCodeTileTokens} * kCodeTileTokens * pool.words +
                         at % kCodeTileTokens;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) dots[g] = 0;
  for (int32_t w = 0; w < pool.words; ++w) {
    const uint32_t word = code[w * kCodeTileTokens];
    for (int32_t f = of_head.word_fields[w]; f < of_head.word_fields[w + 1]; ++f) {
      const DeviceTransformHead::Field field = of_head.fields[f];
      const uint32_t bytes = __funnelshift_r(word, word, field.rotate) & field.mask;
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(dots[g]) : "r"(bytes), "r"(coefs[field.quad][g]));
      }
    }
  }
}

// The place of the k-th largest of the counts, counted from the top: the bin, and how many lie above it. A thread has a bin
// at most. REQUIRES: the counts add up to k or more, k > 0. All threads get it.
template <int kBins>
__device__ uint2 FindCut(const uint32_t* counts, uint32_t k, uint32_t* warp_sums, uint2* found) {
  static_assert(kBins <= kRerankThreads);
  const int32_t bin = kBins - 1 - static_cast<int32_t>(threadIdx.x);
  const uint32_t mine = bin >= 0 ? counts[bin] : 0;
  uint32_t total;
  const uint32_t above = BlockExclusiveScan<kRerankWarps>(mine, warp_sums, &total);
  if (above < k && k <= above + mine) *found = make_uint2(static_cast<uint32_t>(bin), above);
  __syncthreads();
  return *found;
}

template <int kGroup>
__global__ void __launch_bounds__(kLogitThreads)
    LogitKernel(const __grid_constant__ RerankArgs args) {
  __shared__ uint32_t coefs[2][kTransformQuadsMax][kGroup];
  __shared__ float a[2][kGroup], b[2][kGroup], references[kGroup];
  __shared__ float warp_peaks[kLogitWarps][kGroup];
  __shared__ long long warp_masses[kLogitWarps][kGroup];
  const auto row = static_cast<int32_t>(blockIdx.x), part = static_cast<int32_t>(blockIdx.y);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t head = row % args.kv_heads, group = args.group;
  LetNextStart();
  WaitForEarlier();
  const int32_t count = args.selection.counts[row];
  if (part * kLogitThreads >= count) return;
  const int64_t first_head = int64_t{row} * group;
  const CodePool* const pools[2] = {&args.first, &args.residual};
  for (int32_t i = thread; i < 2 * kTransformQuadsMax * kGroup; i += kLogitThreads) {
    const int32_t code = i / (kTransformQuadsMax * kGroup), g = i % kGroup;
    const int32_t quad = i / kGroup % kTransformQuadsMax;
    coefs[code][quad][g] = g < group ? pools[code]->prepared[first_head + g].coef[quad] : 0;
  }
  if (thread < 2 * kGroup) {
    const int32_t code = thread / kGroup, g = thread % kGroup;
    const bool has = g < group;
    a[code][g] = has ? pools[code]->prepared[first_head + g].a : 0;
    b[code][g] = has ? pools[code]->prepared[first_head + g].b : 0;
  }
  if (thread < kGroup) {
    references[thread] = thread < group ? args.scales.references[first_head + thread] : 0;
  }
  __syncthreads();
  float peaks[kGroup];
  long long of_first[kGroup];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    peaks[g] = references[g];
    of_first[g] = 0;
  }
  if (const int32_t j = part * kLogitThreads + thread; j < count) {
    const int64_t capacity = args.selection.capacity;
    float* const logits = args.logits + int64_t{row} * group * capacity;
    const int32_t token = args.selection.tokens[row * capacity + j];
    const int32_t in_table = args.block_tokens.Divide(token);
    const int32_t at = token - in_table * args.block_tokens.divisor();
    const int32_t block = args.queries[row / args.kv_heads].block_table[in_table];
    int32_t dots[kGroup];
    float both[kGroup];
    AddDots<kGroup>(args.first, head, block, at, coefs[0], dots);
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      both[g] = __fmaf_rn(a[0][g], FloatOf(dots[g] + kIntegerBits), b[0][g]);
      of_first[g] =
          __float2ll_rz(__fmul_rn(Exp2(fminf(__fsub_rn(both[g], references[g]), 0.0f)), 0x1p26f));
    }
    AddDots<kGroup>(args.residual, head, block, at, coefs[1], dots);
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      both[g] = __fadd_rn(both[g], __fmaf_rn(a[1][g], FloatOf(dots[g] + kIntegerBits), b[1][g]));
      peaks[g] = fmaxf(peaks[g], both[g]);
      if (g < group) logits[g * capacity + j] = both[g];
    }
  }
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const float peak = WarpMax(peaks[g]);
    const long long sum = WarpSum(of_first[g]);
    if (thread % 32 == 0) {
      warp_peaks[thread / 32][g] = peak;
      warp_masses[thread / 32][g] = sum;
    }
  }
  __syncthreads();
  if (thread < group) {
    float peak = warp_peaks[0][thread];
    long long sum = warp_masses[0][thread];
#pragma unroll
    for (int w = 1; w < kLogitWarps; ++w) {
      peak = fmaxf(peak, warp_peaks[w][thread]);
      sum += warp_masses[w][thread];
    }
    const int64_t to = (int64_t{row} * args.parts + part) * group + thread;
    args.part_peaks[to] = peak;
    args.part_masses[to] = sum;
  }
}

template <int kGroup>
__global__ void __launch_bounds__(kRerankThreads)
    RerankKernel(const __grid_constant__ RerankArgs args) {
  __shared__ float references[kGroup], inverses[kGroup];
  __shared__ long long warp_masses[kRerankWarps][kGroup];
  __shared__ long long rests[kGroup];
  __shared__ uint32_t coarse[kCoarseBins], fine[kFineBins];
  __shared__ uint32_t warp_sums[kRerankWarps];
  __shared__ uint2 found;
  static_assert(kCoarseBins <= kRerankThreads);
  const auto row = static_cast<int32_t>(blockIdx.x), thread = static_cast<int32_t>(threadIdx.x);
  const int32_t group = args.group;
  const int32_t lane = thread % 32, warp = thread / 32;
  LetNextStart();
  WaitForEarlier();
  const DeviceQuery query = args.queries[row / args.kv_heads];
  const int32_t count = args.selection.counts[row];
  int32_t* const tokens = args.selection.tokens + int64_t{row} * args.selection.capacity;
  float* const logits = args.logits + int64_t{row} * group * args.selection.capacity;
  uint16_t* const keys = args.keys + int64_t{row} * args.selection.capacity;
  const int64_t first_head = int64_t{row} * group;
  if (thread < kCoarseBins) coarse[thread] = 0;
  if (thread < kFineBins) fine[thread] = 0;
  // A warp has a head: all parts' peaks, and what they leave of the selection's denominator.
  if (warp < group) {
    const float reference = args.scales.references[first_head + warp];
    float peak = reference;
    long long sum = 0;
    const int64_t first_part = int64_t{row} * args.parts * group + warp;
    for (int32_t part = lane; part * kLogitThreads < count; part += 32) {
      peak = fmaxf(peak, args.part_peaks[first_part + int64_t{part} * group]);
      sum += args.part_masses[first_part + int64_t{part} * group];
    }
    peak = WarpMax(peak);
    sum = WarpSum(sum);
    if (lane == 0) {
      const long long rest =
          __float2ll_rz(__fdiv_rn(0x1p26f, args.scales.inverses[first_head + warp])) - sum;
      const float share = Exp2(__fsub_rn(reference, peak));
      rests[warp] = __double2ll_rz(
          __dmul_rn(__ll2double_rn(rest < 0 ? 0 : rest), static_cast<double>(share)));
      references[warp] = peak;
    }
  } else if (warp < kGroup && lane == 0) {
    rests[warp] = 0;
    references[warp] = 0;
  }
  __syncthreads();

  // Weights.
  long long sums[kGroup];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) sums[g] = 0;
  for (int32_t j = thread; j < count; j += kRerankThreads) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (g >= group) break;
      float* const at = &logits[int64_t{g} * args.selection.capacity + j];
      const float weight = Exp2(__fsub_rn(*at, references[g]));
      *at = weight;
      sums[g] += __float2ll_rz(__fmul_rn(weight, 0x1p26f));
    }
  }
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const long long sum = WarpSum(sums[g]);
    if (lane == 0) warp_masses[warp][g] = sum;
  }
  __syncthreads();
  if (thread < kGroup) {
    long long total = rests[thread];
#pragma unroll
    for (int w = 0; w < kRerankWarps; ++w) total += warp_masses[w][thread];
    inverses[thread] = __fdiv_rn(0x1p26f, __ll2float_rn(total < 1 ? 1 : total));
  }
  __syncthreads();

  // Keys, counted.
  for (int32_t j = thread; j < count; j += kRerankThreads) {
    float mass = 0;
    for (int32_t g = 0; g < group; ++g) {
      mass = __fmaf_rn(logits[int64_t{g} * args.selection.capacity + j], inverses[g], mass);
    }
    const int32_t held =
        static_cast<int32_t>(__float_as_uint(mass) >> kMassKeyShift) - kMassKeyBase;
    const int32_t key = min(max(held, 0), kMassKeyBins - 1);
    keys[j] = static_cast<uint16_t>(key);
    atomicAdd(&coarse[key >> kFineBits], 1u);
  }
  __syncthreads();
  const bool may_be_kept = thread < kCoarseBins && thread >= query.least_key >> kFineBits;
  uint32_t enough;
  BlockExclusiveScan<kRerankWarps>(may_be_kept ? coarse[thread] : 0, warp_sums, &enough);
  const uint32_t kept = min(static_cast<uint32_t>(max(query.k, 0)), enough);
  if (kept == 0) {
    if (thread == 0) args.selection.counts[row] = 0;
    return;
  }
  const uint2 cut = FindCut<kCoarseBins>(coarse, kept, warp_sums, &found);
  for (int32_t j = thread; j < count; j += kRerankThreads) {
    const uint32_t key = keys[j];
    if (key >> kFineBits == cut.x) atomicAdd(&fine[key & (kFineBins - 1)], 1u);
  }
  __syncthreads();
  const uint32_t left = kept - cut.y;
  const uint2 fine_cut = FindCut<kFineBins>(fine, left, warp_sums, &found);
  const uint32_t threshold = cut.x << kFineBits | fine_cut.x;
  const uint32_t skip = fine[fine_cut.x] - (left - fine_cut.y);  // the earliest ties are too many

  // In order, to places that have been read: no candidate moves back.
  uint32_t higher_before = 0, ties_before = 0;
  for (int32_t begin = 0; begin < count; begin += kRerankThreads) {
    const int32_t j = begin + thread;
    const uint32_t key = j < count ? keys[j] : 0;
    const int32_t token = j < count ? tokens[j] : 0;
    const bool is_higher = j < count && key > threshold, is_tie = j < count && key == threshold;
    uint32_t all;
    const uint32_t before = BlockExclusiveScan<kRerankWarps>(
        (is_higher ? 1u : 0u) | (is_tie ? 1u << 16 : 0u), warp_sums, &all);
    const uint32_t my_ties = ties_before + (before >> 16);
    const uint32_t ties_kept = my_ties > skip ? my_ties - skip : 0;
    if (is_higher || (is_tie && my_ties >= skip)) {
      tokens[higher_before + (before & 0xffffu) + ties_kept] = token;
    }
    higher_before += all & 0xffffu;
    ties_before += all >> 16;
  }
  if (thread == 0) args.selection.counts[row] = static_cast<int32_t>(kept);
}

struct Places {
  size_t prepared, residual_prepared, logits, keys, part_peaks, part_masses, size_bytes;
};
Places PlacesOf(int32_t num_queries, int32_t kv_heads, int32_t group, int32_t capacity) {
  const size_t rows = size_t{1} * num_queries * kv_heads, heads = rows * group;
  Places places{};
  size_t end = 0;
  const auto take = [&end](size_t bytes) {
    const size_t begin = end;
    end = AlignUp(end + bytes, 256);
    return begin;
  };
  places.prepared = take(heads * sizeof(PreparedQuery));
  places.residual_prepared = take(heads * sizeof(PreparedQuery));
  places.logits = take(heads * capacity * sizeof(float));
  places.keys = take(rows * capacity * sizeof(uint16_t));
  places.part_peaks = take(heads * PartsOf(capacity) * sizeof(float));
  places.part_masses = take(heads * PartsOf(capacity) * sizeof(long long));
  places.size_bytes = end;
  return places;
}

template <int kGroup>
cudaError_t LaunchRerank(int32_t rows, const RerankArgs& args, Stream stream) {
  if (args.parts > 0) {
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(args.parts));
    if (const cudaError_t error =
            Launch(LogitKernel<kGroup>, grid, kLogitThreads, 0, stream, false, args);
        error != cudaSuccess) {
      return error;
    }
  }
  return Launch(RerankKernel<kGroup>, dim3(static_cast<unsigned>(rows)), kRerankThreads, 0, stream,
                false, args);
}

}  // namespace

size_t RerankWorkspaceBytes(int32_t num_queries, int32_t kv_heads, int32_t group,
                            int32_t capacity) {
  return PlacesOf(num_queries, kv_heads, group, capacity).size_bytes;
}

cudaError_t RerankByMass(int32_t num_queries, int32_t group, const RerankCodes& first,
                         const RerankCodes& residual, const float* q, int64_t q_stride,
                         const DeviceQuery* queries, float scale, const MassScales& scales,
                         const Selection& selection, void* workspace, Stream stream) {
  const int32_t kv_heads = first.layout.kv_heads;
  if (group < 1 || group > kTransformGroupMax || selection.kv_heads != kv_heads ||
      residual.layout.kv_heads != kv_heads ||
      residual.layout.block_tokens != first.layout.block_tokens) {
    return cudaErrorInvalidValue;
  }
  if (num_queries <= 0) return cudaSuccess;
  const Places places = PlacesOf(num_queries, kv_heads, group, selection.capacity);
  auto* const memory = static_cast<std::byte*>(workspace);
  RerankArgs args{{},
                  {},
                  queries,
                  FastDivider(first.layout.block_tokens),
                  scales,
                  selection,
                  reinterpret_cast<float*>(memory + places.logits),
                  reinterpret_cast<uint16_t*>(memory + places.keys),
                  reinterpret_cast<float*>(memory + places.part_peaks),
                  reinterpret_cast<long long*>(memory + places.part_masses),
                  kv_heads,
                  group,
                  PartsOf(selection.capacity)};
  const auto prepare = [&](const RerankCodes& code, size_t place, CodePool& pool) {
    auto* const prepared = reinterpret_cast<PreparedQuery*>(memory + place);
    pool = {code.transform->heads,
            static_cast<const uint32_t*>(code.codes),
            static_cast<int64_t>(code.layout.BlockBytes() / 4),
            static_cast<int64_t>(code.layout.HeadBytes() / 4),
            prepared,
            code.layout.bits / 32,
            0};
    return masses::PrepareQueries({num_queries, group, code.layout, 0}, *code.transform, q,
                                  q_stride, queries, scale, prepared, stream);
  };
  if (const cudaError_t error = prepare(first, places.prepared, args.first); error != cudaSuccess) {
    return error;
  }
  if (const cudaError_t error = prepare(residual, places.residual_prepared, args.residual);
      error != cudaSuccess) {
    return error;
  }
  const int32_t rows = num_queries * kv_heads;
  if (group == 1) return LaunchRerank<1>(rows, args, stream);
  if (group <= 2) return LaunchRerank<2>(rows, args, stream);
  if (group <= 4) return LaunchRerank<4>(rows, args, stream);
  if (group <= 8) return LaunchRerank<8>(rows, args, stream);
  return LaunchRerank<16>(rows, args, stream);
}

}  // namespace winnow::kernels::cuda

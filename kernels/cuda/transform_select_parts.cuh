// The common part of both ways of selecting by estimated mass (transform_select.cu): arguments, arithmetic, and the cut.
#ifndef WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PARTS_CUH_
#define WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PARTS_CUH_

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/transform_code.h"
#include "kernels/transform_code.h"

namespace winnow::kernels::cuda::masses {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int32_t kFineBits = 7;
constexpr int32_t kFineBins = 1 << kFineBits;
constexpr int32_t kCoarseBins = kMassKeyBins >> kFineBits;
constexpr int32_t kNoBin = kCoarseBins;  // nothing is selected
static_assert(kFineBins == kMassKeyStep, "a least key is the beginning of a bin");

constexpr int32_t kNoAnchors = INT32_MIN;

// One query head as Prepare leaves it.
struct PreparedQuery {
  uint32_t coef[kTransformQuadsMax];
  float a, b;
  float step, origin, offset;
  int32_t anchors;    // E; kNoAnchors
  int32_t reference;  // R and inv, by the scan's last block
  float inverse;
};

// A row's cut.
struct MassCut {
  uint32_t coarse;     // the bin of the k-th largest key; kNoBin
  uint32_t above;      // tokens in higher bins
  uint32_t threshold;  // T, the k-th largest key
  uint32_t skip;       // of those at T the earliest are too many
};

// P_p and S_p.
struct PieceRecord {
  int32_t peak;
  uint32_t sum;
};

// The part of a prepared query that weighs tokens. R takes the place of E.
struct Weighing {
  float step, origin, offset;
  int32_t reference;
  float inverse;
};

struct Args {
  DeviceTransform transform;
  const float* q;
  int64_t q_stride;
  const DeviceQuery* queries;
  AnchorMasses anchors;
  const uint32_t* codes;
  int64_t block_words, head_words;
  FastDivider block_tokens;
  int64_t row_tokens;  // room of a row in `steps`, `keys` and `cells`, a multiple of kChunkTokens
  int32_t pieces, chunks, kv_heads, group;
  float scale2;
  int32_t tail_of_all;      // selected tokens, too
  int32_t q_is_there;       // before the kernel ahead has ended
  PreparedQuery* prepared;  // [rows][group]
  PieceRecord* records;     // [rows][pieces][padded_group]
  uint32_t* steps;          // [rows][row_tokens][padded_group / 2], two heads of 16 bits each
  uint16_t* keys;           // [rows][row_tokens]
  uint8_t* cells;           // [rows][row_tokens]
  uint32_t* coarse;         // [rows][kCoarseBins], zero between calls
  uint32_t* fine;           // [rows][kFineBins], zero between calls
  uint32_t*
      counts;  // [rows][chunks][kFineBins], of the cut's bin: tokens there, and 2^16 times those above
  uint32_t* places;      // [rows][chunks][2]: selected before the chunk, and ties before it
  MassCut* cuts;         // [rows]
  uint32_t* tickets;     // [rows][4], zero between calls
  int64_t* tail_masses;  // null: no tail
  float* tail_references;
  float* tail_deltas;
  MassScales scales;  // null: nothing is left for re-ranking
  int32_t* chosen_counts;
  int32_t* chosen_tokens;
  int64_t capacity;
};

// Coefficients of the queries' heads alone: [num_queries][kv_heads][group] (transform_select.cu).
[[nodiscard]] cudaError_t PrepareQueries(const MassSelectShape& shape,
                                         const DeviceTransform& transform, const float* q,
                                         int64_t q_stride, const DeviceQuery* queries, float scale,
                                         PreparedQuery* prepared, Stream stream);

// Integers and floats in [-2^22, 2^22] become each other by an addition, because 1.5 * 2^23 plus one of them is a float
// whose lower bits are the integer. Conversions have a sixteenth of an addition's rate on a multiprocessor, and dots of a
// code (127 * 32 * 255 at most) are in that range, and differences of two.
constexpr float kIntegerFloat = 0x1.8p23f;
constexpr int32_t kIntegerBits = 0x4B400000;  // of kIntegerFloat
// The float of `shifted` - kIntegerBits.
__device__ __forceinline__ float FloatOf(int32_t shifted) {
  return __fsub_rn(__int_as_float(shifted), kIntegerFloat);
}

__device__ __forceinline__ float Exp2(float x) {
  x = fmaxf(x, kTransformExp2Least);
  const float shifted =
      __fadd_rn(x, kIntegerFloat);  // its lower bits are the nearest integer's, of two the even
  const float f = __fsub_rn(x, __fsub_rn(shifted, kIntegerFloat));
  constexpr float kC0 = kTransformExp2[0], kC1 = kTransformExp2[1], kC2 = kTransformExp2[2];
  constexpr float kC3 = kTransformExp2[3], kC4 = kTransformExp2[4], kC5 = kTransformExp2[5];
  float y = __fmaf_rn(kC0, f, kC1);
  y = __fmaf_rn(y, f, kC2);
  y = __fmaf_rn(y, f, kC3);
  y = __fmaf_rn(y, f, kC4);
  y = __fmaf_rn(y, f, kC5);
  return __uint_as_float(__float_as_uint(y) +
                         (__float_as_uint(shifted) << 23));  // y is near 1: no exponent overflows
}
// E of a query head whose anchors have this mass.
__device__ __forceinline__ int32_t AnchorsOf(float mass, float offset) {
  if (!isfinite(mass)) return kNoAnchors;
  const float steps =
      rintf(__fmul_rn(__fsub_rn(__fmul_rn(mass, kTransformLog2E), offset), float{kMassSteps}));
  return __float2int_rn(fminf(fmaxf(steps, -float{kMassAnchorsMost}), float{kMassAnchorsMost}));
}
// The reference that is handed out, and R of it.
__device__ __forceinline__ float ReferenceOf(const Weighing& head) {
  return __fmaf_rn(__int2float_rn(head.reference), 1.0f / kMassSteps, head.offset);
}
__device__ __forceinline__ int32_t StepsOfReference(float reference, float offset) {
  return __float2int_rn(__fmul_rn(__fsub_rn(reference, offset), float{kMassSteps}));
}
// E2 of steps.
__device__ __forceinline__ float ShareOf(int32_t steps) {
  return Exp2(__fmul_rn(__int2float_rn(steps), 1.0f / kMassSteps));
}

// X_j of a dot, as the lower bits of what kIntegerFloat and it add up to. `origin` has kIntegerFloat added.
__device__ __forceinline__ uint32_t StepBitsOf(float dot, float step, float origin) {
  const float at = __fmaf_rn(step, dot, origin);
  return __float_as_uint(
      fminf(fmaxf(at, kIntegerFloat - kMassStepMost), kIntegerFloat + kMassStepMost));
}
// The lower 16 bits of two words in one.
__device__ __forceinline__ uint32_t Pack(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x5410);
}
constexpr uint32_t kPowersLeast = kMassPowerLeast * 0x10001u;
// Summand of X_j of two heads that makes the bits of their W. References are no smaller than any X_j, so that 16 bits do
// not overflow.
__device__ __forceinline__ uint32_t PowersUp(int32_t low, int32_t high) {
  return Pack(static_cast<uint32_t>(max(kMassPowerTop - low, -kMassStepMost - 1)),
              static_cast<uint32_t>(max(kMassPowerTop - high, -kMassStepMost - 1)));
}
// W of two heads, as its upper 16 bits.
__device__ __forceinline__ uint32_t PowersOf(uint32_t steps, uint32_t up) {
  return __viaddmax_s16x2(steps, up, kPowersLeast);
}
__device__ __forceinline__ float LowPower(uint32_t powers) { return __uint_as_float(powers << 16); }
__device__ __forceinline__ float HighPower(uint32_t powers) {
  return __uint_as_float(powers & 0xffff0000u);
}
// A token's term of S_p, and kIntegerBits.
__device__ __forceinline__ uint32_t TermBits(float power) {
  return __float_as_uint(__fmaf_rn(power, 0x1p22f, kIntegerFloat));
}
__device__ __forceinline__ uint32_t MassKeyOf(float mass) {
  const int32_t key = static_cast<int32_t>(__float_as_uint(mass) >> kMassKeyShift) - kMassKeyBase;
  return static_cast<uint32_t>(min(max(key, 0), kMassKeyBins - 1));
}

__device__ __forceinline__ int32_t FirstPiece(const DeviceQuery& query) {
  return query.mid.first / kMassPieceTokens;
}
// Rows begin at the border of a piece.
__device__ __forceinline__ int32_t BaseOf(const DeviceQuery& query) {
  return FirstPiece(query) * kMassPieceTokens;
}

// Whether this block is the last of `blocks` that come here, of a ticket that is zero again afterwards. What they wrote
// before can be read.
__device__ __forceinline__ bool IsLast(uint32_t* ticket, uint32_t blocks, uint32_t* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *shared = atomicInc(ticket, blocks - 1) == blocks - 1 ? 1 : 0;
    __threadfence();
  }
  __syncthreads();
  return *shared != 0;
}

// Where the k-th largest of `bins` counts lies, counted from the top: the bin, and how many lie above it. All threads
// get it. REQUIRES: the counts add up to k or more, k > 0.
template <int kBins>
__device__ uint2 FindFromTop(const uint32_t* counts, uint32_t k, uint32_t* warp_sums,
                             uint2* found) {
  constexpr int kPerThread = (kBins + kThreads - 1) / kThreads;
  uint32_t mine[kPerThread], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int32_t bin = kBins - 1 - (static_cast<int32_t>(threadIdx.x) * kPerThread + i);
    mine[i] = bin >= 0 ? counts[bin] : 0;
    sum += mine[i];
  }
  uint32_t above = BlockExclusiveScan<kWarps>(sum, warp_sums, &total);
  if (above < k && k <= above + sum) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (above < k && k <= above + mine[i]) {
        *found = make_uint2(
            static_cast<uint32_t>(kBins - 1 - (static_cast<int32_t>(threadIdx.x) * kPerThread + i)),
            above);
      }
      above += mine[i];
    }
  }
  __syncthreads();
  return *found;
}
// How many tokens are selected: k, or as many as have the query's least key or more. All threads get it. `counts`: of
// the row's tokens by coarse bin.
__device__ __forceinline__ uint32_t SelectedOf(const DeviceQuery& query, const uint32_t* counts,
                                               uint32_t* warp_sums) {
  const auto k = static_cast<uint32_t>(max(query.k, 0));
  if (query.least_key == 0) return k;
  uint32_t sum = 0, total;
  for (int32_t bin = (query.least_key >> kFineBits) + static_cast<int32_t>(threadIdx.x);
       bin < kCoarseBins; bin += kThreads) {
    sum += counts[bin];
  }
  BlockExclusiveScan<kWarps>(sum, warp_sums, &total);
  return min(k, total);
}
// An addition in shared memory without a branch: most masses have nothing above, or nothing below.
__device__ __forceinline__ void AddUnlessZero(uint32_t* to, uint32_t value) {
  asm volatile(
      "{.reg .pred adds; setp.ne.u32 adds, %1, 0; @adds red.shared.add.u32 [%0], %1;}" ::"r"(
          SharedAddress(to)),
      "r"(value)
      : "memory");
}

__device__ __forceinline__ bool IsInside(const DeviceQuery& query, int32_t token) {
  return token >= query.mid.first && token < query.mid.last;
}

}  // namespace winnow::kernels::cuda::masses

#endif  // WINNOW_KERNELS_CUDA_TRANSFORM_SELECT_PARTS_CUH_

// Small device functions that several kernels share: bfloat16, 16-byte copies, matrix
// instructions, division by a constant that is known only at launch.
#ifndef WINNOW_KERNELS_CUDA_DEVICE_MATH_CUH_
#define WINNOW_KERNELS_CUDA_DEVICE_MATH_CUH_

#include <cstdint>

namespace winnow::kernels::cuda {

inline constexpr unsigned kFullMask = 0xffffffffu;
inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float WidenLow(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float WidenHigh(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float WidenBf16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ float WidenF16(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Round to nearest even, as dtype.h's ToBF16.
__device__ __forceinline__ uint16_t RoundBf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// The largest bfloat16 that is not above x, and the smallest that is not below it, as kv_row.h's.
__device__ __forceinline__ uint16_t RoundBf16Down(float x) {
  uint16_t rounded = RoundBf16(x);
  if (WidenBf16(rounded) > x) {
    rounded = static_cast<uint16_t>(__float_as_uint(x) >> 16);  // towards zero
    if (x < 0) ++rounded;                                       // away from it
  }
  return rounded;
}
__device__ __forceinline__ uint16_t RoundBf16Up(float x) {
  return static_cast<uint16_t>(RoundBf16Down(-x) ^ 0x8000);
}

// Two floats as a pair of bfloat16, `low` in the lower half; one instruction.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// What PackBf16 lost.
__device__ __forceinline__ uint32_t PackBf16Rest(float low, float high, uint32_t pair) {
  return PackBf16(low - WidenLow(pair), high - WidenHigh(pair));
}

// A pair of a head, rotated; the roundings are fixed, so that every kernel has the same.
__device__ __forceinline__ float2 Rotated(float a, float b, float cosine, float sine) {
  return make_float2(__fmaf_rn(a, cosine, -__fmul_rn(b, sine)),
                     __fmaf_rn(b, cosine, __fmul_rn(a, sine)));
}

// Channel c of a head `x`, whose pairs are `half` channels apart, rotated by its row of a table of cosines and sines.
__device__ __forceinline__ float RotatedAt(const float* x, const float* table, int32_t half,
                                           int32_t c) {
  const int32_t j = c < half ? c : c - half;
  const float2 rotated = Rotated(x[j], x[j + half], table[j], table[half + j]);
  return c < half ? rotated.x : rotated.y;
}

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes of global memory into shared memory, past L1; zeros if not `wanted`.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global, bool wanted) {
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
// 4, 8 or 16 bytes, by way of L1.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t shared, const void* global, bool wanted) {
  const int bytes = wanted ? kBytes : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
               "n"(kBytes), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint32_t LoadShared(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}
__device__ __forceinline__ uint4 LoadShared16(uint32_t shared) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(shared)
               : "memory");
  return words;
}
__device__ __forceinline__ float2 LoadSharedPair(uint32_t shared) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(shared)
               : "memory");
  return pair;
}
__device__ __forceinline__ void StoreShared(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t shared, uint2 words) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared), "r"(words.x), "r"(words.y)
               : "memory");
}
// 16 bytes, at a multiple of 16.
__device__ __forceinline__ void LoadShared(uint32_t shared, float (&values)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t shared, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}
__device__ __forceinline__ void ClearShared16(uint32_t shared) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

// Asks for 128 bytes to come as near as L2.
__device__ __forceinline__ void PrefetchLine(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Streamed once: leaves L1 to others.
__device__ __forceinline__ uint4 LoadStreamed(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ void LoadMatrix4(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// A matrix of 8 by 8 values of 16 bits, two neighbours of a row in each lane (row lane / 4), transposed.
__device__ __forceinline__ uint32_t Transposed8x8(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// c [16][8] += a [16][16] b [16][8], bfloat16 into float32.
__device__ __forceinline__ void MultiplyAdd16x8x16(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c [16][8] += a [16][32] b [32][8], of 8-bit integers with signs into 32-bit ones.
__device__ __forceinline__ void MultiplyAdd16x8x32(int32_t (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of bytes without signs and bytes with them.
__device__ __forceinline__ void MultiplyAddUnsigned16x8x32(int32_t (&c)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Integers in the order of their floats, -0 and 0 the same, and back. (NaNs lie at the ends.)
__device__ __forceinline__ uint32_t KeyOf(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float FloatOfKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

template <typename Number>
__device__ __forceinline__ Number WarpSum(Number x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}
__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset));
  }
  return x;
}
template <typename Number>
__device__ __forceinline__ Number WarpInclusiveScan(Number x, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Number below = __shfl_up_sync(kFullMask, x, offset);
    if (lane >= offset) x += below;
  }
  return x;
}

// n / divisor for 0 <= n < 2^31, by a multiplication (Granlund and Montgomery).
class FastDivider {
 public:
  explicit FastDivider(int32_t divisor) : divisor_(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << shift_) < divisor_) ++shift_;
    multiplier_ = static_cast<uint32_t>(
        ((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor_)) / divisor_ + 1);
  }
  __device__ __forceinline__ int32_t Divide(int32_t n) const {
    const uint32_t high = __umulhi(multiplier_, static_cast<uint32_t>(n));
    return static_cast<int32_t>((high + static_cast<uint32_t>(n)) >> shift_);
  }
  __device__ __forceinline__ int32_t divisor() const { return static_cast<int32_t>(divisor_); }

 private:
  uint32_t divisor_, multiplier_ = 0, shift_ = 0;
  uint32_t unused_ = 0;  // kernels' arguments have no padding (launch.cuh)
};

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_DEVICE_MATH_CUH_

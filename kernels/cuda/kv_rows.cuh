// Rows of KV in a kernel's hands: the only place of this folder that knows how a type of KV lies in memory
// (kernels/kv_layout.h). A kernel is compiled for each type (ForKvType), so that no loop asks for it, and so that of
// bfloat16 the code is what it was before there were others.
//
// Codes come four to a word: 4-byte loads, because rows of 8-bit types are 4 bytes more than a multiple of 16. Four rows
// together are a multiple of 16, and a row lies within a window of KvWindowBytes from an address that is one.
//
// A value is scale * code, exact in float32. Tensor cores take it rounded to bfloat16, once: PairsOf. So attention over codes
// has the bits of attention over a bfloat16 pool that holds those rounded values.
#ifndef WINNOW_KERNELS_CUDA_KV_ROWS_CUH_
#define WINNOW_KERNELS_CUDA_KV_ROWS_CUH_

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/device_types.h"
#include "kernels/kv_layout.h"

namespace winnow::kernels::cuda {

template <DType kType>
struct KvType {
  static constexpr DType kDType = kType;
};

// Calls f with the KvType of `dtype`; cudaErrorInvalidValue for a type that KV does not have here.
template <typename F>
cudaError_t ForKvType(DType dtype, F f) {
  switch (dtype) {
    case DType::kBF16:
      return f(KvType<DType::kBF16>());
    case DType::kI8:
      return f(KvType<DType::kI8>());
    case DType::kF8:
      return f(KvType<DType::kF8>());
    default:
      return cudaErrorInvalidValue;
  }
}

template <DType kKv>
__host__ __device__ constexpr int32_t KvRowBytes(int32_t head_dim) {
  return HasScales(kKv) ? 2 * head_dim + 4 : 4 * head_dim;
}
// Multiples of 16 bytes that hold a row wherever it begins.
template <DType kKv>
__host__ __device__ constexpr int32_t KvWindowBytes(int32_t head_dim) {
  return HasScales(kKv) ? (KvRowBytes<kKv>(head_dim) + 12 + 15) / 16 * 16 : 4 * head_dim;
}

// ---- four codes of 8 bits ----

// a * b + c of two bfloat16 each, rounded once.
__device__ __forceinline__ uint32_t MultiplyAddPairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pairs;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pairs) : "r"(a), "r"(b), "r"(c));
  return pairs;
}
// Added where a product alone is wanted.
inline constexpr uint32_t kMinusZeros = 0x80008000u;

// Two bfloat16 scales, each a half of `scales`, as PairsOf() takes them: integers come from it in 64ths, exactly.
template <DType kKv>
__device__ __forceinline__ uint32_t PairScales(uint32_t scales) {
  return kKv == DType::kI8 ? MultiplyAddPairs(scales, 0x42804280u, kMinusZeros) : scales;
}
// The same of the two that lie behind a row's codes: K's scale twice, or V's.
template <DType kKv>
__device__ __forceinline__ uint32_t TwiceScale(uint32_t scales, bool is_value) {
  return PairScales<kKv>(__byte_perm(scales, 0, is_value ? 0x3232 : 0x1010));
}

// Values of four codes as pairs of bfloat16: of each pair the first by the lower half of `scales`, from PairScales().
template <DType kKv>
__device__ __forceinline__ uint2 PairsOf(uint32_t codes, uint32_t scales) {
  static_assert(HasScales(kKv));
  uint32_t pairs[2];
  if constexpr (kKv == DType::kI8) {
    // 128 + an integer, in eight bits, is a bfloat16 of that many times 2^-133, its exponent's last bit among the eight; so
    // it is 2^127 times that, less 2, in 64ths: exact, and fewer instructions than to put an exponent before the bits.
    const uint32_t raised = codes ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pairs[i] = MultiplyAddPairs(__byte_perm(raised, 0, i == 0 ? 0x4140 : 0x4342), 0x7f007f00u,
                                  0xc000c000u);
    }
  } else {
    // The bits of E4M3, moved to those of bfloat16, whose exponents begin 120 lower: of all four the lower bytes, then the upper.
    const uint32_t low = codes << 4 & 0xf0f0f0f0u;
    const uint32_t high = (codes >> 4 & 0x07070707u) | (codes & 0x80808080u);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pairs[i] = MultiplyAddPairs(__byte_perm(low, high, i == 0 ? 0x5140 : 0x7362), 0x7b807b80u,
                                  kMinusZeros);
    }
  }
  return make_uint2(MultiplyAddPairs(pairs[0], scales, kMinusZeros),
                    MultiplyAddPairs(pairs[1], scales, kMinusZeros));
}

template <DType kKv>
__device__ __forceinline__ float CodeOf(uint32_t byte) {
  if constexpr (kKv == DType::kI8) {
    return static_cast<float>(static_cast<int8_t>(byte));
  } else {
    return __fmul_rn(__uint_as_float((byte & 0x80u) << 24 | (byte & 0x7fu) << 20), 0x1p120f);
  }
}
template <DType kKv>
__device__ __forceinline__ float4 FloatsOf(uint32_t codes, float scale) {
  return make_float4(__fmul_rn(CodeOf<kKv>(codes & 0xffu), scale),
                     __fmul_rn(CodeOf<kKv>(codes >> 8 & 0xffu), scale),
                     __fmul_rn(CodeOf<kKv>(codes >> 16 & 0xffu), scale),
                     __fmul_rn(CodeOf<kKv>(codes >> 24), scale));
}

// ---- values of a row ----

template <DType kKv>
__device__ __forceinline__ uint32_t ScalesOf(const uint8_t* row, int32_t head_dim) {
  return *reinterpret_cast<const uint32_t*>(row + 2 * head_dim);
}

// Channel c of the row's K.
template <DType kKv>
__device__ __forceinline__ float KeyAt(const uint8_t* row, int32_t head_dim, int32_t c) {
  if constexpr (kKv == DType::kBF16) {
    return WidenBf16(reinterpret_cast<const uint16_t*>(row)[c]);
  } else {
    return __fmul_rn(CodeOf<kKv>(row[c]), WidenLow(ScalesOf<kKv>(row, head_dim)));
  }
}
// Channel c of the row's V.
template <DType kKv>
__device__ __forceinline__ float ValueAt(const uint8_t* row, int32_t head_dim, int32_t c) {
  if constexpr (kKv == DType::kBF16) {
    return WidenBf16(reinterpret_cast<const uint16_t*>(row)[head_dim + c]);
  } else {
    return __fmul_rn(CodeOf<kKv>(row[head_dim + c]), WidenHigh(ScalesOf<kKv>(row, head_dim)));
  }
}

// The same as tensor cores take it.
template <DType kKv>
__device__ __forceinline__ float RoundedValueAt(const uint8_t* row, int32_t head_dim, int32_t c) {
  const float value = ValueAt<kKv>(row, head_dim, c);
  return HasScales(kKv) ? WidenBf16(RoundBf16(value)) : value;
}

// Channels c to c + 7 of the row's K; c is a multiple of 8.
template <DType kKv>
__device__ __forceinline__ void LoadKeys8(const uint8_t* row, int32_t head_dim, int32_t c,
                                          float (&to)[8]) {
  if constexpr (kKv == DType::kBF16) {
    const uint4 loaded = LoadStreamed(row + c * 2);
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      to[2 * w] = WidenLow(words[w]);
      to[2 * w + 1] = WidenHigh(words[w]);
    }
  } else {
    const float scale = WidenLow(ScalesOf<kKv>(row, head_dim));
    const auto* words = reinterpret_cast<const uint32_t*>(row + c);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const float4 four = FloatsOf<kKv>(words[w], scale);
      to[4 * w] = four.x;
      to[4 * w + 1] = four.y;
      to[4 * w + 2] = four.z;
      to[4 * w + 3] = four.w;
    }
  }
}

// ---- writing ----

// As float8.h's ToF8E4M3.
__device__ __forceinline__ uint32_t RoundF8E4M3(float x) {
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448
  if (magnitude < 0x3c800000u) {                      // 2^-6
    return sign | static_cast<uint32_t>(__float2int_rn(__fmul_rn(fabsf(x), 512.0f)));
  }
  return sign | (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
}

// A warp's share of a row's K, or of its V.
struct FourCodes {
  uint32_t codes;
  uint16_t scale;
};

// Lane i has the values 4 * i to 4 * i + 3, and zeros where the row has none. All lanes call it.
template <DType kKv>
__device__ __forceinline__ FourCodes ToCodes(const float (&values)[4]) {
  static_assert(HasScales(kKv));
  float largest = 0.0f;
  bool finite = true;
#pragma unroll
  for (const float value : values) {
    finite = finite && (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
    largest = fmaxf(largest, fabsf(value));
  }
  largest = WarpMax(largest);
  if (__all_sync(kFullMask, finite) == 0) return {0, 0x7fc0};
  if (largest == 0.0f) return {0, 0};
  constexpr float kMost = kKv == DType::kI8 ? 127.0f : 448.0f;
  FourCodes four = {0, RoundBf16Up(fmaxf(__fdiv_rn(largest, kMost), kKvScaleFloor))};
  const float scale = WidenBf16(four.scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = __fdiv_rn(values[i], scale);
    const uint32_t code =
        kKv == DType::kI8 ? static_cast<uint32_t>(__float2int_rn(x)) & 0xffu : RoundF8E4M3(x);
    four.codes |= code << (8 * i);
  }
  return four;
}

// A warp's codes of a row's K (`part` 0) or V (1), to their places in a row.
__device__ __forceinline__ void PutCodes(uint8_t* row, int32_t head_dim, int part,
                                         const FourCodes& four) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  if (4 * lane < head_dim) {
    reinterpret_cast<uint32_t*>(row + part * head_dim)[lane] = four.codes;
  }
  if (lane == 0) reinterpret_cast<uint16_t*>(row + 2 * head_dim)[part] = four.scale;
}
// A warp's codes of a row's K or V, whose value c is value_of(c).
template <DType kKv, typename ValueOf>
__device__ __forceinline__ FourCodes ToCodesOf(int32_t head_dim, ValueOf value_of) {
  const auto c = static_cast<int32_t>(threadIdx.x % 32) * 4;
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = c < head_dim ? value_of(c + i) : 0.0f;
  return ToCodes<kKv>(values);
}
template <DType kKv, typename ValueOf>
__device__ __forceinline__ FourCodes WriteCodes(uint8_t* row, int32_t head_dim, int part,
                                                ValueOf value_of) {
  const FourCodes four = ToCodesOf<kKv>(head_dim, value_of);
  PutCodes(row, head_dim, part, four);
  return four;
}

}  // namespace winnow::kernels::cuda

#endif  // WINNOW_KERNELS_CUDA_KV_ROWS_CUH_

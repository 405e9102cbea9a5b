// Selection by codes: how far a code is from the group's, and the counting of it. hamming_select.cu
// includes it, and no one else.
#ifndef WINNOW_KERNELS_CUDA_HAMMING_DISTANCE_CUH_
#define WINNOW_KERNELS_CUDA_HAMMING_DISTANCE_CUH_

#include <cstdint>

#include "kernels/cuda/device_math.cuh"

namespace winnow::kernels::cuda::hamming {

// Word `at` of S and the planes of a group's codes (kernels/hamming_select.cc).
template <int kPlanes>
__device__ void MakePatternWord(const uint8_t* codes, int32_t group, int32_t code_bytes, int32_t at,
                                uint32_t* majority, uint32_t (&planes)[kPlanes]) {
  constexpr int kAtOnce = 4;  // words that are on their way together
  uint32_t digits[5] = {};
  for (int32_t first = 0; first < group; first += kAtOnce) {
    uint32_t words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      words[i] = first + i < group
                     ? *reinterpret_cast<const uint32_t*>(codes + (first + i) * code_bytes + at)
                     : 0;
    }
#pragma unroll
    for (uint32_t carry : words) {
#pragma unroll
      for (uint32_t& digit : digits) {
        const uint32_t sum = digit ^ carry;
        carry &= digit;
        digit = sum;
      }
    }
  }
  *majority = 0;
#pragma unroll
  for (uint32_t& plane : planes) plane = 0;
  for (int32_t n = 0; n <= group; ++n) {
    uint32_t here = kFullMask;
#pragma unroll
    for (int i = 0; i < 5; ++i) here &= (n >> i & 1) != 0 ? digits[i] : ~digits[i];
    if (2 * n > group) *majority |= here;
    const int32_t difference = group > 2 * n ? group - 2 * n : 2 * n - group;
    const int32_t weight = group % 2 == 0 ? difference / 2 : difference;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      if ((weight >> p & 1) != 0) planes[p] |= here;
    }
  }
}

// a + b + c = *sum + 2 * carry, bit by bit.
__device__ __forceinline__ uint32_t FullAdd(uint32_t a, uint32_t b, uint32_t c, uint32_t* sum) {
  *sum = a ^ b ^ c;
  return (a & b) | (c & (a | b));
}

// D of `kWords` words (1, 2 or 4). Word w of plane p is planes[p * stride + w].
template <int kWords, int kPlanes>
__device__ __forceinline__ uint32_t Distance(const uint32_t* words, const uint32_t* majority,
                                             const uint32_t* planes, int stride) {
  if constexpr (kWords < 4) {
    uint32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        sum += __popc((words[w] ^ majority[w]) & planes[p * stride + w]) << p;
      }
    }
    return sum;
  } else {
    // Of plane p come four words, and up to two carries from the plane below: three words of the
    // same weight become one and a carry.
    uint32_t sum = 0, carries[2];
    int num_carries = 0;
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      uint32_t x[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) x[w] = (words[w] ^ majority[w]) & planes[p * stride + w];
      uint32_t first, second = x[3], up[2];
      up[0] = FullAdd(x[0], x[1], x[2], &first);
      if (num_carries == 0) {
        sum += (__popc(first) + __popc(second)) << p;
        carries[0] = up[0];
        num_carries = 1;
      } else if (num_carries == 1) {
        up[1] = FullAdd(first, second, carries[0], &first);
        sum += __popc(first) << p;
        carries[0] = up[0];
        carries[1] = up[1];
        num_carries = 2;
      } else {
        up[1] = FullAdd(second, carries[0], carries[1], &second);
        sum += (__popc(first) + __popc(second)) << p;
        carries[0] = up[0];
        carries[1] = up[1];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i < num_carries) sum += __popc(carries[i]) << kPlanes;
    }
    return sum;
  }
}

// Counts and stores the distances of one unit of 16 bytes, or of the several of a longer code.
// Unless all of its tokens are wanted: those of [low, high).
template <int kCodeBytes, int kPlanes, bool kAll>
__device__ __forceinline__ void UseUnit(const uint4 (&unit)[kCodeBytes < 16 ? 1 : kCodeBytes / 16],
                                        const uint32_t* of_codes, uint32_t* counts, uint16_t* to,
                                        int32_t low, int32_t high) {
  constexpr int kUnitTokens = kCodeBytes < 16 ? 16 / kCodeBytes : 1;
  constexpr int kUnitsPerCode = kCodeBytes < 16 ? 1 : kCodeBytes / 16;
  constexpr int kWords = kCodeBytes < 16 ? 4 : kCodeBytes / 4;
  constexpr int kWordsPerPart = kCodeBytes < 16 ? kCodeBytes / 4 : 4;
  uint32_t of_token[kUnitTokens] = {};
#pragma unroll
  for (int i = 0; i < kUnitsPerCode; ++i) {
    const uint32_t words[4] = {unit[i].x, unit[i].y, unit[i].z, unit[i].w};
#pragma unroll
    for (int t = 0; t < kUnitTokens; ++t) {
      const int at = 4 * i + t * kWordsPerPart;
      of_token[t] += Distance<kWordsPerPart, kPlanes>(words + t * kWordsPerPart, of_codes + at,
                                                      of_codes + kWords + at, kWords);
    }
  }
#pragma unroll
  for (int t = 0; t < kUnitTokens; ++t) {
    if (kAll || (t >= low && t < high)) atomicAdd(&counts[of_token[t]], 1u);
  }
  if constexpr (kUnitTokens == 1) {
    *to = static_cast<uint16_t>(of_token[0]);
  } else if constexpr (kUnitTokens == 2) {
    *reinterpret_cast<uint32_t*>(to) = of_token[0] | of_token[1] << 16;
  } else {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(of_token[0] | of_token[1] << 16, of_token[2] | of_token[3] << 16);
  }
}

}  // namespace winnow::kernels::cuda::hamming

#endif  // WINNOW_KERNELS_CUDA_HAMMING_DISTANCE_CUH_

// Eight lanes of float32: AVX2, FMA and F16C. The same functions as vec_scalar.h, which explains
// them. Included only by *_avx2.cc.
#ifndef WINNOW_KERNELS_CPU_VEC_AVX2_H_
#define WINNOW_KERNELS_CPU_VEC_AVX2_H_

#define WINNOW_ISA avx2

#include <immintrin.h>

#include <cmath>
#include <cstdint>

namespace winnow::kernels {
namespace {

struct Vec {
  static constexpr int kLanes = 8;
  using Reg = __m256;

  static Reg Zero() { return _mm256_setzero_ps(); }
  static Reg Set1(float x) { return _mm256_set1_ps(x); }
  static Reg Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static __m256i FirstLanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Reg LoadFirst(const float* p, int n) { return _mm256_maskload_ps(p, FirstLanes(n)); }
  static void StoreFirst(float* p, int n, Reg x) { _mm256_maskstore_ps(p, FirstLanes(n), x); }
  static Reg LoadBF16(const uint16_t* p) {
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static Reg LoadF16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // Round to nearest even on the bits. NaN is not kept apart: 0x7fff added to the bits of any NaN
  // that arithmetic makes (its mantissa is not all ones) leaves a NaN.
  static Reg StoreBF16(uint16_t* p, Reg x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    return _mm256_castsi256_ps(_mm256_slli_epi32(high, 16));
  }

  static Reg Add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg Sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg Mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg Div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static Reg Max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static Reg Min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
  static Reg MulAdd(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg FusedMulAdd(Reg a, Reg b, Reg c) { return MulAdd(a, b, c); }
  static float ReduceAdd(Reg a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float ReduceMax(Reg a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }

  static Reg KeepFirst(Reg x, int n) {
    return _mm256_blendv_ps(Set1(-INFINITY), x, _mm256_castsi256_ps(FirstLanes(n)));
  }
  static Reg RoundToNearest(Reg x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Reg ScaleByPowerOf2(Reg x, Reg n) {
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
  }
  static Reg ZeroWhereLess(Reg x, Reg a, Reg limit) {
    return _mm256_andnot_ps(_mm256_cmp_ps(a, limit, _CMP_LT_OQ), x);
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_VEC_AVX2_H_

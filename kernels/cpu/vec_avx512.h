// Sixteen lanes of float32: AVX-512 F, BW, VL, DQ and BF16. The functions of vec_scalar.h,
// which explains them (but those for 2^x, which has instructions of its own here). Included only by
// *_avx512.cc.
#ifndef WINNOW_KERNELS_CPU_VEC_AVX512_H_
#define WINNOW_KERNELS_CPU_VEC_AVX512_H_

#define WINNOW_ISA avx512

// GCC 12 takes the undefined operands inside its own intrinsics for uninitialised variables.
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cmath>
#include <cstdint>

namespace winnow::kernels {
namespace {

struct Vec {
  static constexpr int kLanes = 16;
  using Reg = __m512;

  static Reg Zero() { return _mm512_setzero_ps(); }
  static Reg Set1(float x) { return _mm512_set1_ps(x); }
  static Reg Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static __mmask16 FirstLanes(int n) {
    return n >= 16  ? __mmask16{0xffff}
           : n <= 0 ? __mmask16{0}
                    : static_cast<__mmask16>((1u << n) - 1);
  }
  static Reg LoadFirst(const float* p, int n) { return _mm512_maskz_loadu_ps(FirstLanes(n), p); }
  static void StoreFirst(float* p, int n, Reg x) { _mm512_mask_storeu_ps(p, FirstLanes(n), x); }
  static Reg LoadBF16(const uint16_t* p) {
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static Reg LoadF16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Reg StoreBF16(uint16_t* p, Reg x) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
  }

  static Reg Add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg Sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg Mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg Div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static Reg Max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static Reg Min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
  static Reg MulAdd(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg FusedMulAdd(Reg a, Reg b, Reg c) { return MulAdd(a, b, c); }
  static float ReduceAdd(Reg a) {
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float ReduceMax(Reg a) {
    __m256 y = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
  }

  static Reg ZeroWhereLess(Reg x, Reg a, Reg limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, limit, _CMP_NLT_UQ), x);
  }
  static Reg KeepFirst(Reg x, int n) {
    return _mm512_mask_blend_ps(FirstLanes(n), Set1(-INFINITY), x);
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_VEC_AVX512_H_

// 2^x on vectors. Included after one vec_*.h; see there for why this is in an anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_EXP2_IMPL_H_
#define WINNOW_KERNELS_CPU_EXP2_IMPL_H_

namespace winnow::kernels {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

// 2^f by a minimax polynomial with the constant term held at 1, so that 2^0 is exactly 1. Degree 5,
// relative error 1e-7; degree 4, 3e-6, for results that are rounded to bf16.
struct Exp2Coefficients {
  float c5, c4, c3, c2, c1;
};

template <bool kForBF16>
inline Vec::Reg Exp2Polynomial(Vec::Reg f, const Exp2Coefficients& fine,
                               const Exp2Coefficients& coarse) {
  Vec::Reg y;
  if constexpr (kForBF16) {
    y = Vec::MulAdd(Vec::Set1(coarse.c4), f, Vec::Set1(coarse.c3));
    y = Vec::MulAdd(y, f, Vec::Set1(coarse.c2));
    y = Vec::MulAdd(y, f, Vec::Set1(coarse.c1));
  } else {
    y = Vec::MulAdd(Vec::Set1(fine.c5), f, Vec::Set1(fine.c4));
    y = Vec::MulAdd(y, f, Vec::Set1(fine.c3));
    y = Vec::MulAdd(y, f, Vec::Set1(fine.c2));
    y = Vec::MulAdd(y, f, Vec::Set1(fine.c1));
  }
  return Vec::MulAdd(y, f, Vec::Set1(1.0f));
}

// 2^x: exactly 1 for 0, zero for minus infinity, NaN for NaN. Results of 2^127 and more are 2^127
// or infinite, those below 2^-126 tiny or zero, as the instruction set has it.
template <bool kForBF16 = false>
inline Vec::Reg Exp2(Vec::Reg x) {
#if defined(__AVX512F__)
  // x = n + f with 0 <= f < 1; vreduceps yields f (0 for an infinity), vscalefps multiplies by
  // 2^floor(x).
  constexpr Exp2Coefficients kFine = {0.00186713008f, 0.00901703031f, 0.0557999131f, 0.24016445f,
                                      0.693151312f};
  constexpr Exp2Coefficients kCoarse = {0, 0.0134266843f, 0.0522424741f, 0.241280205f,
                                        0.693044845f};
  const Vec::Reg f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(Exp2Polynomial<kForBF16>(f, kFine, kCoarse), x);
#else
  // x = n + f with |f| <= 1/2.
  constexpr Exp2Coefficients kFine = {0.00132647271f, 0.00967151265f, 0.0555073374f, 0.240222421f,
                                      0.693146978f};
  constexpr Exp2Coefficients kCoarse = {0, 0.00958285299f, 0.0559064247f, 0.240240986f,
                                        0.693124193f};
  const Vec::Reg clamped = Vec::Min(Vec::Set1(127.0f), Vec::Max(Vec::Set1(-126.0f), x));
  const Vec::Reg n = Vec::RoundToNearest(clamped);
  const Vec::Reg y = Exp2Polynomial<kForBF16>(Vec::Sub(clamped, n), kFine, kCoarse);
  return Vec::ZeroWhereLess(Vec::ScaleByPowerOf2(y, n), x, Vec::Set1(-126.0f));
#endif
}

// `x`, and zero where that is less than `least`; NaN stays.
inline Vec::Reg ZeroBelow(Vec::Reg x, float least) {
  return Vec::ZeroWhereLess(x, x, Vec::Set1(least));
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_EXP2_IMPL_H_

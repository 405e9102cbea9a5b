// 2^x on vectors. Included after one vec_*.h; see there for why this is in an anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_EXP2_IMPL_H_
#define WINNOW_KERNELS_CPU_EXP2_IMPL_H_

namespace winnow::kernels {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 127 (larger x yields 2^127); zero below -126; NaN for NaN; exactly 1 for 0.
// x = n + f with |f| <= 1/2; 2^f by a minimax polynomial of degree 5, relative error 9e-8
// (degree 4, 3e-6, for results that are rounded to bf16). Fitted with the constant term held at 1.
template <bool kForBF16 = false>
inline Vec::Reg Exp2(Vec::Reg x) {
  const Vec::Reg clamped = Vec::Min(Vec::Set1(127.0f), Vec::Max(Vec::Set1(-126.0f), x));
  const Vec::Reg n = Vec::RoundToNearest(clamped);
  const Vec::Reg f = Vec::Sub(clamped, n);
  Vec::Reg y;
  if constexpr (kForBF16) {
    y = Vec::MulAdd(Vec::Set1(0.00958285299f), f, Vec::Set1(0.0559064247f));
    y = Vec::MulAdd(y, f, Vec::Set1(0.240240986f));
    y = Vec::MulAdd(y, f, Vec::Set1(0.693124193f));
  } else {
    y = Vec::MulAdd(Vec::Set1(0.00132647271f), f, Vec::Set1(0.00967151265f));
    y = Vec::MulAdd(y, f, Vec::Set1(0.0555073374f));
    y = Vec::MulAdd(y, f, Vec::Set1(0.240222421f));
    y = Vec::MulAdd(y, f, Vec::Set1(0.693146978f));
  }
  y = Vec::MulAdd(y, f, Vec::Set1(1.0f));
  return Vec::ZeroWhereLess(Vec::ScaleByPowerOf2(y, n), x, Vec::Set1(-126.0f));
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_EXP2_IMPL_H_

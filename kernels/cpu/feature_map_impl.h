// See kernels/feature_map.h. Compiled by feature_map_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// gelu(x) = x Phi(x) = max(x, 0) - |x| Phi(-|x|), which cancels nowhere. Phi(-|x|) = erfc(|x| /
// sqrt 2) / 2 by formula 7.1.26 of Abramowitz and Stegun: a polynomial in t times exp(-x^2 / 2),
// within 1e-7.
inline Vec::Reg GeluMul(Vec::Reg x, Vec::Reg up) {
  const Vec::Reg size = Vec::Max(x, Vec::Sub(Vec::Zero(), x));
  const Vec::Reg one = Vec::Set1(1.0f);
  constexpr float kP = 0.3275911f * 0.70710678118654752f;
  const Vec::Reg t = Vec::Div(one, Vec::MulAdd(Vec::Set1(kP), size, one));
  // The coefficients are halved.
  Vec::Reg y = Vec::MulAdd(Vec::Set1(0.5307027145f), t, Vec::Set1(-0.7265760135f));
  y = Vec::MulAdd(y, t, Vec::Set1(0.7107068705f));
  y = Vec::MulAdd(y, t, Vec::Set1(-0.142248368f));
  y = Vec::MulAdd(y, t, Vec::Set1(0.127414796f));
  // Past 16 the exponential is below 1e-55: the square stays finite.
  const Vec::Reg capped = Vec::Min(Vec::Set1(16.0f), size);
  const Vec::Reg tail = Exp2(Vec::Mul(Vec::Mul(capped, capped), Vec::Set1(-0.5f * kLog2E)));
  const Vec::Reg below = Vec::Mul(Vec::Mul(y, t), tail);
  const Vec::Reg gelu = Vec::Sub(Vec::Max(Vec::Zero(), x), Vec::Mul(size, below));
  return Vec::Mul(gelu, up);
}

}  // namespace

void GeluMulRow(const float* gate_up, int64_t n, float* out) {
  constexpr int kLanes = Vec::kLanes;
  const float* up = gate_up + n;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    Vec::Store(out + i, GeluMul(Vec::Load(gate_up + i), Vec::Load(up + i)));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    Vec::StoreFirst(out + i, rest,
                    GeluMul(Vec::LoadFirst(gate_up + i, rest), Vec::LoadFirst(up + i, rest)));
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

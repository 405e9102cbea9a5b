// See kernels/silu_mul.h. Compiled by silu_mul_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/silu_mul.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// For a gate below -88 the exponential is 2^127 or infinite: the result is then below 1e-36 in
// size, or zero.
inline Vec::Reg SiluMul(Vec::Reg gate, Vec::Reg up) {
  const Vec::Reg exponential = Exp2(Vec::Mul(gate, Vec::Set1(-kLog2E)));
  return Vec::Mul(Vec::Div(gate, Vec::Add(Vec::Set1(1.0f), exponential)), up);
}
inline Vec::Reg GeluTanhMul(Vec::Reg gate, Vec::Reg up) {
  // The power's factor is gate * (linear + cubic * gate^2).
  const Vec::Reg factor = Vec::MulAdd(Vec::Mul(gate, gate), Vec::Set1(kGeluTanhCubic * kLog2E),
                                      Vec::Set1(kGeluTanhLinear * kLog2E));
  const Vec::Reg exponential = Exp2(Vec::Mul(gate, factor));
  return Vec::Mul(Vec::Div(gate, Vec::Add(Vec::Set1(1.0f), exponential)), up);
}

// A bound is the first operand of Min and Max, which give the second one where either is NaN.
struct ClampedGate {
  Vec::Reg limit, least, factor;
  explicit ClampedGate(const ClampedSwiglu& by)
      : limit(Vec::Set1(by.limit)),
        least(Vec::Set1(-by.limit)),
        factor(Vec::Set1(-by.alpha * kLog2E)) {}
  Vec::Reg operator()(Vec::Reg gate, Vec::Reg up) const {
    gate = Vec::Min(limit, gate);
    up = Vec::Min(limit, Vec::Max(least, up));
    const Vec::Reg one = Vec::Set1(1.0f), exponential = Exp2(Vec::Mul(gate, factor));
    return Vec::Mul(Vec::Div(gate, Vec::Add(one, exponential)), Vec::Add(up, one));
  }
};

inline void GateRow(const float* gate_up, int64_t n, float* out, const auto& gate_by) {
  constexpr int kLanes = Vec::kLanes;
  const float* up = gate_up + n;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    Vec::Store(out + i, gate_by(Vec::Load(gate_up + i), Vec::Load(up + i)));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    Vec::StoreFirst(out + i, rest,
                    gate_by(Vec::LoadFirst(gate_up + i, rest), Vec::LoadFirst(up + i, rest)));
  }
}

}  // namespace

void SiluMulRow(const float* gate_up, int64_t n, float* out) {
  GateRow(
      gate_up, n, out,
      [](Vec::Reg gate, Vec::Reg up) __attribute__((always_inline)) { return SiluMul(gate, up); });
}
void GeluTanhMulRow(const float* gate_up, int64_t n, float* out) {
  GateRow(
      gate_up, n, out, [](Vec::Reg gate, Vec::Reg up) __attribute__((always_inline)) {
        return GeluTanhMul(gate, up);
      });
}
void ClampedSwigluMulRow(const float* gate_up, int64_t n, const ClampedSwiglu& by, float* out) {
  GateRow(gate_up, n, out, ClampedGate(by));
}

}  // namespace winnow::kernels::WINNOW_ISA

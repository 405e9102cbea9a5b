// See kernels/silu_mul.h. Compiled by silu_mul_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// For a gate below -88 the exponential is 2^127 or infinite: the result is then below 1e-36 in
// size, or zero.
inline Vec::Reg SiluMul(Vec::Reg gate, Vec::Reg up) {
  const Vec::Reg exponential = Exp2(Vec::Mul(gate, Vec::Set1(-kLog2E)));
  return Vec::Mul(Vec::Div(gate, Vec::Add(Vec::Set1(1.0f), exponential)), up);
}

}  // namespace

void SiluMulRow(const float* gate_up, int64_t n, float* out) {
  constexpr int kLanes = Vec::kLanes;
  const float* up = gate_up + n;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    Vec::Store(out + i, SiluMul(Vec::Load(gate_up + i), Vec::Load(up + i)));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    Vec::StoreFirst(out + i, rest,
                    SiluMul(Vec::LoadFirst(gate_up + i, rest), Vec::LoadFirst(up + i, rest)));
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

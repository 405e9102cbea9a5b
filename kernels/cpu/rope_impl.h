// See kernels/rope.h. Compiled by rope_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {

void RopeRow(float* x, int64_t heads, int64_t head_dim, const float* cos_sin) {
  constexpr int kLanes = Vec::kLanes;
  const int64_t half = head_dim / 2;
  const float* cosines = cos_sin;
  const float* sines = cos_sin + half;
  for (int64_t head = 0; head < heads; ++head) {
    float* first = x + head * head_dim;
    float* second = first + half;
    int64_t j = 0;
    for (; j + kLanes <= half; j += kLanes) {
      const Vec::Reg a = Vec::Load(first + j), b = Vec::Load(second + j);
      const Vec::Reg c = Vec::Load(cosines + j), s = Vec::Load(sines + j);
      Vec::Store(first + j, Vec::Sub(Vec::Mul(a, c), Vec::Mul(b, s)));
      Vec::Store(second + j, Vec::Add(Vec::Mul(b, c), Vec::Mul(a, s)));
    }
    if (j < half) {
      const int rest = static_cast<int>(half - j);
      const Vec::Reg a = Vec::LoadFirst(first + j, rest), b = Vec::LoadFirst(second + j, rest);
      const Vec::Reg c = Vec::LoadFirst(cosines + j, rest), s = Vec::LoadFirst(sines + j, rest);
      Vec::StoreFirst(first + j, rest, Vec::Sub(Vec::Mul(a, c), Vec::Mul(b, s)));
      Vec::StoreFirst(second + j, rest, Vec::Add(Vec::Mul(b, c), Vec::Mul(a, s)));
    }
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

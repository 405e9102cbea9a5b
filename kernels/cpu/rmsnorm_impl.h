// See kernels/rmsnorm.h. Compiled by rmsnorm_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {

void RmsNormRow(const float* x, int64_t n, const float* weight, float eps, float* out) {
  constexpr int kLanes = Vec::kLanes;
  // Four sums hide the latency of the addition.
  Vec::Reg sums[4] = {Vec::Zero(), Vec::Zero(), Vec::Zero(), Vec::Zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Vec::Reg value = Vec::Load(x + i + j * kLanes);
      sums[j] = Vec::MulAdd(value, value, sums[j]);
    }
  }
  Vec::Reg sum = Vec::Add(Vec::Add(sums[0], sums[1]), Vec::Add(sums[2], sums[3]));
  for (; i + kLanes <= n; i += kLanes) sum = Vec::MulAdd(Vec::Load(x + i), Vec::Load(x + i), sum);
  if (i < n) {
    const Vec::Reg value = Vec::LoadFirst(x + i, static_cast<int>(n - i));
    sum = Vec::MulAdd(value, value, sum);
  }
  const float mean = Vec::ReduceAdd(sum) / static_cast<float>(n);
  const Vec::Reg scale = Vec::Set1(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i + kLanes <= n; i += kLanes) {
    Vec::Store(out + i, Vec::Mul(Vec::Mul(Vec::Load(x + i), scale), Vec::Load(weight + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    Vec::StoreFirst(
        out + i, rest,
        Vec::Mul(Vec::Mul(Vec::LoadFirst(x + i, rest), scale), Vec::LoadFirst(weight + i, rest)));
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

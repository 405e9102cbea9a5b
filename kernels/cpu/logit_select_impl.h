// What selection by logits and pruning do with scores (kernels/logit_select.h, kernels/top_p.h).
// Compiled by logit_select_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

constexpr float kLeastNormal = 0x1p-126f;  // weights and masses below it are zero

float MaxOf(const float* scores, int64_t count) {
  constexpr int kLanes = Vec::kLanes;
  Vec::Reg max = Vec::Set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) max = Vec::Max(max, Vec::Load(scores + i));
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    max = Vec::Max(max, Vec::KeepFirst(Vec::LoadFirst(scores + i, rest), rest));
  }
  return Vec::ReduceMax(max);
}

}  // namespace

void ScoreMaxSum(const float* scores, int64_t count, float scale, float* max_sum) {
  constexpr int kLanes = Vec::kLanes;
  const float max = MaxOf(scores, count) * scale;
  const Vec::Reg factor = Vec::Set1(scale), minus_max = Vec::Set1(-max);
  Vec::Reg sum = Vec::Zero();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sum = Vec::Add(sum, Exp2(Vec::MulAdd(Vec::Load(scores + i), factor, minus_max)));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    const Vec::Reg last = Vec::KeepFirst(Vec::LoadFirst(scores + i, rest), rest);
    sum = Vec::Add(sum, Exp2(Vec::MulAdd(last, factor, minus_max)));
  }
  max_sum[0] = max;
  max_sum[1] = Vec::ReduceAdd(sum);
}

void WeighScores(float* scores, int64_t count, float scale) {
  constexpr int kLanes = Vec::kLanes;
  const Vec::Reg factor = Vec::Set1(scale);
  const Vec::Reg minus_max = Vec::Set1(-(MaxOf(scores, count) * scale));
  const auto weigh = [&](Vec::Reg score) {
    return ZeroBelow(Exp2(Vec::MulAdd(score, factor, minus_max)), kLeastNormal);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Vec::Store(scores + i, weigh(Vec::Load(scores + i)));
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    Vec::StoreFirst(scores + i, rest, weigh(Vec::LoadFirst(scores + i, rest)));
  }
}

void AddMasses(const float* scores, int64_t stride, int32_t queries, int64_t count, float scale,
               const float* max_inverse, float* masses) {
  constexpr int kLanes = Vec::kLanes;
  const Vec::Reg factor = Vec::Set1(scale);
  int64_t i = 0;
  const auto mass = [&](auto load) __attribute__((always_inline)) {
    Vec::Reg sum = Vec::Zero();
    for (int32_t g = 0; g < queries; ++g) {
      const Vec::Reg weight =
          Exp2(Vec::MulAdd(load(scores + g * stride + i), factor, Vec::Set1(-max_inverse[2 * g])));
      const Vec::Reg of_head = Vec::Mul(weight, Vec::Set1(max_inverse[2 * g + 1]));
      sum = Vec::Add(sum, ZeroBelow(of_head, kLeastNormal));
    }
    return sum;
  };
  for (; i + kLanes <= count; i += kLanes) {
    Vec::Store(masses + i, mass([](const float* p) { return Vec::Load(p); }));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    Vec::StoreFirst(masses + i, rest,
                    mass([rest](const float* p) { return Vec::LoadFirst(p, rest); }));
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

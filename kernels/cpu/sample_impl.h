// See kernels/sample.h. Compiled by sample_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// The first `count`, then minus infinities.
inline Vec::Reg LoadSome(const float* from, int count) {
  return count == Vec::kLanes ? Vec::Load(from)
                              : Vec::KeepFirst(Vec::LoadFirst(from, count), count);
}
inline int SomeOf(int64_t left) {
  return left < Vec::kLanes ? static_cast<int>(left) : Vec::kLanes;
}

}  // namespace

LogitFacts ExamineLogits(const float* logits, int64_t n) {
  Vec::Reg max = Vec::Set1(-INFINITY), zeros = Vec::Zero();
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
    const int count = SomeOf(n - i);
    const Vec::Reg x = LoadSome(logits + i, count);
    max = Vec::Max(x, max);
    zeros = Vec::MulAdd(x, Vec::Zero(), zeros);  // NaN from a NaN or an infinity on
  }
  LogitFacts facts = {Vec::ReduceMax(max), false};
  const float sum = Vec::ReduceAdd(zeros);
  if (sum == sum) return facts;
  for (int64_t i = 0; i < n; ++i) facts.has_nan = facts.has_nan || logits[i] != logits[i];
  return facts;
}

double WeighLogits(const LogitWeighing& call, const float* logits, int64_t n, float* weights) {
  const Vec::Reg max = Vec::Set1(call.max), high = Vec::Set1(call.high), low = Vec::Set1(call.low);
  const Vec::Reg limit = Vec::Set1(-41.0f), minus_limit = Vec::Set1(-42.0f);
  const Vec::Reg ln2 = Vec::Set1(0.69314718055994531f);
  Vec::Reg sum = Vec::Zero(), lost = Vec::Zero();  // what the sum's roundings lost
  for (int64_t i = 0; i < n; i += Vec::kLanes) {
    const int count = SomeOf(n - i);
    const Vec::Reg distance = Vec::Sub(LoadSome(logits + i, count), max);
    const Vec::Reg power = Vec::Mul(distance, high);
    // What is far away weighs nothing, and would make infinities of what follows.
    const Vec::Reg near = Vec::Max(power, minus_limit);
    Vec::Reg weight = Exp2(near);
    const Vec::Reg rest = Vec::ZeroWhereLess(
        Vec::MulAdd(distance, low, Vec::MulAdd(distance, high, Vec::Sub(Vec::Zero(), power))),
        power, limit);
    weight = Vec::ZeroWhereLess(Vec::MulAdd(weight, Vec::Mul(rest, ln2), weight), power, limit);
    if (weights != nullptr) {
      if (count == Vec::kLanes) {
        Vec::Store(weights + i, weight);
      } else {
        Vec::StoreFirst(weights + i, count, weight);
      }
    }
    const Vec::Reg more = Vec::Add(sum, weight);
    const Vec::Reg added = Vec::Sub(more, sum);
    lost = Vec::Add(lost, Vec::Add(Vec::Sub(sum, Vec::Sub(more, added)), Vec::Sub(weight, added)));
    sum = more;
  }
  float sums[Vec::kLanes], losses[Vec::kLanes];
  Vec::Store(sums, sum);
  Vec::Store(losses, lost);
  double all = 0;
  for (int lane = 0; lane < Vec::kLanes; ++lane) all += double{sums[lane]} + double{losses[lane]};
  return all;
}

}  // namespace winnow::kernels::WINNOW_ISA

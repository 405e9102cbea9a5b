// See kernels/sample.h. Compiled by sample_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/token_noise.h"

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

// A time is at least its share, and that at least its leading 24 bits: most tokens weigh too little to lead even so, and
// have no logarithm made. The compiler makes vectors of the loop over a strip.
void DrawTokens(uint64_t noise, int32_t first, const float* weights, int64_t n, DrawLead* lead) {
  constexpr int kStrip = 64;
  constexpr float kUnit = 0x1p-24f * (1 - 0x1p-20f);  // less than it is, for the rounding
  for (int64_t begin = 0; begin < n; begin += kStrip) {
    const int count = n - begin < kStrip ? static_cast<int>(n - begin) : kStrip;
    float strip[kStrip] = {};
    for (int i = 0; i < count; ++i) strip[i] = weights[begin + i];
    const auto token = static_cast<uint32_t>(first + begin);
    const auto least = static_cast<float>(lead->speed) * kUnit;
    float needed[kStrip];
    int may_lead = 0;
    for (int i = 0; i < kStrip; ++i) {
      const auto leading = static_cast<int32_t>(TokenNoise(noise, token + i) >> 8);
      needed[i] = least * static_cast<float>(leading);
      may_lead |= strip[i] > needed[i];
    }
    if (may_lead == 0) continue;
    for (int i = 0; i < count; ++i) {
      if (!(strip[i] > needed[i])) continue;
      const double speed = strip[i] / DrawTime(DrawShare(noise, token + i));
      if (speed > lead->speed) *lead = {speed, static_cast<int32_t>(token + i)};
    }
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

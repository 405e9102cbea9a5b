// See kernels/completion.h. Compiled by completion_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/exp2_impl.h"
#include "kernels/cpu/ops.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// exp(a - m). Below 2^-64 it is zero: a million such are less than what a sum of one rounds away,
// and no sum gets denormal, which would be slow.
inline Vec::Reg Weight(Vec::Reg a, Vec::Reg m) {
  return ZeroBelow(Exp2(Vec::Mul(Vec::Sub(a, m), Vec::Set1(kLog2E))), 0x1p-64f);
}

// The features [j, j + kLanes), or the last `lanes` of them where kLast.
template <bool kLast>
inline uint64_t WeightsOf(const SummaryWeightsCall& call, int64_t j, int lanes) {
  const auto load = [lanes](const float* p) {
    return kLast ? Vec::LoadFirst(p, lanes) : Vec::Load(p);
  };
  const auto store = [lanes](float* p, Vec::Reg x) {
    if constexpr (kLast) {
      Vec::StoreFirst(p, lanes, x);
    } else {
      Vec::Store(p, x);
    }
  };
  Vec::Reg m = load(call.m + j);
  Vec::Reg sum = load(call.sum + j);
  Vec::Reg largest = m;
  for (int32_t t = 0; t < call.num_tokens; ++t) {
    largest = Vec::Max(largest, load(call.features + t * call.stride + j));
  }
  uint64_t raising = 0;
  const auto above = [](Vec::Reg b, Vec::Reg a) { return Vec::ReduceMax(Vec::Sub(b, a)) > 0; };
  if (!above(largest, m)) {  // nearly always: the n-th token raises m with a chance of 1 in n
    for (int32_t t = 0; t < call.num_tokens; ++t) {
      float* a = call.features + t * call.stride + j;
      const Vec::Reg weight = Weight(load(a), m);
      sum = Vec::Add(sum, weight);
      store(a, weight);
      store(call.factors + t * call.stride + j,
            Vec::Set1(1.0f));  // other features may raise theirs
    }
  } else {
    Vec::Reg earlier_sum = load(call.earlier_sum + j);
    for (int32_t t = 0; t < call.num_tokens; ++t) {
      float* at = call.features + t * call.stride + j;
      const Vec::Reg a = load(at);
      const Vec::Reg raised = Vec::Max(a, m);
      Vec::Reg factor = Vec::Set1(1.0f);
      if (above(raised, m)) {
        raising |= uint64_t{1} << t;
        factor = Weight(m, raised);
        sum = Vec::Mul(sum, factor);
        earlier_sum = Vec::Mul(earlier_sum, factor);
        m = raised;
      }
      store(call.factors + t * call.stride + j, factor);
      const Vec::Reg weight = Weight(a, m);
      sum = Vec::Add(sum, weight);
      store(at, weight);
    }
    store(call.earlier_sum + j, earlier_sum);
    store(call.m + j, m);
  }
  store(call.sum + j, sum);
  return raising;
}

// The largest tile whose sums stay in registers.
#if defined(__AVX512F__)
constexpr int kOuterRows = 12, kOuterRegs = 2;
#elif defined(__AVX2__)
constexpr int kOuterRows = 6, kOuterRegs = 2;
#else
constexpr int kOuterRows = 4, kOuterRegs = 4;
#endif

template <int kRows, int kRegs>
inline void OuterTile(const AddOuterCall& call, int64_t row, int64_t col) {
  Vec::Reg sum[kRows][kRegs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) {
      sum[r][i] = Vec::Load(call.sums + (row + r) * call.cols + col + i * Vec::kLanes);
    }
  }
  const float* weights = call.weights + row;
  const float* values = call.values + col;
  for (int64_t s = 0; s < call.count; ++s) {
    Vec::Reg value[kRegs];
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) value[i] = Vec::Load(values + i * Vec::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec::Reg weight = Vec::Set1(weights[r]);
#pragma GCC unroll 4
      for (int i = 0; i < kRegs; ++i) sum[r][i] = Vec::MulAdd(weight, value[i], sum[r][i]);
    }
    weights += call.weights_stride;
    values += call.cols;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegs; ++i) {
      Vec::Store(call.sums + (row + r) * call.cols + col + i * Vec::kLanes, sum[r][i]);
    }
  }
}

template <int kRows, int kRegs = kOuterRegs>
void OuterCols(const AddOuterCall& call, int64_t row, int64_t col) {
  for (; col + kRegs * Vec::kLanes <= call.cols; col += kRegs * Vec::kLanes) {
    OuterTile<kRows, kRegs>(call, row, col);
  }
  if constexpr (kRegs > 1) {
    if (col < call.cols) OuterCols<kRows, kRegs / 2>(call, row, col);
  }
}

template <int kRows = kOuterRows>
void OuterRows(const AddOuterCall& call, int64_t row) {
  for (; row + kRows <= call.rows; row += kRows) OuterCols<kRows>(call, row, 0);
  if constexpr (kRows > 1) {
    if (row < call.rows) OuterRows<kRows - 1>(call, row);
  }
}

}  // namespace

uint64_t SummaryWeights(const SummaryWeightsCall& call) {
  constexpr int kLanes = Vec::kLanes;
  uint64_t raising = 0;
  int64_t j = 0;
  for (; j + kLanes <= call.num_features; j += kLanes) raising |= WeightsOf<false>(call, j, kLanes);
  if (j < call.num_features) {
    raising |= WeightsOf<true>(call, j, static_cast<int>(call.num_features - j));
  }
  return raising;
}

void AddOuter(const AddOuterCall& call) { OuterRows(call, 0); }

}  // namespace winnow::kernels::WINNOW_ISA

// See kernels/quantized_matmul.h. Compiled by quantized_matmul_{scalar,avx2,avx512}.cc.
#include <cstring>

#include "kernels/cpu/ops.h"
#include "kernels/cpu/quantized_kinds_impl.h"
#include "kernels/cpu/quantized_panel.h"
#include "kernels/cpu/round_row_impl.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_loops_impl.h"
#include "kernels/quantized_matmul.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

struct Row {
  const std::byte* integers;
  const float *scales, *scaled_sums;
  const int32_t* sums;
};

// Four inputs in every lane. From memory, as a broadcast out of a register costs a port that products need.
inline Ints::Reg FourInputs(const std::byte* at) {
  int32_t four;
  std::memcpy(&four, at, sizeof four);
  return Ints::Set1(four);
}

// Adds a group to the sums of kRows rows and kPanels panels. `at`: the group's first input. ahead_bytes: the call's.
template <typename K, int kRows, int kPanels>
inline void AddGroup(const Row* rows, int64_t at, int32_t bias, const std::byte* head,
                     const std::byte* group, int64_t panel_bytes, int64_t ahead_bytes,
                     Vec::Reg (&sums)[kRows][kPanels * kRegsPerPanel]) {
  [[maybe_unused]] const int64_t ahead = AheadBytes(ahead_bytes);
  // Integers begin at what is taken from them.
  constexpr bool kTakes = K::kBias || (K::kMostBits == 8 && Ints::kTaken != 0);
  const int32_t taken = bias - (K::kMostBits == 8 ? Ints::kTaken : 0);
  using Sum = GroupSum<K::kMostBits>;
  Sum products[kRows][kPanels * kRegsPerPanel];
  for (int r = 0; r < kRows; ++r) {
    Ints::Reg first = Ints::Zero();
    if constexpr (kTakes) {
      int32_t sum = rows[r].sums[at / 16];
      if constexpr (K::kGroup == 32) sum += rows[r].sums[at / 16 + 1];
      first = Ints::Set1(-taken * sum);
    }
    for (Sum& product : products[r]) product.Begin(first);
  }
  constexpr int kStepInputs = K::kBits == 4 ? 8 : 4, kSteps = K::kGroup / kStepInputs;
  for (int step = 0; step < kSteps; ++step) {
    Ints::Reg low[kPanels * kRegsPerPanel];
    [[maybe_unused]] Ints::Reg high[kPanels * kRegsPerPanel];
    for (int i = 0; i < kPanels * kRegsPerPanel; ++i) {
      low[i] = Ints::Load(group + i / kRegsPerPanel * panel_bytes + step * kStepBytes,
                          i % kRegsPerPanel);
      if constexpr (kRows == 1) {
        if (ahead > 0) {
          __builtin_prefetch(group + i / kRegsPerPanel * panel_bytes + step * kStepBytes + ahead);
        }
      }
      if constexpr (K::kBits == 4) {
        high[i] = Ints::HighHalves(low[i]);
        low[i] = Ints::LowHalves(low[i]);
      }
      if constexpr (K::kTable) {
        high[i] = Ints::LookUp(high[i]);
        low[i] = Ints::LookUp(low[i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const std::byte* inputs = rows[r].integers + at + step * kStepInputs;
      const Ints::Reg first = FourInputs(inputs);
      for (int i = 0; i < kPanels * kRegsPerPanel; ++i) {
        products[r][i].Add(low[i], first);
      }
      if constexpr (K::kBits == 4) {
        const Ints::Reg second = FourInputs(inputs + 4);
        for (int i = 0; i < kPanels * kRegsPerPanel; ++i) {
          products[r][i].Add(high[i], second);
        }
      }
    }
    // A table's integers are larger.
    if (step + 1 < kSteps && !(K::kTable && 2 * (step + 1) == kSteps)) continue;
    for (auto& of_row : products) {
      for (Sum& product : of_row) product.TakePairs();
    }
  }
  for (int i = 0; i < kPanels * kRegsPerPanel; ++i) {
    const int64_t panel = i / kRegsPerPanel * panel_bytes;
    if constexpr (kRows == 1) {
      if (ahead > 0) __builtin_prefetch(group + panel + K::kIntegerBytes + ahead);
    }
    const Vec::Reg scale = GroupFactor<K>(head + panel, group + panel, 0, i % kRegsPerPanel);
    [[maybe_unused]] Vec::Reg offset;
    if constexpr (K::kOffset)
      offset = GroupFactor<K>(head + panel, group + panel, 1, i % kRegsPerPanel);
    for (int r = 0; r < kRows; ++r) {
      Vec::Reg& to = sums[r][i];
      const Vec::Reg t = Vec::Set1(rows[r].scales[at / 32]);
      to = Vec::MulAdd(Ints::ToFloat(products[r][i].sum), Vec::Mul(scale, t), to);
      if constexpr (K::kOffset) {
        to = Vec::MulAdd(offset, Vec::Set1(rows[r].scaled_sums[at / 32]), to);
      }
    }
  }
}

// One row takes more panels at a time, because each product waits for the one before it on the same output.
template <typename K>
struct QuantizedKernel {
  static constexpr int kMostRows = kRegsPerPanel == 16 ? 2 : 4,
                       kMostPanels = kRegsPerPanel == 1 ? 2 : 1;
  static constexpr int kOneRowPanels = kRegsPerPanel == 1 ? 4 : kRegsPerPanel == 2 ? 2 : 1;

  template <int kRows, int kPanels>
  static void Tile(const QuantizedMatmulCall& call, int64_t row, int64_t panel) {
    const int64_t n = call.in_features;
    const int64_t panel_bytes = QuantizedPanelBytes(call.shape, n);
    Row rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      const std::byte* at =
          static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row + r) * call.row_bytes;
      rows[r] = {at, reinterpret_cast<const float*>(at + PreparedRow::ScalesAt(n)),
                 reinterpret_cast<const float*>(at + PreparedRow::ScaledSumsAt(n)),
                 reinterpret_cast<const int32_t*>(at + PreparedRow::SumsAt(n))};
    }
    Vec::Reg sums[kRows][kPanels * kRegsPerPanel];
    for (auto& row_sums : sums) {
      for (Vec::Reg& sum : row_sums) sum = Vec::Zero();
    }
    const std::byte* block = call.panels + panel * panel_bytes;
    const int64_t head_bytes = PanelHeadBytes(call.shape);
    const int64_t group_bytes = PanelGroupBytes(call.shape);
    const int64_t groups = call.shape.groups();
    for (int64_t at = 0; at < n;) {
      const std::byte* group = block + head_bytes;
      for (int64_t g = 0; g < groups; ++g, at += K::kGroup, group += group_bytes) {
        AddGroup<K, kRows, kPanels>(rows, at, call.shape.bias, block, group, panel_bytes,
                                    call.ahead_bytes, sums);
      }
      block = group;
    }
    StoreTile(call, row, panel, sums);
  }
};

}  // namespace

void QuantizedMatmulTiles(const QuantizedMatmulCall& call, int64_t first_row, int64_t last_row,
                          int64_t first_panel, int64_t last_panel) {
  WithKind(call.shape, [&](auto kind) {
    TileLoops<QuantizedKernel<decltype(kind)>, QuantizedMatmulCall>::Run(call, first_row, last_row,
                                                                         first_panel, last_panel);
  });
}

void PrepareRoundedRow(const float* x, int64_t n, void* out) {
  std::byte* to = static_cast<std::byte*>(out);
  float* scales = reinterpret_cast<float*>(to + PreparedRow::ScalesAt(n));
  int32_t* sums = reinterpret_cast<int32_t*>(to + PreparedRow::SumsAt(n));
  float* scaled_sums = reinterpret_cast<float*>(to + PreparedRow::ScaledSumsAt(n));
  static_assert(PreparedRow::kSumValues == kRoundedValues / 2);
  for (int64_t at = 0; at < n; at += kRoundedValues) {
    const Rounding rounding(x + at, kRoundedValues);
    int32_t* const halves = sums + at / PreparedRow::kSumValues;
    rounding.Round(x + at, to + at, halves);
    scales[at / kRoundedValues] = rounding.scale();
    scaled_sums[at / kRoundedValues] = rounding.scale() * static_cast<float>(halves[0] + halves[1]);
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

// See kernels/int8_matmul.h. Compiled by int8_matmul_{scalar,avx2,avx512}.cc.
#include <cstring>

#include "kernels/cpu/int8_panel.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/quantized_kinds_impl.h"
#include "kernels/cpu/round_row_impl.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_loops_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

struct Int8Row {
  const std::byte* integers;
  const float* scales;
  const int32_t* sums;
};

// One row takes more panels at a time, because each product waits for the one before it on the same output.
template <int kBits>
struct Int8Kernel {
  static constexpr int kMostRows = kRegsPerPanel == 16 ? 2 : 4,
                       kMostPanels = kRegsPerPanel == 1 ? 2 : 1;
  static constexpr int kOneRowPanels = kRegsPerPanel == 1 ? 4 : kRegsPerPanel == 2 ? 2 : 1;

  template <int kRows, int kPanels>
  static void Tile(const Int8MatmulCall& call, int64_t row, int64_t panel) {
    constexpr int kRegs = kPanels * kRegsPerPanel;
    const int64_t n = call.in_features, panel_bytes = Int8PanelBytes(kBits, n);
    Int8Row rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      const std::byte* at =
          static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row + r) * call.row_bytes;
      rows[r] = {at, reinterpret_cast<const float*>(at + PreparedInt8Row::ScalesAt(n)),
                 reinterpret_cast<const int32_t*>(at + PreparedInt8Row::SumsAt(n))};
    }
    Vec::Reg sums[kRows][kRegs];
    for (auto& row_sums : sums) {
      for (Vec::Reg& sum : row_sums) sum = Vec::Zero();
    }
    const std::byte* group = call.panels + panel * panel_bytes;
    for (int64_t g = 0; g < Int8Groups(n); ++g, group += Int8GroupBytes(kBits)) {
      AddGroup<kRows, kPanels>(rows, g, group, panel_bytes, call.ahead_bytes, sums);
    }
    StoreTile(call, row, panel, sums);
  }

 private:
  // More than the integers that products take: signed ones of 8 bits become unsigned by 128 more, less Ints::kTaken.
  static constexpr int32_t kBias = kBits == 8 ? 128 - Ints::kTaken : kInt4Bias;
  static constexpr int kStepsTogether = 8 / kBits;  // in the same bytes
  static constexpr int64_t kPairedSteps = 8;        // GroupSum has room for 32 integers

  // Adds group g, whose weights are at `group`, to the sums of kRows rows and kPanels panels.
  template <int kRows, int kPanels>
  static void AddGroup(const Int8Row* rows, int64_t g, const std::byte* group, int64_t panel_bytes,
                       int64_t ahead_bytes, Vec::Reg (&sums)[kRows][kPanels * kRegsPerPanel]) {
    constexpr int kRegs = kPanels * kRegsPerPanel;
    [[maybe_unused]] const int64_t ahead = AheadBytes(ahead_bytes);
    GroupSum<kBits> products[kRows][kRegs];
    for (int r = 0; r < kRows; ++r) {
      for (auto& product : products[r]) product.Begin(Ints::Set1(-kBias * rows[r].sums[g]));
    }
    for (int64_t step = 0; step < kInt8GroupSteps; step += kStepsTogether) {
      Ints::Reg w[kStepsTogether][kRegs];
      for (int i = 0; i < kRegs; ++i) {
        const std::byte* const at =
            group + i / kRegsPerPanel * panel_bytes + step / kStepsTogether * kInt8StepBytes;
        const Ints::Reg bytes = Ints::Load(at, i % kRegsPerPanel);
        if constexpr (kBits == 8) {
          w[0][i] = Ints::FlipSigns(bytes);
        } else {
          w[0][i] = Ints::LowHalves(bytes);
          w[1][i] = Ints::HighHalves(bytes);
        }
        if constexpr (kRows == 1) {
          if (ahead > 0) __builtin_prefetch(at + ahead);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int s = 0; s < kStepsTogether; ++s) {
          int32_t four;
          std::memcpy(&four, rows[r].integers + g * kInt8GroupValues + (step + s) * kInt8StepInputs,
                      sizeof four);
          const Ints::Reg inputs = Ints::Set1(four);
          for (int i = 0; i < kRegs; ++i) products[r][i].Add(w[s][i], inputs);
        }
        if ((step + kStepsTogether) % kPairedSteps == 0) {
          for (auto& product : products[r]) product.TakePairs();
        }
      }
    }
    for (int i = 0; i < kRegs; ++i) {
      const std::byte* const scales = group + i / kRegsPerPanel * panel_bytes + Int8ScalesAt(kBits);
      if constexpr (kRows == 1) {
        if (ahead > 0) __builtin_prefetch(scales + ahead);
      }
      const Vec::Reg scale =
          Vec::Load(reinterpret_cast<const float*>(scales) + i % kRegsPerPanel * Vec::kLanes);
      for (int r = 0; r < kRows; ++r) {
        sums[r][i] = Vec::FusedMulAdd(Ints::ToFloat(products[r][i].sum),
                                      Vec::Mul(scale, Vec::Set1(rows[r].scales[g])), sums[r][i]);
      }
    }
  }
};

}  // namespace

void Int8MatmulTiles(const Int8MatmulCall& call, int64_t first_row, int64_t last_row,
                     int64_t first_panel, int64_t last_panel) {
  const auto run = [&]<int kBits>() {
    TileLoops<Int8Kernel<kBits>, Int8MatmulCall>::Run(call, first_row, last_row, first_panel,
                                                      last_panel);
  };
  call.integer_bits == 4 ? run.template operator()<4>() : run.template operator()<8>();
}

void PrepareInt8Row(const float* x, int64_t n, void* out) {
  std::byte* const to = static_cast<std::byte*>(out);
  float* const scales = reinterpret_cast<float*>(to + PreparedInt8Row::ScalesAt(n));
  int32_t* const sums = reinterpret_cast<int32_t*>(to + PreparedInt8Row::SumsAt(n));
  for (int64_t g = 0; g < Int8Groups(n); ++g) {
    const int64_t first = g * kInt8GroupValues;
    const int64_t count = n - first < kInt8GroupValues ? n - first : kInt8GroupValues;
    const Rounding rounding(x + first, count);
    scales[g] = rounding.scale();
    sums[g] = 0;
    for (int64_t i = 0; i < count; i += kRoundedValues) {
      int32_t halves[2];
      rounding.Round(x + first + i, to + first + i, halves);
      sums[g] += halves[0] + halves[1];
    }
    std::memset(to + first + count, 0, static_cast<size_t>(kInt8GroupValues - count));
  }
}

}  // namespace winnow::kernels::WINNOW_ISA

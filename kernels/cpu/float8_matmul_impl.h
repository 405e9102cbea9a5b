// See kernels/float8_matmul.h. Compiled by float8_matmul_{scalar,avx2,avx512}.cc.
#include <cstring>

#include "kernels/cpu/float8_panel.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_impl.h"
#include "kernels/cpu/tile_loops_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

// Weights of a step become float16 by moving their magnitude seven bits up below the sign, and then float32. The sign comes
// along twice where 16 bits are shifted as a signed number; the mask takes the second away.
struct Float8Panels {
  static constexpr size_t kStepBytes = kFloat8StepBytes;
  using Row = float;
  static constexpr int kRowPerStep = kFloat8StepInputs;
  struct Weights {
    Vec::Reg first, second;
  };
  struct Input {
    Vec::Reg first, second;
  };
  static Weights LoadWeights(const std::byte* step, int i) {
#if defined(__AVX512F__)
    const auto widen = [](__m256i high) {
      return _mm512_cvtph_ps(
          _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(kMask)));
    };
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step) + i);
    return {widen(_mm256_slli_epi16(pairs, 8)), widen(pairs)};
#elif defined(__AVX2__)
    const auto widen = [](__m128i high) {
      return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(kMask)));
    };
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(step) + i);
    return {widen(_mm_slli_epi16(pairs, 8)), widen(pairs)};
#else
    uint16_t pair;
    std::memcpy(&pair, step + kFloat8StepInputs * i, sizeof pair);
    const auto widen = [](uint16_t high) {
      return ToFloat(F16{static_cast<uint16_t>((high & 0x8000) | (high & 0x7f00) >> 1)});
    };
    return {widen(static_cast<uint16_t>(pair << 8)), widen(pair)};
#endif
  }
  static Input LoadInput(const Row* row) { return {Vec::Set1(row[0]), Vec::Set1(row[1])}; }
  static Vec::Reg MulAdd(Input x, Weights w, Vec::Reg sum) {
    return Vec::MulAdd(x.second, w.second, Vec::MulAdd(x.first, w.first, sum));
  }

 private:
  [[maybe_unused]] static constexpr auto kMask = static_cast<int16_t>(0xbf80);
};

struct Float8Kernel {
  // Fewer sums than registers have room for, as the weights of a step take two registers each.
#if defined(__AVX512F__)
  static constexpr int kMostRows = 8, kMostPanels = 2, kOneRowPanels = 4;
#elif defined(__AVX2__)
  static constexpr int kMostRows = 4, kMostPanels = 1, kOneRowPanels = 2;
#else
  static constexpr int kMostRows = 2, kMostPanels = 1, kOneRowPanels = 1;
#endif

  template <int kRows, int kPanels>
  static void Tile(const Float8MatmulCall& call, int64_t row, int64_t panel) {
    const auto panel_bytes =
        static_cast<size_t>(Float8PanelBytes(call.block_values, call.in_features));
    const auto row_stride = static_cast<int64_t>(call.row_bytes / sizeof(float));
    const float* x = static_cast<const float*>(call.rows) + row * row_stride;
    const std::byte* block = call.panels + static_cast<size_t>(panel) * panel_bytes;
    TileSums<kRows, kPanels> totals;
    for (auto& of_row : totals.reg) {
      for (Vec::Reg& total : of_row) total = Vec::Zero();
    }
    for (int64_t at = 0; at < call.in_features; at += call.block_values) {
      TileSums<kRows, kPanels> sums;
      for (auto& of_row : sums.reg) {
        for (Vec::Reg& sum : of_row) sum = Vec::Zero();
      }
      AccumulateTile<Float8Panels, kRows, kPanels>(x + at, row_stride, block + kFloat8ScaleBytes,
                                                   panel_bytes,
                                                   call.block_values / kFloat8StepInputs, sums);
      for (int i = 0; i < totals.kRegs; ++i) {
        const Vec::Reg scale =
            Vec::Load(reinterpret_cast<const float*>(
                          block + static_cast<size_t>(i / kRegsPerPanel) * panel_bytes) +
                      i % kRegsPerPanel * Vec::kLanes);
        for (int r = 0; r < kRows; ++r) {
          totals.reg[r][i] = Vec::MulAdd(sums.reg[r][i], scale, totals.reg[r][i]);
        }
      }
      block += Float8BlockBytes(call.block_values);
    }
    StoreTile(call, row, panel, totals.reg);
  }
};

}  // namespace

void Float8MatmulTiles(const Float8MatmulCall& call, int64_t first_row, int64_t last_row,
                       int64_t first_panel, int64_t last_panel) {
  TileLoops<Float8Kernel, Float8MatmulCall>::Run(call, first_row, last_row, first_panel,
                                                 last_panel);
}

}  // namespace winnow::kernels::WINNOW_ISA

// See kernels/float8_matmul.h. Compiled by float8_matmul_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/float8_panel.h"
#include "kernels/cpu/float8_weights_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_impl.h"
#include "kernels/cpu/tile_loops_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

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
    totals.Clear();
    for (int64_t at = 0; at < call.in_features; at += call.block_values) {
      TileSums<kRows, kPanels> sums;
      sums.Clear();
      AccumulateTile<Float8Panels, kRows, kPanels>(x + at, row_stride, block + kFloat8ScaleBytes,
                                                   panel_bytes,
                                                   call.block_values / kFloat8StepInputs, sums);
      AddScaled(sums, block, panel_bytes, totals);
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

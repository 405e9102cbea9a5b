// See kernels/matmul.h. Compiled by matmul_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

template <typename Panels, int kRows, int kPanels>
void Tile(const MatmulCall& call, int64_t row, int64_t panel) {
  const size_t panel_bytes = PanelBytes(Panels::kDType, call.in_features);
  TileSums<kRows, kPanels> sums;
  for (auto& row_sums : sums.reg) {
    for (Vec::Reg& sum : row_sums) sum = Vec::Zero();
  }
  const auto* rows = reinterpret_cast<const typename Panels::Row*>(
      static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row) * call.row_bytes);
  AccumulateTile<Panels, kRows, kPanels>(rows, static_cast<int64_t>(call.row_bytes / sizeof(*rows)),
                                         call.panels + static_cast<size_t>(panel) * panel_bytes,
                                         panel_bytes, PanelSteps(Panels::kDType, call.in_features),
                                         sums);
  StoreTile(call, row, panel, sums.reg);
}

// All rows against kPanels panels, which stay in the L2 cache from the first tile of rows to the
// last.
template <typename Panels, int kPanels, int kRows = kTileRows>
void RowTiles(const MatmulCall& call, int64_t row, int64_t last_row, int64_t panel) {
  for (; row + kRows <= last_row; row += kRows) Tile<Panels, kRows, kPanels>(call, row, panel);
  if constexpr (kRows > 1) {
    if (row < last_row) RowTiles<Panels, kPanels, kRows - 1>(call, row, last_row, panel);
  }
}

template <typename Panels, int kPanels = kTilePanels>
void PanelGroups(const MatmulCall& call, int64_t first_row, int64_t last_row, int64_t panel,
                 int64_t last_panel) {
  for (; panel + kPanels <= last_panel; panel += kPanels) {
    RowTiles<Panels, kPanels>(call, first_row, last_row, panel);
  }
  if constexpr (kPanels > 1) {
    if (panel < last_panel)
      PanelGroups<Panels, kPanels / 2>(call, first_row, last_row, panel, last_panel);
  }
}

template <typename Panels, int kPanels = kOneRowPanels>
void OneRow(const MatmulCall& call, int64_t row, int64_t panel, int64_t last_panel) {
  for (; panel + kPanels <= last_panel; panel += kPanels)
    Tile<Panels, 1, kPanels>(call, row, panel);
  if constexpr (kPanels > 1) {
    if (panel < last_panel) OneRow<Panels, kPanels / 2>(call, row, panel, last_panel);
  }
}

template <typename Panels>
void Tiles(const MatmulCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
           int64_t last_panel) {
  if (last_row - first_row == 1) {
    OneRow<Panels>(call, first_row, first_panel, last_panel);
  } else {
    PanelGroups<Panels>(call, first_row, last_row, first_panel, last_panel);
  }
}

}  // namespace

void MatmulTiles(const MatmulCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                 int64_t last_panel) {
  switch (call.compute) {
    case DType::kF32:
      return Tiles<F32Panels>(call, first_row, last_row, first_panel, last_panel);
    case DType::kF16:
      return Tiles<F16Panels>(call, first_row, last_row, first_panel, last_panel);
    case DType::kBF16:
      return Tiles<BF16Panels>(call, first_row, last_row, first_panel, last_panel);
  }
}

void PrepareBF16Row(const float* x, int64_t n, void* out) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  uint16_t* to = static_cast<uint16_t*>(out);
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) Vec::StoreBF16(to + i, Vec::Load(x + i));
  if (i < n) {
    uint16_t rest[Vec::kLanes];
    Vec::StoreBF16(rest, Vec::LoadFirst(x + i, static_cast<int>(n - i)));
    __builtin_memcpy(to + i, rest, static_cast<size_t>(2 * ((n - i + 1) & ~int64_t{1})));
  }
#else
  float* to = static_cast<float*>(out);
  uint16_t rounded[Vec::kLanes];
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) {
    Vec::Store(to + i, Vec::StoreBF16(rounded, Vec::Load(x + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    Vec::StoreFirst(to + i, rest, Vec::StoreBF16(rounded, Vec::LoadFirst(x + i, rest)));
  }
  if (n % 2 != 0) to[n] = 0;
#endif
}

}  // namespace winnow::kernels::WINNOW_ISA

// Products by matrix tiles of bfloat16: 16 rows times 16 outputs, 32 inner values an instruction. Panels (panel.h) and rows are those of
// AVX-512's bfloat16 product: sixteen steps of a panel are a tile of 16 x 64 bytes as they lie.
//
// `Tiles` is the processor's (amx_tiles.h), or the tests':
//   Configure(shapes)                          all tiles' shapes; their values become zero
//   Zero<t>(), Load<t>(from, stride), Store<t>(to, stride)
//   Dot<sum, rows, panel>()                    sum += rows x panel, bfloat16
//   DotBytes<sum, rows, panel>()               the same of signed bytes, in int32: exact
//   Release()                                  at the end
//
// Order (Intel's description of tdpbf16ps): of each 32 inner values, one chain of multiply-adds over those at even places
// and one over those at odd places, both from zero; their sum is added to what was there. Denormals count as zero. Inner
// dimensions that end within a tile end with zeros. A row's order depends on nothing but the inner dimension.
#ifndef WINNOW_KERNELS_CPU_AMX_TILES_IMPL_H_
#define WINNOW_KERNELS_CPU_AMX_TILES_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/panel.h"

namespace winnow::kernels {
namespace {

constexpr int kNumTiles = 8;
constexpr int kTileHeight = 16;        // rows of a tile, at most
constexpr int kTileBytesPerRow = 64;   // 32 bf16 of x; a step of a panel; 16 sums
constexpr int64_t kStepsPerTile = 16;  // of a panel

struct TileShape {
  uint8_t rows = 0;
  uint16_t bytes_per_row = 0;
};

// Operands of a product of a few rows with a few panels.
struct TileOperands {
  const std::byte* rows = nullptr;  // 4 * steps bytes each
  size_t row_bytes = 0;
  const std::byte* panels = nullptr;
  size_t panel_bytes = 0;
  int64_t steps = 0;
  int64_t ahead_bytes = 0;  // how far ahead panels that lie in memory are asked for; 0: not at all
};

// kRowTiles tiles of rows times kPanels panels, in the tiles from kFirst on, which have been configured for kPanelsMax panels.
// Two times two: each tile that is loaded meets two others. One times four: of few rows, where panels are all that counts.
// kBytes: values are signed bytes, of which a step has twice as many.
template <typename Tiles, int kRowTiles, int kPanels, int kFirst = 0,
          int kPanelsMax = 4 / kRowTiles, bool kBytes = false>
class TileProduct {
  static_assert(kRowTiles <= 2 && kPanels <= kPanelsMax);
  // Sums come first, then rows, then panels: four of these take turns in the three tiles that are left.
  static constexpr int kFirstRows = kFirst + kRowTiles * kPanelsMax;

 public:
  static constexpr int kFirstPanel = kFirstRows + kRowTiles;
  template <int p>
  static constexpr int kPanelTile = kFirstPanel + p % (kNumTiles - kFirstPanel);
  template <int r, int p>
  static constexpr int kSum = kFirst + r* kPanelsMax + p;

  // For products of this many row tiles and up to kPanelsMax panels. `rows`: at most kRowTiles * kTileHeight, and more than
  // (kRowTiles - 1) * kTileHeight.
  static void Configure(int rows) {
    TileShape shapes[kNumTiles];
    for (TileShape& shape : shapes) shape = {kTileHeight, kTileBytesPerRow};
    for (int r = 0; r < kRowTiles; ++r) {
      const auto height = static_cast<uint8_t>(Height(rows, r));
      for (int p = 0; p < kPanelsMax; ++p) shapes[kFirst + r * kPanelsMax + p].rows = height;
      shapes[kFirstRows + r].rows = height;
    }
    Tiles::Configure(shapes);
  }
  // Rows of the row tile r.
  static int Height(int rows, int r) {
    const int left = rows - r * kTileHeight;
    return left < kTileHeight ? left : kTileHeight;
  }

  // Calls visit.operator()<r, p>() for each sum.
  template <int i = 0>
  static void ForEachSum(auto visit) {
    if constexpr (i < kRowTiles * kPanels) {
      visit.template operator()<i / kPanels, i % kPanels>();
      ForEachSum<i + 1>(visit);
    }
  }
  static void ZeroSums() {
    ForEachSum([]<int r, int p>() { Tiles::template Zero<kSum<r, p>>(); });
  }
  static void Accumulate(const TileOperands& operands, int rows) {
    TileOperands at = operands;
    for (; at.steps >= kStepsPerTile; at.steps -= kStepsPerTile) {
      Step(at);
      at.rows += kTileBytesPerRow;
      at.panels += kStepsPerTile * kTileBytesPerRow;
    }
    if (at.steps > 0) LastStep(at, rows);
  }

 private:
  static void Step(const TileOperands& at) {
    Tiles::template Load<kFirstRows>(at.rows, at.row_bytes);
    if constexpr (kRowTiles == 2) {
      Tiles::template Load<kFirstRows + 1>(at.rows + kTileHeight * at.row_bytes, at.row_bytes);
    }
    StepPanels(at);
  }
  template <int p = 0>
  static void StepPanels(const TileOperands& at) {
    if constexpr (p < kPanels) {
      const std::byte* const panel = at.panels + p * at.panel_bytes;
      Tiles::template Load<kPanelTile<p>>(panel, kTileBytesPerRow);
      if (at.ahead_bytes > 0) {
#pragma GCC unroll 16
        for (int64_t line = 0; line < kStepsPerTile; ++line) {
          __builtin_prefetch(panel + at.ahead_bytes + line * kTileBytesPerRow);
        }
      }
      Dot<kSum<0, p>, kFirstRows, kPanelTile<p>>();
      if constexpr (kRowTiles == 2) Dot<kSum<1, p>, kFirstRows + 1, kPanelTile<p>>();
      StepPanels<p + 1>(at);
    }
  }
  template <int sum, int rows, int panel>
  static void Dot() {
    if constexpr (kBytes) {
      Tiles::template DotBytes<sum, rows, panel>();
    } else {
      Tiles::template Dot<sum, rows, panel>();
    }
  }
  // Fewer steps than a tile has.
  static void LastStep(const TileOperands& at, int rows) {
    alignas(64) std::byte last_rows[kRowTiles * kTileHeight * kTileBytesPerRow] = {};
    alignas(64) std::byte last_panels[kPanels * kStepsPerTile * kTileBytesPerRow] = {};
    for (int r = 0; r < rows; ++r) {
      __builtin_memcpy(last_rows + r * kTileBytesPerRow, at.rows + r * at.row_bytes,
                       static_cast<size_t>(4 * at.steps));
    }
    for (int p = 0; p < kPanels; ++p) {
      __builtin_memcpy(last_panels + p * kStepsPerTile * kTileBytesPerRow,
                       at.panels + p * at.panel_bytes,
                       static_cast<size_t>(at.steps * kTileBytesPerRow));
    }
    Step({last_rows, kTileBytesPerRow, last_panels, kStepsPerTile * kTileBytesPerRow, kStepsPerTile,
          0});
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_AMX_TILES_IMPL_H_

// The loops over a product's rows and panels, for every kind of weights that bfloat16 tiles (TileProduct, amx_tiles_impl.h)
// multiply.
#ifndef WINNOW_KERNELS_CPU_AMX_LOOPS_IMPL_H_
#define WINNOW_KERNELS_CPU_AMX_LOOPS_IMPL_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/amx_tiles_impl.h"

namespace winnow::kernels {
namespace {

// Calls Kernel::Block<kRowTiles, kPanels>(call, first_row, last_row, rows, panel), for at most kMostRows rows and a multiple of
// `rows`, which tiles have been configured for, so that all rows meet all panels. Tiles are configured once for blocks of 32
// rows and once for the rest. A group of panels meets all rows before the next one comes, so that it stays in the cache.
template <typename Tiles, typename Kernel, typename Call>
class TiledLoops {
 public:
  static void Run(const Call& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                  int64_t last_panel) {
    constexpr int64_t kBlockRows = 2 * kTileHeight;
    const int64_t whole = first_row + (last_row - first_row) / kBlockRows * kBlockRows;
    const int rest = static_cast<int>(last_row - whole);
    if (whole > first_row) {
      TileProduct<Tiles, 2, 2>::Configure(kBlockRows);
      Panels<2, 2>(call, first_row, whole, kBlockRows, first_panel, last_panel);
    }
    if (rest > kTileHeight) {
      TileProduct<Tiles, 2, 2>::Configure(rest);
      Panels<2, 2>(call, whole, last_row, rest, first_panel, last_panel);
    } else if (rest > 0) {
      TileProduct<Tiles, 1, 4>::Configure(rest);
      Panels<1, 4>(call, whole, last_row, rest, first_panel, last_panel);
    }
    Tiles::Release();
  }

 private:
  template <int kRowTiles, int kPanels>
  static void Panels(const Call& call, int64_t first_row, int64_t last_row, int rows, int64_t panel,
                     int64_t last_panel) {
    const int64_t most = std::max<int64_t>(Kernel::kMostRows / rows, 1) * rows;
    for (; panel + kPanels <= last_panel; panel += kPanels) {
      for (int64_t row = first_row; row < last_row; row += most) {
        Kernel::template Block<kRowTiles, kPanels>(call, row, std::min(last_row, row + most), rows,
                                                   panel);
      }
    }
    if constexpr (kPanels > 1) {
      if (panel < last_panel) {
        Panels<kRowTiles, kPanels / 2>(call, first_row, last_row, rows, panel, last_panel);
      }
    }
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_AMX_LOOPS_IMPL_H_

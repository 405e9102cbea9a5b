// The bfloat16 product of kernels/matmul.h by matrix tiles (amx_tiles_impl.h has the order of its sums). Included after one
// vec_*.h.
#ifndef WINNOW_KERNELS_CPU_MATMUL_AMX_IMPL_H_
#define WINNOW_KERNELS_CPU_MATMUL_AMX_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/amx_loops_impl.h"
#include "kernels/cpu/amx_tiles_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_impl.h"

namespace winnow::kernels {
namespace {

template <typename Tiles>
class TiledMatmul {
 public:
  static constexpr int64_t kMostRows = 1;  // a block's, each by itself

  static void Run(const MatmulCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                  int64_t last_panel) {
    TiledLoops<Tiles, TiledMatmul, MatmulCall>::Run(call, first_row, last_row, first_panel,
                                                    last_panel);
  }

  template <int kRowTiles, int kPanels>
  static void Block(const MatmulCall& call, int64_t row, int64_t /*last_row*/, int rows,
                    int64_t panel) {
    using Product = TileProduct<Tiles, kRowTiles, kPanels>;
    const size_t panel_bytes = PanelBytes(DType::kBF16, call.in_features);
    // Few rows wait for memory. 16 threads of a Xeon, a step of 2.5 GB in ms, one row and nine: 22.2 to 23.8 and 23.7 to 27.2; asked
    // for one tile ahead 20.6 to 22.3 and 21.8 to 25.0, two 20.5 to 22.2 and 22.4 to 22.9, three 19.7 to 21.1 and 22.8 to 23.6.
    constexpr int64_t kAheadBytes = kRowTiles == 1 ? 3 * kStepsPerTile * kTileBytesPerRow : 0;
    Product::ZeroSums();
    Product::Accumulate(
        {static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row) * call.row_bytes,
         call.row_bytes, call.panels + static_cast<size_t>(panel) * panel_bytes, panel_bytes,
         PanelSteps(DType::kBF16, call.in_features), kAheadBytes},
        rows);
    Product::ForEachSum([&]<int r, int p>() {
      alignas(64) float sums[kTileHeight][kPanelOutputs];
      Tiles::template Store<Product::template kSum<r, p>>(sums, kTileBytesPerRow);
      StoreRows(call, row + r * kTileHeight, Product::Height(rows, r), panel + p, sums);
    });
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_MATMUL_AMX_IMPL_H_

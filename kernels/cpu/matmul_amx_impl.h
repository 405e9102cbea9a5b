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
    Product::ZeroSums();
    Product::Accumulate(
        {static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row) * call.row_bytes,
         call.row_bytes, call.panels + static_cast<size_t>(panel) * panel_bytes, panel_bytes,
         PanelSteps(DType::kBF16, call.in_features)},
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

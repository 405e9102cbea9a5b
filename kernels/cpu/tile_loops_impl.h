// The loops over a product's tiles, for every kind of weights. Included after one vec_*.h; see there for why this is in an
// anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_TILE_LOOPS_IMPL_H_
#define WINNOW_KERNELS_CPU_TILE_LOOPS_IMPL_H_

#include <cstdint>

namespace winnow::kernels {
namespace {

// Bytes ahead of a single row's integers that are asked for: a constant with AVX2, else what the call says. Two threads of a Zen 1,
// ms of a step: Q8_0 (1.3 GB) 67 and asking 60, I8x128 (1.3 GB) 63 and 56, L4x32 (0.9 GB) 54 and 46, or 52 where the call says how far.
// 512 and 2,048 bytes are as good as 1,024. A Zen 4 with AVX-512 does better without.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t AheadBytes(int64_t /*of_call*/) { return 1024; }
#else
constexpr int64_t AheadBytes(int64_t of_call) { return of_call; }
#endif

// Calls Kernel::Tile<kRows, kPanels>(call, row, panel) so that all rows meet all panels. Kernel has the sizes of the
// largest tile whose sums stay in registers, kMostRows and kMostPanels, and kOneRowPanels for a single row; numbers of
// panels are powers of two. Panels that are together in a tile stay in the cache from the first tile of rows to the last.
template <typename Kernel, typename Call>
class TileLoops {
 public:
  static void Run(const Call& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                  int64_t last_panel) {
    if (last_row - first_row == 1) {
      Panels<1, Kernel::kOneRowPanels>(call, first_row, last_row, first_panel, last_panel);
    } else {
      Panels<Kernel::kMostRows, Kernel::kMostPanels>(call, first_row, last_row, first_panel,
                                                     last_panel);
    }
  }

 private:
  template <int kRows, int kPanels>
  static void Panels(const Call& call, int64_t first_row, int64_t last_row, int64_t panel,
                     int64_t last_panel) {
    for (; panel + kPanels <= last_panel; panel += kPanels) {
      Rows<kRows, kPanels>(call, first_row, last_row, panel);
    }
    if constexpr (kPanels > 1) {
      if (panel < last_panel) {
        Panels<kRows, kPanels / 2>(call, first_row, last_row, panel, last_panel);
      }
    }
  }
  template <int kRows, int kPanels>
  static void Rows(const Call& call, int64_t row, int64_t last_row, int64_t panel) {
    for (; row + kRows <= last_row; row += kRows) {
      Kernel::template Tile<kRows, kPanels>(call, row, panel);
    }
    if constexpr (kRows > 1) {
      if (row < last_row) Rows<kRows - 1, kPanels>(call, row, last_row, panel);
    }
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_TILE_LOOPS_IMPL_H_

// The product of kernels/int8_matmul.h by matrix tiles: a group's exact sums are two tile products, and all float32 arithmetic is
// that of int8_matmul_impl.h in the same order. So the bits are everyone's, and which rows go through tiles is about time alone.
// Prepared rows and panels of 8 bits (int8_panel.h) are tiles as they lie; a group of 4 bits is widened on its way, for each block of
// rows anew. Included after one vec_*.h.
#ifndef WINNOW_KERNELS_CPU_INT8_MATMUL_AMX_IMPL_H_
#define WINNOW_KERNELS_CPU_INT8_MATMUL_AMX_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/amx_loops_impl.h"
#include "kernels/cpu/amx_tiles_impl.h"
#include "kernels/cpu/int8_panel.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/quantized_kinds_impl.h"
#include "kernels/cpu/store_tile_impl.h"

namespace winnow::kernels {
namespace {

// `Tiles` as in amx_tiles_impl.h; kBits of the weights' integers.
template <typename Tiles, int kBits>
class TiledInt8Matmul {
 public:
  static constexpr int64_t kMostRows = 1;  // a block's, each by itself

  static void Run(const Int8MatmulCall& call, int64_t first_row, int64_t last_row,
                  int64_t first_panel, int64_t last_panel) {
    TiledLoops<Tiles, TiledInt8Matmul, Int8MatmulCall>::Run(call, first_row, last_row, first_panel,
                                                            last_panel);
  }

  template <int kRowTiles, int kPanels>
  static void Block(const Int8MatmulCall& call, int64_t row, int64_t /*last_row*/, int rows,
                    int64_t panel) {
    // A group's sums are weighed while the next group's are made.
    alignas(64) float sums[kRowTiles][kPanels][kTileHeight][kPanelOutputs] = {};
    Products<kRowTiles, kPanels> products[2];
    const int64_t groups = Int8Groups(call.in_features);
    const std::byte* const first =
        static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row) * call.row_bytes;
    const std::byte* const weights = call.panels + panel * Int8PanelBytes(kBits, call.in_features);
    StartGroup(call, first, weights, 0, rows, products[0]);
    for (int64_t g = 0; g < groups; ++g) {
      if (g + 1 < groups) StartGroup(call, first, weights, g + 1, rows, products[(g + 1) % 2]);
      Weigh(call, first, weights, g, rows, products[g % 2], sums);
    }
    for (int r = 0; r < kRowTiles; ++r) {
      const int height = TileProduct<Tiles, kRowTiles, kPanels>::Height(rows, r);
      for (int p = 0; p < kPanels; ++p) {
        StoreRows(call, row + r * kTileHeight, height, panel + p, sums[r][p]);
      }
    }
  }

 private:
  // Integers of a group of 4 bits as those of 8.
  static void Widen(const std::byte* group, int64_t ahead_bytes, int8_t* to) {
    for (int64_t step = 0; step < kInt8GroupSteps; step += 2) {
      const std::byte* const at = group + step / 2 * kInt8StepBytes;
      if (ahead_bytes > 0) __builtin_prefetch(at + ahead_bytes);
      int8_t* const low = to + step * kInt8StepBytes;
      for (int i = 0; i < kRegsPerPanel; ++i) {
        const Ints::Reg halves = Ints::Load(at, i);
        Ints::StoreLess(Ints::LowHalves(halves), kInt4Bias, low, i);
        Ints::StoreLess(Ints::HighHalves(halves), kInt4Bias, low + kInt8StepBytes, i);
      }
    }
  }

  template <int kRowTiles, int kPanels>
  struct Products {
    alignas(64) int32_t of[kRowTiles][kPanels][kTileHeight][kPanelOutputs];
  };

  template <int kRowTiles, int kPanels>
  static void StartGroup(const Int8MatmulCall& call, const std::byte* first,
                         const std::byte* weights, int64_t g, int rows,
                         Products<kRowTiles, kPanels>& products) {
    using Product = TileProduct<Tiles, kRowTiles, kPanels, 0, 4 / kRowTiles, /*kBytes=*/true>;
    // Three tiles. Few rows wait for memory.
    constexpr int64_t kAheadBytes =
        kRowTiles == 1 ? 3 * kStepsPerTile * kTileBytesPerRow * kBits / 8 : 0;
    const std::byte* const group = weights + g * Int8GroupBytes(kBits);
    const auto panel_bytes = static_cast<size_t>(Int8PanelBytes(kBits, call.in_features));
    TileOperands operands{first + g * kInt8GroupValues,
                          call.row_bytes,
                          group,
                          panel_bytes,
                          kInt8GroupSteps,
                          kAheadBytes};
    Product::ZeroSums();
    if constexpr (kBits == 4) {
      alignas(64) int8_t wide[kPanels][kInt8GroupSteps * kInt8StepBytes];
      for (int p = 0; p < kPanels; ++p) {
        Widen(group + static_cast<size_t>(p) * panel_bytes, kAheadBytes, wide[p]);
      }
      operands.panels = reinterpret_cast<const std::byte*>(wide[0]);
      operands.panel_bytes = sizeof wide[0];
      operands.ahead_bytes = 0;
      Product::Accumulate(operands, rows);
    } else {
      Product::Accumulate(operands, rows);
    }
    Product::ForEachSum([&]<int r, int p>() {
      Tiles::template Store<Product::template kSum<r, p>>(products.of[r][p], kTileBytesPerRow);
    });
  }

  template <int kRowTiles, int kPanels>
  static void Weigh(const Int8MatmulCall& call, const std::byte* first, const std::byte* weights,
                    int64_t g, int rows, const Products<kRowTiles, kPanels>& products,
                    float (&sums)[kRowTiles][kPanels][kTileHeight][kPanelOutputs]) {
    const std::byte* const scales = first + PreparedInt8Row::ScalesAt(call.in_features) +
                                    g * static_cast<int64_t>(sizeof(float));
    Vec::Reg of_outputs[kPanels][kRegsPerPanel];
    for (int p = 0; p < kPanels; ++p) {
      const std::byte* const at = weights + p * Int8PanelBytes(kBits, call.in_features) +
                                  g * Int8GroupBytes(kBits) + Int8ScalesAt(kBits);
      for (int i = 0; i < kRegsPerPanel; ++i) {
        of_outputs[p][i] = Vec::Load(reinterpret_cast<const float*>(at) + i * Vec::kLanes);
      }
    }
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int height = TileProduct<Tiles, kRowTiles, kPanels>::Height(rows, tile);
      for (int r = 0; r < height; ++r) {
        const Vec::Reg of_row = Vec::Set1(*reinterpret_cast<const float*>(
            scales + static_cast<size_t>(tile * kTileHeight + r) * call.row_bytes));
        for (int p = 0; p < kPanels; ++p) {
          const auto* const of = reinterpret_cast<const std::byte*>(products.of[tile][p][r]);
          float* const to = sums[tile][p][r];
          for (int i = 0; i < kRegsPerPanel; ++i) {
            const int lane = i * Vec::kLanes;
            Vec::Store(to + lane,
                       Vec::FusedMulAdd(Ints::ToFloat(Ints::Load(of, i)),
                                        Vec::Mul(of_outputs[p][i], of_row), Vec::Load(to + lane)));
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_INT8_MATMUL_AMX_IMPL_H_

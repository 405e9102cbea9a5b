// Scores and outputs of up to sixteen rows by matrix tiles (amx_tiles_impl.h). Included by attention_impl.h.
//
// Scores come in two ways, which add the same products in the same order:
//   TileScores   rows times panels of keys, packed once for all rows that meet them
//   TokenScores  keys as they lie in memory times a panel of queries, and the scores, which then have tokens as rows,
//                transposed: of a few rows, where packing would cost more
//
// One configuration serves both products of a unit, for setting tiles up takes longer than any of their instructions.
#ifndef WINNOW_KERNELS_CPU_ATTENTION_TILES_IMPL_H_
#define WINNOW_KERNELS_CPU_ATTENTION_TILES_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cpu/amx_tiles_impl.h"
#include "kernels/cpu/attention_pack_impl.h"
#include "kernels/cpu/panel.h"

namespace winnow::kernels {
namespace {

template <typename Tiles>
class AttentionTiles {
  // Tiles 0 to 4: `rows` rows times two panels. Tiles 3 to 7: two tiles of tokens times a panel of queries. They share
  // the tiles of panels, whose height is 16 for both.
  template <int kPanels>
  using RowProduct = TileProduct<Tiles, 1, kPanels, 0, 2>;
  template <int kTokenTiles>
  using TokenProduct = TileProduct<Tiles, kTokenTiles, 1, 3, 1>;

 public:
  // Whether TokenScores is the quicker way for so many rows of a KV head: it transposes 4 rows and 16 tokens at a time,
  // where packing transposes 16 tokens and 8 columns.
  static bool TakesTokens(int32_t rows, int64_t d) { return rows < d / 2; }

  // REQUIRES: 0 < rows <= 16.
  static void Configure(int32_t rows) {
    TileShape shapes[kNumTiles];
    for (TileShape& shape : shapes) shape = {kTileHeight, kTileBytesPerRow};
    for (int t = 0; t < RowProduct<2>::kFirstPanel; ++t)
      shapes[t].rows = static_cast<uint8_t>(rows);
    Tiles::Configure(shapes);
  }

  // scores [rows][kAttentionUnitTokens] of queries, which lie query_bytes apart.
  template <int kPanels = 2>
  static void TileScores(const std::byte* queries, size_t query_bytes, int32_t rows,
                         const std::byte* key_panels, int32_t tokens, int64_t d, float* scores,
                         int32_t panel = 0) {
    using Product = RowProduct<kPanels>;
    const size_t panel_bytes = PanelBytes(DType::kBF16, d);
    const int32_t panels = tokens / static_cast<int32_t>(kPanelOutputs);
    for (; panel + kPanels <= panels; panel += kPanels) {
      Product::ZeroSums();
      Product::Accumulate(
          {queries, query_bytes, key_panels + static_cast<size_t>(panel) * panel_bytes, panel_bytes,
           PanelSteps(DType::kBF16, d)},
          rows);
      Product::ForEachSum([&]<int r, int p>() {
        Tiles::template Store<Product::template kSum<r, p>>(scores + (panel + p) * kPanelOutputs,
                                                            kAttentionUnitTokens * sizeof(float));
      });
    }
    if constexpr (kPanels > 1) {
      if (panel < panels) {
        TileScores<1>(queries, query_bytes, rows, key_panels, tokens, d, scores, panel);
      }
    }
  }

  // The same of `rows` queries in a panel [d / 2][16] of pairs. turned: [kAttentionUnitTokens][16], for this function's use.
  // Rows of `scores` up to the next multiple of four are written.
  static void TokenScores(const std::byte* query_panel, int32_t rows, const UnitRows& keys,
                          int32_t tokens, int64_t d, float* turned, float* scores) {
    int32_t t = 0;
    for (; t + 2 * kTileHeight <= tokens; t += 2 * kTileHeight) {
      OfTokens<2>(query_panel, keys, t, d, turned);
    }
    if (t < tokens) OfTokens<1>(query_panel, keys, t, d, turned);
    for (int32_t r = 0; r < rows; r += 4) {
      for (t = 0; t < tokens; t += kTileHeight) {
        Turn4(turned + t * kPanelOutputs + r, scores + r * kAttentionUnitTokens + t);
      }
    }
  }

  // outputs [rows][d] += weights x values; weights lie weight_bytes apart.
  template <int kPanels = 2>
  static void AddValues(const std::byte* weights, size_t weight_bytes, int32_t rows,
                        const std::byte* value_panels, int32_t tokens, int64_t d, float* outputs,
                        int64_t panel = 0) {
    using Product = RowProduct<kPanels>;
    const size_t panel_bytes = PanelBytes(DType::kBF16, tokens);
    const size_t output_bytes = static_cast<size_t>(d) * sizeof(float);
    for (; panel + kPanels <= d / kPanelOutputs; panel += kPanels) {
      float* const columns = outputs + panel * kPanelOutputs;
      Product::ForEachSum([&]<int r, int p>() {
        Tiles::template Load<Product::template kSum<r, p>>(columns + p * kPanelOutputs,
                                                           output_bytes);
      });
      Product::Accumulate(
          {weights, weight_bytes, value_panels + static_cast<size_t>(panel) * panel_bytes,
           panel_bytes, PanelSteps(DType::kBF16, tokens)},
          rows);
      Product::ForEachSum([&]<int r, int p>() {
        Tiles::template Store<Product::template kSum<r, p>>(columns + p * kPanelOutputs,
                                                            output_bytes);
      });
    }
    if constexpr (kPanels > 1) {
      if (panel < d / kPanelOutputs) {
        AddValues<1>(weights, weight_bytes, rows, value_panels, tokens, d, outputs, panel);
      }
    }
  }

 private:
  template <int kTokenTiles>
  static void OfTokens(const std::byte* query_panel, const UnitRows& keys, int32_t t, int64_t d,
                       float* turned) {
    using Product = TokenProduct<kTokenTiles>;
    Product::ZeroSums();
    Product::Accumulate({keys.row(t), keys.row_bytes, query_panel, PanelBytes(DType::kBF16, d),
                         PanelSteps(DType::kBF16, d)},
                        kTokenTiles * kTileHeight);
    Product::ForEachSum([&]<int r, int p>() {
      Tiles::template Store<Product::template kSum<r, p>>(
          turned + (t + r * kTileHeight) * kPanelOutputs, kTileBytesPerRow);
    });
  }
  // Four columns of [16][kPanelOutputs] become rows.
  static void Turn4(const float* columns, float* rows) {
#if defined(__AVX512F__)
    __m512i turned[4];
    TransposeColumns4(reinterpret_cast<const std::byte*>(columns), kTileBytesPerRow, turned);
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(rows + i * kAttentionUnitTokens, turned[i]);
#else
    for (int i = 0; i < 4; ++i) {
      for (int t = 0; t < kTileHeight; ++t) {
        rows[i * kAttentionUnitTokens + t] = columns[t * kPanelOutputs + i];
      }
    }
#endif
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_ATTENTION_TILES_IMPL_H_

// The product of kernels/quantized_matmul.h by matrix tiles: sums of a group's integers, which are exact, are a tile's, and all
// float32 arithmetic is that of quantized_matmul_impl.h in the same order. So the bits are AVX-512's, and which rows go
// through tiles is about time alone.
//
// A tile is 16 rows times 16 outputs. Its other operand has a group's integers less their bias, as signed bytes in
// quantized_panel.h's order of 8 bits: they are made, with the scales as float32, for kChunkInputs of a few panels at a time,
// and then meet all rows, a tile of which meets these panels one after the other. Both operands thus stay in the first-level
// cache. Included after one vec_*.h.
#ifndef WINNOW_KERNELS_CPU_QUANTIZED_MATMUL_AMX_IMPL_H_
#define WINNOW_KERNELS_CPU_QUANTIZED_MATMUL_AMX_IMPL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/amx_tiles_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/quantized_kinds_impl.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/quantized_matmul.h"

namespace winnow::kernels {
namespace {

// `Tiles` as in amx_tiles_impl.h.
template <typename Tiles>
class TiledQuantizedMatmul {
 public:
  // All rows of [first_row, last_row) meet all panels of [first_panel, last_panel). Rows that fill no tile go to `rest`, the
  // same product without tiles.
  static void Run(const QuantizedMatmulCall& call, int64_t first_row, int64_t last_row,
                  int64_t first_panel, int64_t last_panel, QuantizedMatmulTilesFn* rest) {
    const int64_t tiled = first_row + (last_row - first_row) / kTileHeight * kTileHeight;
    if (tiled > first_row) {
      WithKind(call.shape, [&](auto kind) {
        using K = decltype(kind);
        Configure<K>();
        for (int64_t panel = first_panel; panel < last_panel; panel += kMostPanels) {
          const int64_t behind = std::min(last_panel, panel + kMostPanels);
          for (int64_t row = first_row; row < tiled; row += kMostRows) {
            Panels<K>(call, row, std::min(tiled, row + kMostRows), panel, behind);
          }
        }
      });
      Tiles::Release();
    }
    if (tiled < last_row) rest(call, tiled, last_row, first_panel, last_panel);
  }

 private:
  static constexpr int64_t kChunkInputs = 256;  // whole blocks of every type
  static constexpr int64_t kMostRows = 128;     // whose sums wait on the stack for the next chunk
  static constexpr int64_t kMostPanels = 4;     // the same

  // Inputs of a panel as tiles read them. Offsets where the kind has them.
  template <typename K>
  struct Chunk {
    static constexpr int64_t kGroups = kChunkInputs / K::kGroup;
    static constexpr int64_t kGroupBytes = K::kGroup * kPanelOutputs;
    alignas(64) int8_t integers[kGroups * kGroupBytes];
    alignas(64) float scales[kGroups][kPanelOutputs];
    alignas(64) float offsets[K::kOffset ? kGroups : 1][kPanelOutputs];
    int64_t groups;
  };

  template <typename K>
  static void Panels(const QuantizedMatmulCall& call, int64_t first_row, int64_t last_row,
                     int64_t first_panel, int64_t last_panel) {
    const int64_t panels = last_panel - first_panel;
    alignas(64) float sums[kMostPanels][kMostRows][kPanelOutputs];
    Chunk<K> chunks[kMostPanels];
    const std::byte* blocks[kMostPanels];
    for (int64_t p = 0; p < panels; ++p) {
      std::fill_n(sums[p][0], (last_row - first_row) * kPanelOutputs, 0.0f);
      blocks[p] =
          call.panels + (first_panel + p) * QuantizedPanelBytes(call.shape, call.in_features);
    }
    for (int64_t at = 0; at < call.in_features; at += kChunkInputs) {
      const int64_t inputs = std::min(kChunkInputs, call.in_features - at);
      for (int64_t p = 0; p < panels; ++p) {
        blocks[p] = Unpack<K>(call.shape, blocks[p], inputs, chunks[p]);
      }
      for (int64_t row = first_row; row < last_row; row += kTileHeight) {
        for (int64_t p = 0; p < panels; ++p) {
          AddChunk<K>(call, row, at, chunks[p], &sums[p][row - first_row]);
        }
      }
    }
    for (int64_t p = 0; p < panels; ++p) {
      StoreRows(call, first_row, last_row - first_row, first_panel + p, sums[p]);
    }
  }

  // Returns the block behind those of `inputs`.
  template <typename K>
  static const std::byte* Unpack(const BlockShape& shape, const std::byte* block, int64_t inputs,
                                 Chunk<K>& chunk) {
    const auto bias = static_cast<uint8_t>(shape.bias);
    const int64_t groups = shape.groups();
    chunk.groups = inputs / K::kGroup;
    for (int64_t g = 0; g < chunk.groups;) {
      const std::byte* group = block + PanelHeadBytes(shape);
      for (int64_t i = 0; i < groups; ++i, ++g, group += PanelGroupBytes(shape)) {
        UnpackIntegers<K>(reinterpret_cast<const uint8_t*>(group), bias,
                          chunk.integers + g * Chunk<K>::kGroupBytes);
        for (int r = 0; r < kRegsPerPanel; ++r) {
          Vec::Store(chunk.scales[g] + r * Vec::kLanes, GroupFactor<K>(block, group, 0, r));
          if constexpr (K::kOffset) {
            Vec::Store(chunk.offsets[g] + r * Vec::kLanes, GroupFactor<K>(block, group, 1, r));
          }
        }
      }
      block = group;
    }
    return block;
  }
  template <typename K>
  static void UnpackIntegers(const uint8_t* __restrict from, uint8_t bias, int8_t* __restrict to) {
    if constexpr (K::kTable) {
      for (int64_t step = 0; step < K::kIntegerBytes; step += kStepBytes) {
        for (int i = 0; i < kRegsPerPanel; ++i) {
          const Ints::Reg packed = Ints::Load(reinterpret_cast<const std::byte*>(from + step), i);
          int8_t* const low = to + 2 * step;
          Ints::StoreLess(Ints::LookUp(Ints::LowHalves(packed)), bias, low, i);
          Ints::StoreLess(Ints::LookUp(Ints::HighHalves(packed)), bias, low + kStepBytes, i);
        }
      }
      return;
    }
    for (int64_t step = 0; step < K::kIntegerBytes; step += kStepBytes) {
      for (int64_t i = 0; i < kStepBytes; ++i) {
        const uint8_t q = from[step + i];
        if constexpr (K::kBits == 4) {
          to[2 * step + i] = static_cast<int8_t>((q & 15) - bias);
          to[2 * step + kStepBytes + i] = static_cast<int8_t>((q >> 4) - bias);
        } else {
          to[step + i] = static_cast<int8_t>(q - bias);
        }
      }
    }
  }

  // Two groups take turns in tiles and in memory, so that one's sums are weighed while the next one's are made.
  template <typename K>
  static void Configure() {
    TileShape shapes[kNumTiles];
    for (int which = 0; which < 2; ++which) {
      shapes[which] = {kTileHeight, kTileBytesPerRow};
      shapes[2 + which] = {kTileHeight, static_cast<uint16_t>(K::kGroup)};
      shapes[4 + which] = {static_cast<uint8_t>(K::kGroup / 4), kTileBytesPerRow};
    }
    Tiles::Configure(shapes);
  }
  template <int which, typename K>
  static void StartGroup(const std::byte* rows, size_t row_bytes, const Chunk<K>& chunk, int64_t g,
                         int32_t (*products)[kPanelOutputs]) {
    Tiles::template Zero<which>();
    Tiles::template Load<2 + which>(rows + g * K::kGroup, row_bytes);
    Tiles::template Load<4 + which>(chunk.integers + g * Chunk<K>::kGroupBytes, kTileBytesPerRow);
    Tiles::template DotBytes<which, 2 + which, 4 + which>();
    Tiles::template Store<which>(products, kTileBytesPerRow);
  }

  // A chunk's share of the sums of a tile's rows; `at`: its first input.
  template <typename K>
  static void AddChunk(const QuantizedMatmulCall& call, int64_t row, int64_t at,
                       const Chunk<K>& chunk, float (*sums)[kPanelOutputs]) {
    const std::byte* const first =
        static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row) * call.row_bytes;
    const std::byte* const integers = first + at;
    const int64_t first_scale = at / kRoundedValues * static_cast<int64_t>(sizeof(float));
    const std::byte* const scales = first + PreparedRow::ScalesAt(call.in_features) + first_scale;
    const std::byte* const scaled_sums =
        first + PreparedRow::ScaledSumsAt(call.in_features) + first_scale;
    constexpr int kRows = kTileHeight;
    alignas(64) int32_t products[2][kRows][kPanelOutputs];
    Vec::Reg sum[kRows][kRegsPerPanel];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kRegsPerPanel; ++i) sum[r][i] = Vec::Load(sums[r] + i * Vec::kLanes);
    }
    const auto weigh = [&](int64_t g, const int32_t(&of_group)[kRows][kPanelOutputs])
        __attribute__((always_inline)) {
      const int64_t of_row = g * K::kGroup / kRoundedValues;
      Vec::Reg scale[kRegsPerPanel];
      [[maybe_unused]] Vec::Reg offset[kRegsPerPanel];
      for (int i = 0; i < kRegsPerPanel; ++i) {
        scale[i] = Vec::Load(chunk.scales[g] + i * Vec::kLanes);
        if constexpr (K::kOffset) offset[i] = Vec::Load(chunk.offsets[g] + i * Vec::kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const size_t to_row = static_cast<size_t>(r) * call.row_bytes;
        const Vec::Reg t = Vec::Set1(reinterpret_cast<const float*>(scales + to_row)[of_row]);
        for (int i = 0; i < kRegsPerPanel; ++i) {
          const Ints::Reg product = Ints::Load(reinterpret_cast<const std::byte*>(of_group[r]), i);
          sum[r][i] = Vec::MulAdd(Ints::ToFloat(product), Vec::Mul(scale[i], t), sum[r][i]);
          if constexpr (K::kOffset) {
            sum[r][i] = Vec::MulAdd(
                offset[i], Vec::Set1(reinterpret_cast<const float*>(scaled_sums + to_row)[of_row]),
                sum[r][i]);
          }
        }
      }
    };
    StartGroup<0>(integers, call.row_bytes, chunk, 0, products[0]);
    for (int64_t g = 0; g < chunk.groups; g += 2) {
      if (g + 1 < chunk.groups) {
        StartGroup<1>(integers, call.row_bytes, chunk, g + 1, products[1]);
      }
      weigh(g, products[0]);
      if (g + 2 < chunk.groups) {
        StartGroup<0>(integers, call.row_bytes, chunk, g + 2, products[0]);
      }
      if (g + 1 < chunk.groups) weigh(g + 1, products[1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kRegsPerPanel; ++i) Vec::Store(sums[r] + i * Vec::kLanes, sum[r][i]);
    }
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_QUANTIZED_MATMUL_AMX_IMPL_H_

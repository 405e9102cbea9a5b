// The product of kernels/float8_matmul.h by matrix tiles (amx_tiles_impl.h has the order of a block's sums). Values of a few
// panels become bfloat16 in panel.h's order, kChunkInputs of them at a time, and then meet all rows. For few rows that costs
// more than it gains: they get the same sums without tiles. Included after one vec_*.h.
#ifndef WINNOW_KERNELS_CPU_FLOAT8_MATMUL_AMX_IMPL_H_
#define WINNOW_KERNELS_CPU_FLOAT8_MATMUL_AMX_IMPL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/amx_loops_impl.h"
#include "kernels/cpu/amx_tiles_impl.h"
#include "kernels/cpu/float8_weights_impl.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_impl.h"
#include "kernels/cpu/tile_loops_impl.h"

namespace winnow::kernels {
namespace {

// How far ahead weights are asked for by these loops; Float8Panels::kAheadBytes is of AVX-512's. 16 threads of a Xeon, a step of
// 1.35 GB in ms, one row and nine: 15.6 to 16.3 and 24.3 to 26.5; 1 KiB ahead 13.4 to 15.0 and 21.5 to 23.4, 2 KiB 13.3 to 14.8
// and 21.0 to 21.5.
constexpr int64_t kFloat8AheadBytes = 2048;

// Rows are bfloat16. The bits of TiledFloat8Matmul, where denormals count as zero (MXCSR).
struct Float8ChainsKernel {
#if defined(__AVX512F__)
  static constexpr int kMostRows = 3, kMostPanels = 1, kOneRowPanels = 4;
#else
  static constexpr int kMostRows = 2, kMostPanels = 1, kOneRowPanels = 1;
#endif

  template <int kRows, int kPanels>
  static void Tile(const Float8MatmulCall& call, int64_t row, int64_t panel) {
    constexpr int kRegs = kPanels * kRegsPerPanel;
    constexpr int64_t kTileSteps = kStepsPerTile, kMostValues = 128;  // of a block
    const int64_t panel_bytes = Float8PanelBytes(call.block_values, call.in_features);
    const std::byte* const x =
        static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row) * call.row_bytes;
    const std::byte* block = call.panels + panel * panel_bytes;
    TileSums<kRows, kPanels> totals;
    totals.Clear();
    for (int64_t at = 0; at < call.in_features; at += call.block_values) {
      TileSums<kRows, kPanels> sums;
      sums.Clear();
      const std::byte* step = block + kFloat8ScaleBytes;
      float inputs[kRows][kMostValues];
      for (int r = 0; r < kRows; ++r) {
        uint16_t bits[kMostValues];
        std::memcpy(bits, x + static_cast<size_t>(r) * call.row_bytes + 2 * at,
                    static_cast<size_t>(2 * call.block_values));
        for (int64_t i = 0; i < call.block_values; ++i) inputs[r][i] = ToFloat(BF16{bits[i]});
      }
      int64_t input = 0;
      for (int64_t tile = 0; tile < call.block_values / (kFloat8StepInputs * kTileSteps); ++tile) {
        Vec::Reg even[kRows][kRegs], odd[kRows][kRegs];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
          for (int i = 0; i < kRegs; ++i) even[r][i] = odd[r][i] = Vec::Zero();
        }
        for (int64_t s = 0; s < kTileSteps; ++s, step += kFloat8StepBytes, input += 2) {
          Float8Panels::Weights w[kRegs];
#pragma GCC unroll 16
          for (int i = 0; i < kRegs; ++i) {
            const std::byte* const weights = step + i / kRegsPerPanel * panel_bytes;
            w[i] = Float8Panels::LoadWeights(weights, i % kRegsPerPanel, 0);
            if (kRows == 1 && s % 2 == 0) __builtin_prefetch(weights + kFloat8AheadBytes);
          }
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const auto x = Float8Panels::LoadInput(inputs[r] + input, 0);
#pragma GCC unroll 16
            for (int i = 0; i < kRegs; ++i) {
              even[r][i] = Vec::MulAdd(x.first, w[i].first, even[r][i]);
              odd[r][i] = Vec::MulAdd(x.second, w[i].second, odd[r][i]);
            }
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
          for (int i = 0; i < kRegs; ++i) {
            sums.reg[r][i] = Vec::Add(sums.reg[r][i], Vec::Add(even[r][i], odd[r][i]));
          }
        }
      }
      AddScaled(sums, block, panel_bytes, totals);
      block += Float8BlockBytes(call.block_values);
    }
    StoreTile(call, row, panel, totals.reg);
  }
};

// `Tiles` as in amx_tiles_impl.h. Rows are bfloat16.
template <typename Tiles>
class TiledFloat8Matmul {
 public:
  static constexpr int64_t kLeastRows = 4;   // that tiles are worth their weights for
  static constexpr int64_t kMostRows = 128;  // whose sums wait on the stack for the next chunk

  static void Run(const Float8MatmulCall& call, int64_t first_row, int64_t last_row,
                  int64_t first_panel, int64_t last_panel) {
    if (last_row - first_row < kLeastRows) {
      return TileLoops<Float8ChainsKernel, Float8MatmulCall>::Run(call, first_row, last_row,
                                                                  first_panel, last_panel);
    }
    TiledLoops<Tiles, TiledFloat8Matmul, Float8MatmulCall>::Run(call, first_row, last_row,
                                                                first_panel, last_panel);
  }

  template <int kRowTiles, int kPanels>
  static void Block(const Float8MatmulCall& call, int64_t first_row, int64_t last_row, int rows,
                    int64_t panel) {
    using Product = TileProduct<Tiles, kRowTiles, kPanels>;
    const int64_t panel_bytes = Float8PanelBytes(call.block_values, call.in_features);
    const int64_t block_bytes = Float8BlockBytes(call.block_values);
    const int64_t block_steps = call.block_values / kFloat8StepInputs;
    const std::byte* block = call.panels + panel * panel_bytes;
    const std::byte* from_rows = static_cast<const std::byte*>(call.rows);
    alignas(64) float sums[kPanels][kMostRows][kPanelOutputs];
    for (auto& of_panel : sums) {
      std::fill_n(of_panel[0], (last_row - first_row) * kPanelOutputs, 0.0f);
    }
    alignas(64) std::byte values[kPanels][kChunkBytes];
    for (int64_t at = 0; at < call.in_features; at += kChunkInputs) {
      const int64_t blocks = std::min(kChunkInputs, call.in_features - at) / call.block_values;
      for (int p = 0; p < kPanels; ++p) {
        for (int64_t b = 0; b < blocks; ++b) {
          Widen(block + p * panel_bytes + b * block_bytes + kFloat8ScaleBytes, block_steps,
                values[p] + b * block_steps * kBF16StepBytes);
        }
      }
      for (int64_t row = first_row; row < last_row; row += rows) {
        for (int64_t b = 0; b < blocks; ++b) {
          Product::ZeroSums();
          Product::Accumulate({from_rows + static_cast<size_t>(row) * call.row_bytes +
                                   2 * (at + b * call.block_values),
                               call.row_bytes, values[0] + b * block_steps * kBF16StepBytes,
                               kChunkBytes, block_steps},
                              rows);
          Product::ForEachSum([&]<int r, int p>() {
            AddBlock<Product::template kSum<r, p>>(block + p * panel_bytes + b * block_bytes,
                                                   Product::Height(rows, r),
                                                   &sums[p][row - first_row + r * kTileHeight]);
          });
        }
      }
      block += blocks * block_bytes;
    }
    for (int p = 0; p < kPanels; ++p) {
      StoreRows(call, first_row, last_row - first_row, panel + p, sums[p]);
    }
  }

 private:
  static constexpr int64_t kChunkInputs = 256;  // whole blocks of every type
  static constexpr int64_t kBF16StepBytes = kTileBytesPerRow;
  static constexpr int64_t kChunkBytes = kChunkInputs / kFloat8StepInputs * kBF16StepBytes;

  // A block's sums, times its outputs' scales, are added to those of `height` rows.
  template <int tile>
  static void AddBlock(const std::byte* scales, int height, float (*sums)[kPanelOutputs]) {
    alignas(64) float of_block[kTileHeight][kPanelOutputs];
    Tiles::template Store<tile>(of_block, kTileBytesPerRow);
    for (int l = 0; l < kRegsPerPanel; ++l) {
      const int lane = l * Vec::kLanes;
      const Vec::Reg scale = Vec::Load(reinterpret_cast<const float*>(scales) + lane);
      for (int i = 0; i < height; ++i) {
        Vec::Store(sums[i] + lane,
                   Vec::MulAdd(Vec::Load(of_block[i] + lane), scale, Vec::Load(sums[i] + lane)));
      }
    }
  }

  // Steps of 8-bit floats to steps of bfloat16, which is exact: as everywhere here, w / 256. `from` lies in memory.
  static void Widen(const std::byte* from, int64_t steps, std::byte* to) {
    for (int64_t s = 0; s < steps; ++s, from += kFloat8StepBytes, to += kBF16StepBytes) {
      if (s % 2 == 0) __builtin_prefetch(from + kFloat8AheadBytes);
#if defined(__AVX512BW__)
      // Magnitudes move beside the sign and their exponent grows; subnormals, whose does not, come out of a table.
      const __m512i subnormals = _mm512_castsi128_si512(
          _mm_setr_epi16(0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860));
      const __m512i bits =
          _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      __m512i wide = _mm512_and_si512(_mm512_slli_epi16(bits, 4), _mm512_set1_epi16(0x7f0));
      wide = _mm512_add_epi16(wide, _mm512_set1_epi16(112 << 7));
      wide = _mm512_mask_permutexvar_epi16(
          wide, _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x78)), bits, subnormals);
      const __m512i signs = _mm512_and_si512(_mm512_slli_epi16(bits, 8),
                                             _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
      _mm512_storeu_si512(to, _mm512_or_si512(wide, signs));
#else
      for (int i = 0; i < kRegsPerPanel; ++i) {
        float first[Vec::kLanes], second[Vec::kLanes];
        const Float8Panels::Weights weights = Float8Panels::LoadWeights(from, i, 0);
        Vec::Store(first, weights.first);
        Vec::Store(second, weights.second);
        for (int l = 0; l < Vec::kLanes; ++l) {
          uint32_t low, high;
          std::memcpy(&low, first + l, sizeof low);
          std::memcpy(&high, second + l, sizeof high);
          low = low >> 16 | (high & 0xffff0000u);
          std::memcpy(to + 4 * (i * Vec::kLanes + l), &low, sizeof low);
        }
      }
#endif
    }
  }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_FLOAT8_MATMUL_AMX_IMPL_H_

// The product of a few rows with a few panels, held in registers: the inner loop of matmul and of
// attention. Included after one vec_*.h; see there for why this is in an anonymous namespace.
//
// Each element of the result is one chain of multiply-adds over the inner dimension in ascending
// order, whatever the tile's shape: that is what makes products batch invariant.
//
// The types below, and those of other kinds of weights, say how panels meet prepared rows:
//   kStepBytes    bytes of one step of a panel
//   kAheadBytes   how far ahead a single row's weights are asked for by vector code; 0: not at all
//   Row           element of a prepared row
//   kRowPerStep   values of a prepared row in one step
//   kMostRows     of a product's tile, at most kTileRows
//   kParts        in how many parts a step is multiplied: one part's weights are in registers at a time
//   Weights       one register's worth of outputs of a part of a step; LoadWeights(step, i, part) reads the i-th
//   Input         one row's values of a part of a step, in every lane; LoadInput(row, part)
#ifndef WINNOW_KERNELS_CPU_TILE_IMPL_H_
#define WINNOW_KERNELS_CPU_TILE_IMPL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/panel.h"

namespace winnow::kernels {
namespace {

constexpr int kRegsPerPanel = static_cast<int>(kPanelOutputs) / Vec::kLanes;
// One row waits for memory, and the processor sees each panel's stream begin late: 4 panels as below take 22.2 to 23.8 ms so, 2 KiB
// ahead into L2 22.3 to 24.6, and 26.7 to 27.4 where nothing is asked for. On one thread as below 40 GB/s in place of 41.
// Float16 is not asked for: the processor brings more by itself (Zen 4). With two threads of a Zen 1, asking takes a step of 1.3 GB of
// 8-bit floats from 115 ms to 103, and leaves one of 2.5 GB of bfloat16 at 104 to 112.
constexpr size_t kOneRowAheadBytes = 1024;
// Float32 is asked for with AVX-512 alone: one thread of the Zen 1 reads 22 GB/s of it, and 20 when it asks.
#if defined(__AVX512F__)
constexpr size_t kFloat32AheadBytes = kOneRowAheadBytes;
#else
constexpr size_t kFloat32AheadBytes = 0;
#endif

// The largest tile whose sums stay in registers: 24 of 32 for AVX-512, 12 of 16 for AVX2.
#if defined(__AVX512F__)
// One row: streams of memory are what counts. Of 501 MiB of weights, GB/s of one thread: 8 panels
// 35, 4 panels 41, 2 panels 40 (but 90 instead of 105 where 8 MiB lie in the cache). The plain read loop: 43.
// 16 threads of a Xeon with AMX, a step of 2.5 GB in ms: 8 panels 25.9 to 28.6, 4 panels 26.7 to 27.4; on another day
// 1 panel 24.6 to 26.6, 2 panels 23.3 to 24.5, 4 panels 22.1 to 23.1.
constexpr int kTileRows = 6, kTilePanels = 4, kOneRowPanels = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTilePanels = 1, kOneRowPanels = 4;
#else
constexpr int kTileRows = 4, kTilePanels = 1, kOneRowPanels = 1;
#endif

struct F32Panels {
  static constexpr DType kDType = DType::kF32;
  static constexpr size_t kStepBytes = PanelStepBytes(kDType);
  static constexpr size_t kAheadBytes = kFloat32AheadBytes;
  using Row = float;
  static constexpr int kMostRows = kTileRows, kRowPerStep = 1, kParts = 1;
  using Weights = Vec::Reg;
  using Input = Vec::Reg;
  static Weights LoadWeights(const std::byte* step, int i, int /*part*/) {
    return Vec::Load(reinterpret_cast<const float*>(step) + i * Vec::kLanes);
  }
  static Input LoadInput(const Row* row, int /*part*/) { return Vec::Set1(*row); }
  static Vec::Reg MulAdd(Input x, Weights w, Vec::Reg sum) { return Vec::MulAdd(x, w, sum); }
};

struct F16Panels : F32Panels {
  static constexpr DType kDType = DType::kF16;
  static constexpr size_t kStepBytes = PanelStepBytes(kDType);
  static constexpr size_t kAheadBytes = 0;
  static Weights LoadWeights(const std::byte* step, int i, int /*part*/) {
    return Vec::LoadF16(reinterpret_cast<const uint16_t*>(step) + i * Vec::kLanes);
  }
};

#if defined(__AVX512BF16__)
struct BF16Panels {
  static constexpr DType kDType = DType::kBF16;
  static constexpr size_t kStepBytes = PanelStepBytes(kDType);
  static constexpr size_t kAheadBytes = kOneRowAheadBytes;
  using Row = uint32_t;  // two bf16
  static constexpr int kMostRows = kTileRows, kRowPerStep = 1, kParts = 1;
  using Weights = __m512bh;
  using Input = __m512bh;
  static Weights LoadWeights(const std::byte* step, int, int /*part*/) {
    return (__m512bh)_mm512_loadu_si512(step);
  }
  static Input LoadInput(const Row* row, int /*part*/) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*row));
  }
  static Vec::Reg MulAdd(Input x, Weights w, Vec::Reg sum) { return _mm512_dpbf16_ps(sum, x, w); }
};
#else
// Without a bf16 dot product: rows are float32 values that bf16 can hold, pairs of weights are
// taken apart by a shift and a mask, one after the other. AVX2 has 16 registers, too few for both of a pair and the sums of six rows.
// One thread of a Zen 1, which can do 40 GFLOP/s: six rows and both at once 30.5, six rows and one by one 32.0, four rows and one by one 36.2.
struct BF16Panels {
  static constexpr DType kDType = DType::kBF16;
  static constexpr size_t kStepBytes = PanelStepBytes(kDType);
  static constexpr size_t kAheadBytes = kOneRowAheadBytes;
  using Row = float;
  static constexpr int kMostRows = 4, kRowPerStep = 2, kParts = 2;
  using Weights = Vec::Reg;
  using Input = Vec::Reg;
  static Weights LoadWeights(const std::byte* step, int i, int part) {
#if defined(__AVX2__)
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step) + i);
    return _mm256_castsi256_ps(
        part == 0 ? _mm256_slli_epi32(pairs, 16)
                  : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
#else
    const uint16_t* pair = reinterpret_cast<const uint16_t*>(step) + 2 * i;
    return ToFloat(BF16{pair[part]});
#endif
  }
  static Input LoadInput(const Row* row, int part) { return Vec::Set1(row[part]); }
  static Vec::Reg MulAdd(Input x, Weights w, Vec::Reg sum) { return Vec::MulAdd(x, w, sum); }
};
#endif

template <int kRows, int kPanels>
struct TileSums {
  static constexpr int kRegs = kPanels * kRegsPerPanel;
  Vec::Reg reg[kRows][kRegs];

  void Clear() {
    for (auto& of_row : reg) {
      for (Vec::Reg& sum : of_row) sum = Vec::Zero();
    }
  }
};

// sums += rows x panels. `rows` are `row_stride` Row values apart, panels `panel_bytes`.
template <typename Panels, int kRows, int kPanels>
inline __attribute__((always_inline)) void AccumulateTile(const typename Panels::Row* rows,
                                                          int64_t row_stride,
                                                          const std::byte* panels,
                                                          size_t panel_bytes, int64_t steps,
                                                          TileSums<kRows, kPanels>& sums) {
  constexpr int kRegs = kPanels * kRegsPerPanel;
  constexpr size_t kStepBytes = Panels::kStepBytes;
  [[maybe_unused]] constexpr int64_t kLineSteps = kStepBytes < 64 ? 64 / kStepBytes : 1;
  Vec::Reg sum[kRows][kRegs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) sum[r][i] = sums.reg[r][i];
  }
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 2
    for (int part = 0; part < Panels::kParts; ++part) {
      typename Panels::Weights w[kRegs];
#pragma GCC unroll 16
      for (int i = 0; i < kRegs; ++i) {
        const std::byte* const step = panels + (i / kRegsPerPanel) * panel_bytes + s * kStepBytes;
        w[i] = Panels::LoadWeights(step, i % kRegsPerPanel, part);
#if defined(__AVX2__)
        if constexpr (kRows == 1 && Panels::kAheadBytes > 0) {
          if (s % kLineSteps == 0) __builtin_prefetch(step + Panels::kAheadBytes);
        }
#endif
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename Panels::Input x =
            Panels::LoadInput(rows + r * row_stride + s * Panels::kRowPerStep, part);
#pragma GCC unroll 16
        for (int i = 0; i < kRegs; ++i) sum[r][i] = Panels::MulAdd(x, w[i], sum[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kRegs; ++i) sums.reg[r][i] = sum[r][i];
  }
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_TILE_IMPL_H_

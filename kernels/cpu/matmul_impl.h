// See kernels/matmul.h. Compiled by matmul_{scalar,avx2,avx512}.cc.
#include "kernels/cpu/ops.h"
#include "kernels/cpu/store_tile_impl.h"
#include "kernels/cpu/tile_impl.h"
#include "kernels/cpu/tile_loops_impl.h"

namespace winnow::kernels::WINNOW_ISA {
namespace {

template <typename Panels>
struct PlainKernel {
  static constexpr int kMostRows = Panels::kMostRows, kMostPanels = kTilePanels,
                       kOneRowPanels = kernels::kOneRowPanels;

  template <int kRows, int kPanels>
  static void Tile(const MatmulCall& call, int64_t row, int64_t panel) {
    const size_t panel_bytes = PanelBytes(Panels::kDType, call.in_features);
    TileSums<kRows, kPanels> sums;
    sums.Clear();
    const auto* rows = reinterpret_cast<const typename Panels::Row*>(
        static_cast<const std::byte*>(call.rows) + static_cast<size_t>(row) * call.row_bytes);
    AccumulateTile<Panels, kRows, kPanels>(
        rows, static_cast<int64_t>(call.row_bytes / sizeof(*rows)),
        call.panels + static_cast<size_t>(panel) * panel_bytes, panel_bytes,
        PanelSteps(Panels::kDType, call.in_features), sums);
    StoreTile(call, row, panel, sums.reg);
  }
};

}  // namespace

void MatmulTiles(const MatmulCall& call, int64_t first_row, int64_t last_row, int64_t first_panel,
                 int64_t last_panel) {
  const auto run = [&](auto kernel) {
    TileLoops<decltype(kernel), MatmulCall>::Run(call, first_row, last_row, first_panel,
                                                 last_panel);
  };
  switch (call.compute) {
    case DType::kF32:
      return run(PlainKernel<F32Panels>());
    case DType::kF16:
      return run(PlainKernel<F16Panels>());
    case DType::kBF16:
      return run(PlainKernel<BF16Panels>());
    case DType::kI8:
    case DType::kF8:
      break;  // types of KV alone
  }
}

void PrepareBF16Row(const float* x, int64_t n, void* out) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  uint16_t* to = static_cast<uint16_t*>(out);
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) Vec::StoreBF16(to + i, Vec::Load(x + i));
  if (i < n) {
    uint16_t rest[Vec::kLanes];
    Vec::StoreBF16(rest, Vec::LoadFirst(x + i, static_cast<int>(n - i)));
    __builtin_memcpy(to + i, rest, static_cast<size_t>(2 * ((n - i + 1) & ~int64_t{1})));
  }
#else
  float* to = static_cast<float*>(out);
  uint16_t rounded[Vec::kLanes];
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) {
    Vec::Store(to + i, Vec::StoreBF16(rounded, Vec::Load(x + i)));
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    Vec::StoreFirst(to + i, rest, Vec::StoreBF16(rounded, Vec::LoadFirst(x + i, rest)));
  }
  if (n % 2 != 0) to[n] = 0;
#endif
}

}  // namespace winnow::kernels::WINNOW_ISA

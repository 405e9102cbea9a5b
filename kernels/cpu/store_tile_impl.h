// The end of a product's tile: bias, what y held, and the edge of the last panel. Included after one vec_*.h; see there
// for why this is in an anonymous namespace.
#ifndef WINNOW_KERNELS_CPU_STORE_TILE_IMPL_H_
#define WINNOW_KERNELS_CPU_STORE_TILE_IMPL_H_

#include <cstdint>

#include "kernels/cpu/panel.h"

namespace winnow::kernels {
namespace {

// y[row + r] = sums[r] (+ bias) (+ y) for the outputs of `panel` and those after it, as far as there are any. `Call` is
// MatmulCall, QuantizedMatmulCall or Float8MatmulCall.
template <typename Call, int kRows, int kRegs>
inline void StoreTile(const Call& call, int64_t row, int64_t panel,
                      const Vec::Reg (&sums)[kRows][kRegs]) {
  for (int r = 0; r < kRows; ++r) {
    float* y = call.y + (row + r) * call.y_stride;
    for (int i = 0; i < kRegs; ++i) {
      const int64_t first = panel * kPanelOutputs + i * Vec::kLanes;
      const int64_t rest = call.out_features - first;
      if (rest <= 0) break;
      Vec::Reg sum = sums[r][i];
      if (rest >= Vec::kLanes) {
        if (call.bias != nullptr) sum = Vec::Add(sum, Vec::Load(call.bias + first));
        if (call.accumulate) sum = Vec::Add(sum, Vec::Load(y + first));
        Vec::Store(y + first, sum);
      } else {
        const int lanes = static_cast<int>(rest);
        if (call.bias != nullptr) sum = Vec::Add(sum, Vec::LoadFirst(call.bias + first, lanes));
        if (call.accumulate) sum = Vec::Add(sum, Vec::LoadFirst(y + first, lanes));
        Vec::StoreFirst(y + first, lanes, sum);
      }
    }
  }
}

// The same of rows whose sums of one panel lie in memory.
template <typename Call>
inline void StoreRows(const Call& call, int64_t row, int64_t rows, int64_t panel,
                      const float (*sums)[kPanelOutputs]) {
  for (int64_t i = 0; i < rows; ++i) {
    Vec::Reg of_row[1][kPanelOutputs / Vec::kLanes];
    for (int64_t l = 0; l < kPanelOutputs / Vec::kLanes; ++l) {
      of_row[0][l] = Vec::Load(sums[i] + l * Vec::kLanes);
    }
    StoreTile(call, row + i, panel, of_row);
  }
}

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_STORE_TILE_IMPL_H_

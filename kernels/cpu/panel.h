// The order in which the right-hand side of a product lies in memory, for every instruction set.
//
//   panel   16 outputs: [steps][16][step] values, one after the other; the lanes of a register are
//   outputs step    what one instruction takes of the inner dimension: 2 values for bf16
//   (vdpbf16ps), else 1
//
// Outputs past the last and inner values past the last are zero. Matmul packs weights so; attention
// packs a block's keys (outputs are tokens, the inner dimension is d) and values (outputs are d,
// the inner dimension is tokens).
#ifndef WINNOW_KERNELS_CPU_PANEL_H_
#define WINNOW_KERNELS_CPU_PANEL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace winnow::kernels {

inline constexpr int64_t kPanelOutputs = 16;

constexpr int64_t PanelStep(DType dtype) { return dtype == DType::kBF16 ? 2 : 1; }
constexpr int64_t PanelSteps(DType dtype, int64_t inner) {
  return (inner + PanelStep(dtype) - 1) / PanelStep(dtype);
}
constexpr int64_t NumPanels(int64_t outputs) {
  return (outputs + kPanelOutputs - 1) / kPanelOutputs;
}
constexpr size_t PanelStepBytes(DType dtype) {
  return static_cast<size_t>(kPanelOutputs * PanelStep(dtype)) * DTypeBytes(dtype);
}
constexpr size_t PanelBytes(DType dtype, int64_t inner) {
  return static_cast<size_t>(PanelSteps(dtype, inner)) * PanelStepBytes(dtype);
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_PANEL_H_

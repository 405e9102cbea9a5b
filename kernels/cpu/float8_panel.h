// The order in which weights of 8-bit floats lie in memory.
//
//   panel   16 outputs, block after block: 256 times each output's scale, f32 [16]; then the values, [steps][16][2], a
//           step being two inputs, so that an output's two values are the halves of 16 bits
//
// Outputs past the last are zero.
#ifndef WINNOW_KERNELS_CPU_FLOAT8_PANEL_H_
#define WINNOW_KERNELS_CPU_FLOAT8_PANEL_H_

#include <cstdint>

#include "kernels/cpu/panel.h"

namespace winnow::kernels {

inline constexpr int64_t kFloat8StepInputs = 2;
inline constexpr int64_t kFloat8StepBytes = kFloat8StepInputs * kPanelOutputs;
inline constexpr int64_t kFloat8ScaleBytes = 4 * kPanelOutputs;

constexpr int64_t Float8BlockBytes(int64_t block_values) {
  return kFloat8ScaleBytes + block_values * kPanelOutputs;
}
constexpr int64_t Float8PanelBytes(int64_t block_values, int64_t inner) {
  return inner / block_values * Float8BlockBytes(block_values);
}

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_FLOAT8_PANEL_H_

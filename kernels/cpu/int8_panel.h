// The order in which weights of W8A8 (kernels/int8_matmul.h) and the rows that meet them lie in memory on a CPU: groups of 128 inner
// values, whole ones; those past the last value, and outputs past the last, are zeros.
//
// A panel has 16 outputs. Of each group, one behind the other:
//   integers   int8 [32][16][4]: step, output, input 4 · step + j, as products of bytes take them; 16 steps are a matrix tile
//   scales     f32 [16]
// A prepared row: integers int8 [groups][128], then scales f32 [groups] and sums of integers int32 [groups].
#ifndef WINNOW_KERNELS_CPU_INT8_PANEL_H_
#define WINNOW_KERNELS_CPU_INT8_PANEL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/panel.h"
#include "kernels/int8_matmul.h"

namespace winnow::kernels {
namespace {  // of each file that includes this: kernels/README.md, "Instruction sets"

constexpr int64_t kInt8StepInputs = 4;
constexpr int64_t kInt8StepBytes = kInt8StepInputs * kPanelOutputs;
constexpr int64_t kInt8GroupSteps = kInt8GroupValues / kInt8StepInputs;
constexpr int64_t kInt8ScalesAt = kInt8GroupSteps * kInt8StepBytes;  // in a group
constexpr int64_t kInt8GroupBytes =
    kInt8ScalesAt + kPanelOutputs * static_cast<int64_t>(sizeof(float));

constexpr int64_t Int8Groups(int64_t inner) {
  return (inner + kInt8GroupValues - 1) / kInt8GroupValues;
}
constexpr int64_t Int8PanelBytes(int64_t inner) { return Int8Groups(inner) * kInt8GroupBytes; }

struct PreparedInt8Row {
  static constexpr int64_t ScalesAt(int64_t n) { return Int8Groups(n) * kInt8GroupValues; }
  static constexpr int64_t SumsAt(int64_t n) { return ScalesAt(n) + Int8Groups(n) * 4; }
  static constexpr int64_t Bytes(int64_t n) { return SumsAt(n) + Int8Groups(n) * 4; }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_INT8_PANEL_H_

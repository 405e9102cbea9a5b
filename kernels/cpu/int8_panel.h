// The order in which weights of W8A8 and W4A8 (kernels/int8_matmul.h) and the rows that meet them lie in memory on a CPU: groups of 128
// inner values, whole ones. Bytes past the last value, and those of outputs past the last, are zeros.
//
// A panel has 16 outputs. Of each group, one behind the other:
//   integers   of 8 bits: int8 [32][16][4]: step, output, input 4 · step + j, as products of bytes take them; 16 steps are a matrix tile
//              of 4 bits, 8 more than they are: uint8 [16][16][4], steps 2i in the low halves and 2i + 1 in the high ones
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
constexpr int kInt4Bias = 8;  // of integers of 4 bits

// `bits` of the integers, 8 or 4. Where a group's scales begin, and a group's bytes.
constexpr int64_t Int8ScalesAt(int bits) { return kInt8GroupSteps * kInt8StepBytes * bits / 8; }
constexpr int64_t Int8GroupBytes(int bits) {
  return Int8ScalesAt(bits) + kPanelOutputs * static_cast<int64_t>(sizeof(float));
}

constexpr int64_t Int8Groups(int64_t inner) {
  return (inner + kInt8GroupValues - 1) / kInt8GroupValues;
}
constexpr int64_t Int8PanelBytes(int bits, int64_t inner) {
  return Int8Groups(inner) * Int8GroupBytes(bits);
}

struct PreparedInt8Row {
  static constexpr int64_t ScalesAt(int64_t n) { return Int8Groups(n) * kInt8GroupValues; }
  static constexpr int64_t SumsAt(int64_t n) { return ScalesAt(n) + Int8Groups(n) * 4; }
  static constexpr int64_t Bytes(int64_t n) { return SumsAt(n) + Int8Groups(n) * 4; }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_INT8_PANEL_H_

// The order in which quantised weights and the rows that meet them lie in memory.
//
// A panel has 16 outputs. Blocks of the type come one after the other:
//   with codes    scale f16 [16] (offset f16 [16], its sign turned), then the groups; in a group
//                 integers, scale codes int8 [16] (offset codes uint8 [16])
//   else          integers, scale f16 [16] (offset f16 [16])
// Brackets: where the type has offsets. The integers of a group are steps of 64 bytes, byte 4·output + j:
//   8 bits        input 4·step + j
//   4 bits        input 8·step + j in the low half, input 8·step + 4 + j in the high half; where the type has a table the
//                 place there, and scales are bfloat16
// so that a register holds four inputs of each output, as products of bytes take them. Outputs past the last are zero.
#ifndef WINNOW_KERNELS_CPU_QUANTIZED_PANEL_H_
#define WINNOW_KERNELS_CPU_QUANTIZED_PANEL_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/panel.h"
#include "kernels/quantized.h"

namespace winnow::kernels {
namespace {  // of each file that includes this: kernels/README.md, "Instruction sets"

constexpr int64_t kStepBytes = 4 * kPanelOutputs;

constexpr int64_t GroupIntegerBytes(const BlockShape& shape) {
  return shape.group * kPanelOutputs * shape.bits / 8;
}
// Bytes of a group, its scales included where they belong to it.
constexpr int64_t PanelGroupBytes(const BlockShape& shape) {
  return GroupIntegerBytes(shape) +
         kPanelOutputs * (shape.has_codes ? 1 : 2) * (shape.has_offset ? 2 : 1);
}
// Before the groups of a block.
constexpr int64_t PanelHeadBytes(const BlockShape& shape) {
  return shape.has_codes ? 2 * kPanelOutputs * (shape.has_offset ? 2 : 1) : 0;
}
constexpr int64_t PanelBlockBytes(const BlockShape& shape) {
  return PanelHeadBytes(shape) + shape.groups() * PanelGroupBytes(shape);
}
constexpr int64_t QuantizedPanelBytes(const BlockShape& shape, int64_t inner) {
  return inner / shape.values * PanelBlockBytes(shape);
}

// A prepared row of n values: integers int8 [n], scales f32 [n / 32], sums of integers int32 [n / 16], and f32 [n / 32]:
// 32 values' scale times the sum of their integers.
struct PreparedRow {
  static constexpr int64_t kSumValues = 16;
  static constexpr int64_t ScalesAt(int64_t n) { return n; }
  static constexpr int64_t SumsAt(int64_t n) { return n + n / 32 * 4; }
  static constexpr int64_t ScaledSumsAt(int64_t n) { return SumsAt(n) + n / kSumValues * 4; }
  static constexpr int64_t Bytes(int64_t n) { return ScaledSumsAt(n) + n / 32 * 4; }
};

}  // namespace
}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_QUANTIZED_PANEL_H_

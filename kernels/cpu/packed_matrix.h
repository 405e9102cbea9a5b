// The matrices that Pack and PackStored make on the CPU: panels of 16 outputs, in parts of one type each.
#ifndef WINNOW_KERNELS_CPU_PACKED_MATRIX_H_
#define WINNOW_KERNELS_CPU_PACKED_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/cpu/panel.h"
#include "kernels/dtype.h"
#include "kernels/model_ops.h"
#include "kernels/quantized.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// Panels of plain values (panel.h), of the type that is multiplied.
struct PlainPanels {
  DType compute = DType::kF32;
};
// Panels of 8-bit floats (float8_panel.h).
struct Float8Blocks {
  int64_t block_values = 0;
};
// Panels of W8A8, or of W4A8 with integers of 4 bits (int8_panel.h).
struct Int8Panels {
  int integer_bits = 8;
};
// BlockShape: panels of integers (quantized_panel.h).
using PanelKind = std::variant<PlainPanels, BlockShape, Int8Panels, Float8Blocks>;

// Outputs [first_output, first_output + outputs) of a matrix.
struct MatrixPart {
  int64_t first_output = 0;
  int64_t outputs = 0;
  PanelKind kind;
  size_t panel_bytes = 0;
  Buffer panels;

  std::byte* panel(int64_t i) const {
    return static_cast<std::byte*>(panels.data()) + static_cast<size_t>(i) * panel_bytes;
  }
};

class CpuPackedMatrix final : public PackedMatrix {
 public:
  explicit CpuPackedMatrix(int64_t in_features) : in_features_(in_features) {}

  int64_t out_features() const override {
    return parts_.empty() ? 0 : parts_.back().first_output + parts_.back().outputs;
  }
  int64_t in_features() const override { return in_features_; }
  size_t size_bytes() const override {
    size_t bytes = 0;
    for (const MatrixPart& part : parts_) bytes += part.panels.size_bytes();
    return bytes;
  }
  const std::vector<MatrixPart>& parts() const { return parts_; }
  void Append(MatrixPart part) { parts_.push_back(std::move(part)); }

 private:
  const int64_t in_features_;
  std::vector<MatrixPart> parts_;
};

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_CPU_PACKED_MATRIX_H_

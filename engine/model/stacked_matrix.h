// Plain matrices of all experts of a layer in one tensor of a safetensors file, transposed: [experts][inputs][outputs].
#ifndef WINNOW_ENGINE_MODEL_STACKED_MATRIX_H_
#define WINNOW_ENGINE_MODEL_STACKED_MATRIX_H_

#include <cstddef>
#include <cstdint>

#include "engine/model/block_source.h"
#include "kernels/dtype.h"
#include "kernels/quantized.h"

namespace winnow::engine {

// Row `row` is output row % outputs of expert row / outputs. Its values lie `outputs` apart: neighbours of a row share what is
// read, so rows are asked for in order.
class StackedMatrix final : public BlockSource {
 public:
  // `values` as the file has them, at any address. REQUIRES: a plain type.
  StackedMatrix(const void* values, kernels::DType dtype, int64_t inputs, int64_t outputs)
      : values_(static_cast<const std::byte*>(values)),
        dtype_(dtype),
        inputs_(inputs),
        outputs_(outputs) {}

  kernels::WeightType block_type() const override { return kernels::WeightTypeOf(dtype_); }
  void WriteValues(int64_t row, float* out) const override;
  void WriteBlocks(int64_t row, std::byte* out) const override;

 private:
  const std::byte* FirstOf(int64_t row) const;

  const std::byte* values_;
  kernels::DType dtype_;
  int64_t inputs_, outputs_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_STACKED_MATRIX_H_

// Matrices of all experts of a layer in MXFP4, as published in safetensors files: 4-bit floats (E2M1), each 32 of an output with
// a power of two (E8M0, code - 127).
//
//   NAME_blocks   [experts][outputs][inputs / 32][16], U8: byte j has input 2j of the 32 in its low half, input 2j + 1 in the high
//   NAME_scales   [experts][outputs][inputs / 32], U8
#ifndef WINNOW_ENGINE_MODEL_MXFP4_MATRIX_H_
#define WINNOW_ENGINE_MODEL_MXFP4_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/model/block_source.h"
#include "engine/model/file_tensor.h"
#include "kernels/quantized.h"

namespace winnow::engine {

// Row `row` is output row % outputs of expert row / outputs.
class Mxfp4Matrix final : public BlockSource {
 public:
  // The tensors of `name`. Errors name file and tensor: InvalidArgument for shapes, types, inputs that are no multiple of 32, and
  // scales that are no number or so large that values have no float32; NotFound, with `file`, where a tensor is missing. Reads
  // all scales, and no values.
  static absl::StatusOr<std::unique_ptr<Mxfp4Matrix>> Take(const std::string& name,
                                                           std::string_view file, int64_t experts,
                                                           int64_t outputs, int64_t inputs,
                                                           const TakeTensor& take);

  const std::byte* blocks() const { return blocks_; }
  kernels::WeightType block_type() const override { return kernels::WeightType::kMxfp4; }
  void WriteValues(int64_t row, float* out) const override;
  void WriteBlocks(int64_t row, std::byte* out) const override;

 private:
  Mxfp4Matrix() = default;

  int64_t inputs_ = 0;
  const std::byte* blocks_ = nullptr;
  const std::byte* scales_ = nullptr;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_MXFP4_MATRIX_H_

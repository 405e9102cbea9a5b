// Matrices of 8-bit floats (E4M3, kernels/float8.h) in a safetensors file, with scales in a tensor of their own: FP8
// checkpoints. The value of output o for input i is
//     scale[o / scale_rows][i / scale_cols] · float[o][i]
//
//                          values                 scales
//   compressed-tensors     weight [out][in]       weight_scale: [1] or []; [out][1]; a matrix of blocks
//   fp8                    weight [out][in]       weight_scale or weight_scale_inv (no inverse: the name is its writer's), alike
// Files may have the scale of a matrix's activations (input_scale) too. Nothing here rounds activations, so it is not read.
#ifndef WINNOW_ENGINE_MODEL_FLOAT8_MATRIX_H_
#define WINNOW_ENGINE_MODEL_FLOAT8_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/model/block_source.h"
#include "engine/model/file_tensor.h"
#include "engine/model/weight_scheme.h"
#include "kernels/dtype.h"

namespace winnow::engine {

class Float8Matrix final : public BlockSource {
 public:
  // The matrix of `rows` outputs and `cols` inputs whose values are `values`, called `base`.weight. Errors name file and
  // tensor: InvalidArgument for shapes, types, inputs that are no multiple of 32, and scales that are not finite, not above
  // 0 or so large that values have no float32; NotFound without scales. Reads all scales, and no values.
  static absl::StatusOr<std::unique_ptr<Float8Matrix>> Take(const Float8Scheme& scheme,
                                                            std::string_view base,
                                                            const FileTensor& values, int64_t rows,
                                                            int64_t cols, const TakeTensor& take);

  kernels::WeightType block_type() const override;
  void WriteValues(int64_t row, float* out) const override;
  void WriteBlocks(int64_t row, std::byte* out) const override;

 private:
  Float8Matrix() = default;
  float Scale(int64_t row, int64_t col) const;

  int64_t cols_ = 0;
  const std::byte* values_ = nullptr;
  const std::byte* scales_ = nullptr;
  kernels::DType scale_type_ = kernels::DType::kF32;
  int64_t scale_rows_ = 0, scale_cols_ = 0;  // outputs and inputs of one scale
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_FLOAT8_MATRIX_H_

#include "engine/model/float8_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"
#include "kernels/float8.h"
#include "kernels/host_matrix.h"

namespace winnow::engine {
namespace {

using kernels::WeightType;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

kernels::DType ScaleType(const FileTensor& scales) {
  return scales.entry.dtype == "F32"   ? kernels::DType::kF32
         : scales.entry.dtype == "F16" ? kernels::DType::kF16
                                       : kernels::DType::kBF16;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Float8Matrix>> Float8Matrix::Take(const Float8Scheme& scheme,
                                                                 std::string_view base,
                                                                 const FileTensor& values,
                                                                 int64_t rows, int64_t cols,
                                                                 const TakeTensor& take) {
  const auto u64 = [](int64_t x) { return static_cast<uint64_t>(x); };
  WINNOW_RETURN_IF_ERROR(CheckForm(values, {u64(rows), u64(cols)}, {"F8_E4M3"}));
  if (cols % 32 != 0) {
    return WrongTensor(values, Concat("rows of ", cols, " values, which are no multiple of 32"));
  }
  const std::string name = Concat(base, ".weight_scale"), other = Concat(base, ".weight_scale_inv");
  std::optional<FileTensor> scales = take(name);
  if (!scales.has_value()) scales = take(other);
  if (!scales.has_value()) return MissingTensor(*values.file, name);
  take(Concat(base, ".input_scale"));  // part of the model, and not used

  std::unique_ptr<Float8Matrix> matrix(new Float8Matrix);
  matrix->cols_ = cols;
  matrix->values_ = values.data();
  matrix->scales_ = scales->data();
  matrix->scale_cols_ = cols;
  std::vector<uint64_t> shape(scales->entry.shape.begin(), scales->entry.shape.end());
  if (scheme.has_blocks()) {
    matrix->scale_rows_ = scheme.scale_rows;
    matrix->scale_cols_ = scheme.scale_cols;
    shape = {u64(CeilDiv(rows, scheme.scale_rows)), u64(CeilDiv(cols, scheme.scale_cols))};
  } else if (shape.empty() || shape == std::vector<uint64_t>{1}) {
    matrix->scale_rows_ = rows;
  } else {
    matrix->scale_rows_ = 1;
    shape = {u64(rows), 1};
  }
  WINNOW_RETURN_IF_ERROR(CheckForm(*scales, shape, {"F32", "BF16", "F16"}));
  matrix->scale_type_ = ScaleType(*scales);
  for (int64_t row = 0; row < rows; row += matrix->scale_rows_) {
    for (int64_t col = 0; col < cols; col += matrix->scale_cols_) {
      const float scale = matrix->Scale(row, col);
      if (scale > 0 && std::isfinite(scale * kernels::kLargestF8)) continue;
      return WrongTensor(*scales, Concat("the scale of output ", row, ", input ", col, " is ",
                                         scale, "; it must be above 0, and 448 times it finite"));
    }
  }
  return matrix;
}

float Float8Matrix::Scale(int64_t row, int64_t col) const {
  const int64_t in_a_row = CeilDiv(cols_, scale_cols_);
  return kernels::ElementAt(scales_, scale_type_, row / scale_rows_ * in_a_row + col / scale_cols_);
}

WeightType Float8Matrix::block_type() const {
  const WeightType largest = kernels::Float8TypeFor(cols_);
  return scale_cols_ == cols_ || scale_cols_ % kernels::BlockSizeOf(largest).values == 0
             ? largest
             : WeightType::kF8x32;
}

void Float8Matrix::WriteValues(int64_t row, float* out) const {
  for (int64_t first = 0; first < cols_; first += scale_cols_) {
    const float scale = Scale(row, first);
    for (int64_t col = first; col < std::min(first + scale_cols_, cols_); ++col) {
      const auto bits = static_cast<uint8_t>(values_[row * cols_ + col]);
      out[col] = scale * kernels::ToFloat(kernels::F8E4M3{bits});
    }
  }
}

void Float8Matrix::WriteBlocks(int64_t row, std::byte* out) const {
  const kernels::BlockSize block = kernels::BlockSizeOf(block_type());
  for (int64_t col = 0; col < cols_; col += block.values, out += block.bytes) {
    const float scale = Scale(row, col);
    std::memcpy(out, &scale, sizeof scale);
    std::memcpy(out + sizeof scale, values_ + row * cols_ + col, block.values);
  }
}

}  // namespace winnow::engine

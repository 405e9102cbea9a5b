// WeightMatrix and what turns it into the matrices that backends take.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/concat.h"
#include "engine/model/row_ranges.h"
#include "engine/model/weights.h"
#include "kernels/check.h"
#include "kernels/dtype.h"

namespace winnow::engine {
namespace {

using kernels::DType;
using kernels::HostMatrix;

// Type of the copy: plain values keep their own.
DType CopyType(const WeightMatrix& from, DType dtype) {
  return kernels::PlainType(from.type).value_or(dtype);
}

int64_t CopyBytes(const WeightMatrix& from, DType dtype) {
  if (from.data == nullptr || from.IsPlain()) return 0;
  return from.rows * from.cols * static_cast<int64_t>(kernels::DTypeBytes(CopyType(from, dtype)));
}

// Row `row` of the copy. `values` [cols] is scratch.
void CopyRow(const WeightMatrix& from, int64_t row, DType dtype, float* values, std::byte* to) {
  if (kernels::PlainType(from.type) && from.source == nullptr) {
    std::memcpy(to, from.RowInFile(row), kernels::WeightRowBytes(from.type, from.cols));
    return;
  }
  from.WidenRow(row, values);
  if (dtype == DType::kF32) {
    std::memcpy(to, values, static_cast<size_t>(from.cols) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < from.cols; ++i) {
    const uint16_t bits =
        dtype == DType::kF16 ? kernels::ToF16(values[i]).bits : kernels::ToBF16(values[i]).bits;
    std::memcpy(to + i * static_cast<int64_t>(sizeof(bits)), &bits, sizeof(bits));
  }
}

}  // namespace

HostMatrix WeightMatrix::host() const {
  WINNOW_CHECK(IsPlain());
  const auto* const begin = static_cast<const std::byte*>(data);
  return {begin + first_row * kernels::WeightRowBytes(type, cols), *kernels::PlainType(type), rows,
          cols};
}

int64_t WeightMatrix::FileRow(int64_t row) const {
  WINNOW_CHECK(row >= 0 && row < rows);
  if (head_order == HeadOrder::kRotated) return first_row + row * row_step;
  const int64_t d = rows / heads, in_head = row % d;
  const int64_t half = in_head / (d / 2), j = in_head % (d / 2);  // row j of a half
  const int64_t pairs = rotary_dim / 2;
  int64_t there = rotary_dim + half * (d / 2 - pairs) + j - pairs;
  if (j < pairs) there = head_order == HeadOrder::kInterleaved ? 2 * j + half : half * pairs + j;
  return first_row + row - in_head + there;
}

const std::byte* WeightMatrix::RowInFile(int64_t row) const {
  WINNOW_CHECK(source == nullptr);
  return static_cast<const std::byte*>(data) + FileRow(row) * kernels::WeightRowBytes(type, cols);
}

void WeightMatrix::WidenRow(int64_t row, float* out) const {
  if (source == nullptr) return kernels::DequantizeRow(type, RowInFile(row), cols, out);
  source->WriteValues(FileRow(row), out);
}

void SetHeadOrder(const ModelConfig& config, const TensorSpec& spec, bool interleaved,
                  WeightMatrix* matrix) {
  using HeadOrder = WeightMatrix::HeadOrder;
  const bool in_part = config.RotaryDim() < config.head_dim;
  if (spec.rotary_heads == 0 || (!interleaved && !in_part)) return;
  matrix->head_order = interleaved ? HeadOrder::kInterleaved : HeadOrder::kRotaryFirst;
  matrix->heads = spec.rotary_heads;
  matrix->rotary_dim = config.RotaryDim();
  if (spec.rows != 0) return;
  WINNOW_CHECK(kernels::PlainType(matrix->type).has_value());
  std::swap(matrix->rows, matrix->cols);
}

absl::StatusOr<HostMatrix> HostMatrixOf(const WeightMatrix& from, DType dtype,
                                        std::unique_ptr<std::byte[]>* copy) {
  if (from.IsPlain()) return from.host();
  const DType to = CopyType(from, dtype);
  WINNOW_CHECK(to != DType::kF16 || from.type == kernels::WeightType::kF16);
  const int64_t bytes = CopyBytes(from, dtype);
  copy->reset(new (std::nothrow) std::byte[bytes]);
  if (*copy == nullptr) {
    return absl::ResourceExhaustedError(Concat("no memory to widen weights: ", bytes, " bytes"));
  }
  const int64_t row_bytes = bytes / from.rows;
  ForEachRowRange(from.rows, from.cols, [&](int64_t first, int64_t last) {
    std::vector<float> values(from.cols);
    for (int64_t row = first; row < last; ++row) {
      CopyRow(from, row, to, values.data(), copy->get() + row * row_bytes);
    }
  });
  return HostMatrix{copy->get(), to, from.rows, from.cols};
}

int64_t PackingCopyBytes(const Weights& weights, DType dtype) {
  int64_t most = CopyBytes(weights.lm_head, dtype);
  for (const LayerWeights& layer : weights.layers) {
    for (const int64_t bytes :
         {CopyBytes(layer.q, dtype) + CopyBytes(layer.k, dtype) + CopyBytes(layer.v, dtype),
          CopyBytes(layer.o, dtype), CopyBytes(layer.gate, dtype) + CopyBytes(layer.up, dtype),
          CopyBytes(layer.down, dtype), CopyBytes(layer.router, DType::kF32)}) {
      most = std::max(most, bytes);
    }
    for (const ExpertWeights& expert : layer.experts) {
      most = std::max({most, CopyBytes(expert.gate, dtype) + CopyBytes(expert.up, dtype),
                       CopyBytes(expert.down, dtype)});
    }
  }
  return most;
}

}  // namespace winnow::engine

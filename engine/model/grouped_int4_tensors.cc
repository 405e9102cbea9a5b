#include "engine/model/grouped_int4_tensors.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"

namespace winnow::engine {
namespace {

using Layout = Int4Scheme::Layout;
using Shape = std::vector<uint64_t>;

constexpr int64_t kPerWord = 8;

// The names of a matrix's tensors, and their shapes.
struct Parts {
  std::string integers, scales, zeros, order;
  Shape integers_shape, scales_shape, zeros_shape;
  bool needs_zeros = true;
};

Parts PartsOf(const Int4Scheme& scheme, std::string_view base, int64_t rows, int64_t cols) {
  const auto out = static_cast<uint64_t>(rows), in = static_cast<uint64_t>(cols);
  const uint64_t groups = in / static_cast<uint64_t>(scheme.group), words = (out + 7) / 8;
  const auto name = [base](std::string_view part) { return Concat(base, ".", part); };
  if (scheme.layout == Layout::kPacked) {
    return {.integers = name("weight_packed"),
            .scales = name("weight_scale"),
            .zeros = name("weight_zero_point"),
            .order = name("weight_g_idx"),
            .integers_shape = {out, in / kPerWord},
            .scales_shape = {out, groups},
            .zeros_shape = {words, groups},
            .needs_zeros = false};
  }
  Parts parts{.integers = name("qweight"),
              .scales = name("scales"),
              .zeros = name("qzeros"),
              .order = name("g_idx"),
              .integers_shape = {in / kPerWord, out},
              .scales_shape = {groups, out},
              .zeros_shape = {groups, words}};
  if (scheme.layout == Layout::kAwq) parts.integers_shape = {in, words};
  return parts;
}

template <typename T>
T ValueOf(const FileTensor& tensor, int64_t i) {
  T value;
  std::memcpy(&value, tensor.data() + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Checks a tensor that says which group each input is of.
absl::Status CheckOrder(const FileTensor& tensor, int64_t cols, int64_t group) {
  WINNOW_RETURN_IF_ERROR(CheckForm(tensor, {static_cast<uint64_t>(cols)}, {"I32"}));
  for (int64_t i = 0; i < cols; ++i) {
    const int32_t of = ValueOf<int32_t>(tensor, i);
    if (of == i / group) continue;
    return absl::UnimplementedError(
        Concat(TensorPlace(*tensor.file, tensor.entry), "input ", i, " is of group ", of,
               ": groups that are out of order (act-order, desc_act) are not supported"));
  }
  return absl::OkStatus();
}

bool AllZerosAreEight(const GroupedInt4& matrix) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t group = 0; group < matrix.groups(); ++group) {
      if (matrix.Zero(row, group) != 8) return false;
    }
  }
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupedInt4>> TakeGroupedInt4(const Int4Scheme& scheme,
                                                             std::string_view base, int64_t rows,
                                                             int64_t cols, const TakeTensor& take) {
  const Parts parts = PartsOf(scheme, base, rows, cols);
  const std::optional<FileTensor> integers = take(parts.integers);
  if (!integers.has_value()) return nullptr;
  if (cols % scheme.group != 0) {
    return WrongTensor(
        *integers, Concat("group_size ", scheme.group, " does not divide its ", cols, " inputs"));
  }
  if (rows % kPerWord != 0 && scheme.layout != Layout::kPacked) {
    return WrongTensor(*integers, Concat(rows, " outputs are no multiple of 8"));
  }
  WINNOW_RETURN_IF_ERROR(CheckForm(*integers, parts.integers_shape, {"I32"}));
  const auto missing = [&](const std::string& name) {
    return MissingTensor(*integers->file, name);
  };
  const std::optional<FileTensor> scales = take(parts.scales);
  if (!scales.has_value()) return missing(parts.scales);
  WINNOW_RETURN_IF_ERROR(CheckForm(*scales, parts.scales_shape, {"BF16", "F16"}));
  const std::optional<FileTensor> zeros = take(parts.zeros);
  if (zeros.has_value()) {
    WINNOW_RETURN_IF_ERROR(CheckForm(*zeros, parts.zeros_shape, {"I32"}));
  } else if (parts.needs_zeros) {
    return missing(parts.zeros);
  }
  if (const std::optional<FileTensor> order = take(parts.order)) {
    WINNOW_RETURN_IF_ERROR(CheckOrder(*order, cols, scheme.group));
  }
  if (const std::optional<FileTensor> shape = take(Concat(base, ".weight_shape"));
      shape.has_value()) {
    WINNOW_RETURN_IF_ERROR(CheckForm(*shape, {2}, {"I64"}));
    if (ValueOf<int64_t>(*shape, 0) != rows || ValueOf<int64_t>(*shape, 1) != cols) {
      return WrongTensor(
          *shape, Concat("says ", ValueOf<int64_t>(*shape, 0), " x ", ValueOf<int64_t>(*shape, 1),
                         ", expected ", rows, " x ", cols));
    }
  }
  auto matrix = std::make_unique<GroupedInt4>();
  matrix->scheme = scheme;
  matrix->rows = rows;
  matrix->cols = cols;
  matrix->integers = integers->data();
  if (zeros.has_value()) matrix->zeros = zeros->data();
  matrix->scales = scales->data();
  matrix->scale_type = scales->entry.dtype == "F16" ? kernels::DType::kF16 : kernels::DType::kBF16;
  if (const absl::Status status = matrix->CheckScales(); !status.ok()) {
    return WrongTensor(*scales, std::string(status.message()));
  }
  if (AllZerosAreEight(*matrix)) matrix->zeros = nullptr;
  return matrix;
}

}  // namespace winnow::engine

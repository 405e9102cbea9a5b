#include "engine/model/grouped_integers_tensors.h"

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/base/concat.h"
#include "engine/base/status_macros.h"

namespace winnow::engine {
namespace {

using Layout = IntegerScheme::Layout;
using Shape = std::vector<uint64_t>;

// The names of a matrix's tensors, their shapes, and the type of integers and zero points.
struct Parts {
  std::string integers = {}, scales = {}, zeros = {}, order = {};
  Shape integers_shape = {}, scales_shape = {}, zeros_shape = {};
  std::string_view type = "I32";
  bool needs_zeros = true;
};

Parts PartsOf(const IntegerScheme& scheme, std::string_view base, int64_t rows, int64_t cols) {
  const auto u64 = [](int64_t x) { return static_cast<uint64_t>(x); };
  const int64_t n = scheme.in_word();
  const uint64_t out = u64(rows), in = u64(cols), words = u64((rows + n - 1) / n);
  const uint64_t groups = scheme.group == 0 ? 1 : u64(cols / scheme.group);
  const auto name = [base](std::string_view part) { return Concat(base, ".", part); };
  Parts parts{.scales = name("weight_scale"),
              .zeros = name("weight_zero_point"),
              .order = name("weight_g_idx"),
              .scales_shape = {out, groups},
              .needs_zeros = false};
  switch (scheme.layout) {
    case Layout::kPlain:
      parts.integers = name("weight");
      parts.integers_shape = {out, in};
      parts.zeros_shape = parts.scales_shape;
      parts.type = "I8";
      return parts;
    case Layout::kPacked:
      parts.integers = name("weight_packed");
      parts.integers_shape = {out, in / u64(n)};
      parts.zeros_shape = {words, groups};
      return parts;
    case Layout::kGptq:
    case Layout::kAwq:
      break;
  }
  parts = {.integers = name("qweight"),
           .scales = name("scales"),
           .zeros = name("qzeros"),
           .order = name("g_idx"),
           .integers_shape = {in / u64(n), out},
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

// Whether each input's group is i / group; InvalidArgument for one that the matrix does not have.
absl::StatusOr<bool> IsInOrder(const FileTensor& tensor, int64_t cols, int64_t group) {
  WINNOW_RETURN_IF_ERROR(CheckForm(tensor, {static_cast<uint64_t>(cols)}, {"I32"}));
  bool in_order = true;
  for (int64_t i = 0; i < cols; ++i) {
    const int32_t of = ValueOf<int32_t>(tensor, i);
    if (of < 0 || of >= cols / group) {
      return WrongTensor(tensor,
                         Concat("input ", i, " is of group ", of, " of ", cols / group, " groups"));
    }
    in_order &= of == i / group;
  }
  return in_order;
}

// The first output and group whose zero point is not the middle, if there is one.
std::optional<std::pair<int64_t, int64_t>> FirstOtherZero(const GroupedIntegers& matrix) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t group = 0; group < matrix.groups(); ++group) {
      if (matrix.Zero(row, group) != matrix.middle()) return std::pair(row, group);
    }
  }
  return std::nullopt;
}

absl::Status CheckShapeTensor(const FileTensor& shape, int64_t rows, int64_t cols) {
  WINNOW_RETURN_IF_ERROR(CheckForm(shape, {2}, {"I64"}));
  const auto said_rows = ValueOf<int64_t>(shape, 0), said_cols = ValueOf<int64_t>(shape, 1);
  if (said_rows == rows && said_cols == cols) return absl::OkStatus();
  return WrongTensor(
      shape, Concat("says ", said_rows, " x ", said_cols, ", expected ", rows, " x ", cols));
}

kernels::DType ScaleType(const FileTensor& scales) {
  return scales.entry.dtype == "F32"   ? kernels::DType::kF32
         : scales.entry.dtype == "F16" ? kernels::DType::kF16
                                       : kernels::DType::kBF16;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupedIntegers>> TakeGroupedIntegers(
    const IntegerScheme& scheme, std::string_view base, const std::optional<FileTensor>& plain,
    int64_t rows, int64_t cols, const TakeTensor& take) {
  const bool in_plain = scheme.layout == Layout::kPlain;
  // Other layouts keep integers under names of their own; what has a plain name is plain.
  if (in_plain ? !plain.has_value() || plain->entry.dtype != "I8" : plain.has_value()) {
    return nullptr;
  }
  const int64_t group = scheme.group == 0 ? cols : scheme.group;
  const bool divides = cols % group == 0;
  Parts parts = PartsOf(scheme, base, rows, cols);
  const std::optional<FileTensor> integers = in_plain ? plain : take(parts.integers);
  if (!integers.has_value()) return nullptr;
  if (!divides) {
    return WrongTensor(*integers,
                       Concat("group_size ", group, " does not divide its ", cols, " inputs"));
  }
  if (cols % 32 != 0) {
    return WrongTensor(*integers, Concat("rows of ", cols, " values, which are no multiple of 32"));
  }
  const bool by_outputs = scheme.layout == Layout::kGptq || scheme.layout == Layout::kAwq;
  if (by_outputs && rows % scheme.in_word() != 0) {
    return WrongTensor(*integers, Concat(rows, " outputs are no multiple of ", scheme.in_word()));
  }
  WINNOW_RETURN_IF_ERROR(CheckForm(*integers, parts.integers_shape, {parts.type}));
  const auto missing = [&](const std::string& name) {
    return MissingTensor(*integers->file, name);
  };
  const std::optional<FileTensor> scales = take(parts.scales);
  if (!scales.has_value()) return missing(parts.scales);
  const Shape said(scales->entry.shape.begin(), scales->entry.shape.end());
  const bool one_scale = in_plain && scheme.group == 0 && (said.empty() || said == Shape{1});
  if (one_scale) parts.scales_shape = parts.zeros_shape = said;
  WINNOW_RETURN_IF_ERROR(CheckForm(*scales, parts.scales_shape, {"BF16", "F16", "F32"}));
  const std::optional<FileTensor> zeros = take(parts.zeros);
  if (zeros.has_value()) {
    WINNOW_RETURN_IF_ERROR(CheckForm(*zeros, parts.zeros_shape, {parts.type}));
  } else if (parts.needs_zeros) {
    return missing(parts.zeros);
  }
  const std::optional<FileTensor> order = take(parts.order);
  bool in_order = true;
  if (order.has_value()) {
    WINNOW_ASSIGN_OR_RETURN(in_order, IsInOrder(*order, cols, group));
  }
  if (const std::optional<FileTensor> shape = take(Concat(base, ".weight_shape"))) {
    WINNOW_RETURN_IF_ERROR(CheckShapeTensor(*shape, rows, cols));
  }
  // Scales of activations, in files that round them: part of the model, and not used.
  for (const std::string_view name : {".input_scale", ".input_zero_point"}) {
    take(Concat(base, name));
  }
  auto matrix = std::make_unique<GroupedIntegers>();
  matrix->scheme = scheme;
  matrix->rows = rows;
  matrix->cols = cols;
  matrix->integers = integers->data();
  if (zeros.has_value()) matrix->zeros = zeros->data();
  matrix->scales = scales->data();
  matrix->scale_type = ScaleType(*scales);
  if (!in_order) matrix->order = order->data();
  matrix->one_scale = one_scale;
  if (const absl::Status status = matrix->CheckScales(); !status.ok()) {
    return WrongTensor(*scales, std::string(status.message()));
  }
  const auto other = FirstOtherZero(*matrix);
  if (!other.has_value()) {
    matrix->zeros = nullptr;
  } else if (scheme.bits == 8) {
    return absl::UnimplementedError(
        Concat(TensorPlace(*zeros->file, zeros->entry), "the zero point of output ", other->first,
               ", group ", other->second, " is ", matrix->Zero(other->first, other->second),
               "; integers of 8 bits around another one than 128 (asymmetric) are not supported"));
  }
  return matrix;
}

}  // namespace winnow::engine

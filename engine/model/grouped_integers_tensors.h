// The tensors of a matrix of integers in a model directory's files, found and checked.
#ifndef WINNOW_ENGINE_MODEL_GROUPED_INTEGERS_TENSORS_H_
#define WINNOW_ENGINE_MODEL_GROUPED_INTEGERS_TENSORS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/model/file_tensor.h"
#include "engine/model/grouped_integers.h"
#include "engine/model/weight_scheme.h"

namespace winnow::engine {

// The matrix of `rows` outputs and `cols` inputs whose plain form would be called `base`.weight, a tensor that is `plain` where the
// files have it; null if the matrix has no integers there. Zero points that are all the middle are left out. Errors name file and
// tensor: InvalidArgument for shapes, types, scales, groups that do not divide the inputs, inputs that are no multiple of 32;
// NotFound for a part that is missing; Unimplemented for zero points other than 128 with 8 bits.
absl::StatusOr<std::unique_ptr<GroupedIntegers>> TakeGroupedIntegers(
    const IntegerScheme& scheme, std::string_view base, const std::optional<FileTensor>& plain,
    int64_t rows, int64_t cols, const TakeTensor& take);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GROUPED_INTEGERS_TENSORS_H_

// The tensors of a 4-bit matrix in a model directory's files, found and checked.
#ifndef WINNOW_ENGINE_MODEL_GROUPED_INT4_TENSORS_H_
#define WINNOW_ENGINE_MODEL_GROUPED_INT4_TENSORS_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/model/file_tensor.h"
#include "engine/model/grouped_int4.h"
#include "engine/model/weight_scheme.h"

namespace winnow::engine {

// The matrix of `rows` outputs and `cols` inputs whose plain form would be called `base`.weight; null if its integers are
// not there. Zero points that are all 8 are left out. Errors name file and tensor: InvalidArgument for shapes, types,
// scales, groups that do not divide the inputs; NotFound for a part that is missing; Unimplemented for inputs whose groups
// are out of order ("act-order").
absl::StatusOr<std::unique_ptr<GroupedInt4>> TakeGroupedInt4(const Int4Scheme& scheme,
                                                             std::string_view base, int64_t rows,
                                                             int64_t cols, const TakeTensor& take);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GROUPED_INT4_TENSORS_H_

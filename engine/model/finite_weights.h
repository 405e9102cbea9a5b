// Finds weights that are NaN or infinite while a model is loaded: in a served answer one of them
// would show only as an internal error of every request.
//
// Pure functions.
#ifndef WINNOW_ENGINE_MODEL_FINITE_WEIGHTS_H_
#define WINNOW_ENGINE_MODEL_FINITE_WEIGHTS_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "kernels/model_ops.h"

namespace winnow::engine {

// Index of the first value, row by row, that is NaN or infinite. Reads the matrix once, large ones
// with several threads: about as fast as memory is read, a small part of what packing takes.
std::optional<int64_t> FindNonFinite(const kernels::HostMatrix& matrix);

// The InvalidArgument error for `value` at [row, col]: names the file, the tensor and the place.
// `tensor`: the data of that view of `weights` that the value comes from.
absl::Status NonFiniteError(const ModelConfig& config, const Weights& weights, const void* tensor,
                            int64_t row, int64_t col, float value);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_FINITE_WEIGHTS_H_

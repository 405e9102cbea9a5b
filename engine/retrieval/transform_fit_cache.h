// The file that remembers a model's fit of transform codes, beside the crossover cache.
//
//   file  := "WNWTFIT2" key digest[32] body digest[32] body          little endian
//   body  := u32 bits, sample tokens, layers, KV heads, head dimension; then of each layer the heads of its code and
//            those of its residual code:
//            u32 quads, widths[quads] u8, u32 fields, fields of 5 u8 each, u32 cell bits, cell bits u8, u8 tail,
//            u32 rows of delta, then float32 key_weight, key_bias, query_weight, mean, delta_weight; of a residual code
//            also i16 first_dims and float32 first_steps
//
// The key says what a fit depends on: model, how KV is computed, text, bits, served context, version of the fit. A file
// of another key, damaged or cut short, counts as none and is written anew. Nothing in it is trusted: sizes are
// checked against the model's before memory is taken, and every head by kernels::CheckTransformCode.
#ifndef WINNOW_ENGINE_RETRIEVAL_TRANSFORM_FIT_CACHE_H_
#define WINNOW_ENGINE_RETRIEVAL_TRANSFORM_FIT_CACHE_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/retrieval/transform_fit.h"

namespace winnow::engine {

// The file's text, and a fit from one. Nothing: it is of another key or model, or damaged.
std::string SerialiseTransformFit(const TransformFit& fit, std::string_view key);
std::optional<TransformFit> ParseTransformFit(std::string_view text, std::string_view key,
                                              const ModelConfig& config);

// Nothing if there is no file, or it is of no use. PermissionDenied, ...: it cannot be read, and why.
absl::StatusOr<std::optional<TransformFit>> ReadTransformFit(const std::string& path,
                                                             std::string_view key,
                                                             const ModelConfig& config);
// Replaces the file whole; makes the directory.
absl::Status WriteTransformFit(const std::string& path, std::string_view key,
                               const TransformFit& fit);

// fit-<digest of the key>.bin in the directory of `crossover_path`; "" where that is "".
std::string TransformFitPath(const std::string& crossover_path, std::string_view key);

// The digest of everything that codes depend on.
std::string TransformFitId(const TransformFit& fit);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_TRANSFORM_FIT_CACHE_H_

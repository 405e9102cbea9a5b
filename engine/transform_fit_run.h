// Fits a model's transform codes on a text: runs it densely, keeps keys, values and queries, and fits every KV head.
// Done once, before the model is served; the result is remembered (transform_fit_cache.h).
//
// Threads: the caller's, and as many of its own while the heads are fitted.
#ifndef WINNOW_ENGINE_TRANSFORM_FIT_RUN_H_
#define WINNOW_ENGINE_TRANSFORM_FIT_RUN_H_

#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/base/clock.h"
#include "engine/decoder.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "engine/retrieval/transform_fit.h"
#include "kernels/backend.h"

namespace winnow::engine {

// The project's text: about 16,000 tokens of its own documentation. Compiled in.
std::string_view TransformFitText();

// Raise it when a fit comes out otherwise: what was remembered is then fitted anew.
inline constexpr int32_t kTransformFitVersion = 2;

// At most so many tokens of text, in windows; at least one window is run, and no further one is begun later than
// `budget` after the first.
inline constexpr int32_t kFitTokens = 4096, kFitWindow = 2048;

// `tokens`: of the text, as many as there are. `options`: the decoder's that the fit is for. `progress` is called with
// the share that is done, up to 1; may be empty.
// InvalidArgument: the text is too short, or a fit fails (layer and KV head are named). ResourceExhausted, Unavailable:
// as the decoder's.
absl::StatusOr<TransformFit> MakeTransformFit(const ModelConfig& config, const Weights& weights,
                                              std::span<const int32_t> tokens,
                                              kernels::Backend& backend,
                                              const DecoderOptions& options, int32_t bits,
                                              const Clock& clock, Duration budget,
                                              const std::function<void(double)>& progress);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_TRANSFORM_FIT_RUN_H_

// The weights of a GGUF file: LoadWeights of such a path.
#ifndef WINNOW_ENGINE_MODEL_GGUF_WEIGHTS_H_
#define WINNOW_ENGINE_MODEL_GGUF_WEIGHTS_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"

namespace winnow::engine {

// As LoadWeights, which calls it. Unimplemented names a tensor's type that winnow does not read, and those it does.
absl::StatusOr<Weights> LoadGgufWeights(const std::string& path, const ModelConfig& config);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GGUF_WEIGHTS_H_

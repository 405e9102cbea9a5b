// Weights of a configuration's shapes without files, for speed measurements: noise that keeps
// activations finite. All tensors are views into one buffer of the largest tensor's size, so that a
// model of many gigabytes costs its packed size only; each starts elsewhere in it, so that no two
// layers are equal.
#ifndef WINNOW_ENGINE_MODEL_SYNTHETIC_WEIGHTS_H_
#define WINNOW_ENGINE_MODEL_SYNTHETIC_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"

namespace winnow::engine {

struct SyntheticWeights {
  std::unique_ptr<std::byte[]> noise;    // what `weights` points into
  std::unique_ptr<std::byte[]> ones;     // norms
  std::unique_ptr<std::byte[]> routers;  // noise of which no part comes again
  Weights weights;
};

// In config.dtype. The same seed gives the same weights. ResourceExhausted: no memory for the
// buffer.
absl::StatusOr<SyntheticWeights> MakeSyntheticWeights(const ModelConfig& config, uint64_t seed);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_SYNTHETIC_WEIGHTS_H_

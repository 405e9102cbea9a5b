// Hash functions and feature maps of a configuration's shapes without calibration, for speed
// measurements of models without weights of their own: random values, in the widths that `calibrate`
// chooses by default. What they choose means nothing; what choosing costs is what learned ones cost.
#ifndef WINNOW_ENGINE_SYNTHETIC_ARTIFACT_H_
#define WINNOW_ENGINE_SYNTHETIC_ARTIFACT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/retrieval/artifact.h"
#include "engine/retrieval/transform_fit.h"

namespace winnow::engine {

struct SyntheticArtifact {
  std::unique_ptr<const std::string>
      bytes;  // of the file that it would be; `artifact` points into it
  std::shared_ptr<const Artifact> artifact;
};

// All kinds and the feature maps, for every layer. The same seed gives the same functions.
// As Artifact::Parse: InvalidArgument for a shape that no artifact can have.
absl::StatusOr<SyntheticArtifact> MakeSyntheticArtifact(const ModelConfig& config, uint64_t seed);

// Transform codes that are fitted to noise, the same for every layer and KV head, with a tail.
// As FitTransformHead: InvalidArgument.
absl::StatusOr<std::shared_ptr<const TransformFit>> MakeSyntheticTransform(
    const ModelConfig& config, int32_t bits);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SYNTHETIC_ARTIFACT_H_

// What ties an artifact to the model that it was made for (docs/artifact-format.md, "Fingerprint"), and
// stored KV to the model that computed it.
#ifndef WINNOW_ENGINE_MODEL_MODEL_FINGERPRINT_H_
#define WINNOW_ENGINE_MODEL_MODEL_FINGERPRINT_H_

#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors.h"
#include "engine/model/weights.h"

namespace winnow::engine {

// SHA-256, 64 lower-case hex digits, of the model's shape, of its rotary embedding and of at most
// the first 64 KiB of every tensor of `weights`, as the model's files have them: a GGUF file and a
// directory of the same model differ. Reads those pages and keeps none. The same as `calibrate` computes, bit for bit.
// Internal: the library refuses to digest.
absl::StatusOr<std::string> ModelFingerprint(const ModelConfig& config, const Weights& weights);
// The same of files that are all the weight files of one model (no name is in two).
absl::StatusOr<std::string> ModelFingerprint(
    const ModelConfig& config, std::span<const std::unique_ptr<SafetensorsFile>> files);

// SHA-256, as above, of all of the model that its KV depends on: every byte of every tensor, and what
// config.json says of how they are used. An artifact of a model that differs in a few weights still finds
// most of what it should; KV of such a model is wrong. Reads all weights, by several threads.
absl::StatusOr<std::string> KvFingerprint(const ModelConfig& config, const Weights& weights);
absl::StatusOr<std::string> KvFingerprint(const ModelConfig& config,
                                          std::span<const std::unique_ptr<SafetensorsFile>> files);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_MODEL_FINGERPRINT_H_

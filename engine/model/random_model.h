// Writes a model directory of any supported configuration with random weights: for measurements of
// shapes whose real weights are not at hand, and for tests.
//
// Values are bell-shaped and scaled so that activations and logits stay of the order of one: a
// matrix by 1/sqrt(inputs), what writes to the residual stream by a further 1/sqrt(2*layers), norms
// about 1. Value i of a tensor is a function of (seed, the tensor's name, i) alone, so neither the
// type nor the cut into shards changes the model.
#ifndef WINNOW_ENGINE_MODEL_RANDOM_MODEL_H_
#define WINNOW_ENGINE_MODEL_RANDOM_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/weights.h"
#include "kernels/dtype.h"

namespace winnow::engine {

struct RandomModelOptions {
  std::string config_path;  // a config.json of a supported model
  std::string out_dir;      // made if it is not there; must be empty if it is
  uint64_t seed = 0;
  std::optional<kernels::DType> dtype;  // absent: as the configuration says
  // Copies tokenizer files from there; empty: none. A vocabulary that is smaller than the shape's is
  // filled up with tokens that no text has.
  std::string tokenizer_dir;
  int64_t shard_bytes =
      5'000'000'000;  // of tensor data per file; one larger tensor has its own file
};

struct RandomModelReport {
  int num_files = 0;  // of weights
  uint64_t num_parameters = 0;
  uint64_t weight_bytes = 0;
};

// Writes config.json (with the type that was chosen), generation_config.json, the weights and, if
// asked, the tokenizer's files. Memory: a few MiB, whatever the size. After an error it leaves no
// file of its own behind.
// As LoadModelConfig, and: InvalidArgument (shard_bytes, no tokenizer.json), AlreadyExists (out_dir
// is not empty), ResourceExhausted (not enough space: bytes asked for and free), the system's
// errors with the path.
absl::StatusOr<RandomModelReport> WriteRandomModel(const RandomModelOptions& options);

// Values [first, first + out.size_bytes() / DTypeBytes(dtype)) of the tensor that `spec` describes.
void FillRandomTensor(const TensorSpec& spec, const ModelConfig& config, uint64_t seed,
                      kernels::DType dtype, uint64_t first, std::span<std::byte> out);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_RANDOM_MODEL_H_

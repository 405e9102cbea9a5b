// What unset sampling fields mean: the model's generation_config.json, where it asks for sampling.
#ifndef WINNOW_SERVER_GENERATION_DEFAULTS_H_
#define WINNOW_SERVER_GENERATION_DEFAULTS_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/schedule/request.h"

namespace winnow::server {

// Greedy unless the file has "do_sample": true; then its temperature, top_k, top_p and min_p, with
// transformers' defaults (1, 50, 1, 0) for those it leaves out. repetition_penalty holds either
// way. No file is greedy, and so is a GGUF model. InvalidArgument names the file and the key.
absl::StatusOr<engine::SamplingOptions> LoadGenerationDefaults(const std::string& model_path);

// The same from a text; `name` stands for the file in errors.
absl::StatusOr<engine::SamplingOptions> ParseGenerationDefaults(std::string_view json,
                                                                std::string_view name);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_GENERATION_DEFAULTS_H_

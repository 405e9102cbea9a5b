#include "server/generation_defaults.h"

#include "engine/base/json_file.h"
#include "engine/base/json_keys.h"
#include "engine/base/status_macros.h"
#include "engine/model/gguf.h"
#include "server/validate.h"

namespace winnow::server {

absl::StatusOr<engine::SamplingOptions> ParseGenerationDefaults(std::string_view json,
                                                                std::string_view name) {
  WINNOW_ASSIGN_OR_RETURN(const nlohmann::json object, engine::ParseJsonObject(json, name));
  engine::JsonKeys keys(object, name);
  engine::SamplingOptions sampling;
  // The same bounds as for requests: a default must be something a client could have said.
  sampling.repetition_penalty = static_cast<float>(
      keys.Number("repetition_penalty", 1.0, kMinRepetitionPenalty, kMaxRepetitionPenalty));
  if (keys.Bool("do_sample", false)) {
    sampling.temperature = static_cast<float>(keys.Number("temperature", 1.0, 0, kMaxTemperature));
    sampling.top_k = static_cast<int32_t>(keys.Int("top_k", 50, 0, kMaxTopK));
    sampling.top_p = static_cast<float>(keys.Number("top_p", 1.0, 0, 1));
    sampling.min_p = static_cast<float>(keys.Number("min_p", 0.0, 0, 1));
    if (sampling.top_p <= 0) {
      keys.Fail(absl::StatusCode::kInvalidArgument, "top_p", "must be greater than 0");
    }
  }
  WINNOW_RETURN_IF_ERROR(keys.status());
  return sampling;
}

absl::StatusOr<engine::SamplingOptions> LoadGenerationDefaults(const std::string& model_path) {
  if (engine::IsGgufPath(model_path)) return engine::SamplingOptions{};
  const std::string path = model_path + "/generation_config.json";
  absl::StatusOr<std::string> json = engine::ReadSmallFile(path, 1 << 20);
  if (absl::IsNotFound(json.status())) return engine::SamplingOptions{};
  WINNOW_RETURN_IF_ERROR(json.status());
  return ParseGenerationDefaults(*json, path);
}

}  // namespace winnow::server

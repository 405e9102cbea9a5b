// The JSON text of an artifact, checked (docs/artifact-format.md, "Header"): what the file says
// that it holds. engine/retrieval/artifact.h checks that it does.
#ifndef WINNOW_ENGINE_RETRIEVAL_ARTIFACT_HEADER_H_
#define WINNOW_ENGINE_RETRIEVAL_ARTIFACT_HEADER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/retrieval/attention_policy.h"

namespace winnow::engine {

// The name of the metadata entry that holds the text.
inline constexpr char kArtifactMetadataKey[] = "winnow_artifact";

// Far above what any kind needs, low enough that products of widths are int64_t.
inline constexpr int32_t kArtifactWidthMax = 1 << 16;

struct ArtifactFunctions {
  int32_t bits = 0;  // 32, 64, 128 or 256
  int32_t stages = 0;
  bool query_group = false;     // one query function gives the codes of a whole group's queries
  std::vector<int32_t> layers;  // ascending, below the model's number
  std::string recipe;           // of its training; "" if it does not say. For people
};

struct ArtifactFeatures {
  int32_t features = 0;  // 1 to kArtifactWidthMax
  std::vector<int32_t> layers;
  // The verdict: whether completion lowers the output error on validation documents, for each layer
  // of `layers` and KV head in it (layer-major). Absent in files made before there was one; then
  // nobody knows, and completion is refused.
  std::optional<std::vector<bool>> helps;
  std::string recipe;
};

struct ArtifactHeader {
  int32_t dense_layers = 0;  // layers assumed dense at calibration; information
  std::map<AttentionPolicy::Kind, ArtifactFunctions> kinds;
  std::optional<ArtifactFeatures> features;
};

// InvalidArgument, with `name` and the key that is wrong: not JSON, another format, another model
// than that of `config` and `model_fingerprint`, or a value that the page does not allow.
absl::StatusOr<ArtifactHeader> ParseArtifactHeader(std::string_view text, std::string_view name,
                                                   const ModelConfig& config,
                                                   const std::string& model_fingerprint);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_ARTIFACT_HEADER_H_

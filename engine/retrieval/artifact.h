// The artifact: what `calibrate` learned for one model, mapped read-only. docs/artifact-format.md
// has the format; Load checks all that it says and refuses a file by the name of what is wrong:
// nothing in it is trusted.
//
// Bounds beyond the page's, far above what models need: widths and the number of log-features are
// at most 65536, the JSON text is at most 1 MiB and nested at most 64 deep. JSON keys that the page
// does not name are ignored.
#ifndef WINNOW_ENGINE_RETRIEVAL_ARTIFACT_H_
#define WINNOW_ENGINE_RETRIEVAL_ARTIFACT_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors.h"
#include "engine/retrieval/artifact_header.h"
#include "engine/retrieval/attention_policy.h"
#include "kernels/retrieval.h"

namespace winnow::engine {

// Immutable; any thread may read it. The file must not change while it is open.
class Artifact {
 public:
  enum class Side { kKey, kQuery };

  Artifact(const Artifact&) = delete;
  Artifact& operator=(const Artifact&) = delete;

  // Errors begin with the path. NotFound, PermissionDenied: as the system says. InvalidArgument:
  // not a safetensors file, not an artifact, of another format or for another model, or what it
  // says of itself and what it holds disagree. DataLoss: values that are not finite.
  // Reads the whole file once, for those.
  static absl::StatusOr<std::shared_ptr<const Artifact>> Load(const std::string& path,
                                                              const ModelConfig& config,
                                                              const std::string& model_fingerprint);
  // The same of a file's bytes, which must outlive the result; `name` stands for the path.
  static absl::StatusOr<std::shared_ptr<const Artifact>> Parse(
      std::span<const std::byte> bytes, std::string_view name, const ModelConfig& config,
      const std::string& model_fingerprint);

  // Hash functions. Layers are ascending.
  bool HasKind(AttentionPolicy::Kind kind) const { return header_.kinds.contains(kind); }
  int32_t bits(AttentionPolicy::Kind kind) const;                        // REQUIRES: HasKind
  const std::vector<int32_t>& layers(AttentionPolicy::Kind kind) const;  // REQUIRES: HasKind
  bool HasLayer(AttentionPolicy::Kind kind, int32_t layer) const;
  // Views that live as long as this. REQUIRES: HasLayer.
  kernels::EncoderWeights Encoder(AttentionPolicy::Kind kind, int32_t layer, Side side) const;

  // Log-feature maps of completion: only those with a verdict, because maps that nobody validated
  // may ruin every answer. False where the file has maps without one; header().features says that
  // it has.
  bool has_features() const { return header_.features && header_.features->helps; }
  bool HasFeatures(int32_t layer) const;
  // Views that live as long as this. REQUIRES: HasFeatures. At heads where the verdict is that
  // completion does harm, the queries' maps give -kRefusedFeature for every feature, so that the
  // head's summary has no mass and the answer is that without completion.
  static constexpr float kRefusedFeature = 1e30f;
  kernels::FeatureMapWeights FeatureMap(int32_t layer, Side side) const;

  const ArtifactHeader& header() const { return header_; }
  uint64_t size_bytes() const { return size_bytes_; }  // of the file

  // One line for logs and GetModel: "hata:128 in layers 2-5 (recipe winnow); feature maps:64 in
  // layers 2-5 (recipe winnow); 1907968 bytes".
  std::string Description() const;
  // Digest of all functions: artifacts with one id choose and complete alike.
  std::string ContentId() const;

 private:
  Artifact() = default;
  class Reader;
  using EncoderKey = std::tuple<AttentionPolicy::Kind, int32_t, Side>;  // kind, layer, side
  using FeatureMapKey = std::pair<int32_t, Side>;

  ArtifactHeader header_;
  std::map<EncoderKey, kernels::EncoderWeights> encoders_;
  std::map<FeatureMapKey, kernels::FeatureMapWeights> feature_maps_;
  uint64_t size_bytes_ = 0;
  std::unique_ptr<SafetensorsFile> file_;                // null if parsed from bytes
  std::vector<std::unique_ptr<std::byte[]>> realigned_;  // tensors that the file misaligns
  // Biases of queries' maps, rewritten where heads are refused.
  std::vector<std::unique_ptr<std::vector<float>>> refused_biases_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_ARTIFACT_H_

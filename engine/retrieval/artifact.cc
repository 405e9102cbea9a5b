#include "engine/retrieval/artifact.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/kv/block_name.h"
#include "fmt/format.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

using kernels::AffineStage;
using kernels::EncoderWeights;
using kernels::FeatureMapWeights;
using Kind = AttentionPolicy::Kind;
using DataOf = std::function<std::span<const std::byte>(const SafetensorsEntry&)>;

static_assert(std::endian::native == std::endian::little, "tensors are used where they lie");

// A number of either type is infinite or NaN where all bits of its exponent are set.
bool AllFinite(std::span<const uint16_t> values) {
  return std::none_of(values.begin(), values.end(),
                      [](uint16_t bits) { return (bits & 0x7f80) == 0x7f80; });
}
bool AllFinite(std::span<const float> values) {
  return std::none_of(values.begin(), values.end(), [](float value) {
    return (std::bit_cast<uint32_t>(value) & 0x7f800000) == 0x7f800000;
  });
}

template <typename T>
constexpr std::string_view kTypeName = std::is_same_v<T, float> ? "F32" : "BF16";

std::string_view SideName(Artifact::Side side) {
  return side == Artifact::Side::kKey ? "key" : "query";
}

// "2-5, 7"
std::string Ranges(const std::vector<int32_t>& layers) {
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t last = i;
    while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
    text += Concat(text.empty() ? "" : ", ", layers[i]);
    if (last > i) text += Concat("-", layers[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace

// Takes the tensors that the header promises, one after the other, and sees at the end whether
// there are more.
class Artifact::Reader {
 public:
  Reader(Artifact& artifact, const SafetensorsHeader& header, DataOf data_of, std::string_view name,
         const ModelConfig& config)
      : artifact_(artifact),
        header_(header),
        data_of_(std::move(data_of)),
        name_(name),
        config_(config) {}

  absl::Status Read(const std::string& model_fingerprint) {
    const auto text = header_.metadata().find(kArtifactMetadataKey);
    if (text == header_.metadata().end()) {
      return Refuse(Concat("no \"", kArtifactMetadataKey, "\" in its metadata: no artifact"));
    }
    if (header_.metadata().size() != 1) {
      return Refuse(Concat("its metadata have more entries than \"", kArtifactMetadataKey, "\""));
    }
    WINNOW_ASSIGN_OR_RETURN(artifact_.header_,
                            ParseArtifactHeader(text->second, name_, config_, model_fingerprint));
    for (const auto& [kind, functions] : artifact_.header_.kinds) {
      for (const int32_t layer : functions.layers) {
        for (const Side side : {Side::kKey, Side::kQuery})
          WINNOW_RETURN_IF_ERROR(ReadEncoder(kind, functions, layer, side));
      }
    }
    if (artifact_.header_.features) {
      for (const int32_t layer : artifact_.header_.features->layers) {
        for (const Side side : {Side::kKey, Side::kQuery})
          WINNOW_RETURN_IF_ERROR(ReadFeatureMap(artifact_.header_.features->features, layer, side));
      }
      ApplyVerdict(*artifact_.header_.features);
    }
    for (size_t i = 0; i < header_.num_tensors(); ++i) {
      const std::string_view tensor = header_.tensor(i).name;
      if (!taken_.contains(tensor)) return Refuse(tensor, "nothing in the header asks for it");
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kFree = 0;  // a width that the file chooses

  absl::Status ReadEncoder(Kind kind, const ArtifactFunctions& functions, int32_t layer,
                           Side side) {
    EncoderWeights encoder;
    encoder.kv_heads = config_.num_kv_heads;
    // A query function of the whole group is as many times wider at both ends.
    if (side == Side::kQuery && functions.query_group)
      encoder.queries_per_input = config_.num_heads / config_.num_kv_heads;
    int64_t in = int64_t{encoder.queries_per_input} * config_.head_dim;
    for (int32_t i = 0; i < functions.stages; ++i) {
      const bool is_last = i + 1 == functions.stages;
      const int64_t out = is_last ? int64_t{encoder.queries_per_input} * functions.bits : kFree;
      WINNOW_ASSIGN_OR_RETURN(
          const AffineStage stage,
          Affine(Concat("layers.", layer, ".", KindName(kind), ".", SideName(side), ".", i), out,
                 in));
      in = stage.out;
      encoder.stages.push_back(stage);
    }
    artifact_.encoders_.emplace(EncoderKey{kind, layer, side}, std::move(encoder));
    return absl::OkStatus();
  }

  absl::Status ReadFeatureMap(int32_t features, int32_t layer, Side side) {
    FeatureMapWeights map;
    map.kv_heads = config_.num_kv_heads;
    const auto affine = [&](std::string_view role, int64_t out, int64_t in) {
      return Affine(Concat("layers.", layer, ".features.", SideName(side), ".", role), out, in);
    };
    WINNOW_ASSIGN_OR_RETURN(map.stem, affine("stem", kFree, config_.head_dim));
    WINNOW_ASSIGN_OR_RETURN(map.gate, affine("gate", kFree, map.stem.out));
    WINNOW_ASSIGN_OR_RETURN(map.up, affine("up", map.gate.out, map.stem.out));
    WINNOW_ASSIGN_OR_RETURN(map.down, affine("down", map.stem.out, map.gate.out));
    WINNOW_ASSIGN_OR_RETURN(map.out, affine("out", features, map.stem.out));
    artifact_.feature_maps_.emplace(FeatureMapKey{layer, side}, map);
    return absl::OkStatus();
  }

  // Drops maps without a verdict, and silences the heads at which completion does harm.
  void ApplyVerdict(const ArtifactFeatures& features) {
    if (!features.helps) {
      artifact_.feature_maps_.clear();
      return;
    }
    const int32_t heads = config_.num_kv_heads;
    for (size_t i = 0; i < features.layers.size(); ++i) {
      const auto helps = features.helps->begin() + i * heads;
      if (std::all_of(helps, helps + heads, [](bool value) { return value; })) continue;
      AffineStage& out = artifact_.feature_maps_.at({features.layers[i], Side::kQuery}).out;
      auto& bias = *artifact_.refused_biases_.emplace_back(
          std::make_unique<std::vector<float>>(out.bias.begin(), out.bias.end()));
      for (int32_t head = 0; head < heads; ++head) {
        if (helps[head]) continue;
        std::fill_n(bias.begin() + int64_t{head} * out.out, out.out, -kRefusedFeature);
      }
      out.bias = bias;
    }
  }

  // The tensors PREFIX.weight and PREFIX.bias.
  absl::StatusOr<AffineStage> Affine(const std::string& prefix, int64_t out, int64_t in) {
    const int64_t heads = config_.num_kv_heads;
    const std::string weight = Concat(prefix, ".weight"), bias = Concat(prefix, ".bias");
    if (out == kFree) {
      WINNOW_ASSIGN_OR_RETURN(out, Width(weight));
    }
    AffineStage stage;
    stage.in = static_cast<int32_t>(in);
    stage.out = static_cast<int32_t>(out);
    WINNOW_ASSIGN_OR_RETURN(stage.weight, Take<uint16_t>(weight, {heads, out, in}));
    WINNOW_ASSIGN_OR_RETURN(stage.bias, Take<float>(bias, {heads, out}));
    return stage;
  }

  // The second dimension, where it is one that may be chosen; what Take checks otherwise.
  absl::StatusOr<int64_t> Width(const std::string& tensor) {
    WINNOW_ASSIGN_OR_RETURN(const SafetensorsEntry entry, FindTensor(tensor));
    if (entry.shape.size() == 3 && entry.shape[1] >= 1 && entry.shape[1] <= kArtifactWidthMax)
      return static_cast<int64_t>(entry.shape[1]);
    return Refuse(tensor, Concat("shape ", ShapeText(entry.shape), ", expected [",
                                 config_.num_kv_heads, ", 1 to ", kArtifactWidthMax, ", ...]"));
  }

  template <typename T>
  absl::StatusOr<std::span<const T>> Take(const std::string& tensor,
                                          std::initializer_list<int64_t> dims) {
    const std::vector<uint64_t> shape(dims.begin(), dims.end());
    WINNOW_ASSIGN_OR_RETURN(const SafetensorsEntry entry, FindTensor(tensor));
    if (entry.dtype != kTypeName<T>) {
      return Refuse(tensor, Concat("type ", entry.dtype, ", expected ", kTypeName<T>));
    }
    if (!std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end())) {
      return Refuse(tensor,
                    Concat("shape ", ShapeText(entry.shape), ", expected ", ShapeText(shape)));
    }
    taken_.insert(entry.name);
    const std::span<const std::byte> data = Aligned(data_of_(entry), alignof(T));
    const std::span values(reinterpret_cast<const T*>(data.data()), data.size() / sizeof(T));
    if (!AllFinite(values)) {
      return absl::DataLossError(
          Concat(name_, ": tensor ", ShortDump(tensor), ": values that are not finite"));
    }
    return values;
  }

  // The format promises no alignment, so a file without it is a good one; few have none.
  std::span<const std::byte> Aligned(std::span<const std::byte> data, size_t alignment) {
    if (reinterpret_cast<uintptr_t>(data.data()) % alignment == 0) return data;
    auto& copy = artifact_.realigned_.emplace_back(std::make_unique<std::byte[]>(data.size()));
    std::memcpy(copy.get(), data.data(), data.size());
    return {copy.get(), data.size()};
  }

  absl::StatusOr<SafetensorsEntry> FindTensor(const std::string& tensor) {
    const std::optional<SafetensorsEntry> entry = header_.Find(tensor);
    if (!entry) return Refuse(tensor, "missing");
    return *entry;
  }

  static std::string ShapeText(std::span<const uint64_t> shape) {
    return Concat("[", absl::StrJoin(shape, ", "), "]");
  }

  absl::Status Refuse(std::string_view what) const {
    return absl::InvalidArgumentError(Concat(name_, ": ", what));
  }
  absl::Status Refuse(std::string_view tensor, std::string_view what) const {
    return Refuse(Concat("tensor ", ShortDump(tensor), ": ", what));
  }

  Artifact& artifact_;
  const SafetensorsHeader& header_;
  const DataOf data_of_;
  const std::string_view name_;
  const ModelConfig& config_;
  absl::flat_hash_set<std::string_view> taken_;
};

absl::StatusOr<std::shared_ptr<const Artifact>> Artifact::Load(
    const std::string& path, const ModelConfig& config, const std::string& model_fingerprint) {
  const std::shared_ptr<Artifact> artifact(new Artifact);
  WINNOW_ASSIGN_OR_RETURN(artifact->file_, SafetensorsFile::Open(path));
  const SafetensorsFile& file = *artifact->file_;
  artifact->size_bytes_ = file.size_bytes();
  Reader reader(
      *artifact, file.header(), [&file](const SafetensorsEntry& entry) { return file.Data(entry); },
      path, config);
  WINNOW_RETURN_IF_ERROR(reader.Read(model_fingerprint));
  return artifact;
}

absl::StatusOr<std::shared_ptr<const Artifact>> Artifact::Parse(
    std::span<const std::byte> bytes, std::string_view name, const ModelConfig& config,
    const std::string& model_fingerprint) {
  const absl::StatusOr<SafetensorsHeader> header = SafetensorsHeader::Parse(bytes, bytes.size());
  if (!header.ok()) {
    return absl::Status(header.status().code(), Concat(name, ": ", header.status().message()));
  }
  const std::shared_ptr<Artifact> artifact(new Artifact);
  artifact->size_bytes_ = bytes.size();
  Reader reader(
      *artifact, *header,
      [&](const SafetensorsEntry& entry) {
        return bytes.subspan(header->data_offset() + entry.begin, entry.end - entry.begin);
      },
      name, config);
  WINNOW_RETURN_IF_ERROR(reader.Read(model_fingerprint));
  return artifact;
}

int32_t Artifact::bits(Kind kind) const {
  WINNOW_CHECK(HasKind(kind));
  return header_.kinds.at(kind).bits;
}

const std::vector<int32_t>& Artifact::layers(Kind kind) const {
  WINNOW_CHECK(HasKind(kind));
  return header_.kinds.at(kind).layers;
}

bool Artifact::HasLayer(Kind kind, int32_t layer) const {
  return encoders_.contains({kind, layer, Side::kKey});
}

EncoderWeights Artifact::Encoder(Kind kind, int32_t layer, Side side) const {
  const auto found = encoders_.find({kind, layer, side});
  WINNOW_CHECK(found != encoders_.end());
  return found->second;
}

bool Artifact::HasFeatures(int32_t layer) const {
  return feature_maps_.contains({layer, Side::kKey});
}

FeatureMapWeights Artifact::FeatureMap(int32_t layer, Side side) const {
  const auto found = feature_maps_.find({layer, side});
  WINNOW_CHECK(found != feature_maps_.end());
  return found->second;
}

std::string Artifact::Description() const {
  std::string text;
  const auto add = [&text](std::string_view what, int32_t size, const std::vector<int32_t>& layers,
                           const std::string& recipe) {
    text += Concat(what, ":", size, " in layers ", layers.empty() ? "none" : Ranges(layers));
    if (!recipe.empty()) text += Concat(" (recipe ", recipe, ")");
    text += "; ";
  };
  for (const auto& [kind, functions] : header_.kinds)
    add(KindName(kind), functions.bits, functions.layers, functions.recipe);
  if (const auto& features = header_.features) {
    add("feature maps", features->features, features->layers, features->recipe);
    const auto helped =
        features->helps ? std::count(features->helps->begin(), features->helps->end(), true) : 0;
    text.resize(text.size() - 2);
    text += features->helps ? Concat(" at ", helped, " of ", features->helps->size(), " heads; ")
                            : " without a verdict: not used; ";
  }
  return Concat(text, size_bytes_, " bytes");
}

std::string Artifact::ContentId() const {
  std::string digests;
  const auto add = [&](const kernels::AffineStage& stage) {
    for (const auto& bytes : {std::as_bytes(stage.weight), std::as_bytes(stage.bias)}) {
      const Digest digest = Sha256({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      digests.append(digest.begin(), digest.end());
    }
  };
  for (const auto& [key, weights] : encoders_) {
    const auto& [kind, layer, side] = key;
    digests += fmt::format("encoder {} {} {};", KindName(kind), layer, static_cast<int>(side));
    for (const kernels::AffineStage& stage : weights.stages) add(stage);
  }
  for (const auto& [key, weights] : feature_maps_) {
    digests += fmt::format("features {} {};", key.first, static_cast<int>(key.second));
    for (const auto* stage :
         {&weights.stem, &weights.gate, &weights.up, &weights.down, &weights.out}) {
      add(*stage);
    }
  }
  const Digest all = Sha256(digests);
  return std::string(all.begin(), all.end());
}

}  // namespace winnow::engine

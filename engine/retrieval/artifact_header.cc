#include "engine/retrieval/artifact_header.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/json_keys.h"
#include "engine/base/status_macros.h"

namespace winnow::engine {
namespace {

using Json = nlohmann::json;
using Kind = AttentionPolicy::Kind;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

struct KindRule {
  Kind kind;
  int32_t stages;
};
constexpr std::array<KindRule, 3> kLearnedKinds = {
    {{Kind::kHata, 1}, {Kind::kSpotlight, 2}, {Kind::kHashAttention, 3}}};

// The object under `key`, or null and the error.
const Json* Object(JsonKeys& keys, std::string_view key) {
  const Json* value = keys.Find(key);
  if (value == nullptr) {
    keys.Fail(kInvalid, key, "missing");
  } else if (!value->is_object()) {
    keys.Fail(kInvalid, key, Concat("must be an object, is ", ShortDump(*value)));
    return nullptr;
  }
  return value;
}

// "training" is not interpreted: whatever it is, the worst is that the recipe is not known.
std::string Recipe(const Json& object) {
  const auto training = object.find("training");
  if (training == object.end() || !training->is_object()) return "";
  const auto recipe = training->find("recipe");
  if (recipe == training->end() || !recipe->is_string()) return "";
  constexpr size_t kBytesMax = 32;
  std::string name = recipe->get<std::string>();
  // It goes into logs and into GetModel.
  const bool printable =
      std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 0x7f; });
  return printable && name.size() <= kBytesMax ? name : "";
}

std::vector<int32_t> Layers(JsonKeys& keys, int32_t num_layers) {
  const Json* value = keys.Find("layers");
  if (value == nullptr) {
    keys.Fail(kInvalid, "layers", "missing");
    return {};
  }
  if (!value->is_array()) {
    keys.Fail(kInvalid, "layers", Concat("must be a list, is ", ShortDump(*value)));
    return {};
  }
  const std::vector<int64_t> list = keys.Ints("layers", 0, num_layers - 1, num_layers);
  for (size_t i = 1; i < list.size(); ++i) {
    if (list[i - 1] < list[i]) continue;
    keys.Fail(kInvalid, "layers", Concat("must ascend, but ", list[i], " follows ", list[i - 1]));
    return {};
  }
  return {list.begin(), list.end()};
}

// The verdict of feature maps: one truth value for each of `count` heads. Absent: nullopt.
std::optional<std::vector<bool>> Verdict(JsonKeys& keys, size_t count) {
  const Json* value = keys.Find("helps");
  if (value == nullptr) return std::nullopt;
  if (!value->is_array() || value->size() != count ||
      !std::all_of(value->begin(), value->end(), [](const Json& v) { return v.is_boolean(); })) {
    keys.Fail(kInvalid, "helps",
              Concat("must be a list of ", count, " truth values, one for each layer and KV head"));
    return std::nullopt;
  }
  return value->get<std::vector<bool>>();
}

void CheckModel(JsonKeys& keys, const ModelConfig& config, const std::string& model_fingerprint) {
  const auto check = [&keys](std::string_view key, int32_t value) {
    const int64_t made_for = keys.Int(key, {}, 1, INT32_MAX);
    if (!keys.status().ok() || made_for == value) return;
    keys.Fail(kInvalid, key, Concat("made for a model with ", made_for, ", this one has ", value));
  };
  check("layers", config.num_layers());
  check("query_heads", config.num_heads);
  check("kv_heads", config.num_kv_heads);
  check("head_dim", config.head_dim);
  const Json* fingerprint = keys.Find("fingerprint");
  if (fingerprint == nullptr) {
    keys.Fail(kInvalid, "fingerprint", "missing");
    return;
  }
  const std::string made_for = keys.String("fingerprint", "");
  if (!keys.status().ok()) return;
  if (made_for.size() != 64 ||
      made_for.find_first_not_of("0123456789abcdef") != std::string::npos) {
    keys.Fail(kInvalid, "fingerprint",
              Concat("must be 64 lower-case hex digits, is ", ShortDump(*fingerprint)));
  } else if (made_for != model_fingerprint) {
    keys.Fail(kInvalid, "fingerprint",
              Concat("made for another model of the same shape (", made_for.substr(0, 12),
                     "..., this one is ", model_fingerprint.substr(0, 12), "...)"));
  }
}

ArtifactFunctions ReadFunctions(JsonKeys& keys, const Json& json, int32_t stages,
                                int32_t num_layers) {
  ArtifactFunctions functions;
  functions.bits = keys.Int("bits", {}, 0, INT32_MAX);
  if (keys.status().ok() && functions.bits != 32 && functions.bits != 64 && functions.bits != 128 &&
      functions.bits != 256) {
    keys.Fail(kInvalid, "bits", Concat("must be 32, 64, 128 or 256, is ", functions.bits));
  }
  const Json* query = keys.Find("query");
  if (query == nullptr) {
    keys.Fail(kInvalid, "query", "missing");
  } else if (*query != "head" && *query != "group") {
    keys.Fail(kInvalid, "query", Concat(R"(must be "head" or "group", is )", ShortDump(*query)));
  } else {
    functions.query_group = *query == "group";
  }
  functions.stages = keys.Int("stages", {}, 0, INT32_MAX);
  if (keys.status().ok() && functions.stages != stages) {
    keys.Fail(kInvalid, "stages", Concat("must be ", stages, ", is ", functions.stages));
  }
  functions.layers = Layers(keys, num_layers);
  functions.recipe = Recipe(json);
  return functions;
}

}  // namespace

absl::StatusOr<ArtifactHeader> ParseArtifactHeader(std::string_view text, std::string_view name,
                                                   const ModelConfig& config,
                                                   const std::string& model_fingerprint) {
  const std::string place = Concat(name, ": ", kArtifactMetadataKey);
  WINNOW_ASSIGN_OR_RETURN(const Json json, ParseJsonObject(text, place));
  JsonKeys keys(json, place);
  // Before all else: a later format may mean anything by the other keys.
  const int64_t format = keys.Int("format", {}, 0, INT32_MAX);
  if (keys.status().ok() && format != 1) {
    keys.Fail(kInvalid, "format", Concat("is ", format, ", this version reads format 1"));
  }
  WINNOW_RETURN_IF_ERROR(keys.status());

  const Json* model = Object(keys, "model");
  WINNOW_RETURN_IF_ERROR(keys.status());
  JsonKeys model_keys(*model, place, "model.");
  CheckModel(model_keys, config, model_fingerprint);
  WINNOW_RETURN_IF_ERROR(model_keys.status());

  ArtifactHeader header;
  header.dense_layers = keys.Int("dense_layers", {}, 0, INT32_MAX);
  const Json* kinds = Object(keys, "kinds");
  WINNOW_RETURN_IF_ERROR(keys.status());
  JsonKeys kinds_keys(*kinds, place, "kinds.");
  for (const auto& item : kinds->items()) {
    const std::string& kind_name = item.key();
    const auto* rule =
        std::find_if(kLearnedKinds.begin(), kLearnedKinds.end(),
                     [&](const KindRule& r) { return KindName(r.kind) == kind_name; });
    if (rule == kLearnedKinds.end()) {
      kinds_keys.Fail(kInvalid, ShortDump(kind_name),
                      "unknown; there are hata, spotlight, hashattention");
      break;
    }
    const Json* functions = Object(kinds_keys, kind_name);
    if (functions == nullptr) break;
    JsonKeys function_keys(*functions, place, Concat("kinds.", kind_name, "."));
    header.kinds.emplace(
        rule->kind, ReadFunctions(function_keys, *functions, rule->stages, config.num_layers()));
    WINNOW_RETURN_IF_ERROR(function_keys.status());
  }
  WINNOW_RETURN_IF_ERROR(kinds_keys.status());

  if (json.contains("features")) {
    const Json* features = Object(keys, "features");
    WINNOW_RETURN_IF_ERROR(keys.status());
    JsonKeys feature_keys(*features, place, "features.");
    ArtifactFeatures& to = header.features.emplace();
    to.features = feature_keys.Int("features", {}, 1, kArtifactWidthMax);
    to.layers = Layers(feature_keys, config.num_layers());
    to.recipe = Recipe(*features);
    to.helps = Verdict(feature_keys, to.layers.size() * config.num_kv_heads);
    WINNOW_RETURN_IF_ERROR(feature_keys.status());
  }
  return header;
}

}  // namespace winnow::engine

#include "engine/model/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <string_view>

#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/json_keys.h"
#include "engine/base/status_macros.h"
#include "engine/model/gguf_config.h"
#include "engine/model/model_family.h"
#include "engine/model/model_limits.h"

namespace winnow::engine {
namespace {

using Json = nlohmann::json;

constexpr size_t kConfigBytesMax = 1 << 20;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

std::string SupportedArchitectures() {
  return absl::StrJoin(ModelFamilies(), ", ", [](std::string* out, const ModelFamily& family) {
    *out += family.architecture;
  });
}

// "architectures", a list of one; "" if there is none.
std::string ReadArchitecture(JsonKeys& keys) {
  const Json* list = keys.Find("architectures");
  if (list == nullptr) return "";
  if (!list->is_array() || list->size() != 1 || !(*list)[0].is_string()) {
    keys.Fail(kInvalid, "architectures",
              Concat("must be a list of one string, is ", ShortDump(*list)));
    return "";
  }
  return (*list)[0].get<std::string>();
}

// Models whose text part is run, and their keys about images, which say nothing about it.
struct Whole {
  std::string_view architecture, model_type;
};
constexpr Whole kWholes[] = {{"Mistral3ForConditionalGeneration", "mistral3"},
                             {"Gemma3ForConditionalGeneration", "gemma3"},
                             {"Qwen3VLForConditionalGeneration", "qwen3_vl"},
                             {"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"}};
constexpr std::string_view kTextConfig = "text_config";
constexpr std::string_view kImageKeys[] = {
    "vision_config",        "image_token_index",    "image_token_id",
    "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias",
    "spatial_merge_size",   "boi_token_index",      "eoi_token_index",
    "mm_tokens_per_image",  "video_token_id",       "vision_start_token_id",
    "vision_end_token_id"};

// The keys of the text part, where the object is of a whole.
const Json* FindTextPart(JsonKeys& keys) {
  const std::string architecture = ReadArchitecture(keys);
  const std::string model_type = keys.String("model_type", "");
  const auto* const whole =
      std::find_if(std::begin(kWholes), std::end(kWholes), [&](const Whole& of) {
        return architecture.empty() ? model_type == of.model_type : architecture == of.architecture;
      });
  if (whole == std::end(kWholes)) return nullptr;
  if (!model_type.empty() && model_type != whole->model_type) {
    keys.Fail(kInvalid, "model_type",
              Concat("\"", model_type, "\" does not belong to architecture ", architecture));
    return nullptr;
  }
  const Json* text = keys.Find(kTextConfig);
  if (text == nullptr || !text->is_object()) {
    keys.Fail(kInvalid, kTextConfig, text == nullptr ? "missing" : "must be an object");
    return nullptr;
  }
  for (const std::string_view key : kImageKeys) keys.Find(key);
  return text;
}

// The family by "architectures", or by "model_type" where there is none; both must agree.
const ModelFamily* FindFamily(JsonKeys& keys) {
  const std::string architecture = ReadArchitecture(keys);
  const std::string model_type = keys.String("model_type", "");
  if (!keys.status().ok()) return nullptr;
  for (const ModelFamily& family : ModelFamilies()) {
    if (architecture.empty() ? model_type != family.model_type
                             : architecture != family.architecture)
      continue;
    if (!model_type.empty() && model_type != family.model_type) {
      keys.Fail(kInvalid, "model_type",
                Concat("\"", model_type, "\" does not belong to architecture ", architecture));
      return nullptr;
    }
    return &family;
  }
  if (architecture.empty() && model_type.empty()) {
    keys.Fail(kInvalid, "architectures", "missing");
  } else {
    keys.Fail(kUnimplemented, architecture.empty() ? "model_type" : "architectures",
              Concat(ShortDump(architecture.empty() ? model_type : architecture),
                     " is not supported; winnow runs ", SupportedArchitectures(),
                     ", and the text part of ",
                     absl::StrJoin(kWholes, " and of ", [](std::string* out, const Whole& whole) {
                       *out += whole.architecture;
                     })));
  }
  return nullptr;
}

void ReadShape(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  config.hidden_size = keys.Int("hidden_size", {}, 1, kHiddenMax);
  config.intermediate_size = keys.Int("intermediate_size", {}, 1, kIntermediateMax);
  config.layers.assign(keys.Int("num_hidden_layers", {}, 1, kLayersMax), family.layer);
  const auto read = [&keys](std::string_view key, int64_t absent, int64_t most) {
    return static_cast<int32_t>(
        keys.Int(key, absent != 0 ? std::optional<int64_t>(absent) : std::nullopt, 1, most));
  };
  config.num_heads = read("num_attention_heads", family.heads_absent, kHeadsMax);
  config.vocab_size = read("vocab_size", family.vocab_absent, kVocabMax);
  config.max_position_embeddings =
      read("max_position_embeddings", family.positions_absent, kPositionsMax);
  config.rms_norm_eps = keys.Number("rms_norm_eps", family.rms_norm_eps_absent, 0.0, 1.0);
  if (!keys.status().ok()) return;

  // An absent key has the family's default; a null means as many as query heads, in every family.
  const bool kv_heads_null = keys.IsNull("num_key_value_heads");
  const int64_t kv_heads_absent =
      family.kv_heads_absent == 0 || kv_heads_null ? config.num_heads : family.kv_heads_absent;
  config.num_kv_heads = keys.Int("num_key_value_heads", kv_heads_absent, 1, kHeadsMax);
  if (config.num_heads % config.num_kv_heads != 0) {
    keys.Fail(
        kInvalid, "num_key_value_heads",
        Concat(config.num_kv_heads, " does not divide num_attention_heads ", config.num_heads));
  }

  if (keys.Find("head_dim") != nullptr) {
    config.head_dim = keys.Int("head_dim", {}, 1, 1 << 16);
  } else if (family.head_dim_absent != 0 && !keys.IsNull("head_dim")) {
    config.head_dim = family.head_dim_absent;
  } else {
    if (config.hidden_size % config.num_heads != 0) {
      keys.Fail(kInvalid, "num_attention_heads",
                Concat(config.num_heads, " does not divide hidden_size ", config.hidden_size,
                       ", and there is no head_dim"));
      return;
    }
    config.head_dim = config.hidden_size / config.num_heads;
  }
  if (keys.status().ok() &&
      std::find(kHeadDims.begin(), kHeadDims.end(), config.head_dim) == kHeadDims.end()) {
    keys.Fail(
        kUnimplemented, "head_dim",
        Concat(config.head_dim, " is not supported; winnow has ", absl::StrJoin(kHeadDims, ", ")));
  }
}

// The names of the families whose layers may have biases in the MLP.
std::string FamiliesWithMlpBias() {
  std::string names;
  for (const ModelFamily& family : ModelFamilies()) {
    if (family.mlp_bias != ModelFamily::Key::kHonoured) continue;
    names += Concat(names.empty() ? "" : ", ", family.name);
  }
  return names;
}

void ReadBiases(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  using Key = ModelFamily::Key;
  using OutBias = ModelFamily::OutBias;
  const bool all = !family.all_biases.empty() && keys.Bool(family.all_biases, false);
  const bool qkv_bias = keys.Bool(family.attention_bias_key, family.layer.qkv_bias);
  bool o_bias = family.out_bias == OutBias::kAttentionBias && qkv_bias;
  if (family.out_bias == OutBias::kOwnKey) o_bias = keys.Bool("attention_out_bias", false);
  const bool mlp_bias = keys.Bool("mlp_bias", false);
  if (qkv_bias && family.attention_bias == Key::kRefused) {
    keys.Fail(kUnimplemented, family.attention_bias_key, Concat(family.name, " models have none"));
  }
  if (mlp_bias && family.mlp_bias == Key::kRefused) {
    keys.Fail(kUnimplemented, "mlp_bias",
              Concat("only ", FamiliesWithMlpBias(), " models have biases in the MLP"));
  }
  if (all && family.experts != nullptr) {
    keys.Fail(kUnimplemented, family.all_biases, "true is not supported: experts have no biases");
  }
  for (LayerSpec& layer : config.layers) {
    if (family.attention_bias == Key::kHonoured) {
      layer.qkv_bias = qkv_bias;
      layer.o_bias = o_bias;
    }
    if (family.mlp_bias == Key::kHonoured) layer.mlp_bias = mlp_bias;
    if (all) layer.qkv_bias = layer.o_bias = layer.mlp_bias = true;
  }
}

// Types of layers.
constexpr std::string_view kFullType = "full_attention", kSlidingType = "sliding_attention";

// layer_types: which layers have a window. Absent, or false: the key is.
std::optional<std::vector<bool>> ReadLayerTypes(JsonKeys& keys, const ModelConfig& config) {
  constexpr std::string_view kKey = "layer_types";
  const Json* const types = keys.Find(kKey);
  if (types == nullptr) return std::nullopt;
  if (!types->is_array() || types->size() != config.layers.size()) {
    keys.Fail(kInvalid, kKey,
              Concat("must be a list of ", config.num_layers(), " names, is ", ShortDump(*types)));
    return std::nullopt;
  }
  std::vector<bool> slide;
  for (const Json& type : *types) {
    if (type != kFullType && type != kSlidingType) {
      keys.Fail(kUnimplemented, kKey,
                Concat(ShortDump(type), " is not supported; winnow has \"", kFullType, "\" and \"",
                       kSlidingType, "\""));
      return std::nullopt;
    }
    slide.push_back(type == kSlidingType);
  }
  return slide;
}

// Windows of layers, as the header says. REQUIRES: LayerSpec::rope is known.
void ReadWindows(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  using Layers = ModelFamily::Windows::Layers;
  constexpr std::string_view kKey = "sliding_window";
  const ModelFamily::Windows& of = family.windows;
  const std::optional<std::vector<bool>> types = ReadLayerTypes(keys, config);
  const bool any_slides =
      types.has_value() && std::find(types->begin(), types->end(), true) != types->end();
  if (any_slides && (of.layers == Layers::kNone || of.layers == Layers::kAll)) {
    keys.Fail(kUnimplemented, "layer_types",
              Concat("\"sliding_attention\" is not supported in ", family.name, " models"));
    return;
  }
  const bool on = !of.has_switch || keys.Bool("use_sliding_window", false);
  int64_t but = of.but;
  if (types.has_value()) {
    keys.Find(of.but_key);  // may say the same in letters: "LLLG"
  } else if (!of.but_key.empty()) {
    but = keys.Int(of.but_key, of.but, 1, kLayersMax);
  }
  const int64_t first = of.layers == Layers::kUpper
                            ? keys.Int("max_window_layers", of.upper_absent, 0, INT32_MAX)
                            : 0;
  const int64_t window = keys.IsNull(kKey) ? 0
                         : keys.Find(kKey) == nullptr
                             ? of.absent
                             : keys.Int(kKey, {}, of.has_switch ? 0 : 1, INT32_MAX);
  if (!keys.status().ok()) return;
  if (any_slides && (!on || window == 0)) {
    keys.Fail(kInvalid, "layer_types",
              Concat("has \"sliding_attention\", and there is no ", kKey,
                     of.has_switch ? ", or use_sliding_window is not true" : ""));
    return;
  }
  const bool bites = on && window > 0 && window < config.max_position_embeddings;
  if (bites && of.layers == Layers::kNone) {
    keys.Fail(kUnimplemented, kKey,
              Concat(window, ": ", family.name,
                     " models have no windows; it must be null or at least "
                     "max_position_embeddings (",
                     config.max_position_embeddings, ")"));
    return;
  }
  for (int32_t i = 0; i < config.num_layers(); ++i) {
    LayerSpec& layer = config.layers[i];
    const bool slides = types.has_value()                 ? (*types)[i]
                        : of.layers == Layers::kUpper     ? i >= first
                        : of.layers == Layers::kUnrotated ? layer.rope == LayerSpec::kNoRope
                        : of.layers == Layers::kAllBut    ? (i + 1) % but != 0
                                                          : true;
    if (slides && bites) layer.window = static_cast<int32_t>(window);
    if (slides && family.has_rope_by_type) layer.rope = 1;
    if (!slides && window > 0 && family.rotates_windows_only) layer.rope = LayerSpec::kNoRope;
  }
}

void RefuseWhatIsLacking(JsonKeys& keys, const ModelFamily& family) {
  for (const std::string_view key : {std::string_view("hidden_act"), family.activation_key}) {
    if (key.empty()) continue;
    const std::string activation = keys.String(key, family.activation);
    if (activation == family.activation || (family.activation == "silu" && activation == "swish")) {
      continue;
    }
    keys.Fail(kUnimplemented, key,
              Concat(ShortDump(activation), " is not supported; ", family.name, " models have \"",
                     family.activation, "\""));
  }
  keys.Ints("attn_type_list", 1, 1,
            kLayersMax);  // 1: MiniMax's name for attention, as against what is linear
  if (keys.Find("dual_chunk_attention_config") != nullptr) {
    keys.Fail(kUnimplemented, "dual_chunk_attention_config",
              "dual chunk attention is not supported; remove the key to attend exactly");
  }
}

// Finds the layers that do not rotate: those with a 0 in no_rope_layers, else each last one of no_rope_layer_interval.
void ReadLayersWithoutRope(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  if (family.no_rope_interval == 0) return;
  const int64_t interval =
      keys.Int("no_rope_layer_interval", family.no_rope_interval, 1, INT32_MAX);
  const bool listed = keys.Find("no_rope_layers") != nullptr;
  const std::vector<int64_t> rotates = keys.Ints("no_rope_layers", 0, 1, kLayersMax);
  if (!keys.status().ok()) return;
  if (listed && rotates.size() < config.layers.size()) {
    keys.Fail(kInvalid, "no_rope_layers",
              Concat("has ", rotates.size(), " values for ", config.layers.size(), " layers"));
    return;
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const bool has_rope = listed ? rotates[i] != 0 : (static_cast<int64_t>(i) + 1) % interval != 0;
    if (!has_rope) config.layers[i].rope = LayerSpec::kNoRope;
  }
}

// Reads whether heads of Q and K are normed, where a file says it.
void ReadQkNorm(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  constexpr std::string_view kKey = "use_qk_norm", kTypeKey = "qk_norm_type";
  if (family.has_qk_norm_key) {
    const bool norms = keys.Bool(kKey, false);
    for (LayerSpec& layer : config.layers) layer.qk_norm = norms;
  } else if (family.layer.qk_norm && !keys.Bool(kKey, true)) {
    keys.Fail(kUnimplemented, kKey, Concat("false is not supported in ", family.name, " models"));
  }
  if (!family.layer.qk_norm_whole) return;
  // As MiniMax's files call it.
  if (const std::string type = keys.String(kTypeKey, "per_layer"); type != "per_layer") {
    keys.Fail(kUnimplemented, kTypeKey,
              Concat(ShortDump(type), " is not supported; winnow has \"per_layer\""));
  }
}

// Layers that have one MLP in place of experts.
void ReadDenseLayers(JsonKeys& keys, const ExpertKeys& of, ModelConfig& config) {
  using DenseLayers = ExpertKeys::DenseLayers;
  int64_t first = 0, last = INT32_MAX, step = 1;
  std::vector<int64_t> dense;
  switch (of.dense) {
    case DenseLayers::kNone:
      return;
    case DenseLayers::kBySteps:
      step = keys.Int("decoder_sparse_step", 1, 1, INT32_MAX);
      dense = keys.Ints("mlp_only_layers", 0, INT32_MAX, kLayersMax);
      break;
    case DenseLayers::kFirst:
      first = keys.Int("first_k_dense_replace", of.first_dense_absent, 0, INT32_MAX);
      break;
    case DenseLayers::kOutside:
      first = keys.Int("moe_layer_start_index", of.first_dense_absent, 0, INT32_MAX);
      last = keys.Int("moe_layer_end_index", -1, -1, INT32_MAX);
      if (last == -1) last = INT32_MAX;
      step = keys.Int("moe_layer_interval", 1, 1, INT32_MAX);
      break;
  }
  if (!keys.status().ok()) return;
  for (int64_t i = 0; i < config.num_layers(); ++i) {
    if (i >= first && i <= last && (i + 1) % step == 0 &&
        std::find(dense.begin(), dense.end(), i) == dense.end()) {
      continue;
    }
    config.layers[i].mlp = LayerSpec::Mlp::kGatedSilu;
  }
  if (config.NumLayersOf(LayerSpec::Mlp::kExperts) == 0) config.experts = {};
}

// A number that must be there where `absent` is 0.
std::optional<int64_t> OrNone(int32_t absent) {
  return absent != 0 ? std::optional<int64_t>(absent) : std::nullopt;
}

// The number of experts, by a family's name or either of the usual ones.
int32_t ReadExpertCount(JsonKeys& keys, const ExpertKeys& of) {
  const std::optional<int64_t> absent = OrNone(of.count_absent);
  if (!of.count_key.empty()) {
    return static_cast<int32_t>(keys.Int(of.count_key, absent, 1, kExpertsMax));
  }
  const bool both =
      keys.Find("num_experts") != nullptr && keys.Find("num_local_experts") != nullptr;
  const char* const key =
      keys.Find("num_local_experts") != nullptr ? "num_local_experts" : "num_experts";
  const int64_t count = keys.Int(key, absent, 1, kExpertsMax);
  if (both && keys.Int("num_experts", {}, 1, kExpertsMax) != count) {
    keys.Fail(kInvalid, "num_experts", Concat("is not num_local_experts, ", count));
  }
  return static_cast<int32_t>(count);
}

// Reads how logits become experts and weights.
void ReadRouting(JsonKeys& keys, const ExpertKeys& of, ExpertsConfig& experts) {
  const bool sigmoid = of.scores == ExpertKeys::Scores::kSigmoid;
  experts.scores = of.scores;
  experts.corrected = of.corrects;
  experts.normalized = keys.Bool("norm_topk_prob", of.normalizes_absent) || of.normalizes;
  // dots.llm1's files call DeepSeek's method so.
  constexpr std::string_view kScoresKey = "scoring_func", kMethod = "noaux_tc";
  const std::string_view name = sigmoid ? "sigmoid" : "softmax";
  if (const std::string scores = keys.String(kScoresKey, name);
      scores != name && !(sigmoid && scores == kMethod)) {
    keys.Fail(kUnimplemented, kScoresKey,
              Concat(ShortDump(scores), " is not supported; it must be \"", name, "\""));
  }
  if (of.corrects && !keys.Bool("use_routing_bias", true)) {
    keys.Fail(kUnimplemented, "use_routing_bias", "false is not supported");
  }
  if (of.dense == ExpertKeys::DenseLayers::kOutside) {
    keys.Number("moe_norm_min", 1e-12, 0, 1e-6);  // a sum of scores that says nothing
  }
  if (!of.scales) return;
  experts.scale = keys.Number("routed_scaling_factor", 1.0, kMultiplierMin, kMultiplierMax);
  const int64_t groups = keys.Int("n_group", 1, 1, kExpertsMax);
  const int64_t chosen = keys.Int("topk_group", groups, 1, kExpertsMax);
  if (keys.status().ok() && chosen < groups) {
    keys.Fail(kUnimplemented, "topk_group",
              Concat(chosen, " of ", groups, " groups of experts is not supported"));
  }
  constexpr std::string_view kMethodKey = "topk_method";
  if (const std::string method = keys.String(kMethodKey, kMethod); method != kMethod) {
    keys.Fail(kUnimplemented, kMethodKey,
              Concat(ShortDump(method), " is not supported; it must be \"", kMethod, "\""));
  }
}

void ReadSharedExpert(JsonKeys& keys, const ExpertKeys& of, ExpertsConfig& experts) {
  int64_t size = 0;
  if (!of.shared_size_key.empty()) {
    size = keys.Int(of.shared_size_key, of.shared_absent, 0, kIntermediateMax);
  } else if (!of.shared_count_key.empty()) {
    size = experts.intermediate_size *
           (keys.IsNull(of.shared_count_key)
                ? 0
                : keys.Int(of.shared_count_key, of.shared_absent, 0, kExpertsMax));
    if (keys.status().ok() && size > kIntermediateMax) {
      keys.Fail(kInvalid, of.shared_count_key,
                Concat("together of ", size, ", more than ", kIntermediateMax));
    }
  }
  experts.shared_intermediate_size = static_cast<int32_t>(size);
  experts.shared_is_gated = size > 0 && of.gates_shared;
}

void ReadExperts(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  if (family.experts == nullptr) return;
  const ExpertKeys& of = *family.experts;
  ExpertsConfig& experts = config.experts;
  experts.count = ReadExpertCount(keys, of);
  experts.per_token = keys.Int(of.per_token_key, OrNone(of.per_token_absent), 1, kExpertsMax);
  experts.intermediate_size =
      of.has_own_size ? keys.Int("moe_intermediate_size", of.size_absent, 1, kIntermediateMax)
                      : config.intermediate_size;
  ReadRouting(keys, of, experts);
  ReadSharedExpert(keys, of, experts);
  if (of.clamps) {
    kernels::ClampedSwiglu& clamped = experts.clamped.emplace();
    const auto read = [&](std::string_view key, float absent) {
      return static_cast<float>(keys.Number(key, double{absent}, kMultiplierMin, kMultiplierMax));
    };
    clamped = {read("swiglu_alpha", clamped.alpha), read("swiglu_limit", clamped.limit)};
    // Says the same once more.
    constexpr std::string_view kOtherName = "experts_per_token";
    if (keys.Find(kOtherName) != nullptr &&
        keys.Int(kOtherName, {}, 1, kExpertsMax) != experts.per_token) {
      keys.Fail(kInvalid, kOtherName, Concat("is not num_experts_per_tok, ", experts.per_token));
    }
  }
  if (keys.status().ok() && experts.per_token > experts.count) {
    keys.Fail(kInvalid, of.per_token_key,
              Concat(experts.per_token, " of ", experts.count, " experts"));
  }
  ReadDenseLayers(keys, of, config);
}

void ReadMultipliers(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  if (!family.has_multipliers) return;
  const auto read = [&](std::string_view key) {
    return keys.Number(key, 1.0, kMultiplierMin, kMultiplierMax);
  };
  config.embedding_multiplier = read("embedding_multiplier");
  config.residual_multiplier = read("residual_multiplier");
  config.logits_scaling = read("logits_scaling");
  config.attention_multiplier = read("attention_multiplier");  // absent, it is 1 in the reference
}

void ReadGemmasFactors(JsonKeys& keys, const ModelFamily& family, ModelConfig& config) {
  if (!family.is_gemma) return;
  config.norms_add_one = true;
  config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden_size));
  config.attention_multiplier =
      1 / std::sqrt(keys.Number("query_pre_attn_scalar",
                                static_cast<double>(family.head_dim_absent), 1.0, 1e6));
}

void ReadDType(JsonKeys& keys, ModelConfig& config) {
  const std::string_view key = keys.Find("dtype") != nullptr ? "dtype" : "torch_dtype";
  const std::string name = keys.String(key, "float32");
  for (const kernels::DType dtype :
       {kernels::DType::kF32, kernels::DType::kF16, kernels::DType::kBF16}) {
    if (name == kernels::DTypeName(dtype)) {
      config.dtype = dtype;
      return;
    }
  }
  keys.Fail(
      kUnimplemented, key,
      Concat(ShortDump(name), " is not supported; winnow reads bfloat16, float16 and float32"));
}

// The keys that the reference knows in rope_scaling / rope_parameters. Those of another kind than
// the one in use are ignored there, and here.
constexpr std::array<std::string_view, 16> kRopeKeys = {
    "rope_type",        "type",
    "rope_theta",       "partial_rotary_factor",
    "factor",           "original_max_position_embeddings",
    "attention_factor", "beta_fast",
    "beta_slow",        "short_factor",
    "long_factor",      "low_freq_factor",
    "high_freq_factor", "mscale",
    "mscale_all_dim",   "truncate"};

// Keys of families with positions of images.
constexpr std::string_view kImagePositionKeys[] = {"mrope_section", "mrope_interleaved"};

// Keys of families that scale queries. The second says nothing: the reference fills the object up with it.
constexpr std::string_view kQueryScalingKey = "llama_4_scaling_beta",
                           kFilledUpKey = "max_position_embeddings";

// The part of each head that rotates. `absent`: the share where the key is not there.
double ReadPartialRotary(JsonKeys& keys, const ModelFamily& family, double absent,
                         ModelConfig& config) {
  const double share = keys.Number("partial_rotary_factor", absent, 0.0, 1.0);
  if (!keys.status().ok() || share == 1.0) {
    config.rotary_dim = 0;
    return share;
  }
  if (!family.rotates_in_part) {
    keys.Fail(kUnimplemented, "partial_rotary_factor",
              "only 1 is supported: heads are rotated whole");
    return 1.0;
  }
  config.rotary_dim =
      static_cast<int32_t>(config.head_dim * share);  // cut off, as in the reference
  if (config.rotary_dim < 2 || config.rotary_dim % 2 != 0) {
    keys.Fail(kInvalid, "partial_rotary_factor",
              Concat(share, " of ", config.head_dim, " is ", config.rotary_dim,
                     ", which is not a positive number of pairs"));
  }
  return share;
}

void ReadLongRope(JsonKeys& keys, const ModelConfig& config, RopeScaling& scaling) {
  scaling.kind = RopeScaling::Kind::kLongRope;
  scaling.attention_factor = keys.OptionalNumber("attention_factor", 1e-6, kRopeFactorMax);
  for (const auto& [key, to] : {std::pair("short_factor", &scaling.short_factors),
                                std::pair("long_factor", &scaling.long_factors)}) {
    const std::vector<double> factors =
        keys.Numbers(key, 1e-6, kRopeFactorMax, static_cast<size_t>(config.RotaryDim() / 2));
    to->assign(factors.begin(), factors.end());
  }
}

void ReadRopeScaling(JsonKeys& keys, const ModelFamily& family, double original_positions,
                     const ModelConfig& config, RopeScaling& scaling) {
  std::string kind = keys.String("rope_type", keys.String("type", "default"));
  if (family.has_only_longrope) {
    if (kind == "su" || kind == "yarn") kind = "longrope";
    if (kind != "default" && kind != "longrope") {
      keys.Fail(kUnimplemented, keys.Find("rope_type") != nullptr ? "rope_type" : "type",
                Concat(ShortDump(kind), " is not supported; ", family.name,
                       " models have default and longrope"));
      return;
    }
  }
  constexpr double kFactorMax = kRopeFactorMax;
  if (kind == "default") {
    scaling.kind = RopeScaling::Kind::kNone;
  } else if (kind == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
    scaling.factor = keys.Number("factor", {}, 1.0, kFactorMax);
  } else if (kind == "llama3") {
    scaling.kind = RopeScaling::Kind::kLlama3;
    scaling.factor = keys.Number("factor", {}, 1.0, kFactorMax);
    scaling.low_freq_factor = keys.Number("low_freq_factor", {}, 1e-6, kFactorMax);
    scaling.high_freq_factor = keys.Number("high_freq_factor", {}, 1e-6, kFactorMax);
    if (keys.status().ok() && scaling.high_freq_factor <= scaling.low_freq_factor) {
      keys.Fail(kInvalid, "high_freq_factor",
                Concat(scaling.high_freq_factor, " must be above low_freq_factor ",
                       scaling.low_freq_factor));
    }
  } else if (kind == "yarn") {
    scaling.kind = RopeScaling::Kind::kYarn;
    scaling.attention_factor = keys.OptionalNumber("attention_factor", 1e-6, kFactorMax);
    scaling.mscale = keys.OptionalNumber("mscale", 0.0, kFactorMax);
    scaling.mscale_all_dim = keys.OptionalNumber("mscale_all_dim", 0.0, kFactorMax);
    scaling.beta_fast = keys.Number("beta_fast", 32.0, 0.0, kFactorMax);
    scaling.beta_slow = keys.Number("beta_slow", 1.0, 0.0, kFactorMax);
    scaling.truncate = keys.Bool("truncate", true);
  } else if (kind == "longrope") {
    ReadLongRope(keys, config, scaling);
  } else {
    keys.Fail(kUnimplemented, keys.Find("rope_type") != nullptr ? "rope_type" : "type",
              Concat(ShortDump(kind),
                     " is not supported; winnow has default, linear, llama3, yarn, longrope"));
  }
  if (scaling.kind == RopeScaling::Kind::kNone || scaling.kind == RopeScaling::Kind::kLinear)
    return;
  scaling.original_max_position_embeddings =
      original_positions != 0 ? original_positions
                              : keys.Number("original_max_position_embeddings",
                                            config.max_position_embeddings, 1.0, kPositionsMax);
  if (scaling.kind == RopeScaling::Kind::kLongRope && keys.status().ok() &&
      scaling.original_max_position_embeddings < 2) {
    keys.Fail(kInvalid, "original_max_position_embeddings", "must be at least 2 for longrope");
  }
  if (scaling.kind != RopeScaling::Kind::kLlama3 && keys.status().ok()) {
    // A null factor means the ratio of the lengths. LongRoPE's only decides attention_factor, and may be below 1.
    const bool is_yarn = scaling.kind == RopeScaling::Kind::kYarn;
    scaling.factor = keys.Number(
        "factor", config.max_position_embeddings / scaling.original_max_position_embeddings,
        is_yarn ? 1.0 : 1e-6, is_yarn ? kFactorMax : kPositionsMax);
  }
}

void ReadQueryScaling(JsonKeys& keys, const ModelFamily& family, QueryScaling& scaling) {
  if (!family.scales_queries) return;
  scaling.beta = keys.Number(kQueryScalingKey, {}, 0.0, kRopeFactorMax);
  scaling.length = keys.Number("original_max_position_embeddings", {}, 1.0, kPositionsMax);
}

// One object of rope_scaling or rope_parameters, which says how a set rotates.
void ReadRopeSet(const Json& object, std::string_view key, std::string_view name,
                 const ModelFamily& family, double rotary_share, double original_positions,
                 JsonKeys& keys, ModelConfig& config, RopeSet& to) {
  if (!object.is_object()) {
    keys.Fail(kInvalid, key, Concat("must be an object, is ", ShortDump(object)));
    return;
  }
  JsonKeys rope_keys(object, name, Concat(key, "."));
  for (const auto& [rope_key, value] : object.items()) {
    if (std::find(kRopeKeys.begin(), kRopeKeys.end(), rope_key) != kRopeKeys.end()) continue;
    if (family.scales_queries && (rope_key == kQueryScalingKey || rope_key == kFilledUpKey))
      continue;
    if (family.has_image_positions &&
        std::find(std::begin(kImagePositionKeys), std::end(kImagePositionKeys), rope_key) !=
            std::end(kImagePositionKeys))
      continue;
    rope_keys.Fail(kUnimplemented, ShortDump(rope_key), "winnow does not know this key");
  }
  to.theta = rope_keys.Number("rope_theta", to.theta, kRopeThetaMin, kRopeThetaMax);
  ReadPartialRotary(rope_keys, family, rotary_share, config);
  if (rope_keys.status().ok()) {
    ReadRopeScaling(rope_keys, family, original_positions, config, to.scaling);
  }
  if (rope_keys.status().ok()) ReadQueryScaling(rope_keys, family, to.query_scaling);
  if (!rope_keys.status().ok()) keys.Adopt(rope_keys.status());
}

void ReadRope(JsonKeys& keys, const Json& json, const ModelFamily& family, std::string_view name,
              ModelConfig& config) {
  config.ropes[0].theta =
      keys.Number("rope_theta", family.rope_theta_absent, kRopeThetaMin, kRopeThetaMax);
  if (family.has_rope_by_type) config.ropes.assign(2, config.ropes[0]);
  if (!family.sliding_theta_key.empty()) {
    config.ropes[1].theta = keys.Number(family.sliding_theta_key, family.sliding_theta_absent,
                                        kRopeThetaMin, kRopeThetaMax);
  }
  // MiniMax's files count values of a head.
  constexpr std::string_view kRotaryDim = "rotary_dim";
  double share_absent = family.rotary_share_absent;
  if (family.rotates_in_part && keys.Find(kRotaryDim) != nullptr) {
    share_absent =
        static_cast<double>(keys.Int(kRotaryDim, {}, 2, config.head_dim)) / config.head_dim;
  }
  const double rotary_share = ReadPartialRotary(keys, family, share_absent, config);
  // transformers 5 moved the length to the top for some models and prefers it there.
  const double original_positions =
      keys.OptionalNumber("original_max_position_embeddings", 1.0, kPositionsMax)
          .value_or(static_cast<double>(family.original_positions_absent));
  // Both may be there in a file made for both versions: the older key wins in the reference.
  const auto given = [&keys](std::string_view key) {
    const Json* object = keys.Find(key);
    return object != nullptr && !object->empty();
  };
  const std::string_view key = given("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (!keys.status().ok() || (!given(key) && family.rope_absent.empty())) return;
  const Json object = given(key) ? json[std::string(key)] : Json::parse(family.rope_absent);
  const auto read = [&](const Json& of_set, std::string_view of_key, RopeSet& to) {
    ReadRopeSet(of_set, of_key, name, family, rotary_share, original_positions, keys, config, to);
  };
  const bool by_type = family.has_rope_by_type && object.is_object() &&
                       (object.contains(kFullType) || object.contains(kSlidingType));
  if (!by_type) return read(object, key, config.ropes[0]);
  for (const auto& [type, of_type] : object.items()) {
    if (type != kFullType && type != kSlidingType) {
      keys.Fail(kUnimplemented, key, Concat(ShortDump(type), ": winnow does not know this type"));
      return;
    }
    read(of_type, Concat(key, ".", type), config.ropes[type == kFullType ? 0 : 1]);
  }
}

void ReadTokens(JsonKeys& keys, ModelConfig& config) {
  for (const int64_t id : keys.Ints("eos_token_id", 0, config.vocab_size - 1, kEosTokensMax)) {
    config.eos_token_ids.push_back(static_cast<int32_t>(id));
  }
  std::sort(config.eos_token_ids.begin(), config.eos_token_ids.end());
  config.eos_token_ids.erase(std::unique(config.eos_token_ids.begin(), config.eos_token_ids.end()),
                             config.eos_token_ids.end());
  const std::vector<int64_t> bos = keys.Ints("bos_token_id", 0, config.vocab_size - 1, 1);
  if (!bos.empty()) config.bos_token_id = static_cast<int32_t>(bos[0]);
}

// The first by name of the GGUF files in a directory; "" if there is none.
std::string FirstGgufFile(const std::string& directory) {
  std::string first;
  std::error_code error;
  for (std::filesystem::directory_iterator at(directory, error), end; !error && at != end;
       at.increment(error)) {
    const std::string path = at->path().string();
    if (path.ends_with(".gguf") && (first.empty() || path < first)) first = path;
  }
  return first;
}

// Keys of these families' files that do not change what a forward pass computes: of training, of
// generation, of the classes that transformers loads, and what its older versions wrote of every
// model. pretraining_tp only cuts products into parts.
constexpr std::array<std::string_view, 94> kHarmlessKeys = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "_sliding_window_pattern",
    "add_cross_attention",
    "attention_dropout",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initial_context_length",  // rope_scaling has it, too
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_window_layers",
    "min_length",
    "mlp_intermediate_size",
    "model_max_length",
    "moe_capacity",
    "moe_gate",
    "moe_use_aux_free",
    "mtp_transformer_layers",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "return_dict_in_generate",
    "rope_parameters",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "seq_length",
    "shared_moe_mode",
    "sliding_window",  // ReadWindows asks where it counts
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention_2",
    "use_flash_attn",
    "use_mtp",
    "use_sliding_window",
};

// Keys by which relatives of these families compute something else, and the value with which they do
// not; none: every value that is set changes something.
struct ChangingKey {
  std::string_view key;
  std::optional<double> neutral;
};
constexpr std::array<ChangingKey, 46> kChangingKeys = {{
    {"alibi", {}},
    {"attention_chunk_size", {}},
    {"attention_multiplier", {}},
    {"attention_out_bias", {}},
    {"attn_logit_softcapping", {}},
    {"block_configs", {}},
    {"clip_qkv", {}},
    {"dim_model_base", {}},
    {"embedding_multiplier", 1.0},
    {"experts_per_token", 0.0},
    {"final_logit_softcapping", {}},
    {"full_attn_mod", 1.0},
    {"interpolate_factor", 1.0},
    {"kv_lora_rank", {}},
    {"layernorm_full_attention_beta", 1.0},
    {"layernorm_linear_attention_beta", 1.0},
    {"layernorm_mlp_beta", 1.0},
    {"lm_head_bias", {}},
    {"logit_scale", 1.0},
    {"logits_scaling", 1.0},
    {"moe_intermediate_size", {}},
    {"n_routed_experts", 0.0},
    {"n_shared_experts", 0.0},
    {"no_rope_layer_interval", {}},
    {"no_rope_layers", {}},
    {"num_experts", 0.0},
    {"num_experts_per_tok", 0.0},
    {"num_local_experts", 0.0},
    {"parallel_attn", {}},
    {"q_lora_rank", {}},
    {"qk_layernorm", {}},
    {"qk_norm", {}},
    {"query_pre_attn_scalar", {}},
    {"residual_multiplier", 1.0},
    {"rotary_pct", 1.0},
    {"scale_depth", {}},
    {"scale_emb", 1.0},
    {"shared_intermediate_size", 0.0},
    {"sliding_window_pattern", {}},
    {"swiglu_alpha", {}},
    {"swiglu_limit", {}},
    {"use_alibi", {}},
    {"use_bidirectional_attention", {}},
    {"use_mup", {}},
    {"use_parallel_residual", {}},
    {"use_qk_norm", {}},
}};

// A value that switches nothing on.
bool IsOff(const Json& value) {
  return value.is_null() || value == false || value == "" ||
         ((value.is_array() || value.is_object()) && value.empty());
}

// What nobody has read. REQUIRES: everything that is read has been.
void SortOutUnreadKeys(JsonKeys& keys, const Json& json, ModelConfig& config) {
  for (const std::string& key : keys.UnaskedKeys()) {
    const Json& value = json[key];
    if (IsOff(value)) continue;
    const auto* changing = std::find_if(kChangingKeys.begin(), kChangingKeys.end(),
                                        [&key](const ChangingKey& c) { return c.key == key; });
    if (changing != kChangingKeys.end()) {
      if (changing->neutral && value.is_number() && value.get<double>() == *changing->neutral) {
        continue;
      }
      keys.Fail(kUnimplemented, key,
                Concat(ShortDump(value), " is not supported: no ", config.architecture,
                       " of winnow's computes with it"));
      return;
    }
    if (std::find(kHarmlessKeys.begin(), kHarmlessKeys.end(), key) == kHarmlessKeys.end()) {
      config.unknown_keys.push_back(key);
    }
  }
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json,
                                             std::string_view config_name,
                                             std::string_view generation_json,
                                             std::string_view generation_name) {
  WINNOW_ASSIGN_OR_RETURN(const Json whole, ParseJsonObject(config_json, config_name));
  JsonKeys whole_keys(whole, config_name);
  const Json* const text = FindTextPart(whole_keys);
  WINNOW_RETURN_IF_ERROR(whole_keys.status());
  const Json& json = text != nullptr ? *text : whole;
  JsonKeys keys(json, config_name, text != nullptr ? Concat(kTextConfig, ".") : "");
  // The whole's, where both have the key.
  const auto keys_with = [&](std::string_view key) -> JsonKeys& {
    const bool of_part = keys.Find(key) != nullptr;
    return text != nullptr && (whole_keys.Find(key) != nullptr || !of_part) ? whole_keys : keys;
  };
  ModelConfig config;
  config.is_text_part = text != nullptr;
  const ModelFamily* const family = FindFamily(keys);
  if (family == nullptr) return keys.status();
  config.family = family->family;
  config.architecture = family->architecture;
  ReadShape(keys, *family, config);
  WINNOW_RETURN_IF_ERROR(keys.status());
  ReadBiases(keys, *family, config);
  ReadDType(keys_with(whole_keys.Find("dtype") != nullptr || keys.Find("dtype") != nullptr
                          ? "dtype"
                          : "torch_dtype"),
            config);
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    if (const auto scheme = ReadWeightScheme(keys_with(key), key)) config.weight_scheme = scheme;
  }
  // Types are mixed then, as in a GGUF file, and products of blocks need a type that every value fits.
  if (config.weight_scheme.has_value()) config.dtype = kernels::DType::kBF16;
  RefuseWhatIsLacking(keys, *family);
  ReadLayersWithoutRope(keys, *family, config);
  ReadWindows(keys, *family, config);
  ReadQkNorm(keys, *family, config);
  ReadExperts(keys, *family, config);
  if (family->has_prediction_layers) {
    config.prediction_layers = keys.Int("num_nextn_predict_layers", 0, 0, kLayersMax);
  }
  ReadMultipliers(keys, *family, config);
  ReadGemmasFactors(keys, *family, config);
  ReadRope(keys, json, *family, config_name, config);
  // The part's counts first: wholes are written with a default that says nothing.
  constexpr std::string_view kTied = "tie_word_embeddings";
  config.tie_word_embeddings = keys.Bool(
      kTied, text != nullptr ? whole_keys.Bool(kTied, family->tied_absent) : family->tied_absent);
  ReadTokens(keys, config);
  if (text != nullptr) ReadTokens(whole_keys, config);
  SortOutUnreadKeys(keys, json, config);
  WINNOW_RETURN_IF_ERROR(keys.status());
  if (text != nullptr) {
    SortOutUnreadKeys(whole_keys, whole, config);
    std::sort(config.unknown_keys.begin(), config.unknown_keys.end());
  }
  WINNOW_RETURN_IF_ERROR(whole_keys.status());

  if (!generation_json.empty()) {
    WINNOW_ASSIGN_OR_RETURN(const Json generation,
                            ParseJsonObject(generation_json, generation_name));
    JsonKeys generation_keys(generation, generation_name);
    ReadTokens(generation_keys, config);
    WINNOW_RETURN_IF_ERROR(generation_keys.status());
  }
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_path) {
  if (IsGgufPath(model_path)) {
    WINNOW_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(model_path));
    return GgufModelConfig(file->contents(), model_path);
  }
  const std::string config_path = Concat(model_path, "/config.json");
  const std::string generation_path = Concat(model_path, "/generation_config.json");
  const absl::StatusOr<std::string> config_json = ReadSmallFile(config_path, kConfigBytesMax);
  if (absl::IsNotFound(config_json.status())) {
    if (const std::string gguf = FirstGgufFile(model_path); !gguf.empty()) {
      return absl::NotFoundError(
          Concat(config_json.status().message(), " (to load ", gguf, ", name the file)"));
    }
  }
  WINNOW_RETURN_IF_ERROR(config_json.status());
  absl::StatusOr<std::string> generation_json = ReadSmallFile(generation_path, kConfigBytesMax);
  if (!generation_json.ok() && !absl::IsNotFound(generation_json.status()))
    return generation_json.status();
  if (generation_json.ok() && generation_json->empty()) {
    return absl::InvalidArgumentError(Concat(generation_path, ": empty"));
  }
  return ParseModelConfig(*config_json, config_path, generation_json.ok() ? *generation_json : "",
                          generation_path);
}

ModelConfig WithServedContext(ModelConfig config, int32_t context) {
  // A window that no query reaches the end of is none.
  for (LayerSpec& layer : config.layers) {
    if (layer.window >= context) layer.window = 0;
  }
  for (RopeSet& rope : config.ropes) {
    if (rope.scaling.kind == RopeScaling::Kind::kLongRope && rope.scaling.served_context == 0) {
      rope.scaling.served_context = context;
    }
  }
  return config;
}

RopeParameters ComputeRope(const ModelConfig& config, int32_t set) {
  RopeParameters rope;
  if (set != LayerSpec::kNoRope) {
    RopeScaling scaling = config.ropes[set].scaling;
    if (scaling.served_context == 0) scaling.served_context = config.max_position_embeddings;
    rope = ComputeRope(config.RotaryDim(), config.ropes[set].theta, scaling);
  }
  rope.inv_freq.resize(config.head_dim / 2, 0.0f);
  return rope;
}

}  // namespace winnow::engine

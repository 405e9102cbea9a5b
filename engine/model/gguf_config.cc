#include "engine/model/gguf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "absl/strings/str_join.h"
#include "engine/base/concat.h"
#include "engine/base/json_file.h"
#include "engine/base/status_macros.h"
#include "engine/model/gguf_keys.h"
#include "engine/model/model_family.h"
#include "engine/model/model_limits.h"
#include "kernels/host_matrix.h"

namespace winnow::engine {
namespace {

using kernels::DType;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;

constexpr std::string_view kWindowKey = "attention.sliding_window",
                           kWindowPatternKey = "attention.sliding_window_pattern";

// Keys of an architecture that are read below, or that say nothing about what is computed.
constexpr std::string_view kKnownKeys[] = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "tensor_data_layout",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "attention.scale",
    kWindowKey,
    kWindowPatternKey,
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
};

// Those of Granite's.
constexpr std::string_view kMultiplierKeys[] = {"embedding_scale", "residual_scale", "logit_scale"};

// Keys of families that scale queries.
constexpr std::string_view kQueryScalingKeys[] = {"attention.temperature_scale",
                                                  "attention.temperature_length",
                                                  "rope.scaling.yarn_log_multiplier"};

// Keys of families whose tokens may be an image's, which have three positions and enter several layers.
constexpr std::string_view kImageKeys[] = {"rope.dimension_sections", "n_deepstack_layers"};

// Keys of families with experts, of some with a shared one, and of some whose layers do not all have experts.
constexpr std::string_view kExpertKeys[] = {
    "expert_count",        "expert_used_count",       "expert_feed_forward_length",
    "expert_weights_norm", "expert_weights_scale",    "expert_gating_func",
    "expert_group_count",  "expert_group_used_count",
};
constexpr std::string_view kSharedExpertKeys[] = {"expert_shared_count",
                                                  "expert_shared_feed_forward_length"};
constexpr std::string_view kDenseLayersKey = "leading_dense_block_count",
                           kExpertStepKey = "interleave_moe_layer_step";

constexpr std::string_view kPredictionLayersKey = "nextn_predict_layers";

// Texts of the control tokens that end a turn, or all of a text, in the families that winnow runs.
constexpr std::string_view kEndTokens[] = {
    "<|im_end|>", "<|eot_id|>",    "<|eom_id|>",      "<|end_of_text|>", "<|endoftext|>",
    "<|end|>",    "<end_of_turn>", "<|end_of_turn|>", "<|return|>",      "<|call|>"};
// Ends a message there, and not the turn, where the vocabulary has the second one: a turn of OpenAI's Harmony format has
// several messages.
constexpr std::string_view kEndOfMessage = "<|end|>", kCall = "<|call|>";

constexpr std::string_view kRopeFactors = "rope_freqs.weight";
constexpr std::string_view kShortFactors = "rope_factors_short.weight";
constexpr std::string_view kLongFactors = "rope_factors_long.weight";

// The file's keys, and those of its architecture without its name in front.
class ArchitectureKeys {
 public:
  ArchitectureKeys(GgufKeys& keys, std::string_view architecture)
      : keys_(keys), prefix_(Concat(architecture, ".")) {}
  std::string operator()(std::string_view key) const { return Concat(prefix_, key); }
  GgufKeys& keys() const { return keys_; }
  std::string_view prefix() const { return prefix_; }

 private:
  GgufKeys& keys_;
  std::string prefix_;
};

// Says whether the first layers of a family may be dense. Files have no key for those by steps.
bool HasDenseLayers(const ExpertKeys& experts) {
  return experts.dense == ExpertKeys::DenseLayers::kFirst ||
         experts.dense == ExpertKeys::DenseLayers::kOutside;
}

const ModelFamily* FindFamilyInGguf(GgufKeys& keys) {
  const std::string type = keys.String("general.type", "model");
  if (type != "model") {
    keys.Fail(kUnimplemented, "general.type",
              Concat(ShortDump(type), " is not supported; winnow reads \"model\""));
  }
  if (keys.Int("split.count", 1, 0, UINT16_MAX) > 1) {
    keys.Fail(kUnimplemented, "split.count",
              "the file is one of several, which is not supported; merge them into one");
  }
  const std::string name = keys.String("general.architecture", {});
  if (!keys.status().ok()) return nullptr;
  const auto has = [&](std::string_view key) {
    return keys.Int(Concat(name, ".", key), 0, 0, INT32_MAX) > 0;
  };
  const bool has_experts = has("expert_count"), has_window = has(kWindowKey);
  std::vector<std::string> names;
  const ModelFamily* found = nullptr;
  for (const ModelFamily& family : ModelFamilies()) {
    if (family.gguf_name.empty()) continue;
    const bool windows = family.windows.layers != ModelFamily::Windows::Layers::kNone;
    const bool is_meant =
        (family.experts != nullptr) == has_experts && (has_experts || (has_window && windows));
    if (family.gguf_name == name && (found == nullptr || is_meant)) found = &family;
    if (std::find(names.begin(), names.end(), family.gguf_name) == names.end()) {
      names.emplace_back(family.gguf_name);
    }
  }
  if (!keys.status().ok()) return nullptr;
  if (found != nullptr) return found;
  keys.Fail(kUnimplemented, "general.architecture",
            Concat(ShortDump(name), " is not supported; winnow runs ", absl::StrJoin(names, ", ")));
  return nullptr;
}

void ReadShape(const ArchitectureKeys& of, const ModelFamily& family, ModelConfig& config) {
  GgufKeys& keys = of.keys();
  config.hidden_size = keys.Int(of("embedding_length"), {}, 1, kHiddenMax);
  config.layers.assign(keys.Int(of("block_count"), {}, 1, kLayersMax), family.layer);
  if (family.has_prediction_layers) {
    // They are counted with the others.
    config.prediction_layers = keys.Int(of(kPredictionLayersKey), 0, 0, config.num_layers() - 1);
    config.layers.resize(config.layers.size() - config.prediction_layers);
  }
  config.intermediate_size = keys.IntOfLayers(of("feed_forward_length"), {}, 1, kIntermediateMax);
  config.num_heads = keys.IntOfLayers(of("attention.head_count"), {}, 1, kHeadsMax);
  config.num_kv_heads =
      keys.IntOfLayers(of("attention.head_count_kv"), config.num_heads, 1, kHeadsMax);
  config.max_position_embeddings = keys.Int(of("context_length"), {}, 1, kPositionsMax);
  config.rms_norm_eps =
      static_cast<float>(keys.Number(of("attention.layer_norm_rms_epsilon"), {}, 0.0, 1.0));
  if (!keys.status().ok()) return;
  if (config.num_heads % config.num_kv_heads != 0) {
    keys.Fail(kInvalid, of("attention.head_count_kv"),
              Concat(config.num_kv_heads, " does not divide ", of("attention.head_count"), " ",
                     config.num_heads));
  }
  const std::optional<int64_t> key_length =
      keys.OptionalInt(of("attention.key_length"), 1, 1 << 16);
  if (!key_length && config.hidden_size % config.num_heads != 0) {
    keys.Fail(kInvalid, of("attention.head_count"),
              Concat(config.num_heads, " does not divide ", of("embedding_length"), " ",
                     config.hidden_size, ", and there is no ", of("attention.key_length")));
    return;
  }
  config.head_dim = key_length.value_or(config.hidden_size / config.num_heads);
  for (const std::string_view key : {"attention.value_length", "rope.dimension_count"}) {
    const int64_t dim = keys.Int(of(key), config.head_dim, 0, 1 << 16);
    if (!keys.status().ok() || dim == config.head_dim) continue;
    if (family.rotates_in_part && key == "rope.dimension_count" && dim >= 2 && dim % 2 == 0 &&
        dim < config.head_dim) {
      config.rotary_dim = static_cast<int32_t>(dim);
      continue;
    }
    keys.Fail(kUnimplemented, of(key),
              Concat(dim, " is not supported: it must be the head dimension, ", config.head_dim));
  }
  if (keys.status().ok() &&
      std::find(kHeadDims.begin(), kHeadDims.end(), config.head_dim) == kHeadDims.end()) {
    keys.Fail(kUnimplemented, of(key_length ? "attention.key_length" : "attention.head_count"),
              Concat("a head dimension of ", config.head_dim, " is not supported; winnow has ",
                     absl::StrJoin(kHeadDims, ", ")));
  }
}

// Reads what scores are, which a family's files all have alike.
void ReadGating(const ArchitectureKeys& of, const ExpertKeys& family, ExpertsConfig& experts) {
  constexpr std::string_view kKey = "expert_gating_func";
  experts.scores = family.scores;
  const int64_t gating = of.keys().Int(of(kKey), 0, 0, INT32_MAX);
  if (gating == 0) return;
  if (family.scores == ExpertKeys::Scores::kSigmoid) {
    if (gating == 2) return;
    of.keys().Fail(kUnimplemented, of(kKey),
                   Concat(gating, " is not supported; it must be 2, the sigmoid"));
    return;
  }
  if (gating == 3) experts.normalized = true;
  if (gating != 1 && gating != 3) {
    of.keys().Fail(kUnimplemented, of(kKey),
                   Concat(gating,
                          " is not supported; it must be 1, the softmax of all, or 3, the "
                          "softmax of those chosen"));
  }
}

// Layers that have one MLP in place of experts: the first ones, and all but each last one of a step.
void ReadDenseLayers(const ArchitectureKeys& of, const ModelFamily& family, ModelConfig& config) {
  if (!HasDenseLayers(*family.experts)) return;
  const int64_t first = of.keys().Int(of(kDenseLayersKey), 0, 0, INT32_MAX);
  const int64_t step = of.keys().Int(of(kExpertStepKey), 1, 1, INT32_MAX);
  for (int64_t i = 0; i < config.num_layers(); ++i) {
    if (i < first || (i + 1) % step != 0) config.layers[i].mlp = LayerSpec::Mlp::kGatedSilu;
  }
  if (config.NumLayersOf(LayerSpec::Mlp::kExperts) == 0) config.experts = {};
}

void ReadExperts(const ArchitectureKeys& of, const ModelFamily& family, ModelConfig& config) {
  if (family.experts == nullptr) return;
  GgufKeys& keys = of.keys();
  ExpertsConfig& experts = config.experts;
  experts.count = keys.Int(of("expert_count"), {}, 1, kExpertsMax);
  experts.per_token = keys.Int(of("expert_used_count"), {}, 1, kExpertsMax);
  if (keys.status().ok() && experts.per_token > experts.count) {
    keys.Fail(kInvalid, of("expert_used_count"),
              Concat(experts.per_token, " of ", experts.count, " experts"));
  }
  // Where experts are all that there is of an MLP its own key is theirs.
  std::optional<int64_t> absent;
  if (!family.experts->has_own_size) absent = config.intermediate_size;
  experts.intermediate_size =
      keys.Int(of("expert_feed_forward_length"), absent, 1, kIntermediateMax);
  // llama.cpp does the same for all files of an architecture, and writes no key for it.
  experts.normalized =
      keys.OptionalBool(of("expert_weights_norm")).value_or(family.experts->normalizes_in_gguf);
  if (family.experts->clamps) experts.clamped.emplace();  // files have no keys for it
  const double scale = keys.Number(of("expert_weights_scale"), 1.0, -1e9, 1e9);
  if (family.experts->scales && scale >= kMultiplierMin && scale <= kMultiplierMax) {
    experts.scale = scale;
  } else if (scale != 0 && scale != 1) {
    keys.Fail(kUnimplemented, of("expert_weights_scale"),
              Concat(scale, " is not supported; it must be 1"));
  }
  ReadGating(of, *family.experts, experts);
  const int64_t groups = keys.Int(of("expert_group_count"), 0, 0, kExpertsMax);
  const int64_t chosen = keys.Int(of("expert_group_used_count"), groups, 0, kExpertsMax);
  if (groups > 1 && chosen < groups) {
    keys.Fail(kUnimplemented, of("expert_group_used_count"),
              Concat(chosen, " of ", groups, " groups of experts is not supported"));
  }
  if (family.experts->HasShared()) {
    int64_t size = keys.Int(of("expert_shared_feed_forward_length"), 0, 0, kIntermediateMax);
    const int64_t count = keys.Int(of("expert_shared_count"), 0, 0, kExpertsMax);
    if (size == 0) size = std::min<int64_t>(count * experts.intermediate_size, kIntermediateMax);
    experts.shared_intermediate_size = static_cast<int32_t>(size);
    experts.shared_is_gated = size > 0 && family.experts->gates_shared;
  }
  ReadDenseLayers(of, family, config);
}

bool Contains(std::span<const std::string_view> keys, std::string_view key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

bool IsExpertKey(const ExpertKeys& experts, std::string_view key) {
  return Contains(kExpertKeys, key) || (experts.HasShared() && Contains(kSharedExpertKeys, key)) ||
         (HasDenseLayers(experts) && (key == kDenseLayersKey || key == kExpertStepKey));
}

// Whether a key's value says that what it is about is not there.
bool IsOff(const GgufValue& value) {
  return value.Integer() == 0 || value.Float() == 0.0 || value.Bool() == false;
}

void RefuseWhatIsLacking(const ArchitectureKeys& of, const ModelFamily& family,
                         const GgufContents& contents, const ModelConfig& config) {
  GgufKeys& keys = of.keys();
  for (const GgufValue& value : contents.values()) {
    if (!value.key.starts_with(of.prefix())) continue;
    const std::string_view key = value.key.substr(of.prefix().size());
    if (Contains(kKnownKeys, key) || (family.has_multipliers && Contains(kMultiplierKeys, key)) ||
        (family.scales_queries && Contains(kQueryScalingKeys, key)) ||
        (family.has_image_positions && Contains(kImageKeys, key)) ||
        (family.has_prediction_layers && key == kPredictionLayersKey) ||
        (family.experts != nullptr && IsExpertKey(*family.experts, key)) ||
        (!family.gguf_sliding_theta_key.empty() && key == family.gguf_sliding_theta_key)) {
      continue;
    }
    if (!IsOff(value)) {
      keys.Fail(kUnimplemented, value.key, "winnow does not know this key; it would have to be 0");
    }
  }
  if (keys.OptionalBool(of("attention.causal")) == false) {
    keys.Fail(kUnimplemented, of("attention.causal"), "only causal attention is supported");
  }
  const double scale = 1 / std::sqrt(static_cast<double>(config.head_dim));
  const double given = keys.Number(of("attention.scale"), scale, -1e9, 1e9);
  if (!family.has_multipliers && given != 0 && std::abs(given - scale) > 1e-6 * scale) {
    keys.Fail(kUnimplemented, of("attention.scale"),
              Concat(given, " is not supported; winnow scales by ", scale));
  }
  // Elsewhere the key says nothing about what is computed.
  if (family.has_multipliers && keys.OptionalBool(of("rope.scaling.finetuned")) == false) {
    keys.Fail(kUnimplemented, of("rope.scaling.finetuned"),
              "false means that no layer rotates, which is not supported");
  }
}

// Whether each layer has a window, of a family of which not all have: of a number n all but each n-th.
std::vector<bool> ReadWindowPattern(const ArchitectureKeys& of, int64_t absent,
                                    const ModelConfig& config) {
  GgufKeys& keys = of.keys();
  const std::string key = of(kWindowPatternKey);
  const GgufValue* const value = keys.Find(key);
  const bool is_list = value != nullptr && value->type == GgufValueType::kArray;
  const int64_t each = is_list ? 0 : keys.Int(key, absent, 1, kLayersMax);
  std::vector<bool> slide(config.layers.size());
  if (is_list && (!value->IsArrayOf(GgufValueType::kBool) || value->count != slide.size())) {
    keys.Fail(kInvalid, key, Concat("must be a number, or ", slide.size(), " times true or false"));
    return slide;
  }
  if (!keys.status().ok()) return slide;
  for (size_t i = 0; i < slide.size(); ++i) {
    slide[i] = is_list ? value->BoolAt(i) : (static_cast<int64_t>(i) + 1) % each != 0;
  }
  return slide;
}

// Windows, where the file has one: in all layers of most families that have any.
void ReadWindows(const ArchitectureKeys& of, const ModelFamily& family, ModelConfig& config) {
  using Layers = ModelFamily::Windows::Layers;
  GgufKeys& keys = of.keys();
  const std::string key = of(kWindowKey);
  const int64_t window = keys.Int(key, 0, 0, INT32_MAX);
  const Layers layers = family.windows.layers;
  const bool some = layers == Layers::kAllBut;
  if (!some && keys.Find(of(kWindowPatternKey)) != nullptr) {
    keys.Fail(kUnimplemented, of(kWindowPatternKey),
              Concat(family.name, " models have windows in all layers, or in none"));
    return;
  }
  const bool bites = window != 0 && window < config.max_position_embeddings;
  if (bites && layers != Layers::kAll && !some) {
    keys.Fail(kUnimplemented, key,
              Concat(window, ": no windows of ", family.name,
                     " models are read from GGUF files; it must be 0 or at least ",
                     of("context_length"), " (", config.max_position_embeddings, ")"));
    return;
  }
  const std::vector<bool> slide = some ? ReadWindowPattern(of, family.windows.but, config)
                                       : std::vector<bool>(config.layers.size(), true);
  for (size_t i = 0; i < slide.size(); ++i) {
    if (slide[i] && bites) config.layers[i].window = static_cast<int32_t>(window);
    if (slide[i] && family.has_rope_by_type) config.layers[i].rope = 1;
    if (!slide[i] && window != 0 && family.rotates_windows_only) {
      config.layers[i].rope = LayerSpec::kNoRope;
    }
  }
}

// Granite's factors. 0 stands for none in llama.cpp's files, but for the one of the logits, which must be there.
void ReadMultipliers(const ArchitectureKeys& of, const ModelFamily& family, ModelConfig& config) {
  if (!family.has_multipliers) return;
  GgufKeys& keys = of.keys();
  const auto read = [&](std::string_view key) -> std::optional<double> {
    const double factor = keys.Number(of(key), 0.0, 0.0, kMultiplierMax);
    if (factor == 0) return std::nullopt;
    return keys.Number(of(key), {}, kMultiplierMin, kMultiplierMax);
  };
  config.embedding_multiplier = read("embedding_scale").value_or(1.0);
  config.residual_multiplier = read("residual_scale").value_or(1.0);
  config.attention_multiplier = read("attention.scale");
  config.logits_scaling = keys.Number(of("logit_scale"), {}, kMultiplierMin, kMultiplierMax);
}

// Gemma's, of which files do not speak. The norms' weights have the one in them. What divides attention's logits is that of
// the published models: the largest, of 62 layers, has heads of 128 and divides as heads of 168 would.
void ReadGemmasFactors(const ModelFamily& family, ModelConfig& config) {
  if (!family.is_gemma) return;
  constexpr int32_t kLargestLayers = 62;
  const double heads_of = config.num_layers() == kLargestLayers
                              ? static_cast<double>(config.hidden_size) / config.num_heads
                              : config.head_dim;
  config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden_size));
  config.attention_multiplier = 1 / std::sqrt(heads_of);
}

// Reads Ministral 3's scaling, of the length that yarn starts from. REQUIRES: the scaling of RoPE is read.
void ReadQueryScaling(const ArchitectureKeys& of, const ModelFamily& family, ModelConfig& config) {
  if (!family.scales_queries) return;
  GgufKeys& keys = of.keys();
  QueryScaling& scaling = config.ropes[0].query_scaling;
  scaling.beta = keys.Number(of("attention.temperature_scale"), 0.0, 0.0, kRopeFactorMax);
  scaling.length = keys.Number(of("rope.scaling.original_context_length"),
                               config.max_position_embeddings, 1.0, kPositionsMax);
  const double length =
      keys.Number(of("attention.temperature_length"), scaling.length, 0.0, kPositionsMax);
  if (scaling.beta != 0 && length != 0 && length != scaling.length) {
    keys.Fail(kUnimplemented, of("attention.temperature_length"),
              Concat(length, " is not supported; it must be the original context length, ",
                     scaling.length));
  }
}

void ReadRopeScaling(const ArchitectureKeys& of, const ModelFamily& family,
                     const GgufContents& contents, ModelConfig& config) {
  GgufKeys& keys = of.keys();
  RopeScaling& scaling = config.ropes[0].scaling;
  // The older key means linear scaling.
  const double linear = keys.Number(of("rope.scale_linear"), 1.0, 1.0, kRopeFactorMax);
  const std::string kind = keys.String(of("rope.scaling.type"), linear != 1.0 ? "linear" : "none");
  const double attention = keys.Number(of("rope.scaling.attn_factor"), 1.0, 1e-6, kRopeFactorMax);
  // Writers of LongRoPE name it in the key or not at all; its tensors say it.
  const bool is_longrope =
      kind == "longrope" || (kind == "none" && (contents.FindTensor(kShortFactors) != nullptr ||
                                                contents.FindTensor(kLongFactors) != nullptr));
  if (is_longrope) {
    scaling.kind = RopeScaling::Kind::kLongRope;
    scaling.attention_factor = attention;
    scaling.original_max_position_embeddings =
        keys.Number(of("rope.scaling.original_context_length"),
                    std::max(config.max_position_embeddings, 2), 2.0, kPositionsMax);
    return;
  }
  if (kind != "yarn" && attention != 1.0) {
    keys.Fail(kUnimplemented, of("rope.scaling.attn_factor"), "only yarn and longrope have it");
  }
  if (kind == "none") return;
  if (kind != "linear" && kind != "yarn") {
    keys.Fail(
        kUnimplemented, of("rope.scaling.type"),
        Concat(ShortDump(kind), " is not supported; winnow has none, linear, yarn, longrope"));
    return;
  }
  // 0 stands for no scaling in files of older writers.
  scaling.factor = keys.Number(of("rope.scaling.factor"), linear, 0.0, kRopeFactorMax);
  if (scaling.factor == 0) scaling.factor = 1;
  if (scaling.factor < 1) {
    keys.Fail(kInvalid, of("rope.scaling.factor"),
              Concat("must be at least 1, is ", scaling.factor));
  }
  if (kind == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
    return;
  }
  scaling.kind = RopeScaling::Kind::kYarn;
  scaling.original_max_position_embeddings =
      keys.Number(of("rope.scaling.original_context_length"), config.max_position_embeddings, 1.0,
                  kPositionsMax);
  scaling.truncate = family.yarn_truncates_in_gguf;
  scaling.beta_fast = keys.Number(of("rope.scaling.yarn_beta_fast"), 32.0, 0.0, kRopeFactorMax);
  scaling.beta_slow = keys.Number(of("rope.scaling.yarn_beta_slow"), 1.0, 0.0, kRopeFactorMax);
  // config.json's mscale_all_dim, with an mscale of 1.
  double all_dim = 0;
  if (family.scales_queries) {
    all_dim = keys.Number(of("rope.scaling.yarn_log_multiplier"), 0.0, 0.0, kRopeFactorMax);
  }
  if (all_dim != 0) {
    scaling.mscale = 1.0;
    scaling.mscale_all_dim = all_dim;
  }
  // Multiplies yarn's own factor here; config.json's attention_factor takes its place.
  if (attention != 1.0) {
    const double of_length = 0.1 * std::log(scaling.factor);
    scaling.attention_factor = attention * (of_length + 1.0) / (all_dim * of_length + 1.0);
  }
}

// Makes the error for a tensor that is read here.
absl::Status TensorError(std::string_view name, const GgufTensor& tensor, std::string_view what) {
  return absl::InvalidArgumentError(Concat(name, ": tensor ", ShortDump(std::string(tensor.name)),
                                           " at byte ", tensor.begin, ": ", what));
}

// Divisors of frequencies, one number for each pair that rotates.
absl::StatusOr<std::vector<float>> FactorsOf(const GgufContents& contents, const GgufTensor& tensor,
                                             std::string_view name, const ModelConfig& config) {
  const int64_t count = config.RotaryDim() / 2;
  if (WeightTypeOfGguf(tensor.type) != kernels::WeightType::kF32 || tensor.num_dims != 1 ||
      tensor.dims[0] != static_cast<uint64_t>(count)) {
    return TensorError(name, tensor, Concat("must be ", count, " values of type F32"));
  }
  std::vector<float> factors;
  for (int64_t i = 0; i < count; ++i) {
    factors.push_back(kernels::ElementAt(contents.Data(tensor).data(), DType::kF32, i));
    if (!(factors.back() >= 1e-6 && factors.back() <= kRopeFactorMax)) {
      return TensorError(name, tensor,
                         Concat("value ", i, " is ", factors.back(), ", which divides nothing"));
    }
  }
  return factors;
}

absl::Status ReadRopeFactors(const GgufContents& contents, std::string_view name,
                             ModelConfig& config) {
  RopeScaling& scaling = config.ropes[0].scaling;
  const GgufTensor* tensor = contents.FindTensor(kRopeFactors);
  if (tensor != nullptr) {
    if (scaling.kind != RopeScaling::Kind::kNone) {
      return TensorError(name, *tensor, "comes together with rope.scaling.type");
    }
    scaling.kind = RopeScaling::Kind::kFactors;
    WINNOW_ASSIGN_OR_RETURN(scaling.factors, FactorsOf(contents, *tensor, name, config));
  }
  for (const auto& [of_longrope, to] : {std::pair(kShortFactors, &scaling.short_factors),
                                        std::pair(kLongFactors, &scaling.long_factors)}) {
    tensor = contents.FindTensor(of_longrope);
    if (tensor == nullptr) {
      if (scaling.kind != RopeScaling::Kind::kLongRope) continue;
      return absl::NotFoundError(
          Concat(name, ": tensor ", ShortDump(std::string(of_longrope)), " is missing"));
    }
    if (scaling.kind != RopeScaling::Kind::kLongRope) {
      return TensorError(name, *tensor, "comes together with another rope.scaling.type");
    }
    WINNOW_ASSIGN_OR_RETURN(*to, FactorsOf(contents, *tensor, name, config));
  }
  return absl::OkStatus();
}

// Reads what only the tensors show: how large the vocabulary is, which biases there are, what type most of them have.
absl::Status ReadTensors(const ArchitectureKeys& of, const ModelFamily& family,
                         const GgufContents& contents, std::string_view name, ModelConfig& config) {
  const GgufTensor* embedding = contents.FindTensor("token_embd.weight");
  if (embedding == nullptr) {
    return absl::NotFoundError(Concat(name, ": tensor \"token_embd.weight\" is missing"));
  }
  if (embedding->num_dims != 2 || embedding->dims[1] > static_cast<uint64_t>(kVocabMax)) {
    return TensorError(name, *embedding,
                       Concat("must have two dimensions, and at most ", kVocabMax, " rows"));
  }
  config.vocab_size = static_cast<int32_t>(embedding->dims[1]);
  const int64_t said = of.keys().Int(of("vocab_size"), config.vocab_size, 1, kVocabMax);
  if (said != config.vocab_size) {
    of.keys().Fail(kInvalid, of("vocab_size"),
                   Concat(said, ", but \"token_embd.weight\" has ", config.vocab_size, " rows"));
  }
  config.tie_word_embeddings = contents.FindTensor("output.weight") == nullptr;

  // Layers are alike in this: the first shows which biases there are, beside those that the family always has. Matrices
  // that share a tensor have none.
  const auto has_bias = [&](const TensorName& of_first) {
    return contents.FindTensor(Concat("blk.0.", of_first.gguf, ".bias")) != nullptr;
  };
  const LayerTensorNames& names = *family.tensors;
  const bool qkv_bias = names.q.gguf != names.k.gguf && has_bias(names.q);
  const bool o_bias = has_bias(names.o);
  const bool mlp_bias = names.gate.gguf != names.up.gguf && has_bias(names.gate);
  for (LayerSpec& layer : config.layers) {
    layer.qkv_bias =
        qkv_bias || (layer.qkv_bias && family.attention_bias != ModelFamily::Key::kHonoured);
    layer.o_bias |= o_bias;
    layer.mlp_bias |= mlp_bias;
    if (family.has_qk_norm_key) {
      layer.qk_norm =
          contents.FindTensor(Concat("blk.0.", names.q_norm.gguf, ".weight")) != nullptr;
    }
  }
  for (int32_t i = 0; family.experts != nullptr && family.experts->corrects; ++i) {
    if (i == config.num_layers()) break;
    if (config.layers[i].mlp != LayerSpec::Mlp::kExperts) continue;
    const std::string correction = Concat("blk.", i, ".", names.correction.gguf, ".bias");
    config.experts.corrected = contents.FindTensor(correction) != nullptr;
    break;
  }

  const std::string_view routers[] = {names.router.gguf, names.shared_gating.gguf};
  std::optional<uint32_t> type;
  bool mixed = false;
  for (const GgufTensor& tensor : contents.tensors()) {
    // Norms and biases, which are widened anyway, and routers, whose products are exact.
    if (tensor.num_dims < 2 || tensor.name.ends_with(".bias")) continue;
    const bool is_router =
        std::any_of(std::begin(routers), std::end(routers), [&](std::string_view router) {
          return !router.empty() && tensor.name.ends_with(Concat(".", router, ".weight"));
        });
    if (is_router) continue;
    mixed |= type && *type != tensor.type;
    type = tensor.type;
  }
  const std::optional<kernels::WeightType> weights = type ? WeightTypeOfGguf(*type) : std::nullopt;
  config.dtype = DType::kBF16;
  if (!mixed && weights) config.dtype = kernels::PlainType(*weights).value_or(DType::kBF16);
  return absl::OkStatus();
}

void ReadTokens(GgufKeys& keys, ModelConfig& config) {
  std::vector<int32_t>& ends = config.eos_token_ids;
  for (const std::string_view key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                     "tokenizer.ggml.eom_token_id"}) {
    if (const auto id = keys.OptionalInt(key, 0, config.vocab_size - 1)) {
      ends.push_back(static_cast<int32_t>(*id));
    }
  }
  if (const auto bos = keys.OptionalInt("tokenizer.ggml.bos_token_id", 0, config.vocab_size - 1)) {
    config.bos_token_id = static_cast<int32_t>(*bos);
  }
  const GgufValue* tokens = keys.Find("tokenizer.ggml.tokens");
  const GgufValue* types = keys.Find("tokenizer.ggml.token_type");
  if (tokens != nullptr && types != nullptr && tokens->IsArrayOf(GgufValueType::kString) &&
      types->type == GgufValueType::kArray && types->element != GgufValueType::kString) {
    const std::vector<std::string_view> texts = tokens->Strings();
    const size_t count =
        std::min<size_t>({texts.size(), types->count, static_cast<size_t>(config.vocab_size)});
    const bool in_messages = std::find(texts.begin(), texts.end(), kCall) != texts.end();
    for (size_t i = 0; i < count; ++i) {
      if (types->IntegerAt(i) != static_cast<int64_t>(GgufTokenType::kControl)) continue;
      if (in_messages && texts[i] == kEndOfMessage) {
        std::erase(ends, static_cast<int32_t>(i));  // a key may name it
        continue;
      }
      if (std::find(std::begin(kEndTokens), std::end(kEndTokens), texts[i]) == std::end(kEndTokens))
        continue;
      if (ends.size() < kEosTokensMax) ends.push_back(static_cast<int32_t>(i));
    }
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
}

}  // namespace

absl::StatusOr<ModelConfig> GgufModelConfig(const GgufContents& contents, std::string_view name) {
  GgufKeys keys(contents, name);
  ModelConfig config;
  const ModelFamily* const family = FindFamilyInGguf(keys);
  if (family == nullptr) return keys.status();
  config.family = family->family;
  config.architecture = family->architecture;
  const ArchitectureKeys of(keys, family->gguf_name);
  ReadShape(of, *family, config);
  WINNOW_RETURN_IF_ERROR(keys.status());
  RefuseWhatIsLacking(of, *family, contents, config);
  ReadExperts(of, *family, config);
  ReadWindows(of, *family, config);
  ReadMultipliers(of, *family, config);
  for (size_t i = 0; family->no_rope_interval != 0 && i < config.layers.size(); ++i) {
    if ((i + 1) % family->no_rope_interval == 0) config.layers[i].rope = LayerSpec::kNoRope;
  }
  config.ropes[0].theta = keys.Number(of("rope.freq_base"), 10000.0, kRopeThetaMin, kRopeThetaMax);
  // Scaling is of the layers without a window.
  if (family->has_rope_by_type) config.ropes.assign(2, config.ropes[0]);
  if (!family->gguf_sliding_theta_key.empty()) {
    config.ropes[1].theta = keys.Number(of(family->gguf_sliding_theta_key),
                                        family->sliding_theta_absent, kRopeThetaMin, kRopeThetaMax);
  }
  ReadGemmasFactors(*family, config);
  ReadRopeScaling(of, *family, contents, config);
  ReadQueryScaling(of, *family, config);
  WINNOW_RETURN_IF_ERROR(keys.status());
  WINNOW_RETURN_IF_ERROR(ReadRopeFactors(contents, name, config));
  WINNOW_RETURN_IF_ERROR(ReadTensors(of, *family, contents, name, config));
  ReadTokens(keys, config);
  WINNOW_RETURN_IF_ERROR(keys.status());
  return config;
}

}  // namespace winnow::engine

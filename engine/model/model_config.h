// What a model is: of config.json and generation_config.json of a Hugging Face directory, or of a GGUF file's keys
// (gguf_config.h), checked.
//
// Keys are read as transformers 4 and 5 write them (rope_scaling or rope_parameters, torch_dtype or
// dtype, ...), with its defaults where a key is absent. What winnow does not compute is refused by
// name: an option is honoured or it is an error.
//
// Keys that winnow does not read: those known to leave the computation alone are passed over, those
// known to change it are refused by name unless they have the value that changes nothing, and any
// other is listed in ModelConfig::unknown_keys, unless it is null, false or empty.
//
// Sliding windows (LayerSpec::window) are those of "sliding_window", in the layers and by the switches that the family's entry
// names (ModelFamily::Windows), with its meaning of an absent key. One of max_position_embeddings or more can never bite, and is
// none. Families of which transformers does not read the key are refused with any other.
//
// Models that read images, too (Mistral3ForConditionalGeneration, Gemma3ForConditionalGeneration): their text part is the model.
// Its keys are those of "text_config", beside which the file has what is of the whole.
//
// LongRoPE has factors for short and for long contexts. A server uses one of them for all sequences, by the longest context
// that it serves (WithServedContext).
#ifndef WINNOW_ENGINE_MODEL_MODEL_CONFIG_H_
#define WINNOW_ENGINE_MODEL_MODEL_CONFIG_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/layer_spec.h"
#include "engine/model/rope.h"
#include "engine/model/weight_scheme.h"
#include "kernels/dtype.h"
#include "kernels/experts.h"
#include "kernels/silu_mul.h"

namespace winnow::engine {

// One way to rotate Q and K, which layers name by its number.
struct RopeSet {
  double theta = 0;
  RopeScaling scaling;
  QueryScaling query_scaling = {};
};

// Facts of layers with LayerSpec::Mlp::kExperts, which are alike in this. A token goes to the `per_token` experts with the largest of
// the router's logits, or of what a correction makes of their scores; what they give is weighed by the scores (ExpertRouting).
struct ExpertsConfig {
  int32_t count = 0;
  int32_t per_token = 0;          // 1 to count
  int32_t intermediate_size = 0;  // of one
  kernels::ExpertRouting::Scores scores = kernels::ExpertRouting::Scores::kSoftmax;
  bool normalized = false;  // weights are divided by the sum of the chosen ones
  bool corrected = false;   // a layer has a correction for each expert
  double scale = 1;         // of weights
  // Size of one more expert, to which all tokens go, with a weight of 1 or, gated, the sigmoid of a logit of its own. 0: none.
  int32_t shared_intermediate_size = 0;
  bool shared_is_gated = false;
  std::optional<kernels::ClampedSwiglu> clamped = {};  // the gate of their MLPs; absent: silu

  int32_t WidestIntermediate() const {
    return std::max(intermediate_size, shared_intermediate_size);
  }
  bool operator==(const ExpertsConfig&) const = default;
};

struct ModelConfig {
  enum class Family {
    kLlama,
    kMistral,
    kMinistral3,
    kQwen2,
    kQwen3,
    kQwen3Vl,
    kSmolLM3,
    kSeedOss,
    kGranite,
    kPhi3,
    kGlm,
    kGlm4,
    kOlmo2,
    kOlmo3,
    kGemma3,
    kExaone4,
    kErnie,
    kErnieMoe,
    kMixtral,
    kMiniMaxM2,
    kQwen2Moe,
    kQwen3Moe,
    kQwen3VlMoe,
    kOlmoe,
    kGraniteMoe,
    kGlm4Moe,
    kDots1,
    kGptOss,
  };
  Family family = Family::kLlama;
  std::string architecture;  // "LlamaForCausalLM"
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t num_heads = 0;     // H
  int32_t num_kv_heads = 0;  // Hkv, divides H
  int32_t head_dim = 0;      // d: 64, 80, 96, 128 or 256; H*d need not be hidden_size
  int32_t rotary_dim = 0;    // values of a head that rotate, the first ones, even; 0: all
  int32_t vocab_size = 0;
  int32_t max_position_embeddings = 0;
  float rms_norm_eps = 0;
  std::vector<RopeSet> ropes = std::vector<RopeSet>(1);
  std::vector<LayerSpec> layers;
  ExpertsConfig experts;  // zeros where no layer has any
  // Layers behind the last one that files may have, which predict further tokens. They are passed over.
  int32_t prediction_layers = 0;
  // Granite's factors. The embedding is multiplied, and so is what attention and MLP add to the residual stream; logits are
  // divided.
  double embedding_multiplier = 1, residual_multiplier = 1, logits_scaling = 1;
  std::optional<double> attention_multiplier = {};  // of attention's logits; absent: 1/√d
  bool norms_add_one = false;  // weights of norms are those of the file, and one
  bool tie_word_embeddings = false;
  // The text part of a model that reads images, too: other tensors lie beside its own, whose names begin with
  // "language_model".
  bool is_text_part = false;
  // How quantised matrices lie in the files of a directory, where there are any.
  std::optional<WeightScheme> weight_scheme = {};
  kernels::DType dtype = kernels::DType::kBF16;  // torch_dtype or dtype, float32 where absent
  std::vector<int32_t> eos_token_ids;   // of config.json and generation_config.json, ascending
  std::optional<int32_t> bos_token_id;  // generation_config.json's, else config.json's
  // Keys of config.json that winnow does not know, that are set, and that are not among those known
  // to leave the computation alone; ascending. Whoever loads a model says that they are not applied.
  std::vector<std::string> unknown_keys;

  int32_t num_layers() const { return static_cast<int32_t>(layers.size()); }
  // Layers without a window: those in which a policy may choose what to read.
  int32_t NumFullLayers() const {
    return static_cast<int32_t>(std::count_if(
        layers.begin(), layers.end(), [](const LayerSpec& layer) { return layer.SeesAll(); }));
  }
  int32_t NumLayersOf(LayerSpec::Mlp mlp) const {
    return static_cast<int32_t>(std::count_if(
        layers.begin(), layers.end(), [mlp](const LayerSpec& layer) { return layer.mlp == mlp; }));
  }
  int32_t RotaryDim() const { return rotary_dim != 0 ? rotary_dim : head_dim; }
  // Factor on the product of a query and a key.
  float AttentionScale() const {
    return attention_multiplier ? static_cast<float>(*attention_multiplier)
                                : 1.0f / std::sqrt(static_cast<float>(head_dim));
  }
};

// `model_path` is a directory: reads DIR/config.json and, if it is there, DIR/generation_config.json. Or it is a GGUF
// file: GgufModelConfig of it.
// Errors name the file and the key. NotFound: no config.json. Unimplemented: an architecture,
// activation, RoPE kind, head dimension, layer type or quantisation that winnow lacks, with the
// list of what it has. InvalidArgument: not JSON, a missing key, values of a wrong type, that
// contradict each other or that pass the limits.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_path);

// The same from texts; the names stand for the files in errors. An empty `generation_json` is an
// absent file.
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json,
                                             std::string_view config_name,
                                             std::string_view generation_json,
                                             std::string_view generation_name);

// `config` for a server whose longest context is `context`: chooses between LongRoPE's factors where that is still open, and
// windows of that length or more are none.
ModelConfig WithServedContext(ModelConfig config, int32_t context);

// The parameters of config.ropes[set], [head_dim/2]. Pairs that do not rotate have the frequency 0: those beyond
// RotaryDim(), and all of LayerSpec::kNoRope. Where LongRoPE's factors are not chosen yet: those of the model's longest context.
RopeParameters ComputeRope(const ModelConfig& config, int32_t set = 0);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_MODEL_CONFIG_H_

// The families of models that winnow runs, one table entry each: by which names files call a family, its layer, which keys
// change that layer, the defaults of absent keys, and the names of its tensors. The readers of config.json and of GGUF
// files, and the list of a model's tensors, read the entry and ask for no family.
#ifndef WINNOW_ENGINE_MODEL_MODEL_FAMILY_H_
#define WINNOW_ENGINE_MODEL_MODEL_FAMILY_H_

#include <cstdint>
#include <span>
#include <string_view>

#include "engine/model/layer_spec.h"
#include "engine/model/model_config.h"
#include "kernels/experts.h"

namespace winnow::engine {

// A tensor without its prefix and suffix: "self_attn.q_proj" of "model.layers.0.self_attn.q_proj.weight", and "attn_q" of
// "blk.0.attn_q.weight". Matrices of the same name lie one behind the other in one tensor.
struct TensorName {
  std::string_view safetensors, gguf;
};

struct LayerTensorNames {
  TensorName attention_norm, q, k, v, q_norm, k_norm, o, mlp_norm, gate, up, down;
  TensorName attention_out_norm = {}, mlp_out_norm = {};  // where LayerSpec::NormsAfter()
  // Names in layers of experts. A directory has a tensor for each matrix of each expert, whose number stands between `experts` and
  // the name: "mlp.experts.7.gate_proj". A GGUF file has one of three dimensions for the same matrix of all.
  TensorName router = {};
  std::string_view experts = {};
  TensorName expert_gate = {}, expert_up = {}, expert_down = {};
  // How a directory has the matrices of all experts in one tensor (TensorSpec::Stack): "mlp.experts.gate_up_proj".
  enum class Stacks : uint8_t {
    kNone,    // it has a tensor for each
    kInTurn,  // a gate's output, then the same up's
    kHalves,  // all of a gate's, then all of the up's
    kRows,    // the same, but an output's values lie side by side, as matrices have them elsewhere
  };
  Stacks stacks = Stacks::kNone;
  TensorName sinks = {};  // where LayerSpec::sinks; no suffix stands behind a directory's
  // Names that experts may have (ExpertsConfig): what corrects scores, without a suffix and of so many dimensions in a directory;
  // the shared expert's matrices, and its gate's.
  TensorName correction = {};
  int32_t correction_dims = 1;
  TensorName shared_gate = {}, shared_up = {}, shared_down = {}, shared_gating = {};
};

// The keys of config.json about experts, and what absent ones mean; of numbers 0: the key must be there.
struct ExpertKeys {
  using Scores = kernels::ExpertRouting::Scores;
  // MLPs are nothing but experts: intermediate_size is theirs.
  bool has_own_size = false;  // moe_intermediate_size
  int32_t size_absent = 0;
  std::string_view count_key = {};  // "": num_experts or num_local_experts
  int32_t count_absent = 0;
  std::string_view per_token_key = "num_experts_per_tok";
  int32_t per_token_absent = 0;
  bool normalizes = false;         // always; else norm_topk_prob says it
  bool normalizes_absent = false;  // what an absent norm_topk_prob means
  bool normalizes_in_gguf = true;  // what an absent expert_weights_norm means
  Scores scores = Scores::kSoftmax;
  bool corrects = false;  // always; of a GGUF file its tensors say it
  // DeepSeek's router: routed_scaling_factor, and n_group and topk_group, of which winnow has no more than one group.
  bool scales = false;
  // Layers that have one MLP instead.
  enum class DenseLayers : uint8_t {
    kNone,
    kBySteps,  // those of mlp_only_layers, and all but each last one of decoder_sparse_step
    kFirst,    // the first ones, as many as first_k_dense_replace says
    kOutside,  // those outside moe_layer_start_index to moe_layer_end_index, and of moe_layer_interval as by steps
  };
  DenseLayers dense = DenseLayers::kNone;
  int32_t first_dense_absent = 0;
  bool clamps = false;  // the gate, by swiglu_alpha and swiglu_limit
  // The shared expert: its size, or how many times that of another it has. Without either there is none.
  std::string_view shared_size_key = {}, shared_count_key = {};
  int32_t shared_absent = 0;  // here 0 means that there is none
  bool gates_shared = false;

  bool HasShared() const { return !shared_size_key.empty() || !shared_count_key.empty(); }
};

struct ModelFamily {
  // A boolean key of config.json.
  enum class Key : uint8_t {
    kHonoured,  // it says whether the layer has such biases
    kIgnored,   // transformers does not read it in this family
    kRefused,   // true is an error: models of this family have none
  };
  // Sliding windows, by the key sliding_window.
  struct Windows {
    // Layers that have it.
    enum class Layers : uint8_t {
      kNone,       // the reference does not read the key: where it could bite it is refused
      kAll,        // and layer_types may name no others
      kUpper,      // those of layer_types, else from max_window_layers on
      kUnrotated,  // those of layer_types, else those without RoPE
      kAllBut,     // those of layer_types, else all but each `but`-th
    };
    Layers layers = Layers::kNone;
    bool has_switch = false;    // use_sliding_window, false where absent, is asked first
    int32_t absent = 0;         // what an absent key means; 0: none
    int32_t upper_absent = 28;  // max_window_layers
    int32_t but = 0;
    std::string_view but_key = {};  // that may say another number; "": there is none
  };

  ModelConfig::Family family;
  std::string_view name;          // in errors
  std::string_view architecture;  // of config.json
  std::string_view model_type;    // of config.json
  // general.architecture; "": GGUF files call it by another family's, or none of it is read. Of two with one name, the later one
  // is meant where the file has experts, or a window.
  std::string_view gguf_name;
  // Whether neighbouring rows of Q and K rotate together (WeightMatrix::HeadOrder::kInterleaved): in directories, because the
  // family does so, and in GGUF files, whose writers put rows in that order for most families that do not.
  bool interleaves = false;
  bool gguf_interleaves = false;
  // Values of the shape's keys where a file leaves them out, as the family's writers do. 0: the key must be there.
  int64_t vocab_absent = 0, heads_absent = 0, positions_absent = 0;
  int64_t kv_heads_absent = 0;  // 0: as many as query heads
  int64_t head_dim_absent = 0;  // 0: hidden_size / num_attention_heads
  double rms_norm_eps_absent = 1e-6;
  double rope_theta_absent = 10000.0;
  bool tied_absent = false;  // tie_word_embeddings
  // Length that the model was first trained at, for LongRoPE. 0: max_position_embeddings.
  int64_t original_positions_absent = 0;
  Key attention_bias = Key::kHonoured;
  std::string_view attention_bias_key = "attention_bias";
  // The key that says whether O has a bias.
  enum class OutBias : uint8_t {
    kAttentionBias,
    kOwnKey,  // attention_out_bias
    kNever,
  };
  OutBias out_bias = OutBias::kAttentionBias;
  Key mlp_bias = Key::kRefused;
  // A key of its own that says whether all matrices of a layer have biases. "": there is none.
  std::string_view all_biases = {};
  Windows windows = {};
  // Every so many layers the last one does not rotate, where no_rope_layers and no_rope_layer_interval do not say otherwise.
  // GGUF files have no key for it. 0: all layers rotate, and the keys are refused.
  int32_t no_rope_interval = 0;
  bool has_multipliers = false;  // Granite's (ModelConfig), else refused
  bool rotates_in_part =
      false;  // partial_rotary_factor may be below 1, and so may rotary_dim be below head_dim
  double rotary_share_absent = 1.0;  // partial_rotary_factor
  // rope_parameters where a file has none, as JSON. "": those of the reference's default, without scaling.
  std::string_view rope_absent = {};
  bool yarn_truncates_in_gguf = true;  // RopeScaling::truncate, for which GGUF files have no key
  bool scales_queries = false;         // QueryScaling, else refused
  // Files say how many pairs of a head rotate by each of an image's three positions. A text's are equal: it rotates as ever.
  bool has_image_positions = false;
  // Layers with a window rotate by the second RoPE set: rope_parameters have an object for each layer type, and what
  // rope_scaling says is of the others.
  bool has_rope_by_type = false;
  // Base of the second set: a key of its own, or an absent one's value. 0: that of the first.
  std::string_view sliding_theta_key = {}, gguf_sliding_theta_key = {};
  double sliding_theta_absent = 0;
  // Where layers have a window, the others do not rotate; in a model without windows all do.
  bool rotates_windows_only = false;
  // The MLP's activation as files name it, and a key for it beside hidden_act, which may be absent.
  std::string_view activation = "silu", activation_key = {};
  // Gemma's: ModelConfig::norms_add_one in directories, an embedding multiplied by the root of hidden_size, and
  // query_pre_attn_scalar, whose root divides attention's logits; absent: head_dim_absent.
  bool is_gemma = false;
  bool has_only_longrope =
      false;  // of all kinds of RoPE scaling; older files call it "su" and "yarn"
  bool has_qk_norm_key =
      false;  // use_qk_norm, without which heads are not normed; of a GGUF file tensors say it
  bool has_prediction_layers = false;   // num_nextn_predict_layers
  const ExpertKeys* experts = nullptr;  // null: keys about experts are refused
  LayerSpec layer = {};                 // before any key is read
  const LayerTensorNames* tensors = nullptr;
};

std::span<const ModelFamily> ModelFamilies();
const ModelFamily& FamilyOf(ModelConfig::Family family);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_MODEL_FAMILY_H_

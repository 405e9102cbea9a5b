#include "engine/model/model_family.h"

#include <array>

#include "kernels/check.h"

namespace winnow::engine {
namespace {

using Key = ModelFamily::Key;
using WindowLayers = ModelFamily::Windows::Layers;

constexpr LayerTensorNames kLlamaTensors = {
    .attention_norm = {"input_layernorm", "attn_norm"},
    .q = {"self_attn.q_proj", "attn_q"},
    .k = {"self_attn.k_proj", "attn_k"},
    .v = {"self_attn.v_proj", "attn_v"},
    .q_norm = {"self_attn.q_norm", "attn_q_norm"},
    .k_norm = {"self_attn.k_norm", "attn_k_norm"},
    .o = {"self_attn.o_proj", "attn_output"},
    .mlp_norm = {"post_attention_layernorm", "ffn_norm"},
    .gate = {"mlp.gate_proj", "ffn_gate"},
    .up = {"mlp.up_proj", "ffn_up"},
    .down = {"mlp.down_proj", "ffn_down"},
};

// Seed-OSS's GGUF files call the MLP's norm by the place that it has in other families.
constexpr LayerTensorNames kSeedOssTensors = [] {
  LayerTensorNames names = kLlamaTensors;
  names.mlp_norm.gguf = "post_attention_norm";
  return names;
}();

constexpr LayerTensorNames kGlmTensors = [] {
  LayerTensorNames names = kLlamaTensors;
  names.gate = names.up = {"mlp.gate_up_proj", "ffn_up"};
  return names;
}();

constexpr LayerTensorNames kGlm4Tensors = [] {
  LayerTensorNames names = kGlmTensors;
  names.attention_out_norm = {"post_self_attn_layernorm", "post_attention_norm"};
  names.mlp_out_norm = {"post_mlp_layernorm", "post_ffw_norm"};
  return names;
}();

constexpr LayerTensorNames kOlmo2Tensors = [] {
  LayerTensorNames names = kLlamaTensors;
  names.attention_norm = names.mlp_norm = {};
  names.attention_out_norm = {"post_attention_layernorm", "post_attention_norm"};
  names.mlp_out_norm = {"post_feedforward_layernorm", "post_ffw_norm"};
  return names;
}();

constexpr LayerTensorNames kGemma3Tensors = [] {
  LayerTensorNames names = kOlmo2Tensors;
  names.attention_norm = kLlamaTensors.attention_norm;
  names.mlp_norm = {"pre_feedforward_layernorm", "ffn_norm"};
  return names;
}();

constexpr LayerTensorNames kPhi3Tensors = [] {
  LayerTensorNames names = kGlmTensors;
  names.q = names.k = names.v = {"self_attn.qkv_proj", "attn_qkv"};
  return names;
}();

constexpr LayerTensorNames kMixtralTensors = [] {
  LayerTensorNames names = kLlamaTensors;
  names.router = {"block_sparse_moe.gate", "ffn_gate_inp"};
  names.experts = "block_sparse_moe.experts";
  names.expert_gate = {"w1", "ffn_gate_exps"};
  names.expert_up = {"w3", "ffn_up_exps"};
  names.expert_down = {"w2", "ffn_down_exps"};
  return names;
}();

constexpr LayerTensorNames kQwen3MoeTensors = [] {
  LayerTensorNames names = kLlamaTensors;
  names.router = {"mlp.gate", "ffn_gate_inp"};
  names.experts = "mlp.experts";
  names.expert_gate = {"gate_proj", "ffn_gate_exps"};
  names.expert_up = {"up_proj", "ffn_up_exps"};
  names.expert_down = {"down_proj", "ffn_down_exps"};
  return names;
}();

constexpr LayerTensorNames kMiniMaxM2Tensors = [] {
  LayerTensorNames names = kMixtralTensors;
  names.correction = {"block_sparse_moe.e_score_correction_bias", "exp_probs_b"};
  return names;
}();

constexpr LayerTensorNames kQwen2MoeTensors = [] {
  LayerTensorNames names = kQwen3MoeTensors;
  names.shared_gate = {"mlp.shared_expert.gate_proj", "ffn_gate_shexp"};
  names.shared_up = {"mlp.shared_expert.up_proj", "ffn_up_shexp"};
  names.shared_down = {"mlp.shared_expert.down_proj", "ffn_down_shexp"};
  names.shared_gating = {"mlp.shared_expert_gate", "ffn_gate_inp_shexp"};
  return names;
}();

constexpr LayerTensorNames kDots1Tensors = [] {
  LayerTensorNames names = kQwen3MoeTensors;
  names.correction = {"mlp.gate.e_score_correction_bias", "exp_probs_b"};
  names.shared_gate = {"mlp.shared_experts.gate_proj", "ffn_gate_shexp"};
  names.shared_up = {"mlp.shared_experts.up_proj", "ffn_up_shexp"};
  names.shared_down = {"mlp.shared_experts.down_proj", "ffn_down_shexp"};
  return names;
}();

constexpr LayerTensorNames kGlm4MoeTensors = [] {
  LayerTensorNames names = kDots1Tensors;
  names.mlp_norm.gguf = "post_attention_norm";
  return names;
}();

constexpr LayerTensorNames kErnieMoeTensors = [] {
  LayerTensorNames names = kDots1Tensors;
  names.correction.safetensors = "mlp.moe_statics.e_score_correction_bias";
  names.correction_dims = 2;
  return names;
}();

constexpr LayerTensorNames kGraniteMoeTensors = [] {
  LayerTensorNames names = kLlamaTensors;
  names.router = {"block_sparse_moe.router.layer", "ffn_gate_inp"};
  names.experts = "block_sparse_moe";
  names.expert_gate = {"input_linear.weight", "ffn_gate_exps"};
  names.expert_up = {"input_linear.weight", "ffn_up_exps"};
  names.expert_down = {"output_linear.weight", "ffn_down_exps"};
  names.stacks = LayerTensorNames::Stacks::kRows;
  return names;
}();

constexpr LayerTensorNames kQwen3VlMoeTensors = [] {
  LayerTensorNames names = kQwen3MoeTensors;
  names.expert_gate.safetensors = names.expert_up.safetensors = "gate_up_proj";
  names.stacks = LayerTensorNames::Stacks::kHalves;
  return names;
}();

constexpr LayerTensorNames kGptOssTensors = [] {
  LayerTensorNames names = kLlamaTensors;
  names.mlp_norm.gguf = "post_attention_norm";
  names.router = {"mlp.router", "ffn_gate_inp"};
  names.experts = "mlp.experts";
  names.expert_gate = {"gate_up_proj", "ffn_gate_exps"};
  names.expert_up = {"gate_up_proj", "ffn_up_exps"};
  names.expert_down = {"down_proj", "ffn_down_exps"};
  names.stacks = LayerTensorNames::Stacks::kInTurn;
  names.sinks = {"self_attn.sinks", "attn_sinks"};
  return names;
}();

constexpr ExpertKeys kMixtralExperts = {
    .count_absent = 8, .per_token_absent = 2, .normalizes = true};
constexpr ExpertKeys kQwen3MoeExperts = {.has_own_size = true,
                                         .size_absent = 768,
                                         .count_absent = 128,
                                         .per_token_absent = 8,
                                         .dense = ExpertKeys::DenseLayers::kBySteps};
constexpr ExpertKeys kQwen3VlMoeExperts = {.has_own_size = true,
                                           .size_absent = 1408,
                                           .count_absent = 60,
                                           .per_token_absent = 4,
                                           .normalizes = true,
                                           .dense = ExpertKeys::DenseLayers::kBySteps};
constexpr ExpertKeys kQwen2MoeExperts = {.has_own_size = true,
                                         .size_absent = 1408,
                                         .count_absent = 60,
                                         .per_token_absent = 4,
                                         .normalizes_in_gguf = false,
                                         .dense = ExpertKeys::DenseLayers::kBySteps,
                                         .shared_size_key = "shared_expert_intermediate_size",
                                         .shared_absent = 5632,
                                         .gates_shared = true};
constexpr ExpertKeys kMiniMaxM2Experts = {.count_absent = 256,
                                          .per_token_absent = 8,
                                          .normalizes = true,
                                          .scores = ExpertKeys::Scores::kSigmoid,
                                          .corrects = true};
constexpr ExpertKeys kGlm4MoeExperts = {.has_own_size = true,
                                        .size_absent = 1408,
                                        .count_key = "n_routed_experts",
                                        .count_absent = 128,
                                        .per_token_absent = 8,
                                        .normalizes_absent = true,
                                        .normalizes_in_gguf = false,
                                        .scores = ExpertKeys::Scores::kSigmoid,
                                        .corrects = true,
                                        .scales = true,
                                        .dense = ExpertKeys::DenseLayers::kFirst,
                                        .first_dense_absent = 1,
                                        .shared_count_key = "n_shared_experts",
                                        .shared_absent = 1};
constexpr ExpertKeys kDots1Experts = {.has_own_size = true,
                                      .size_absent = 1408,
                                      .count_key = "n_routed_experts",
                                      .normalizes_in_gguf = false,
                                      .scores = ExpertKeys::Scores::kSigmoid,
                                      .corrects = true,
                                      .scales = true,
                                      .dense = ExpertKeys::DenseLayers::kFirst,
                                      .shared_count_key = "n_shared_experts"};
constexpr ExpertKeys kErnieMoeExperts = {.has_own_size = true,
                                         .size_absent = 1536,
                                         .count_key = "moe_num_experts",
                                         .count_absent = 64,
                                         .per_token_key = "moe_k",
                                         .per_token_absent = 6,
                                         .normalizes = true,
                                         .corrects = true,
                                         .dense = ExpertKeys::DenseLayers::kOutside,
                                         .first_dense_absent = 1,
                                         .shared_count_key = "moe_num_shared_experts",
                                         .shared_absent = 2};

constexpr ExpertKeys kOlmoeExperts = {
    .count_absent = 64, .per_token_absent = 8, .normalizes_in_gguf = false};
constexpr ExpertKeys kGraniteMoeExperts = {
    .count_absent = 8, .per_token_absent = 2, .normalizes = true};
constexpr ExpertKeys kGptOssExperts = {
    .count_absent = 128, .per_token_absent = 4, .normalizes = true, .clamps = true};

constexpr std::string_view kGptOssRope =
    R"({"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1, "truncate": false,
        "original_max_position_embeddings": 4096})";

constexpr std::string_view kMinistral3Rope =
    R"({"rope_type": "yarn", "rope_theta": 1000000, "factor": 16, "original_max_position_embeddings": 16384,
        "mscale": 1, "mscale_all_dim": 1, "llama_4_scaling_beta": 0.1})";

constexpr std::array<ModelFamily, 28> kFamilies = {{
    {.family = ModelConfig::Family::kLlama,
     .name = "Llama",
     .architecture = "LlamaForCausalLM",
     .model_type = "llama",
     .gguf_name = "llama",
     .gguf_interleaves = true,
     .mlp_bias = Key::kHonoured,
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kMistral,
     .name = "Mistral",
     .architecture = "MistralForCausalLM",
     .model_type = "mistral",
     .gguf_name = "",
     .kv_heads_absent = 8,
     .attention_bias = Key::kRefused,
     .windows = {.layers = WindowLayers::kAll, .absent = 4096},
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kMinistral3,
     .name = "Ministral 3",
     .architecture = "Ministral3ForCausalLM",
     .model_type = "ministral3",
     .gguf_name = "mistral3",
     .gguf_interleaves = true,
     .kv_heads_absent = 8,
     .head_dim_absent = 128,
     .rms_norm_eps_absent = 1e-5,
     .attention_bias = Key::kRefused,
     .windows = {.layers = WindowLayers::kAll},
     .rope_absent = kMinistral3Rope,
     .scales_queries = true,
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kQwen2,
     .name = "Qwen2",
     .architecture = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .gguf_name = "qwen2",
     .kv_heads_absent = 32,
     .attention_bias = Key::kIgnored,
     .windows = {.layers = WindowLayers::kUpper, .has_switch = true, .absent = 4096},
     .layer = {.qkv_bias = true},
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kQwen3,
     .name = "Qwen3",
     .architecture = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .gguf_name = "qwen3",
     .kv_heads_absent = 32,
     .head_dim_absent = 128,
     .windows = {.layers = WindowLayers::kUpper, .has_switch = true, .absent = 4096},
     .layer = {.qk_norm = true},
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kQwen3Vl,
     .name = "Qwen3-VL",
     .architecture = "Qwen3VLTextModel",
     .model_type = "qwen3_vl_text",
     .gguf_name = "qwen3vl",
     .vocab_absent = 151936,
     .heads_absent = 32,
     .positions_absent = 128000,
     .kv_heads_absent = 32,
     .head_dim_absent = 128,
     .rope_theta_absent = 500000.0,
     .has_image_positions = true,
     .layer = {.qk_norm = true},
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kSmolLM3,
     .name = "SmolLM3",
     .architecture = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .gguf_name = "smollm3",
     .gguf_interleaves = true,
     .kv_heads_absent = 4,
     .rope_theta_absent = 2000000.0,
     .tied_absent = true,
     .mlp_bias = Key::kHonoured,
     .windows = {.layers = WindowLayers::kUnrotated, .has_switch = true},
     .no_rope_interval = 4,
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kSeedOss,
     .name = "Seed-OSS",
     .architecture = "SeedOssForCausalLM",
     .model_type = "seed_oss",
     .gguf_name = "seed_oss",
     .kv_heads_absent = 8,
     .head_dim_absent = 128,
     .out_bias = ModelFamily::OutBias::kOwnKey,
     .mlp_bias = Key::kHonoured,
     .layer = {.qkv_bias = true},
     .tensors = &kSeedOssTensors},
    {.family = ModelConfig::Family::kGranite,
     .name = "Granite",
     .architecture = "GraniteForCausalLM",
     .model_type = "granite",
     .gguf_name = "granite",
     .gguf_interleaves = true,
     .mlp_bias = Key::kHonoured,
     .has_multipliers = true,
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kPhi3,
     .name = "Phi-3",
     .architecture = "Phi3ForCausalLM",
     .model_type = "phi3",
     .gguf_name = "phi3",
     .rms_norm_eps_absent = 1e-5,
     .original_positions_absent = 4096,
     .attention_bias = Key::kRefused,
     .windows = {.layers = WindowLayers::kAll},
     .rotates_in_part = true,
     .has_only_longrope = true,
     .tensors = &kPhi3Tensors},
    {.family = ModelConfig::Family::kGlm,
     .name = "GLM",
     .architecture = "GlmForCausalLM",
     .model_type = "glm",
     .gguf_name = "",
     .interleaves = true,
     .kv_heads_absent = 2,
     .head_dim_absent = 128,
     .rms_norm_eps_absent = 1.5625e-7,
     .out_bias = ModelFamily::OutBias::kNever,
     .rotates_in_part = true,
     .rotary_share_absent = 0.5,
     .layer = {.qkv_bias = true},
     .tensors = &kGlmTensors},
    {.family = ModelConfig::Family::kGlm4,
     .name = "GLM-4-0414",
     .architecture = "Glm4ForCausalLM",
     .model_type = "glm4",
     .gguf_name = "glm4",
     .interleaves = true,
     .gguf_interleaves = true,
     .kv_heads_absent = 2,
     .head_dim_absent = 128,
     .rms_norm_eps_absent = 1.5625e-7,
     .out_bias = ModelFamily::OutBias::kNever,
     .rotates_in_part = true,
     .rotary_share_absent = 0.5,
     .layer = {.norms = LayerSpec::Norms::kAround, .qkv_bias = true},
     .tensors = &kGlm4Tensors},
    {.family = ModelConfig::Family::kOlmo2,
     .name = "OLMo 2",
     .architecture = "Olmo2ForCausalLM",
     .model_type = "olmo2",
     .gguf_name = "olmo2",
     .rms_norm_eps_absent = 1e-5,
     .layer = {.norms = LayerSpec::Norms::kAfter, .qk_norm = true, .qk_norm_whole = true},
     .tensors = &kOlmo2Tensors},
    {.family = ModelConfig::Family::kOlmo3,
     .name = "OLMo 3",
     .architecture = "Olmo3ForCausalLM",
     .model_type = "olmo3",
     .gguf_name = "olmo2",
     .rms_norm_eps_absent = 1e-5,
     .rope_theta_absent = 500000.0,
     .windows = {.layers = WindowLayers::kAllBut, .absent = 4096, .but = 4},
     .has_rope_by_type = true,
     .layer = {.norms = LayerSpec::Norms::kAfter, .qk_norm = true, .qk_norm_whole = true},
     .tensors = &kOlmo2Tensors},
    {.family = ModelConfig::Family::kGemma3,
     .name = "Gemma 3",
     .architecture = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .gguf_name = "gemma3",
     .vocab_absent = 262208,
     .heads_absent = 8,
     .positions_absent = 131072,
     .kv_heads_absent = 4,
     .head_dim_absent = 256,
     .rope_theta_absent = 1000000.0,
     .tied_absent = true,
     .windows = {.layers = WindowLayers::kAllBut,
                 .absent = 4096,
                 .but = 6,
                 .but_key = "sliding_window_pattern"},
     .has_rope_by_type = true,
     .sliding_theta_key = "rope_local_base_freq",
     .gguf_sliding_theta_key = "rope.freq_base_swa",
     .sliding_theta_absent = 10000.0,
     .activation = "gelu_pytorch_tanh",
     .activation_key = "hidden_activation",
     .is_gemma = true,
     .layer = {.norms = LayerSpec::Norms::kAround,
               .mlp = LayerSpec::Mlp::kGatedGelu,
               .qk_norm = true},
     .tensors = &kGemma3Tensors},
    {.family = ModelConfig::Family::kExaone4,
     .name = "EXAONE 4",
     .architecture = "Exaone4ForCausalLM",
     .model_type = "exaone4",
     .gguf_name = "exaone4",
     .vocab_absent = 102400,
     .heads_absent = 32,
     .positions_absent = 2048,
     .kv_heads_absent = 32,
     .rms_norm_eps_absent = 1e-5,
     .attention_bias = Key::kRefused,
     .windows = {.layers = WindowLayers::kAllBut,
                 .absent = 4096,
                 .but = 4,
                 .but_key = "sliding_window_pattern"},
     .rotates_windows_only = true,
     .layer = {.norms = LayerSpec::Norms::kAfter, .qk_norm = true},
     .tensors = &kOlmo2Tensors},
    {.family = ModelConfig::Family::kErnie,
     .name = "ERNIE 4.5",
     .architecture = "Ernie4_5ForCausalLM",
     .model_type = "ernie4_5",
     .gguf_name = "ernie4_5",
     .interleaves = true,
     .gguf_interleaves = true,
     .kv_heads_absent = 2,
     .head_dim_absent = 128,
     .rms_norm_eps_absent = 1e-5,
     .rope_theta_absent = 500000.0,
     .tied_absent = true,
     .attention_bias = Key::kIgnored,
     .mlp_bias = Key::kIgnored,
     .all_biases = "use_bias",
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kErnieMoe,
     .name = "ERNIE 4.5 MoE",
     .architecture = "Ernie4_5_MoeForCausalLM",
     .model_type = "ernie4_5_moe",
     .gguf_name = "ernie4_5-moe",
     .interleaves = true,
     .gguf_interleaves = true,
     .vocab_absent = 103424,
     .heads_absent = 20,
     .positions_absent = 131072,
     .kv_heads_absent = 4,
     .rms_norm_eps_absent = 1e-5,
     .rope_theta_absent = 500000.0,
     .tied_absent = true,
     .attention_bias = Key::kIgnored,
     .mlp_bias = Key::kIgnored,
     .all_biases = "use_bias",
     .has_prediction_layers = true,
     .experts = &kErnieMoeExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts},
     .tensors = &kErnieMoeTensors},
    {.family = ModelConfig::Family::kMixtral,
     .name = "Mixtral",
     .architecture = "MixtralForCausalLM",
     .model_type = "mixtral",
     .gguf_name = "llama",
     .gguf_interleaves = true,
     .kv_heads_absent = 8,
     .rms_norm_eps_absent = 1e-5,
     .rope_theta_absent = 1000000.0,
     .attention_bias = Key::kRefused,
     .windows = {.layers = WindowLayers::kAll},
     .experts = &kMixtralExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts},
     .tensors = &kMixtralTensors},
    {.family = ModelConfig::Family::kMiniMaxM2,
     .name = "MiniMax-M2",
     .architecture = "MiniMaxM2ForCausalLM",
     .model_type = "minimax_m2",
     .gguf_name = "minimax-m2",
     .vocab_absent = 200064,
     .heads_absent = 48,
     .positions_absent = 196608,
     .kv_heads_absent = 8,
     .head_dim_absent = 128,
     .rope_theta_absent = 5000000.0,
     .attention_bias = Key::kRefused,
     .rotates_in_part = true,
     .experts = &kMiniMaxM2Experts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true, .qk_norm_whole = true},
     .tensors = &kMiniMaxM2Tensors},
    {.family = ModelConfig::Family::kQwen2Moe,
     .name = "Qwen2 MoE",
     .architecture = "Qwen2MoeForCausalLM",
     .model_type = "qwen2_moe",
     .gguf_name = "qwen2moe",
     .vocab_absent = 151936,
     .heads_absent = 16,
     .positions_absent = 32768,
     .kv_heads_absent = 16,
     .attention_bias_key = "qkv_bias",
     .out_bias = ModelFamily::OutBias::kNever,
     .windows = {.has_switch = true, .absent = 4096},
     .experts = &kQwen2MoeExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts, .qkv_bias = true},
     .tensors = &kQwen2MoeTensors},
    {.family = ModelConfig::Family::kQwen3Moe,
     .name = "Qwen3 MoE",
     .architecture = "Qwen3MoeForCausalLM",
     .model_type = "qwen3_moe",
     .gguf_name = "qwen3moe",
     .kv_heads_absent = 4,
     .windows = {.layers = WindowLayers::kAll, .has_switch = true, .absent = 4096},
     .experts = &kQwen3MoeExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true},
     .tensors = &kQwen3MoeTensors},
    {.family = ModelConfig::Family::kQwen3VlMoe,
     .name = "Qwen3-VL MoE",
     .architecture = "Qwen3VLMoeTextModel",
     .model_type = "qwen3_vl_moe_text",
     .gguf_name = "qwen3vlmoe",
     .vocab_absent = 151936,
     .heads_absent = 16,
     .positions_absent = 128000,
     .kv_heads_absent = 16,
     .rope_theta_absent = 500000.0,
     .has_image_positions = true,
     .experts = &kQwen3VlMoeExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true},
     .tensors = &kQwen3VlMoeTensors},
    {.family = ModelConfig::Family::kOlmoe,
     .name = "OLMoE",
     .architecture = "OlmoeForCausalLM",
     .model_type = "olmoe",
     .gguf_name = "olmoe",
     .vocab_absent = 50304,
     .heads_absent = 16,
     .positions_absent = 4096,
     .rms_norm_eps_absent = 1e-5,
     .experts = &kOlmoeExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true, .qk_norm_whole = true},
     .tensors = &kQwen3MoeTensors},
    {.family = ModelConfig::Family::kGraniteMoe,
     .name = "Granite MoE",
     .architecture = "GraniteMoeForCausalLM",
     .model_type = "granitemoe",
     .gguf_name = "granitemoe",
     .gguf_interleaves = true,
     .has_multipliers = true,
     .experts = &kGraniteMoeExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts},
     .tensors = &kGraniteMoeTensors},
    {.family = ModelConfig::Family::kGlm4Moe,
     .name = "GLM-4.5",
     .architecture = "Glm4MoeForCausalLM",
     .model_type = "glm4_moe",
     .gguf_name = "glm4moe",
     .vocab_absent = 151552,
     .heads_absent = 96,
     .positions_absent = 131072,
     .kv_heads_absent = 8,
     .rms_norm_eps_absent = 1e-5,
     .out_bias = ModelFamily::OutBias::kNever,
     .rotates_in_part = true,
     .rotary_share_absent = 0.5,
     .has_qk_norm_key = true,
     .has_prediction_layers = true,
     .experts = &kGlm4MoeExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts},
     .tensors = &kGlm4MoeTensors},
    {.family = ModelConfig::Family::kDots1,
     .name = "dots.llm1",
     .architecture = "Dots1ForCausalLM",
     .model_type = "dots1",
     .gguf_name = "dots1",
     .vocab_absent = 152064,
     .heads_absent = 32,
     .positions_absent = 2048,
     .kv_heads_absent = 32,
     .windows = {.layers = WindowLayers::kUpper, .absent = 4096, .upper_absent = 62},
     .experts = &kDots1Experts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts, .qk_norm = true},
     .tensors = &kDots1Tensors},
    {.family = ModelConfig::Family::kGptOss,
     .name = "gpt-oss",
     .architecture = "GptOssForCausalLM",
     .model_type = "gpt_oss",
     .gguf_name = "gpt-oss",
     .vocab_absent = 201088,
     .heads_absent = 64,
     .positions_absent = 131072,
     .kv_heads_absent = 8,
     .head_dim_absent = 64,
     .rms_norm_eps_absent = 1e-5,
     .rope_theta_absent = 150000.0,
     .windows = {.layers = WindowLayers::kAllBut, .absent = 128, .but = 2},
     .rope_absent = kGptOssRope,
     .yarn_truncates_in_gguf = false,
     .experts = &kGptOssExperts,
     .layer = {.mlp = LayerSpec::Mlp::kExperts,
               .qkv_bias = true,
               .o_bias = true,
               .mlp_bias = true,
               .sinks = true},
     .tensors = &kGptOssTensors},
}};

}  // namespace

std::span<const ModelFamily> ModelFamilies() { return kFamilies; }

const ModelFamily& FamilyOf(ModelConfig::Family family) {
  for (const ModelFamily& of : kFamilies) {
    if (of.family == family) return of;
  }
  WINNOW_CHECK(false);
  return kFamilies[0];
}

}  // namespace winnow::engine

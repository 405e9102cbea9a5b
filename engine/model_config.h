// config.json and generation_config.json of a Hugging Face model directory, checked.
#ifndef WINNOW_ENGINE_MODEL_CONFIG_H_
#define WINNOW_ENGINE_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"

namespace winnow::engine {

struct RopeScaling {
  enum class Kind { kNone, kLinear, kLlama3, kYarn };
  Kind kind = Kind::kNone;
  double factor = 1.0;
  // llama3
  double low_freq_factor = 1.0, high_freq_factor = 4.0;
  // llama3 and yarn: length the model was first trained at
  double original_max_position_embeddings = 0;
  // yarn
  double beta_fast = 32, beta_slow = 1;
  std::optional<double> attention_factor, mscale, mscale_all_dim;
  bool truncate = true;
};

struct ModelConfig {
  enum class Family { kLlama, kMistral, kQwen2, kQwen3 };
  Family family = Family::kLlama;
  std::string architecture;          // "LlamaForCausalLM"
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t num_layers = 0;
  int32_t num_heads = 0;             // H
  int32_t num_kv_heads = 0;          // Hkv, divides H
  int32_t head_dim = 0;              // d: 64, 80, 96 or 128
  int32_t vocab_size = 0;
  int32_t max_position_embeddings = 0;
  float rms_norm_eps = 0;
  double rope_theta = 0;
  RopeScaling rope_scaling;
  bool qkv_bias = false;             // Qwen2; Llama with attention_bias has o_bias too
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;              // Qwen3
  bool tie_word_embeddings = false;
  kernels::DType dtype = kernels::DType::kBF16;  // torch_dtype / dtype
  std::vector<int32_t> eos_token_ids;            // config.json and generation_config.json
  std::optional<int32_t> bos_token_id;
};

// Errors name the file and the key. Unimplemented: an architecture, activation, RoPE kind, sliding
// window or quantisation that winnow lacks, with the list of what it has. InvalidArgument: values
// that contradict each other or the limits.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir);

// inv_freq [head_dim/2] and the factor on cos and sin, as transformers computes them (float32).
struct RopeParameters {
  std::vector<float> inv_freq;
  float attention_factor = 1.0f;
};
RopeParameters ComputeRope(const ModelConfig& config);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_CONFIG_H_

#include "engine/model/model_family.h"

#include <array>

#include "kernels/check.h"

namespace winnow::engine {
namespace {

using Key = ModelFamily::Key;
using WindowKeys = ModelFamily::WindowKeys;

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

constexpr std::array<ModelFamily, 4> kFamilies = {{
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
     .window = WindowKeys::kDefaultOn,
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kQwen2,
     .name = "Qwen2",
     .architecture = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .gguf_name = "qwen2",
     .kv_heads_absent = 32,
     .attention_bias = Key::kIgnored,
     .window = WindowKeys::kSwitched,
     .layer = {.qkv_bias = true},
     .tensors = &kLlamaTensors},
    {.family = ModelConfig::Family::kQwen3,
     .name = "Qwen3",
     .architecture = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .gguf_name = "qwen3",
     .kv_heads_absent = 32,
     .head_dim_absent = 128,
     .window = WindowKeys::kSwitched,
     .layer = {.qk_norm = true},
     .tensors = &kLlamaTensors},
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

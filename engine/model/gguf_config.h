// The configuration of a model from the keys and tensors of a GGUF file.
//
// Architectures: "llama" (which Mistral's and SmolLM's files say, too), "qwen2", "qwen3", "smollm3", "seed_oss", "granite",
// "phi3", "ernie4_5", "mistral3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "olmoe", "granitemoe"; "llama" with experts is Mixtral. The file says the same as config.json does, in other words; biases and a tied output embedding show in which
// tensors there are. RoPE scaling is "rope.scaling.*" (linear, yarn), the tensor "rope_freqs.weight", which holds the
// outcome of llama3's, or "rope_factors_short.weight" and "rope_factors_long.weight", which are longrope's.
//
// Keys of the architecture that winnow does not know change the answer, as far as it knows: such a key is refused by
// name unless it is off (0 or false). So are a sliding window below the context's length in families that have none, scales of
// attention or logits but Granite's, experts of other architectures, experts that all tokens go to, other routers than a softmax's, and a file
// that is one of several.
//
// A model ends its turn with any of eos_token_id, eot_token_id, eom_token_id, and control tokens that are known by
// their text ("<|im_end|>", "<|eot_id|>", ...): files name one of a model's several in the keys, often. "<|end|>" is none
// of them beside "<|call|>", as in OpenAI's Harmony format.
#ifndef WINNOW_ENGINE_MODEL_GGUF_CONFIG_H_
#define WINNOW_ENGINE_MODEL_GGUF_CONFIG_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "engine/model/gguf.h"
#include "engine/model/model_config.h"

namespace winnow::engine {

// `name` stands for the file in errors, which name the key or tensor and its byte. `dtype` is that of the matrices
// where they all have the same plain type, else bfloat16.
// Unimplemented: an architecture, RoPE kind, head dimension or other key that winnow lacks, with the list of what it
// has. InvalidArgument: a key that is missing, of a wrong type or out of bounds. NotFound: no token embedding.
absl::StatusOr<ModelConfig> GgufModelConfig(const GgufContents& contents, std::string_view name);

// Token types of tokenizer.ggml.token_type.
enum class GgufTokenType : int32_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_GGUF_CONFIG_H_

// A model's tensors, memory-mapped and checked against its configuration.
#ifndef WINNOW_ENGINE_MODEL_WEIGHTS_H_
#define WINNOW_ENGINE_MODEL_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/model_config.h"
#include "engine/model/safetensors.h"
#include "kernels/backend.h"

namespace winnow::engine {

// Views into the mapped files; valid while the Weights live. A vector is a matrix of one row; an
// absent optional tensor has data == nullptr. Data may lie at any address:
// the format promises no alignment, and files of its first writers have none.
struct LayerWeights {
  kernels::HostMatrix attention_norm;          // [1][hidden]
  kernels::HostMatrix q, k, v;                 // [H*d][hidden], [Hkv*d][hidden] twice
  kernels::HostMatrix q_bias, k_bias, v_bias;  // [1][...], optional
  kernels::HostMatrix q_norm, k_norm;          // [1][d], optional
  kernels::HostMatrix o;                       // [hidden][H*d]
  kernels::HostMatrix o_bias;                  // optional
  kernels::HostMatrix mlp_norm;                // [1][hidden]
  kernels::HostMatrix gate, up;                // [intermediate][hidden]
  kernels::HostMatrix gate_bias, up_bias;      // optional
  kernels::HostMatrix down;                    // [hidden][intermediate]
  kernels::HostMatrix down_bias;               // optional
};

// Movable; moving keeps the views valid.
struct Weights {
  kernels::HostMatrix embedding;  // [vocab][hidden]
  std::vector<LayerWeights> layers;
  kernels::HostMatrix final_norm;  // [1][hidden]
  kernels::HostMatrix lm_head;     // [vocab][hidden]; the embedding when tied
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::vector<std::unique_ptr<std::byte[]>>
      realigned;  // copies of tensors that files of old writers misalign
};

// Opens model.safetensors, or else the shards that model.safetensors.index.json names. Every tensor
// the configuration needs must be there with its shape and a supported type (BF16, F16, F32; types
// may be mixed). Tensors it does not know are refused unless they are known leftovers (rotary
// inv_freq, a tied lm_head). The index and the shards must agree tensor by tensor.
// Errors name file, tensor and offset. NotFound: no weights, a shard or a tensor that is not there.
// Unimplemented: another type. InvalidArgument: everything else. Before all tensors are checked
// nothing is read but headers, and nothing is allocated but their contents.
absl::StatusOr<Weights> LoadWeights(const std::string& model_dir, const ModelConfig& config);

// What all tensors come to; a tied output embedding counts once.
struct WeightsSummary {
  int64_t parameters = 0;
  int64_t bytes = 0;  // as they lie in the files
  std::string dtype;  // of most values
};
WeightsSummary Summarize(const ModelConfig& config, const Weights& weights);

// A tensor that a configuration calls for.
struct TensorSpec {
  std::string name;  // "model.layers.0.self_attn.q_proj.weight"
  int64_t rows = 0;  // 0: a vector of `cols`
  int64_t cols = 0;
  enum class Role { kMatrix, kEmbedding, kNorm, kBias };
  Role role = Role::kMatrix;
  kernels::HostMatrix* matrix = nullptr;  // where in `weights` it belongs; null without weights
};

// All of them, in the order of the forward pass. With `weights` (whose layers are resized), says
// where each belongs.
std::vector<TensorSpec> ModelTensors(const ModelConfig& config, Weights* weights);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_WEIGHTS_H_

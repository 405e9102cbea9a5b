// A model's tensors, memory-mapped and checked against its configuration.
#ifndef WINNOW_ENGINE_WEIGHTS_H_
#define WINNOW_ENGINE_WEIGHTS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "kernels/backend.h"

namespace winnow::engine {

// Views into the mapped files; valid while the Weights live. A vector is a matrix of one row; an
// absent optional tensor has data == nullptr.
struct LayerWeights {
  kernels::HostMatrix attention_norm;               // [1][hidden]
  kernels::HostMatrix q, k, v;                      // [H*d][hidden], [Hkv*d][hidden] twice
  kernels::HostMatrix q_bias, k_bias, v_bias;       // [1][...], optional
  kernels::HostMatrix q_norm, k_norm;               // [1][d], optional
  kernels::HostMatrix o;                            // [hidden][H*d]
  kernels::HostMatrix o_bias;                       // optional
  kernels::HostMatrix mlp_norm;                     // [1][hidden]
  kernels::HostMatrix gate, up;                     // [intermediate][hidden]
  kernels::HostMatrix gate_bias, up_bias;           // optional
  kernels::HostMatrix down;                         // [hidden][intermediate]
  kernels::HostMatrix down_bias;                    // optional
};

struct Weights {
  kernels::HostMatrix embedding;                    // [vocab][hidden]
  std::vector<LayerWeights> layers;
  kernels::HostMatrix final_norm;                   // [1][hidden]
  kernels::HostMatrix lm_head;                      // [vocab][hidden]; the embedding when tied
  std::vector<std::unique_ptr<SafetensorsFile>> files;
};

// Opens model.safetensors, or the shards that model.safetensors.index.json names. Every tensor the
// configuration needs must be there with its shape and a supported type (BF16, F16, F32); tensors
// it does not know are refused unless they are known leftovers (rotary inv_freq, a tied lm_head).
// Errors name file, tensor and offset. Nothing is read but headers.
absl::StatusOr<Weights> LoadWeights(const std::string& model_dir, const ModelConfig& config);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_WEIGHTS_H_

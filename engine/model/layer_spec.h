// One layer of a model, described by data: all that the forward pass and the tensors of a layer depend on besides the
// model's sizes. A family's entry (model_family.h) has the layer that its models are made of, and the readers of
// config.json and of GGUF files add what a file says.
//
// More can be said here than is computed: CheckLayers refuses the rest by name, so that it is never computed as
// something else.
#ifndef WINNOW_ENGINE_MODEL_LAYER_SPEC_H_
#define WINNOW_ENGINE_MODEL_LAYER_SPEC_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"

namespace winnow::engine {

struct LayerSpec {
  enum class Norms : uint8_t {
    kBefore,  // attention and MLP read normed input
    kAfter,   // their output is normed instead
    kAround,  // both
  };
  bool NormsBefore() const { return norms != Norms::kAfter; }
  bool NormsAfter() const { return norms != Norms::kBefore; }
  enum class Mlp : uint8_t {
    kGatedSilu,  // down(silu(gate(x)) * up(x))
    kExperts,  // several of those, of which a router chooses for each token: down's outputs, weighed and added
    kGatedGelu,  // down(gelu(gate(x)) * up(x)), gelu by its tanh
  };
  static constexpr int32_t kNoRope = -1;

  int32_t window = 0;  // tokens that attention sees, the query's own included; 0: all before it
  int32_t rope = 0;    // set of ModelConfig::ropes, or kNoRope: Q and K are not rotated
  Norms norms = Norms::kBefore;
  Mlp mlp = Mlp::kGatedSilu;
  bool qk_norm = false;        // each head of Q and K is normed before it is rotated
  bool qk_norm_whole = false;  // with qk_norm: all heads of Q are normed as one, and those of K
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;  // of kExperts the router's, too
  bool sinks = false;     // attention has a learned logit of each query head in its denominator

  // Whether attention sees all tokens: a policy may choose among them then. Those of a window are few, and all read.
  bool SeesAll() const { return window == 0; }

  bool operator==(const LayerSpec&) const = default;
};

// Unimplemented, with the layer and the property: one that the forward pass does not compute. InvalidArgument: a RoPE set
// that is not there. `num_ropes`: sets that the model has.
absl::Status CheckLayers(std::span<const LayerSpec> layers, int32_t num_ropes);

// Rows of KV that queries at `position` and the next ones see together, over layers and KV heads.
uint64_t KvRowsSeen(std::span<const LayerSpec> layers, int32_t kv_heads, int32_t position,
                    int32_t num_queries = 1);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_LAYER_SPEC_H_

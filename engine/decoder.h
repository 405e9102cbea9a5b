// The Llama family's forward pass over paged KV: norm, project, rope, write KV, attend, project, mlp.
// Reads top to bottom in decoder.cc; every operation is a call of kernels::Backend.
#ifndef WINNOW_ENGINE_DECODER_H_
#define WINNOW_ENGINE_DECODER_H_

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model.h"
#include "engine/model_config.h"
#include "engine/weights.h"
#include "kernels/backend.h"

namespace winnow::engine {

struct DecoderOptions {
  kernels::DType compute = kernels::DType::kBF16;   // of matrix products; kF32 is exact
  kernels::DType kv_dtype = kernels::DType::kBF16;  // kBF16 or kF32
  int32_t block_tokens = 64;
  int64_t kv_bytes = 0;             // size of the KV pool; REQUIRES: at least one block of every layer
  int32_t max_batch_tokens = 512;   // tokens of one Forward
  int32_t max_batch_logits = 64;    // logits rows of one Forward
  int32_t max_context = 0;          // 0: the model's max_position_embeddings
};

class Decoder final : public Model {
 public:
  // Packs the weights and allocates every pool; nothing is allocated later.
  // ResourceExhausted: with bytes asked for and what for.
  static absl::StatusOr<std::unique_ptr<Decoder>> Create(const ModelConfig& config, const Weights& weights,
                                                         kernels::Backend& backend, const DecoderOptions& options);
  // (overrides of Model, and size_bytes of weights and KV for bench and metrics)
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_DECODER_H_

// Opens a model whole, a Hugging Face directory or a GGUF file: configuration, weights, tokenizer,
// chat template, backend, decoder. `serve`, `eval` and `bench` all start here, so that they agree on what a flag means.
#ifndef WINNOW_ENGINE_MODEL_LOADER_H_
#define WINNOW_ENGINE_MODEL_LOADER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/device.h"
#include "engine/decoder.h"
#include "engine/kv/kv_store.h"
#include "engine/model/model_config.h"
#include "engine/model/weights.h"
#include "engine/model_retrieval.h"
#include "engine/text/chat_template.h"
#include "engine/text/tokenizer.h"
#include "kernels/backend.h"

namespace winnow::engine {

// Up to this size of its weights, widened to f32, a bf16 model runs its products in f32. Logits of
// small models lie close together: rounding the inputs of products moves those of needle-5m by 0.03
// on average, and greedy decoding passes gaps of 0.007 within 32 tokens. Next to attention over a
// long context, the products of such a model cost little either way.
inline constexpr int64_t kExactModelBytes = int64_t{128} << 20;

struct ModelOptions {
  // "cpu" or "cuda". With "cuda" KV is bf16 and lies in the device's memory, or, with tiers.host_bytes,
  // in pinned memory of the host but for the first layers; a disk holds prefixes (mirrored
  // residency) or, with tiers.spill, all that is too much for that memory. kv_dtype f32, isa and
  // num_threads are refused by name, and so are row_cache_bytes without host_bytes, spill without
  // host_bytes and disk_bytes and, without spill, prefetch, kv_bytes beside host_bytes (with it: of the
  // first layers on the device) and disk_bytes without keep_prefixes.
  std::string device = "cpu";
  bool cuda_graphs = true;  // with "cuda": kernels::MakeCudaBackend's `graphs`
  // Of weights: "auto" (as config.json says), "bf16", "f16" (of float16 weights only), "f32"
  // (exact). With "bf16", what is multiplied with the weights is rounded to bf16 too if the model
  // is large, as that doubles the speed of prompts; small models (kExactModelBytes) keep it in f32.
  std::string dtype = "auto";
  // A name of WeightStorage, which says what it is.
  std::string weights = "wide";
  // "none", or a name of DraftWeightNames(): drafts of verified answers are computed with a second copy of the matrices in that
  // form (docs/exact.md).
  std::string draft_weights{kNoDraftWeights};
  std::string kv_dtype =
      "auto";                // "auto" (f32 if `dtype` comes out as f32, else bf16), "bf16", "f32"
  std::string isa = "auto";  // of InstructionSetNames()
  int num_threads = 0;       // 0: as many as the processors this process may use
  // Of KV alone, 0: enough for one sequence of max_context tokens. Indexes come on top.
  int64_t kv_bytes = 0;
  int32_t block_tokens = 64;
  int32_t max_batch_tokens = 512;
  int32_t max_batch_logits = 64;
  int32_t max_sequences = 0;  // of a step; 0: max_batch_logits
  int32_t max_context = 0;    // 0: the model's max_position_embeddings
  RetrievalFlags retrieval;
  TierFlags tiers;
  // Called once, when everything small has been read and checked and before weights are read.
  std::function<void(const ModelConfig&, const Weights&, const Tokenizer&)> on_opened;
  // As DecoderOptions::on_packing.
  std::function<void(size_t done, size_t total)> on_packing = {};
  // For tests: what the store that `tiers` make is wrapped in.
  std::function<std::unique_ptr<storage::BlockStore>(std::unique_ptr<storage::BlockStore>)>
      decorate_store;
};

// Everything of one model. Members are destroyed last to first, so the decoder goes before the
// backend that its memory comes from and before the files that its embedding is looked up in.
struct LoadedModel {
  std::string model_path;  // a directory, or a GGUF file
  ModelConfig config;
  Weights weights;
  std::unique_ptr<Tokenizer> tokenizer;
  ChatTemplate chat_template;
  std::unique_ptr<kernels::Backend> backend;
  DecoderOptions decoder_options;  // as they were resolved: no "auto" and no 0 left
  CrossoverReport crossover;       // where decoder_options.retrieval.from comes from
  TransformReport transform;       // of decoder_options.retrieval.transform
  KvStore store;                   // of slower tiers; empty without
  std::unique_ptr<Decoder> decoder;
};

// Errors are those of the parts, in the order in which nothing large is allocated before everything
// small has been checked: InvalidArgument (an option, by its flag's name), NotFound, Unimplemented,
// FailedPrecondition (the device, or a store that another process has), ResourceExhausted (with
// bytes asked for, and what for). `backend`: what MakeBackend(options) gave, for callers that tell a
// missing device from a bad model; null: made here.
absl::StatusOr<std::unique_ptr<LoadedModel>> LoadModel(
    const std::string& model_path, const ModelOptions& options,
    std::unique_ptr<kernels::Backend> backend = nullptr);

// The parts of LoadModel that do not need a directory; `bench --like` uses them for random weights.
// Without a directory there is no retrieval: its options stay empty, though bad flags are refused.
absl::StatusOr<DecoderOptions> ResolveDecoderOptions(const ModelConfig& config,
                                                     const ModelOptions& options);
// Whether the device computes in memory of its own, beside the host's.
inline bool HasDeviceMemory(const ModelOptions& options) {
  return DeviceOf(options.device).own_memory;
}
// FailedPrecondition: there is no such device that can be used, why, and what can be.
absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const ModelOptions& options);

// ResourceExhausted if the weights, the KV pool, the indexes and the summaries are more than the
// memory that is available to the backend. `copy_bytes`: what packing the weights takes of the host's
// memory for copies (PackingCopyBytes), before KV has its own. `weight_bytes`: KeptWeightBytes; absent: WeightBytes. The host's is taken lazily by the system: without this
// check a pool that does not fit would end the process in the middle of a request.
absl::Status CheckMemory(const ModelConfig& config, const DecoderOptions& options,
                         const KvPlan& plan, const kernels::Backend& backend,
                         int64_t copy_bytes = 0,
                         std::optional<int64_t> weight_bytes = std::nullopt);

// Memory that weights and draft weights take in the forms that the options say, with what the device needs beside them to
// multiply by them.
int64_t KeptWeightBytes(const ModelOptions& options, const DecoderOptions& resolved,
                        const Weights& weights);

// The forms of the weights (--weights) other than that of the options that the files and the device can have, and whose memory
// `fits`: their names.
std::vector<std::string> FormsThatFit(const ModelConfig& config, const ModelOptions& options,
                                      const Weights& weights,
                                      const std::function<bool(int64_t weight_bytes)>& fits);

// Bytes of all tensors, in this type.
int64_t WeightBytes(const ModelConfig& config, kernels::DType dtype);
// Bytes of experts among them.
int64_t ExpertWeightBytes(const ModelConfig& config, kernels::DType dtype);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_LOADER_H_

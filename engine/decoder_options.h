// Sizes, types and neighbours of a Decoder, as its creator decides them. Plain data.
#ifndef WINNOW_ENGINE_DECODER_OPTIONS_H_
#define WINNOW_ENGINE_DECODER_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "engine/kv/block_name.h"
#include "engine/kv/kv_plan.h"
#include "engine/model/model_config.h"
#include "engine/model/weight_storage.h"
#include "engine/retrieval/retrieval_options.h"
#include "engine/retrieval/row_fetcher.h"
#include "kernels/dtype.h"

namespace winnow::engine {

struct DecoderOptions {
  kernels::DType compute = kernels::DType::kBF16;  // of matrix products; kF32 is exact
  // REQUIRES: other than kWide, that the backend ComputesStored, and CheckWeightStorage.
  WeightStorage weights = WeightStorage::kWide;
  // A second copy of the matrices, in fewer bits, that drafts are computed with (docs/exact.md); absent: those of `weights`.
  // REQUIRES: not kWide and not `weights`; what `weights` requires.
  std::optional<WeightStorage> draft_weights = {};
  kernels::DType draft_compute = kernels::DType::kBF16;  // of products with it
  kernels::DType kv_dtype = kernels::DType::kBF16;       // not kF16
  int32_t block_tokens = 64;
  // Size of the KV pool: the frames of fast memory. REQUIRES: at least one block of every layer; with
  // a store, LeastFrames.
  int64_t kv_bytes = 0;
  // Blocks beyond those that the frames hold, kept in `store`. REQUIRES: 0 without one.
  int32_t lower_blocks = 0;
  storage::BlockStore* store = nullptr;  // of slower tiers, outlives the decoder; null: none
  bool write_through = false;            // KvMemoryOptions::write_through
  StoreNames names = {};
  int64_t host_bytes = 0;       // memory of the store
  RowFetcherOptions rows = {};  // the same, or the row cache of shared KV
  // Bytes of KV in the backend's shared memory, in all layers from FirstSharedLayer on; 0: all KV lies in one
  // memory. Unless it spills, what it holds is the number of blocks, kv_bytes is what the layers before
  // take on the device, and no store lies below. If it does, these are frames of those layers, as many as fit, and
  // kv_bytes, of the layers before, is the number of blocks.
  int64_t shared_kv_bytes = 0;
  int32_t max_batch_tokens = 512;   // tokens of one Forward
  int32_t max_batch_logits = 64;    // logits rows there are at once, at most max_batch_tokens
  int32_t max_sequences = 0;        // of one Forward; 0: max_batch_logits
  int32_t max_context = 0;          // 0: the model's max_position_embeddings
  RetrievalOptions retrieval = {};  // indexes beside the KV pool, and the artifact
  // REQUIRES: `store` wherever a decoder is made, unless kInPlace.
  ResidencyKind residency = ResidencyKind::kInPlace;
  // Called before the weights of each layer are read and packed, from the thread that does so, with
  // the number of layers done and of all. Empty: nobody asks.
  std::function<void(size_t done, size_t total)> on_packing = {};

  // KV in the host's memory is more than that holds, and goes on to a store.
  bool spills() const { return shared_kv_bytes > 0 && residency == ResidencyKind::kPaged; }
};

// InvalidArgument: an option out of range, by its name. Bytes are PlanKv's matter (kv_planning.h).
absl::Status CheckDecoderOptions(const ModelConfig& config, const DecoderOptions& options);
// The longest context: max_context, or the model's.
inline int32_t ContextOf(const ModelConfig& config, const DecoderOptions& options) {
  return options.max_context != 0 ? options.max_context : config.max_position_embeddings;
}

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_DECODER_OPTIONS_H_

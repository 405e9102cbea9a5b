// In which form a model's matrices are kept in memory, apart from the type that products compute with.
#ifndef WINNOW_ENGINE_MODEL_WEIGHT_STORAGE_H_
#define WINNOW_ENGINE_MODEL_WEIGHT_STORAGE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/weights.h"
#include "kernels/dtype.h"
#include "kernels/model_ops.h"

namespace winnow::engine {

enum class WeightStorage : uint8_t {
  kWide,    // plain values of the computing type; quantised blocks are widened while a model loads
  kStored,  // quantised blocks as the file has them, computed as they are; plain values as kWide
  kInt8,    // plain values rounded to blocks of 8 bits (Q8_0) while a model loads
  kInt4,    // the same to 4 bits (L4x32), but for the output embedding, which has 8
  kFloat8,  // the same to 8-bit floats (F8x128, or F8x32)
  kW8A8,  // the same to 8 bits (I8x128), for products that round the other side, too; but for the output embedding (Q8_0)
  kW4A8,  // the same to 4 bits (I8x128 from -8 to 7), the other side to 8
};

const char* WeightStorageName(
    WeightStorage storage);  // "wide", "stored", "int8", "int4", "fp8", "w8a8", "w4a8"
std::vector<std::string> WeightStorageNames();  // all of them, the default first

// InvalidArgument, by the option's name ("weights"), for another word.
absl::StatusOr<WeightStorage> ParseWeightStorage(std::string_view text);

// The forms that draft weights may have (docs/exact.md), "none" first: all but wide, which is never cheaper than another.
inline constexpr std::string_view kNoDraftWeights = "none";
std::vector<std::string> DraftWeightNames();
// nullopt: none. InvalidArgument, by the option's name ("draft_weights"), for another word, and for the form that answers have.
absl::StatusOr<std::optional<WeightStorage>> ParseDraftWeights(std::string_view text,
                                                               WeightStorage of_answers);
// As CheckWeightStorage, by the name "draft_weights". A file that has been rounded may be rounded once more: it is drafts that
// lose by it, and no answer.
absl::Status CheckDraftWeights(WeightStorage storage, const Weights& weights);

// Whether a model's file can be kept so: InvalidArgument if `storage` asks for quantised blocks and the file has none
// that it can lay out, for rounding and the file has been rounded already, or where rows are no multiple of 32 values.
absl::Status CheckWeightStorage(WeightStorage storage, const Weights& weights);

// Memory of all matrices and vectors in that form, a tied output embedding counted once; the pages of the file that
// embeddings are looked up in do not count. `bfloat16_blocks` is the Device's: with it 4-bit floats are packed as 8-bit ones.
int64_t StorageBytes(WeightStorage storage, const Weights& weights, kernels::DType compute,
                     bool bfloat16_blocks);

// Memory of draft weights: all matrices once more; routers and vectors are there already.
int64_t DraftWeightBytes(WeightStorage storage, const Weights& weights, kernels::DType compute,
                         bool bfloat16_blocks);

// Weights of experts among them: a row's step reads per_token of them in each layer.
int64_t ExpertStorageBytes(WeightStorage storage, const Weights& weights, kernels::DType compute,
                           bool bfloat16_blocks);

// Memory beside that of StorageBytes where a device widens blocks for products of many rows (Device::bfloat16_blocks): of the
// largest product's values in bfloat16, kWidenedBytesMax at most; what kernels of its own kind read as they are needs none, but that
// follows from the device. 0 for kWide.
inline constexpr int64_t kWidenedBytesMax = int64_t{128}
                                            << 20;  // kernels/cuda/cuda_backend_layer.cc
int64_t WideningBytes(WeightStorage storage, const Weights& weights);

// Parts of one product for Backend::PackStored; they point into the file or into `copies`.
struct StoredParts {
  std::vector<kernels::StoredMatrix> parts;
  std::vector<std::unique_ptr<std::byte[]>> copies;
};
// Whether such a product is computed with quantised blocks at all: else it is packed as kWide.
bool IsStored(WeightStorage storage, std::span<const WeightMatrix> parts);
// `is_output`: the output embedding. ResourceExhausted: no memory for copies. REQUIRES: IsStored, and that
// CheckWeightStorage was OK; values that are finite.
absl::StatusOr<StoredParts> StoredPartsOf(WeightStorage storage,
                                          std::span<const WeightMatrix> parts, bool is_output);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_MODEL_WEIGHT_STORAGE_H_

// What the flags of a model mean: the part of model_loader.h that opens no file.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/device.h"
#include "engine/base/status_macros.h"
#include "engine/kv/host_memory.h"
#include "engine/kv_planning.h"
#include "engine/model/weights.h"
#include "engine/model_loader.h"
#include "fmt/format.h"
#include "fmt/ranges.h"
#include "kernels/dtype.h"
#include "kernels/kv_layout.h"

namespace winnow::engine {
namespace {

using kernels::DType;

int64_t BytesOf(const TensorSpec& tensor, DType dtype) {
  // Norms, biases and routers are float32 (Decoder::Widen, PackRouter).
  const bool is_wide = tensor.rows == 0 || tensor.role == TensorSpec::Role::kRouter ||
                       tensor.role == TensorSpec::Role::kBias;
  return std::max<int64_t>(tensor.rows, 1) * tensor.cols *
         static_cast<int64_t>(kernels::DTypeBytes(is_wide ? DType::kF32 : dtype));
}

// Rows and pages on their way from a slower tier: half of it is 16,384 rows of 512 bytes, and the
// pages of as many reads as a disk takes at a time.
constexpr size_t kRowStagingBytes = size_t{16} << 20;
// With a GPU one query of a large model may want more than those: 2,192 rows of each of 8 heads.
constexpr size_t kRowStagingBytesOfSpill = size_t{64} << 20;

absl::StatusOr<DType> ResolveWeights(const ModelConfig& config, const std::string& text) {
  if (text == "auto") return config.dtype;
  if (text == "f32") return DType::kF32;
  if (text == "bf16") return DType::kBF16;
  if (text == "f16") {
    if (config.dtype == DType::kF16) return DType::kF16;
    return absl::InvalidArgumentError(
        fmt::format("dtype: f16 is for float16 weights; this model's are {}: use auto, bf16 or f32",
                    kernels::DTypeName(config.dtype)));
  }
  return absl::InvalidArgumentError(
      fmt::format("dtype: '{}' is not one of auto, bf16, f16, f32", text));
}

absl::StatusOr<DType> ResolveKv(DType weights, const std::string& text) {
  if (text == "auto") return weights == DType::kF32 ? DType::kF32 : DType::kBF16;
  if (text == "bf16") return DType::kBF16;
  if (text == "f32") return DType::kF32;
  if (text == "int8") return DType::kI8;
  if (text == "fp8") return DType::kF8;
  return absl::InvalidArgumentError(
      fmt::format("kv_dtype: '{}' is not one of auto, bf16, f32, int8, fp8", text));
}

// What a device cannot do is refused, by the flag's name: nothing runs elsewhere than was asked for.
absl::Status CheckDevice(const ModelOptions& options, DType kv) {
  if (FindDevice(options.device) == nullptr) {
    return absl::InvalidArgumentError(
        fmt::format("device: '{}' is not one of cpu, cuda", options.device));
  }
  if (!HasDeviceMemory(options)) {
    if (!options.tiers.spill) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "spill: is for --device cuda; with --device cpu KV always may be more than memory holds");
  }
  const auto refuse = [](std::string_view flag, std::string_view why) {
    return absl::InvalidArgumentError(
        fmt::format("{}: with --device cuda {}; --device cpu has it", flag, why));
  };
  if (options.tiers.spill && (options.tiers.host_bytes == 0 || options.tiers.disk_bytes == 0)) {
    return absl::InvalidArgumentError(
        "spill: with --device cuda KV goes from the host's memory to a disk: it needs host_bytes "
        "and "
        "disk_bytes");
  }
  if (options.tiers.disk_bytes != 0 && !options.tiers.keep_prefixes && !options.tiers.spill) {
    return refuse(
        "disk_bytes",
        "and without spill a disk holds prefixes and nothing else, and prefix_cache is off");
  }
  if (options.tiers.row_cache_bytes > 0 && options.tiers.host_bytes == 0) {
    return refuse("row_cache_bytes",
                  "the row cache is of KV in the host's memory: it needs host_bytes");
  }
  if (options.tiers.prefetch && !options.tiers.spill) {
    return refuse("prefetch", "rows are not read ahead without spill");
  }
  if (options.tiers.host_bytes != 0 && options.kv_bytes != 0 && !options.tiers.spill) {
    return absl::InvalidArgumentError(
        "kv_bytes: with --device cuda host_bytes says how much KV there is, and the device holds "
        "the first layers of the same blocks: leave one of them out");
  }
  if (kv != DType::kBF16 && !kernels::HasScales(kv)) {
    return refuse("kv_dtype", "KV is bf16, int8 or fp8: say which (auto follows --dtype f32)");
  }
  if (options.isa != "auto") return refuse("isa", "there is no instruction set to choose");
  if (options.num_threads != 0) return refuse("threads", "no threads of the host compute");
  return absl::OkStatus();
}

// A device's own memory holds every layer block, unless its host's memory spills; a processor's need not.
ResidencyKind ResidencyOf(const ModelOptions& options) {
  if (!HasDeviceMemory(options)) {
    return options.tiers.any() ? ResidencyKind::kPaged : ResidencyKind::kInPlace;
  }
  if (options.tiers.spill) return ResidencyKind::kPaged;
  return options.tiers.disk_bytes != 0 ? ResidencyKind::kMirrored : ResidencyKind::kInPlace;
}

}  // namespace

int64_t WeightBytes(const ModelConfig& config, DType dtype) {
  int64_t bytes = 0;
  for (const TensorSpec& tensor : ModelTensors(config, nullptr)) bytes += BytesOf(tensor, dtype);
  return bytes;
}

int64_t ExpertWeightBytes(const ModelConfig& config, DType dtype) {
  int64_t bytes = 0;
  for (const TensorSpec& tensor : ModelTensors(config, nullptr)) {
    if (tensor.num_experts > 0) bytes += BytesOf(tensor, dtype);
  }
  return bytes;
}

int64_t KeptWeightBytes(const ModelOptions& options, const DecoderOptions& resolved,
                        const Weights& weights) {
  const bool bfloat16_blocks = DeviceOf(options.device).bfloat16_blocks;
  int64_t bytes = StorageBytes(resolved.weights, weights, resolved.compute, bfloat16_blocks);
  int64_t widening = WideningBytes(resolved.weights, weights);
  if (resolved.draft_weights.has_value()) {
    bytes +=
        DraftWeightBytes(*resolved.draft_weights, weights, resolved.draft_compute, bfloat16_blocks);
    widening = std::max(widening, WideningBytes(*resolved.draft_weights, weights));
  }
  return bytes + (bfloat16_blocks ? widening : 0);
}

std::vector<std::string> FormsThatFit(const ModelConfig& config, const ModelOptions& options,
                                      const Weights& weights,
                                      const std::function<bool(int64_t weight_bytes)>& fits) {
  std::vector<std::string> forms;
  ModelOptions other = options;
  for (const std::string& name : WeightStorageNames()) {
    other.weights = name;
    const auto resolved = ResolveDecoderOptions(config, other);
    if (name != options.weights && resolved.ok() &&
        CheckWeightStorage(resolved->weights, weights).ok() &&
        fits(KeptWeightBytes(other, *resolved, weights))) {
      forms.push_back(name);
    }
  }
  return forms;
}

absl::Status CheckMemory(const ModelConfig& config, const DecoderOptions& options,
                         const KvPlan& plan, const kernels::Backend& backend, int64_t copy_bytes,
                         std::optional<int64_t> weight_bytes_or) {
  const int64_t of_device = backend.AvailableBytes();
  const bool on_host = of_device < 0;
  const std::optional<int64_t> available =
      on_host ? AvailableMemoryBytes() : std::optional(of_device);
  if (!available) return absl::OkStatus();
  const int64_t weight_bytes = weight_bytes_or.value_or(WeightBytes(config, options.compute));
  int64_t tier_bytes = options.host_bytes + plan.row_cache_bytes + plan.staging_bytes;
  if (plan.uses_host()) {
    // What the device takes is not the KV itself.
    tier_bytes = static_cast<int64_t>(backend.SizeSharedKv(plan.shared).total());
    const std::optional<int64_t> of_host = AvailableMemoryBytes();
    const int64_t row_bytes = plan.is_paged() ? plan.row_cache_bytes + plan.staging_bytes : 0;
    if (!on_host && of_host && options.shared_kv_bytes + row_bytes > *of_host) {
      return absl::ResourceExhaustedError(fmt::format(
          "{} bytes of the host's memory are available; KV in it (host_bytes) takes {}{}", *of_host,
          options.shared_kv_bytes,
          plan.is_paged() ? fmt::format(", and rows from the disk (row_cache_bytes) {}", row_bytes)
                          : ""));
    }
  }
  const std::optional<int64_t> for_copies =
      on_host ? std::optional(*available - weight_bytes) : AvailableMemoryBytes();
  if (copy_bytes > 0 && for_copies && copy_bytes > *for_copies) {
    return absl::ResourceExhaustedError(fmt::format(
        "{} bytes of the host's memory are available{}, and widening quantised weights takes {}",
        *for_copies, on_host ? fmt::format(" beside weights of {}", weight_bytes) : "",
        copy_bytes));
  }
  if (weight_bytes + options.kv_bytes + plan.index_bytes + plan.summary_bytes + tier_bytes <=
      *available) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(fmt::format(
      "{} bytes of memory are available{}; the weights take {}, the KV pool (kv_bytes) {}, the "
      "indexes beside it (index) {}, the summaries of completion (max_running) {}, and tiers "
      "(host_bytes, row_cache_bytes) {}{}",
      *available, on_host ? "" : " on " + backend.name(), weight_bytes, options.kv_bytes,
      plan.index_bytes, plan.summary_bytes, tier_bytes,
      on_host ? "" : "; --device cpu uses the host's memory"));
}

// Of KV that spills: what kv_bytes hold in the first layers, or enough for one sequence of the whole
// context and no fewer than host_bytes hold. All of them must find room on the disk.
absl::StatusOr<int64_t> BlocksOfSpill(const ModelConfig& config, const ModelOptions& options,
                                      const DecoderOptions& resolved,
                                      const kernels::KvLayout& layout) {
  const auto block_bytes = static_cast<int64_t>(layout.BlockBytes());
  const int64_t shared_layers = config.num_layers() - FirstSharedLayer();
  if (shared_layers <= 0) return 0;  // refused with the decoder's options
  TierFlags disk = options.tiers;
  disk.host_bytes = 0;
  const int64_t on_disk = LowerBlocks(disk, layout, config.num_layers(), 0);
  if (on_disk < 1) {
    return absl::InvalidArgumentError(fmt::format(
        "disk_bytes is {}: with spill all KV must find room there, and it has none for a "
        "block of {} tokens, {} bytes",
        options.tiers.disk_bytes, resolved.block_tokens, block_bytes * config.num_layers()));
  }
  if (options.kv_bytes != 0) {
    const int64_t blocks = options.kv_bytes / (block_bytes * FirstSharedLayer());
    if (blocks >= 1 && blocks <= on_disk) return blocks;
    return absl::InvalidArgumentError(fmt::format(
        "kv_bytes is {}: with spill it is of the first {} layers' KV on the device, and "
        "disk_bytes has room for the blocks of {} to {} bytes of that",
        options.kv_bytes, FirstSharedLayer(), block_bytes * FirstSharedLayer(),
        on_disk * block_bytes * FirstSharedLayer()));
  }
  const int64_t of_context =
      (int64_t{resolved.max_context} + resolved.block_tokens - 1) / resolved.block_tokens;
  const int64_t of_host = options.tiers.host_bytes / (block_bytes * shared_layers);
  return std::min(on_disk, std::max(of_context, of_host));
}

absl::StatusOr<DecoderOptions> ResolveDecoderOptions(const ModelConfig& config,
                                                     const ModelOptions& options) {
  DecoderOptions resolved;
  WINNOW_RETURN_IF_ERROR(CheckRetrievalFlags(options.retrieval));
  WINNOW_RETURN_IF_ERROR(CheckTierFlags(options.tiers));
  WINNOW_ASSIGN_OR_RETURN(DType weights, ResolveWeights(config, options.dtype));
  WINNOW_ASSIGN_OR_RETURN(resolved.weights, ParseWeightStorage(options.weights));
  const bool bfloat16_blocks =
      resolved.weights != WeightStorage::kWide && DeviceOf(options.device).bfloat16_blocks;
  if (bfloat16_blocks && options.dtype == "auto") weights = DType::kBF16;
  if (bfloat16_blocks && weights != DType::kBF16) {
    return absl::InvalidArgumentError(
        fmt::format("dtype: with --device {} products with quantised weights (weights is {}) are "
                    "in bfloat16: say auto or bf16; --device cpu has {}",
                    options.device, options.weights, options.dtype));
  }
  WINNOW_ASSIGN_OR_RETURN(resolved.kv_dtype, ResolveKv(weights, options.kv_dtype));
  WINNOW_RETURN_IF_ERROR(CheckDevice(options, resolved.kv_dtype));
  WINNOW_ASSIGN_OR_RETURN(resolved.draft_weights,
                          ParseDraftWeights(options.draft_weights, resolved.weights));
  resolved.compute = weights;
  if (weights == DType::kBF16 && config.dtype == DType::kBF16 && !bfloat16_blocks &&
      WeightBytes(config, DType::kF32) <= kExactModelBytes) {
    resolved.compute = DType::kF32;  // the weights are bf16 all the same: widening is exact
  }
  resolved.draft_compute =
      DeviceOf(options.device).bfloat16_blocks ? DType::kBF16 : resolved.compute;
  resolved.block_tokens = options.block_tokens;
  resolved.max_batch_tokens = options.max_batch_tokens;
  resolved.max_batch_logits = std::min(options.max_batch_logits, options.max_batch_tokens);
  resolved.max_sequences = options.max_sequences;
  resolved.max_context =
      options.max_context != 0 ? options.max_context : config.max_position_embeddings;
  resolved.kv_bytes = options.kv_bytes;
  resolved.residency = ResidencyOf(options);
  if (HasDeviceMemory(options) && options.tiers.host_bytes != 0 && resolved.block_tokens > 0) {
    const kernels::KvLayout layout{config.num_kv_heads, config.head_dim, resolved.block_tokens,
                                   resolved.kv_dtype};
    resolved.shared_kv_bytes = options.tiers.host_bytes;
    resolved.rows.cache_bytes = options.tiers.row_cache_bytes >= 0
                                    ? static_cast<size_t>(options.tiers.row_cache_bytes)
                                    : static_cast<size_t>(options.tiers.host_bytes) / 8;
    const int64_t first_layers_bytes = static_cast<int64_t>(layout.BlockBytes()) *
                                       std::min(config.num_layers(), FirstSharedLayer());
    if (!resolved.spills()) {
      resolved.kv_bytes = NumKvBlocks(config, resolved) * first_layers_bytes;
      return resolved;
    }
    resolved.rows.prefetch = options.tiers.prefetch;
    resolved.rows.staging_bytes = std::max(kRowStagingBytesOfSpill, 4 * layout.BlockBytes());
    WINNOW_ASSIGN_OR_RETURN(const int64_t blocks, BlocksOfSpill(config, options, resolved, layout));
    resolved.kv_bytes = blocks * first_layers_bytes;
    return resolved;
  }
  if (resolved.kv_bytes == 0 && resolved.block_tokens > 0) {
    const kernels::KvLayout layout{config.num_kv_heads, config.head_dim, resolved.block_tokens,
                                   resolved.kv_dtype};
    const int64_t blocks =
        (int64_t{resolved.max_context} + resolved.block_tokens - 1) / resolved.block_tokens;
    resolved.kv_bytes = blocks * static_cast<int64_t>(layout.BlockBytes()) * config.num_layers();
  }
  if (resolved.residency == ResidencyKind::kPaged && resolved.block_tokens > 0) {
    const kernels::KvLayout layout{config.num_kv_heads, config.head_dim, resolved.block_tokens,
                                   resolved.kv_dtype};
    resolved.lower_blocks = static_cast<int32_t>(std::min<int64_t>(
        LowerBlocks(options.tiers, layout, config.num_layers(), resolved.kv_bytes), INT32_MAX / 2));
    if (options.tiers.disk_bytes == 0 && resolved.lower_blocks == 0) {
      return absl::InvalidArgumentError(
          fmt::format("host_bytes is {}: without a disk it holds all KV, also what fast memory "
                      "holds, and has no room for a block beyond the {} bytes of that (kv_bytes): "
                      "ask for more of the one or less of the other",
                      options.tiers.host_bytes, resolved.kv_bytes));
    }
    resolved.rows.cache_bytes = options.tiers.row_cache_bytes >= 0
                                    ? static_cast<size_t>(options.tiers.row_cache_bytes)
                                    : static_cast<size_t>(resolved.kv_bytes) / 8;
    resolved.rows.prefetch = options.tiers.prefetch;
    resolved.host_bytes = options.tiers.host_bytes;
    resolved.rows.staging_bytes = std::max(kRowStagingBytes, 4 * layout.BlockBytes());
  }
  return resolved;
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const ModelOptions& options) {
  if (options.num_threads < 0 || options.num_threads > 1024) {
    return absl::InvalidArgumentError(
        fmt::format("threads: {} is not from 0 to 1024", options.num_threads));
  }
  const std::vector<std::string> isas = InstructionSetNames();
  if (std::find(isas.begin(), isas.end(), options.isa) == isas.end()) {
    return absl::InvalidArgumentError(
        fmt::format("isa: '{}' is not one of {}", options.isa, fmt::join(isas, ", ")));
  }
  if (HasDeviceMemory(options)) {
    std::string why;
    std::unique_ptr<kernels::Backend> cuda = kernels::MakeCudaBackend(options.cuda_graphs, &why);
    if (cuda != nullptr) return cuda;
    return absl::FailedPreconditionError(
        fmt::format("device: cuda: {}; --device cpu uses the processors", why));
  }
  std::unique_ptr<kernels::Backend> backend =
      kernels::MakeCpuBackend(options.isa, options.num_threads);
  if (backend == nullptr) {
    return absl::InvalidArgumentError(fmt::format("isa: this processor lacks {}", options.isa));
  }
  return backend;
}

}  // namespace winnow::engine

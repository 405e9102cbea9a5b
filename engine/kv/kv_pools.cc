#include "engine/kv/kv_pools.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/status_macros.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "storage/format.h"

namespace winnow::engine {

KvPools::KvPools(const KvMemoryOptions& options)
    : layout_(options.layout),
      num_layers_(options.num_layers),
      num_blocks_(options.num_blocks),
      num_frames_(options.num_frames),
      first_shared_(options.shared.first_layer),
      shared_batch_tokens_(options.shared.shape.max_batch_tokens),
      paged_(options.residency() == ResidencyKind::kPaged) {}

absl::StatusOr<std::unique_ptr<KvPools>> KvPools::Create(kernels::Backend& backend,
                                                         const KvMemoryOptions& options) {
  const bool paged = options.residency() == ResidencyKind::kPaged;
  WINNOW_CHECK(paged ? options.num_frames <= std::numeric_limits<int32_t>::max()
                     : options.num_frames == int64_t{options.num_layers} * options.num_blocks);
  std::unique_ptr<KvPools> pools(new KvPools(options));
  const bool shares = pools->first_shared_ < options.num_layers;
  WINNOW_RETURN_IF_ERROR(pools->AllocateDevice(backend, options));
  if (shares) WINNOW_RETURN_IF_ERROR(pools->AllocateShared(backend, options));
  if (options.store != nullptr && (!paged || shares)) {
    WINNOW_RETURN_IF_ERROR(pools->AllocateTransit(backend));
  }
  return pools;
}

absl::Status KvPools::AllocateDevice(kernels::Backend& backend, const KvMemoryOptions& options) {
  const int32_t device_layers = std::min(num_layers_, first_shared_);
  const bool shares = device_layers < num_layers_;
  const int64_t frames = shares ? int64_t{device_layers} * num_blocks_ : options.num_frames;
  const size_t bytes = static_cast<size_t>(frames) * block_bytes();
  device_ = backend.Allocate(bytes);
  if (device_.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for the KV pool: {} bytes in {} layers", bytes, device_layers));
  }
  frame_pool_ = device();
  if (!paged_) {
    own_layers_ = num_layers_;
  } else if (shares) {
    own_layers_ = device_layers;
    own_frames_ = static_cast<int32_t>(frames);
    WINNOW_CHECK(options.num_frames > own_frames_);
  }
  return absl::OkStatus();
}

absl::Status KvPools::AllocateShared(kernels::Backend& backend, const KvMemoryOptions& options) {
  const kernels::SharedKvShape& shape = options.shared.shape;
  const int32_t layers = num_layers_ - first_shared_;
  WINNOW_CHECK(shape.of_frames == paged_ && shape.num_pools == (paged_ ? 1 : layers) &&
               shape.num_blocks == (paged_ ? options.num_frames - own_frames_ : num_blocks_));
  const size_t bytes = static_cast<size_t>(shape.num_pools) * shape.num_blocks * block_bytes();
  const auto begin = std::chrono::steady_clock::now();
  shared_ = backend.AllocateShared(bytes);
  if (shared_.data() == nullptr) {
    return absl::ResourceExhaustedError(fmt::format(
        "no memory of the host that the device can read, for the KV of {} layers: {} bytes", layers,
        bytes));
  }
  pin_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::vector<std::byte*> pools;
  if (paged_) {
    // Frames of any layer, one pool: operations are told where a layer's blocks lie.
    frame_pool_ = static_cast<std::byte*>(shared_.data());
    pools.push_back(frame_pool_);
  } else {
    for (int32_t layer = first_shared_; layer < num_layers_; ++layer) {
      pools.push_back(LayerPool(layer));
    }
  }
  std::string why;
  shared_kv_ = backend.ShareKv(shape, pools, &why);
  if (shared_kv_ != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format("KV in the host's memory: {}", why));
}

absl::Status KvPools::AllocateTransit(kernels::Backend& backend) {
  const size_t block_pages = (block_bytes() + storage::kPageBytes - 1) / storage::kPageBytes;
  const size_t bytes = std::max({kLoadBytesInFlight, block_pages * storage::kPageBytes,
                                 kPagesInFlight * storage::kPageBytes});
  incoming_ = backend.AllocateShared(bytes);
  outgoing_ = backend.AllocateShared(bytes);
  if (incoming_.data() != nullptr && outgoing_.data() != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      fmt::format("no memory for KV on its way: {} bytes", 2 * bytes));
}

}  // namespace winnow::engine

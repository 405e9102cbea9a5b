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

KvPools::KvPools(const KvPlan& plan)
    : layout_(plan.layout),
      num_blocks_(plan.num_blocks),
      num_frames_(plan.num_frames),
      shared_batch_tokens_(plan.shared.max_batch_tokens),
      layers_(plan.layers.size()) {
  for (int32_t layer = 0; layer < plan.num_layers(); ++layer) {
    WINNOW_CHECK(plan.layers[layer].dtype == layout_.dtype);  // one layout for all, so far
    const KvPlacement placement = plan.layers[layer].placement;
    layers_[layer].shared = IsOnHost(placement);
    if (engine::HasPlaces(placement)) layers_with_places_.push_back(layer);
  }
}

absl::StatusOr<std::unique_ptr<KvPools>> KvPools::Create(kernels::Backend& backend,
                                                         const KvPlan& plan) {
  WINNOW_CHECK(!plan.is_paged() || plan.num_frames <= std::numeric_limits<int32_t>::max());
  std::unique_ptr<KvPools> pools(new KvPools(plan));
  WINNOW_RETURN_IF_ERROR(pools->AllocateDevice(backend, plan));
  if (plan.uses_host()) WINNOW_RETURN_IF_ERROR(pools->AllocateShared(backend, plan));
  // The store reads and writes frames of the host where they are.
  const bool has_store = plan.residency != ResidencyKind::kInPlace;
  if (has_store && (!plan.is_paged() || !pools->layers_with_places_.empty())) {
    WINNOW_RETURN_IF_ERROR(pools->AllocateTransit(backend));
  }
  if (has_store) WINNOW_RETURN_IF_ERROR(pools->AllocateFetched(backend));
  return pools;
}

absl::Status KvPools::AllocateDevice(kernels::DeviceOps& backend, const KvPlan& plan) {
  const auto bytes = static_cast<size_t>(plan.fast_bytes);
  device_ = backend.Allocate(bytes);
  if (device_.data() == nullptr) {
    return absl::ResourceExhaustedError(fmt::format(
        "no memory for the KV pool: {} bytes in {} layers", bytes, plan.NumFastLayers()));
  }
  std::byte* next = device();
  for (const int32_t layer : layers_with_places_) {
    if (IsShared(layer)) continue;
    layers_[layer].places = next;
    next += LayerPoolBytes();
  }
  frame_pool_ = next;  // unless frames lie in shared memory
  if (plan.is_paged()) {
    own_frames_ = plan.NumLayersAt(KvPlacement::kFast) * num_blocks_;
    WINNOW_CHECK(plan.num_frames > own_frames_);
  }
  return absl::OkStatus();
}

absl::Status KvPools::AllocateShared(kernels::Backend& backend, const KvPlan& plan) {
  const auto bytes = static_cast<size_t>(plan.host_bytes);
  const auto begin = std::chrono::steady_clock::now();
  shared_ = backend.AllocateShared(bytes);
  if (shared_.data() == nullptr) {
    return absl::ResourceExhaustedError(fmt::format(
        "no memory of the host that the device can read, for the KV of {} layers: {} bytes",
        plan.num_layers() - plan.NumFastLayers(), bytes));
  }
  pin_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::byte* next = static_cast<std::byte*>(shared_.data());
  std::vector<std::byte*> pools;
  if (plan.shared.of_frames) {
    // Frames of any layer, one pool: operations are told where a layer's blocks lie.
    frame_pool_ = next;
    pools.push_back(next);
  }
  for (const int32_t layer : layers_with_places_) {
    if (!IsShared(layer)) continue;
    layers_[layer].places = next;
    pools.push_back(next);
    next += LayerPoolBytes();
  }
  std::string why;
  shared_kv_ = backend.ShareKv(plan.shared, pools, &why);
  if (shared_kv_ != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format("KV in the host's memory: {}", why));
}

absl::Status KvPools::AllocateTransit(kernels::DeviceOps& backend) {
  const size_t block_pages = (block_bytes() + storage::kPageBytes - 1) / storage::kPageBytes;
  const size_t bytes = std::max({kLoadBytesInFlight, block_pages * storage::kPageBytes,
                                 kPagesInFlight * storage::kPageBytes});
  incoming_ = backend.AllocateShared(bytes);
  outgoing_ = backend.AllocateShared(bytes);
  if (incoming_.data() != nullptr && outgoing_.data() != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      fmt::format("no memory for KV on its way: {} bytes", 2 * bytes));
}

absl::Status KvPools::AllocateFetched(kernels::DeviceOps& backend) {
  const size_t bytes = std::max(kFetchedBytes, block_bytes());
  fetched_ = backend.AllocateShared(bytes);
  if (fetched_.data() != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(fmt::format("no memory for KV on its way: {} bytes", bytes));
}

}  // namespace winnow::engine

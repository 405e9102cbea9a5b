// The memory that KV lies in, and its addresses: nothing here knows what lies where.
//
//   device pool   places of the layers in the backend's own memory, then frames that the others share
//   shared pool   places of the other layers, or frames that they share, in the backend's shared memory
//   transit       KV on its way between the store and memory that the host cannot reach
//
// A place is the memory that a layer block has to itself: the layer's pool at the block's number. A
// frame holds the layer block that it was given last (paged residency, in layers without places).
// Which layer has which is the plan's matter: they may lie in any order.
//
// Threads: the engine thread only, but for construction.
#ifndef WINNOW_ENGINE_KV_KV_POOLS_H_
#define WINNOW_ENGINE_KV_KV_POOLS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kv/kv_plan.h"
#include "kernels/backend.h"

namespace winnow::engine {

class KvPools {
 public:
  // Bytes of whole layer blocks that are read together: enough to keep a disk busy, and little enough
  // for one read's deadline.
  static constexpr size_t kLoadBytesInFlight = size_t{32} << 20;
  // Single pages that are read together. Their bytes are fewer, because each is a read of its own at worst.
  static constexpr size_t kPagesInFlight = 2048;
  // Bytes of whole layer blocks that are read between passes.
  static constexpr size_t kFetchedBytes = size_t{8} << 20;

  // ResourceExhausted: no memory, with the bytes. `backend` outlives the pools.
  static absl::StatusOr<std::unique_ptr<KvPools>> Create(kernels::Backend& backend,
                                                         const KvPlan& plan);

  const kernels::KvLayout& layout() const { return layout_; }
  int32_t num_layers() const { return static_cast<int32_t>(layers_.size()); }
  int32_t num_blocks() const { return num_blocks_; }
  size_t block_bytes() const { return layout_.BlockBytes(); }  // of a layer block
  size_t size_bytes() const { return device_.size_bytes() + shared_.size_bytes(); }
  size_t shared_bytes() const { return shared_.size_bytes(); }
  // Time that making the shared pool took.
  double pin_seconds() const { return pin_seconds_; }
  // All memory of KV: the device's, and what is shared.
  std::array<std::span<std::byte>, 2> all() const {
    return {std::span(device(), device_.size_bytes()),
            std::span(static_cast<std::byte*>(shared_.data()), shared_.size_bytes())};
  }

  // Whether the layer lies in shared memory. Reading it counts as reading the host's tier.
  bool IsShared(int32_t layer) const { return layers_[layer].shared; }
  // Operations on KV in shared memory; null: no layer lies there.
  kernels::SharedKv* shared_kv() const { return shared_kv_.get(); }
  int32_t shared_batch_tokens() const { return shared_batch_tokens_; }

  // Whether the layer has a place for each of its blocks, as all have unless paged.
  bool HasPlaces(int32_t layer) const { return layers_[layer].places != nullptr; }
  // The layer's places, one behind the other. REQUIRES: HasPlaces(layer).
  std::byte* LayerPool(int32_t layer) const { return layers_[layer].places; }
  size_t LayerPoolBytes() const { return block_bytes() * num_blocks_; }
  std::byte* Place(int32_t layer, int32_t block) const {
    return LayerPool(layer) + block * block_bytes();
  }

  // Paged: frames [0, own_frames()) are the places of those layers that have them, in their order; the others are
  // shared by the layers that have none.
  std::span<const int32_t> layers_with_places() const { return layers_with_places_; }
  int32_t own_frames() const { return own_frames_; }
  int64_t num_frames() const { return num_frames_; }
  std::byte* own_pool() const { return device(); }
  std::byte* frame_pool() const { return frame_pool_; }  // begins with frame own_frames()
  std::byte* Frame(int32_t frame) const {
    return frame < own_frames_
               ? device() + static_cast<size_t>(frame) * block_bytes()
               : frame_pool_ + static_cast<size_t>(frame - own_frames_) * block_bytes();
  }

  // Transit, in shared memory; empty where the store reads and writes all KV where it lies.
  std::span<std::byte> incoming() const { return Bytes(incoming_); }
  std::span<std::byte> outgoing() const { return Bytes(outgoing_); }
  // Whole layer blocks that are fetched between passes, of any layer; empty without a store.
  std::span<std::byte> fetched() const { return Bytes(fetched_); }

 private:
  struct Layer {
    std::byte* places = nullptr;  // null: it shares frames
    bool shared = false;
  };

  explicit KvPools(const KvPlan& plan);
  absl::Status AllocateDevice(kernels::DeviceOps& backend, const KvPlan& plan);
  absl::Status AllocateShared(kernels::Backend& backend, const KvPlan& plan);
  absl::Status AllocateTransit(kernels::DeviceOps& backend);
  absl::Status AllocateFetched(kernels::DeviceOps& backend);
  std::byte* device() const { return static_cast<std::byte*>(device_.data()); }
  static std::span<std::byte> Bytes(const kernels::Buffer& buffer) {
    return {static_cast<std::byte*>(buffer.data()), buffer.size_bytes()};
  }

  const kernels::KvLayout layout_;
  const int32_t num_blocks_;
  const int64_t num_frames_;
  const int32_t shared_batch_tokens_;
  std::vector<Layer> layers_;
  std::vector<int32_t> layers_with_places_;
  int32_t own_frames_ = 0;
  kernels::Buffer device_, shared_, incoming_, outgoing_, fetched_;
  std::unique_ptr<kernels::SharedKv> shared_kv_;
  std::byte* frame_pool_ = nullptr;
  double pin_seconds_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_POOLS_H_

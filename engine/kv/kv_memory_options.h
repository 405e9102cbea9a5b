// Sizes and neighbours of a KvMemory, as its creator decides them, and its counters.
#ifndef WINNOW_ENGINE_KV_KV_MEMORY_OPTIONS_H_
#define WINNOW_ENGINE_KV_KV_MEMORY_OPTIONS_H_

#include <cstdint>
#include <limits>

#include "engine/kv/block_name.h"
#include "kernels/backend.h"
#include "storage/block_store.h"

namespace winnow::engine {

enum class ResidencyKind : uint8_t {
  kInPlace,   // every layer block has its place, and there is no store
  kMirrored,  // the same, with copies of what is to be kept in a store
  kPaged,     // more layer blocks than frames: the store has those that have none
};

struct KvMemoryOptions {
  kernels::KvLayout layout;
  int32_t num_layers = 0;
  int32_t num_blocks = 0;
  int64_t num_frames = 0;                // num_layers * num_blocks unless paged
  storage::BlockStore* store = nullptr;  // outlives the memory; nobody else calls it
  bool own_frames = false;               // mirrored: the store lies beside the frames, not below
  // Saves every block that is to be kept as soon as it is full, not only when frames get scarce.
  bool write_through = false;
  StoreNames names = {};
  // Layers [shared.first_layer, num_layers) lie in the backend's shared memory. Paged, num_frames
  // counts a frame for each layer block of the layers before, and then those that the others share.
  struct Shared {
    int32_t first_layer = std::numeric_limits<int32_t>::max();
    kernels::SharedKvShape shape = {};  // paged, of_frames
  };
  Shared shared = {};

  ResidencyKind residency() const {
    if (store == nullptr) return ResidencyKind::kInPlace;
    return own_frames ? ResidencyKind::kMirrored : ResidencyKind::kPaged;
  }
};

// Counts since the start.
struct KvMemoryStats {
  uint64_t saved_pieces = 0;
  uint64_t save_failures = 0;
  uint64_t loaded_pieces = 0;  // whole layer blocks
  uint64_t loaded_bytes = 0;
  uint64_t evicted_frames = 0;
  uint64_t lost_pieces = 0;  // the store had them and gave them back no more
  uint64_t waits = 0;        // times that a pass waited for the store to take or give layer blocks
  uint64_t wait_ns = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_MEMORY_OPTIONS_H_

// Neighbours of a KvMemory, beside its plan (kv_plan.h), and its counters.
#ifndef WINNOW_ENGINE_KV_KV_MEMORY_OPTIONS_H_
#define WINNOW_ENGINE_KV_KV_MEMORY_OPTIONS_H_

#include <cstdint>

#include "engine/kv/block_name.h"
#include "storage/block_store.h"

namespace winnow::engine {

struct KvMemoryOptions {
  storage::BlockStore* store = nullptr;  // outlives the memory; nobody else calls it
  // Saves every block that is to be kept as soon as it is full, not only when frames get scarce.
  bool write_through = false;
  StoreNames names = {};
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

// The store of slower tiers that a model's KV moves to, made from flags: host memory, disk, or both
// (storage/ has the parts; KvMemory uses them).
#ifndef WINNOW_ENGINE_KV_KV_STORE_H_
#define WINNOW_ENGINE_KV_KV_STORE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/kv_layout.h"
#include "storage/block_store.h"
#include "storage/clock.h"

namespace winnow::engine {

struct TierFlags {
  int64_t host_bytes = 0;      // of memory below the KV pool; 0: none. With a GPU: pinned
  int64_t disk_bytes = 0;      // of files in store_dir; 0: none
  std::string store_dir = {};  // created if missing; one process at a time
  std::string io = "auto";     // "auto", "uring", "threads"
  bool prefetch = false;       // rows of the next layer, predicted (docs/tiers.md)
  // With a GPU: KV of what runs may be more than host_bytes hold; the disk has the rest. Every layer that
  // retrieves waits for the host then. On a CPU it always may.
  bool spill = false;
  bool keep_prefixes = true;  // on disk, for later requests and after a restart
  // Rows read from slower tiers; -1: an eighth of kv_bytes, with a GPU of host_bytes.
  int64_t row_cache_bytes = -1;
  std::chrono::nanoseconds read_deadline{0};          // for a read of the disk; 0: the store's own
  bool strict_store = false;                          // refuses a store_dir that others may write
  std::function<void(const std::string&)> log = {};   // one line per event of the store
  std::function<void(const std::string&)> warn = {};  // the same, of trouble

  bool any() const { return host_bytes != 0 || disk_bytes != 0; }
};

// InvalidArgument names the flag.
absl::Status CheckTierFlags(const TierFlags& flags);

struct KvStore {
  std::unique_ptr<storage::SystemClock> clock;
  std::unique_ptr<storage::BlockStore> store;
  std::string description;  // one line for the log
};

// Null `store` without tiers. Errors: what opening the directory gives, except that a full file system is
// none: the store is off then, and opens by itself when there is room.
absl::StatusOr<KvStore> OpenKvStore(const TierFlags& flags, const kernels::KvLayout& layout);

// Blocks of `num_layers` layers that can be held with the tiers, beyond those that fast memory of
// `kv_bytes` holds alone. The tiers hold those as well: 0 where they are no larger than fast memory.
int64_t LowerBlocks(const TierFlags& flags, const kernels::KvLayout& layout, int32_t num_layers,
                    int64_t kv_bytes);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_STORE_H_

// An operator's commands for a store's directory: look, check, repair, clean up. Behind `winnow
// store`. These wait for the disk; none is for a serving process.
#ifndef WINNOW_STORAGE_MAINTENANCE_H_
#define WINNOW_STORAGE_MAINTENANCE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/disk_store.h"
#include "storage/erase_log.h"

namespace winnow::storage {

struct MaintenanceOptions {
  std::string directory;
  // A read that takes longer is given up, and with it the rest of its segment.
  int64_t read_deadline_ns = int64_t{30} * 1'000'000'000;
  std::function<void(const std::string&)> log;  // Repair and CollectGarbage; may be empty
};

// The contents of a store, and with VerifyStore whether it is sound. One line for each finding, up to a
// hundred.
struct StoreInspection {
  std::string owner;  // of a process that has the store open; empty: none, or it cannot be told
  // Files.
  uint64_t segments = 0;
  uint64_t sealed_segments = 0;
  uint64_t unsound_segments = 0;  // without a sound header: deleted at the next start
  uint64_t file_bytes = 0;        // of all segments
  uint64_t segment_bytes = 0;     // capacity of the largest segment
  // Blocks that the index has.
  std::string index_error;  // it cannot be read: the next start rebuilds it from the segments
  uint64_t blocks = 0;
  uint64_t live_bytes = 0;     // of files: headers and padding included
  uint64_t payload_bytes = 0;  // of blocks
  uint64_t pinned_blocks = 0;
  uint64_t pinned_bytes = 0;
  uint64_t expiring_blocks = 0;  // with a time to live
  std::array<uint64_t, kPriorityMax + 1> blocks_by_priority = {};
  uint64_t dangling_entries =
      0;  // undecodable, or without a sound place: dropped at the next start
  // The list of erased blocks.
  EraseLog::Found erase_log = EraseLog::Found::kMissing;
  uint64_t erasures = 0;
  // Only VerifyStore:
  uint64_t checked_blocks = 0;
  uint64_t corrupt_blocks = 0;
  uint64_t unreadable_blocks = 0;  // the device says no
  uint64_t unchecked_blocks = 0;   // in segments whose reads do not come back
  std::vector<std::string> findings;
  uint64_t finding_count = 0;

  // Nothing was found that a start or a read would drop.
  bool sound() const { return finding_count == 0; }
};

// Reads headers and the index; writes nothing and takes no lock, so it may look at a store that is
// being served: counts are then of a moment, and what moves meanwhile may show as dangling.
// NotFound: there is no store. Others: the directory cannot be read.
absl::StatusOr<StoreInspection> StatStore(const MaintenanceOptions& options);

// Reads every block, too, and checks it as a Get would; writes nothing. Holds the store's lock, so
// that nothing moves. FailedPrecondition: a process has it open. `clock` is for the deadline.
absl::StatusOr<StoreInspection> VerifyStore(const MaintenanceOptions& options, const Clock* clock);

struct RepairReport {
  RecoveryReport recovery;  // what opening found and did
  VerifyReport verify;      // unsound blocks are forgotten
  uint64_t blocks = 0;      // afterwards
  uint64_t used_bytes = 0;  // the files' lengths, closed
};
// Opens the store as a server would (rebuilding what must be), reads every block and forgets those
// that are not sound. Evicts nothing, whatever the configured capacity. Statuses of
// DiskStore::Open, and NotFound.
absl::StatusOr<RepairReport> RepairStore(const MaintenanceOptions& options, const Clock* clock);

struct CollectReport {
  RecoveryReport recovery;
  GcReport gc;
  uint64_t blocks = 0;
  uint64_t used_bytes = 0;
};
// Opens the store, drops expired blocks and empties segments that are less than `live_min` live.
// 1: every byte that is not of a live block goes from the files, erased blocks included.
absl::StatusOr<CollectReport> CollectStore(const MaintenanceOptions& options, double live_min,
                                           const Clock* clock);

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_MAINTENANCE_H_

// The options with which a DiskStore is opened.
#ifndef WINNOW_STORAGE_DISK_OPTIONS_H_
#define WINNOW_STORAGE_DISK_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/file_system.h"
#include "storage/index.h"
#include "storage/ring.h"
#include "storage/tier_health.h"

namespace winnow::storage {

struct DiskStoreOptions {
  std::string directory;                        // created (0700) if missing, its parent must exist
  uint64_t capacity_bytes = uint64_t{8} << 30;  // of segment files; the index comes on top
  uint64_t segment_bytes = uint64_t{64} << 20;
  uint64_t staging_bytes = uint64_t{64} << 20;            // buffers for I/O, allocated at start
  uint32_t operations_max = 4096;                         // in flight; more are kBusy
  int64_t read_deadline_ns = int64_t{2} * 1'000'000'000;  // for Gets that bring none
  // Also how long maintenance waits for a read before it leaves that segment.
  int64_t write_deadline_ns = int64_t{30} * 1'000'000'000;
  // Real time, whatever the clock says. A disk that answers nothing for so long while it is opened
  // is given up; so are, after the second, requests in flight at destruction.
  int64_t open_stall_ns = int64_t{30} * 1'000'000'000;
  int64_t close_limit_ns = int64_t{5} * 1'000'000'000;
  TierHealthOptions health;
  IoEngineOptions io;
  std::function<void(const std::string&)> log;  // one line per event worth an operator's eye
  // The same for trouble, with directory, bytes and what follows; empty: `log` has it.
  std::function<void(const std::string&)> warn;
  // A directory that others may write, or that is another user's, is refused; otherwise it is a warning.
  bool strict = false;

  // Parts that tests replace or watch; production leaves them alone.
  struct Seams {
    std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)> decorate_engine;
    std::function<absl::StatusOr<std::unique_ptr<IndexDb>>(const std::string&)> open_index;
    FileSystem* files = nullptr;                    // not owned
    std::function<void(const char* point)> passed;  // named points of the commit and reclaim order
    // By which a hung opening is told from a slow one; on the thread that calls Open.
    std::function<std::chrono::steady_clock::time_point()> steady_now =
        std::chrono::steady_clock::now;
  } seams;

  // InvalidArgument naming the field: capacity at least four segments; a segment 16 pages to 4 GiB,
  // in whole pages; staging at least 1 MiB; …
  absl::Status Validate() const;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_DISK_OPTIONS_H_

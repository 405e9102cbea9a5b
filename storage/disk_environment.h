// Shared by the parts of a DiskStore: options, clock, files and ring; the store's own time; health, counters
// and log. It decides nothing and calls no part.
//
// Life cycle   Made with the store. `ring` and `direct` come when the directory is open, before any other part runs.
// Ownership    Owns the ring and, unless a test brings its own, the file system. The clock outlives it.
// Threads      One at a time, the store's; only Log, Warn and CountStep may meet the thread that waits for Open.
#ifndef WINNOW_STORAGE_DISK_ENVIRONMENT_H_
#define WINNOW_STORAGE_DISK_ENVIRONMENT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "storage/block_store.h"
#include "storage/clock.h"
#include "storage/disk_options.h"
#include "storage/file_system.h"
#include "storage/mutex.h"
#include "storage/ring.h"
#include "storage/tier_health.h"

namespace winnow::storage {

class DiskEnvironment {
 public:
  // Shared with the thread that waits until the store is open.
  struct Opening {
    Mutex mutex;
    bool abandoned ABSL_GUARDED_BY(mutex) = false;  // the log is not called any more
    std::atomic<uint64_t> steps = 0;                // answers of the disk
  };

  DiskEnvironment(DiskStoreOptions options, const Clock* clock, std::shared_ptr<Opening> opening);
  DiskEnvironment(const DiskEnvironment&) = delete;
  DiskEnvironment& operator=(const DiskEnvironment&) = delete;

  const DiskStoreOptions& options() const { return options_; }
  const Clock& clock() const { return *clock_; }
  FileSystem* files() { return options_.seams.files ? options_.seams.files : own_files_.get(); }
  Ring& ring() const { return *ring_; }
  bool has_ring() const { return ring_ != nullptr; }
  bool direct() const { return direct_; }  // O_DIRECT

  void SetRing(std::unique_ptr<IoEngine> engine, bool direct);

  int64_t NowNs() const { return clock_->NowNs(); }
  int64_t WriteDeadline() const { return clock_->NowNs() + options_.write_deadline_ns; }
  // The store's own time, which stands still while nobody has the store open and the machine restarts.
  uint64_t StoreSeconds() const;
  // From now on the store's time counts from `store_s`.
  void SetStoreSeconds(uint64_t store_s);

  void Log(const std::string& line) const;
  void Warn(const std::string& line) const;
  // A named point of the commit and reclaim order, for tests.
  void Passed(const char* point) const {
    if (options_.seams.passed) options_.seams.passed(point);
  }
  void CountStep() { opening_->steps.fetch_add(1, std::memory_order_relaxed); }

  // Memory and files that a hung disk keeps when the store goes.
  std::unique_ptr<Ring> TakeRing() { return std::move(ring_); }
  std::unique_ptr<FileSystem> TakeFiles() { return std::move(own_files_); }

  TierHealth health;
  StoreStats stats;  // counters; levels are their owners'

 private:
  const DiskStoreOptions options_;
  const Clock* const clock_;
  const std::shared_ptr<Opening> opening_;
  std::unique_ptr<FileSystem> own_files_ = std::make_unique<FileSystem>();
  std::unique_ptr<Ring> ring_;
  bool direct_ = false;
  uint64_t base_s_ = 0;
  int64_t base_ns_ = 0;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_DISK_ENVIRONMENT_H_

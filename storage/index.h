// The durable index: block key -> where the block is and its checksums, in RocksDB.
//
// RocksDB calls block, so nothing is looked up in it while serving: DiskStore keeps every entry in
// memory, reads them all when it opens, and hands batches of changes to IndexWriter, whose one
// thread commits them with a synced write-ahead log. The index can be dropped at any time: segments
// hold all that it says.
#ifndef WINNOW_STORAGE_INDEX_H_
#define WINNOW_STORAGE_INDEX_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/block_id.h"
#include "storage/erase_log.h"
#include "storage/mutex.h"

namespace winnow::storage {

// Applied as a whole or not at all.
struct IndexBatch {
  uint64_t tag = 0;  // returned with the result
  std::vector<std::pair<BlockKey, std::string>> puts;
  std::vector<BlockKey> erases;
  std::vector<Erasure> erasures;  // must hold even if the index is lost: go to the EraseLog first
  std::string meta;               // replaces the store's own record, if not empty
};

// A key-value log. One thread at a time; calls block. Values are opaque: format.h checks them.
class IndexDb {
 public:
  virtual ~IndexDb() = default;
  // Every entry once, in any order; and the meta record (empty if none). An error after some
  // entries means that the index is damaged.
  virtual absl::Status Load(const std::function<void(const BlockKey&, std::string_view)>& entry,
                            std::string* meta) = 0;
  // Durable when it returns OK; after an error, durable or not.
  virtual absl::Status Write(const IndexBatch& batch) = 0;
};

// RocksDB in `path`, created if missing. Any damage it sees is an error; it never repairs by
// itself.
absl::StatusOr<std::unique_ptr<IndexDb>> OpenRocksIndex(const std::string& path);

// To look only: may be another process's index, as of now. Never writes, not even a log.
absl::StatusOr<std::unique_ptr<IndexDb>> OpenRocksIndexReadOnly(const std::string& path);

struct IndexResult {
  uint64_t tag = 0;
  absl::Status status;
};

// One thread that commits batches in order. Submit and Poll from one other thread.
class IndexWriter {
 public:
  IndexWriter(std::unique_ptr<IndexDb> db, std::unique_ptr<EraseLog> erase_log);
  // Commits the batches that were submitted, then closes the index; as long as it takes.
  ~IndexWriter();
  // The same, but false if it was not done in time (real time, as Wait's is): it goes on, and the
  // object must stay.
  bool Close(std::chrono::nanoseconds max);

  void Submit(IndexBatch batch);
  void Poll(std::vector<IndexResult>* results);
  // Until a result is there or `max` has passed.
  void Wait(std::chrono::nanoseconds max);
  size_t in_flight() const { return in_flight_; }

 private:
  void Work();

  std::unique_ptr<IndexDb> db_;
  std::unique_ptr<EraseLog> erase_log_;
  Mutex mutex_;
  CondVar work_;  // for the thread
  CondVar done_;  // a result, or closed
  std::deque<IndexBatch> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<IndexResult> results_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  size_t in_flight_ = 0;  // owner's side
  std::thread thread_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_INDEX_H_

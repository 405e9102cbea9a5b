// An index without RocksDB: instant to open, shared by a store and the one that is opened after it.
#ifndef WINNOW_TESTS_FAULT_MEMORY_INDEX_H_
#define WINNOW_TESTS_FAULT_MEMORY_INDEX_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "storage/index.h"
#include "storage/mutex.h"

namespace winnow::storage {

struct MemoryIndexData {
  Mutex mutex;
  std::map<std::array<uint8_t, 40>, std::string> entries;
  std::string meta;
  // A batch of which this is true is said to have failed. It is applied all the same: an index may
  // notice too late, as when a log is written and its sync fails.
  std::function<bool(const IndexBatch&)> denies;
};

class MemoryIndex final : public IndexDb {
 public:
  explicit MemoryIndex(std::shared_ptr<MemoryIndexData> data) : data_(std::move(data)) {}
  absl::Status Load(const std::function<void(const BlockKey&, std::string_view)>& entry,
                    std::string* meta) override {
    const MutexLock lock(data_->mutex);
    for (const auto& [key, value] : data_->entries) entry(BlockKey{key}, value);
    *meta = data_->meta;
    return absl::OkStatus();
  }
  absl::Status Write(const IndexBatch& batch) override {
    const MutexLock lock(data_->mutex);
    for (const BlockKey& key : batch.erases) data_->entries.erase(key.bytes);
    for (const auto& [key, value] : batch.puts) data_->entries[key.bytes] = value;
    if (!batch.meta.empty()) data_->meta = batch.meta;
    if (data_->denies && data_->denies(batch)) return absl::UnavailableError("index: denied");
    return absl::OkStatus();
  }

 private:
  std::shared_ptr<MemoryIndexData> data_;
};

}  // namespace winnow::storage

#endif  // WINNOW_TESTS_FAULT_MEMORY_INDEX_H_

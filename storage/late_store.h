// A store whose directory cannot be opened yet, because its file system is full: off until it can be, and
// tried again and again on a thread of its own. From then on it is the store that was opened.
#ifndef WINNOW_STORAGE_LATE_STORE_H_
#define WINNOW_STORAGE_LATE_STORE_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/block_store.h"

namespace winnow::storage {

struct LateStoreOptions {
  // Called on the thread of the tries, one at a time; what it refers to must outlive the process where a
  // hung disk may keep it (DiskStore::Open says how long it takes).
  std::function<absl::StatusOr<std::unique_ptr<BlockStore>>()> open;
  uint64_t capacity_bytes = 0;  // that it will have
  std::chrono::nanoseconds pause =
      std::chrono::seconds(5);  // before the first try; each later one is
                                // twice as long, up to pause_max
  std::chrono::nanoseconds pause_max = std::chrono::seconds(60);
  std::function<void(const std::string&)> log;  // when it is open; from the thread that polls
};

class LateStore final : public BlockStore {
 public:
  explicit LateStore(LateStoreOptions options);
  ~LateStore() override;  // waits for a try that is under way

  void Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
           const PutOptions& options) override;
  void Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
           int64_t deadline_ns) override;
  void GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                std::span<std::byte> into, int64_t deadline_ns) override;
  void Erase(uint64_t tag, const BlockKey& key) override;
  void Poll(std::chrono::nanoseconds wait, std::vector<Completion>* completions) override;
  std::optional<BlockInfo> Find(const BlockId& id) const override;
  bool Contains(const BlockKey& key) const override;
  void ForEach(const Visit& visit) const override;
  std::vector<BlockKey> AsidesOf(const std::array<uint8_t, 32>& chain) const override;
  uint64_t TenantBytes(const std::array<uint8_t, 32>& tenant) const override;
  bool SetPinned(const BlockKey& key, bool pinned) override;
  void Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) override;
  void SetInUse(const BlockKey& key, bool in_use) override;
  size_t in_flight() const override;
  StoreStats stats() const override;
  TierState state() const override;
  bool idle() const override;

  bool opened() const { return store_ != nullptr; }

 private:
  class Tries;
  void Refuse(uint64_t tag, Operation operation);
  void Take();

  const LateStoreOptions options_;
  std::unique_ptr<Tries> tries_;  // until it is open
  std::unique_ptr<BlockStore> store_;
  std::vector<Completion> refused_;
  StoreStats stats_;  // until it is open
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_LATE_STORE_H_

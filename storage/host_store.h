// The host tier: full blocks in DRAM, least recently used ones leave first within a priority, those
// in use after all others.
//
// Memory is an arena of chunks, mapped when they are first needed (pinning is slow, so a server is
// ready before all of it is) and never given back. Where the machine refuses one, the store goes on with
// those it has. `on_chunk` sees each new chunk once, to register it with a GPU; a gather kernel then
// reads leased blocks in place.
#ifndef WINNOW_STORAGE_HOST_STORE_H_
#define WINNOW_STORAGE_HOST_STORE_H_

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/aside_keys.h"
#include "storage/block_store.h"
#include "storage/clock.h"
#include "storage/page_memory.h"

namespace winnow::storage {

struct HostStoreOptions {
  uint64_t capacity_bytes = uint64_t{1} << 30;
  uint64_t chunk_bytes = uint64_t{64} << 20;  // also the largest payload
  // Checks page sums on every Get, about 0.2 us a page: memory flips bits too.
  bool verify_reads = true;
  std::function<void(std::span<std::byte>)> on_chunk;
  std::function<void(const std::string&)> log;  // one line when memory is refused
  // Called, from within Put, for each block that leaves to make room, while its bytes are still
  // there: the tiered store demotes them. Not for erased or expired blocks. Must not call this
  // store.
  std::function<void(const BlockId&, std::span<const std::byte>, const PutOptions&)> on_evict;
};

class HostStore final : public BlockStore {
  struct Entry;

 public:
  // Keeps a block's bytes where they are, whatever is erased or put meanwhile. Not longer than the
  // store lives.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept {
      std::swap(store_, other.store_);
      std::swap(entry_, other.entry_);
      return *this;
    }
    ~Lease();
    explicit operator bool() const { return entry_ != nullptr; }
    std::span<const std::byte> bytes() const;

   private:
    friend class HostStore;
    Lease(HostStore* store, Entry* entry) : store_(store), entry_(entry) {}
    HostStore* store_ = nullptr;
    Entry* entry_ = nullptr;
  };

  // REQUIRES: capacity and chunk are at least a page, chunk at most the capacity.
  HostStore(HostStoreOptions options, const Clock* clock);
  ~HostStore() override;

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
  size_t in_flight() const override { return done_.size(); }
  StoreStats stats() const override;

  // Empty if the block is absent or its bytes no longer match. Counts as a use.
  Lease Acquire(const BlockId& id);

 private:
  using List = std::list<Entry*>;
  struct Entry {
    BlockId id;
    uint32_t payload_bytes = 0;
    uint32_t chunk = 0;
    size_t first_page = 0;
    uint8_t priority = 0;
    bool pinned = false;
    bool in_use = false;
    bool transient = false;
    bool doomed = false;  // out of the map; its memory is freed with the last lease
    uint32_t leases = 0;
    int64_t expires_at_ns = 0;
    std::vector<uint64_t> page_sums;
    List::iterator recency;  // in ListOf(entry) unless pinned
    std::span<std::byte> pages;
  };
  struct Chunk {
    PageMemory memory;
    PageAllocator allocator;
  };

  Entry* Lookup(const BlockId& id, Reason* reason);
  bool Expired(const Entry& entry) const;
  int64_t ExpiryNs(uint32_t ttl_s) const;  // 0: never
  bool Verify(const Entry& entry, size_t page) const;
  bool Place(Entry* entry);
  bool Grow(uint64_t bytes);
  bool EvictOne();
  void Remove(Entry* entry);
  void FreeMemory(Entry* entry);
  void CountTenant(const Entry& entry, bool here);
  List& ListOf(const Entry& entry) {
    return lru_[entry.in_use ? kPriorityMax + 1 : entry.priority];
  }
  void Touch(Entry* entry);
  void Link(Entry* entry);
  void Unlink(Entry* entry);
  void Done(uint64_t tag, Operation operation, Reason reason);

  const HostStoreOptions options_;
  const Clock* clock_;
  std::vector<Chunk> chunks_;
  bool refused_ = false;  // the last chunk
  absl::flat_hash_map<BlockKey, std::unique_ptr<Entry>> entries_;
  AsideKeys asides_;
  absl::flat_hash_map<uint32_t, uint64_t> tenant_bytes_;  // by tag, none of them zero
  std::vector<std::unique_ptr<Entry>> doomed_;
  // By priority, and behind them the blocks in use; front: most recently used.
  std::array<List, kPriorityMax + 2> lru_;
  std::vector<Completion> done_;
  StoreStats stats_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_HOST_STORE_H_

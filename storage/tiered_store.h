// Host memory over disk: a block is looked for in DRAM first, and moves between the two.
//
//   Put      into host; to disk too with write_through, else when it leaves host (demotion)
//   Get      host, else disk; a block that disk has given often enough is kept in host (promotion)
//   GetPages host, else just those pages from disk; a page that is already on its way is waited for,
//            not read again, whoever asks
//   Erase    from both
//
// A Put is answered kOk when either tier has the block; Persisted tells whether disk has it.
#ifndef WINNOW_STORAGE_TIERED_STORE_H_
#define WINNOW_STORAGE_TIERED_STORE_H_

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/block_store.h"
#include "storage/clock.h"
#include "storage/host_store.h"

namespace winnow::storage {

struct TieredStoreOptions {
  HostStoreOptions host = {};  // on_evict belongs to the tiered store
  bool write_through = true;
  uint8_t demote_priority_min = 0;  // colder blocks that leave host are dropped
  // Reads of a block from disk (whole, or any of its pages) after which it is kept in host. One
  // scan over a document must not empty the host tier; what comes back does.
  uint32_t promote_after_reads = 2;
  uint32_t promotions_max = 4;  // whole blocks being read because their pages were asked for often
};

class TieredStore final : public BlockStore {
 public:
  TieredStore(TieredStoreOptions options, std::unique_ptr<BlockStore> disk, const Clock* clock);
  ~TieredStore() override;

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
  // Of the tier that has more, since most are in both.
  std::vector<BlockKey> AsidesOf(const std::array<uint8_t, 32>& chain) const override;
  uint64_t TenantBytes(const std::array<uint8_t, 32>& tenant) const override;
  // Pins where the block is; on disk if it is in both, since what host drops is found there.
  bool SetPinned(const BlockKey& key, bool pinned) override;
  void Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) override;
  void SetInUse(const BlockKey& key, bool in_use) override;
  size_t in_flight() const override { return in_flight_ + done_.size(); }
  bool idle() const override { return in_flight() == 0 && disk_->idle(); }
  // Gets, hits and misses of callers; used, capacity, evicted and the like of both tiers together;
  // state of the disk tier. Blocks: of the tier that has more, since most are in both, and who asks
  // after every step must not wait for a count of all.
  StoreStats stats() const override;
  TierState state() const override { return disk_->state(); }

  bool Persisted(const BlockId& id) const { return disk_->Find(id).has_value(); }
  HostStore& host() { return *host_; }
  BlockStore& disk() { return *disk_; }
  uint64_t joined_reads() const { return joined_reads_; }  // reads that found theirs in flight
  uint64_t promoted_blocks() const { return promoted_blocks_; }
  uint64_t demoted_blocks() const { return demoted_blocks_; }

 private:
  // A caller's operation that waits for disk.
  struct Request {
    uint64_t tag = 0;
    Operation operation = Operation::kGet;
    BlockKey key;
    std::span<std::byte> into;
    // Parts of an answer wait here, so that a miss leaves `into` alone; empty for one part only.
    std::vector<std::byte> parts;
    uint32_t parts_left = 0;
    Reason reason = Reason::kNone;
    bool host_ok = false;  // Put, Erase: host did it
  };
  struct Waiter {
    uint64_t request;
    size_t from_page;  // of the fetch
    size_t to_page;    // of the request
  };
  // A read from disk, for one or more requests, or for a promotion only.
  struct Fetch {
    BlockId id;
    bool whole = false;
    bool promotes = false;  // into host when it is here
    bool erased = false;
    int64_t deadline_ns = 0;
    std::vector<uint32_t> pages;
    std::vector<std::byte> buffer;  // empty: the first request's `into`
    std::span<std::byte> into;
    std::vector<Waiter> waiters;
  };

  Reason HostAnswer();
  void Done(uint64_t tag, Operation operation, Reason reason, bool from_disk = false);
  uint64_t NewRequest(uint64_t tag, Operation operation, const BlockKey& key,
                      std::span<std::byte> into);
  void FinishPart(uint64_t request, Reason reason);
  void OnFetched(uint64_t fetch, Reason reason);
  bool CountRead(const BlockKey& key);
  void Promote(const BlockId& id);
  void Demote(const BlockId& id, std::span<const std::byte> payload, const PutOptions& options);

  const TieredStoreOptions options_;
  const Clock* clock_;
  std::unique_ptr<BlockStore> disk_;
  std::unique_ptr<HostStore> host_;
  uint64_t next_ = 1;  // numbers requests and fetches; the tag of disk's operations
  std::map<uint64_t, Request> requests_;
  std::map<uint64_t, Fetch> fetches_;
  absl::flat_hash_map<BlockKey, uint64_t> whole_fetches_;
  absl::flat_hash_map<std::pair<BlockKey, uint32_t>, uint64_t> page_fetches_;
  absl::flat_hash_map<BlockKey, uint32_t> reads_;
  std::vector<Completion> done_;
  std::vector<Completion> scratch_;
  size_t in_flight_ = 0;
  uint32_t promotions_ = 0;
  uint64_t joined_reads_ = 0;
  uint64_t promoted_blocks_ = 0;
  uint64_t demoted_blocks_ = 0;
  StoreStats stats_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_TIERED_STORE_H_

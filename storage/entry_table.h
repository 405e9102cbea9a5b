// The blocks of a DiskStore, in memory: for each key the place, the checksums and the standing that decides when the block
// leaves. Keeps the order of eviction and the segments' counts of living blocks in step with every change.
//
// Ownership    Owns the entries. A pointer to an entry holds until the next Set or Remove of any key.
// Threads      One at a time, the store's. No call takes longer with the number of entries (ForEach excepted).
#ifndef WINNOW_STORAGE_ENTRY_TABLE_H_
#define WINNOW_STORAGE_ENTRY_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/aside_keys.h"
#include "storage/block_id.h"
#include "storage/eviction_order.h"
#include "storage/format.h"
#include "storage/segment_log.h"
#include "storage/sharded_map.h"

namespace winnow::storage {

struct Entry {
  std::shared_ptr<const BlockRecord> record;
  uint64_t expires_at_s = 0;
  uint64_t last_use = 0;
  EvictionOrder::Handle order = EvictionOrder::kNone;  // none while its move is being arranged
  uint8_t priority = 0;
  bool pinned = false;
  bool in_use = false;
  bool moving = false;      // the index is being told of another place
  bool save_later = false;  // a change that waits until the index has been told

  // The record with priority, pin and expiry as they are now.
  BlockRecord CurrentRecord() const;
};

class EntryTable {
 public:
  // Both outlive the table.
  EntryTable(SegmentLog& log, EvictionOrder& order, uint64_t pinned_bytes_max)
      : log_(log), order_(order), pinned_bytes_max_(pinned_bytes_max) {}
  EntryTable(const EntryTable&) = delete;
  EntryTable& operator=(const EntryTable&) = delete;

  Entry* Find(const BlockKey& key);
  const Entry* Find(const BlockKey& key) const;
  size_t size() const { return entries_.size(); }
  uint64_t pinned_bytes() const { return pinned_bytes_; }
  std::vector<BlockKey> AsidesOf(const std::array<uint8_t, 32>& chain) const {
    return asides_.Of(chain);
  }
  // Of blocks that stay.
  uint64_t TenantBytes(uint32_t tenant_tag) const {
    const auto found = tenant_bytes_.find(tenant_tag);
    return found == tenant_bytes_.end() ? 0 : found->second;
  }
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    entries_.ForEach(visit);
  }

  // Enters the block at the place that its record names, in place of the entry under the key, if any. A pin beyond the limit
  // is not honoured. REQUIRES: the segment exists, and the entry is in no order.
  Entry* Set(const BlockKey& key, Entry entry);
  // False: there is none. `indexed` (may be null): the durable index has it.
  bool Remove(const BlockKey& key, bool* indexed);

  // Somebody uses the block.
  void Touch(Entry* entry);
  // Its standing in the order of eviction follows a change of priority, expiry, pin or use.
  void Reorder(const Entry& entry);
  // False: pins would take more than their limit.
  bool SetPinned(Entry* entry, bool pinned);
  // Back into the order of eviction, for a block that does not move after all.
  void EnterOrder(const BlockKey& key, Entry* entry);

  uint64_t NextUse() { return ++uses_; }
  // Uses count on from here, after a restart.
  void SkipUses(uint64_t uses) { uses_ = uses > uses_ ? uses : uses_; }

 private:
  void Withdraw(Entry* entry);

  SegmentLog& log_;
  EvictionOrder& order_;
  const uint64_t pinned_bytes_max_;
  ShardedMap<BlockKey, Entry> entries_;
  uint64_t pinned_bytes_ = 0;
  absl::flat_hash_map<uint32_t, uint64_t> tenant_bytes_;  // by tag, none of them zero
  uint64_t uses_ = 0;
  AsideKeys asides_;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_ENTRY_TABLE_H_

// The order in which blocks leave a DiskStore, and the segment that is emptied next. Kept up to date
// with every use, so that no call looks at all blocks.
//
// Order        Expired blocks first, then blocks that nobody uses, then blocks in use, each by
//              (priority, last use); pinned blocks never. The first blocks of that order are *cold*:
//              as few as add up to an eighth of all bytes, at least a segment.
// Victim       The sealed segment whose emptying frees most: its cold blocks are dropped, the others
//              move, at most half a segment of them. Blocks in use always move as long as that frees a
//              sixteenth of the file; where no segment is left by that rule they count as the others.
// Cost         Add, Remove and Update take O(log n). What may concern many blocks at once (a segment
//              that is sealed, many blocks that expire in one second, the border of the cold ones) is
//              worked off by Advance in steps of about a microsecond; Choose waits for it. Choose
//              itself looks at each segment once, not at blocks. Memory: about 170 bytes a block.
// Threads      One at a time.
#ifndef WINNOW_STORAGE_EVICTION_ORDER_H_
#define WINNOW_STORAGE_EVICTION_ORDER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "storage/block_id.h"
#include "storage/block_store.h"

namespace winnow::storage {

class EvictionOrder {
 public:
  // Names a block from Add to Remove.
  using Handle = uint32_t;
  static constexpr Handle kNone = UINT32_MAX;

  // The properties that decide when a block leaves.
  struct Standing {
    uint64_t last_use = 0;      // no two blocks have the same
    uint64_t expires_at_s = 0;  // 0: never
    uint8_t priority = 0;       // 0 to kPriorityMax
    bool pinned = false;
    bool in_use = false;
  };

  // A block of the victim, and what becomes of it.
  struct Verdict {
    BlockKey key;
    bool keep = false;     // it moves
    bool expired = false;  // otherwise it is evicted
  };

  // `segment_bytes`: length of a full segment file.
  explicit EvictionOrder(uint64_t segment_bytes) : segment_bytes_(segment_bytes) {}

  // A block in a segment that need not be known before. `bytes`: its length in the file.
  Handle Add(const BlockKey& key, uint64_t segment_id, uint64_t bytes, const Standing& standing);
  // kNone: nothing happens.
  void Remove(Handle handle);
  void Update(Handle handle, const Standing& standing);

  // The segment takes no more blocks: those it has count from now on. Before that they are neither
  // cold nor chosen.
  void Seal(uint64_t segment_id, uint64_t file_bytes);
  // REQUIRES: no block is left in it.
  void DropSegment(uint64_t segment_id);

  // Does pending work, at most `steps` of it. `now_s`: the store's time; it never
  // decreases.
  void Advance(uint64_t now_s, size_t steps);
  // Nothing is left to do: Choose and cold() tell the truth.
  bool settled() const;

  // Picks the segment to empty, by id; nullopt: every sealed segment is pinned or has no blocks.
  // `usable` is asked about some segments. REQUIRES: settled().
  std::optional<uint64_t> Choose(const std::function<bool(uint64_t segment_id)>& usable);
  // The next block of the segment that was chosen last, warmest first; it has left the order, and its
  // handle is void. nullopt: no block is left. What is cold is as it was at Choose.
  std::optional<Verdict> TakeNext();

  bool cold(Handle handle) const { return Cold(handle); }
  size_t blocks() const { return blocks_; }
  // Looks at single blocks since the start: the cost of a call, whatever else the machine does.
  uint64_t looks() const { return looks_; }

 private:
  // Ranks of expired blocks begin at 0, by priority; then those of unused blocks, and of blocks in use.
  static constexpr uint8_t kUnusedRank = kPriorityMax + 1, kInUseRank = 2 * kUnusedRank,
                           kPinnedRank = 3 * kUnusedRank;

  struct Key {
    uint64_t last_use;
    uint32_t item;
    uint8_t rank;
    friend bool operator<(const Key& a, const Key& b) {
      return std::tie(a.rank, a.last_use, a.item) < std::tie(b.rank, b.last_use, b.item);
    }
  };
  struct Item {
    BlockKey key;
    uint64_t bytes = 0;
    uint64_t last_use = 0;
    uint64_t expires_at_s = 0;
    uint32_t slot = 0;  // of its segment in tallies_
    uint8_t rank = 0;
    uint8_t priority = 0;
    bool pinned = false;
    bool in_use = false;
    bool listed = false;  // in listed_, because its segment is sealed
  };
  // One segment. Bytes are those of listed blocks.
  struct Tally {
    uint64_t id = 0;
    uint64_t file_bytes = 0;
    uint64_t live_bytes = 0;
    uint64_t pinned_bytes = 0;
    uint64_t in_use_bytes = 0;
    uint64_t cold_bytes = 0;         // blocks that nobody uses
    uint64_t cold_in_use_bytes = 0;  // blocks in use
    bool sealed = false;
    bool joining = false;         // some of its blocks are not listed yet
    Key joined = {0, 0, 0};       // blocks before this are listed
    absl::btree_set<Key> blocks;  // all that it has
  };

  Item& At(uint32_t index) {
    ++looks_;
    return items_[index];
  }
  const Item& At(uint32_t index) const {
    ++looks_;
    return items_[index];
  }
  Key KeyOf(uint32_t index) const {
    const Item& item = At(index);
    return {item.last_use, index, item.rank};
  }
  uint8_t RankOf(const Item& item) const;
  bool Cold(uint32_t index) const { return At(index).listed && KeyOf(index) < warm_; }
  uint32_t SlotOf(uint64_t segment_id);
  void Insert(uint32_t index);
  void Extract(uint32_t index);
  void List(uint32_t index);
  void CountCold(const Item& item, bool add);
  bool Balance();
  void BalanceSoon();

  const uint64_t segment_bytes_;
  std::deque<Item> items_;  // grows without copying; read through At
  mutable uint64_t looks_ = 0;
  uint32_t free_item_ = kNone;  // the first; each names the next in `slot`
  size_t blocks_ = 0;
  std::vector<Tally> tallies_;
  std::vector<uint32_t> free_tallies_;
  absl::flat_hash_map<uint64_t, uint32_t> slots_;  // by segment
  absl::btree_set<Key> listed_;
  absl::btree_set<std::pair<uint64_t, uint32_t>> expiring_;  // (second, item)
  std::deque<uint32_t> joining_;                             // slots
  Key warm_ = {0, 0, kPinnedRank};                           // listed blocks before this are cold
  uint64_t cold_bytes_ = 0;
  uint64_t live_bytes_ = 0;
  bool balanced_ = true;
  uint64_t now_s_ = 0;

  // The victim's.
  uint32_t victim_ = kNone;  // slot
  bool spare_ = true;        // blocks in use stay
  Key victim_warm_ = {0, 0, 0};
  uint64_t kept_bytes_ = 0;
};

}  // namespace winnow::storage

#endif  // WINNOW_STORAGE_EVICTION_ORDER_H_

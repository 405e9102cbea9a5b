// Which KV blocks are held, and which of the others are worth keeping. Exact: a block is free, idle,
// or held by as many sequences as have it in their tables, and giving back what was not taken is a
// bug that ends the process. Engine thread only.
//
//   free ── Take ──▶ held ── Give by the last holder ──▶ idle, if it can be found; else free
//                     ▲                                    │
//                     └────────────── Share ───────────────┘    idle blocks go, oldest first, when
//                                                                Take finds none free: those of lower
//                                                                priority first, pinned ones last
//
// Only full blocks can be found, and nobody writes to a full block: sharing needs no copies.
#ifndef WINNOW_ENGINE_KV_BLOCK_POOL_H_
#define WINNOW_ENGINE_KV_BLOCK_POOL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/kv/block_name.h"
#include "engine/kv/block_table.h"

namespace winnow::engine {

class KvEventLog;
class KvMemory;

class BlockPool {
 public:
  // `memory` has the records of the blocks, and is told of each that becomes idle, or is held again, or
  // whose content goes; null: the pool has records of its own, and nobody is told. `events` is told of
  // names that can no longer be found; null: nobody. REQUIRES: at least 1.
  explicit BlockPool(int32_t num_blocks, KvMemory* memory = nullptr, KvEventLog* events = nullptr);
  // What is idle is forgotten, too. REQUIRES: nothing is held.
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  int32_t num_blocks() const { return num_blocks_; }
  // That Take can give: idle ones too.
  int32_t num_free() const { return static_cast<int32_t>(free_.size()) + num_idle_; }
  int32_t num_idle() const { return num_idle_; }
  int32_t num_used() const { return num_blocks() - num_free(); }

  int32_t Take();  // REQUIRES: num_free() > 0
  // Forgets idle blocks that fast memory alone has. False: there are none.
  bool ForgetUnsaved();
  void Share(int32_t block);  // one holder more. REQUIRES: held or idle
  void Give(int32_t block);   // one holder less. REQUIRES: held

  // The block's content can be found by this name from now on; if another block has the name, that
  // one stays. Whether this block is the one that is found. REQUIRES: held.
  bool Publish(int32_t block, const Digest& name);
  std::optional<int32_t> Find(const Digest& name) const;
  // The same for a sequence that is to read the block's content. An idle block whose content `memory` has no more is free
  // from now on, and not found.
  std::optional<int32_t> FindWhole(const Digest& name);
  // It can no longer be found: its content is gone.
  void Withdraw(int32_t block);
  // The same by name, for content that is to go: an idle block is free at once, one that is held when its last holder
  // gives it, and `memory` keeps no copy. False: there is none.
  bool Drop(const Digest& name);
  // Idle blocks of a lower priority leave first. With its name it loses it. False: there is none.
  bool SetPriority(const Digest& name, uint8_t priority);
  // A pinned block leaves after all others that are idle, and its pin with its name. False: there is none.
  bool SetPinned(const Digest& name, bool pinned);

 private:
  struct IdleList {
    int32_t oldest = -1, newest = -1;
  };
  BlockRecord& At(int32_t block) { return table_.allocation(block); }
  IdleList& ListOf(const BlockRecord& block) {
    return idle_[block.pinned ? kPriorityMax + 1 : block.priority];
  }
  void Link(int32_t block);
  void Unlink(int32_t block);
  // Nobody holds the block, and it is in no list: it is free from now on.
  void Free(int32_t block);
  void SetHeld(int32_t block, bool held);
  void Forget(int32_t block);
  bool ForgetUnsaved(const IdleList& list);

  KvMemory* const memory_;
  KvEventLog* const events_;
  const int32_t num_blocks_;
  std::unique_ptr<BlockTable> own_table_;  // without a memory
  BlockTable& table_;
  std::vector<int32_t> free_;                    // a stack: the block freed last is the warmest
  std::array<IdleList, kPriorityMax + 2> idle_;  // by priority, and behind them the pinned ones
  int32_t num_idle_ = 0;
  absl::flat_hash_map<Digest, int32_t> by_name_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_BLOCK_POOL_H_

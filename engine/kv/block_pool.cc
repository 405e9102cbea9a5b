#include "engine/kv/block_pool.h"

#include <algorithm>

#include "engine/kv/kv_event_log.h"
#include "engine/kv/kv_memory.h"
#include "kernels/check.h"

namespace winnow::engine {

BlockPool::BlockPool(int32_t num_blocks, KvMemory* memory, KvEventLog* events)
    : memory_(memory),
      events_(events),
      num_blocks_(num_blocks),
      own_table_(memory == nullptr ? std::make_unique<BlockTable>(0, num_blocks) : nullptr),
      table_(memory == nullptr ? *own_table_ : memory->blocks()) {
  WINNOW_CHECK(num_blocks >= 1 && num_blocks <= table_.num_blocks());
  free_.reserve(num_blocks);
  for (int32_t block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
}

BlockPool::~BlockPool() {
  for (const IdleList& list : idle_) {
    for (int32_t block = list.oldest; block >= 0;) {
      const int32_t after = At(block).after;
      Forget(block);
      block = after;
    }
  }
}

int32_t BlockPool::Take() {
  WINNOW_CHECK(num_free() > 0);
  if (free_.empty()) {
    int32_t idle = -1;
    for (auto list = idle_.begin(); idle < 0; ++list) idle = list->oldest;
    Unlink(idle);
    Free(idle);
  }
  const int32_t block = free_.back();
  free_.pop_back();
  At(block).holders = 1;
  return block;
}

bool BlockPool::ForgetUnsaved() {
  return std::any_of(idle_.begin(), idle_.end(),
                     [this](const IdleList& list) { return ForgetUnsaved(list); });
}

bool BlockPool::ForgetUnsaved(const IdleList& list) {
  const size_t free = free_.size();
  for (int32_t block = list.oldest; block >= 0;) {
    const int32_t after = At(block).after;
    if (memory_ != nullptr && memory_->residency().HoldsFrames(block)) {
      Unlink(block);
      Free(block);
    }
    block = after;
  }
  return free_.size() > free;
}

void BlockPool::Share(int32_t block) {
  if (At(block).holders == 0) {
    WINNOW_CHECK(At(block).cached);
    Unlink(block);
    SetHeld(block, true);
  }
  ++At(block).holders;
}

void BlockPool::Give(int32_t index) {
  WINNOW_CHECK(index >= 0 && index < num_blocks());
  BlockRecord& block = At(index);
  WINNOW_CHECK(block.holders > 0);
  if (--block.holders > 0) return;
  if (block.cached) {
    SetHeld(index, false);
    Link(index);
    return;
  }
  Free(index);
}

void BlockPool::Free(int32_t block) {
  Withdraw(block);
  Forget(block);
  free_.push_back(block);
}

void BlockPool::SetHeld(int32_t block, bool held) {
  if (memory_ != nullptr) memory_->SetHeld(block, held);
}

void BlockPool::Forget(int32_t block) {
  if (memory_ != nullptr) {
    memory_->Forget(block);
  } else {
    table_.Forget(block);
  }
}

void BlockPool::Link(int32_t index) {
  BlockRecord& block = At(index);
  IdleList& list = ListOf(block);
  block.before = list.newest;
  block.after = -1;
  (list.newest < 0 ? list.oldest : At(list.newest).after) = index;
  list.newest = index;
  ++num_idle_;
}

void BlockPool::Unlink(int32_t index) {
  BlockRecord& block = At(index);
  IdleList& list = ListOf(block);
  (block.before < 0 ? list.oldest : At(block.before).after) = block.after;
  (block.after < 0 ? list.newest : At(block.after).before) = block.before;
  block.before = block.after = -1;
  --num_idle_;
}

bool BlockPool::Publish(int32_t index, const Digest& name) {
  BlockRecord& block = At(index);
  WINNOW_CHECK(block.holders > 0);
  if (block.cached || !by_name_.emplace(name, index).second) return false;
  block.cached = true;
  if (!block.sealed) table_.SetHash(index, name);
  WINNOW_CHECK(block.name.chain == name);
  return true;
}

std::optional<int32_t> BlockPool::Find(const Digest& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return std::nullopt;
  return found->second;
}

std::optional<int32_t> BlockPool::FindWhole(const Digest& name) {
  const std::optional<int32_t> found = Find(name);
  if (!found.has_value() || memory_ == nullptr) return found;
  if (At(*found).holders > 0 || memory_->IsWhole(*found)) return found;
  Unlink(*found);
  Free(*found);
  return std::nullopt;
}

void BlockPool::Withdraw(int32_t index) {
  BlockRecord& block = At(index);
  if (!block.cached) return;
  by_name_.erase(block.name.chain);
  block.cached = block.pinned = false;
  block.priority = kPriorityNormal;
  if (events_ != nullptr) events_->Removed(KvTier::kFast, block.name.chain);
}

bool BlockPool::Drop(const Digest& name) {
  const std::optional<int32_t> found = Find(name);
  if (!found.has_value()) return false;
  const int32_t index = *found;
  table_.Distrust(index);
  if (At(index).holders > 0) {
    Withdraw(index);
    return true;
  }
  Unlink(index);
  Free(index);
  return true;
}

bool BlockPool::SetPriority(const Digest& name, uint8_t priority) {
  WINNOW_CHECK(priority <= kPriorityMax);
  const std::optional<int32_t> found = Find(name);
  if (!found.has_value()) return false;
  BlockRecord& block = At(*found);
  if (block.priority == priority) return true;
  const bool idle = block.holders == 0;
  if (idle) Unlink(*found);
  block.priority = priority;
  if (idle) Link(*found);
  return true;
}

bool BlockPool::SetPinned(const Digest& name, bool pinned) {
  const std::optional<int32_t> found = Find(name);
  if (!found.has_value()) return false;
  BlockRecord& block = At(*found);
  if (block.pinned == pinned) return true;
  const bool idle = block.holders == 0;
  if (idle) Unlink(*found);
  block.pinned = pinned;
  if (idle) Link(*found);
  return true;
}

}  // namespace winnow::engine

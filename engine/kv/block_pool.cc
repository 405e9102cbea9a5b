#include "engine/kv/block_pool.h"

#include "engine/kv/kv_event_log.h"
#include "engine/kv/kv_memory.h"
#include "kernels/check.h"

namespace winnow::engine {

BlockPool::BlockPool(int32_t num_blocks, KvMemory* memory, KvEventLog* events)
    : memory_(memory), events_(events) {
  WINNOW_CHECK(num_blocks >= 1);
  blocks_.resize(num_blocks);
  free_.reserve(num_blocks);
  for (int32_t block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
}

BlockPool::~BlockPool() {
  if (memory_ == nullptr) return;
  for (const IdleList* list : {&idle_, &pinned_idle_}) {
    for (int32_t block = list->oldest; block >= 0; block = blocks_[block].after) {
      memory_->Forget(block);
    }
  }
}

int32_t BlockPool::Take() {
  WINNOW_CHECK(num_free() > 0);
  if (free_.empty()) {
    const int32_t idle = idle_.oldest >= 0 ? idle_.oldest : pinned_idle_.oldest;
    Unlink(idle);
    Withdraw(idle);
    if (memory_ != nullptr) memory_->Forget(idle);
    free_.push_back(idle);
  }
  const int32_t block = free_.back();
  free_.pop_back();
  blocks_[block].holders = 1;
  return block;
}

bool BlockPool::ForgetUnsaved() { return ForgetUnsaved(idle_) || ForgetUnsaved(pinned_idle_); }

bool BlockPool::ForgetUnsaved(const IdleList& list) {
  const size_t free = free_.size();
  for (int32_t block = list.oldest; block >= 0;) {
    const int32_t after = blocks_[block].after;
    if (memory_ != nullptr && memory_->HoldsFrames(block)) {
      Unlink(block);
      Withdraw(block);
      memory_->Forget(block);
      free_.push_back(block);
    }
    block = after;
  }
  return free_.size() > free;
}

void BlockPool::Share(int32_t block) {
  if (blocks_[block].holders == 0) {
    WINNOW_CHECK(blocks_[block].published);
    Unlink(block);
    if (memory_ != nullptr) memory_->SetHeld(block, true);
  }
  ++blocks_[block].holders;
}

void BlockPool::Give(int32_t index) {
  WINNOW_CHECK(index >= 0 && index < num_blocks());
  Block& block = blocks_[index];
  WINNOW_CHECK(block.holders > 0);
  if (--block.holders > 0) return;
  if (block.published) {
    if (memory_ != nullptr) memory_->SetHeld(index, false);
    Link(index);
    return;
  }
  if (memory_ != nullptr) memory_->Forget(index);
  free_.push_back(index);
}

void BlockPool::Link(int32_t index) {
  Block& block = blocks_[index];
  IdleList& list = ListOf(block);
  block.before = list.newest;
  block.after = -1;
  (list.newest < 0 ? list.oldest : blocks_[list.newest].after) = index;
  list.newest = index;
  ++num_idle_;
}

void BlockPool::Unlink(int32_t index) {
  Block& block = blocks_[index];
  IdleList& list = ListOf(block);
  (block.before < 0 ? list.oldest : blocks_[block.before].after) = block.after;
  (block.after < 0 ? list.newest : blocks_[block.after].before) = block.before;
  block.before = block.after = -1;
  --num_idle_;
}

bool BlockPool::Publish(int32_t index, const Digest& name) {
  Block& block = blocks_[index];
  WINNOW_CHECK(block.holders > 0);
  if (block.published || !by_name_.emplace(name, index).second) return false;
  block.published = true;
  block.name = name;
  return true;
}

std::optional<int32_t> BlockPool::Find(const Digest& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return std::nullopt;
  return found->second;
}

void BlockPool::Withdraw(int32_t index) {
  Block& block = blocks_[index];
  if (!block.published) return;
  by_name_.erase(block.name);
  block.published = block.pinned = false;
  if (events_ != nullptr) events_->Removed(KvTier::kFast, block.name);
}

bool BlockPool::Drop(const Digest& name) {
  const std::optional<int32_t> found = Find(name);
  if (!found.has_value()) return false;
  const int32_t index = *found;
  if (memory_ != nullptr) memory_->Distrust(index);
  if (blocks_[index].holders > 0) {
    Withdraw(index);
    return true;
  }
  Unlink(index);
  Withdraw(index);
  if (memory_ != nullptr) memory_->Forget(index);
  free_.push_back(index);
  return true;
}

bool BlockPool::SetPinned(const Digest& name, bool pinned) {
  const std::optional<int32_t> found = Find(name);
  if (!found.has_value()) return false;
  Block& block = blocks_[*found];
  if (block.pinned == pinned) return true;
  const bool idle = block.holders == 0;
  if (idle) Unlink(*found);
  block.pinned = pinned;
  if (idle) Link(*found);
  return true;
}

}  // namespace winnow::engine

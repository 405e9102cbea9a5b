#include "storage/eviction_order.h"

#include <algorithm>
#include <iterator>

#include "storage/check.h"
#include "storage/format.h"

namespace winnow::storage {
namespace {

// Header and footer of a segment; a segment without footer has no dead block of one page.
constexpr uint64_t kEmptyBytes = 2 * kPageBytes;

// Copying blocks in use is worth it down to this part of a file.
constexpr uint64_t kLeastGain = 16;

// Cold blocks are this part of all bytes.
constexpr uint64_t kColdPart = 8;

// The border of the cold blocks follows a change by so many blocks at once; the rest is Advance's.
constexpr int kBalanceSteps = 16;

}  // namespace

uint8_t EvictionOrder::RankOf(const Item& item) const {
  if (item.pinned) return kPinnedRank;
  if (item.expires_at_s != 0 && item.expires_at_s <= now_s_) return item.priority;
  return (item.in_use ? kInUseRank : kUnusedRank) + item.priority;
}

uint32_t EvictionOrder::SlotOf(uint64_t segment_id) {
  const auto [it, inserted] = slots_.try_emplace(segment_id, 0);
  if (!inserted) return it->second;
  if (free_tallies_.empty()) {
    free_tallies_.push_back(static_cast<uint32_t>(tallies_.size()));
    tallies_.emplace_back();
  }
  it->second = free_tallies_.back();
  free_tallies_.pop_back();
  tallies_[it->second].id = segment_id;
  return it->second;
}

EvictionOrder::Handle EvictionOrder::Add(const BlockKey& key, uint64_t segment_id, uint64_t bytes,
                                         const Standing& standing) {
  if (free_item_ == kNone) {
    free_item_ = static_cast<uint32_t>(items_.size());
    items_.emplace_back().slot = kNone;
  }
  const uint32_t index = free_item_;
  Item& item = At(index);
  free_item_ = item.slot;
  ++blocks_;
  item = Item();
  item.key = key;
  item.bytes = bytes;
  item.slot = SlotOf(segment_id);
  item.last_use = standing.last_use;
  item.expires_at_s = standing.expires_at_s;
  item.priority = standing.priority;
  item.pinned = standing.pinned;
  item.in_use = standing.in_use;
  Insert(index);
  return index;
}

void EvictionOrder::Remove(Handle handle) {
  if (handle == kNone) return;
  Extract(handle);
  At(handle).slot = std::exchange(free_item_, handle);
  --blocks_;
}

void EvictionOrder::Update(Handle handle, const Standing& standing) {
  if (handle == kNone) return;
  Extract(handle);
  Item& item = At(handle);
  item.last_use = standing.last_use;
  item.expires_at_s = standing.expires_at_s;
  item.priority = standing.priority;
  item.pinned = standing.pinned;
  item.in_use = standing.in_use;
  Insert(handle);
}

void EvictionOrder::Insert(uint32_t index) {
  Item& item = At(index);
  item.rank = RankOf(item);
  if (item.expires_at_s > now_s_) expiring_.insert({item.expires_at_s, index});
  Tally& tally = tallies_[item.slot];
  tally.blocks.insert(KeyOf(index));
  if (tally.sealed) List(index);
}

void EvictionOrder::List(uint32_t index) {
  Item& item = At(index);
  Tally& tally = tallies_[item.slot];
  item.listed = true;
  listed_.insert(KeyOf(index));
  live_bytes_ += item.bytes;
  tally.live_bytes += item.bytes;
  if (item.rank == kPinnedRank) tally.pinned_bytes += item.bytes;
  if (item.rank >= kInUseRank && item.rank < kPinnedRank) tally.in_use_bytes += item.bytes;
  if (Cold(index)) CountCold(item, true);
  BalanceSoon();
}

void EvictionOrder::Extract(uint32_t index) {
  Item& item = At(index);
  Tally& tally = tallies_[item.slot];
  if (item.expires_at_s != 0) expiring_.erase({item.expires_at_s, index});
  tally.blocks.erase(KeyOf(index));
  if (!item.listed) return;
  if (Cold(index)) CountCold(item, false);
  listed_.erase(KeyOf(index));
  item.listed = false;
  live_bytes_ -= item.bytes;
  tally.live_bytes -= item.bytes;
  if (item.rank == kPinnedRank) tally.pinned_bytes -= item.bytes;
  if (item.rank >= kInUseRank && item.rank < kPinnedRank) tally.in_use_bytes -= item.bytes;
  BalanceSoon();
}

void EvictionOrder::CountCold(const Item& item, bool add) {
  Tally& tally = tallies_[item.slot];
  uint64_t& bytes = item.rank >= kInUseRank ? tally.cold_in_use_bytes : tally.cold_bytes;
  bytes = add ? bytes + item.bytes : bytes - item.bytes;
  cold_bytes_ = add ? cold_bytes_ + item.bytes : cold_bytes_ - item.bytes;
}

void EvictionOrder::BalanceSoon() {
  balanced_ = false;
  for (int i = 0; i < kBalanceSteps && !balanced_; ++i) balanced_ = Balance();
}

// One block becomes cold or warm. True: none has to.
bool EvictionOrder::Balance() {
  const uint64_t target_bytes = std::max(segment_bytes_, live_bytes_ / kColdPart);
  auto it = listed_.lower_bound(warm_);
  if (cold_bytes_ < target_bytes) {
    if (it == listed_.end() || it->rank == kPinnedRank) {
      warm_ = {0, 0, kPinnedRank};
      return true;
    }
    warm_ = {it->last_use, it->item + 1, it->rank};
    CountCold(At(it->item), true);
    return false;
  }
  --it;  // there is one, because the cold ones have bytes
  const Item& last = At(it->item);
  if (cold_bytes_ - last.bytes < target_bytes) return true;
  warm_ = *it;
  CountCold(last, false);
  return false;
}

void EvictionOrder::Seal(uint64_t segment_id, uint64_t file_bytes) {
  const uint32_t slot = SlotOf(segment_id);
  Tally& tally = tallies_[slot];
  WINNOW_CHECK(!tally.sealed);
  tally.file_bytes = file_bytes;
  tally.sealed = true;
  tally.joining = true;
  tally.joined = {0, 0, 0};
  joining_.push_back(slot);
}

void EvictionOrder::DropSegment(uint64_t segment_id) {
  const auto it = slots_.find(segment_id);
  if (it == slots_.end()) return;
  const uint32_t slot = it->second;
  slots_.erase(it);
  WINNOW_CHECK(tallies_[slot].blocks.empty());
  if (tallies_[slot].joining) std::erase(joining_, slot);
  if (victim_ == slot) victim_ = kNone;
  tallies_[slot] = Tally();
  free_tallies_.push_back(slot);
}

void EvictionOrder::Advance(uint64_t now_s, size_t steps) {
  now_s_ = std::max(now_s_, now_s);
  while (steps > 0 && !expiring_.empty() && expiring_.begin()->first <= now_s_) {
    const uint32_t index = expiring_.begin()->second;
    Extract(index);
    Insert(index);
    --steps;
  }
  while (steps > 0 && !joining_.empty()) {
    Tally& tally = tallies_[joining_.front()];
    auto it = tally.blocks.lower_bound(tally.joined);
    for (; steps > 0 && it != tally.blocks.end(); ++it, --steps) {
      tally.joined = *it;
      if (!At(it->item).listed) List(it->item);
    }
    if (it != tally.blocks.end()) return;
    tally.joining = false;
    joining_.pop_front();
  }
  for (; steps > 0 && !balanced_; --steps) balanced_ = Balance();
}

bool EvictionOrder::settled() const {
  return balanced_ && joining_.empty() && (expiring_.empty() || expiring_.begin()->first > now_s_);
}

std::optional<uint64_t> EvictionOrder::Choose(
    const std::function<bool(uint64_t segment_id)>& usable) {
  WINNOW_CHECK(settled());
  victim_ = kNone;
  for (const bool spare : {true, false}) {
    std::pair<bool, uint64_t> victim_gain;  // half a file can go; bytes
    for (uint32_t slot = 0; slot < tallies_.size(); ++slot) {
      const Tally& tally = tallies_[slot];
      if (!tally.sealed || tally.blocks.empty()) continue;
      const uint64_t half = std::min(segment_bytes_, tally.file_bytes) / 2;
      if (tally.pinned_bytes > half) continue;
      const uint64_t held_bytes = tally.pinned_bytes + (spare ? tally.in_use_bytes : 0);
      const uint64_t cold_bytes = tally.cold_bytes + (spare ? 0 : tally.cold_in_use_bytes);
      const bool light = held_bytes <= half;
      const uint64_t kept_bytes = light ? tally.live_bytes - cold_bytes : held_bytes + kEmptyBytes;
      const uint64_t gain = tally.file_bytes - std::min(kept_bytes, tally.file_bytes);
      if (!light && gain < tally.file_bytes / kLeastGain) continue;
      const std::pair<bool, uint64_t> this_gain(light, gain);
      const bool better = victim_ == kNone || this_gain > victim_gain ||
                          (this_gain == victim_gain && tally.id < tallies_[victim_].id);
      if (!better || !usable(tally.id)) continue;
      victim_ = slot;
      victim_gain = this_gain;
    }
    spare_ = spare;
    if (victim_ != kNone) break;
  }
  if (victim_ == kNone) return std::nullopt;
  victim_warm_ = warm_;
  kept_bytes_ = 0;
  return tallies_[victim_].id;
}

// Warmest first, so that the blocks that do not fit half a segment are the coldest of the rest.
std::optional<EvictionOrder::Verdict> EvictionOrder::TakeNext() {
  if (victim_ == kNone || tallies_[victim_].blocks.empty()) return std::nullopt;
  const Key key = *std::prev(tallies_[victim_].blocks.end());
  const Item& item = At(key.item);
  Verdict verdict;
  verdict.key = item.key;
  verdict.expired = item.rank < kUnusedRank;
  const bool held = item.rank == kPinnedRank || (spare_ && item.rank >= kInUseRank);
  const bool cold = !held && key < victim_warm_;
  verdict.keep = held || (!cold && kept_bytes_ + item.bytes <= segment_bytes_ / 2);
  if (verdict.keep) kept_bytes_ += item.bytes;
  Remove(key.item);
  return verdict;
}

}  // namespace winnow::storage

#include "storage/reclaimer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "storage/check.h"

namespace winnow::storage {
namespace {

// Blocks of a victim that are dealt with in one go: dropping one takes some 2 us.
constexpr int kEmptyingBlocks = 64;
// Moves at a time: they are committed and published together, some 5 us each.
constexpr size_t kMovesMax = 64;

}  // namespace

bool Reclaimer::Start() {
  if (victim_ != nullptr) return true;
  const SegmentLog::Dead dead = log_.DeleteDead();
  if (dead != SegmentLog::Dead::kNone || !order_.settled()) return true;
  const auto id = order_.Choose([this](uint64_t segment) { return log_.At(segment).stuck == 0; });
  if (!id) return false;
  env_.Passed("reclaim.chosen");
  victim_ = &log_.At(*id);
  log_.SetVictim(victim_, true);
  choosing_ = true;
  EmptyVictim();
  return true;
}

bool Reclaimer::Empty(Segment* segment) {
  if (victim_ != nullptr) return false;
  victim_ = segment;
  log_.SetVictim(victim_, true);
  table_.ForEach([&](const BlockKey& key, const Entry& entry) {
    if (entry.record->segment_id == segment->id) keys_.push_back(key);
  });
  return true;
}

void Reclaimer::Advance() {
  if (choosing_) EmptyVictim();
  if (!choosing_) StartMoves();
}

// Drops blocks of the victim, or arranges their move: a part of them, the rest with the next call.
void Reclaimer::EmptyVictim() {
  std::vector<BlockKey> erased;
  for (int i = 0; i < kEmptyingBlocks; ++i) {
    const auto verdict = order_.TakeNext();
    if (!verdict) {
      choosing_ = false;
      break;
    }
    Entry* entry = table_.Find(verdict->key);
    WINNOW_CHECK(entry != nullptr);
    entry->order = EvictionOrder::kNone;
    if (verdict->keep) {
      keys_.push_back(verdict->key);
      continue;
    }
    committer_.Remove(verdict->key, &erased);
    ++(verdict->expired ? env_.stats.expired_blocks : env_.stats.evicted_blocks);
  }
  committer_.Forget(std::move(erased));
  if (!choosing_ && keys_.empty()) LeaveVictim();
}

void Reclaimer::StartMoves() {
  while (!keys_.empty() && moves_ < kMovesMax) {
    const BlockKey key = keys_.front();
    const Entry* entry = table_.Find(key);
    // Erased or replaced meanwhile: it has left the victim by itself.
    if (entry != nullptr && entry->record->segment_id == victim_->id) {
      if (!host_.StartMove(key, *entry, victim_)) return;
      ++moves_;
    }
    keys_.pop_front();
  }
  if (victim_ != nullptr && moves_ == 0 && keys_.empty()) LeaveVictim();
}

void Reclaimer::LeaveVictim() { log_.SetVictim(std::exchange(victim_, nullptr), false); }

uint64_t Reclaimer::bytes_to_place() const {
  const uint64_t victim_bytes = victim_ == nullptr ? 0 : victim_->live_bytes;
  return victim_bytes - std::min(victim_bytes, placed_bytes_);
}

}  // namespace winnow::storage

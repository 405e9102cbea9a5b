#include "engine/kv/kv_event_log.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/check.h"

namespace winnow::engine {
namespace {

size_t Index(KvTier tier) { return static_cast<size_t>(tier); }

}  // namespace

KvEventLog::KvEventLog(Options options) : options_(std::move(options)) {
  WINNOW_CHECK(options_.max_batches >= 1 && options_.max_events >= 1 &&
               options_.unix_seconds != nullptr);
  Cleared();
  Commit();
}

// ---- the engine thread ----

void KvEventLog::Tell(KvEvent::Kind kind, KvTier tier,
                      std::shared_ptr<const KvBlockContent> block) {
  pending_.push_back({kind, tier, std::move(block)});
}

void KvEventLog::Stored(KvTier tier, const BlockName& name, const std::optional<Digest>& parent,
                        std::span<const int32_t> tokens) {
  Live& live = live_[name.chain];
  if (live.block == nullptr) {
    live.block = std::make_shared<const KvBlockContent>(
        KvBlockContent{name, parent, {tokens.begin(), tokens.end()}});
  }
  Copied(tier, name.chain);
}

void KvEventLog::Copied(KvTier tier, const Digest& name) {
  const auto found = live_.find(name);
  if (found == live_.end()) return;
  auto& place = found->second.place[Index(tier)];
  if (place.has_value()) return;
  std::list<Digest>& names = by_tier_[Index(tier)];
  place = names.insert(names.end(), name);
  Tell(KvEvent::Kind::kStored, tier, found->second.block);
}

void KvEventLog::Removed(KvTier tier, const Digest& name) {
  const auto found = live_.find(name);
  if (found == live_.end() || !found->second.place[Index(tier)].has_value()) return;
  Live& live = found->second;
  by_tier_[Index(tier)].erase(*live.place[Index(tier)]);
  live.place[Index(tier)].reset();
  Tell(KvEvent::Kind::kRemoved, tier, live.block);
  for (const auto& place : live.place) {
    if (place.has_value()) return;
  }
  live_.erase(found);
}

void KvEventLog::Cleared() {
  live_.clear();
  for (std::list<Digest>& names : by_tier_) names.clear();
  // It undoes all that came before it in this batch.
  pending_.clear();
  Tell(KvEvent::Kind::kCleared, KvTier::kFast, nullptr);
}

void KvEventLog::Commit() {
  if (pending_.empty()) return;
  auto batch = std::make_shared<KvEventBatch>();
  batch->unix_seconds = options_.unix_seconds();
  batch->events = std::exchange(pending_, {});
  std::vector<std::shared_ptr<const KvEventBatch>> dropped;  // freed without the lock
  {
    const MutexLock lock(mutex_);
    batch->sequence = next_++;
    for (const KvEvent& event : batch->events) {
      auto& stored = stored_[Index(event.tier)];
      if (event.kind == KvEvent::Kind::kStored) {
        stored.emplace(event.block->name.chain, event.block);
      } else if (event.kind == KvEvent::Kind::kRemoved) {
        stored.erase(event.block->name.chain);
      } else {
        for (auto& of_tier : stored_) of_tier.clear();
      }
    }
    kept_events_ += batch->events.size();
    kept_.push_back(std::move(batch));
    while (kept_.size() > options_.max_batches ||
           (kept_events_ > options_.max_events && kept_.size() > 1)) {
      kept_events_ -= kept_.front()->events.size();
      dropped.push_back(std::move(kept_.front()));
      kept_.pop_front();
    }
  }
  changed_.NotifyAll();
}

std::shared_ptr<const KvBlockContent> KvEventLog::NextOf(KvTier tier) {
  std::list<Digest>& names = by_tier_[Index(tier)];
  if (names.empty()) return nullptr;
  names.splice(names.end(), names, names.begin());  // iterators stay good
  return live_.at(names.back()).block;
}

// ---- any thread ----

KvEventLog::Range KvEventLog::range() const {
  const MutexLock lock(mutex_);
  return {next_ - kept_.size(), next_};
}

std::optional<std::vector<std::shared_ptr<const KvEventBatch>>> KvEventLog::Read(
    uint64_t from, size_t most) const {
  const MutexLock lock(mutex_);
  const uint64_t first = next_ - kept_.size();
  if (from < first || from > next_) return std::nullopt;
  std::vector<std::shared_ptr<const KvEventBatch>> out;
  for (uint64_t i = from - first; i < kept_.size() && out.size() < most; ++i) {
    out.push_back(kept_[i]);
  }
  return out;
}

KvEventLog::Snapshot KvEventLog::Take() const {
  Snapshot snapshot;
  std::array<std::vector<std::shared_ptr<const KvBlockContent>>, kKvTiers> copies;
  {
    const MutexLock lock(mutex_);
    snapshot.next = next_;
    for (size_t tier = 0; tier < kKvTiers; ++tier) {
      copies[tier].reserve(stored_[tier].size());
      for (const auto& [name, block] : stored_[tier]) copies[tier].push_back(block);
    }
  }
  // A chain's blocks have ascending indexes, so this puts parents before children.
  for (size_t tier = 0; tier < kKvTiers; ++tier) {
    for (auto& block : copies[tier]) {
      snapshot.stored.push_back(
          {KvEvent::Kind::kStored, static_cast<KvTier>(tier), std::move(block)});
    }
  }
  std::stable_sort(
      snapshot.stored.begin(), snapshot.stored.end(),
      [](const KvEvent& a, const KvEvent& b) { return a.block->name.index < b.block->name.index; });
  return snapshot;
}

void KvEventLog::WaitFor(uint64_t from, std::chrono::nanoseconds timeout) const {
  // By the steady clock.
  const auto until = std::chrono::steady_clock::now() + timeout;
  const MutexLock lock(mutex_);
  const uint64_t wakes = wakes_;
  while (next_ <= from && wakes_ == wakes && changed_.WaitUntil(mutex_, until)) {
  }
}

void KvEventLog::Wake() const {
  {
    const MutexLock lock(mutex_);
    ++wakes_;
  }
  changed_.NotifyAll();
}

}  // namespace winnow::engine

// A BlockStore that fails, delays and reorders, by a seed: what the engine's tests put under it to
// show that no fault of storage changes a token. It keeps the contract: a miss leaves `into` alone,
// and kOk means right bytes.
#ifndef WINNOW_TESTS_FAULT_FAULTY_STORE_H_
#define WINNOW_TESTS_FAULT_FAULTY_STORE_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "storage/block_store.h"

namespace winnow::storage {

class FaultyStore final : public BlockStore {
 public:
  struct Faults {
    double miss_share = 0;  // of operations: answered with a random reason, never passed on
    double lose_share = 0;  // of Puts: answered kOk and forgotten, as after an eviction
    int polls_max = 0;      // completions are held for up to this many Polls
    bool hold = false;      // operations do not start until this is false again
    int hold_polls = 0;     // then `hold` ends by itself; 0: it does not
    // From the first Poll during `hold` that may wait for more than a millisecond on, it lasts for so many Polls: a slow read
    // that a step waits for.
    int stall_polls = 0;
    bool reorder = false;
    std::optional<TierState> state = {};  // that it says it is in; what is not kOk takes no Puts
  };

  FaultyStore(std::unique_ptr<BlockStore> inner, uint32_t seed)
      : inner_(std::move(inner)), random_(seed) {}

  Faults faults;
  // As on bad sectors: reads of them fail, until they are erased and so put elsewhere.
  std::set<std::array<uint8_t, 40>> unreadable;
  std::set<std::array<uint8_t, 40>> put;  // keys, while they are not erased
  uint64_t started = 0;                   // operations that reached the store below
  mutable uint64_t finds = 0;
  BlockStore& inner() { return *inner_; }

  void Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
           const PutOptions& options) override {
    if (Missed(tag, Operation::kPut)) return;
    if (faults.state.value_or(TierState::kOk) != TierState::kOk) {
      return Answer({tag, Operation::kPut, Outcome::kMiss, Reason::kOff});
    }
    put.insert(id.key.bytes);
    if (Chance(faults.lose_share)) return Answer({tag, Operation::kPut, Outcome::kOk});
    std::vector<std::byte> copy(payload.begin(), payload.end());
    Start(
        [this, tag, id, copy = std::move(copy), options] { inner_->Put(tag, id, copy, options); });
  }
  void Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
           int64_t deadline_ns) override {
    if (Missed(tag, Operation::kGet) || Unreadable(tag, Operation::kGet, id)) return;
    Start([this, tag, id, into, deadline_ns] { inner_->Get(tag, id, into, deadline_ns); });
  }
  void GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                std::span<std::byte> into, int64_t deadline_ns) override {
    if (Missed(tag, Operation::kGetPages) || Unreadable(tag, Operation::kGetPages, id)) return;
    std::vector<uint32_t> copy(pages.begin(), pages.end());
    Start([this, tag, id, copy = std::move(copy), into, deadline_ns] {
      inner_->GetPages(tag, id, copy, into, deadline_ns);
    });
  }
  void Erase(uint64_t tag, const BlockKey& key) override {
    unreadable.erase(key.bytes);
    put.erase(key.bytes);
    Start([this, tag, key] { inner_->Erase(tag, key); });
  }

  void Poll(std::chrono::nanoseconds wait, std::vector<Completion>* completions) override {
    if (faults.hold && faults.stall_polls > 0 && wait > std::chrono::milliseconds(1)) {
      faults.hold_polls = std::exchange(faults.stall_polls, 0);
    }
    if (faults.hold_polls > 0 && --faults.hold_polls == 0) faults.hold = false;
    if (!faults.hold) {
      for (const auto& start : std::exchange(waiting_, {})) start();
    }
    std::vector<Completion> done;
    const bool waits = held_.empty() && !faults.hold;
    inner_->Poll(waits ? wait : std::chrono::nanoseconds(0), &done);
    for (const Completion& completion : done) Answer(completion);
    const size_t before = completions->size();
    for (auto it = held_.begin(); it != held_.end();) {
      if (it->second-- > 0) {
        ++it;
        continue;
      }
      completions->push_back(it->first);
      it = held_.erase(it);
    }
    if (faults.reorder) {
      std::shuffle(completions->begin() + static_cast<ptrdiff_t>(before), completions->end(),
                   random_);
    }
  }

  std::optional<BlockInfo> Find(const BlockId& id) const override {
    ++finds;
    return inner_->Find(id);
  }
  bool Contains(const BlockKey& key) const override { return inner_->Contains(key); }
  void ForEach(const Visit& visit) const override { inner_->ForEach(visit); }
  std::vector<BlockKey> AsidesOf(const std::array<uint8_t, 32>& chain) const override {
    return inner_->AsidesOf(chain);
  }
  uint64_t TenantBytes(const std::array<uint8_t, 32>& tenant) const override {
    return inner_->TenantBytes(tenant);
  }
  bool SetPinned(const BlockKey& key, bool pinned) override {
    return inner_->SetPinned(key, pinned);
  }
  void Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) override {
    if (!faults.hold) return inner_->Raise(key, priority, ttl_s);
    waiting_.push_back([this, key, priority, ttl_s] { inner_->Raise(key, priority, ttl_s); });
  }
  void SetInUse(const BlockKey& key, bool in_use) override {
    if (!faults.hold) return inner_->SetInUse(key, in_use);
    waiting_.push_back([this, key, in_use] { inner_->SetInUse(key, in_use); });
  }
  size_t in_flight() const override { return inner_->in_flight() + held_.size() + waiting_.size(); }
  bool idle() const override { return in_flight() == 0 && inner_->idle(); }
  StoreStats stats() const override {
    StoreStats stats = inner_->stats();
    stats.state = faults.state.value_or(stats.state);
    return stats;
  }

 private:
  bool Chance(double share) {
    return share > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < share;
  }
  bool Missed(uint64_t tag, Operation operation) {
    if (!Chance(faults.miss_share)) return false;
    static constexpr Reason kReasonsToMiss[] = {Reason::kCorrupt, Reason::kIoError, Reason::kLate,
                                                Reason::kOff, Reason::kBusy};
    Answer({tag, operation, Outcome::kMiss, kReasonsToMiss[random_() % 5]});
    return true;
  }
  bool Unreadable(uint64_t tag, Operation operation, const BlockId& id) {
    if (!unreadable.contains(id.key.bytes)) return false;
    Answer({tag, operation, Outcome::kMiss, Reason::kIoError});
    return true;
  }
  void Start(std::function<void()> start) {
    if (faults.hold) {
      waiting_.push_back(std::move(start));
    } else {
      start();
    }
    ++started;
  }
  void Answer(const Completion& completion) {
    const int polls =
        faults.polls_max == 0 ? 0 : static_cast<int>(random_() % (faults.polls_max + 1));
    held_.emplace_back(completion, polls);
  }

  std::unique_ptr<BlockStore> inner_;
  std::mt19937 random_;
  std::vector<std::pair<Completion, int>> held_;
  std::vector<std::function<void()>> waiting_;
};

}  // namespace winnow::storage

#endif  // WINNOW_TESTS_FAULT_FAULTY_STORE_H_

#include "storage/late_store.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "storage/mutex.h"

namespace winnow::storage {

class LateStore::Tries {
 public:
  explicit Tries(const LateStoreOptions& options) : options_(options), thread_([this] { Run(); }) {}
  ~Tries() {
    {
      const MutexLock lock(mutex_);
      ends_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }

  // The store, once.
  std::unique_ptr<BlockStore> Take() {
    if (!ready_.load(std::memory_order_acquire)) return nullptr;
    const MutexLock lock(mutex_);
    return std::move(store_);
  }

 private:
  void Run() {
    std::chrono::nanoseconds pause = options_.pause;
    while (true) {
      {
        const MutexLock lock(mutex_);
        const auto until = std::chrono::steady_clock::now() + pause;
        while (!ends_ && changed_.WaitUntil(mutex_, until)) {
        }
        if (ends_) return;
      }
      auto opened = options_.open();
      if (opened.ok()) {
        const MutexLock lock(mutex_);
        store_ = *std::move(opened);
        ready_.store(true, std::memory_order_release);
        return;
      }
      pause = std::min(2 * pause, options_.pause_max);
    }
  }

  const LateStoreOptions& options_;
  Mutex mutex_;
  CondVar changed_;
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<BlockStore> store_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> ready_ = false;
  std::thread thread_;
};

LateStore::LateStore(LateStoreOptions options)
    : options_(std::move(options)), tries_(std::make_unique<Tries>(options_)) {
  stats_.state = TierState::kOff;
  stats_.capacity_bytes = options_.capacity_bytes;
}

LateStore::~LateStore() = default;

void LateStore::Take() {
  if (store_ != nullptr) return;
  store_ = tries_->Take();
  if (store_ == nullptr) return;
  tries_.reset();
  if (options_.log) options_.log("there is room: the store is open");
}

void LateStore::Refuse(uint64_t tag, Operation operation) {
  refused_.push_back({tag, operation, Outcome::kMiss, Reason::kOff});
  if (operation == Operation::kPut) {
    ++stats_.puts;
  } else if (operation != Operation::kErase) {
    ++stats_.gets;
    ++stats_.misses[static_cast<size_t>(Reason::kOff)];
  }
}

void LateStore::Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
                    const PutOptions& options) {
  if (store_ == nullptr) return Refuse(tag, Operation::kPut);
  store_->Put(tag, id, payload, options);
}

void LateStore::Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
                    int64_t deadline_ns) {
  if (store_ == nullptr) return Refuse(tag, Operation::kGet);
  store_->Get(tag, id, into, deadline_ns);
}

void LateStore::GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                         std::span<std::byte> into, int64_t deadline_ns) {
  if (store_ == nullptr) return Refuse(tag, Operation::kGetPages);
  store_->GetPages(tag, id, pages, into, deadline_ns);
}

// A copy of it in the directory, if there is one, is not erased: kOff says that it may come back.
void LateStore::Erase(uint64_t tag, const BlockKey& key) {
  if (store_ == nullptr) return Refuse(tag, Operation::kErase);
  store_->Erase(tag, key);
}

void LateStore::Poll(std::chrono::nanoseconds wait, std::vector<Completion>* completions) {
  Take();
  completions->insert(completions->end(), refused_.begin(), refused_.end());
  const bool answered = !refused_.empty();
  refused_.clear();
  if (store_ != nullptr) {
    store_->Poll(answered ? std::chrono::nanoseconds(0) : wait, completions);
  }
}

std::optional<BlockInfo> LateStore::Find(const BlockId& id) const {
  return store_ == nullptr ? std::nullopt : store_->Find(id);
}

bool LateStore::Contains(const BlockKey& key) const {
  return store_ != nullptr && store_->Contains(key);
}

void LateStore::ForEach(const Visit& visit) const {
  if (store_ != nullptr) store_->ForEach(visit);
}

std::vector<BlockKey> LateStore::AsidesOf(const std::array<uint8_t, 32>& chain) const {
  return store_ == nullptr ? std::vector<BlockKey>() : store_->AsidesOf(chain);
}

uint64_t LateStore::TenantBytes(const std::array<uint8_t, 32>& tenant) const {
  return store_ == nullptr ? 0 : store_->TenantBytes(tenant);
}

bool LateStore::SetPinned(const BlockKey& key, bool pinned) {
  return store_ != nullptr && store_->SetPinned(key, pinned);
}

void LateStore::Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) {
  if (store_ != nullptr) store_->Raise(key, priority, ttl_s);
}

void LateStore::SetInUse(const BlockKey& key, bool in_use) {
  if (store_ != nullptr) store_->SetInUse(key, in_use);
}

size_t LateStore::in_flight() const {
  return refused_.size() + (store_ == nullptr ? 0 : store_->in_flight());
}

StoreStats LateStore::stats() const { return store_ == nullptr ? stats_ : store_->stats(); }

TierState LateStore::state() const { return store_ == nullptr ? TierState::kOff : store_->state(); }

bool LateStore::idle() const { return refused_.empty() && (store_ == nullptr || store_->idle()); }

}  // namespace winnow::storage

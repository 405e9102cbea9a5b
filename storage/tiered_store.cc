#include "storage/tiered_store.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/container/flat_hash_set.h"

#include "storage/check.h"
#include "storage/format.h"

namespace winnow::storage {
namespace {

// The counts of reads are a hint; when there are too many of them, all start anew.
constexpr size_t kCountedBlocksMax = 65536;

// A later deadline may join an earlier one's read: it is answered in time, or missed as late.
int64_t Deadline(int64_t deadline_ns) {
  return deadline_ns == 0 ? std::numeric_limits<int64_t>::max() : deadline_ns;
}

}  // namespace

TieredStore::TieredStore(TieredStoreOptions options, std::unique_ptr<BlockStore> disk,
                         const Clock* clock)
    : options_(std::move(options)), clock_(clock), disk_(std::move(disk)) {
  HostStoreOptions host = options_.host;
  host.on_evict = [this](const BlockId& id, std::span<const std::byte> payload,
                         const PutOptions& put) { Demote(id, payload, put); };
  host_ = std::make_unique<HostStore>(std::move(host), clock_);
}

// Disk first: until it is gone, its reads may land in our buffers.
TieredStore::~TieredStore() { disk_.reset(); }

// Host answers at once.
Reason TieredStore::HostAnswer() {
  scratch_.clear();
  host_->Poll(std::chrono::nanoseconds(0), &scratch_);
  WINNOW_CHECK(scratch_.size() == 1);
  return scratch_[0].reason;
}

void TieredStore::Done(uint64_t tag, Operation operation, Reason reason, bool from_disk) {
  const Outcome outcome = reason == Reason::kNone ? Outcome::kOk : Outcome::kMiss;
  done_.push_back({tag, operation, outcome, reason, from_disk});
  if (operation == Operation::kPut) {
    ++stats_.puts;
    if (outcome == Outcome::kOk) ++stats_.puts_stored;
  } else if (operation != Operation::kErase) {
    ++stats_.gets;
    if (outcome == Outcome::kOk) {
      ++stats_.hits;
    } else {
      ++stats_.misses[static_cast<size_t>(reason)];
    }
  }
}

uint64_t TieredStore::NewRequest(uint64_t tag, Operation operation, const BlockKey& key,
                                 std::span<std::byte> into) {
  const uint64_t number = next_++;
  Request& request = requests_[number];
  request.tag = tag;
  request.operation = operation;
  request.key = key;
  request.into = into;
  ++in_flight_;
  return number;
}

void TieredStore::FinishPart(uint64_t number, Reason reason) {
  const auto it = requests_.find(number);
  Request& request = it->second;
  if (request.reason == Reason::kNone) request.reason = reason;
  if (--request.parts_left > 0) return;
  const bool read =
      request.operation == Operation::kGet || request.operation == Operation::kGetPages;
  if (read && request.reason == Reason::kNone) {
    if (!request.parts.empty()) {
      std::memcpy(request.into.data(), request.parts.data(), request.into.size());
    }
    stats_.payload_bytes_read += request.into.size();
  }
  // Put: one tier is enough. Erase: there was something in host, so it is not absent; but a disk
  // that could not erase durably must be told of.
  if (request.host_ok &&
      (request.operation == Operation::kPut || request.reason == Reason::kAbsent)) {
    request.reason = Reason::kNone;
  }
  --in_flight_;
  Done(request.tag, request.operation, request.reason, read);
  requests_.erase(it);
}

void TieredStore::Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
                      const PutOptions& options) {
  // The pin is kept on disk, where it does not take DRAM from others; without write-through, here.
  PutOptions host_options = options;
  host_options.pinned = options.pinned && !options_.write_through;
  host_->Put(0, id, payload, host_options);
  const Reason reason = HostAnswer();
  // Blocks that the host cannot take go to disk whatever the policy.
  if (!options_.write_through && reason == Reason::kNone) {
    return Done(tag, Operation::kPut, Reason::kNone);
  }
  const uint64_t number = NewRequest(tag, Operation::kPut, id.key, {});
  requests_[number].parts_left = 1;
  requests_[number].host_ok = reason == Reason::kNone;
  disk_->Put(number, id, payload, options);
}

void TieredStore::Demote(const BlockId& id, std::span<const std::byte> payload,
                         const PutOptions& options) {
  if (options.priority < options_.demote_priority_min || disk_->Find(id)) return;
  ++demoted_blocks_;
  disk_->Put(next_++, id, payload, options);  // nobody waits; a miss is a block that is dropped
}

// True when the block has been read from disk often enough to be kept in host.
bool TieredStore::CountRead(const BlockKey& key) {
  if (reads_.size() >= kCountedBlocksMax) reads_.clear();
  return ++reads_[key] >= options_.promote_after_reads;
}

void TieredStore::Get(uint64_t tag, const BlockId& id, std::span<std::byte> into,
                      int64_t deadline_ns) {
  if (host_->Find(id)) {
    host_->Get(0, id, into, deadline_ns);
    const Reason reason = HostAnswer();
    if (reason == Reason::kNone) stats_.payload_bytes_read += into.size();
    // A flipped bit in DRAM: disk may still have the block.
    if (reason != Reason::kCorrupt) return Done(tag, Operation::kGet, reason);
  }
  const uint64_t number = NewRequest(tag, Operation::kGet, id.key, into);
  requests_[number].parts_left = 1;
  const bool promotes = CountRead(id.key);
  if (const auto it = whole_fetches_.find(id.key); it != whole_fetches_.end()) {
    Fetch& fetch = fetches_[it->second];
    if (fetch.id == id && !fetch.erased && fetch.into.size() == into.size() &&
        Deadline(fetch.deadline_ns) <= Deadline(deadline_ns)) {
      ++joined_reads_;
      fetch.waiters.push_back({number, 0, 0});
      fetch.promotes |= promotes;
      return;
    }
  }
  const uint64_t fetch_number = next_++;
  Fetch& fetch = fetches_[fetch_number];
  fetch.id = id;
  fetch.whole = true;
  fetch.promotes = promotes;
  fetch.deadline_ns = deadline_ns;
  fetch.into = into;
  fetch.waiters.push_back({number, 0, 0});
  whole_fetches_.try_emplace(id.key, fetch_number);
  disk_->Get(fetch_number, id, into, deadline_ns);
}

void TieredStore::GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                           std::span<std::byte> into, int64_t deadline_ns) {
  WINNOW_CHECK(into.size() == pages.size() * kPageBytes);
  if (host_->Find(id)) {
    host_->GetPages(0, id, pages, into, deadline_ns);
    const Reason reason = HostAnswer();
    if (reason == Reason::kNone) stats_.payload_bytes_read += into.size();
    if (reason != Reason::kCorrupt) return Done(tag, Operation::kGetPages, reason);
  }
  if (pages.empty()) {
    return Done(tag, Operation::kGetPages, disk_->Find(id) ? Reason::kNone : Reason::kAbsent);
  }
  const uint64_t number = NewRequest(tag, Operation::kGetPages, id.key, into);
  Request& request = requests_[number];
  request.parts_left = static_cast<uint32_t>(pages.size());  // each page is one, joined or read
  std::vector<uint32_t> missing;
  std::vector<size_t> missing_at;
  for (size_t i = 0; i < pages.size(); ++i) {
    const auto it = page_fetches_.find({id.key, pages[i]});
    if (it != page_fetches_.end()) {
      Fetch& fetch = fetches_[it->second];
      if (fetch.id == id && !fetch.erased && Deadline(fetch.deadline_ns) <= Deadline(deadline_ns)) {
        const auto page = std::lower_bound(fetch.pages.begin(), fetch.pages.end(), pages[i]);
        fetch.waiters.push_back({number, static_cast<size_t>(page - fetch.pages.begin()), i});
        ++joined_reads_;
        continue;
      }
    }
    missing.push_back(pages[i]);
    missing_at.push_back(i);
  }
  if (missing.size() < pages.size()) request.parts.resize(into.size());
  if (!missing.empty()) {
    const uint64_t fetch_number = next_++;
    Fetch& fetch = fetches_[fetch_number];
    fetch.id = id;
    fetch.deadline_ns = deadline_ns;
    fetch.pages = missing;
    if (request.parts.empty()) {
      fetch.into = into;
    } else {
      fetch.buffer.resize(missing.size() * kPageBytes);
      fetch.into = fetch.buffer;
    }
    for (size_t i = 0; i < missing.size(); ++i) {
      fetch.waiters.push_back({number, i, missing_at[i]});
      page_fetches_.try_emplace({id.key, missing[i]}, fetch_number);
    }
    disk_->GetPages(fetch_number, id, fetch.pages, fetch.into, deadline_ns);
  }
  if (CountRead(id.key)) Promote(id);
}

// Reads a whole block because its pages are asked for again and again.
void TieredStore::Promote(const BlockId& id) {
  const auto info = disk_->Find(id);
  if (!info || promotions_ >= options_.promotions_max || whole_fetches_.contains(id.key)) return;
  ++promotions_;
  const uint64_t number = next_++;
  Fetch& fetch = fetches_[number];
  fetch.id = id;
  fetch.whole = true;
  fetch.promotes = true;
  fetch.buffer.resize(info->payload_bytes);
  fetch.into = fetch.buffer;
  whole_fetches_[id.key] = number;
  disk_->Get(number, id, fetch.into, 0);
}

void TieredStore::OnFetched(uint64_t number, Reason reason) {
  const auto it = fetches_.find(number);
  Fetch fetch = std::move(it->second);
  fetches_.erase(it);
  if (fetch.whole) {
    const auto whole = whole_fetches_.find(fetch.id.key);
    if (whole != whole_fetches_.end() && whole->second == number) whole_fetches_.erase(whole);
    if (!fetch.buffer.empty()) --promotions_;
  }
  for (uint32_t page : fetch.pages) {
    const auto entry = page_fetches_.find({fetch.id.key, page});
    if (entry != page_fetches_.end() && entry->second == number) page_fetches_.erase(entry);
  }
  if (reason == Reason::kNone && fetch.promotes && !fetch.erased) {
    const auto info = disk_->Find(fetch.id);
    if (info) {
      host_->Put(0, fetch.id, fetch.into,
                 {.priority = info->priority,
                  .ttl_s = info->ttl_s,
                  .in_use = info->in_use,
                  .transient = info->transient});
      if (HostAnswer() == Reason::kNone) ++promoted_blocks_;
      reads_.erase(fetch.id.key);
    }
  }
  // The first request's own buffer goes last: the others copy from it, and the caller's
  // again once that request is answered.
  for (const Waiter& waiter : fetch.waiters) {
    Request& request = requests_[waiter.request];
    if (reason != Reason::kNone) continue;
    const size_t bytes = fetch.whole ? request.into.size() : kPageBytes;
    std::byte* to = request.parts.empty() ? request.into.data() : request.parts.data();
    to += waiter.to_page * kPageBytes;
    const std::byte* from = fetch.into.data() + waiter.from_page * kPageBytes;
    if (to != from) std::memcpy(to, from, bytes);
  }
  for (const Waiter& waiter : fetch.waiters) FinishPart(waiter.request, reason);
}

void TieredStore::Erase(uint64_t tag, const BlockKey& key) {
  host_->Erase(0, key);
  const bool in_host = HostAnswer() == Reason::kNone;
  for (auto& [number, fetch] : fetches_) {
    if (fetch.id.key == key) fetch.erased = true;
  }
  reads_.erase(key);
  const uint64_t number = NewRequest(tag, Operation::kErase, key, {});
  requests_[number].parts_left = 1;
  requests_[number].host_ok = in_host;
  disk_->Erase(number, key);
}

void TieredStore::Poll(std::chrono::nanoseconds wait, std::vector<Completion>* completions) {
  std::vector<Completion> from_disk;
  disk_->Poll(done_.empty() ? wait : std::chrono::nanoseconds(0), &from_disk);
  for (const Completion& completion : from_disk) {
    if (fetches_.contains(completion.tag)) {
      OnFetched(completion.tag, completion.reason);
    } else if (requests_.contains(completion.tag)) {
      FinishPart(completion.tag, completion.reason);
    }  // else a demotion
  }
  completions->insert(completions->end(), done_.begin(), done_.end());
  done_.clear();
}

std::optional<BlockInfo> TieredStore::Find(const BlockId& id) const {
  const auto on_disk = disk_->Find(id);
  return on_disk ? on_disk : host_->Find(id);
}

bool TieredStore::Contains(const BlockKey& key) const {
  return disk_->Contains(key) || host_->Contains(key);
}

void TieredStore::ForEach(const Visit& visit) const {
  absl::flat_hash_set<BlockKey> on_disk;
  disk_->ForEach([&](const BlockKey& key, const BlockInfo& info) {
    on_disk.insert(key);
    visit(key, info);
  });
  host_->ForEach([&](const BlockKey& key, const BlockInfo& info) {
    if (!on_disk.contains(key)) visit(key, info);
  });
}

std::vector<BlockKey> TieredStore::AsidesOf(const std::array<uint8_t, 32>& chain) const {
  std::vector<BlockKey> keys = disk_->AsidesOf(chain);
  for (const BlockKey& key : host_->AsidesOf(chain)) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  return keys;
}

uint64_t TieredStore::TenantBytes(const std::array<uint8_t, 32>& tenant) const {
  return std::max(disk_->TenantBytes(tenant), host_->TenantBytes(tenant));
}

bool TieredStore::SetPinned(const BlockKey& key, bool pinned) {
  const bool on_disk = disk_->SetPinned(key, pinned);
  if (on_disk && pinned) return true;
  return host_->SetPinned(key, pinned) || on_disk;
}

void TieredStore::Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) {
  host_->Raise(key, priority, ttl_s);
  disk_->Raise(key, priority, ttl_s);
}

void TieredStore::SetInUse(const BlockKey& key, bool in_use) {
  host_->SetInUse(key, in_use);
  disk_->SetInUse(key, in_use);
}

StoreStats TieredStore::stats() const {
  const StoreStats host = host_->stats();
  const StoreStats disk = disk_->stats();
  StoreStats stats = stats_;
  stats.state = disk.state;
  stats.blocks = std::max(host.blocks, disk.blocks);
  stats.used_bytes = host.used_bytes + disk.used_bytes;
  stats.capacity_bytes = host.capacity_bytes + disk.capacity_bytes;
  stats.pinned_bytes = host.pinned_bytes + disk.pinned_bytes;
  stats.device_bytes_read = disk.device_bytes_read;
  stats.device_bytes_written = disk.device_bytes_written;
  stats.evicted_blocks = host.evicted_blocks + disk.evicted_blocks;
  stats.expired_blocks = host.expired_blocks + disk.expired_blocks;
  stats.corrupt_blocks = host.corrupt_blocks + disk.corrupt_blocks;
  stats.io_errors = disk.io_errors;
  stats.read_latency = disk.read_latency;
  stats.read_latency_ns = disk.read_latency_ns;
  stats.in_flight = disk.in_flight;
  stats.io_backend = disk.io_backend;
  stats.moved_blocks = promoted_blocks_ + demoted_blocks_;
  return stats;
}

}  // namespace winnow::storage

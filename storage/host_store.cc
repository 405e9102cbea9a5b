#include "storage/host_store.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/check.h"
#include "storage/format.h"

namespace winnow::storage {

HostStore::Lease::~Lease() {
  if (entry_ == nullptr || --entry_->leases > 0 || !entry_->doomed) return;
  store_->FreeMemory(entry_);
  std::erase_if(store_->doomed_, [this](const auto& held) { return held.get() == entry_; });
}

std::span<const std::byte> HostStore::Lease::bytes() const {
  return entry_->pages.first(entry_->payload_bytes);
}

HostStore::HostStore(HostStoreOptions options, const Clock* clock)
    : options_(std::move(options)), clock_(clock) {
  WINNOW_CHECK(options_.chunk_bytes >= kPageBytes);
  WINNOW_CHECK(options_.chunk_bytes <= options_.capacity_bytes);
  stats_.capacity_bytes = options_.capacity_bytes / kPageBytes * kPageBytes;
  chunks_.reserve(options_.capacity_bytes / options_.chunk_bytes + 1);
}

HostStore::~HostStore() = default;

void HostStore::Done(uint64_t tag, Operation operation, Reason reason) {
  const Outcome outcome = reason == Reason::kNone ? Outcome::kOk : Outcome::kMiss;
  done_.push_back({tag, operation, outcome, reason});
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

void HostStore::Link(Entry* entry) {
  if (entry->pinned) return;
  List& list = ListOf(*entry);
  list.push_front(entry);
  entry->recency = list.begin();
}

void HostStore::Unlink(Entry* entry) {
  if (!entry->pinned) ListOf(*entry).erase(entry->recency);
}

void HostStore::Touch(Entry* entry) {
  if (entry->pinned) return;
  List& list = ListOf(*entry);
  list.splice(list.begin(), list, entry->recency);
}

void HostStore::FreeMemory(Entry* entry) {
  chunks_[entry->chunk].allocator.Free(entry->first_page, PagesFor(entry->payload_bytes));
  stats_.used_bytes -= PageAlign(entry->payload_bytes);
}

// Out of the map; the memory follows at once or with the last lease.
void HostStore::Remove(Entry* entry) {
  Unlink(entry);
  if (entry->pinned) stats_.pinned_bytes -= PageAlign(entry->payload_bytes);
  auto node = entries_.extract(entry->id.key);
  WINNOW_CHECK(!node.empty() && node.mapped().get() == entry);
  CountTenant(*entry, false);
  asides_.Remove(entry->id.key);
  --stats_.blocks;
  if (entry->leases == 0) {
    FreeMemory(entry);
    return;
  }
  entry->doomed = true;
  doomed_.push_back(std::move(node.mapped()));
}

HostStore::Entry* HostStore::Lookup(const BlockId& id, Reason* reason) {
  const auto it = entries_.find(id.key);
  if (it == entries_.end()) {
    *reason = Reason::kAbsent;
    return nullptr;
  }
  Entry* entry = it->second.get();
  if (Expired(*entry)) {
    ++stats_.expired_blocks;
    Remove(entry);
    *reason = Reason::kAbsent;
    return nullptr;
  }
  if (!(entry->id == id)) {
    *reason = Reason::kIdentity;
    return nullptr;
  }
  Touch(entry);
  *reason = Reason::kNone;
  return entry;
}

bool HostStore::Verify(const Entry& entry, size_t page) const {
  return !options_.verify_reads ||
         PageSum(IdentitySum(entry.id).low, page,
                 entry.pages.subspan(page * kPageBytes, kPageBytes)) == entry.page_sums[page];
}

// The least recently used block of the lowest priority that has one; of those in use where there is
// no other. Leased blocks stay: evicting them would free nothing.
bool HostStore::EvictOne() {
  for (List& list : lru_) {
    for (auto it = list.rbegin(); it != list.rend(); ++it) {
      Entry* entry = *it;
      if (entry->leases > 0) continue;
      const int64_t now_ns = clock_->NowNs();
      const bool expired = entry->expires_at_ns != 0 && now_ns >= entry->expires_at_ns;
      if (expired) {
        ++stats_.expired_blocks;
      } else {
        ++stats_.evicted_blocks;
        if (options_.on_evict) {
          PutOptions options{
              .priority = entry->priority, .in_use = entry->in_use, .transient = entry->transient};
          if (entry->expires_at_ns != 0) {
            const int64_t left_ns = entry->expires_at_ns - now_ns;
            options.ttl_s = static_cast<uint32_t>(left_ns / 1'000'000'000 + 1);
          }
          options_.on_evict(entry->id, entry->pages.first(entry->payload_bytes), options);
        }
      }
      Remove(entry);
      return true;
    }
  }
  return false;
}

// Finds memory: in a chunk that is there, in a new one, or in what an eviction leaves.
bool HostStore::Place(Entry* entry) {
  const size_t pages = PagesFor(entry->payload_bytes);
  if (pages * kPageBytes > options_.chunk_bytes / kPageBytes * kPageBytes) return false;
  while (true) {
    for (uint32_t i = 0; i < chunks_.size(); ++i) {
      const auto first = chunks_[i].allocator.Allocate(pages);
      if (!first) continue;
      entry->chunk = i;
      entry->first_page = *first;
      entry->pages = chunks_[i].memory.bytes().subspan(*first * kPageBytes, pages * kPageBytes);
      stats_.used_bytes += pages * kPageBytes;
      return true;
    }
    uint64_t arena_bytes = 0;
    for (const Chunk& chunk : chunks_) arena_bytes += chunk.memory.bytes().size();
    const uint64_t next_bytes =
        std::min(options_.chunk_bytes, stats_.capacity_bytes - arena_bytes) / kPageBytes *
        kPageBytes;
    if (next_bytes >= pages * kPageBytes && Grow(next_bytes)) continue;
    if (!EvictOne()) return false;
  }
}

// False: the machine has no more to give. It is asked again when the next block finds no room.
bool HostStore::Grow(uint64_t bytes) {
  std::optional<PageMemory> memory = PageMemory::TryMake(bytes);
  if (!memory && !refused_ && options_.log) {
    options_.log(absl::StrCat("host memory: ", bytes,
                              " bytes more were refused; the store goes on ", "with ",
                              chunks_.size(), " chunks of ", options_.chunk_bytes, " bytes, of ",
                              options_.capacity_bytes, " bytes configured"));
  }
  refused_ = !memory;
  if (!memory) return false;
  chunks_.push_back({*std::move(memory), PageAllocator(bytes / kPageBytes)});
  if (options_.on_chunk) options_.on_chunk(chunks_.back().memory.bytes());
  return true;
}

void HostStore::Put(uint64_t tag, const BlockId& id, std::span<const std::byte> payload,
                    const PutOptions& options) {
  WINNOW_CHECK(!payload.empty());
  const uint8_t priority = std::min(options.priority, kPriorityMax);
  const int64_t expires_at_ns = ExpiryNs(options.ttl_s);
  Reason reason;
  if (Entry* entry = Lookup(id, &reason)) {
    if (entry->payload_bytes == payload.size()) {
      Unlink(entry);
      entry->priority = std::max(entry->priority, priority);
      entry->in_use |= options.in_use;
      CountTenant(*entry, false);
      entry->transient &= options.transient;
      CountTenant(*entry, true);
      Link(entry);
      entry->expires_at_ns = LaterExpiry(entry->expires_at_ns, expires_at_ns);
      if (options.pinned) SetPinned(id.key, true);
      return Done(tag, Operation::kPut, Reason::kNone);
    }
    Remove(entry);
  } else if (reason == Reason::kIdentity) {
    Remove(entries_.at(id.key).get());
  }
  if (payload.size() > UINT32_MAX) return Done(tag, Operation::kPut, Reason::kFull);
  auto entry = std::make_unique<Entry>();
  entry->id = id;
  entry->payload_bytes = static_cast<uint32_t>(payload.size());
  entry->priority = priority;
  entry->in_use = options.in_use;
  entry->transient = options.transient;
  entry->expires_at_ns = expires_at_ns;
  if (!Place(entry.get())) return Done(tag, Operation::kPut, Reason::kFull);
  std::memcpy(entry->pages.data(), payload.data(), payload.size());
  std::memset(entry->pages.data() + payload.size(), 0, entry->pages.size() - payload.size());
  const uint64_t seed = IdentitySum(id).low;
  for (size_t i = 0; i < PagesFor(payload.size()); ++i) {
    entry->page_sums.push_back(PageSum(seed, i, entry->pages.subspan(i * kPageBytes, kPageBytes)));
  }
  Link(entry.get());
  ++stats_.blocks;
  CountTenant(*entry, true);
  asides_.Add(id.key);
  entries_[id.key] = std::move(entry);
  if (options.pinned) SetPinned(id.key, true);
  Done(tag, Operation::kPut, Reason::kNone);
}

void HostStore::Get(uint64_t tag, const BlockId& id, std::span<std::byte> into, int64_t) {
  Reason reason;
  Entry* entry = Lookup(id, &reason);
  if (entry == nullptr) return Done(tag, Operation::kGet, reason);
  if (entry->payload_bytes != into.size()) return Done(tag, Operation::kGet, Reason::kIdentity);
  for (size_t i = 0; i < entry->page_sums.size(); ++i) {
    if (Verify(*entry, i)) continue;
    ++stats_.corrupt_blocks;
    Remove(entry);
    return Done(tag, Operation::kGet, Reason::kCorrupt);
  }
  std::memcpy(into.data(), entry->pages.data(), into.size());
  stats_.payload_bytes_read += into.size();
  stats_.device_bytes_read += into.size();
  Done(tag, Operation::kGet, Reason::kNone);
}

void HostStore::GetPages(uint64_t tag, const BlockId& id, std::span<const uint32_t> pages,
                         std::span<std::byte> into, int64_t) {
  WINNOW_CHECK(into.size() == pages.size() * kPageBytes);
  Reason reason;
  Entry* entry = Lookup(id, &reason);
  if (entry == nullptr) return Done(tag, Operation::kGetPages, reason);
  if (!pages.empty() && pages.back() >= entry->page_sums.size()) {
    return Done(tag, Operation::kGetPages, Reason::kIdentity);
  }
  for (uint32_t page : pages) {
    if (Verify(*entry, page)) continue;
    ++stats_.corrupt_blocks;
    Remove(entry);
    return Done(tag, Operation::kGetPages, Reason::kCorrupt);
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    std::memcpy(into.data() + i * kPageBytes, entry->pages.data() + pages[i] * kPageBytes,
                kPageBytes);
  }
  stats_.payload_bytes_read += into.size();
  stats_.device_bytes_read += into.size();
  Done(tag, Operation::kGetPages, Reason::kNone);
}

void HostStore::Erase(uint64_t tag, const BlockKey& key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return Done(tag, Operation::kErase, Reason::kAbsent);
  Remove(it->second.get());
  Done(tag, Operation::kErase, Reason::kNone);
}

void HostStore::Poll(std::chrono::nanoseconds, std::vector<Completion>* completions) {
  completions->insert(completions->end(), done_.begin(), done_.end());
  done_.clear();
}

std::optional<BlockInfo> HostStore::Find(const BlockId& id) const {
  const auto it = entries_.find(id.key);
  if (it == entries_.end()) return std::nullopt;
  const Entry& entry = *it->second;
  if (!(entry.id == id)) return std::nullopt;
  if (Expired(entry)) return std::nullopt;
  const int64_t left_ns = entry.expires_at_ns == 0 ? 0 : entry.expires_at_ns - clock_->NowNs();
  return BlockInfo{
      entry.payload_bytes, entry.priority,
      entry.pinned,        static_cast<uint32_t>((left_ns + 999'999'999) / 1'000'000'000),
      entry.in_use,        entry.transient};
}

bool HostStore::Contains(const BlockKey& key) const {
  const auto it = entries_.find(key);
  return it != entries_.end() && !Expired(*it->second);
}

void HostStore::ForEach(const Visit& visit) const {
  for (const auto& [key, entry] : entries_) {
    if (const auto info = Find(entry->id)) visit(key, *info);
  }
}

std::vector<BlockKey> HostStore::AsidesOf(const std::array<uint8_t, 32>& chain) const {
  return asides_.Of(chain);
}

uint64_t HostStore::TenantBytes(const std::array<uint8_t, 32>& tenant) const {
  const auto found = tenant_bytes_.find(TenantTag(tenant));
  return found == tenant_bytes_.end() ? 0 : found->second;
}

// Whether the block counts as its tenant's.
void HostStore::CountTenant(const Entry& entry, bool here) {
  if (entry.transient) return;
  const uint64_t bytes = PageAlign(entry.payload_bytes);
  const auto tenant = tenant_bytes_.try_emplace(TenantTag(entry.id.tenant)).first;
  tenant->second = here ? tenant->second + bytes : tenant->second - bytes;
  if (tenant->second == 0) tenant_bytes_.erase(tenant);
}

bool HostStore::SetPinned(const BlockKey& key, bool pinned) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return false;
  Entry* entry = it->second.get();
  if (entry->pinned == pinned) return true;
  const uint64_t bytes = PageAlign(entry->payload_bytes);
  if (pinned && stats_.pinned_bytes + bytes > stats_.capacity_bytes / 2) return false;
  Unlink(entry);
  entry->pinned = pinned;
  Link(entry);
  stats_.pinned_bytes = pinned ? stats_.pinned_bytes + bytes : stats_.pinned_bytes - bytes;
  return true;
}

bool HostStore::Expired(const Entry& entry) const {
  return entry.expires_at_ns != 0 && clock_->NowNs() >= entry.expires_at_ns;
}

int64_t HostStore::ExpiryNs(uint32_t ttl_s) const {
  return ttl_s == 0 ? 0 : clock_->NowNs() + int64_t{ttl_s} * 1'000'000'000;
}

void HostStore::Raise(const BlockKey& key, uint8_t priority, uint32_t ttl_s) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  Entry* entry = it->second.get();
  if (Expired(*entry)) return;
  Unlink(entry);
  entry->priority = std::max(entry->priority, std::min(priority, kPriorityMax));
  Link(entry);
  entry->expires_at_ns = LaterExpiry(entry->expires_at_ns, ExpiryNs(ttl_s));
}

void HostStore::SetInUse(const BlockKey& key, bool in_use) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  Entry* entry = it->second.get();
  Unlink(entry);
  entry->in_use = in_use;
  Link(entry);
}

StoreStats HostStore::stats() const { return stats_; }

HostStore::Lease HostStore::Acquire(const BlockId& id) {
  Reason reason;
  Entry* entry = Lookup(id, &reason);
  if (entry == nullptr) return {};
  for (size_t i = 0; i < entry->page_sums.size(); ++i) {
    if (Verify(*entry, i)) continue;
    ++stats_.corrupt_blocks;
    Remove(entry);
    return {};
  }
  ++entry->leases;
  return Lease(this, entry);
}

}  // namespace winnow::storage

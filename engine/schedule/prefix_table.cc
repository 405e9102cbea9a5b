#include "engine/schedule/prefix_table.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "engine/kv/block_pool.h"
#include "engine/kv/kv_memory.h"
#include "kernels/check.h"

namespace winnow::engine {
namespace {

constexpr Duration kSweepEvery = std::chrono::seconds(1);
constexpr Duration kExpireEvery = std::chrono::milliseconds(100);
// Looks for a deleted block, and the time between two.
constexpr int32_t kEraseLooks = 3;
constexpr Duration kEraseEvery = std::chrono::seconds(1);

}  // namespace

const Digest& PrefixTable::model() const {
  WINNOW_CHECK(memory_ != nullptr);
  return memory_->store().names().model;
}

size_t PrefixTable::pinned() const {
  return static_cast<size_t>(std::count_if(prefixes_.begin(), prefixes_.end(),
                                           [](const auto& entry) { return entry.second.pinned; }));
}

absl::StatusOr<PrefixInfo> PrefixTable::Put(const std::string& tenant, const std::string& name,
                                            std::span<const int32_t> tokens, bool pinned,
                                            std::optional<Duration> ttl,
                                            std::optional<Digest> salt) {
  if (memory_ == nullptr) return absl::FailedPreconditionError("there is no prefix cache");
  DropExpired();
  const size_t count = tokens.size() / static_cast<size_t>(block_tokens_);
  if (count == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a prefix of ", tokens.size(), " tokens has not one whole block of ", block_tokens_));
  }
  const Key key{tenant, name};
  const auto old = prefixes_.find(key);
  const size_t replaced = old == prefixes_.end() ? 0 : old->second.blocks->size();
  const auto first = prefixes_.lower_bound({tenant, ""});
  size_t of_tenant = 0;
  for (auto at = first; at != prefixes_.end() && at->first.first == tenant; ++at) ++of_tenant;
  if (old == prefixes_.end() && of_tenant >= kMaxPerTenant) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the tenant has ", of_tenant, " named prefixes, which is the most"));
  }
  if (old == prefixes_.end() && prefixes_.size() >= kMaxNames) {
    return absl::ResourceExhaustedError("all tenants together have too many named prefixes");
  }
  if (blocks_ - replaced + count > kMaxBlocks) {
    return absl::ResourceExhaustedError("the named prefixes of all tenants have too many blocks");
  }
  Prefix prefix;
  prefix.salt = salt.value_or(TenantSalt(tenant));
  prefix.tokens = static_cast<int32_t>(count) * block_tokens_;
  prefix.pinned = pinned;
  if (ttl.has_value()) prefix.expires = clock_.Now() + *ttl;
  auto blocks = std::make_shared<std::vector<Digest>>();
  Digest chain = ChainRoot(model(), prefix.salt);
  for (size_t i = 0; i < count; ++i) {
    chain = ChainNext(
        chain,
        tokens.subspan(i * static_cast<size_t>(block_tokens_), static_cast<size_t>(block_tokens_)),
        "");
    blocks->push_back(chain);
  }
  prefix.blocks = std::move(blocks);
  if (old != prefixes_.end()) Remove(old);
  blocks_ += count;
  const auto at = prefixes_.emplace(key, std::move(prefix)).first;
  StartSweep();
  return Describe(at->first, at->second);
}

std::vector<PrefixInfo> PrefixTable::List(const std::string& tenant) {
  DropExpired();
  std::vector<PrefixInfo> out;
  for (auto at = prefixes_.lower_bound({tenant, ""});
       at != prefixes_.end() && at->first.first == tenant; ++at) {
    out.push_back(Describe(at->first, at->second));
  }
  return out;
}

absl::StatusOr<PrefixInfo> PrefixTable::Change(const std::string& tenant, const std::string& name,
                                               std::optional<bool> pinned,
                                               std::optional<Duration> ttl) {
  DropExpired();
  const auto at = prefixes_.find({tenant, name});
  if (at == prefixes_.end()) return absl::NotFoundError("no such prefix");
  Prefix& prefix = at->second;
  if (ttl.has_value()) {
    prefix.expires =
        *ttl == Duration::zero() ? std::nullopt : std::optional<TimePoint>(clock_.Now() + *ttl);
  }
  if (pinned.has_value() && prefix.pinned != *pinned) {
    prefix.pinned = *pinned;
    if (!*pinned) Unpin(at->first, prefix);
    prefix.counts = {};
    StartSweep();
  }
  return Describe(at->first, prefix);
}

absl::Status PrefixTable::Delete(const std::string& tenant, const std::string& name) {
  DropExpired();
  const auto at = prefixes_.find({tenant, name});
  if (at == prefixes_.end()) return absl::NotFoundError("no such prefix");
  const Prefix gone = at->second;
  Remove(at);
  absl::flat_hash_set<Digest> kept;
  for (const auto& [key, other] : prefixes_) {
    if (other.salt == gone.salt) kept.insert(other.blocks->begin(), other.blocks->end());
  }
  // From the end: what is left of a prefix can be found at any moment.
  for (int32_t i = static_cast<int32_t>(gone.blocks->size()) - 1; i >= 0; --i) {
    const BlockName block{(*gone.blocks)[static_cast<size_t>(i)], gone.salt, i};
    if (kept.contains(block.chain)) continue;
    pool_.Drop(block.chain);
    memory_->store().Erase(block);
    erased_.push_back({block, kEraseLooks, clock_.Now() + kEraseEvery});
  }
  return absl::OkStatus();
}

std::vector<SavedPrefix> PrefixTable::Save() {
  DropExpired();
  std::vector<SavedPrefix> out;
  out.reserve(prefixes_.size());
  for (const auto& [key, prefix] : prefixes_) {
    out.push_back({.tenant = key.first,
                   .name = key.second,
                   .salt = prefix.salt,
                   .tokens = prefix.tokens,
                   .blocks = prefix.blocks,
                   .pinned = prefix.pinned,
                   .left = Describe(key, prefix).left});
  }
  return out;
}

void PrefixTable::Restore(std::vector<SavedPrefix> saved) {
  WINNOW_CHECK(memory_ != nullptr && prefixes_.empty());
  absl::flat_hash_set<Digest> pinned;
  for (SavedPrefix& entry : saved) {
    if (blocks_ + entry.blocks->size() > kMaxBlocks) break;
    if (entry.left.has_value() && *entry.left <= Duration::zero()) continue;
    if (entry.pinned) pinned.insert(entry.blocks->begin(), entry.blocks->end());
    Prefix prefix;
    prefix.salt = entry.salt;
    prefix.tokens = entry.tokens;
    prefix.blocks = std::move(entry.blocks);
    prefix.pinned = entry.pinned;
    if (entry.left.has_value()) prefix.expires = clock_.Now() + *entry.left;
    const size_t blocks = prefix.blocks->size();
    if (prefixes_.emplace(Key{entry.tenant, entry.name}, std::move(prefix)).second) {
      blocks_ += blocks;
    }
  }
  for (const Digest& chain : memory_->store().PinnedChains()) {
    if (!pinned.contains(chain)) memory_->store().SetPinned({.chain = chain}, false);
  }
}

void PrefixTable::Sweep(size_t blocks) {
  const TimePoint now = clock_.Now();
  if (now >= next_expiry_) {
    DropExpired();
    next_expiry_ = now + kExpireEvery;
  }
  EraseAgain(blocks);
  if (!at_.has_value()) {
    if (prefixes_.empty() || now < next_sweep_) return;
    at_ = prefixes_.begin()->first;
    at_block_ = 0;
    counting_ = {};
  }
  for (size_t i = 0; i < blocks; ++i) {
    const auto at = prefixes_.lower_bound(*at_);
    if (at == prefixes_.end()) {
      at_.reset();
      next_sweep_ = now + kSweepEvery;
      return;
    }
    if (at->first != *at_) {  // it went meanwhile
      at_ = at->first;
      at_block_ = 0;
      counting_ = {};
    }
    Prefix& prefix = at->second;
    Look(prefix, at_block_);
    if (++at_block_ < static_cast<int32_t>(prefix.blocks->size())) continue;
    prefix.counts = counting_;
    prefix.counts.swept = true;
    const auto next = std::next(at);
    at_ = next == prefixes_.end() ? Key{at->first.first, at->first.second + '\0'} : next->first;
    at_block_ = 0;
    counting_ = {};
  }
}

void PrefixTable::Look(Prefix& prefix, int32_t i) {
  const BlockName block{(*prefix.blocks)[static_cast<size_t>(i)], prefix.salt, i};
  counting_.fast_blocks += pool_.Find(block.chain).has_value();
  const bool stored = memory_->store().StoredUnder(block.chain);
  counting_.stored_blocks += stored;
  if (!prefix.pinned) return;
  pool_.SetPinned(block.chain, true);
  counting_.pinned_blocks += stored && memory_->store().SetPinned(block, true);
}

void PrefixTable::EraseAgain(size_t most) {
  const TimePoint now = clock_.Now();
  for (size_t i = 0; i < most && !erased_.empty() && erased_.front().next <= now; ++i) {
    Erased entry = erased_.front();
    erased_.pop_front();
    // It was made again meanwhile, and is wanted.
    if (pool_.Find(entry.name.chain).has_value()) continue;
    if (memory_->store().StoredInPart(entry.name)) memory_->store().Erase(entry.name);
    if (--entry.looks > 0) {
      entry.next = now + kEraseEvery;
      erased_.push_back(entry);
    }
  }
}

PrefixInfo PrefixTable::Describe(const Key& key, const Prefix& prefix) const {
  PrefixInfo info = prefix.counts;
  info.name = key.second;
  info.tokens = prefix.tokens;
  info.blocks = static_cast<int32_t>(prefix.blocks->size());
  info.pinned = prefix.pinned;
  if (prefix.expires.has_value()) info.left = *prefix.expires - clock_.Now();
  return info;
}

void PrefixTable::DropExpired() {
  const TimePoint now = clock_.Now();
  for (auto at = prefixes_.begin(); at != prefixes_.end();) {
    const auto next = std::next(at);
    if (at->second.expires.has_value() && *at->second.expires <= now) Remove(at);
    at = next;
  }
}

void PrefixTable::Remove(Prefixes::iterator at) {
  const auto node = prefixes_.extract(at);
  blocks_ -= node.mapped().blocks->size();
  if (node.mapped().pinned) Unpin(node.key(), node.mapped());
}

void PrefixTable::Unpin(const Key& key, const Prefix& prefix) {
  absl::flat_hash_set<Digest> others;
  for (const auto& [other_key, other] : prefixes_) {
    if (other_key == key || !other.pinned || other.salt != prefix.salt) continue;
    others.insert(other.blocks->begin(), other.blocks->end());
  }
  for (size_t i = 0; i < prefix.blocks->size(); ++i) {
    if (others.contains((*prefix.blocks)[i])) continue;
    pool_.SetPinned((*prefix.blocks)[i], false);
    memory_->store().SetPinned({(*prefix.blocks)[i], prefix.salt, static_cast<int32_t>(i)}, false);
  }
}

void PrefixTable::StartSweep() {
  at_.reset();
  next_sweep_ = TimePoint{};
}

}  // namespace winnow::engine

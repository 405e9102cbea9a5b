// Sharing of prefixes, so that KV that is there is not computed again: blocks get the name of
// their content when they are full, and a sequence that begins takes over what is known of its
// tokens.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/strings/str_cat.h"
#include "engine/kv/block_name.h"
#include "engine/kv/kv_memory.h"
#include "engine/schedule/engine.h"
#include "kernels/check.h"

namespace winnow::engine {

const BlockName& Engine::BlockNameOf(const Sequence& sequence, int32_t i) const {
  return memory_->blocks()[sequence.cache.block_table()[i]].name;
}

// Names the sequence's block `i`, when the blocks before it are named. Sets whether anyone may find
// it: what a policy with a floor computed depends on more than its name says. `alone`: the name is nobody else's.
BlockName Engine::NameOf(Sequence& sequence, int32_t i, bool alone, bool* shareable) {
  const int32_t block_tokens = model_.block_tokens();
  const AttentionPolicy& policy = sequence.request.policy;
  // Tokens before retrieve_from attended densely whatever the policy says.
  const bool dense =
      policy.IsDense() || policy.IsVerified() || (i + 1) * block_tokens <= sequence.retrieve_from();
  how_.clear();
  if (!dense) {
    how_ = absl::StrCat(ToString(policy), " from ", sequence.retrieve_from(), " ",
                        memory_->store().names().retrieval);
  }
  *shareable = (dense || !policy.floor.has_value()) && !alone;
  // Under a new name nothing meets what the store has of the old one.
  if (alone) {
    absl::StrAppend(&how_, " alone ", sequence.request.id, " ", sequence.losses_in_all);
  }
  if (i < std::ssize(sequence.known_names)) return sequence.known_names[i];
  WINNOW_CHECK(i == std::ssize(sequence.known_names) && i == sequence.named_blocks);
  const std::string& salt = sequence.request.cache.salt;
  BlockName parent;
  if (i > 0) {
    parent = BlockNameOf(sequence, i - 1);
  } else {
    parent.chain = ChainRoot(memory_->store().names().model, sequence.salt);
    if (!salt.empty()) {
      parent.chain = ChainNext(parent.chain, {}, salt);
      parent.check = CheckNext(0, {}, salt);
    }
  }
  const std::span<const int32_t> tokens =
      std::span(sequence.tokens).subspan(int64_t{i} * block_tokens, block_tokens);
  // A name that is nobody else's must not collide, whatever the option.
  const ChainFunction chain_next = alone ? ChainNext : options_.chain_next;
  sequence.known_names.push_back({.chain = chain_next(parent.chain, tokens, how_),
                                  .tenant = sequence.salt,
                                  .index = i,
                                  .check = CheckNext(parent.check, tokens, how_)});
  return sequence.known_names.back();
}

// Those for whom the store keeps something new have a sequence that runs; tenants that share have the same quota.
int64_t Engine::StoreQuota(const Digest& salt) const {
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    if (sequence->salt == salt) return sequence->request.tenant_store_bytes;
  }
  return 0;
}

// Whether the store may keep another block of the sequence's tenant. One that it may not keep is shared in fast memory
// like any other.
bool Engine::MayKeep(const Sequence& sequence) {
  const int64_t most = sequence.request.tenant_store_bytes;
  if (most == 0 || !memory_->store().exists()) return true;
  const uint64_t bytes = memory_->KeptBytes(sequence.salt) + memory_->store().StoredBlockBytes();
  if (bytes <= static_cast<uint64_t>(most)) return true;
  ++stats_.blocks_over_store_quota;
  return false;
}

Retention Engine::RetentionFor(const Sequence& sequence) const {
  const CacheOptions& cache = sequence.request.cache;
  Retention retention{.priority = cache.priority};
  if (cache.ttl > Duration::zero()) retention.expires = clock_.Now() + cache.ttl;
  return retention;
}

// The block's cached content stays at least so long, in fast memory and in the store.
void Engine::Keep(const BlockName& name, const Retention& retention) {
  memory_->Raise(name, retention);
  pool_.SetPriority(name.chain, memory_->blocks().RetentionOf(name.chain)->priority);
}

// Blocks whose time is over leave the pool, a few looks in a step; AdoptPrefix takes none of them in the meantime. The
// store drops its copies by itself.
void Engine::DropExpired(TimePoint now, size_t blocks) {
  if (memory_ == nullptr || !memory_->blocks().any_expires()) return;
  const size_t looks = std::min(blocks, static_cast<size_t>(pool_.num_blocks()));
  for (size_t i = 0; i < looks; ++i) {
    const BlockRecord& record = memory_->blocks()[next_expiring_];
    next_expiring_ = (next_expiring_ + 1) % pool_.num_blocks();
    if (!record.sealed || !record.cached) continue;
    const Digest chain = record.name.chain;
    if (memory_->blocks().RetentionOf(chain)->Expired(now)) pool_.Drop(chain);
  }
}

// Blocks that became full can move and be shared from now on, under the name of their content.
void Engine::NameBlocks(Sequence& sequence) {
  const int32_t full = sequence.cache.num_tokens() / model_.block_tokens();
  const bool alone = sequence.alone || !sequence.request.cache.store;
  for (int32_t i = sequence.named_blocks; i < full; ++i) {
    bool shareable = false;
    BlockName name = NameOf(sequence, i, alone, &shareable);
    if (memory_->blocks().Collides(name)) {
      sequence.known_names.pop_back();
      name = NameOf(sequence, i, /*alone=*/true, &shareable);
    }
    const int32_t block = sequence.cache.block_table()[i];
    // Prompts come again; what was generated, and under a policy, is for this process at most.
    const bool keep =
        options_.prefix_cache && how_.empty() && sequence.request.keeps_prefix && MayKeep(sequence);
    const Retention retention = alone ? Retention() : RetentionFor(sequence);
    memory_->Seal(block, name, keep, retention);
    ++sequence.named_blocks;
    if (options_.prefix_cache && shareable) {
      if (pool_.Publish(block, name.chain)) TellStored(sequence, i);
      Keep(name, retention);
    }
    if (keep) model_.SaveIndex(block, name);
  }
  if (sequence.retrieval == nullptr || !options_.prefix_cache || alone ||
      !sequence.request.keeps_prefix) {
    return;
  }
  // The summary as it is before the step in which the sequence begins to complete: from then on it
  // is ahead of what another question about the same text begins with.
  const int32_t left = sequence.decode_from() - sequence.cache.num_tokens();
  if (!sequence.summary_saved && full > 0 && left >= 0 && left <= MostStepTokens()) {
    sequence.summary_saved = true;
    model_.SaveSummary(*sequence.retrieval, BlockNameOf(sequence, full - 1));
  }
}

// Whether routers hear of the block that NameOf named last. Not of KV that was made under a policy or a salt: a router
// knows requests by their tokens, and only some requests with these tokens find it.
bool Engine::IsTold(const Sequence& sequence) const {
  return options_.kv_events != nullptr && how_.empty() && sequence.request.keeps_prefix &&
         sequence.request.cache.salt.empty();
}

// The sequence's block `i`, which NameOf named last, can be found.
void Engine::TellStored(const Sequence& sequence, int32_t i) {
  if (!IsTold(sequence)) return;
  const int32_t block_tokens = model_.block_tokens();
  options_.kv_events->Stored(
      KvTier::kFast, sequence.known_names[i],
      i == 0 ? std::nullopt : std::optional<Digest>(sequence.known_names[i - 1].chain),
      std::span(sequence.tokens).subspan(int64_t{i} * block_tokens, block_tokens));
}

// The store evicts without telling anybody. When it has, a few of its blocks are looked up in each
// step, until all were once: without I/O, but there may be hundreds of thousands.
void Engine::TellEvictions() {
  constexpr size_t kChecksInAStep = 32;
  if (memory_ == nullptr || !memory_->store().exists()) return;
  KvEventLog& events = *options_.kv_events;
  const storage::StoreStats& store = stats_.store;
  const uint64_t evictions =
      store.evicted_blocks + store.expired_blocks + store.corrupt_blocks + store.io_errors;
  if (evictions != told_evictions_) {
    told_evictions_ = evictions;
    copies_to_check_ = events.size(options_.store_tier);
  }
  for (size_t i = 0; i < kChecksInAStep && copies_to_check_ > 0; ++i) {
    --copies_to_check_;
    const auto block = events.NextOf(options_.store_tier);
    if (block == nullptr) break;
    if (!memory_->store().Stored(block->name)) {
      events.Removed(options_.store_tier, block->name.chain);
    }
  }
}

// Since the start, by readers of the slower tiers.
uint64_t Engine::StoreBytesRead() const { return memory_->store().stats().payload_bytes_read; }

// Takes over what is known of the sequence's tokens, from other sequences or from the store, as far
// as it reaches from the first token on. Tokens after which logits are wanted are always computed.
bool Engine::AdoptPrefix(Sequence& sequence) {
  const CacheOptions& cache = sequence.request.cache;
  if (memory_ == nullptr || !options_.prefix_cache || !cache.use) return false;
  const TimePoint now = clock_.Now();
  if (!cache.store) sequence.known_names.clear();  // it may have had names of its own
  const int32_t most = sequence.first_with_logits() / model_.block_tokens();
  for (int32_t i = 0; i < most; ++i) {
    bool shareable = false;
    const BlockName name = NameOf(sequence, i, sequence.alone, &shareable);
    if (!shareable || memory_->blocks().Collides(name)) break;
    int32_t block = 0;
    const Retention* const kept = memory_->blocks().RetentionOf(name.chain);
    if (kept != nullptr && kept->Expired(now)) pool_.Drop(name.chain);
    if (const std::optional<int32_t> found = pool_.FindWhole(name.chain)) {
      block = *found;
      pool_.Share(block);
      stats_.prefix_tokens_pool += model_.block_tokens();
    } else if (how_.empty() && pool_.num_free() > 0 && memory_->store().Stored(name)) {
      block = pool_.Take();
      memory_->Adopt(block, name);
      pool_.Publish(block, name.chain);
      TellStored(sequence, i);
      if (IsTold(sequence)) {
        options_.kv_events->Copied(options_.store_tier, name.chain);
      }
      stats_.prefix_tokens_store += model_.block_tokens();
    } else {
      break;
    }
    // A request that leaves nothing behind does not keep others' blocks longer either.
    if (cache.store) Keep(name, RetentionFor(sequence));
    sequence.cache.Adopt(block);
    ++sequence.named_blocks;
  }
  // Later blocks have names of their own.
  if (!cache.store) sequence.known_names.resize(static_cast<size_t>(sequence.named_blocks));
  const int32_t adopted = sequence.cache.num_tokens();
  // What was taken over before, and is computed again now, was not cached after all.
  int32_t& cached = sequence.usage.cached_tokens;
  cached = sequence.usage.preemptions == 0 ? adopted : std::min(cached, adopted);
  if (adopted == 0) return false;
  const TimePoint begun = clock_.Now();
  const uint64_t read_before = StoreBytesRead();
  sequence.takes_over = true;
  sequence.eager =
      memory_->residency().ShareOfFrames(sequence.cache.num_blocks()) <= options_.eager_share;
  if (sequence.retrieval != nullptr) {
    adopted_names_.clear();
    for (int32_t i = 0; i < sequence.named_blocks; ++i) {
      adopted_names_.push_back(BlockNameOf(sequence, i));
    }
    model_.AdoptIndex(*sequence.retrieval, sequence.cache.block_table(), adopted_names_,
                      sequence.decode_from());
  }
  ++stats_.resumes;
  stats_.resume_time += clock_.Now() - begun;
  stats_.resume_bytes += StoreBytesRead() - read_before;
  if (sequence.usage.preemptions == 0) stats_.cached_tokens += adopted;
  return true;
}

}  // namespace winnow::engine

#include "engine/kv/kv_memory.h"

#include <utility>

#include "engine/base/status_macros.h"
#include "kernels/check.h"

namespace winnow::engine {

KvMemory::KvMemory(kernels::DeviceOps& backend, const KvPlan& plan, const KvMemoryOptions& options,
                   std::unique_ptr<KvPools> pools)
    : backend_(backend),
      kind_(plan.residency),
      pools_(std::move(pools)),
      blocks_(plan.num_layers(), plan.num_blocks),
      store_(options.store, options.names, plan.num_layers(), plan.layout.BlockBytes()),
      residency_(Residency::Make(plan.residency, options.write_through,
                                 {backend, *pools_, blocks_, store_, tally_, stats_})),
      fetcher_({backend, *pools_, blocks_, store_, tally_, stats_}, *residency_) {
  store_.SetRetentions([this](const Digest& chain) { return blocks_.RetentionOf(chain); });
}

absl::StatusOr<std::unique_ptr<KvMemory>> KvMemory::Create(kernels::Backend& backend,
                                                           const KvPlan& plan,
                                                           const KvMemoryOptions& options) {
  WINNOW_CHECK((options.store == nullptr) == (plan.residency == ResidencyKind::kInPlace));
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<KvPools> pools, KvPools::Create(backend, plan));
  return std::unique_ptr<KvMemory>(new KvMemory(backend, plan, options, std::move(pools)));
}

// ---- a pass ----

void KvMemory::BeginPass(size_t num_chunks) {
  tally_.Begin(num_chunks);
  residency_->BeginPass();
  store_.Poll(std::chrono::nanoseconds(0));
}

void KvMemory::EndPass() {
  store_.ForgiveFailures();
  residency_->EndPass();
}

// ---- lives of blocks ----

void KvMemory::Seal(int32_t block, const BlockName& name, bool keep, const Retention& retention) {
  if (blocks_.Knows(name.chain)) Raise(name, retention);
  blocks_.Seal(block, name, keep, retention);
  SetHeld(block, true);
  residency_->OnSealed(block);
}

void KvMemory::Adopt(int32_t block, const BlockName& name) {
  WINNOW_CHECK(store_.exists());
  blocks_.Adopt(block, name, store_.KeptAs(name).value_or(Retention()));
  SetHeld(block, true);
  residency_->OnAdopted(block);
}

void KvMemory::Raise(const BlockName& name, const Retention& retention) {
  if (blocks_.Raise(name.chain, retention)) {
    store_.Raise(name, *blocks_.RetentionOf(name.chain));
  }
}

void KvMemory::SetHeld(int32_t block, bool held) {
  if (blocks_.SetHeld(block, held)) store_.SetInUse(blocks_[block].name, held);
}

void KvMemory::Forget(int32_t block) {
  SetHeld(block, false);
  const bool erase = blocks_.Leave(block);
  bool erased = false;
  for (int32_t layer = 0; layer < blocks_.num_layers(); ++layer) {
    const LayerBlock& layer_block = blocks_.at(layer, block);
    // A loss here is not one there: the read may have been late, or fail every time.
    if (erase && (layer_block.saved || layer_block.lost)) {
      store_.EraseLayer(blocks_[block].name, layer);
      erased = true;
    }
    residency_->Release(blocks_.IndexOf(layer, block));
  }
  if (erased) store_.TellRemoved(blocks_[block].name.chain);
  blocks_.Forget(block);
}

bool KvMemory::IsWhole(int32_t block) const {
  for (int32_t layer = 0; layer < blocks_.num_layers(); ++layer) {
    if (!residency_->IsResident(layer, block) && !store_.StoredLayer(blocks_[block].name, layer)) {
      return false;
    }
  }
  return true;
}

uint64_t KvMemory::KeptBytes(const Digest& tenant) const {
  if (!store_.exists()) return 0;
  return store_.TenantBytes(tenant) + store_.SideBytesInFlight(tenant) +
         static_cast<uint64_t>(blocks_.NumComing(tenant)) * store_.StoredLayerBytes();
}

void KvMemory::SetQuotas(std::function<int64_t(const Digest& tenant)> quota_of) {
  if (quota_of == nullptr) return store_.SetSideQuota(nullptr);
  store_.SetSideQuota([this, quota_of = std::move(quota_of)](const Digest& tenant, uint64_t bytes) {
    const int64_t quota = quota_of(tenant);
    return quota <= 0 || KeptBytes(tenant) + bytes <= static_cast<uint64_t>(quota);
  });
}

// ---- between passes ----

void KvMemory::Idle() {
  if (!store_.exists() || !backend_.Synchronize()) return;  // the last pass may still be writing
  EndPass();
  store_.Poll(std::chrono::nanoseconds(0));
}

void KvMemory::Flush(std::chrono::nanoseconds most) {
  if (!store_.exists()) return;
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPollTime(10);
  const Clock::time_point end = Clock::now() + most;
  // The last pass may still be writing. Nothing is saved of a device that has failed.
  const bool saves = backend_.Synchronize();
  while (saves && residency_->has_work() && Clock::now() < end &&
         store_.state() == storage::TierState::kOk) {
    EndPass();
    store_.Poll(kPollTime);
  }
  const Clock::time_point idle_end = Clock::now() + most;
  while (!store_.idle() && Clock::now() < idle_end) store_.Poll(kPollTime);
}

KvMemoryStats KvMemory::stats() const {
  KvMemoryStats stats = stats_;
  stats.waits = store_.waits();
  stats.wait_ns = static_cast<uint64_t>(store_.wait_time().count());
  return stats;
}

}  // namespace winnow::engine

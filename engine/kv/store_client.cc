#include "engine/kv/store_client.h"

#include <algorithm>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "storage/format.h"

namespace winnow::engine {

// Blocks of running sequences are protected by their use, which is not persisted: the rest, and after a restart
// everything, leaves by priority and recency. What lies beside a block is kept like the block.
storage::PutOptions StoreClient::OptionsOf(const Digest& chain) const {
  const Retention* const asked = retention_of_ != nullptr ? retention_of_(chain) : nullptr;
  const Retention retention = asked != nullptr ? *asked : Retention();
  return {.priority = retention.priority, .ttl_s = SecondsLeft(retention)};
}

uint32_t StoreClient::SecondsLeft(const Retention& retention) const {
  if (!retention.expires.has_value()) return 0;
  const int64_t seconds =
      std::chrono::ceil<std::chrono::seconds>(*retention.expires - now_).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(seconds, 1, UINT32_MAX));
}

uint64_t StoreClient::Begin(Ticket ticket, bool is_save) {
  const uint64_t tag = next_tag_++;
  in_flight_.emplace(tag, InFlight{ticket, is_save});
  return tag;
}

// ---- a layer block ----

void StoreClient::Save(Ticket ticket, const BlockName& name, int32_t layer,
                       std::span<const std::byte> content, const SaveOptions& options) {
  storage::PutOptions put = OptionsOf(name.chain);
  put.in_use = options.in_use;
  put.transient = !options.keep;
  store_->Put(Begin(ticket, /*is_save=*/true), IdOf(name, layer), content, put);
}

void StoreClient::Load(Ticket ticket, const BlockName& name, int32_t layer,
                       std::span<std::byte> into) {
  store_->Get(Begin(ticket, /*is_save=*/false), IdOf(name, layer), into, 0);
}

void StoreClient::LoadPages(Ticket ticket, const BlockName& name, int32_t layer,
                            std::span<const uint32_t> pages, std::span<std::byte> into) {
  store_->GetPages(Begin(ticket, /*is_save=*/false), IdOf(name, layer), pages, into, 0);
}

void StoreClient::EraseLayer(const BlockName& name, int32_t layer) {
  if (exists()) store_->Erase(next_tag_++, IdOf(name, layer).key);
}

// ---- a block, in all layers ----

bool StoreClient::Stored(const BlockName& name) const {
  if (!exists()) return false;
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    if (!StoredLayer(name, layer)) return false;
  }
  return true;
}

bool StoreClient::StoredUnder(const Digest& chain) const {
  if (!exists()) return false;
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    if (!store_->Contains(IdOf({.chain = chain}, layer).key)) return false;
  }
  return true;
}

std::optional<Retention> StoreClient::KeptAs(const BlockName& name) const {
  if (!exists()) return std::nullopt;
  const std::optional<storage::BlockInfo> info = store_->Find(IdOf(name, 0));
  if (!info.has_value()) return std::nullopt;
  Retention retention{.priority = info->priority};
  if (info->ttl_s > 0) retention.expires = now_ + std::chrono::seconds(info->ttl_s);
  return retention;
}

void StoreClient::Raise(const BlockName& name, const Retention& retention) {
  if (!exists()) return;
  const uint32_t ttl_s = SecondsLeft(retention);
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    store_->Raise(IdOf(name, layer).key, retention.priority, ttl_s);
  }
  for (const storage::BlockKey& key : SidesOf(name.chain)) {
    store_->Raise(key, retention.priority, ttl_s);
  }
}

// Those on their way included.
std::vector<storage::BlockKey> StoreClient::SidesOf(const Digest& chain) const {
  std::vector<storage::BlockKey> sides = store_->AsidesOf(chain);
  for (const auto& [tag, put] : side_puts_) {
    if (put.key.chain() == chain) sides.push_back(put.key);
  }
  return sides;
}

bool StoreClient::SetPinned(const BlockName& name, bool pinned) {
  if (!exists()) return false;
  bool all = true;
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    all &= store_->SetPinned(IdOf(name, layer).key, pinned);
  }
  return all;
}

std::vector<Digest> StoreClient::PinnedChains() const {
  if (!exists()) return {};
  absl::flat_hash_set<Digest> chains;
  store_->ForEach([&](const storage::BlockKey& key, const storage::BlockInfo& info) {
    if (info.pinned) chains.insert(key.chain());
  });
  return {chains.begin(), chains.end()};
}

void StoreClient::SetInUse(const BlockName& name, bool in_use) {
  if (!exists()) return;
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    store_->SetInUse(IdOf(name, layer).key, in_use);
  }
}

void StoreClient::Erase(const BlockName& name) {
  if (!exists()) return;
  for (int32_t layer = 0; layer < num_layers_; ++layer) EraseLayer(name, layer);
  for (const storage::BlockKey& key : SidesOf(name.chain)) store_->Erase(next_tag_++, key);
  TellRemoved(name.chain);
}

bool StoreClient::StoredInPart(const BlockName& name) const {
  if (!exists()) return false;
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    if (store_->Contains(IdOf(name, layer).key)) return true;
  }
  return !store_->AsidesOf(name.chain).empty();
}

uint64_t StoreClient::StoredLayerBytes() const { return storage::BlockBytesFor(block_bytes_); }

void StoreClient::TellCopied(const Digest& chain) {
  if (events_ != nullptr) events_->Copied(tier_, chain);
}

void StoreClient::TellRemoved(const Digest& chain) {
  if (events_ != nullptr) events_->Removed(tier_, chain);
}

// ---- beside KV ----

size_t StoreClient::SideBytes(const storage::BlockId& id) const {
  if (!exists()) return 0;
  const std::optional<storage::BlockInfo> info = store_->Find(id);
  return info.has_value() ? info->payload_bytes : 0;
}

void StoreClient::PutSide(const storage::BlockId& id, std::span<const std::byte> bytes) {
  if (!AcceptsSaves()) return;
  const uint64_t stored = storage::BlockBytesFor(bytes.size());
  if (may_keep_ && !may_keep_(id.tenant, stored)) return;
  const uint64_t tag = next_tag_++;
  side_puts_.emplace(tag, SidePut{id.key, id.tenant, stored});
  store_->Put(tag, id, bytes, OptionsOf(id.key.chain()));
}

uint64_t StoreClient::SideBytesInFlight(const Digest& tenant) const {
  uint64_t bytes = 0;
  for (const auto& [tag, put] : side_puts_) bytes += put.tenant == tenant ? put.bytes : 0;
  return bytes;
}

bool StoreClient::GetSide(const storage::BlockId& id, std::span<std::byte> into) {
  SideRead read{.id = id, .bytes = into.size(), .into = into};
  GetSides({&read, 1});
  return read.good;
}

void StoreClient::GetSides(std::span<SideRead> reads) {
  if (!exists()) return;
  struct SideReceiver final : Receiver {
    explicit SideReceiver(std::span<SideRead> all) : reads(all), left(all.size()) {}
    void OnAnswer(uint64_t number, const StoreAnswer& answer) override {
      reads[number].good = answer.ok;
      --left;
    }
    const std::span<SideRead> reads;
    size_t left;
  };
  SideReceiver receiver(reads);
  for (size_t i = 0; i < reads.size(); ++i) {
    store_->Get(Begin({&receiver, i}, /*is_save=*/false), reads[i].id, reads[i].into, 0);
  }
  Wait([&] { return receiver.left == 0; });
}

// ---- answers ----

void StoreClient::Poll(std::chrono::nanoseconds wait) {
  if (!exists()) return;
  completions_.clear();
  store_->Poll(wait, &completions_);
  for (const storage::Completion& completion : completions_) {
    const auto found = in_flight_.find(completion.tag);
    if (found == in_flight_.end()) {
      side_puts_.erase(completion.tag);  // or an erase: what it did not find is gone as well
      continue;
    }
    const InFlight operation = found->second;
    in_flight_.erase(found);
    const StoreAnswer answer{completion.outcome == storage::Outcome::kOk, completion.from_disk};
    if (operation.is_save) {
      failed_saves_in_a_row_ = answer.ok ? 0 : failed_saves_in_a_row_ + 1;
    }
    operation.ticket.receiver->OnAnswer(operation.ticket.number, answer);
  }
}

}  // namespace winnow::engine

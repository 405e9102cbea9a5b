#include "engine/kv/store_client.h"

#include <algorithm>
#include <optional>

#include "absl/container/flat_hash_set.h"
#include "storage/format.h"

namespace winnow::engine {

namespace {

// Every payload is stored with the same priority. Blocks of running sequences are protected by their use,
// which is not persisted: the rest, and after a restart everything, leaves by recency, and an index not
// before its block.
constexpr uint8_t kPriority = storage::kPriorityMax;

}  // namespace

uint64_t StoreClient::Begin(Ticket ticket, bool is_save) {
  const uint64_t tag = next_tag_++;
  in_flight_.emplace(tag, InFlight{ticket, is_save});
  return tag;
}

// ---- a layer block ----

void StoreClient::Save(Ticket ticket, const BlockName& name, int32_t layer,
                       std::span<const std::byte> content, const SaveOptions& options) {
  store_->Put(Begin(ticket, /*is_save=*/true), IdOf(name, layer), content,
              {.priority = kPriority, .in_use = options.in_use, .transient = !options.keep});
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
  std::vector<storage::BlockKey> side = store_->AsidesOf(name.chain);
  for (const auto& [tag, put] : side_puts_) {
    if (put.key.chain() == name.chain) side.push_back(put.key);
  }
  for (const storage::BlockKey& key : side) store_->Erase(next_tag_++, key);
  TellRemoved(name.chain);
}

bool StoreClient::StoredInPart(const BlockName& name) const {
  if (!exists()) return false;
  for (int32_t layer = 0; layer < num_layers_; ++layer) {
    if (store_->Find(IdOf(name, layer)).has_value()) return true;
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
  store_->Put(tag, id, bytes, {.priority = kPriority});
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

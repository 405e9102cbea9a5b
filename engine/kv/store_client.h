// The engine's only caller of the store. Everything that reads or writes stored KV, and what belongs to
// a block beside it, asks here by block hash and layer.
//
// Operations are asynchronous. Each has a ticket: the receiver that is told of its end, and the
// receiver's own number for it. Answers come out in Poll, and so in Wait.
//
//   Save, Load, LoadPages ─▶ in flight ─ Poll ─▶ Receiver::OnAnswer(number, answer)
//
// A client without a store has nothing and takes nothing: lookups find nothing, and writes are dropped.
//
// Threads: the engine thread only.
#ifndef WINNOW_ENGINE_KV_STORE_CLIENT_H_
#define WINNOW_ENGINE_KV_STORE_CLIENT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/kv/block_name.h"
#include "engine/kv/kv_event_log.h"
#include "engine/kv/retention.h"
#include "storage/block_store.h"

namespace winnow::engine {

// A read or write that has ended.
struct StoreAnswer {
  bool ok = false;         // saved, or read and verified
  bool from_disk = false;  // a read asked a disk for the bytes
};

// Operations in flight of one receiver, with a note about each.
template <typename Note>
class Tickets {
 public:
  uint64_t Issue(Note note) {
    notes_.emplace(++last_, std::move(note));
    return last_;
  }
  // Takes the note back. REQUIRES: issued, and not redeemed before.
  Note Redeem(uint64_t number) { return std::move(notes_.extract(number).mapped()); }
  size_t size() const { return notes_.size(); }
  bool empty() const { return notes_.empty(); }

 private:
  absl::flat_hash_map<uint64_t, Note> notes_;
  uint64_t last_ = 0;
};

class StoreClient {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    // Called within Poll: may start operations, and must not poll.
    virtual void OnAnswer(uint64_t number, const StoreAnswer& answer) = 0;
  };
  // `receiver` outlives the operation, or at least all calls of Poll.
  struct Ticket {
    Receiver* receiver = nullptr;
    uint64_t number = 0;
  };

  // `store` may be null, and outlives the client otherwise. `block_bytes`: of a layer block.
  StoreClient(storage::BlockStore* store, const StoreNames& names, int32_t num_layers,
              size_t block_bytes)
      : store_(store), names_(names), num_layers_(num_layers), block_bytes_(block_bytes) {}
  StoreClient(const StoreClient&) = delete;
  StoreClient& operator=(const StoreClient&) = delete;

  bool exists() const { return store_ != nullptr; }
  const StoreNames& names() const { return names_; }
  // kOff without a store.
  storage::TierState state() const { return exists() ? store_->state() : storage::TierState::kOff; }
  storage::StoreStats stats() const { return exists() ? store_->stats() : storage::StoreStats(); }
  size_t in_flight() const { return exists() ? store_->in_flight() : 0; }
  bool idle() const { return !exists() || store_->idle(); }
  // Whether a save is worth trying: it is not while the store is degraded, nor after so many failures in a
  // row that it is about to be.
  bool AcceptsSaves() const {
    return state() == storage::TierState::kOk && failed_saves_in_a_row_ < kFailuresInARow;
  }
  void ForgiveFailures() { failed_saves_in_a_row_ = 0; }
  // `events` is told of blocks that the store has all of, as copies in `tier`, and of those that it is told
  // to erase, but not of the store's own evictions (Engine::TellEvictions). Null: nobody is told.
  void SetEvents(KvEventLog* events, KvTier tier) {
    events_ = events;
    tier_ = tier;
  }

  // Is asked how each payload is to be kept, by its block's hash; null, and where it gives null: like any other.
  void SetRetentions(std::function<const Retention*(const Digest& chain)> retention_of) {
    retention_of_ = std::move(retention_of);
  }
  // The engine's time, from which what is put has left to stay.
  void SetNow(TimePoint now) { now_ = now; }

  // ---- a layer block ----

  // How the store is to treat a layer block.
  struct SaveOptions {
    bool in_use = false;  // a sequence runs on its block
    bool keep = false;    // for later processes, too
  };
  // `content` has been copied when this returns.
  void Save(Ticket ticket, const BlockName& name, int32_t layer, std::span<const std::byte> content,
            const SaveOptions& options);
  // `into` belongs to the store until the answer, and is written only if that is good.
  void Load(Ticket ticket, const BlockName& name, int32_t layer, std::span<std::byte> into);
  // Pages of the layer block, as BlockStore::GetPages.
  void LoadPages(Ticket ticket, const BlockName& name, int32_t layer,
                 std::span<const uint32_t> pages, std::span<std::byte> into);
  // Takes the layer block out of the store.
  void EraseLayer(const BlockName& name, int32_t layer);
  storage::BlockId IdOf(const BlockName& name, int32_t layer) const {
    return names_.Id(name, kKindKv, layer);
  }

  // Whether the store seems to have it: known without I/O.
  bool StoredLayer(const BlockName& name, int32_t layer) const {
    return exists() && store_->Find(IdOf(name, layer)).has_value();
  }

  // ---- a block, in all layers ----

  // Whether the store seems to have all of it: known without I/O.
  bool Stored(const BlockName& name) const;
  // The same of whatever is stored under the chain, for those who know no tokens.
  bool StoredUnder(const Digest& chain) const;
  // How the store keeps it; nullopt: it has nothing of it.
  std::optional<Retention> KeptAs(const BlockName& name) const;
  // Keeps what the store has of it, side payloads and what is on its way included, at least so long.
  void Raise(const BlockName& name, const Retention& retention);
  // False: the store has not all of it, or its pins are used up.
  bool SetPinned(const BlockName& name, bool pinned);
  // Hashes of the blocks of which something is pinned. Looks at all that the store has.
  std::vector<Digest> PinnedChains() const;
  void SetInUse(const BlockName& name, bool in_use);
  // Whether the store has any of it: KV of a layer, or a side payload.
  bool StoredInPart(const BlockName& name) const;
  // Takes it out of the store with its side payloads, whoever has a copy in fast memory.
  void Erase(const BlockName& name);
  // Tells the events that the store has all of it, or that it was told to erase it.
  void TellCopied(const Digest& chain);
  void TellRemoved(const Digest& chain);
  uint64_t TenantBytes(const Digest& tenant) const {
    return exists() ? store_->TenantBytes(tenant) : 0;
  }
  // Bytes that a layer block, and the KV of a block, take on disk, which are no fewer than in host memory.
  uint64_t StoredLayerBytes() const;
  uint64_t StoredBlockBytes() const {
    return StoredLayerBytes() * static_cast<uint64_t>(num_layers_);
  }

  // ---- what belongs to a block beside its KV, under an id of another kind ----

  struct SideRead {
    storage::BlockId id;
    size_t bytes = 0;  // SideBytes(id)
    std::span<std::byte> into = {};
    bool good = false;  // whether `into` is filled
  };
  // Bytes that the store seems to have under the id, known without I/O; 0: none.
  size_t SideBytes(const storage::BlockId& id) const;
  // Asked before each side payload is put: whether the store may keep so many bytes more of the tenant. Null: it may.
  void SetSideQuota(std::function<bool(const Digest& tenant, uint64_t bytes)> may_keep) {
    may_keep_ = std::move(may_keep);
  }
  // Bytes of the tenant's side payloads whose put has no answer yet.
  uint64_t SideBytesInFlight(const Digest& tenant) const;
  // A put that fails, or that the quota forbids, is forgotten.
  void PutSide(const storage::BlockId& id, std::span<const std::byte> bytes);
  bool GetSide(const storage::BlockId& id, std::span<std::byte> into);
  // Reads them together, and waits.
  void GetSides(std::span<SideRead> reads);

  // ---- answers ----

  // Hands out answers; waits for the first of them for at most so long.
  void Poll(std::chrono::nanoseconds wait);
  // Polls until `done()`. REQUIRES: what it waits for is in flight. Reads and writes end by their
  // deadlines, so this ends.
  template <typename Done>
  void Wait(Done done) {
    const auto begin = std::chrono::steady_clock::now();
    while (!done()) Poll(std::chrono::milliseconds(100));
    ++waits_;
    wait_time_ += std::chrono::steady_clock::now() - begin;
  }
  // Waits for an answer, at most so long.
  void WaitForSome(std::chrono::nanoseconds most) {
    const auto begin = std::chrono::steady_clock::now();
    Poll(most);
    ++waits_;
    wait_time_ += std::chrono::steady_clock::now() - begin;
  }
  uint64_t waits() const { return waits_; }
  std::chrono::nanoseconds wait_time() const { return wait_time_; }

 private:
  static constexpr uint32_t kKindKv = 0;
  static constexpr int32_t kFailuresInARow = 8;  // saves; then no more are tried in this pass

  struct InFlight {
    Ticket ticket;
    bool is_save = false;
  };
  uint64_t Begin(Ticket ticket, bool is_save);
  // The rest of its time in whole seconds, at least one; 0: it never expires.
  uint32_t SecondsLeft(const Retention& retention) const;
  std::vector<storage::BlockKey> SidesOf(const Digest& chain) const;
  storage::PutOptions OptionsOf(const Digest& chain) const;

  storage::BlockStore* const store_;
  const StoreNames names_;
  const int32_t num_layers_;
  const size_t block_bytes_;
  KvEventLog* events_ = nullptr;
  KvTier tier_ = KvTier::kDisk;
  struct SidePut {
    storage::BlockKey key;
    Digest tenant = {};
    uint64_t bytes = 0;
  };

  absl::flat_hash_map<uint64_t, InFlight> in_flight_;  // by tag, of operations that have a receiver
  absl::flat_hash_map<uint64_t, SidePut> side_puts_;   // by tag, in flight
  std::function<bool(const Digest&, uint64_t)> may_keep_;
  std::function<const Retention*(const Digest&)> retention_of_;
  TimePoint now_{};
  uint64_t next_tag_ = 1;
  int32_t failed_saves_in_a_row_ = 0;
  std::vector<storage::Completion> completions_;
  uint64_t waits_ = 0;
  std::chrono::nanoseconds wait_time_{0};
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_STORE_CLIENT_H_

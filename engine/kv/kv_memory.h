// KV of every block: the only part of the engine that moves it. KvMemory leads the rooms that do the work, each
// of which can be read alone:
//
//   block_table.h    one record for each block: hash, holders, where each layer block is
//   kv_pools.h       the memory, and its addresses
//   residency.h      what is in fast memory, and how it gets there: in place, mirrored or paged
//   block_fetcher.h  what comes from the store between passes, for sequences that wait for it
//   store_client.h   the store of slower tiers
//   pass_tally.h     losses and reads of a pass, by chunk
//
//   written ─ Seal ─▶ saved to the store ─▶ frame given to others ─▶ loaded, or read entry by entry ─ Forget ─▶
//                              └────────── Adopt, in this process or a later one ───────┘
//
// A layer block that the store does not give back is lost, and so is the chunk that needed it: the pass
// goes on for the others, and the engine computes the sequence again. Never wrong, only slower.
//
// Threads: the engine thread only, but for construction.
#ifndef WINNOW_ENGINE_KV_KV_MEMORY_H_
#define WINNOW_ENGINE_KV_KV_MEMORY_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kv/block_fetcher.h"
#include "engine/kv/block_table.h"
#include "engine/kv/kv_memory_options.h"
#include "engine/kv/kv_pools.h"
#include "engine/kv/pass_tally.h"
#include "engine/kv/residency.h"
#include "engine/kv/store_client.h"
#include "kernels/backend.h"

namespace winnow::engine {

class KvMemory {
 public:
  using PinResult = engine::PinResult;

  // ResourceExhausted: no memory, with the bytes. REQUIRES: a store, unless the plan keeps all in place.
  static absl::StatusOr<std::unique_ptr<KvMemory>> Create(kernels::Backend& backend,
                                                          const KvPlan& plan,
                                                          const KvMemoryOptions& options = {});

  // ---- rooms ----

  BlockTable& blocks() { return blocks_; }
  const BlockTable& blocks() const { return blocks_; }
  StoreClient& store() { return store_; }
  const StoreClient& store() const { return store_; }
  Residency& residency() { return *residency_; }
  const Residency& residency() const { return *residency_; }
  const KvPools& places() const { return *pools_; }
  BlockFetcher& fetcher() { return fetcher_; }

  // ---- a pass ----

  // Takes in what the store has finished since.
  void BeginPass(size_t num_chunks);
  // Makes blocks [first, last) of the chunk's `blocks` resident in `layer`, for reading or, where
  // nothing has been written yet, for writing. They stay until Unpin. `frames` is memory for the
  // table. Where other pins are in the way, `flush` uses what they hold, and they go. False: the
  // chunk is lost.
  template <typename Flush>
  bool Pin(int32_t chunk, int32_t layer, std::span<const int32_t> blocks, int32_t first,
           int32_t last, std::vector<int32_t>* frames, PinnedBlocks* pinned, Flush flush) {
    if (chunk_lost(chunk)) return false;
    PinResult result = TryPin(chunk, layer, blocks, first, last, frames, pinned);
    if (result == PinResult::kFull) {
      flush();
      Unpin();
      result = TryPin(chunk, layer, blocks, first, last, frames, pinned);
    }
    if (result != PinResult::kOk) LoseChunk(chunk);
    return result == PinResult::kOk;
  }
  // The same without that way out.
  PinResult TryPin(int32_t chunk, int32_t layer, std::span<const int32_t> blocks, int32_t first,
                   int32_t last, std::vector<int32_t>* frames, PinnedBlocks* pinned) {
    return residency_->TryPin({chunk, layer, blocks, first, last}, frames, pinned);
  }
  void Unpin() { residency_->Unpin(); }
  // A chunk that needed a lost layer block, or more frames than there are: left out of what comes.
  void LoseChunk(int32_t chunk) { tally_.Lose(chunk); }
  bool chunk_lost(int32_t chunk) const { return tally_.lost(chunk); }
  void CountRead(int32_t chunk, uint64_t bytes, bool from_disk) {
    tally_.CountRead(chunk, bytes, from_disk);
  }
  // Bytes that were brought from slower tiers for the chunk.
  const TierBytes& chunk_bytes(int32_t chunk) const { return tally_.bytes(chunk); }
  // Ends the pass, while the device works: everything has been asked of it that the pass asks.
  void EndPass();

  // ---- lives of blocks ----

  // The block is full and will not be written again. From now on its layer blocks can be saved; `keep`
  // leaves what the store has of them there when the block is forgotten.
  void Seal(int32_t block, const BlockName& name, bool keep, const Retention& retention = {});
  // Takes the block's content from the store, where it stays: nothing is resident. REQUIRES: a store.
  void Adopt(int32_t block, const BlockName& name);
  // Keeps what is cached of the block, here and in the store, at least so long. REQUIRES: a block with the hash is sealed.
  void Raise(const BlockName& name, const Retention& retention);
  // Says whether a sequence has the block in its table, as all have that are sealed or adopted until this
  // says otherwise: what the store has of it then leaves after all that nobody runs on.
  void SetHeld(int32_t block, bool held);
  // Nobody needs the block's content any more.
  void Forget(int32_t block);
  // Whether each layer of the block is resident, or seems to be in the store: known without I/O. The store evicts blocks
  // that are not held.
  bool IsWhole(int32_t block) const;
  // Bytes that the store keeps of the tenant, or is going to.
  uint64_t KeptBytes(const Digest& tenant) const;
  // `quota_of`: how many bytes the store may keep of the tenant; 0: no bound. Side payloads keep to it; of blocks whoever
  // seals them decides. Null: no bounds.
  void SetQuotas(std::function<int64_t(const Digest& tenant)> quota_of);

  // ---- between passes ----

  // Goes on saving, when there is nothing else to do.
  void Idle();
  // Waits until everything that is to be kept is saved, and then until the store is idle, so that
  // another thread may close it; each at most so long.
  void Flush(std::chrono::nanoseconds most);
  KvMemoryStats stats() const;

  // More layer blocks than frames.
  bool tiered() const { return kind_ == ResidencyKind::kPaged; }

 private:
  KvMemory(kernels::DeviceOps& backend, const KvPlan& plan, const KvMemoryOptions& options,
           std::unique_ptr<KvPools> pools);

  kernels::DeviceOps& backend_;
  const ResidencyKind kind_;
  const std::unique_ptr<KvPools> pools_;
  BlockTable blocks_;
  StoreClient store_;
  PassTally tally_;
  KvMemoryStats stats_;
  const std::unique_ptr<Residency> residency_;
  BlockFetcher fetcher_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_KV_MEMORY_H_

// Where the KV of blocks is while sequences run, and how it gets there: the part of KvMemory that differs
// between its three kinds.
//
//   InPlace    every layer block has its place; nothing moves
//   Mirrored   every layer block has its place, and what is to be kept is copied to the store. A prefix that
//              is adopted from the store comes to its places when it is needed, in whole layer blocks (TryPin)
//              or by pages (Want, LoadWanted)
//   Paged      more layer blocks than frames. A full one is saved when frames get scarce; a frame whose layer
//              block is saved may be given to another, and what has no frame comes back from the store, in
//              whole layer blocks (TryPin) or by KV entries (RowFetcher)
//
// Threads: the engine thread only.
#ifndef WINNOW_ENGINE_KV_RESIDENCY_H_
#define WINNOW_ENGINE_KV_RESIDENCY_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "engine/kv/block_table.h"
#include "engine/kv/kv_memory_options.h"
#include "engine/kv/kv_plan.h"
#include "engine/kv/kv_pools.h"
#include "engine/kv/pass_tally.h"
#include "engine/kv/store_client.h"
#include "kernels/device_ops.h"

namespace winnow::engine {

// The blocks that a kernel is to read: `table` has a block of `pool` for every logical block that was pinned.
struct PinnedBlocks {
  std::byte* pool = nullptr;
  std::span<const int32_t> table;
};

enum class PinResult : uint8_t {
  kOk,
  kFull,  // other pins hold the frames: unpin, and try again
  kLost,  // the store has lost one; or there are too few frames for this chunk alone
};

// Blocks [first, last) of a chunk's table in one layer, for reading or, where nothing has been written
// yet, for writing.
struct PinRequest {
  int32_t chunk = PassTally::kNoChunk;
  int32_t layer = 0;
  std::span<const int32_t> blocks;
  int32_t first = 0, last = 0;

  std::span<const int32_t> wanted() const {
    return blocks.subspan(static_cast<size_t>(first), static_cast<size_t>(last - first));
  }
};

// The rooms that a residency works with. KvMemory owns them, and they outlive it.
struct KvRooms {
  kernels::DeviceOps& backend;
  KvPools& pools;
  BlockTable& blocks;
  StoreClient& store;
  PassTally& tally;
  KvMemoryStats& stats;
};

class Residency {
 public:
  // `write_through`: KvMemoryOptions::write_through.
  static std::unique_ptr<Residency> Make(ResidencyKind kind, bool write_through,
                                         const KvRooms& rooms);
  virtual ~Residency() = default;
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // ---- a pass ----

  virtual void BeginPass() {}
  // Saves ahead, so that frames are there when the next pass needs them. Everything has been asked of
  // the backend that the pass asks of it; it need not be done.
  virtual void EndPass() {}
  // Makes the blocks resident; they stay until Unpin. `frames` is memory for the table.
  virtual PinResult TryPin(const PinRequest& request, std::vector<int32_t>* frames,
                           PinnedBlocks* pinned) = 0;
  virtual void Unpin() {}
  // Makes the device forget what it knows of places that other content came to since.
  virtual void ForgetStale() {}

  // ---- what is resident ----

  // Address of a KV entry, `offset` bytes into its layer block, or null: not resident. Holds until the next
  // pin.
  virtual const std::byte* Resident(int32_t layer, int32_t block, size_t offset) = 0;
  // Whether all of the layer block is.
  virtual bool IsResident(int32_t layer, int32_t block) const = 0;
  // The chunk is to read the KV entry at `offset` of the layer block: LoadWanted brings its page.
  virtual void Want(int32_t /*chunk*/, int32_t /*layer*/, int32_t /*block*/, size_t /*offset*/) {}
  // Waits until the pages that were wanted of the layer are in their places, those of lost layer blocks
  // excepted. REQUIRES: the device has nothing to do that is about them.
  virtual void LoadWanted(int32_t /*layer*/) {}

  // ---- room ----

  // Blocks that can be begun now without losing anything; INT32_MAX while the store takes layer blocks.
  virtual int32_t RoomForBlocks() const { return std::numeric_limits<int32_t>::max(); }
  // Whether blocks must fit into RoomForBlocks(), because the store is degraded or off.
  bool scarce() const { return RoomForBlocks() != std::numeric_limits<int32_t>::max(); }
  // Whether the block has frames that are not in that room.
  virtual bool HoldsFrames(int32_t /*block*/) const { return false; }
  // Frames that can be had without waiting, and without taking more than a part of what others may use
  // again.
  virtual int64_t SpareFrames() const { return 0; }
  // The part of fast memory that so many blocks take.
  virtual double ShareOfFrames(int64_t blocks) const {
    return static_cast<double>(blocks) / static_cast<double>(rooms_.blocks.num_blocks());
  }
  // ---- fetches of whole layer blocks, between passes (block_fetcher.h) ----

  // Whether all of the layer block's content has to come from the store, which has not lost it yet.
  virtual bool IsStoredOnly(int64_t /*index*/) const { return false; }
  // The layer block's place from now on, held for the fetch; OnLoaded follows when its content is there. Null: no
  // memory can be had without waiting. REQUIRES: IsStoredOnly(index), nothing is pinned, the device has nothing to do.
  virtual std::byte* TakePlace(int64_t /*index*/, uint64_t /*fetch*/) { return nullptr; }
  // The fetch's layer blocks keep their frames until EndHold, or until a pass has no other frame to take.
  virtual void BeginHold(uint64_t /*fetch*/) {}
  virtual void Hold(int64_t /*index*/, uint64_t /*fetch*/) {}
  virtual void EndHold(uint64_t /*fetch*/) {}
  // Layer blocks without a place that fetches may hold, all together.
  virtual int64_t MostHeld() const { return std::numeric_limits<int64_t>::max(); }

  // Something is to be saved although no pass needs it: EndPass goes on with it.
  virtual bool has_work() const { return false; }
  // Layer blocks in line to be saved, some of them of blocks that are gone.
  virtual size_t num_queued() const { return 0; }

  // ---- lives of blocks, as KvMemory tells of them ----

  virtual void OnSealed(int32_t /*block*/) {}
  virtual void OnAdopted(int32_t /*block*/) {}
  // Gives back what the layer block has of fast memory.
  virtual void Release(int64_t /*index*/) {}

  // ---- layer blocks, as the loader, the saver and readers of KV entries tell of them ----

  // All of it is in its place now.
  virtual void OnLoaded(int64_t /*index*/) {}
  // The store has it from now on.
  virtual void OnSaved(int64_t /*index*/) {}
  // The store did not give it back.
  virtual void MarkLost(int64_t index) {
    rooms_.stats.lost_pieces += rooms_.blocks.MarkLost(index);
  }

 protected:
  explicit Residency(const KvRooms& rooms) : rooms_(rooms) {}

  const KvRooms rooms_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_RESIDENCY_H_

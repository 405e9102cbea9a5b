// Residency with a store beside the places (residency.h): what runs is never moved, so that a device may know
// KV entries by their places, and the store has copies of what is to be kept, made behind the passes.
//
//   adopted ─▶ away ─ TryPin: all of it ────────────▶ resident
//                └── Want, LoadWanted: pages ──▶ some pages ─ the last of them ─▶ resident
//
// Places that the host reaches (shared memory) are read into directly where all of a layer block comes; other
// places, and pages, go through KvPools::incoming().
#ifndef WINNOW_ENGINE_KV_MIRRORED_H_
#define WINNOW_ENGINE_KV_MIRRORED_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/kv/block_loader.h"
#include "engine/kv/block_saver.h"
#include "engine/kv/residency.h"

namespace winnow::engine {

class Mirrored final : public Residency {
 public:
  explicit Mirrored(const KvRooms& rooms);

  void BeginPass() override { ForgetStale(); }
  void EndPass() override;
  PinResult TryPin(const PinRequest& request, std::vector<int32_t>* frames,
                   PinnedBlocks* pinned) override;
  void ForgetStale() override;
  const std::byte* Resident(int32_t layer, int32_t block, size_t offset) override;
  bool IsResident(int32_t layer, int32_t block) const override {
    return !rooms_.blocks.at(layer, block).away;
  }
  void Want(int32_t chunk, int32_t layer, int32_t block, size_t offset) override;
  void LoadWanted(int32_t layer) override;
  bool IsStoredOnly(int64_t index) const override {
    return rooms_.blocks.at(index).away && !rooms_.blocks.at(index).lost;
  }
  std::byte* TakePlace(int64_t index, uint64_t /*fetch*/) override {
    return rooms_.pools.Place(rooms_.blocks.LayerOf(index), rooms_.blocks.BlockOf(index));
  }
  bool has_work() const override { return saver_.has_work(); }
  size_t num_queued() const override { return saver_.num_queued(); }
  void OnSealed(int32_t block) override { saver_.EnqueueBlock(block); }
  void OnAdopted(int32_t block) override;
  void Release(int64_t index) override { OnLoaded(index); }
  void OnLoaded(int64_t index) override;

 private:
  // Pages of a layer block that is away: a bit each.
  struct Pages {
    std::vector<uint64_t> here, wanted;
    int32_t chunk = 0;  // that wanted the first of them
  };
  struct PageRead {
    int64_t index = 0;
    size_t at = 0;  // in KvPools::incoming(), in pages
    uint64_t payload_bytes = 0;
    std::vector<uint32_t> pages;
  };
  // Pages [first, last] that the KV entry at `offset` lies on.
  struct PageRange {
    size_t first = 0, last = 0;
  };
  PageRange PagesOf(size_t offset) const;
  bool HasPages(int64_t index, size_t offset) const;
  size_t PageBytes(size_t page) const;
  PageRead PlanRead(int64_t index) const;
  // Waits for the reads, and brings their pages to their places.
  void FinishReads(int32_t layer, std::vector<PageRead>* reads);
  void PlacePages(int32_t layer, const PageRead& read);

  const size_t block_pages_;  // of a layer block
  BlockLoader loader_;
  BlockSaver saver_;
  absl::flat_hash_map<int64_t, Pages> partial_;  // layer blocks of which a page is here or wanted
  std::vector<int64_t> wanted_;                  // layer blocks of one layer
  std::vector<int32_t>
      adopted_;  // blocks, since the device last forgot what it kept of their places
  std::vector<kernels::CopyPart> copies_;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_MIRRORED_H_

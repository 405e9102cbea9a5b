// Residency with a store below the frames (residency.h): blocks may be more than frames hold. Where the frames
// lie in the backend's shared memory (a GPU's host), some layers have places on the device, and their
// layer blocks come to and leave those like Mirrored's, in whole layer blocks.
//
//   written ─ sealed, saved ─▶ frame given to others ─▶ loaded again, or read entry by entry
#ifndef WINNOW_ENGINE_KV_PAGED_H_
#define WINNOW_ENGINE_KV_PAGED_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/kv/block_loader.h"
#include "engine/kv/block_saver.h"
#include "engine/kv/frame_table.h"
#include "engine/kv/residency.h"

namespace winnow::engine {

class Paged final : public Residency {
 public:
  // `write_through`: BlockSaver's.
  Paged(const KvRooms& rooms, bool write_through);

  void BeginPass() override;
  void EndPass() override;
  PinResult TryPin(const PinRequest& request, std::vector<int32_t>* frames,
                   PinnedBlocks* pinned) override;
  void Unpin() override;
  const std::byte* Resident(int32_t layer, int32_t block, size_t offset) override {
    const int32_t frame = rooms_.blocks.at(layer, block).frame;
    if (frame < 0) return nullptr;
    frames_.Use(frame);
    return rooms_.pools.Frame(frame) + offset;
  }
  bool IsResident(int32_t layer, int32_t block) const override {
    return rooms_.blocks.at(layer, block).frame >= 0;
  }
  int32_t RoomForBlocks() const override;
  bool HoldsFrames(int32_t block) const override;
  int64_t SpareFrames() const override { return frames_.num_free() + frames_.num_clean() / 4; }
  double ShareOfFrames(int64_t blocks) const override;
  bool IsStoredOnly(int64_t index) const override {
    const LayerBlock& layer_block = rooms_.blocks.at(index);
    return layer_block.frame < 0 && layer_block.saved && !layer_block.lost;
  }
  std::byte* TakePlace(int64_t index, uint64_t fetch) override;
  void BeginHold(uint64_t fetch) override { frames_.BeginHold(fetch); }
  void Hold(int64_t index, uint64_t fetch) override { frames_.Hold(index, fetch); }
  void EndHold(uint64_t fetch) override { frames_.EndHold(fetch); }
  // The other half is for those who step.
  int64_t MostHeld() const override { return frames_.num_shared() / 2; }
  bool has_work() const override { return saver_.has_work(); }
  size_t num_queued() const override { return saver_.num_queued(); }
  void OnSealed(int32_t block) override { saver_.EnqueueBlock(block); }
  void Release(int64_t index) override { frames_.Release(index); }
  void OnSaved(int64_t index) override { frames_.OnSaved(index); }
  void MarkLost(int64_t index) override;

 private:
  bool PinResident(const PinRequest& request, std::vector<int32_t>* frames, int32_t* missing);
  PinResult LoadMissing(const PinRequest& request, std::vector<int32_t>* frames);
  bool TakeFrame(int64_t index);

  FrameTable frames_;
  BlockLoader loader_;
  BlockSaver saver_;
  std::vector<int64_t> to_places_;  // of one TryPin
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_PAGED_H_

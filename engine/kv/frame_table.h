// The frames of paged residency: which are free, which layer block each holds, and which is given to another
// when none is free.
//
// A layer of own_layers has a frame for each of its blocks, which is never given to others: the first frames, layer by
// layer in their order. The other layers share the frames behind.
//
// Threads: the engine thread only.
#ifndef WINNOW_ENGINE_KV_FRAME_TABLE_H_
#define WINNOW_ENGINE_KV_FRAME_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "engine/kv/block_table.h"

namespace winnow::engine {

class FrameTable {
 public:
  // `blocks` outlives the table and has the frame of each layer block. REQUIRES: own_layers ascend; more frames than
  // they take, unless they are all layers.
  FrameTable(BlockTable& blocks, std::span<const int32_t> own_layers, int64_t num_frames);

  bool HasOwnFrames(int32_t layer) const { return first_frame_[layer] >= 0; }
  int32_t num_own() const { return num_own_; }
  int64_t num_shared() const { return static_cast<int64_t>(frames_.size()) - num_own_; }
  int32_t num_sharing_layers() const { return num_sharing_layers_; }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  // Shared frames whose layer block is saved: they can be given to others.
  int64_t num_clean() const { return num_clean_; }
  // Frames that were given to others, since the start.
  uint64_t num_evicted() const { return num_evicted_; }

  void BeginPass();
  void Unpin();
  // Keeps the layer block's frame until Unpin. REQUIRES: it has one.
  void Pin(int64_t index);
  // The frame was read in this pass.
  void Use(int32_t frame) { frames_[frame].used_in = pass_; }
  // Keeps frames over passes: of each layer block the one that held it last, between BeginHold and EndHold or DropHolds.
  void BeginHold(uint64_t holder) { holders_.insert(holder); }
  void Hold(int64_t index, uint64_t holder);
  void EndHold(uint64_t holder) { holders_.erase(holder); }
  // Nothing is held any more. False: nobody held anything.
  bool DropHolds();
  // Gives the layer block a frame, pinned. False: none is free, and none that is neither pinned nor held is clean.
  // REQUIRES: it has none.
  bool Take(int64_t index);
  // Takes the layer block's frame back, if it has one. Precedes changes of LayerBlock::saved.
  void Release(int64_t index);
  // The layer block is saved from now on.
  void OnSaved(int64_t index) { num_clean_ += blocks_.at(index).frame >= num_own_; }

 private:
  struct Frame {
    int64_t holds = -1;  // layer block
    uint32_t pin_group = 0;
    uint32_t used_in = 0;  // the last pass that did; 0: none
    uint64_t held_by = 0;  // 0: nobody
  };
  int32_t Find(int64_t index);
  int32_t EvictUnused();
  int32_t EvictLatest(int32_t layer);
  bool MayEvict(const Frame& frame) const {
    return frame.holds >= 0 && frame.pin_group != pin_group_ && blocks_.at(frame.holds).saved &&
           !holders_.contains(frame.held_by);
  }
  int32_t Evict(int32_t frame);

  BlockTable& blocks_;
  std::vector<int32_t>
      first_frame_;  // [layers] of those with frames of their own; -1: it shares frames
  std::vector<int32_t>
      before_;  // [layers] the sharing layer before a sharing one; of the first, the last
  int32_t num_own_ = 0;
  int32_t num_sharing_layers_ = 0;
  std::vector<Frame> frames_;
  absl::flat_hash_set<uint64_t> holders_;
  std::vector<int32_t> free_;
  int64_t num_clean_ = 0;
  uint64_t num_evicted_ = 0;
  uint32_t pass_ = 2;
  uint32_t pin_group_ = 1;
  int64_t unused_seen_ = 0;  // frames that EvictUnused has looked at in this pass
  int64_t next_unused_ = 0;  // where it goes on
  // Where EvictLatest goes on for a layer block of layer latest_from_; -1: it begins anew.
  int32_t latest_from_ = -1, latest_layer_ = 0, latest_block_ = 0;
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_KV_FRAME_TABLE_H_

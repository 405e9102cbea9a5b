#include "engine/kv/frame_table.h"

#include "kernels/check.h"

namespace winnow::engine {

FrameTable::FrameTable(BlockTable& blocks, std::span<const int32_t> own_layers, int64_t num_frames)
    : blocks_(blocks),
      first_frame_(blocks.num_layers(), -1),
      before_(blocks.num_layers(), -1),
      frames_(static_cast<size_t>(num_frames)) {
  for (const int32_t layer : own_layers) {
    first_frame_[layer] = num_own_;
    num_own_ += blocks.num_blocks();
  }
  WINNOW_CHECK(num_frames >= num_own_);
  int32_t first = -1, last = -1;
  for (int32_t layer = 0; layer < blocks.num_layers(); ++layer) {
    if (HasOwnFrames(layer)) continue;
    ++num_sharing_layers_;
    if (first < 0) first = layer;
    before_[layer] = last;
    last = layer;
  }
  if (first >= 0) before_[first] = last;
  for (auto frame = static_cast<int32_t>(num_frames) - 1; frame >= num_own_; --frame) {
    free_.push_back(frame);
  }
}

void FrameTable::BeginPass() {
  ++pass_;
  unused_seen_ = 0;
}

void FrameTable::Unpin() {
  ++pin_group_;
  latest_from_ = -1;
}

void FrameTable::Pin(int64_t index) {
  Frame& frame = frames_[blocks_.at(index).frame];
  frame.pin_group = pin_group_;
  frame.used_in = pass_;
}

void FrameTable::Hold(int64_t index, uint64_t holder) {
  if (const int32_t frame = blocks_.at(index).frame; frame >= 0) frames_[frame].held_by = holder;
}

bool FrameTable::DropHolds() {
  const bool held = !holders_.empty();
  holders_.clear();
  // Those that were looked at and held may go now.
  unused_seen_ = 0;
  latest_from_ = -1;
  return held;
}

bool FrameTable::Take(int64_t index) {
  const int32_t frame = Find(index);
  if (frame < 0) return false;
  blocks_.SetFrame(index, frame);
  frames_[frame] = {.holds = index, .pin_group = pin_group_, .used_in = pass_};
  num_clean_ += frame >= num_own_ && blocks_.at(index).saved;
  return true;
}

// A frame for the layer block; -1: none.
int32_t FrameTable::Find(int64_t index) {
  const int32_t layer = blocks_.LayerOf(index);
  if (HasOwnFrames(layer)) return first_frame_[layer] + blocks_.BlockOf(index);
  if (!free_.empty()) {
    const int32_t frame = free_.back();
    free_.pop_back();
    return frame;
  }
  if (num_clean_ == 0) return -1;
  // Frames that neither this pass nor the one before has used go first. If everything is in use, frames are
  // too few for what runs, and every pass goes through the same layers in turn: to take what was used longest
  // ago would take what is needed soonest, and nothing would ever be found again. So what was used last goes,
  // which is needed last: of this layer what is not pinned, then of those before it. The rest stays from pass
  // to pass.
  const int32_t unused = EvictUnused();
  return unused >= 0 ? unused : EvictLatest(layer);
}

void FrameTable::Release(int64_t index) {
  const int32_t frame = blocks_.at(index).frame;
  if (frame < 0) return;
  frames_[frame] = {};
  if (frame >= num_own_) {
    num_clean_ -= blocks_.at(index).saved;
    free_.push_back(frame);
  }
  blocks_.SetFrame(index, -1);
}

int32_t FrameTable::EvictUnused() {
  // A frame that is used in a pass stays so: each is looked at once.
  for (; unused_seen_ < num_shared(); ++unused_seen_) {
    const auto index = static_cast<int32_t>(num_own_ + next_unused_);
    next_unused_ = (next_unused_ + 1) % num_shared();
    if (MayEvict(frames_[index]) && frames_[index].used_in + 1 < pass_) return Evict(index);
  }
  return -1;
}

int32_t FrameTable::EvictLatest(int32_t layer) {
  if (latest_from_ != layer) {
    latest_from_ = latest_layer_ = layer;
    latest_block_ = 0;
  }
  for (int32_t step = 0; step <= num_sharing_layers_; ++step) {
    for (; latest_block_ < blocks_.num_blocks(); ++latest_block_) {
      const int32_t frame = blocks_.at(latest_layer_, latest_block_).frame;
      if (frame >= 0 && MayEvict(frames_[frame])) return Evict(frame);
    }
    latest_block_ = 0;
    latest_layer_ = before_[latest_layer_];
  }
  return -1;
}

int32_t FrameTable::Evict(int32_t frame) {
  blocks_.SetFrame(frames_[frame].holds, -1);
  frames_[frame] = {};
  --num_clean_;
  ++num_evicted_;
  return frame;
}

}  // namespace winnow::engine

#include "engine/kv/paged.h"

#include <algorithm>
#include <limits>

namespace winnow::engine {

using storage::TierState;

Paged::Paged(const KvRooms& rooms, bool write_through)
    : Residency(rooms),
      frames_(rooms.blocks, rooms.pools.layers_with_places(), rooms.pools.num_frames()),
      loader_(rooms, *this),
      saver_(rooms, *this, write_through) {}

// ---- a pass ----

void Paged::BeginPass() {
  Unpin();
  frames_.BeginPass();
}

void Paged::EndPass() {
  saver_.SaveByCopy();
  saver_.SaveWanted();
  // Half of the frames: a pass that has to wait for the disk costs more than writing early.
  saver_.SaveAhead(frames_.num_free() + frames_.num_clean(), frames_.num_shared() / 2);
}

void Paged::Unpin() {
  frames_.Unpin();
  rooms_.backend.ForgetTables();  // their memory may get other frames now
}

PinResult Paged::TryPin(const PinRequest& request, std::vector<int32_t>* frames,
                        PinnedBlocks* pinned) {
  frames->resize(request.last, -1);
  const bool own = frames_.HasOwnFrames(request.layer);
  *pinned = {own ? rooms_.pools.own_pool() : rooms_.pools.frame_pool(), *frames};
  int32_t missing = 0;
  if (!PinResident(request, frames, &missing)) return PinResult::kLost;
  if (missing == 0) return PinResult::kOk;
  const PinResult result = LoadMissing(request, frames);
  if (result != PinResult::kOk) return result;
  const auto is_lost = [&](int32_t block) { return rooms_.blocks.lost(request.layer, block); };
  const std::span<const int32_t> wanted = request.wanted();
  return std::any_of(wanted.begin(), wanted.end(), is_lost) ? PinResult::kLost : PinResult::kOk;
}

// False: one is lost.
bool Paged::PinResident(const PinRequest& request, std::vector<int32_t>* frames, int32_t* missing) {
  const int32_t first_frame = frames_.HasOwnFrames(request.layer) ? 0 : frames_.num_own();
  for (int32_t i = request.first; i < request.last; ++i) {
    const int64_t index = rooms_.blocks.IndexOf(request.layer, request.blocks[i]);
    const LayerBlock& layer_block = rooms_.blocks.at(index);
    if (layer_block.lost) return false;
    (*frames)[i] = layer_block.frame - first_frame;
    if (layer_block.frame >= 0) {
      frames_.Pin(index);
    } else {
      ++*missing;
    }
  }
  return true;
}

// Gives frames to the blocks that have none, and waits until what the store has of them is there.
PinResult Paged::LoadMissing(const PinRequest& request, std::vector<int32_t>* frames) {
  const bool own = frames_.HasOwnFrames(request.layer);
  const int32_t first_frame = own ? 0 : frames_.num_own();
  bool full = false, settled = false;
  to_places_.clear();
  for (int32_t i = request.first; i < request.last; ++i) {
    const int64_t index = rooms_.blocks.IndexOf(request.layer, request.blocks[i]);
    if (rooms_.blocks.at(index).frame >= 0) continue;
    full = !TakeFrame(index);
    if (full) break;
    const int32_t frame = rooms_.blocks.at(index).frame;
    (*frames)[i] = frame - first_frame;
    if (!rooms_.blocks.at(index).saved) continue;  // to be written for the first time
    if (own) {
      to_places_.push_back(index);
      continue;
    }
    // The device may still read what the frame had before.
    if (!settled && !rooms_.backend.Synchronize()) return PinResult::kLost;
    settled = true;
    loader_.Load(index, request.chunk, rooms_.pools.Frame(frame));
  }
  if (!loader_.idle()) loader_.Finish();
  if (!to_places_.empty()) loader_.LoadToPlaces(request.layer, to_places_, request.chunk);
  return full ? PinResult::kFull : PinResult::kOk;
}

// False: none can be had while the pins hold.
bool Paged::TakeFrame(int64_t index) {
  while (!frames_.Take(index)) {
    if (!frames_.DropHolds() && !saver_.SaveSome()) return false;
  }
  rooms_.stats.evicted_frames = frames_.num_evicted();
  return true;
}

std::byte* Paged::TakePlace(int64_t index, uint64_t fetch) {
  if (!frames_.Take(index)) return nullptr;
  rooms_.stats.evicted_frames = frames_.num_evicted();
  frames_.Hold(index, fetch);
  return rooms_.pools.Frame(rooms_.blocks.at(index).frame);
}

void Paged::MarkLost(int64_t index) {
  if (!rooms_.blocks.at(index).lost) frames_.Release(index);
  Residency::MarkLost(index);
}

// ---- room ----

int32_t Paged::RoomForBlocks() const {
  const TierState state = rooms_.store.state();
  if (state == TierState::kOk) return std::numeric_limits<int32_t>::max();
  int64_t frames = frames_.num_free();
  if (state == TierState::kDegraded) frames += frames_.num_clean();  // it still gives them back
  return static_cast<int32_t>(frames / frames_.num_sharing_layers());
}

bool Paged::HoldsFrames(int32_t block) const {
  const bool gives_back = rooms_.store.state() != TierState::kOff;
  for (int32_t layer = 0; layer < rooms_.blocks.num_layers(); ++layer) {
    if (frames_.HasOwnFrames(layer)) continue;
    const LayerBlock& layer_block = rooms_.blocks.at(layer, block);
    if (layer_block.frame >= 0 && !(layer_block.saved && gives_back)) return true;
  }
  return false;
}

double Paged::ShareOfFrames(int64_t blocks) const {
  return static_cast<double>(blocks * frames_.num_sharing_layers()) /
         static_cast<double>(frames_.num_shared());
}

}  // namespace winnow::engine

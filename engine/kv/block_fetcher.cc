#include "engine/kv/block_fetcher.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace winnow::engine {
namespace {

// A Pump that finds its answers at once, as host memory's are, goes on for so many bytes. Others want to step, too.
constexpr size_t kBytesAtOnce = size_t{64} << 20;

}  // namespace

BlockFetcher::BlockFetcher(const KvRooms& rooms, Residency& residency)
    : rooms_(rooms), residency_(residency) {
  for (size_t slot = rooms.pools.fetched().size() / rooms.pools.block_bytes(); slot > 0; --slot) {
    free_slots_.push_back(slot - 1);
  }
}

BlockFetcher::~BlockFetcher() {
  if (!reads_.empty()) rooms_.store.Wait([this] { return reads_.empty(); });
}

uint64_t BlockFetcher::Begin(std::span<const int32_t> blocks,
                             absl::FunctionRef<size_t(int32_t layer)> first_wanted) {
  Fetch fetch;
  std::vector<int64_t> present;
  for (int32_t layer = 0; layer < rooms_.blocks.num_layers(); ++layer) {
    const std::span<const int32_t> wanted =
        blocks.subspan(std::min(first_wanted(layer), blocks.size()));
    if (!rooms_.pools.HasPlaces(layer)) fetch.held += std::ssize(wanted);
    for (const int32_t block : wanted) {
      const int64_t index = rooms_.blocks.IndexOf(layer, block);
      if (rooms_.blocks.at(index).lost) return kNone;
      if (residency_.IsStoredOnly(index)) {
        fetch.missing.push_back({index, rooms_.blocks[block].generation});
      } else {
        present.push_back(index);
      }
    }
  }
  if (fetch.missing.empty() || fetch.held > residency_.MostHeld()) return kNone;
  if (held_ + fetch.held > residency_.MostHeld()) return kLater;
  const uint64_t number = ++last_;
  residency_.BeginHold(number);
  for (const int64_t index : present) residency_.Hold(index, number);
  held_ += fetch.held;
  fetches_.emplace(number, std::move(fetch));
  return number;
}

TierBytes BlockFetcher::End(uint64_t fetch) {
  const Fetch ended = std::move(fetches_.extract(fetch).mapped());
  residency_.EndHold(fetch);
  held_ -= ended.held;
  return ended.bytes;
}

void BlockFetcher::Pump() {
  if (fetches_.empty() && answered_.empty()) return;
  size_t bytes = 0;
  for (bool moved = true; moved && bytes < kBytesAtOnce;) {
    Submit();
    rooms_.store.Poll(std::chrono::nanoseconds(0));
    moved = !answered_.empty();
    bytes += answered_.size() * rooms_.pools.block_bytes();
    TakeIn();
  }
}

void BlockFetcher::Wait(std::chrono::nanoseconds most) {
  if (answered_.empty()) rooms_.store.WaitForSome(most);
}

// ---- reads ----

void BlockFetcher::Submit() {
  for (const auto& [number, fetch] : fetches_) {
    if (fetch.left_to_step) continue;
    for (const Wanted& what : fetch.missing) {
      if (free_slots_.empty()) return;
      if (reading_.insert(what.index).second) Start(number, what);
    }
  }
}

void BlockFetcher::Start(uint64_t fetch, const Wanted& what) {
  const size_t slot = free_slots_.back();
  free_slots_.pop_back();
  const uint64_t number = reads_.Issue({what, fetch, slot});
  rooms_.store.Load({this, number}, rooms_.blocks[rooms_.blocks.BlockOf(what.index)].name,
                    rooms_.blocks.LayerOf(what.index), {Slot(slot), rooms_.pools.block_bytes()});
}

void BlockFetcher::OnAnswer(uint64_t number, const StoreAnswer& answer) {
  answered_.push_back({reads_.Redeem(number), answer});
}

// ---- answers ----

void BlockFetcher::TakeIn() {
  if (answered_.empty()) return;
  residency_.ForgetStale();
  residency_.Unpin();
  // The device may still read what is in a frame. One that has failed is asked for nothing more: the next step says so.
  const bool works = rooms_.backend.Synchronize();
  copies_.clear();
  for (const Answered& answered : answered_) {
    if (works) Place(answered);
  }
  if (!copies_.empty()) rooms_.backend.CopyAllToDevice(copies_);
  if (kernels::SharedKv* const shared = rooms_.pools.shared_kv()) shared->ForgetStaged();
  for (const Answered& answered : answered_) {
    free_slots_.push_back(answered.read.slot);
    reading_.erase(answered.read.what.index);
  }
  answered_.clear();
  for (auto& [number, fetch] : fetches_) fetch.left_to_step |= !works;
  DropPresent();
}

void BlockFetcher::Place(const Answered& answered) {
  const auto& [what, number, slot] = answered.read;
  if (!IsCurrent(what) || !residency_.IsStoredOnly(what.index)) return;
  if (!answered.answer.ok) return residency_.MarkLost(what.index);
  const auto fetch = fetches_.find(number);
  if (fetch == fetches_.end()) return;
  std::byte* const place = residency_.TakePlace(what.index, number);
  if (place == nullptr) {
    fetch->second.left_to_step = true;
    return;
  }
  const int32_t layer = rooms_.blocks.LayerOf(what.index);
  const size_t bytes = rooms_.pools.block_bytes();
  // The host reaches shared memory, and frames that layers share.
  if (rooms_.pools.IsShared(layer) || !rooms_.pools.HasPlaces(layer)) {
    std::memcpy(place, Slot(slot), bytes);
  } else {
    copies_.push_back({Slot(slot), place, bytes});
  }
  residency_.OnLoaded(what.index);
  (answered.answer.from_disk ? fetch->second.bytes.disk : fetch->second.bytes.host) += bytes;
  ++rooms_.stats.loaded_pieces;
  rooms_.stats.loaded_bytes += bytes;
}

// Layer blocks that are lost, or not theirs any more, are not waited for.
void BlockFetcher::DropPresent() {
  for (auto& [number, fetch] : fetches_) {
    std::erase_if(fetch.missing, [&](const Wanted& what) {
      if (!IsCurrent(what)) return true;
      fetch.left_to_step |= rooms_.blocks.at(what.index).lost;
      return !residency_.IsStoredOnly(what.index);
    });
  }
}

}  // namespace winnow::engine

#include "engine/kv/mirrored.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/check.h"
#include "storage/format.h"

namespace winnow::engine {

using storage::kPageBytes;

namespace {

bool HasBit(const std::vector<uint64_t>& bits, size_t i) {
  return (bits[i / 64] >> i % 64 & 1) != 0;
}
void SetBit(std::vector<uint64_t>& bits, size_t i) { bits[i / 64] |= uint64_t{1} << i % 64; }
bool IsEmpty(const std::vector<uint64_t>& bits) {
  return std::all_of(bits.begin(), bits.end(), [](uint64_t word) { return word == 0; });
}

}  // namespace

Mirrored::Mirrored(const KvRooms& rooms)
    : Residency(rooms),
      block_pages_((rooms.pools.block_bytes() + kPageBytes - 1) / kPageBytes),
      loader_(rooms, *this),
      saver_(rooms, *this, /*write_through=*/true) {}

void Mirrored::EndPass() { saver_.SaveByCopy(); }

void Mirrored::OnAdopted(int32_t block) {
  for (int32_t layer = 0; layer < rooms_.blocks.num_layers(); ++layer) {
    rooms_.blocks.SetAway(rooms_.blocks.IndexOf(layer, block), true);
  }
  adopted_.push_back(block);
}

void Mirrored::OnLoaded(int64_t index) {
  if (rooms_.blocks.SetAway(index, false)) partial_.erase(index);
}

void Mirrored::ForgetStale() {
  kernels::SharedKv* const shared = rooms_.pools.shared_kv();
  if (shared != nullptr && !adopted_.empty()) shared->ForgetRows(adopted_);
  adopted_.clear();
}

// ---- whole layer blocks ----

PinResult Mirrored::TryPin(const PinRequest& request, std::vector<int32_t>* /*frames*/,
                           PinnedBlocks* pinned) {
  *pinned = {rooms_.pools.LayerPool(request.layer), request.blocks};
  if (rooms_.blocks.num_away(request.layer) == 0) return PinResult::kOk;
  std::vector<int64_t> away;
  for (const int32_t block : request.wanted()) {
    const int64_t index = rooms_.blocks.IndexOf(request.layer, block);
    if (rooms_.blocks.at(index).lost) return PinResult::kLost;
    if (rooms_.blocks.at(index).away) away.push_back(index);
  }
  if (away.empty()) return PinResult::kOk;
  loader_.LoadToPlaces(request.layer, away, request.chunk);
  const auto is_lost = [this](int64_t index) { return rooms_.blocks.at(index).lost; };
  return std::any_of(away.begin(), away.end(), is_lost) ? PinResult::kLost : PinResult::kOk;
}

// ---- pages ----

Mirrored::PageRange Mirrored::PagesOf(size_t offset) const {
  return {offset / kPageBytes, (offset + rooms_.pools.layout().RowBytes() - 1) / kPageBytes};
}

size_t Mirrored::PageBytes(size_t page) const {
  return std::min(kPageBytes, rooms_.pools.block_bytes() - page * kPageBytes);
}

const std::byte* Mirrored::Resident(int32_t layer, int32_t block, size_t offset) {
  if (rooms_.blocks.num_away(layer) > 0 && !IsResident(layer, block) &&
      !HasPages(rooms_.blocks.IndexOf(layer, block), offset)) {
    return nullptr;
  }
  return rooms_.pools.Place(layer, block) + offset;
}

bool Mirrored::HasPages(int64_t index, size_t offset) const {
  const auto pages = partial_.find(index);
  if (pages == partial_.end()) return false;
  const auto [first, last] = PagesOf(offset);
  for (size_t page = first; page <= last; ++page) {
    if (!HasBit(pages->second.here, page)) return false;
  }
  return true;
}

void Mirrored::Want(int32_t chunk, int32_t layer, int32_t block, size_t offset) {
  const int64_t index = rooms_.blocks.IndexOf(layer, block);
  if (!rooms_.blocks.at(index).away || rooms_.blocks.at(index).lost) return;
  Pages& pages = partial_[index];
  if (pages.here.empty()) {
    pages.here.resize((block_pages_ + 63) / 64);
    pages.wanted.resize(pages.here.size());
  }
  const auto [first, last] = PagesOf(offset);
  for (size_t page = first; page <= last; ++page) {
    if (HasBit(pages.here, page)) continue;
    if (IsEmpty(pages.wanted)) {
      wanted_.push_back(index);
      pages.chunk = chunk;
    }
    SetBit(pages.wanted, page);
  }
}

void Mirrored::LoadWanted(int32_t layer) {
  if (wanted_.empty()) return;
  const size_t most = std::max(KvPools::kPagesInFlight, block_pages_);
  std::vector<PageRead> reads;
  size_t taken = 0;  // of incoming(), in pages
  std::sort(wanted_.begin(), wanted_.end());
  for (const int64_t index : wanted_) {
    WINNOW_CHECK(rooms_.blocks.LayerOf(index) == layer);
    PageRead read = PlanRead(index);
    if (taken + read.pages.size() > most) {
      FinishReads(layer, &reads);
      taken = 0;
    }
    read.at = taken;
    taken += read.pages.size();
    loader_.LoadPages(
        index, partial_[index].chunk, read.pages, read.payload_bytes,
        rooms_.pools.incoming().subspan(read.at * kPageBytes, read.pages.size() * kPageBytes));
    reads.push_back(std::move(read));
  }
  FinishReads(layer, &reads);
  wanted_.clear();
  if (rooms_.pools.IsShared(layer)) rooms_.pools.shared_kv()->ForgetStaged();
}

Mirrored::PageRead Mirrored::PlanRead(int64_t index) const {
  const Pages& pages = partial_.at(index);
  PageRead read;
  read.index = index;
  for (size_t page = 0; page < block_pages_; ++page) {
    if (!HasBit(pages.wanted, page)) continue;
    read.pages.push_back(static_cast<uint32_t>(page));
    read.payload_bytes += PageBytes(page);
  }
  return read;
}

void Mirrored::FinishReads(int32_t layer, std::vector<PageRead>* reads) {
  loader_.Finish();
  copies_.clear();
  for (const PageRead& read : *reads) {
    if (!rooms_.blocks.at(read.index).lost) PlacePages(layer, read);
  }
  if (!copies_.empty()) rooms_.backend.CopyAllToDevice(copies_);
  reads->clear();
}

void Mirrored::PlacePages(int32_t layer, const PageRead& read) {
  Pages& pages = partial_[read.index];
  std::byte* const place = rooms_.pools.Place(layer, rooms_.blocks.BlockOf(read.index));
  std::byte* const incoming = rooms_.pools.incoming().data() + read.at * kPageBytes;
  for (size_t i = 0; i < read.pages.size(); ++i) {
    const size_t page = read.pages[i];
    std::byte* const from = incoming + i * kPageBytes;
    if (rooms_.pools.IsShared(layer)) {
      std::memcpy(place + page * kPageBytes, from, PageBytes(page));
    } else if (i > 0 && read.pages[i - 1] + 1 == page) {
      copies_.back().size_bytes += PageBytes(page);
    } else {
      copies_.push_back({from, place + page * kPageBytes, PageBytes(page)});
    }
    SetBit(pages.here, page);
  }
  std::fill(pages.wanted.begin(), pages.wanted.end(), 0);
  for (size_t page = 0; page < block_pages_; ++page) {
    if (!HasBit(pages.here, page)) return;
  }
  OnLoaded(read.index);
}

}  // namespace winnow::engine

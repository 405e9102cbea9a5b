// KvMemory with a store beside the frames (own_frames): every piece has its place, and what is adopted
// from the store comes there when it is needed. What runs is never moved, so that a device may know rows
// by their places; the store is a copy of what is to be kept, made behind the passes. So it is, whole
// pieces only, of the first layers where a store lies below frames in shared memory.
//
//   adopted ─▶ away ─ Pin: whole ───────────────▶ here
//                └── Want, BringWanted: pages ──▶ some pages here ─ the last of them ─▶ here
//
// Places that the host reaches (shared memory) are read into directly where a whole piece comes; others,
// and pages, go through bounce_.
//
// To save a piece the store copies it and sums it up, at some GB/s, and a GPU makes KV about as fast. So
// that is done while the device works: EndPass comes before the host waits for what the pass asked of it,
// and saves what earlier passes wrote. Out of memory that the host cannot reach pieces are copied at the
// end of one pass, when the device is waited for, and saved in the next.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "engine/kv/kv_memory.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "storage/format.h"

namespace winnow::engine {

using storage::Completion;
using storage::kPageBytes;

namespace {

// Read together, and waited for together; less than of whole pieces, as each is a read of its own at worst.
constexpr size_t kPagesInFlight = 2048;

size_t PagesOf(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes; }

bool HasBit(const std::vector<uint64_t>& bits, size_t i) {
  return (bits[i / 64] >> i % 64 & 1) != 0;
}
void SetBit(std::vector<uint64_t>& bits, size_t i) { bits[i / 64] |= uint64_t{1} << i % 64; }

}  // namespace

absl::Status KvMemory::AllocateBounce() {
  const size_t block_pages = PagesOf(options_.layout.BlockBytes());
  const size_t bytes =
      std::max({kLoadBytesInFlight, block_pages * kPageBytes, kPagesInFlight * kPageBytes});
  bounce_ = backend_.AllocateShared(bytes);
  outgoing_ = backend_.AllocateShared(bytes);
  if (bounce_.data() != nullptr && outgoing_.data() != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      fmt::format("no memory for KV on its way: {} bytes", 2 * bytes));
}

void KvMemory::SetAway(int64_t index, bool away) {
  Piece& piece = pieces_[index];
  if (piece.away == away) return;
  piece.away = away;
  away_[LayerOf(index)] += away ? 1 : -1;
  if (!away) partial_.erase(index);
}

// Whoever brings bytes to places that other content had calls this first.
void KvMemory::ForgetAdopted() {
  if (shared_kv_ != nullptr && !adopted_.empty()) shared_kv_->ForgetRows(adopted_);
  adopted_.clear();
}

// ---- whole pieces ----

KvMemory::PinResult KvMemory::PinOwn(int32_t chunk, int32_t layer, std::span<const int32_t> blocks,
                                     int32_t first, int32_t last) {
  std::vector<int64_t> away;
  for (int32_t i = first; i < last; ++i) {
    const int64_t index = PieceOf(layer, blocks[i]);
    if (pieces_[index].lost) return PinResult::kLost;
    if (pieces_[index].away) away.push_back(index);
  }
  if (away.empty()) return PinResult::kOk;
  BringWhole(layer, away, chunk);
  const auto lost = [this](int64_t index) { return pieces_[index].lost; };
  return std::any_of(away.begin(), away.end(), lost) ? PinResult::kLost : PinResult::kOk;
}

void KvMemory::BringWhole(int32_t layer, std::span<const int64_t> pieces, int32_t chunk) {
  const size_t bytes = options_.layout.BlockBytes();
  const size_t wave = std::max<size_t>(1, kLoadBytesInFlight / bytes);
  auto* const bounce = static_cast<std::byte*>(bounce_.data());
  std::vector<kernels::CopyPart> parts;
  for (size_t begin = 0; begin < pieces.size(); begin += wave) {
    const auto of_wave = pieces.subspan(begin, std::min(wave, pieces.size() - begin));
    for (size_t i = 0; i < of_wave.size(); ++i) {
      const int32_t block = BlockOf(of_wave[i]);
      std::byte* into = IsShared(layer) ? OwnFrame(layer, block) : bounce + i * bytes;
      const uint64_t tag = next_tag_++;
      loads_.emplace(tag, Loading{of_wave[i], chunk, bytes});
      options_.store->Get(tag, StoreId(layer, block), {into, bytes}, 0);
    }
    Wait([this] { return loads_.empty(); }, [this](const Completion& c) { foreign_.push_back(c); });
    parts.clear();
    for (size_t i = 0; i < of_wave.size(); ++i) {
      if (pieces_[of_wave[i]].lost) continue;
      SetAway(of_wave[i], false);
      if (!IsShared(layer)) {
        parts.push_back({bounce + i * bytes, OwnFrame(layer, BlockOf(of_wave[i])), bytes});
      }
    }
    if (!parts.empty()) backend_.CopyAllToDevice(parts);
  }
  if (IsShared(layer)) shared_kv_->ForgetStaged();
}

// ---- pages ----

bool KvMemory::IsHere(int32_t layer, int32_t block, size_t offset) const {
  const int64_t index = PieceOf(layer, block);
  if (!pieces_[index].away) return true;
  const auto pages = partial_.find(index);
  if (pages == partial_.end()) return false;
  const size_t last = (offset + options_.layout.RowBytes() - 1) / kPageBytes;
  for (size_t page = offset / kPageBytes; page <= last; ++page) {
    if (!HasBit(pages->second.here, page)) return false;
  }
  return true;
}

void KvMemory::Want(int32_t chunk, int32_t layer, int32_t block, size_t offset) {
  const int64_t index = PieceOf(layer, block);
  if (!pieces_[index].away || pieces_[index].lost) return;
  Pages& pages = partial_[index];
  if (pages.here.empty()) {
    pages.here.resize((PagesOf(options_.layout.BlockBytes()) + 63) / 64);
    pages.wanted.resize(pages.here.size());
  }
  const size_t last = (offset + options_.layout.RowBytes() - 1) / kPageBytes;
  for (size_t page = offset / kPageBytes; page <= last; ++page) {
    if (HasBit(pages.here, page)) continue;
    if (std::all_of(pages.wanted.begin(), pages.wanted.end(), [](uint64_t w) { return w == 0; })) {
      wanted_pieces_.push_back(index);
      pages.chunk = chunk;
    }
    SetBit(pages.wanted, page);
  }
}

void KvMemory::BringWanted(int32_t layer) {
  if (wanted_pieces_.empty()) return;
  const size_t bytes = options_.layout.BlockBytes();
  const size_t block_pages = PagesOf(bytes);
  const size_t most = std::max(kPagesInFlight, block_pages);
  const auto length = [&](size_t page) { return std::min(kPageBytes, bytes - page * kPageBytes); };
  struct Read {
    int64_t piece = 0;
    size_t at = 0;  // in bounce_, in pages
    std::vector<uint32_t> pages;
  };
  std::vector<Read> reads;
  std::vector<kernels::CopyPart> parts;
  auto* const bounce = static_cast<std::byte*>(bounce_.data());
  size_t taken = 0;
  const auto finish = [&] {
    Wait([this] { return loads_.empty(); }, [this](const Completion& c) { foreign_.push_back(c); });
    parts.clear();
    for (const Read& read : reads) {
      if (pieces_[read.piece].lost) continue;
      Pages& pages = partial_[read.piece];
      std::byte* const place = OwnFrame(layer, BlockOf(read.piece));
      for (size_t i = 0; i < read.pages.size(); ++i) {
        const size_t page = read.pages[i];
        std::byte* const from = bounce + (read.at + i) * kPageBytes;
        if (IsShared(layer)) {
          std::memcpy(place + page * kPageBytes, from, length(page));
        } else if (i > 0 && read.pages[i - 1] + 1 == page) {
          parts.back().size_bytes += length(page);
        } else {
          parts.push_back({from, place + page * kPageBytes, length(page)});
        }
        SetBit(pages.here, page);
      }
      std::fill(pages.wanted.begin(), pages.wanted.end(), 0);
      size_t here = 0;
      for (size_t page = 0; page < block_pages; ++page) here += HasBit(pages.here, page);
      if (here == block_pages) SetAway(read.piece, false);
    }
    if (!parts.empty()) backend_.CopyAllToDevice(parts);
    reads.clear();
    taken = 0;
  };

  std::sort(wanted_pieces_.begin(), wanted_pieces_.end());
  for (const int64_t index : wanted_pieces_) {
    WINNOW_CHECK(LayerOf(index) == layer);
    const Pages& pages = partial_[index];
    Read read;
    read.piece = index;
    uint64_t payload = 0;
    for (size_t page = 0; page < block_pages; ++page) {
      if (!HasBit(pages.wanted, page)) continue;
      read.pages.push_back(static_cast<uint32_t>(page));
      payload += length(page);
    }
    if (taken + read.pages.size() > most) finish();
    read.at = taken;
    taken += read.pages.size();
    const uint64_t tag = next_tag_++;
    loads_.emplace(tag, Loading{index, pages.chunk, payload});
    options_.store->GetPages(tag, StoreId(layer, BlockOf(index)), read.pages,
                             {bounce + read.at * kPageBytes, read.pages.size() * kPageBytes}, 0);
    reads.push_back(std::move(read));
  }
  finish();
  wanted_pieces_.clear();
  if (IsShared(layer)) shared_kv_->ForgetStaged();
}

// ---- saving ----

// What is to be kept goes to the store, as much as may be in flight. Of what is in line everything was
// written by passes before the one that runs.
void KvMemory::SaveByCopy() {
  for (const auto& [index, generation, content] : copied_) {
    if (blocks_[BlockOf(index)].generation == generation && MaySave(index) && AcceptsSaves()) {
      StartSave(index, content);
    } else if (blocks_[BlockOf(index)].generation == generation) {
      to_copy_.emplace_back(index, generation);
    }
  }
  copied_.clear();
  const size_t bytes = options_.layout.BlockBytes();
  const size_t room = outgoing_.size_bytes() / bytes;
  std::vector<kernels::CopyPart> parts;
  while (!to_copy_.empty() && saves_.size() + parts.size() < kSavesInFlight &&
         parts.size() < room && AcceptsSaves()) {
    const auto [index, generation] = to_copy_.front();
    to_copy_.pop_front();
    const int32_t layer = LayerOf(index), block = BlockOf(index);
    if (blocks_[block].generation != generation || !MaySave(index)) continue;
    if (IsShared(layer)) {
      StartSave(index, OwnFrame(layer, block));
      continue;
    }
    std::byte* const copy = static_cast<std::byte*>(outgoing_.data()) + parts.size() * bytes;
    parts.push_back({copy, OwnFrame(layer, block), bytes});
    copied_.push_back({index, generation, copy});
  }
  if (!parts.empty()) backend_.CopyAllToHost(parts);
  if (backend_.failure().empty()) return;
  // What the device holds cannot be trusted.
  copied_.clear();
  to_copy_.clear();
}

}  // namespace winnow::engine

#include "engine/retrieval/row_fetcher.h"

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "storage/format.h"

namespace winnow::engine {

using storage::kPageBytes;

absl::StatusOr<std::unique_ptr<RowFetcher>> RowFetcher::Create(kernels::DeviceOps& backend,
                                                               KvMemory& memory, int32_t num_layers,
                                                               const RowFetcherOptions& options) {
  std::unique_ptr<RowFetcher> fetcher(new RowFetcher(memory));
  if (!memory.tiered()) return fetcher;
  const kernels::KvLayout& layout = memory.places().layout();
  absl::StatusOr<RowCache> cache = RowCache::Create(
      backend, options.cache_bytes, num_layers * layout.kv_heads, layout.RowBytes());
  if (!cache.ok()) return cache.status();
  fetcher->cache_ = *std::move(cache);
  // Half for rows, half for pages; a wave of pages is copied out before the next is read.
  fetcher->staging_rows_ = static_cast<int64_t>(options.staging_bytes / 2 / layout.RowBytes());
  fetcher->staging_pages_ = options.staging_bytes / 2 / kPageBytes;
  // Pages of one block in one read: at most as many as the block has.
  const size_t block_pages = (layout.BlockBytes() + kPageBytes - 1) / kPageBytes;
  if (fetcher->staging_pages_ < block_pages) {
    return absl::InvalidArgumentError(
        fmt::format("row_staging_bytes is {}: must be at least {}, twice a block of one layer",
                    options.staging_bytes, 2 * block_pages * kPageBytes));
  }
  const auto allocate = [&](Batch* batch) {
    batch->rows = backend.AllocateShared(fetcher->staging_rows_ * layout.RowBytes());
    batch->pages = backend.AllocateShared(fetcher->staging_pages_ * kPageBytes);
    batch->misses.reserve(fetcher->staging_rows_);
    return batch->rows.data() != nullptr && batch->pages.data() != nullptr;
  };
  if (!allocate(&fetcher->call_) || (options.prefetch && !allocate(&fetcher->ahead_))) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for rows on their way: {} bytes", options.staging_bytes));
  }
  return fetcher;
}

void RowFetcher::Begin(int32_t layer) {
  layer_ = layer;
  Abandon();
}

void RowFetcher::Abandon() {
  Clear(&call_);
  lost_ = false;
}

void RowFetcher::Clear(Batch* batch) {
  batch->misses.clear();
  batch->slots.clear();
}

const std::byte* RowFetcher::ResolveAway(int32_t chunk, int32_t block, int32_t head,
                                         int32_t token) {
  if (const std::byte* row = cache_.Find(KeyOf(layer_, block, head, token))) {
    ++stats_.cache_rows;
    return row;
  }
  const int64_t place = PlaceOf(block, head, token);
  if (ahead_.layer == layer_ && !memory_.blocks().lost(layer_, block)) {
    if (const auto slot = ahead_.slots.find(place); slot != ahead_.slots.end()) {
      ++stats_.asked_hits;
      return Slot(ahead_, slot->second);
    }
  }
  if (const auto slot = call_.slots.find(place); slot != call_.slots.end()) {
    ++stats_.shared_rows;
    return Slot(call_, slot->second);
  }
  const auto next = static_cast<int32_t>(call_.misses.size());
  if (next == staging_rows_) return nullptr;
  ++stats_.store_rows;
  call_.slots.emplace(place, next);
  call_.misses.push_back({block, head * layout_.block_tokens + token, next, chunk});
  return Slot(call_, next);
}

bool RowFetcher::Wait() {
  SubmitAll(&call_, /*may_wait=*/true);
  Collect(&call_);
  if (ahead_.layer == layer_) Collect(&ahead_);
  return !lost_;
}

void RowFetcher::Expect(int32_t layer, int32_t chunk, int32_t block, int32_t head, int32_t token) {
  if (ahead_.layer != layer) {
    Collect(&ahead_);
    Clear(&ahead_);
    ahead_.layer = layer;
  }
  const auto next = static_cast<int32_t>(ahead_.misses.size());
  if (next == staging_rows_ || memory_.residency().IsResident(layer, block) ||
      memory_.blocks().lost(layer, block) ||
      cache_.Find(KeyOf(layer, block, head, token)) != nullptr ||
      !ahead_.slots.emplace(PlaceOf(block, head, token), next).second) {
    return;
  }
  ahead_.misses.push_back({block, head * layout_.block_tokens + token, next, chunk});
}

void RowFetcher::Ask() {
  // Rows whose pages find no room are left to the call that needs them.
  SubmitAll(&ahead_, /*may_wait=*/false);
}

void RowFetcher::SubmitAll(Batch* batch, bool may_wait) {
  std::vector<Miss>& misses = batch->misses;
  std::sort(misses.begin(), misses.end(), [](const Miss& a, const Miss& b) {
    return a.block != b.block ? a.block < b.block : a.row < b.row;
  });
  for (size_t first = 0; first < misses.size();) {
    size_t last = first + 1;
    while (last < misses.size() && misses[last].block == misses[first].block) ++last;
    if (!Submit(batch, first, last, may_wait)) {
      for (size_t i = first; i < misses.size(); ++i) {
        batch->slots.erase(int64_t{misses[i].block} * layout_.kv_heads * layout_.block_tokens +
                           misses[i].row);
      }
      misses.resize(first);
      return;
    }
    first = last;
  }
}

// The rows [first, last) of the batch's misses, all of one block. False: their pages find no room.
bool RowFetcher::Submit(Batch* batch, size_t first, size_t last, bool may_wait) {
  const int32_t block = batch->misses[first].block;
  const int32_t layer = batch == &call_ ? layer_ : batch->layer;
  if (memory_.blocks().lost(layer, block)) {
    for (size_t i = first; i < last; ++i) {
      std::memset(Slot(*batch, batch->misses[i].slot), 0, layout_.RowBytes());
    }
    lost_ = true;
    return true;
  }
  std::vector<uint32_t>& pages = scratch_pages_;
  pages.clear();
  for (size_t i = first; i < last; ++i) {
    const size_t begin = batch->misses[i].row * layout_.RowBytes();
    // A row of 320 or 384 bytes may lie on two pages.
    for (size_t page = begin / kPageBytes; page <= (begin + layout_.RowBytes() - 1) / kPageBytes;
         ++page) {
      if (pages.empty() || pages.back() < page) pages.push_back(static_cast<uint32_t>(page));
    }
  }
  if (batch->pages_taken + pages.size() > staging_pages_) {
    if (!may_wait) return false;
    Collect(batch);
  }
  const size_t index = batch->reads.size();
  batch->reads.push_back(
      {static_cast<int32_t>(first), static_cast<int32_t>(last), batch->pages_taken, pages});
  if (batch == &ahead_) stats_.asked_rows += last - first;
  stats_.payload_bytes += (last - first) * layout_.RowBytes();
  stats_.pages += pages.size();
  stats_.page_bytes += pages.size() * kPageBytes;
  ++batch->reads_left;
  memory_.store().LoadPages(
      {batch, index}, memory_.blocks()[block].name, layer, pages,
      {static_cast<std::byte*>(batch->pages.data()) + batch->pages_taken * kPageBytes,
       pages.size() * kPageBytes});
  batch->pages_taken += pages.size();
  return true;
}

// Waits for the batch's reads in flight; their pages are free then.
void RowFetcher::Collect(Batch* batch) {
  if (batch->reads_left > 0) {
    memory_.store().Wait([this, batch] {
      TakeIn(&call_);
      TakeIn(&ahead_);
      return batch->reads_left == 0;
    });
  }
  batch->reads.clear();
  batch->pages_taken = 0;
}

void RowFetcher::TakeIn(Batch* batch) {
  for (const auto& [number, answer] : batch->answers) OnRead(*batch, batch->reads[number], answer);
  batch->answers.clear();
}

void RowFetcher::OnRead(Batch& batch, const Read& read, const StoreAnswer& answer) {
  --batch.reads_left;
  if (!answer.ok) {
    lost_ = true;
    const int32_t layer = &batch == &call_ ? layer_ : batch.layer;
    memory_.residency().MarkLost(
        memory_.blocks().IndexOf(layer, batch.misses[read.first_miss].block));
  }
  const std::byte* pages =
      static_cast<const std::byte*>(batch.pages.data()) + read.first_page * kPageBytes;
  const size_t row_bytes = layout_.RowBytes();
  size_t at = 0;  // in read.pages
  for (int32_t i = read.first_miss; i < read.last_miss; ++i) {
    const Miss& miss = batch.misses[i];
    std::byte* to = Slot(batch, miss.slot);
    if (!answer.ok) {
      std::memset(to, 0, row_bytes);
      continue;
    }
    memory_.CountRead(miss.chunk, row_bytes, answer.from_disk);
    const size_t begin = miss.row * row_bytes;
    while (read.pages[at] < begin / kPageBytes) ++at;
    // Where the row goes on, its second page is the next one that was read.
    std::memcpy(to, pages + at * kPageBytes + begin % kPageBytes, row_bytes);
  }
}

void RowFetcher::End() {
  Keep(call_);
  Abandon();
  // Other calls of this layer may come; they find in the cache what this one keeps now.
  if (ahead_.layer == layer_ && !ahead_.misses.empty()) {
    Collect(&ahead_);
    Keep(ahead_);
    Clear(&ahead_);
  }
}

void RowFetcher::EndPass() {
  Collect(&ahead_);
  Clear(&ahead_);
}

void RowFetcher::Keep(const Batch& batch) {
  const int32_t layer = &batch == &call_ ? layer_ : batch.layer;
  for (const Miss& miss : batch.misses) {
    if (memory_.blocks().lost(layer, miss.block)) continue;
    const RowCache::Key key =
        KeyOf(layer, miss.block, miss.row / layout_.block_tokens, miss.row % layout_.block_tokens);
    cache_.Insert(key, Slot(batch, miss.slot));
  }
}

}  // namespace winnow::engine

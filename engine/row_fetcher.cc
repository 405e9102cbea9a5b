#include "engine/row_fetcher.h"

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "kernels/check.h"
#include "storage/format.h"

namespace winnow::engine {

using storage::kPageBytes;

absl::StatusOr<std::unique_ptr<RowFetcher>> RowFetcher::Create(kernels::Backend& backend,
                                                               KvMemory& memory, int32_t num_layers,
                                                               const RowFetcherOptions& options) {
  std::unique_ptr<RowFetcher> fetcher(new RowFetcher(memory));
  if (!memory.tiered()) return fetcher;
  const kernels::KvLayout& layout = memory.layout();
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
  fetcher->rows_ = backend.Allocate(fetcher->staging_rows_ * layout.RowBytes());
  fetcher->pages_ = backend.Allocate(fetcher->staging_pages_ * kPageBytes);
  if (fetcher->rows_.data() == nullptr || fetcher->pages_.data() == nullptr) {
    return absl::ResourceExhaustedError(
        fmt::format("no memory for rows on their way: {} bytes", options.staging_bytes));
  }
  fetcher->misses_.reserve(fetcher->staging_rows_);
  return fetcher;
}

void RowFetcher::Begin(int32_t layer) {
  layer_ = layer;
  Abandon();
}

void RowFetcher::Abandon() {
  misses_.clear();
  slots_.clear();
  lost_ = false;
}

const std::byte* RowFetcher::ResolveAway(int32_t chunk, int32_t block, int32_t head,
                                         int32_t token) {
  const RowCache::Key key{
      layer_ * layout_.kv_heads + head, memory_.generation(block),
      static_cast<uint32_t>(block) * static_cast<uint32_t>(layout_.block_tokens) + token};
  if (const std::byte* row = cache_.Find(key)) {
    ++stats_.cache_rows;
    return row;
  }
  const int32_t row = head * layout_.block_tokens + token;
  const int64_t place = int64_t{block} * layout_.kv_heads * layout_.block_tokens + row;
  const auto next = static_cast<int32_t>(misses_.size());
  if (const auto slot = slots_.find(place); slot != slots_.end()) {
    ++stats_.shared_rows;
    return Slot(slot->second);
  }
  if (next == staging_rows_) return nullptr;
  ++stats_.store_rows;
  slots_.emplace(place, next);
  misses_.push_back({block, row, next, chunk});
  return Slot(next);
}

bool RowFetcher::Wait() {
  if (misses_.empty()) return true;
  std::sort(misses_.begin(), misses_.end(), [](const Miss& a, const Miss& b) {
    return a.block != b.block ? a.block < b.block : a.row < b.row;
  });
  for (size_t first = 0; first < misses_.size();) {
    size_t last = first + 1;
    while (last < misses_.size() && misses_[last].block == misses_[first].block) ++last;
    Submit(first, last);
    first = last;
  }
  Collect();
  return !lost_;
}

// The rows [first, last) of misses_, all of one block.
void RowFetcher::Submit(size_t first, size_t last) {
  const int32_t block = misses_[first].block;
  if (memory_.lost(layer_, block)) {
    for (size_t i = first; i < last; ++i) {
      std::memset(Slot(misses_[i].slot), 0, layout_.RowBytes());
    }
    lost_ = true;
    return;
  }
  std::vector<uint32_t>& pages = scratch_pages_;
  pages.clear();
  for (size_t i = first; i < last; ++i) {
    const size_t begin = misses_[i].row * layout_.RowBytes();
    // A row of 320 or 384 bytes may lie on two pages.
    for (size_t page = begin / kPageBytes; page <= (begin + layout_.RowBytes() - 1) / kPageBytes;
         ++page) {
      if (pages.empty() || pages.back() < page) pages.push_back(static_cast<uint32_t>(page));
    }
  }
  if (pages_taken_ + pages.size() > staging_pages_) Collect();
  const size_t index = reads_.size();
  reads_.push_back({static_cast<int32_t>(first), static_cast<int32_t>(last), pages_taken_, pages});
  stats_.payload_bytes += (last - first) * layout_.RowBytes();
  stats_.pages += pages.size();
  stats_.page_bytes += pages.size() * kPageBytes;
  ++reads_left_;
  memory_.store()->GetPages(KvMemory::kForeignTag | index, memory_.StoreId(layer_, block), pages,
                            {static_cast<std::byte*>(pages_.data()) + pages_taken_ * kPageBytes,
                             pages.size() * kPageBytes},
                            0);
  pages_taken_ += pages.size();
}

// Waits for the reads in flight; their pages are free then.
void RowFetcher::Collect() {
  if (reads_left_ > 0) {
    memory_.Wait([this] { return reads_left_ == 0; },
                 [this](const storage::Completion& completion) { OnRead(completion); });
  }
  reads_.clear();
  pages_taken_ = 0;
}

void RowFetcher::OnRead(const storage::Completion& completion) {
  const Read& read = reads_[completion.tag & ~KvMemory::kForeignTag];
  --reads_left_;
  const bool good = completion.outcome == storage::Outcome::kOk;
  if (!good) {
    lost_ = true;
    memory_.MarkLost(layer_, misses_[read.first_miss].block);
  }
  const std::byte* pages =
      static_cast<const std::byte*>(pages_.data()) + read.first_page * kPageBytes;
  const size_t row_bytes = layout_.RowBytes();
  size_t at = 0;  // in read.pages
  for (int32_t i = read.first_miss; i < read.last_miss; ++i) {
    std::byte* to = Slot(misses_[i].slot);
    if (!good) {
      std::memset(to, 0, row_bytes);
      continue;
    }
    memory_.CountRead(misses_[i].chunk, row_bytes, completion.from_disk);
    const size_t begin = misses_[i].row * row_bytes;
    while (read.pages[at] < begin / kPageBytes) ++at;
    // Where the row goes on, its second page is the next one that was read.
    std::memcpy(to, pages + at * kPageBytes + begin % kPageBytes, row_bytes);
  }
}

void RowFetcher::End() {
  for (const Miss& miss : misses_) {
    if (lost_ && memory_.lost(layer_, miss.block)) continue;
    const int32_t head = miss.row / layout_.block_tokens;
    const int32_t token = miss.row % layout_.block_tokens;
    cache_.Insert(
        {layer_ * layout_.kv_heads + head, memory_.generation(miss.block),
         static_cast<uint32_t>(miss.block) * static_cast<uint32_t>(layout_.block_tokens) + token},
        Slot(miss.slot));
  }
  Abandon();
}

}  // namespace winnow::engine

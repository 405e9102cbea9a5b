#include "engine/retrieval/fetcher.h"

#include <algorithm>
#include <bit>

#include "engine/base/status_macros.h"
#include "storage/format.h"

namespace winnow::engine {

using kernels::RetrievalQuery;
using kernels::RowList;
using kernels::Selection;

namespace {

// Pages of a block: when a call wants so many, the block comes whole (LoadWanted). A read of all of
// it takes no longer than reads of three quarters one by one. Where rows on their way find no room,
// less is enough.
constexpr double kWholeShare = 0.75;
constexpr double kWholeShareOfTooMany = 0.25;

// Queries of one sequence in a call. Fewer seldom want most of a block.
constexpr size_t kWholeQueriesMin = 4;

}  // namespace

absl::Status Fetcher::Allocate(int64_t max_entries, const RowFetcherOptions& rows,
                               ScratchAllocator& scratch) {
  WINNOW_ASSIGN_OR_RETURN(rows_, RowFetcher::Create(backend_, memory_, shape_.num_layers, rows));
  return scratch.Allocate(max_entries * sizeof(const std::byte*), "addresses of rows",
                          /*shared=*/true, &addresses_);
}

// ---- to their places ----

bool Fetcher::IsAway(int32_t layer, const RetrievalQuery& query) const {
  const auto blocks = query.block_table.first(shape_.BlockOf(query.position) + 1);
  return std::any_of(blocks.begin(), blocks.end(),
                     [&](int32_t block) { return !memory_.residency().IsResident(layer, block); });
}

// Sinks, selected tokens, recent ones: in the order of their positions.
template <typename Use>
void Fetcher::ForEachToken(const RetrievalQuery& query, const Selection& selected, size_t i,
                           int32_t head, Entries entries, Use use) const {
  const auto row = static_cast<int64_t>(i);
  const bool anchors = entries == Entries::kAll;
  if (anchors) {
    for (int32_t t = 0; t < std::min(query.mid.first, query.position + 1); ++t) use(t);
  }
  const int32_t* tokens = selected.chosen(row, head);
  for (int32_t t = 0; t < selected.count(row, head); ++t) use(tokens[t]);
  if (!anchors) return;
  for (int32_t t = query.mid.last; t <= query.position; ++t) use(t);
}

bool Fetcher::LoadPages(const QueryCall& call, const Selection& selected) {
  if (memory_.blocks().num_away(call.layer) == 0) return true;
  const auto is_away = [&](const RetrievalQuery& query) { return IsAway(call.layer, query); };
  if (std::none_of(call.queries.begin(), call.queries.end(), is_away)) return true;
  if (!backend_.Synchronize()) return false;  // for what was selected
  const int32_t block_tokens = shape_.layout.block_tokens;
  for (size_t i = 0; i < call.size(); ++i) {
    const RetrievalQuery& query = call.queries[i];
    const int32_t chunk = call.rows[i]->index;
    if (memory_.chunk_lost(chunk) || !is_away(query)) continue;
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      ForEachToken(query, selected, i, head, Entries::kAll, [&](int32_t token) {
        memory_.residency().Want(chunk, call.layer, query.block_table[token / block_tokens],
                                 shape_.layout.RowOffset(0, head, token % block_tokens));
      });
    }
  }
  memory_.residency().LoadWanted(call.layer);
  LoseChunksOfLostBlocks(call);
  return true;
}

// Reads of a lost block count as nothing.
void Fetcher::LoseChunksOfLostBlocks(const QueryCall& call) {
  for (size_t i = 0; i < call.size(); ++i) {
    const RetrievalQuery& query = call.queries[i];
    for (int32_t block = 0; block <= shape_.BlockOf(query.position); ++block) {
      if (memory_.blocks().lost(call.layer, query.block_table[block])) {
        memory_.LoseChunk(call.rows[i]->index);
        break;
      }
    }
  }
}

// ---- addresses ----

bool Fetcher::Address(const QueryCall& call, const Selection& selected,
                      absl::FunctionRef<bool()> pin_first, Entries entries) {
  memory_.Unpin();
  if (!pin_first() && call.size() > 1) return false;
  LoadWanted(call, selected, kWholeShare);
  rows_->Begin(call.layer);
  bool addressed = AddressAll(call, selected, entries);
  if (!addressed && call.size() > 1) {
    // Fewer queries at a time would read many a page again for each of them.
    LoadWanted(call, selected, kWholeShareOfTooMany);
    rows_->Begin(call.layer);
    addressed = AddressAll(call, selected, entries);
    if (!addressed) return false;
  }
  if (!addressed) AddressOneOrLose(call, selected, entries);
  if (!rows_->Wait()) LoseChunksOfLostBlocks(call);
  return true;
}

// One query alone wants more than can be on its way: it gets all of its sequence's blocks.
void Fetcher::AddressOneOrLose(const QueryCall& call, const Selection& selected, Entries entries) {
  PinnedBlocks pinned;
  const RetrievalQuery& query = call.queries[0];
  const int32_t chunk = call.rows[0]->index;
  if (memory_.TryPin(chunk, call.layer, query.block_table, 0, shape_.BlockOf(query.position) + 1,
                     &table_, &pinned) != KvMemory::PinResult::kOk) {
    memory_.LoseChunk(chunk);
  }
  rows_->Abandon();
  if (!AddressAll(call, selected, entries)) {
    // Lost: its list is empty, and nobody reads what comes of it.
    rows_->Abandon();
    lists_.assign(shape_.kv_heads, RowList{});
  }
}

// False: they do not fit.
bool Fetcher::AddressAll(const QueryCall& call, const Selection& selected, Entries entries) {
  const int32_t block_tokens = shape_.layout.block_tokens;
  const std::byte** address = static_cast<const std::byte**>(addresses_.data());
  lists_.clear();
  tier_rows_.assign(call.size(), {});
  for (size_t i = 0; i < call.size(); ++i) {
    const RetrievalQuery& query = call.queries[i];
    const int32_t chunk = call.rows[i]->index;
    const RowFetcherStats before = rows_->stats();
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      const std::byte** const rows = address;
      bool fits = true;
      ForEachToken(query, selected, i, head, entries, [&](int32_t token) {
        const std::byte* row = rows_->Resolve(chunk, query.block_table[token / block_tokens], head,
                                              token % block_tokens);
        fits &= row != nullptr;
        *address++ = row;
      });
      const int32_t first =
          entries == Entries::kAll ? std::min(query.mid.first, query.position + 1) : 0;
      lists_.push_back({.rows = rows,
                        .count = static_cast<int32_t>(address - rows),
                        .chosen_first = first,
                        .chosen_last = first + selected.count(static_cast<int64_t>(i), head)});
      if (!fits) return false;
    }
    const RowFetcherStats& after = rows_->stats();
    tier_rows_[i] = {after.cache_rows - before.cache_rows,
                     after.store_rows + after.asked_hits - before.store_rows - before.asked_hits};
    if (memory_.places().IsShared(call.layer)) {
      tier_rows_[i].in_frames = after.frame_rows - before.frame_rows;
      tier_rows_[i].stored += tier_rows_[i].in_frames;
    }
  }
  return true;
}

void Fetcher::Expect(const QueryCall& call, const Selection& selected) {
  const int32_t block_tokens = shape_.layout.block_tokens;
  for (size_t i = 0; i < call.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      const int32_t* tokens = selected.chosen(row, head);
      for (int32_t t = 0; t < selected.count(row, head); ++t) {
        rows_->Expect(call.layer, call.rows[i]->index,
                      call.queries[i].block_table[tokens[t] / block_tokens], head,
                      tokens[t] % block_tokens);
      }
    }
  }
}

// ---- whole blocks ----
// Questions of many tokens about a prefix that is in the store: together their queries want most
// pages of some blocks. Such a block comes whole, into a frame: one read for many, and the calls and
// steps that follow find it there, where entries that were read one by one may have left the cache.

// Makes resident the blocks of which the queries of a sequence want at least this share of the
// pages, as far as there are frames to spare. What the store has lost is found out when its entries are
// resolved. Addresses that were resolved before are void.
void Fetcher::LoadWanted(const QueryCall& call, const Selection& selected, double pages_share) {
  if (!memory_.tiered()) return;
  for (size_t begin = 0, end = 0; begin < call.size(); begin = end) {
    const PassRows* rows = call.rows[begin];
    while (end < call.size() && call.rows[end] == rows) ++end;
    if (end - begin < kWholeQueriesMin) continue;
    MarkWantedPages(call.Part(begin, end - begin), selected.From(static_cast<int64_t>(begin)));
    ChooseWholeBlocks(call.layer, rows->chunk->block_table, pages_share);
    if (whole_blocks_.empty()) continue;
    PinnedBlocks unused;
    (void)memory_.TryPin(rows->index, call.layer, whole_blocks_, 0,
                         static_cast<int32_t>(whole_blocks_.size()), &whole_frames_, &unused);
  }
}

// wanted_pages_ of the queries of one sequence.
void Fetcher::MarkWantedPages(const QueryCall& call, const Selection& selected) {
  const kernels::KvLayout& layout = shape_.layout;
  const size_t pages = (layout.BlockBytes() + storage::kPageBytes - 1) / storage::kPageBytes;
  const size_t words = (pages + 63) / 64;
  wanted_pages_.assign(call.rows[0]->chunk->block_table.size() * words, 0);
  for (size_t i = 0; i < call.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      const int32_t* tokens = selected.chosen(row, head);
      for (int32_t t = 0; t < selected.count(row, head); ++t) {
        const size_t page =
            layout.RowOffset(0, head, tokens[t] % layout.block_tokens) / storage::kPageBytes;
        wanted_pages_[tokens[t] / layout.block_tokens * words + page / 64] |= uint64_t{1}
                                                                              << page % 64;
      }
    }
  }
}

void Fetcher::ChooseWholeBlocks(int32_t layer, std::span<const int32_t> table, double pages_share) {
  const size_t pages = (shape_.layout.BlockBytes() + storage::kPageBytes - 1) / storage::kPageBytes;
  const size_t words = (pages + 63) / 64;
  whole_blocks_.clear();
  const int64_t spare = memory_.residency().SpareFrames();
  for (size_t i = 0; i < table.size() && std::ssize(whole_blocks_) < spare; ++i) {
    const uint64_t* bits = &wanted_pages_[i * words];
    size_t wanted = 0;
    for (size_t word = 0; word < words; ++word) wanted += std::popcount(bits[word]);
    if (wanted > 0 && static_cast<double>(wanted) >= pages_share * static_cast<double>(pages) &&
        !memory_.residency().IsResident(layer, table[i]) &&
        !memory_.blocks().lost(layer, table[i])) {
      whole_blocks_.push_back(table[i]);
    }
  }
}

}  // namespace winnow::engine

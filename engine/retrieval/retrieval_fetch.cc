// FETCH: the tokens that were chosen become addresses of their rows, wherever these lie (docs/tiers.md).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/retrieval/retrieval_attention.h"

namespace winnow::engine {

using kernels::RetrievalQuery;
using kernels::RowList;
using kernels::Selection;

namespace {

// Of a block's pages: when a call wants so many, the block comes whole (BringWhole). A read of all of
// it takes no longer than reads of three quarters one by one. Where rows on their way find no room,
// less is enough.
constexpr double kWholeShare = 0.75;
constexpr double kWholeShareOfTooMany = 0.25;

}  // namespace

// Rows that attention will read come to their places, where these are their own (KvMemory: own_frames)
// and the rows still in the store alone. False: the device has failed.
bool RetrievalAttention::BringRows(int32_t layer, int32_t first,
                                   std::span<const RetrievalQuery> queries,
                                   const Selection& chosen) {
  if (memory_.away_in(layer) == 0) return true;
  const auto is_away = [&](const RetrievalQuery& query) {
    const auto blocks = query.block_table.first(query.position / layout_.block_tokens + 1);
    return std::any_of(blocks.begin(), blocks.end(),
                       [&](int32_t block) { return !memory_.IsResident(layer, block); });
  };
  if (std::none_of(queries.begin(), queries.end(), is_away)) return true;
  if (!backend_.Synchronize()) return false;  // for what was chosen
  for (size_t i = 0; i < queries.size(); ++i) {
    const RetrievalQuery& query = queries[i];
    const int32_t chunk = query_rows_[first + i]->index;
    if (memory_.chunk_lost(chunk) || !is_away(query)) continue;
    for (int32_t head = 0; head < layout_.kv_heads; ++head) {
      const auto want = [&](int32_t token) {
        memory_.Want(chunk, layer, query.block_table[token / layout_.block_tokens],
                     layout_.RowOffset(0, head, token % layout_.block_tokens));
      };
      for (int32_t t = 0; t < std::min(query.mid.first, query.position + 1); ++t) want(t);
      const int32_t* tokens = chosen.chosen(static_cast<int64_t>(i), head);
      for (int32_t t = 0; t < chosen.count(static_cast<int64_t>(i), head); ++t) want(tokens[t]);
      for (int32_t t = query.mid.last; t <= query.position; ++t) want(t);
    }
  }
  memory_.BringWanted(layer);
  LoseChunksOfLostBlocks(layer, first, queries);
  return true;
}

// What was read of a lost block is nothing.
void RetrievalAttention::LoseChunksOfLostBlocks(int32_t layer, int32_t first,
                                                std::span<const RetrievalQuery> queries) {
  for (size_t i = 0; i < queries.size(); ++i) {
    for (int32_t token = 0; token <= queries[i].position; token += layout_.block_tokens) {
      if (memory_.lost(layer, queries[i].block_table[token / layout_.block_tokens])) {
        memory_.LoseChunk(query_rows_[first + i]->index);
        break;
      }
    }
  }
}

// Nothing after this step knows which tier a row came from. False: too many rows are missing for
// this number of queries.
bool RetrievalAttention::Fetch(int32_t layer, int32_t first,
                               std::span<const RetrievalQuery> queries, const Selection& chosen) {
  // What is pinned now stays until the states are complete: bringing it later could take the frames
  // of rows whose addresses are known.
  memory_.Unpin();
  if (!PinForCompletion(layer, first, queries) && queries.size() > 1) return false;
  BringWhole(layer, first, queries, chosen, kWholeShare);
  fetcher_->Begin(layer);
  bool addressed = AddressRows(layer, first, queries, chosen);
  if (!addressed && queries.size() > 1) {
    // Fewer queries at a time would read many a page again for each of them.
    BringWhole(layer, first, queries, chosen, kWholeShareOfTooMany);
    fetcher_->Begin(layer);
    addressed = AddressRows(layer, first, queries, chosen);
    if (!addressed) return false;
  }
  if (!addressed) {
    // One query alone wants more than can be on its way: it gets all of its sequence's blocks.
    PinnedBlocks pinned;
    tables_.resize(std::max<size_t>(tables_.size(), 2));
    if (memory_.TryPin(query_rows_[first]->index, layer, queries[0].block_table, 0,
                       queries[0].position / layout_.block_tokens + 1, &tables_[1],
                       &pinned) != KvMemory::PinResult::kOk) {
      memory_.LoseChunk(query_rows_[first]->index);
    }
    fetcher_->Abandon();
    if (!AddressRows(layer, first, queries, chosen)) {
      // Lost: its list is empty, and nobody reads what comes of it.
      fetcher_->Abandon();
      lists_.assign(layout_.kv_heads, RowList{});
    }
  }
  if (!fetcher_->Wait()) LoseChunksOfLostBlocks(layer, first, queries);
  return true;
}

// False: they do not fit.
bool RetrievalAttention::AddressRows(int32_t layer, int32_t first,
                                     std::span<const RetrievalQuery> queries,
                                     const Selection& chosen) {
  const std::byte** address = static_cast<const std::byte**>(addresses_.data());
  bool fits = true;
  lists_.clear();
  tier_rows_.assign(queries.size(), {});
  for (size_t i = 0; i < queries.size(); ++i) {
    const RetrievalQuery& query = queries[i];
    const int32_t chunk = query_rows_[first + i]->index;
    const RowFetcherStats before = fetcher_->stats();
    for (int32_t head = 0; head < layout_.kv_heads; ++head) {
      const std::byte** const rows = address;
      const auto add = [&](int32_t token) {
        const std::byte* row =
            fetcher_->Resolve(chunk, query.block_table[token / layout_.block_tokens], head,
                              token % layout_.block_tokens);
        fits &= row != nullptr;
        *address++ = row;
      };
      RowList list{.rows = rows};
      for (int32_t token = 0; token < std::min(query.mid.first, query.position + 1); ++token) {
        add(token);
      }
      list.chosen_first = static_cast<int32_t>(address - rows);
      const int32_t* tokens = chosen.chosen(static_cast<int64_t>(i), head);
      for (int32_t t = 0; t < chosen.count(static_cast<int64_t>(i), head); ++t) add(tokens[t]);
      list.chosen_last = static_cast<int32_t>(address - rows);
      for (int32_t token = query.mid.last; token <= query.position; ++token) add(token);
      list.count = static_cast<int32_t>(address - rows);
      lists_.push_back(list);
      if (!fits) return false;
    }
    const RowFetcherStats& after = fetcher_->stats();
    tier_rows_[i] = {after.cache_rows - before.cache_rows,
                     after.store_rows + after.asked_hits - before.store_rows - before.asked_hits};
    if (memory_.IsShared(layer)) {
      tier_rows_[i].in_frames = after.frame_rows - before.frame_rows;
      tier_rows_[i].stored += tier_rows_[i].in_frames;
    }
  }
  return true;
}

// One group for the queries of each sequence, with the blocks that its summary has yet to take in.
// False: they do not fit, or one is lost.
bool RetrievalAttention::PinForCompletion(int32_t layer, int32_t first,
                                          std::span<const RetrievalQuery> queries) {
  completion_groups_.clear();
  pinned_queries_.assign(queries.begin(), queries.end());
  if (!query_rows_[first]->chunk->retrieval->policy_.completion) return true;
  tables_.resize(std::max(tables_.size(), queries.size()));
  bool good = true;
  for (size_t i = 0; i < queries.size(); ++i) {
    const Rows& rows = *query_rows_[first + i];
    kernels::Summary* summary = &rows.chunk->retrieval->layers_[layer].summary;
    if (completion_groups_.empty() || completion_groups_.back().summary != summary) {
      completion_groups_.push_back({static_cast<int32_t>(i), 0, summary});
    }
    ++completion_groups_.back().num_queries;
    const int32_t begin = summary->tokens.size() > 0 ? summary->tokens.last : queries[i].mid.first;
    const int32_t end = std::max(begin, queries[i].mid.last);
    PinnedBlocks pinned;
    if (memory_.TryPin(rows.index, layer, queries[i].block_table, begin / layout_.block_tokens,
                       (end + layout_.block_tokens - 1) / layout_.block_tokens, &tables_[i],
                       &pinned) != KvMemory::PinResult::kOk) {
      if (queries.size() == 1) memory_.LoseChunk(rows.index);
      good = false;
      continue;
    }
    pinned_queries_[i].block_table = pinned.table;
    pool_ = pinned.pool;
  }
  return good;
}

}  // namespace winnow::engine

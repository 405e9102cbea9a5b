// Questions of many tokens about a prefix that is in the store: together their queries want most
// pages of some blocks. Such a block comes whole, into a frame: one read for many, and the calls and
// steps that follow find it there, where rows that were read one by one may have left the cache.
#include <algorithm>
#include <bit>

#include "engine/retrieval/retrieval_attention.h"
#include "storage/format.h"

namespace winnow::engine {
namespace {

// Of one sequence in a call. Fewer seldom want most of a block.
constexpr size_t kQueriesMin = 4;

}  // namespace

// Makes resident the blocks of which the queries of a sequence want at least this share of the
// pages, as far as there are frames to spare. What the store has lost is found out when its rows are
// resolved. Addresses of rows that were resolved before are void.
void RetrievalAttention::BringWhole(int32_t layer, int32_t first,
                                    std::span<const kernels::RetrievalQuery> queries,
                                    const kernels::Selection& chosen, double pages_share) {
  if (!memory_.tiered()) return;
  const size_t pages = (layout_.BlockBytes() + storage::kPageBytes - 1) / storage::kPageBytes;
  const size_t words = (pages + 63) / 64;
  for (size_t begin = 0, end = 0; begin < queries.size(); begin = end) {
    const Rows* rows = query_rows_[first + begin];
    while (end < queries.size() && query_rows_[first + end] == rows) ++end;
    if (end - begin < kQueriesMin) continue;
    const std::span<const int32_t> table = rows->chunk->block_table;
    wanted_pages_.assign(table.size() * words, 0);
    for (size_t i = begin; i < end; ++i) {
      for (int32_t head = 0; head < layout_.kv_heads; ++head) {
        const int32_t* tokens = chosen.chosen(static_cast<int64_t>(i), head);
        const int32_t count = chosen.count(static_cast<int64_t>(i), head);
        for (int32_t t = 0; t < count; ++t) {
          const size_t page =
              layout_.RowOffset(0, head, tokens[t] % layout_.block_tokens) / storage::kPageBytes;
          wanted_pages_[tokens[t] / layout_.block_tokens * words + page / 64] |= uint64_t{1}
                                                                                 << page % 64;
        }
      }
    }
    whole_blocks_.clear();
    const int64_t spare = memory_.SpareFrames();
    for (size_t i = 0; i < table.size() && std::ssize(whole_blocks_) < spare; ++i) {
      const uint64_t* bits = &wanted_pages_[i * words];
      size_t wanted = 0;
      for (size_t word = 0; word < words; ++word) wanted += std::popcount(bits[word]);
      if (wanted > 0 && static_cast<double>(wanted) >= pages_share * static_cast<double>(pages) &&
          !memory_.IsResident(layer, table[i]) && !memory_.lost(layer, table[i])) {
        whole_blocks_.push_back(table[i]);
      }
    }
    if (whole_blocks_.empty()) continue;
    PinnedBlocks unused;
    (void)memory_.TryPin(rows->index, layer, whole_blocks_, 0,
                         static_cast<int32_t>(whole_blocks_.size()), &whole_frames_, &unused);
  }
}

}  // namespace winnow::engine

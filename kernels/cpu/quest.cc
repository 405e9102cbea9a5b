// BoundKeys and SelectByBounds of the CPU backend (kernels/page_bounds.h).
#include <algorithm>

#include "kernels/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/top_k.h"
#include "kernels/page_bounds.h"

namespace winnow::kernels {
namespace {

constexpr int32_t kPage = kBoundPageTokens;
constexpr int32_t kPagesPerItem = 256;

// `block` of the index holds `page` of the sequence.
size_t PageOffset(const KvLayout& layout, int32_t block, int32_t head, int32_t page) {
  const int32_t per_block = layout.block_tokens / kPage;
  return block * BoundBlockBytes(layout) +
         (static_cast<size_t>(head) * per_block + page % per_block) * BoundPageBytes(layout);
}

}  // namespace

void CpuBackend::BoundKeys(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                           void* bounds) {
  CheckKv(layout);
  static_assert(kPage == 16);  // so that blocks hold whole pages
  for (const KeySpan& span : spans) {
    WINNOW_CHECK(span.tokens.first >= 0 &&
                 span.tokens.last <=
                     static_cast<int64_t>(span.block_table.size()) * layout.block_tokens);
    if (span.tokens.size() <= 0) continue;
    const int32_t first_page = span.tokens.first / kPage;
    const int32_t pages = (span.tokens.last - 1) / kPage - first_page + 1;
    ForEachRow(pages, int64_t{layout.kv_heads} * kPage * layout.head_dim, [&](int64_t i) {
      const int32_t page = first_page + static_cast<int32_t>(i);
      const int32_t first = page * kPage;
      for (int32_t head = 0; head < layout.kv_heads; ++head) {
        ops_.bound_page(
            static_cast<const std::byte*>(pool) +
                layout.RowOffset(span.block_table[first / layout.block_tokens], head,
                                 first % layout.block_tokens),
            layout.RowBytes(), std::min(kPage, span.tokens.last - first), layout.head_dim,
            layout.dtype,
            static_cast<std::byte*>(bounds) +
                PageOffset(layout, span.IndexBlock(first / layout.block_tokens), head, page));
      }
    });
  }
}

void CpuBackend::SelectByBounds(const Tensor& q, std::span<const RetrievalQuery> queries,
                                const void* bounds, const KvLayout& layout, float scale,
                                const Selection& chosen) {
  const RowsCall group_call = MakeRowsCall(q, layout, scale);
  CheckSelection(queries, layout, chosen);
  const int32_t d = layout.head_dim, group = group_call.queries;
  // A page is a row of the smallest values, then the largest; a group one query of their factors.
  RowsCall call = group_call;
  call.dim = 2 * d;
  call.dtype = BoundType(layout);
  call.queries = 1;
  retrieval_items_.clear();
  scored_units_.clear();
  int64_t scores = 0;
  for (size_t i = 0; i < queries.size(); ++i) {
    const RetrievalQuery& query = queries[i];
    CheckQuery(q, query, layout);
    const int32_t first = query.k == 0 ? 0 : query.mid.first / kPage;
    const int32_t last = query.k == 0 ? 0 : (query.mid.last + kPage - 1) / kPage;
    for (int32_t head = 0; head < layout.kv_heads; ++head) {
      for (int32_t page = first; page < last; page += kPagesPerItem) {
        retrieval_items_.push_back({static_cast<int64_t>(scored_units_.size()), page,
                                    std::min(last, page + kPagesPerItem), nullptr});
      }
      scored_units_.push_back({scores, 0});
      scores += last - first;
    }
  }
  const int64_t thread_floats = 4 * int64_t{d};  // the factors, as they are and split
  float* scratch = reinterpret_cast<float*>(
      attention_scratch_.Get(thread_floats * sizeof(float) * num_threads()));
  float* all_scores =
      reinterpret_cast<float*>(states_scratch_.Get(static_cast<size_t>(scores) * sizeof(float)));

  threads_.ParallelFor(static_cast<int64_t>(retrieval_items_.size()), [&](int64_t i, int thread) {
    const RetrievalItem& item = retrieval_items_[i];
    const RetrievalQuery& query = queries[item.unit / layout.kv_heads];
    const auto head = static_cast<int32_t>(item.unit % layout.kv_heads);
    const float* of_group = q.f32(query.row) + int64_t{head} * group * d;
    float* factors = scratch + thread * thread_floats;
    std::fill(factors, factors + 2 * d, 0.0f);
    for (int32_t g = 0; g < group; ++g) {
      for (int32_t c = 0; c < d; ++c) {
        const float x = of_group[int64_t{g} * d + c];
        factors[c] += std::min(x, 0.0f);
        factors[d + c] += std::max(x, 0.0f);
      }
    }
    ops_.split_row_queries(call, factors, factors + 2 * d);
    const std::byte* pages[kPagesPerItem];
    for (int32_t page = item.first; page < item.last; ++page) {
      pages[page - item.first] =
          static_cast<const std::byte*>(bounds) +
          PageOffset(layout, query.block_table[page * kPage / layout.block_tokens], head, page);
    }
    ops_.row_scores(
        call, factors + 2 * d, pages, item.last - item.first,
        all_scores + scored_units_[item.unit].scores + item.first - query.mid.first / kPage, 0);
  });

  threads_.ParallelFor(static_cast<int64_t>(scored_units_.size()), [&](int64_t unit, int) {
    const int64_t i = unit / layout.kv_heads;
    const auto head = static_cast<int32_t>(unit % layout.kv_heads);
    const TokenRange mid = queries[i].mid;
    const int32_t k = queries[i].k;
    chosen.count(i, head) = k;
    if (k == 0) return;
    const int32_t first_page = mid.first / kPage;
    const std::span<const float> of_pages(
        all_scores + scored_units_[unit].scores,
        static_cast<size_t>((mid.last + kPage - 1) / kPage - first_page));
    const auto tokens_of = [&](size_t page) {
      const int32_t first = (first_page + static_cast<int32_t>(page)) * kPage;
      return TokenRange{std::max(mid.first, first), std::min(mid.last, first + kPage)};
    };
    const TopThreshold top =
        FindTop(of_pages, k, [&](size_t page) { return tokens_of(page).size(); });
    // From the end, so that of pages that equal the threshold the later tokens are taken.
    int64_t equal = top.of_equal;
    int32_t* to = chosen.chosen(i, head) + k;
    for (size_t page = of_pages.size(); page-- > 0;) {
      const uint32_t bits = OrderedBits(of_pages[page]);
      if (bits < top.threshold) continue;
      const TokenRange tokens = tokens_of(page);
      int64_t take = tokens.size();
      if (bits == top.threshold) {
        take = std::min(take, equal);
        equal -= take;
      }
      for (int32_t t = 0; t < take; ++t) *--to = tokens.last - 1 - t;
    }
  });
}

}  // namespace winnow::kernels

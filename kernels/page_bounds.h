// Quest's index and selection (Quest, MLSys 2024, sections 3.2 and 3.3; a baseline): of each page
// of kBoundPageTokens tokens the smallest and the largest value of every channel of K bound what
// any of its tokens can score.
//
//   bound   of page p for query head g: sum over channels c of max(q_gc * min_pc, q_gc * max_pc)
//   score   of page p: the bounds added over the G heads of the group, as calibrate's simulation
//           does (calibrate/policies.py), not their maximum. Since max(q min, q max) is
//           max(q, 0) * max + min(q, 0) * min, the heads are added first, at the price of one:
//           score = (sum of max(q_g, 0)) . max_p + (sum of min(q_g, 0)) . min_p
//   chosen  each mid token has its page's score; the k mid tokens of the largest score, of equals
//           the later. So the best pages are chosen whole and the last of them from its end.
//           -0 and 0 are equal.
//
// Bounds are exact: min and max of stored values are stored values (of KV in 8 bits, rounded outwards to bfloat16), so an index made page by page,
// token by token or in one go has the same bits. A page that is not full is bound over the tokens
// it has. (The simulation sees the whole document, so its page at the end of what a query sees is
// bound by a few tokens of the future too; that page is of anchors, if the window is a page or
// more.)
//
// BoundKeys reads and writes 2*d values per page of 16*d read. SelectByBounds reads 2*d values and
// does 4*d FLOPs per page and KV head.
#ifndef WINNOW_KERNELS_PAGE_BOUNDS_H_
#define WINNOW_KERNELS_PAGE_BOUNDS_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// Of `tokens` tokens that fill whole pages, all KV heads.
constexpr double BoundKeysBytes(int64_t tokens, const KvLayout& layout) {
  return static_cast<double>(tokens) * layout.kv_heads *
         (static_cast<double>(layout.RowBytes()) / 2 +
          static_cast<double>(BoundPageBytes(layout)) / kBoundPageTokens);
}
constexpr double SelectByBoundsBytes(int64_t mid_tokens, const KvLayout& layout) {
  return static_cast<double>(mid_tokens) / kBoundPageTokens * layout.kv_heads *
         static_cast<double>(BoundPageBytes(layout));
}
constexpr double SelectByBoundsFlops(int64_t mid_tokens, const KvLayout& layout) {
  return static_cast<double>(mid_tokens) / kBoundPageTokens * layout.kv_heads * 4.0 *
         layout.head_dim;
}

void BoundKeysRef(std::span<const KeySpan> spans, const void* pool, const KvLayout& layout,
                  void* bounds);

// The score of each mid token of one KV head, in double, head by head as Quest defines it.
std::vector<double> BoundScoresRef(const Tensor& q, const RetrievalQuery& query, const void* bounds,
                                   const KvLayout& layout, int32_t kv_head);

void SelectByBoundsRef(const Tensor& q, std::span<const RetrievalQuery> queries, const void* bounds,
                       const KvLayout& layout, const Selection& chosen);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_PAGE_BOUNDS_H_

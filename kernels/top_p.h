// Top-p pruning of a selection (Twilight, section 4.1), with logits estimated from int4_keys.h.
//
// For each query head, over the anchors (what the query sees outside mid) and the candidates:
//   weight   2^(s - max), s = scale * log2 e * estimate, max the largest s; zero below 2^-126
//   needed   p * (weight of all) - (weight of the anchors), which are always kept
//   kept     the fewest candidates whose weight is at least what is needed: none if nothing is;
//            else those above a threshold, found by bisection over the bits of the weight, and of
//            those at the threshold the later first
// A selection keeps what any head of the group keeps, in ascending order. A candidate of weight
// zero is never kept; with p = 1 every other one is, whatever rounding says of the sums.
//
// Weights are float32, added in double. A head's result depends on its query, its anchors and its
// candidates alone. With no candidates nothing is read.
//
// Reads d/2 + 4 bytes and does 2*G*d FLOPs per anchor and candidate.
#ifndef WINNOW_KERNELS_TOP_P_H_
#define WINNOW_KERNELS_TOP_P_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

// Of `tokens` anchors and candidates, all queries and KV heads together.
constexpr double PruneSelectionBytes(int64_t tokens, const KvLayout& layout) {
  return static_cast<double>(tokens) * (static_cast<double>(Int4KeyBytes(layout.head_dim)) + 4);
}
constexpr double PruneSelectionFlops(int64_t tokens, int64_t group, int64_t d) {
  return 2.0 * static_cast<double>(tokens) * static_cast<double>(group) * static_cast<double>(d);
}

// Of weights that are not negative: which of `candidates` are kept, as said above.
std::vector<bool> TopPRef(std::span<const double> anchors, std::span<const double> candidates,
                          double p);

// The weights of one query head (h of all) for `tokens`, in double; the largest is 1.
std::vector<double> EstimatedWeightsRef(const Tensor& q, const RetrievalQuery& query,
                                        const void* int4_keys, const KvLayout& layout, float scale,
                                        int64_t head, std::span<const int32_t> tokens);

void PruneSelectionRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                       const void* int4_keys, const KvLayout& layout, float scale, float p,
                       const Selection& candidates, const Selection& kept);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_TOP_P_H_

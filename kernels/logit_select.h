// Selection by true logits: the oracle that policies are measured against, and the measurement of a
// selection (docs/calibration.md, Definitions).
//
//   mass    of token i for query head g: 2^(s - max) / sum of 2^(s' - max) over all tokens that the
//           query sees, anchors included, where s = scale * log2 e * q_g . k_i
//   score   of token i: its mass added over the G heads of the group, in their order
//   chosen  the k mid tokens of the largest score; of equals the later
//   coverage  the scores of anchors and chosen tokens added, divided by G
//
// Order, fixed by position alone: as in row_attention.h for a logit; sums of weights over splits of
// kLogitSplitTokens tokens from position 0 on, merged from left to right. Masses below 2^-126 are
// zero, and equal: among them the later tokens are chosen. Tokens with the same key have the same
// mass, bit for bit.
//
// A baseline and a measurement, not a way to save: reads every key, n*d values of the pool, and
// does 2*G*n*d FLOPs per query and KV head.
#ifndef WINNOW_KERNELS_LOGIT_SELECT_H_
#define WINNOW_KERNELS_LOGIT_SELECT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

inline constexpr int32_t kLogitSplitTokens = 512;

// Of one query that sees n tokens, all KV heads. Keys only, but whole lines of rows.
constexpr double SelectByLogitsBytes(int64_t n, const KvLayout& layout) {
  return static_cast<double>(n) * layout.kv_heads * static_cast<double>(layout.RowBytes()) / 2;
}
constexpr double SelectByLogitsFlops(int64_t n, int64_t heads, int64_t d) {
  return 2.0 * static_cast<double>(n) * static_cast<double>(heads) * static_cast<double>(d);
}

// Scores of the tokens [0, position] for one KV head, in double.
std::vector<double> LogitScoresRef(const Tensor& q, const RetrievalQuery& query, const void* pool,
                                   const KvLayout& layout, float scale, int32_t kv_head);

// The indices in [0, scores.size()) of the k largest scores; of equals the later; ascending.
std::vector<int32_t> TopKRef(std::span<const double> scores, int64_t k);

void SelectByLogitsRef(const Tensor& q, std::span<const RetrievalQuery> queries, const void* pool,
                       const KvLayout& layout, float scale, const Selection& chosen);

void MeasureSelectionRef(const Tensor& q, std::span<const RetrievalQuery> queries, const void* pool,
                         const KvLayout& layout, float scale, const Selection& chosen,
                         SelectionQuality* quality);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_LOGIT_SELECT_H_

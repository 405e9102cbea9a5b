// Completion: what the mid tokens that were not read are estimated to give ("Top-K Retrieval with
// Fixed-Size Linear-Attention Completion", section 4 and appendix C).
//
//   exp(q.k / sqrt d) is taken to be sum_j exp(b_j(q) + a_j(k)), a and b from
//   kernels/feature_map.h. For each KV head and query, with R the mid tokens without the chosen
//   ones C:
//
//     S_j = sum over R of exp(a_j - m_j)      = the summary's, less that of C
//     Z_j = sum over R of exp(a_j - m_j) v    = the summary's, less that of C
//     for each query head: c_j = b_j + m_j + log S_j, lse = logsumexp_j c_j,
//                          o = sum_j softmax(c)_j Z_j / S_j
//
//   (o, lse) is one more attention state and is merged into the query head's. Chosen tokens' keys
//   are read anyway; their log-features are computed again, which is what completion costs in a
//   step.
//
// Cancellation. S of the summary carries a relative error of some 1e-6 (sums in float32, weights
// rescaled whenever m grew). Where the chosen tokens carry nearly all of a feature, what
// subtraction leaves is that error and not a remainder. So a feature counts as empty, for S and Z
// alike, unless
//
//     S_j of R  >  kCompletionFloor * S_j of the summary.
//
// What is dropped is at most that share of a mass which the chosen tokens have already given
// exactly. What is kept has a positive S_j, so completion never takes mass away. A feature whose
// largest key lies 17 and more above all others loses the others to rounding once it was summed up;
// that is the price of one m for all, and it too is at most a share of 1e-7 per token.
//
// Tokens of C must be mid tokens, each once. Where C is all of mid, the state keeps its bits.
//
// Order: tokens enter the summary one after the other (kernels/retrieval.h, Summary); the chosen
// tokens' terms are summed in ascending order of position; the sum over features ascends. A query's
// result depends on its tokens alone.
//
// Cost of a step, for each KV head: kernels/feature_map.h for the chosen tokens, the tokens that
// enter and the G queries; 2Fd FLOPs for each chosen or new token; the summary is read (and its
// second part written). Reads the chosen tokens' rows again, from cache if it is fast enough.
#ifndef WINNOW_KERNELS_COMPLETION_H_
#define WINNOW_KERNELS_COMPLETION_H_

#include <cstdint>
#include <span>

#include "kernels/feature_map.h"
#include "kernels/kv_layout.h"
#include "kernels/retrieval.h"
#include "kernels/tensor.h"

namespace winnow::kernels {

inline constexpr float kCompletionFloor = 0x1p-15f;

// Of one KV head, with `rows` tokens chosen or entering.
constexpr double CompletionFlops(double rows, int32_t group, int32_t head_dim, int32_t inner,
                                 int32_t features) {
  return FeatureMapFlops(rows + group, head_dim, inner, features) +
         2.0 * (rows + group + 2) * features * head_dim;
}
constexpr double CompletionBytes(double rows, const KvLayout& kv, int32_t inner, int32_t features) {
  return rows * static_cast<double>(kv.RowBytes()) +
         2 * FeatureMapWeightBytes(kv.head_dim, inner, features) +
         4.0 * static_cast<double>(SummaryFloats(features, kv.head_dim));
}

// The oracle: sums over the tokens that were not chosen, in double, without a summary and without
// subtraction. `chosen` [queries][Hkv] are the tokens that the lists' chosen rows are of. What it
// merges into `states` [queries][H][AttentionStateFloats(d)] is not clamped.
void CompleteStatesRef(const Tensor& q, std::span<const RetrievalQuery> queries,
                       const Selection& chosen, const void* pool, const KvLayout& layout,
                       const FeatureMapWeights& key_map, const FeatureMapWeights& query_map,
                       float* states);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_COMPLETION_H_

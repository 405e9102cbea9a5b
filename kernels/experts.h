// Steps of a layer of experts beside its products: which experts a row goes to, rows side by side for one expert's
// product, and what the experts give, added up.
//
// RouteExperts, for each row of logits [m][experts] f32:
//   ids[s]: the per_token largest logits, from the largest on; of equal ones the lower id comes first, and NaN counts as minus
//   infinity.
//   weights[s] = exp(logit[ids[s]]) / sum, the softmax. `sum`: of all experts, in the order of their ids; with `normalize` of
//   the chosen ones, in their order. Logits of which one is NaN or plus infinity give weights that are all NaN, so that a row
//   of a broken state stays one.
//   Reads 4*m*experts*(2 + per_token) bytes, all but the first time from a cache; writes 8*m*per_token.
// GatherExpertRows: out[i] = x[rows[i]], [count][n] f32. Reads and writes 4*count*n bytes.
// AddExpertRows: y[i] += w[i][0]*x[places[i][0]] + w[i][1]*x[places[i][1]] + ..., where products and sums are each rounded and
//   the sum is made from slot 0 on before it is added. So it depends on the order of slots, not on which place of x each has,
//   and every device has the same bits. Reads 4*m*n*(per_token + 1) bytes, writes 4*m*n.
#ifndef WINNOW_KERNELS_EXPERTS_H_
#define WINNOW_KERNELS_EXPERTS_H_

#include <cstdint>
#include <span>

#include "kernels/tensor.h"

namespace winnow::kernels {

// A warp of a GPU routes a row, and a lane keeps the logits of its experts.
inline constexpr int64_t kExpertsMax = 1024;

constexpr double RouteExpertsBytes(int64_t m, int64_t experts, int64_t per_token) {
  return static_cast<double>(m) *
         (4.0 * static_cast<double>(experts) + 8.0 * static_cast<double>(per_token));
}
constexpr double GatherExpertRowsBytes(int64_t count, int64_t n) {
  return 8.0 * static_cast<double>(count) * static_cast<double>(n);
}
constexpr double AddExpertRowsBytes(int64_t m, int64_t n, int64_t per_token) {
  return 4.0 * static_cast<double>(m) * static_cast<double>(n) *
         (static_cast<double>(per_token) + 2.0);
}

// As ModelOps's, which says the shapes (model_ops.h).
void RouteExpertsRef(const Tensor& logits, bool normalize, int32_t* ids, const Tensor& weights);
void GatherExpertRowsRef(const Tensor& x, std::span<const int32_t> rows, const Tensor& out);
void AddExpertRowsRef(const Tensor& x, std::span<const int32_t> places, const Tensor& weights,
                      const Tensor& y);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_EXPERTS_H_

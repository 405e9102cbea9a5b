// Steps of a layer of experts beside its products: which experts a row goes to, rows side by side for one expert's
// product, and what the experts give, added up.
//
// RouteExperts, for each row of logits [m][experts] f32, as an ExpertRouting says:
//   Scores are the softmax of the row, or the sigmoid of each logit.
//   ids[s]: the per_token largest logits, from the largest on; with a correction the largest sums of a score and its
//   expert's correction, each rounded to float32. Of equal ones the lower id comes first, and NaN counts as minus infinity.
//   weights[s] = scale * score[ids[s]], without the correction; normalized: of the chosen ones' sum, in their order (of
//   sigmoids, which may all be 0, the sum and 1e-20). A softmax's sum is made in the order of ids. Logits of which one is NaN
//   or plus infinity give weights that are all NaN, so that a row of a broken state stays one.
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

// The way from logits to experts and weights (above).
struct ExpertRouting {
  enum class Scores : uint8_t { kSoftmax, kSigmoid };
  Scores scores = Scores::kSoftmax;
  bool normalized = false;
  float scale = 1;
  // [experts] in the backend's memory, which outlives the call: added to scores for the choice alone (DeepSeek-V3, section
  // 2.1.2). Null: none.
  const float* correction = nullptr;
};
// Added to a sum of sigmoids.
inline constexpr float kLeastSigmoids = 1e-20f;

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
void RouteExpertsRef(const Tensor& logits, const ExpertRouting& routing, int32_t* ids,
                     const Tensor& weights);
void GatherExpertRowsRef(const Tensor& x, std::span<const int32_t> rows, const Tensor& out);
void AddExpertRowsRef(const Tensor& x, std::span<const int32_t> places, const Tensor& weights,
                      const Tensor& y);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_EXPERTS_H_

// The fit of transform codes (kernels/transform_code.h): from keys and queries of some text to the transform of each
// KV head. No gradients and no training: second moments, two eigen-decompositions and a greedy allocation of bits.
// docs/retrieval.md says why each step is there and what it gives.
//
// Threads: pure functions.
#ifndef WINNOW_ENGINE_RETRIEVAL_TRANSFORM_FIT_H_
#define WINNOW_ENGINE_RETRIEVAL_TRANSFORM_FIT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/retrieval.h"

namespace winnow::engine {

// Of one layer and KV head, after RoPE.
struct TransformSample {
  std::vector<float> keys;               // [n][d], without the sinks
  std::vector<int32_t> key_positions;    // [n]
  std::vector<float> queries;            // [m][d] of all heads of the group
  std::vector<int32_t> query_positions;  // [m]
};

struct TransformFitOptions {
  int32_t head_dim = 0;
  int32_t bits = 128;
  std::vector<float> inv_freq;  // of RoPE, [d / 2]; 0: the pair does not turn
  int32_t served_context = 0;   // positions are spread up to it
  double logit_divisor = 0;  // of the product of a query and a key, in attention's logits; 0: √d
  int32_t copies = 4;        // of the sample, each with positions of its own; 0: positions stay
  int32_t first_key = 16;    // the first position of a key
  int32_t first_query = 1024;  // and of a query: the first that selects at all
  uint64_t seed = 0;
};

// Bits of a code by default: half a byte a dimension is too little for wide heads.
constexpr int32_t DefaultTransformBits(int32_t head_dim) {
  return head_dim <= 96 ? 128 : head_dim <= 128 ? 192 : 256;
}

// A head's transform, and what the error of its tail is judged with.
struct TransformHeadFit {
  kernels::TransformCodeHead head;
  kernels::TransformCodeHead residual;  // a second code, of as many bits, of what the first leaves
  std::vector<double>
      distortion;  // [d] of each dimension of the transform, at the sample's variance
  std::vector<float> delta_weight;  // [d][d] (TransformCodeHead::delta_weight, if it is to be used)
};
// InvalidArgument: fewer than 64 keys or 16 queries; a value that is not finite; keys without variance.
absl::StatusOr<TransformHeadFit> FitTransformHead(const TransformSample& sample,
                                                  const TransformFitOptions& options);

// One window of text for one KV head: what judges whether a tail lowers the error of its output.
struct TransformWindow {
  int32_t tokens = 0;
  std::vector<float> keys, values;       // [tokens][d]
  std::vector<float> queries;            // [queries][group][d]
  std::vector<int32_t> query_positions;  // [queries]
  int32_t group = 0;
  double logit_divisor = 0;  // as in TransformFitOptions
};
// Mean relative errors of the output at a budget of 2 %, over queries and heads of the group.
struct TailErrors {
  double none = 0, tail = 0, delta = 0;  // without a tail, with it, with delta too
  int32_t outputs = 0;
  TailErrors& operator+=(const TailErrors& other);  // sums, to be divided by `outputs`
};
TailErrors MeasureTail(const TransformWindow& window, const TransformHeadFit& fit);

// Eigenvalues, descending, and unit eigenvectors (columns of `vectors`, the largest entry positive) of a symmetric
// matrix [n][n], by Jacobi's rotations. False: a value is not finite.
bool SymmetricEigen(std::vector<double> matrix, int32_t n, std::vector<double>* values,
                    std::vector<double>* vectors);

// The transform codes of a whole model.
struct TransformFit {
  int32_t bits = 0;
  int32_t sample_tokens = 0;  // of the text that it was fitted on
  std::vector<kernels::TransformCodeWeights> layers;
  std::vector<kernels::TransformCodeWeights> residuals;  // of each layer, of `bits`, too
  std::string id;  // digest of all the above: codes of one fit are of no use under another
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_RETRIEVAL_TRANSFORM_FIT_H_

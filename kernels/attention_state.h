// What attention over a part of the keys yields for one query, and how two parts become one.
//
// A state of head dimension d is d + 2 floats: o[d], max, sum, with
//   max  the largest score of the part, in base 2 (score * log2 e); minus infinity for an empty
//   part sum  sum over the part's keys of 2^(score - max) o    sum of 2^(score - max) * value
// So o / sum is the part's attention, and (max + log2 sum) * ln 2 its log-sum-exp. Scores in base 2
// save a multiplication per score.
//
// A learned sink (no token that a policy calls so) is a score of a query head, in base 2 like the others: it takes its share of the softmax's
// denominator, and has no key and no value. It is merged last, into a state that is finished. So states of parts and their
// masses are of keys alone, and all that was merged before, estimates too, meets the same denominator.
//
// Merging is not associative in floating point. Whoever needs results that repeat bit by bit merges
// parts of fixed borders in a fixed order: Backend::Attend does, from left to right.
#ifndef WINNOW_KERNELS_ATTENTION_STATE_H_
#define WINNOW_KERNELS_ATTENTION_STATE_H_

#include <cstdint>

namespace winnow::kernels {

constexpr int64_t AttentionStateFloats(int64_t head_dim) { return head_dim + 2; }

// Makes `state` the state of no keys at all.
void ResetAttentionState(float* state, int64_t head_dim);

// state becomes the state of both parts. An empty part changes nothing, not even bits.
void MergeAttentionState(float* state, const float* part, int64_t head_dim);

// out[d] = o / sum. REQUIRES: the state is not empty.
void FinishAttentionState(const float* state, int64_t head_dim, float* out);

// Finishes a state with a sink: out[d] = o / (sum + 2^(sink - max)). A state of no keys gives zeros, and a sink of minus infinity the bits
// of none.
void FinishAttentionState(const float* state, int64_t head_dim, float sink, float* out);

// The natural logarithm of the sum of exp(score) over the state's keys; minus infinity if empty.
float AttentionStateLogSumExp(const float* state, int64_t head_dim);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_ATTENTION_STATE_H_

// The noise by which Sample (sample.h) draws: numbers that only a row's `noise` and the token decide, so that rows of nearly the
// same weights, a draft's and its verification's, or a GPU's and a CPU's, nearly always draw the same token.
//
//   draw   the token with the largest weight / time, time = -ln(1 - v), v of DrawShare(): the first to arrive of exponential
//          clocks that run as fast as their tokens weigh, which is token t with probability weight_t / sum
//
// Two rows whose probabilities differ by D in total variation draw different tokens in at most 2D / (1 + D) of their draws; a
// walk through the sums of weights, by one number, parts as soon as the sums before a token do, over a large vocabulary almost
// always (Daliri, Musco, Suresh: Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024, section 3).
#ifndef WINNOW_KERNELS_TOKEN_NOISE_H_
#define WINNOW_KERNELS_TOKEN_NOISE_H_

#include <cmath>
#include <cstdint>

namespace winnow::kernels {

// Functions are static: files of several instruction sets include them, and each must keep its own.

// A permutation of 32-bit numbers; each bit of x decides on all bits.
static constexpr uint32_t MixBits(uint32_t x) {
  x = (x ^ x >> 16) * 0x21f0aaadu;
  x = (x ^ x >> 15) * 0xd35a2d97u;
  return x ^ x >> 15;
}

// Uniform; of one noise no two tokens have the same.
static constexpr uint32_t TokenNoise(uint64_t noise, uint32_t token) {
  return MixBits(MixBits(token ^ static_cast<uint32_t>(noise)) ^
                 static_cast<uint32_t>(noise >> 32));
}

// v, between 0 and 1.
static inline double DrawShare(uint64_t noise, uint32_t token) {
  return (TokenNoise(noise, token) + 0.5) * 0x1p-32;
}
// The time of a share, at least v itself: who needs no more than a bound need not ask for the logarithm.
static inline double DrawTime(double share) { return -std::log1p(-share); }

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_TOKEN_NOISE_H_

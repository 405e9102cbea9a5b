// From rows of logits to tokens: the next token of each, its log-probability, and the most likely ones
// beside it.
//
//   logits [rows][vocab] f32, never changed
//
// One order of steps, as in the reference library (`transformers`), with the two penalties that it lacks
// after its own:
//
//   bias -> repetition penalty -> presence and frequency penalties -> tokens masked or not allowed -> temperature
//     -> top-k -> top-p -> min-p -> draw
//
// In float32, each operation rounded (no fused ones): l + bias; l < 0 ? l * repetition : l / repetition;
// l - (presence + frequency * generated). Temperature 0 is greedy: the steps before it apply, those after it
// do not. Among equal logits the lowest id comes first, everywhere: in greedy, at the edge of top-k (exactly
// k remain) and of top-p, and among the most likely.
//
//   weight   exp((l - max) / T), max the largest edited logit, l - max rounded to float32; a token that
//            weighs less than 2^-41 weighs nothing and is never drawn
//   top-p    of what top-k left, the first in order of likelihood whose weight reaches p of all; never none
//   min-p    of what is left then, those that weigh min_p at least
//   draw     of what is left by the noise of row and token (token_noise.h): equal draws of rows that are nearly equal
//
// A row whose token is given has none of these steps: how likely that token was is all that is asked.
//
// Log-probabilities are of the row as the model gave it, before every step.
//
// A row's result has nothing to do with other rows, nor with how many threads or blocks share one: sums have
// one order, or are of integers. Weights have float32's accuracy and may round otherwise on another backend: another token may
// be drawn where its weight over its time is within 1e-6 of the largest one's, or top-p ends within 1e-6 of it.
//
// Reads 4 * vocab bytes per row.
#ifndef WINNOW_KERNELS_SAMPLE_H_
#define WINNOW_KERNELS_SAMPLE_H_

#include <cstdint>
#include <span>
#include <vector>

namespace winnow::kernels {

inline constexpr int32_t kMaxTopLogprobs = 32;

// What is done to one token's logit.
struct LogitEdit {
  int32_t token = 0;
  int32_t generated = -1;  // times: the penalties for it; 0: in the prompt only; -1: no penalties
  float bias = 0;
};

// One row. Views live until the call returns.
struct SampleRow {
  std::span<const LogitEdit> edits;  // no token twice
  std::span<const int32_t> masked;   // must not be chosen
  // Empty, or AllowedWords(vocab) of them: token t may be chosen where bit t % 32 of word t / 32 is set.
  std::span<const uint32_t> allowed;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  float temperature = 0;  // >= 0
  int32_t top_k = 0;      // 0: off
  float top_p = 1;        // (0, 1]
  float min_p = 0;        // [0, 1]
  uint64_t noise = 0;     // 64 random bits of this place in this answer
  int32_t top_logprobs =
      -1;  // -1: no log-probability; else the token's and those of so many others,
           // kMaxTopLogprobs at most
  // Not -1: the row's token, which is not drawn. Of the fields before only top_logprobs has a meaning then.
  int32_t given = -1;
};

constexpr size_t AllowedWords(int64_t vocab) { return static_cast<size_t>((vocab + 31) / 32); }
inline bool IsAllowed(std::span<const uint32_t> allowed, int64_t token) {
  return allowed.empty() || (allowed[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
}

// Nothing but `status` means anything unless it is kOk.
enum class SampleStatus : int32_t {
  kOk,
  kNan,       // the row as it came holds NaN
  kInfinity,  // it, or what was made of it, +infinity
  kNothing    // no token is left that may be chosen
};

struct SampledLogprob {
  int32_t token;
  float logprob;
};
struct SampledToken {
  SampleStatus status;
  int32_t token;
  float logprob;  // 0 if not asked for
  int32_t rank;   // of a given token among all, the most likely first: from 1 on; 0 of a drawn one
  int32_t num_top;                      // min(top_logprobs, vocab), or 0
  SampledLogprob top[kMaxTopLogprobs];  // most likely first; those past num_top mean nothing
};

constexpr double SampleBytes(int64_t rows, int64_t vocab) {
  return 4.0 * static_cast<double>(rows) * static_cast<double>(vocab);
}

// One logit after the steps before temperature, masking apart.
float EditedLogit(float logit, const LogitEdit& edit, const SampleRow& row);

// Ends the program if a row is not as SampleRow says.
void CheckSampleRow(const SampleRow& row, int64_t vocab);

SampledToken SampleRef(std::span<const float> logits, const SampleRow& row);

// What SampleRef draws from, in order of ids, and its share of the weight. REQUIRES: temperature > 0, and
// the status is kOk.
struct SampleCandidate {
  int32_t token = 0;
  double probability = 0;
};
std::vector<SampleCandidate> SampleCandidatesRef(std::span<const float> logits,
                                                 const SampleRow& row);

}  // namespace winnow::kernels

#endif  // WINNOW_KERNELS_SAMPLE_H_

// From a row of logits to the next token. One order of steps, as in the reference library
// (`transformers`: its processors, then its warpers), with the two penalties it lacks after its
// own:
//
//   logit bias -> repetition penalty -> presence and frequency penalties -> min_tokens (masks stop
//   tokens) -> temperature -> top-k -> top-p -> min-p -> draw
//
// Temperature 0 is greedy: the steps before temperature apply, those after it do not. Among equal
// logits the lowest token id comes first, everywhere: in greedy, at the edge of top-k (exactly k
// remain; the reference keeps ties) and of top-p, and among the top log-probabilities.
//
// The draw uses one random number that depends on the seed and on the index of the token in its
// answer, and on nothing else, so a request repeats exactly beside any other requests and across
// preemption. Log-probabilities are those of the row as the model gave it, before every step.
#ifndef WINNOW_ENGINE_SAMPLER_H_
#define WINNOW_ENGINE_SAMPLER_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/request.h"

namespace winnow::engine {

// Uniform in [0, 1), 53 bits: Philox4x32-10 (Salmon et al., SC 2011) with `seed` as its key and
// `index` as its counter.
double CounterRandom(uint64_t seed, uint64_t index);

// What penalties need to know of a sequence: which tokens it has, and how many it generated of
// each. Kept only where a penalty asks for it. Survives preemption, as it belongs to the sequence.
class TokenHistory {
 public:
  TokenHistory(const SamplingOptions& options, std::span<const int32_t> prompt);
  void AddGenerated(int32_t token);

  // token -> times generated (0: in the prompt only)
  const absl::flat_hash_map<int32_t, int32_t>& counts() const { return counts_; }

 private:
  const bool prompt_counts_;
  const bool generated_counts_;
  absl::flat_hash_map<int32_t, int32_t> counts_;
};

struct SampleInput {
  const SamplingOptions* options = nullptr;  // ids of logit_bias within the vocabulary
  const TokenHistory* history = nullptr;
  std::span<const int32_t> masked_tokens;  // must not be chosen: stop tokens before min_tokens
  uint64_t index = 0;                      // of the token in its answer
  int32_t top_logprobs = -1;               // as in Request
};

class Sampler {
 public:
  explicit Sampler(int32_t vocab_size);

  // `logits` [vocab_size] is scratch afterwards. Scratch memory is kept between calls.
  // Internal: the row holds NaN or +infinity, or no token is left that may be chosen. Nothing but
  // this row is concerned.
  absl::StatusOr<OutputToken> Sample(const SampleInput& input, std::span<float> logits);

  // A token that may be drawn, and its share of what is drawn from.
  struct Candidate {
    int32_t token = 0;
    double probability = 0;
  };
  // What the last Sample with temperature > 0 drew from, in the order of the draw.
  std::vector<Candidate> last_candidates() const;

 private:
  void Edit(std::span<float> logits, int32_t token, float value);
  void ApplyProcessors(const SampleInput& input, std::span<float> logits);
  // Log-softmax of a row. The maximum is taken off first: beside a large one the sum would vanish.
  struct Normalizer {
    float max = 0;
    double log_sum = 0;  // of exp(logit - max)
    float Logprob(float logit) const {
      return static_cast<float>(double{logit} - double{max} - log_sum);
    }
  };
  void AddTopLogprobs(std::span<const float> logits, int32_t count, const Normalizer& raw,
                      OutputToken* out);
  int32_t Draw(const SamplingOptions& options, std::span<const float> logits, float max,
               double random);
  // drawn_ becomes `tokens`, weights_ theirs.
  void Weigh(std::span<const int32_t> tokens, std::span<const float> logits, float max,
             float temperature);
  void CutTopP(std::span<const float> logits, float top_p);
  // Drops from drawn_ and weights_ where condition(index) is false.
  void Keep(auto condition);
  void SortTop(std::span<const float> logits, int32_t count);

  const int32_t vocab_size_;
  std::vector<int32_t> order_;   // token ids; SortTop sorts a prefix
  std::vector<int32_t> drawn_;   // candidates of the last draw
  std::vector<double> weights_;  // theirs, the most likely token's is 1
  std::vector<double> buckets_;  // of CutTopP
  std::vector<std::pair<int32_t, double>> edge_;
  std::vector<std::pair<int32_t, float>> edits_;  // (token, logit before), oldest first
};

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SAMPLER_H_

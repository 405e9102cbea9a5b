// What the engine knows about choosing the next token: how a request's options, and what its sequence holds
// so far, become a row of kernels/sample.h, which says what is done with the logits and in which order. The
// choosing itself is an operation of the backend.
//
// The draw uses noise that depends on the seed and on the index of the token in its answer, and on nothing
// else, so a request repeats exactly beside any other requests and across preemption.
#ifndef WINNOW_ENGINE_SCHEDULE_SAMPLER_H_
#define WINNOW_ENGINE_SCHEDULE_SAMPLER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "engine/schedule/request.h"
#include "kernels/sample.h"

namespace winnow::engine {

// Whose logits are edited, and how: the biased tokens, and where a penalty asks for it those that the
// sequence has. Grows by a token at a time, as a prompt's are too many to be listed again in each step.
// Survives preemption, as it belongs to the sequence.
class TokenHistory {
 public:
  TokenHistory(const SamplingOptions& options, std::span<const int32_t> prompt);
  void AddGenerated(int32_t token);

  // Whether AddGenerated changes anything.
  bool grows() const { return generated_counts_; }
  // No token twice. Valid until AddGenerated.
  std::span<const kernels::LogitEdit> edits() const { return edits_; }

 private:
  kernels::LogitEdit& EditOf(int32_t token);

  const bool prompt_counts_;
  const bool generated_counts_;
  std::vector<kernels::LogitEdit> edits_;
  absl::flat_hash_map<int32_t, size_t> places_;  // in edits_, by token
};

// How the token with this index of the request's answer is chosen: before min_tokens without its stop tokens.
// Views into both.
// `allowed`: those that a grammar allows; empty: all.
kernels::SampleRow MakeSampleRow(const Request& request, const TokenHistory& history, int32_t index,
                                 std::span<const uint32_t> allowed = {});

// Internal: the row held NaN or infinity, or no token was left that may be chosen. Nothing but this row is
// concerned.
absl::StatusOr<OutputToken> ToOutputToken(const kernels::SampledToken& sampled);

}  // namespace winnow::engine

#endif  // WINNOW_ENGINE_SCHEDULE_SAMPLER_H_

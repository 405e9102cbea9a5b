// Whether answers under verified policies are those of dense attention, bit for bit, and what drafting
// them was worth: the measurements of `winnow bench exact`.
#ifndef WINNOW_BENCH_EXACT_H_
#define WINNOW_BENCH_EXACT_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model_loader.h"
#include "engine/retrieval/attention_policy.h"
#include "engine/schedule/request.h"

namespace winnow::bench {

struct ExactOptions {
  int32_t requests = 100;
  int32_t min_prompt = 200, max_prompt = 2000;  // tokens
  int32_t max_tokens = 64;                      // of an answer, at most
  int32_t concurrent = 4;                       // requests that run at a time
  uint64_t seed = 1;
  // Greedy answers of max_tokens, without stops: what is measured is acceptance and speed. Else sampling,
  // penalties, stop strings, min_tokens, log-probabilities and several choices are drawn, too.
  bool plain = false;
};

// Results of one policy, `dense` first.
struct ExactResult {
  std::string policy;
  int64_t requests = 0;
  int64_t equal = 0;          // with tokens, text, end and log-probabilities of dense ones
  std::string difference;     // the first
  int64_t tokens = 0;         // of answers, but their first ones
  double decode_seconds = 0;  // of all requests, from first token to end
  engine::DraftCounts drafts;
};

// The requests, drawn from the options and `text` (ids of the model; empty: random ids), a group of
// `concurrent` at a time under dense attention and under each policy. `progress` is told of requests done.
// Errors: what the engine refuses. REQUIRES: the decoder's options leave rows to verify, and blocks for a group.
absl::StatusOr<std::vector<ExactResult>> RunExact(
    engine::LoadedModel& model, std::span<const int32_t> text,
    std::span<const engine::AttentionPolicy> policies, const ExactOptions& options,
    const std::function<void(int64_t done)>& progress);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_EXACT_H_

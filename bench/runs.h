// The measurements of `winnow bench decode` and `winnow bench prefill`; the flags and tables are
// bench_command's.
//
// A speed is a share of a baseline measured in the same run: decoding reads memory, so a plain read
// loop over as many bytes; prefill computes, so oneDNN alone on the same products. Times are the
// best of the repetitions, because other work on the machine only adds to them; the median stands
// beside.
#ifndef WINNOW_BENCH_RUNS_H_
#define WINNOW_BENCH_RUNS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/decoder.h"
#include "engine/model/synthetic_weights.h"
#include "engine/model_loader.h"
#include "engine/synthetic_artifact.h"
#include "engine/timed_backend.h"
#include "kernels/bench.h"

namespace winnow::bench {

struct BenchModelFlags {
  std::string like;       // a config.json, for random weights of its shape; or
  std::string model_dir;  // a model directory
  // tiers.host_bytes, with --device cuda: KV lies in pinned memory of as much of it as is needed.
  engine::ModelOptions model;
};

// The indexes that `policies` need, and the functions: those of the model's artifact, or, where there
// is no model's directory, random ones, which `synthetic` then holds and which must outlive the decoder.
// As engine::ResolveRetrieval; InvalidArgument: an artifact is named without a model.
absl::StatusOr<engine::RetrievalOptions> BenchRetrieval(
    const BenchModelFlags& flags, const engine::ModelConfig& config, const engine::Weights& weights,
    std::span<const engine::AttentionPolicy> policies, engine::SyntheticArtifact& synthetic);

// A decoder whose every call is timed. Members are destroyed last to first.
struct BenchModel {
  engine::ModelConfig config;
  engine::Weights weights;
  engine::SyntheticWeights synthetic;
  engine::SyntheticArtifact synthetic_artifact;
  std::unique_ptr<kernels::Backend> backend;
  int64_t available_bytes = -1;  // of the device, before anything was made; -1: no device
  std::unique_ptr<engine::TimedBackend> timed;
  std::unique_ptr<engine::Decoder> decoder;
};

// With a KV pool of `kv_tokens` tokens, and the indexes that `policies` need.
absl::StatusOr<std::unique_ptr<BenchModel>> MakeBenchModel(
    const BenchModelFlags& flags, int64_t kv_tokens,
    std::span<const engine::AttentionPolicy> policies);

struct DecodeResult {
  int64_t context = 0;  // keys that each sequence sees
  std::string policy;
  int32_t batch = 0;                       // sequences
  int32_t rows = 1;                        // of each
  int64_t shared = 0;                      // of the context, tokens whose KV all of them share
  int64_t device_bytes = -1;               // of the device's memory that are taken; -1: no device
  double seconds = 0, seconds_median = 0;  // of one step
  double bytes = 0;                        // weights, KV and index that a step reads
  double kv_bytes = 0, index_bytes = 0;    // of them
  double read_loop_bytes_per_s = 0;        // 0 on a device: there is none
  // Parts of the best step; on a device, of one more, which waits after each call.
  double parts_seconds = 0;
  // Index: this token's codes. Select: scores and choice. Complete: the summary's
  // part.
  engine::OpTotals matmul, attention, index, select, complete, other;
  double launches_alone = 0, launches_in_graphs = 0;  // of a device's kernels, a step
  // Rows that a step read of KV in pinned memory; means of the timed steps.
  double rows_cached = 0, rows_fetched = 0, rows_in_place = 0;
  double row_bytes = 0;
  double BusBytes() const { return (rows_fetched + rows_in_place) * row_bytes; }
  double HitShare() const {
    const double rows = rows_cached + rows_fetched + rows_in_place;
    return rows == 0 ? 0 : rows_cached / rows;
  }
  // Everything between a layer's products: all of the above but matmul and other, and finding the
  // rows.
  double AttentionSeconds() const { return parts_seconds - matmul.seconds - other.seconds; }
  double BytesPerSecond() const { return bytes / seconds; }
  double Share() const {
    return read_loop_bytes_per_s == 0 ? 0 : BytesPerSecond() / read_loop_bytes_per_s;
  }
};

// One token for each of `batch` sequences, whose caches hold noise up to `context`. The index over
// the noise is made before anything is timed. `drift`: from 0, each step has the queries of the last,
// to 1, its own; between, a step's input is sqrt(1 - drift^2) of the last one's and drift of noise, so
// queries of neighbouring steps have about that cosine. REQUIRES: drift is 0 or weights are random; a policy
// that CheckPolicy of the decoder passes, a model with a KV pool of BlocksOfDecode blocks.
struct DecodeCase {
  int64_t context = 0;
  int32_t batch = 1;
  int64_t shared =
      0;  // the first so many tokens, in whole blocks, are one document's that all ask about
  int32_t steps = 30;
  double drift = 0;
  // Last tokens of each context that are computed in a step, with logits: above 1 it is the verification of a draft.
  // REQUIRES: at most `context`; 1 unless the policy is dense.
  int32_t rows = 1;
};
absl::StatusOr<DecodeResult> RunDecode(BenchModel& model, const DecodeCase& what,
                                       const engine::AttentionPolicy& policy, int num_threads);
// Blocks that RunDecode needs: those of the shared document once, and each sequence's own.
int64_t BlocksOfDecode(const DecodeCase& what, int32_t block_tokens);

// A round of an answer under a policy with verify=: drafts, one token after the other, and the dense pass that verifies them;
// each of `batch` sequences has one, and its cache holds noise.
struct RoundResult {
  int64_t context = 0;  // keys that the last row of the verification sees
  std::string policy;
  int32_t batch = 0, drafted = 0;  // tokens, of each sequence
  double seconds = 0, seconds_median = 0;
  double draft_seconds = 0, verify_seconds = 0;  // of the best round
};

// Drafts are computed with draft weights where the model has them. `what.rows` and `what.drift` mean nothing here. REQUIRES: a
// policy that CheckPolicy of the decoder passes and that says how many tokens a draft has, fewer than the context; logits for a
// verification of the whole batch.
absl::StatusOr<RoundResult> RunRound(BenchModel& model, const DecodeCase& what,
                                     const engine::AttentionPolicy& policy);

struct PrefillResult {
  int64_t tokens = 0;
  std::string policy;  // whose indexes are made on the way; the prompt attends densely
  double seconds = 0, seconds_median = 0;            // of the whole prompt
  engine::OpTotals matmul, attention, index, other;  // of the best run; on a device, of one more
  double baseline_flops_per_s = 0;  // on the same products, weighted by their FLOPs; 0: it has none
  double FlopsPerSecond() const { return (matmul.flops + attention.flops) / seconds; }
  double MatmulFlopsPerSecond() const { return matmul.flops / matmul.seconds; }
};

// A prompt of `tokens` random tokens, in chunks of the model's max_batch_tokens; logits of its
// last. All of it attends densely, and what `policy` keeps of its keys (codes, summaries) is made.
absl::StatusOr<PrefillResult> RunPrefill(BenchModel& model, int64_t tokens,
                                         const engine::AttentionPolicy& policy, int32_t repetitions,
                                         int num_threads, const kernels::ProductBaseline* baseline);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_RUNS_H_

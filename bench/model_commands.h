// Shared by `winnow bench decode`, `prefill` and `verify`: the flags that choose a model, the checks of
// the other flags, and the first lines of their output.
#ifndef WINNOW_BENCH_MODEL_COMMANDS_H_
#define WINNOW_BENCH_MODEL_COMMANDS_H_

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "bench/output.h"
#include "bench/runs.h"
#include "engine/retrieval/attention_policy.h"

namespace winnow::bench {

struct ModelBenchFlags {
  BenchModelFlags model;
  std::string json_path;
  std::vector<std::string> policies;
  std::string host_bytes, row_cache_bytes;
};

// The model, its options and --artifact. `flags` must outlive the parsing.
void AddModelBenchFlags(CLI::App& command, ModelBenchFlags& flags);

// Reads --host-bytes and --row-cache-bytes, which only a device's bench has, into the model's options.
absl::Status SetHostKv(ModelBenchFlags& flags);

// Appends the policies of `flags` that are not dense. InvalidArgument: one verifies, which bench verify and exact measure.
absl::Status ParsePolicies(const ModelBenchFlags& flags,
                           std::vector<engine::AttentionPolicy>& policies);
absl::Status CheckPolicies(const BenchModel& model,
                           std::span<const engine::AttentionPolicy> policies);
// InvalidArgument, naming `flag`: a length is more than the model's context.
absl::Status CheckLengths(const BenchModel& model, const std::vector<int64_t>& lengths,
                          const char* flag);

// Prints why the model could not be made; returns the exit code.
int ReportModelBenchError(const ModelBenchFlags& flags, const absl::Status& status);

void PrintHeader(FILE* table, const BenchModel& model);
// The "run" object of the JSON.
Json RunInfo(const ModelBenchFlags& flags, const BenchModel& model);

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_MODEL_COMMANDS_H_

// `winnow bench prefill`: flags, table and JSON around RunPrefill of bench/runs.h.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/model_commands.h"
#include "bench/output.h"
#include "bench/runs.h"
#include "fmt/format.h"
#include "kernels/bench.h"

namespace winnow::bench {
namespace {

struct PrefillFlags : ModelBenchFlags {
  std::vector<int64_t> tokens = {512, 2048};
  int32_t repetitions = 5;
  const kernels::ProductBaseline* baseline = nullptr;
};

void PrintRow(FILE* table, const PrefillResult& r, bool dense) {
  const bool has_baseline = r.baseline_flops_per_s > 0;
  const auto share = [&](double flops_per_s) {
    return has_baseline ? fmt::format("{:.1f}%", 100 * flops_per_s / r.baseline_flops_per_s) : "-";
  };
  const double attention_rate = r.attention.flops / r.attention.seconds;
  std::fprintf(table,
               "%8lld %10.2f %10.2f %9.1f %10.1f %10.1f, %6s %10.1f, %6s %12.1f %9.2f %9.2f  %s\n",
               static_cast<long long>(r.tokens), r.seconds / kMilli, r.seconds_median / kMilli,
               static_cast<double>(r.tokens) / r.seconds, r.baseline_flops_per_s / kGiga,
               r.FlopsPerSecond() / kGiga, share(r.FlopsPerSecond()).c_str(),
               r.MatmulFlopsPerSecond() / kGiga, share(r.MatmulFlopsPerSecond()).c_str(),
               attention_rate / kGiga, r.index.seconds / kMilli, r.other.seconds / kMilli,
               dense ? "none" : r.policy.c_str());
  std::fflush(table);
}

Json RowJson(const PrefillResult& r) {
  const bool has_baseline = r.baseline_flops_per_s > 0;
  const auto json_share = [&](double flops_per_s) {
    return has_baseline ? Json(Round(flops_per_s / r.baseline_flops_per_s)) : Json();
  };
  const double attention_rate = r.attention.flops / r.attention.seconds;
  return {
      {"tokens", r.tokens},
      {"ms", Round(r.seconds / kMilli)},
      {"ms_median", Round(r.seconds_median / kMilli)},
      {"tokens_per_s", Round(static_cast<double>(r.tokens) / r.seconds)},
      {"gflop_per_s", Round(r.FlopsPerSecond() / kGiga)},
      {"share_of_onednn", json_share(r.FlopsPerSecond())},
      {"matmul_gflop_per_s", Round(r.MatmulFlopsPerSecond() / kGiga)},
      {"matmul_share_of_onednn", json_share(r.MatmulFlopsPerSecond())},
      {"matmul_ms", Round(r.matmul.seconds / kMilli)},
      {"attention_gflop_per_s", Round(attention_rate / kGiga)},
      {"attention_ms", Round(r.attention.seconds / kMilli)},
      {"index_of", r.policy},
      {"index_ms", Round(r.index.seconds / kMilli)},
      {"other_ms", Round(r.other.seconds / kMilli)},
      {"onednn_gflop_per_s", has_baseline ? Json(Round(r.baseline_flops_per_s / kGiga)) : Json()}};
}

int BenchPrefill(PrefillFlags flags) {
  if (absl::Status status = SetHostKv(flags); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  const int64_t longest = *std::max_element(flags.tokens.begin(), flags.tokens.end());
  flags.model.model.max_batch_logits = 1;
  std::vector<engine::AttentionPolicy> policies(1);
  if (absl::Status status = ParsePolicies(flags, policies); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  const auto made = MakeBenchModel(flags.model, longest, policies);
  if (!made.ok()) return ReportModelBenchError(flags, made.status());
  BenchModel& model = **made;
  if (absl::Status status = CheckLengths(model, flags.tokens, "--tokens"); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  if (absl::Status status = CheckPolicies(model, policies); !status.ok()) {
    return server::ReportInputError("bench", status);
  }

  FILE* const table = TableFile(flags.json_path);
  PrintHeader(table, model);
  const std::string baseline = flags.baseline == nullptr ? "" : flags.baseline->name;
  if (!baseline.empty()) {
    std::fprintf(table, "GFLOP/s; shares are of %s alone on the same products\n", baseline.c_str());
  }
  std::fprintf(table, "%8s %10s %10s %9s %10s %18s %18s %12s %9s %9s  %s\n", "tokens", "ms",
               "median", "tokens/s", "baseline", "whole, share", "matmul, share", "attention",
               "index ms", "other ms", "index of");
  Json json = {{"prefill", Json::array()}, {"run", RunInfo(flags, model)}};
  json["run"]["chunk_tokens"] = flags.model.model.max_batch_tokens;
  json["run"]["baseline"] = baseline.empty() ? Json() : Json(baseline);
  std::vector<std::pair<int64_t, engine::AttentionPolicy>> cases;
  for (const int64_t tokens : flags.tokens) {
    for (const engine::AttentionPolicy& policy : policies) cases.emplace_back(tokens, policy);
  }
  for (const auto& [tokens, policy] : cases) {
    const absl::StatusOr<PrefillResult> result = RunPrefill(
        model, tokens, policy, flags.repetitions, flags.model.model.num_threads, flags.baseline);
    if (!result.ok()) return server::ReportFailure("bench", result.status());
    const PrefillResult& r = *result;
    PrintRow(table, r, policy.IsDense());
    json["prefill"].push_back(RowJson(r));
  }
  return FinishBench(flags.json_path, json);
}

}  // namespace

void AddPrefillBench(CLI::App& bench, const kernels::ProductBaseline* baseline, int* exit_code) {
  auto flags = std::make_shared<PrefillFlags>();
  flags->baseline = baseline;
  CLI::App* prefill = bench.add_subcommand(
      "prefill", baseline == nullptr ? "A prompt (winnow_baselines prefill: beside oneDNN)"
                                     : "A prompt, as a share of a library's products alone");
  AddModelBenchFlags(*prefill, *flags);
  prefill->add_option("--tokens", flags->tokens, "Lengths of the prompt")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  prefill
      ->add_option("--chunk-tokens", flags->model.model.max_batch_tokens,
                   "The prompt is cut into chunks of this size")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  prefill
      ->add_option("--policy", flags->policies,
                   "Also with the index of this policy made on the way, may be repeated")
      ->type_name("POLICY");
  prefill->add_option("--repetitions", flags->repetitions, "Runs that are timed")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  AddJsonFlag(*prefill, flags->json_path);
  prefill->callback([flags, exit_code] { *exit_code = BenchPrefill(*flags); });
}

}  // namespace winnow::bench

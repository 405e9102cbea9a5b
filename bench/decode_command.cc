// `winnow bench decode`: flags, table and JSON around RunDecode of bench/runs.h.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/model_commands.h"
#include "bench/output.h"
#include "bench/runs.h"
#include "engine/base/device.h"
#include "fmt/format.h"
#include "kernels/backend.h"

namespace winnow::bench {
namespace {

constexpr char kEarlyStart[] = "early-start";
constexpr char kJoinedLaunches[] = "joined-launches";
constexpr char kGraphs[] = "graphs";

struct DecodeFlags : ModelBenchFlags {
  std::vector<int64_t> contexts = {1024, 32768, 131072};
  int32_t batch = 1;
  std::vector<int32_t> rows = {1};
  int64_t shared = 0;
  std::vector<std::string> without;
  int32_t steps = 30;
  double drift = 0;
  bool skip_dense = false;

  DecodeCase At(int64_t context, int32_t with_rows = 1) const {
    return {context, batch, shared, steps, drift, with_rows};
  }
  int32_t most_rows() const { return *std::max_element(rows.begin(), rows.end()); }
  bool LeavesOut(const char* what) const {
    return std::find(without.begin(), without.end(), what) != without.end();
  }
};

// InvalidArgument: flags that do not go together.
absl::Status CheckFlags(DecodeFlags& flags) {
  if (absl::Status status = SetHostKv(flags); !status.ok()) return status;
  if (flags.drift != 0 && !flags.model.model_dir.empty()) {
    return absl::InvalidArgumentError(
        "--drift: changes random weights; a model's stay: use --like");
  }
  if (flags.most_rows() > 1 && !flags.policies.empty()) {
    return absl::InvalidArgumentError(
        "--rows: several are a verification, which is dense: without --policy");
  }
  if (flags.most_rows() > *std::min_element(flags.contexts.begin(), flags.contexts.end())) {
    return absl::InvalidArgumentError("--rows: are more than a context's tokens");
  }
  if (!flags.without.empty() && !engine::DeviceOf(flags.model.model.device).launches_kernels) {
    return absl::InvalidArgumentError("--without: is for --device cuda");
  }
  return absl::OkStatus();
}

void PrintRow(FILE* table, const DecodeResult& r, double times_faster) {
  const bool compared = r.read_loop_bytes_per_s > 0;
  const std::string read_loop =
      compared ? fmt::format("{:.2f}", r.read_loop_bytes_per_s / kGiga) : "-";
  const std::string share = compared ? fmt::format("{:.1f}%", 100 * r.Share()) : "-";
  const std::string device =
      r.device_bytes < 0 ? "-" : fmt::format("{:.2f}", static_cast<double>(r.device_bytes) / kGiga);
  std::fprintf(table,
               "%9lld %5d %9.3f %9.3f %9.1f %7.2f %10s %7s %8.3f %8.3f %8.3f %8.3f %8.3f %8.3f "
               "%9.2f %9s  %s\n",
               static_cast<long long>(r.context), r.rows, r.seconds / kMilli,
               r.seconds_median / kMilli, r.batch * r.rows / r.seconds, r.BytesPerSecond() / kGiga,
               read_loop.c_str(), share.c_str(), r.matmul.seconds / kMilli,
               r.attention.seconds / kMilli, r.select.seconds / kMilli, r.index.seconds / kMilli,
               r.complete.seconds / kMilli, r.other.seconds / kMilli, times_faster, device.c_str(),
               r.policy.c_str());
  if (r.row_bytes > 0) {
    std::fprintf(table,
                 "%9s %.0f rows a step: %.1f%% in the row cache, %.0f fetched, %.0f read in place; "
                 "%.2f MB over the bus, %.2f GB/s of the step\n",
                 "", r.rows_cached + r.rows_fetched + r.rows_in_place, 100 * r.HitShare(),
                 r.rows_fetched, r.rows_in_place, r.BusBytes() / kMega,
                 r.BusBytes() / r.seconds_median / kGiga);
  }
  if (r.launches_alone + r.launches_in_graphs > 0) {
    std::fprintf(table, "%9s %.0f kernels a step, %.0f of them in graphs\n", "",
                 r.launches_alone + r.launches_in_graphs, r.launches_in_graphs);
  }
  std::fflush(table);
}

Json RowJson(const DecodeResult& r, double drift, double times_faster) {
  const bool compared = r.read_loop_bytes_per_s > 0;
  return {{"context", r.context},
          {"policy", r.policy},
          {"batch", r.batch},
          {"rows", r.rows},
          {"shared_tokens", r.shared},
          {"tokens_per_s", Round(r.batch * r.rows / r.seconds)},
          {"device_bytes", r.device_bytes < 0 ? Json() : Json(r.device_bytes)},
          {"ms_per_step", Round(r.seconds / kMilli)},
          {"ms_per_step_median", Round(r.seconds_median / kMilli)},
          {"bytes_per_step", r.bytes},
          {"kv_bytes_per_step", r.kv_bytes},
          {"index_bytes_per_step", r.index_bytes},
          {"drift", drift},
          {"launches_alone_per_step", Round(r.launches_alone)},
          {"launches_in_graphs_per_step", Round(r.launches_in_graphs)},
          {"rows_cached_per_step", Round(r.rows_cached)},
          {"rows_fetched_per_step", Round(r.rows_fetched)},
          {"rows_in_place_per_step", Round(r.rows_in_place)},
          {"bus_bytes_per_step", Round(r.BusBytes())},
          {"gb_per_s", Round(r.BytesPerSecond() / kGiga)},
          {"read_loop_gb_per_s", compared ? Json(Round(r.read_loop_bytes_per_s / kGiga)) : Json()},
          {"share_of_read_loop", compared ? Json(Round(r.Share())) : Json()},
          {"matmul_ms", Round(r.matmul.seconds / kMilli)},
          {"attention_ms", Round(r.AttentionSeconds() / kMilli)},
          {"attend_ms", Round(r.attention.seconds / kMilli)},
          {"select_ms", Round(r.select.seconds / kMilli)},
          {"index_ms", Round(r.index.seconds / kMilli)},
          {"complete_ms", Round(r.complete.seconds / kMilli)},
          {"other_ms", Round(r.other.seconds / kMilli)},
          {"attention_times_faster_than_dense", Round(times_faster)}};
}

// The cases in their order: each context under each policy.
int Measure(const DecodeFlags& flags, std::span<const engine::AttentionPolicy> policies,
            BenchModel& model) {
  FILE* const table = TableFile(flags.json_path);
  PrintHeader(table, model);
  Json json = {{"decode", Json::array()}, {"run", RunInfo(flags, model)}};
  json["run"]["without"] = flags.without;
  std::fprintf(table, "%9s %5s %9s %9s %9s %7s %10s %7s %8s %8s %8s %8s %8s %8s %9s %9s  %s\n",
               "context", "rows", "ms/step", "median", "tokens/s", "GB/s", "read loop", "share",
               "matmul", "attend", "select", "index", "complete", "other", "attn, x", "device GB",
               "policy");
  for (const int64_t context : flags.contexts) {
    for (const int32_t rows : flags.rows) {
      double dense_attention = 0;
      for (const engine::AttentionPolicy& policy : policies) {
        const absl::StatusOr<DecodeResult> result =
            RunDecode(model, flags.At(context, rows), policy, flags.model.model.num_threads);
        if (!result.ok()) return server::ReportFailure("bench", result.status());
        const DecodeResult& r = *result;
        if (policy.IsDense()) dense_attention = r.AttentionSeconds();
        // 0: there is nothing to compare with.
        const double times_faster = dense_attention / r.AttentionSeconds();
        PrintRow(table, r, times_faster);
        json["decode"].push_back(RowJson(r, flags.drift, times_faster));
      }
    }
  }
  return FinishBench(flags.json_path, json);
}

int BenchDecode(DecodeFlags flags) {
  engine::ModelOptions& options = flags.model.model;
  if (absl::Status status = CheckFlags(flags); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  options.max_batch_logits = flags.batch * flags.most_rows();
  options.max_batch_tokens = std::max(options.max_batch_tokens, options.max_batch_logits);
  int64_t kv_tokens = 0;
  for (const int64_t context : flags.contexts) {
    kv_tokens = std::max(
        kv_tokens, BlocksOfDecode(flags.At(context), options.block_tokens) * options.block_tokens);
  }
  std::vector<engine::AttentionPolicy> policies(flags.skip_dense ? 0 : 1);
  if (absl::Status status = ParsePolicies(flags, policies); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  if (policies.empty()) {
    return server::ReportInputError(
        "bench", absl::InvalidArgumentError("--skip-dense: leaves no policy to measure"));
  }
  kernels::LetCudaKernelsStartEarly(!flags.LeavesOut(kEarlyStart));
  options.cuda_graphs = !flags.LeavesOut(kGraphs);
  const auto made = MakeBenchModel(flags.model, kv_tokens, policies);
  if (!made.ok()) return ReportModelBenchError(flags, made.status());
  BenchModel& model = **made;
  model.timed->set_joins(!flags.LeavesOut(kJoinedLaunches));
  if (absl::Status status = CheckLengths(model, flags.contexts, "--contexts"); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  if (absl::Status status = CheckPolicies(model, policies); !status.ok()) {
    return server::ReportInputError("bench", status);
  }
  return Measure(flags, policies, model);
}

}  // namespace

void AddDecodeBench(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<DecodeFlags>();
  CLI::App* decode = bench.add_subcommand(
      "decode", "A decode step at long contexts (of noise), as a share of a plain read loop");
  AddModelBenchFlags(*decode, *flags);
  decode->add_option("--contexts,--context", flags->contexts, "Keys that each sequence attends to")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  decode
      ->add_option("--policy", flags->policies,
                   "Attention policy, may be repeated; each beside dense")
      ->type_name("POLICY");
  decode->add_option("--batch", flags->batch, "Sequences in a step")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  decode
      ->add_option(
          "--rows", flags->rows,
          "Tokens of each sequence in a step; several are the verification of a draft, to be "
          "compared with 1")
      ->delimiter(',')
      ->check(CLI::Range(1, engine::AttentionPolicy::kVerifyMax + 1))
      ->capture_default_str();
  decode->add_option("--steps", flags->steps, "Steps that are timed")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  decode
      ->add_option(
          "--shared", flags->shared,
          "All sequences begin with the same document of so many tokens, in whole blocks; its KV "
          "is there once")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  decode
      ->add_option(
          "--without", flags->without,
          "Leave this out, to see what it gives: early-start (kernels stand ready before "
          "their turn), joined-launches (norms, gates, rotation and encodings within others'), "
          "graphs (kernels that repeat the last step's are asked for as one CUDA graph); may be "
          "repeated")
      ->check(CLI::IsMember({kEarlyStart, kJoinedLaunches, kGraphs}));
  decode->add_flag("--skip-dense", flags->skip_dense, "Measure the policies alone");
  decode
      ->add_option("--drift", flags->drift,
                   "How far queries move between steps: 0 not at all, 1 to unrelated ones")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  AddJsonFlag(*decode, flags->json_path);
  decode->callback([flags, exit_code] { *exit_code = BenchDecode(*flags); });
}

}  // namespace winnow::bench

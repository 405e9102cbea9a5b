// `winnow bench`: flags, tables and JSON around server/bench_runs.h and kernels/bench.h.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "fmt/format.h"
#include "kernels/bench.h"
#include "server/bench_output.h"
#include "server/bench_runs.h"
#include "server/commands.h"
#include "server/config.h"
#include "server/model_flags.h"

namespace winnow::server {
namespace {

constexpr char kEarlyStart[] = "early-start";
constexpr char kJoinedLaunches[] = "joined-launches";
constexpr char kGraphs[] = "graphs";

struct BenchFlags {
  BenchModelFlags model;
  std::string json_path;
  std::vector<int64_t> contexts = {1024, 32768, 131072};
  std::vector<std::string> policies;  // of decode; none: dense
  int32_t batch = 1;
  int64_t shared = 0;
  std::vector<std::string> without;
  int32_t steps = 30;
  double drift = 0;
  bool skip_dense = false;
  std::string host_bytes, row_cache_bytes;
  std::vector<int64_t> tokens = {512, 2048};
  int32_t repetitions = 5;
  kernels::BenchOptions kernels;
};

Json RunInfo(const BenchFlags& flags, const BenchModel& model) {
  const bool random = flags.model.model_dir.empty();
  return {{"model", random ? flags.model.like : flags.model.model_dir},
          {"random_weights", random},
          {"backend", model.backend->name()},
          {"products", kernels::DTypeName(model.decoder->options().compute)},
          {"kv", kernels::DTypeName(model.decoder->options().kv_dtype)},
          {"without", flags.without},
          {"weight_bytes", model.decoder->weight_bytes()},
          {"kv_host_bytes", model.decoder->shared_kv_bytes()},
          {"row_cache_bytes", model.decoder->shared_kv_sizes().cache_bytes},
          {"row_cache_rows", model.decoder->shared_kv_sizes().cache_rows},
          {"row_table_bytes", model.decoder->shared_kv_sizes().table_bytes},
          {"kv_staging_bytes", model.decoder->shared_kv_sizes().staging_bytes},
          {"pin_seconds", model.decoder->pin_seconds()},
          {"kv_pool_bytes", model.decoder->kv_pool_bytes()}};
}

void PrintHeader(FILE* table, const BenchModel& model) {
  std::fprintf(table, "%s; products in %s, KV in %s; weights %.2f GB, KV pool %.2f GB\n",
               model.backend->name().c_str(), kernels::DTypeName(model.decoder->options().compute),
               kernels::DTypeName(model.decoder->options().kv_dtype),
               static_cast<double>(model.decoder->weight_bytes()) / kGiga,
               static_cast<double>(model.decoder->kv_pool_bytes()) / kGiga);
  const kernels::SharedKvSizes sizes = model.decoder->shared_kv_sizes();
  if (model.decoder->shared_kv_bytes() == 0) return;
  std::fprintf(
      table,
      "%.2f GB of the KV in pinned memory, made in %.1f s; on the device a row cache of %.2f "
      "GB (%lld rows), %.2f GB of tables and %.2f GB of staging\n",
      static_cast<double>(model.decoder->shared_kv_bytes()) / kGiga, model.decoder->pin_seconds(),
      static_cast<double>(sizes.cache_bytes) / kGiga, static_cast<long long>(sizes.cache_rows),
      static_cast<double>(sizes.table_bytes) / kGiga,
      static_cast<double>(sizes.staging_bytes) / kGiga);
}

// --host-bytes and --row-cache-bytes, which only a device's bench has.
absl::Status SetHostKv(BenchFlags& flags) {
  engine::ModelOptions& options = flags.model.model;
  const auto parse = [](const char* flag, const std::string& text, int64_t* to) -> absl::Status {
    if (text.empty()) return absl::OkStatus();
    const absl::StatusOr<int64_t> bytes = ParseBytes(text);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(
          fmt::format("{}: '{}' is {}", flag, text, std::string(bytes.status().message())));
    }
    *to = *bytes;
    return absl::OkStatus();
  };
  if (absl::Status status = parse("--host-bytes", flags.host_bytes, &options.tiers.host_bytes);
      !status.ok()) {
    return status;
  }
  if (absl::Status status =
          parse("--row-cache-bytes", flags.row_cache_bytes, &options.tiers.row_cache_bytes);
      !status.ok()) {
    return status;
  }
  if (options.device != "cuda" && options.tiers.host_bytes != 0) {
    return absl::InvalidArgumentError(
        "--host-bytes: is for --device cuda; bench tiers measures the slower tiers of a CPU");
  }
  if (options.tiers.row_cache_bytes >= 0 && options.tiers.host_bytes == 0) {
    return absl::InvalidArgumentError("--row-cache-bytes: needs --host-bytes");
  }
  if (flags.drift != 0 && !flags.model.model_dir.empty()) {
    return absl::InvalidArgumentError(
        "--drift: changes random weights; a model's stay: use --like");
  }
  return absl::OkStatus();
}

int ModelError(const BenchFlags& flags, const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) return ReportFailure("bench", status);
  // A device that is not there: no fault of the model's, and nothing else here says so.
  if (absl::IsFailedPrecondition(status)) return ReportInputError("bench", status);
  return flags.model.model_dir.empty() ? ReportInputError("bench", status)
                                       : ReportModelError("bench", status);
}

// Nothing to do with the model's own limits is checked by the flags, so here.
absl::Status CheckLengths(const BenchModel& model, const std::vector<int64_t>& lengths,
                          const char* flag) {
  for (const int64_t length : lengths) {
    if (length <= model.decoder->max_context()) continue;
    return absl::InvalidArgumentError(fmt::format("{}: {} is more than the model's context of {}",
                                                  flag, length, model.decoder->max_context()));
  }
  return absl::OkStatus();
}

// Those that are not dense go behind what is there.
absl::Status ParsePolicies(const BenchFlags& flags,
                           std::vector<engine::AttentionPolicy>& policies) {
  for (const std::string& text : flags.policies) {
    const auto policy = engine::ParseAttentionPolicy(text);
    if (!policy.ok()) return policy.status();
    if (!policy->IsDense()) policies.push_back(*policy);
  }
  return absl::OkStatus();
}

absl::Status CheckPolicies(const BenchModel& model,
                           std::span<const engine::AttentionPolicy> policies) {
  for (const engine::AttentionPolicy& policy : policies) {
    if (absl::Status status = model.decoder->CheckPolicy(policy); !status.ok()) return status;
  }
  return absl::OkStatus();
}

int BenchDecode(BenchFlags flags) {
  engine::ModelOptions& options = flags.model.model;
  if (absl::Status status = SetHostKv(flags); !status.ok()) {
    return ReportInputError("bench", status);
  }
  options.max_batch_tokens = std::max(options.max_batch_tokens, flags.batch);
  options.max_batch_logits = flags.batch;
  const auto decode_case = [&](int64_t context) {
    return DecodeCase{context, flags.batch, flags.shared, flags.steps, flags.drift};
  };
  int64_t kv_tokens = 0;
  for (const int64_t context : flags.contexts) {
    kv_tokens = std::max(kv_tokens, BlocksOfDecode(decode_case(context), options.block_tokens) *
                                        options.block_tokens);
  }
  std::vector<engine::AttentionPolicy> policies(flags.skip_dense ? 0 : 1);
  if (absl::Status status = ParsePolicies(flags, policies); !status.ok()) {
    return ReportInputError("bench", status);
  }
  if (policies.empty()) {
    return ReportInputError(
        "bench", absl::InvalidArgumentError("--skip-dense: leaves no policy to measure"));
  }
  if (!flags.without.empty() && options.device != "cuda") {
    return ReportInputError("bench", absl::InvalidArgumentError("--without: is for --device cuda"));
  }
  const auto is_left_out = [&](const char* what) {
    return std::find(flags.without.begin(), flags.without.end(), what) != flags.without.end();
  };
  kernels::LetCudaKernelsStartEarly(!is_left_out(kEarlyStart));
  options.cuda_graphs = !is_left_out(kGraphs);
  const auto made = MakeBenchModel(flags.model, kv_tokens, policies);
  if (!made.ok()) return ModelError(flags, made.status());
  BenchModel& model = **made;
  model.timed->set_joins(!is_left_out(kJoinedLaunches));
  if (absl::Status status = CheckLengths(model, flags.contexts, "--contexts"); !status.ok()) {
    return ReportInputError("bench", status);
  }
  if (absl::Status status = CheckPolicies(model, policies); !status.ok()) {
    return ReportInputError("bench", status);
  }

  FILE* const table = TableFile(flags.json_path);
  PrintHeader(table, model);
  Json json = {{"decode", Json::array()}, {"run", RunInfo(flags, model)}};
  std::fprintf(table, "%9s %9s %9s %9s %7s %10s %7s %8s %8s %8s %8s %8s %8s %9s %9s  %s\n",
               "context", "ms/step", "median", "tokens/s", "GB/s", "read loop", "share", "matmul",
               "attend", "select", "index", "complete", "other", "attn, x", "device GB", "policy");
  for (const int64_t context : flags.contexts) {
    double dense_attention = 0;
    for (const engine::AttentionPolicy& policy : policies) {
      const absl::StatusOr<DecodeResult> result =
          RunDecode(model, decode_case(context), policy, options.num_threads);
      if (!result.ok()) return ReportFailure("bench", result.status());
      const DecodeResult& r = *result;
      if (policy.IsDense()) dense_attention = r.AttentionSeconds();
      // 0: there is nothing to compare with.
      const double times_faster = dense_attention / r.AttentionSeconds();
      const bool compared = r.read_loop_bytes_per_s > 0;
      const std::string read_loop =
          compared ? fmt::format("{:.2f}", r.read_loop_bytes_per_s / kGiga) : "-";
      const std::string share = compared ? fmt::format("{:.1f}%", 100 * r.Share()) : "-";
      const std::string device =
          r.device_bytes < 0 ? "-"
                             : fmt::format("{:.2f}", static_cast<double>(r.device_bytes) / kGiga);
      std::fprintf(table,
                   "%9lld %9.3f %9.3f %9.1f %7.2f %10s %7s %8.3f %8.3f %8.3f %8.3f %8.3f %8.3f "
                   "%9.2f %9s  %s\n",
                   static_cast<long long>(r.context), r.seconds / kMilli, r.seconds_median / kMilli,
                   r.batch / r.seconds, r.BytesPerSecond() / kGiga, read_loop.c_str(),
                   share.c_str(), r.matmul.seconds / kMilli, r.attention.seconds / kMilli,
                   r.select.seconds / kMilli, r.index.seconds / kMilli, r.complete.seconds / kMilli,
                   r.other.seconds / kMilli, times_faster, device.c_str(), r.policy.c_str());
      if (r.row_bytes > 0) {
        std::fprintf(
            table,
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
      json["decode"].push_back(
          {{"context", r.context},
           {"policy", r.policy},
           {"batch", r.batch},
           {"shared_tokens", r.shared},
           {"tokens_per_s", Round(r.batch / r.seconds)},
           {"device_bytes", r.device_bytes < 0 ? Json() : Json(r.device_bytes)},
           {"ms_per_step", Round(r.seconds / kMilli)},
           {"ms_per_step_median", Round(r.seconds_median / kMilli)},
           {"bytes_per_step", r.bytes},
           {"kv_bytes_per_step", r.kv_bytes},
           {"index_bytes_per_step", r.index_bytes},
           {"drift", flags.drift},
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
           {"attention_times_faster_than_dense", Round(times_faster)}});
    }
  }
  return FinishBench(flags.json_path, json);
}

int BenchPrefill(BenchFlags flags) {
  if (absl::Status status = SetHostKv(flags); !status.ok()) {
    return ReportInputError("bench", status);
  }
  const int64_t longest = *std::max_element(flags.tokens.begin(), flags.tokens.end());
  flags.model.model.max_batch_logits = 1;
  std::vector<engine::AttentionPolicy> policies(1);
  if (absl::Status status = ParsePolicies(flags, policies); !status.ok()) {
    return ReportInputError("bench", status);
  }
  const auto made = MakeBenchModel(flags.model, longest, policies);
  if (!made.ok()) return ModelError(flags, made.status());
  BenchModel& model = **made;
  if (absl::Status status = CheckLengths(model, flags.tokens, "--tokens"); !status.ok()) {
    return ReportInputError("bench", status);
  }
  if (absl::Status status = CheckPolicies(model, policies); !status.ok()) {
    return ReportInputError("bench", status);
  }

  FILE* const table = TableFile(flags.json_path);
  PrintHeader(table, model);
  std::fprintf(table, "GFLOP/s; shares are of %s alone on the same products\n",
               kernels::OneDnnVersion().c_str());
  std::fprintf(table, "%8s %10s %10s %9s %10s %18s %18s %12s %9s %9s  %s\n", "tokens", "ms",
               "median", "tokens/s", "oneDNN", "whole, share", "matmul, share", "attention",
               "index ms", "other ms", "index of");
  Json json = {{"prefill", Json::array()}, {"run", RunInfo(flags, model)}};
  json["run"]["chunk_tokens"] = flags.model.model.max_batch_tokens;
  json["run"]["baseline"] = kernels::OneDnnVersion();
  std::vector<std::pair<int64_t, engine::AttentionPolicy>> cases;
  for (const int64_t tokens : flags.tokens) {
    for (const engine::AttentionPolicy& policy : policies) cases.emplace_back(tokens, policy);
  }
  for (const auto& [tokens, policy] : cases) {
    const absl::StatusOr<PrefillResult> result =
        RunPrefill(model, tokens, policy, flags.repetitions, flags.model.model.num_threads);
    if (!result.ok()) return ReportFailure("bench", result.status());
    const PrefillResult& r = *result;
    const bool has_baseline = r.onednn_flops_per_s > 0;
    const auto share = [&](double flops_per_s) {
      return has_baseline ? fmt::format("{:.1f}%", 100 * flops_per_s / r.onednn_flops_per_s) : "-";
    };
    const double attention_rate = r.attention.flops / r.attention.seconds;
    std::fprintf(
        table, "%8lld %10.2f %10.2f %9.1f %10.1f %10.1f, %6s %10.1f, %6s %12.1f %9.2f %9.2f  %s\n",
        static_cast<long long>(r.tokens), r.seconds / kMilli, r.seconds_median / kMilli,
        static_cast<double>(r.tokens) / r.seconds, r.onednn_flops_per_s / kGiga,
        r.FlopsPerSecond() / kGiga, share(r.FlopsPerSecond()).c_str(),
        r.MatmulFlopsPerSecond() / kGiga, share(r.MatmulFlopsPerSecond()).c_str(),
        attention_rate / kGiga, r.index.seconds / kMilli, r.other.seconds / kMilli,
        policy.IsDense() ? "none" : r.policy.c_str());
    std::fflush(table);
    const auto json_share = [&](double flops_per_s) {
      return has_baseline ? Json(Round(flops_per_s / r.onednn_flops_per_s)) : Json();
    };
    json["prefill"].push_back(
        {{"tokens", r.tokens},
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
         {"onednn_gflop_per_s",
          has_baseline ? Json(Round(r.onednn_flops_per_s / kGiga)) : Json()}});
  }
  return FinishBench(flags.json_path, json);
}

int BenchKernels(BenchFlags flags) {
  FILE* const table = TableFile(flags.json_path);
  std::fprintf(table, "%-22s %-44s %10s %9s %10s  %s\n", "kernel", "shape", "us", "GB/s", "GFLOP/s",
               "share of baseline");
  Json json = {{"kernels", Json::array()},
               {"run", {{"isa", flags.kernels.isa}, {"threads", flags.kernels.num_threads}}}};
  const auto print = [&](const kernels::BenchResult& r) {
    const std::string share =
        r.baseline.empty() ? "" : fmt::format("{:.1f}% of {}", 100 * r.share, r.baseline);
    std::fprintf(table, "%-22s %-44s %10.2f %9.2f %10.1f  %s\n", r.name.c_str(), r.shape.c_str(),
                 r.seconds * 1e6, r.BytesPerSecond() / kGiga, r.FlopsPerSecond() / kGiga,
                 share.c_str());
    std::fflush(table);
    json["kernels"].push_back({{"name", r.name},
                               {"shape", r.shape},
                               {"us", Round(r.seconds * 1e6)},
                               {"gb_per_s", Round(r.BytesPerSecond() / kGiga)},
                               {"gflop_per_s", Round(r.FlopsPerSecond() / kGiga)},
                               {"baseline", r.baseline.empty() ? Json() : Json(r.baseline)},
                               {"share", r.baseline.empty() ? Json() : Json(Round(r.share))}});
  };
  if (kernels::BenchKernels(flags.kernels, print).empty()) {
    return ReportInputError(
        "bench", absl::InvalidArgumentError(
                     "nothing to run: no kernel's name contains --filter, or this processor lacks "
                     "--isa"));
  }
  return FinishBench(flags.json_path, json);
}

// What decode and prefill have in common.
void AddBenchModelFlags(CLI::App& command, BenchFlags& flags) {
  CLI::Option_group* model = command.add_option_group("model", "What to run: one of");
  model->add_option("--like", flags.model.like, "A config.json; random weights of its shape")
      ->type_name("CONFIG.json");
  model->add_option("--model", flags.model.model_dir, "A model directory or GGUF file")
      ->type_name("DIR|FILE.gguf");
  model->require_option(1);
  AddModelFlags(command, flags.model.model);
  command
      .add_option(
          "--host-bytes", flags.host_bytes,
          "With --device cuda: KV but for the first layers' lies in pinned memory, of at most "
          "so much")
      ->type_name("BYTES");
  command
      .add_option("--row-cache-bytes", flags.row_cache_bytes,
                  "Of the device's memory, for rows that were read of it; absent: an eighth of "
                  "--host-bytes; 0: none")
      ->type_name("BYTES");
}

void AddJsonFlag(CLI::App& command, BenchFlags& flags) {
  command.add_option("--json", flags.json_path, "Also write the results here; - is stdout")
      ->check(WrongOutputFile)
      ->type_name("OUT");
}

}  // namespace

void AddBenchCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* bench = app.add_subcommand("bench", "Measure speed beside a baseline in the same run");
  bench->require_subcommand(1);

  CLI::App* decode = bench->add_subcommand(
      "decode", "A decode step at long contexts (of noise), as a share of a plain read loop");
  AddBenchModelFlags(*decode, *flags);
  AddArtifactFlag(*decode, flags->model.model);
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
  AddJsonFlag(*decode, *flags);
  decode->callback([flags, exit_code] { *exit_code = BenchDecode(*flags); });

  CLI::App* prefill =
      bench->add_subcommand("prefill", "A prompt, as a share of oneDNN alone on its products");
  AddBenchModelFlags(*prefill, *flags);
  AddArtifactFlag(*prefill, flags->model.model);
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
  AddJsonFlag(*prefill, *flags);
  prefill->callback([flags, exit_code] { *exit_code = BenchPrefill(*flags); });

  AddReclaimBench(*bench, exit_code);
  CLI::App* kernels = bench->add_subcommand("kernels", "Every kernel at model shapes");
  kernels->add_option("--filter", flags->kernels.filter, "Only kernels whose name contains this");
  kernels->add_option("--isa", flags->kernels.isa, "Instruction set")
      ->check(CLI::IsMember({"auto", "avx512", "avx2", "scalar"}))
      ->capture_default_str();
  kernels->add_option("--threads", flags->kernels.num_threads, "0: as many as there are processors")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  kernels
      ->add_option("--seconds", flags->kernels.seconds_per_case, "Time for each kernel and shape")
      ->check(CLI::Range(0.01, 3600.0))
      ->capture_default_str();
  AddJsonFlag(*kernels, *flags);
  kernels->callback([flags, exit_code] { *exit_code = BenchKernels(*flags); });

  AddStartBench(*bench, exit_code);
  AddTierBenches(*bench, exit_code);
}

}  // namespace winnow::server

// `winnow plan`: the flags around MakePlan of bench/plan.h, and the speeds that it predicts with.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "bench/commands.h"
#include "bench/output.h"
#include "bench/plan.h"
#include "engine/base/concat.h"
#include "engine/base/device.h"
#include "kernels/bench.h"
#include "server/config.h"

namespace winnow::bench {
namespace {

using server::kExitFailure;
using server::kExitOk;

struct PlanFlags {
  std::map<std::string, std::string> serve;  // serve's options that were given
  std::string config_file, like, memory, bandwidth, json;
  PlanRequest request;
};

// Large enough that no cache has it.
constexpr size_t kReadBytes = size_t{256} << 20;

// The H200's numbers, measured with its 16 gen5 lanes: rows of 4 KiB gathered by a kernel, and 4 KiB reads 128 deep.
TierSpeeds SpeedsOfGpu() {
  return {.fast = 4532 * kGiga,
          .host = 48 * kGiga,
          .disk = 137e3 * 4096,
          .source = "measured on one H200; yours: --bandwidth"};
}

// A read loop over this machine's memory. Rows of the host's tier are copied, so they are read twice and written once.
// The disk is not measured: nothing says where it will be.
TierSpeeds SpeedsOfThisCpu(int num_threads) {
  const double read = kernels::MeasureReadBytesPerSecond(kReadBytes, num_threads);
  return {
      .fast = read,
      .host = read / 3,
      .disk = 115e3 * 4096,
      .source =
          "a read loop on this machine now; disk: 115,000 reads of 4 KiB a second, as a small NVMe "
          "disk gives; yours: --bandwidth"};
}

absl::StatusOr<TierSpeeds> SpeedsOf(const PlanFlags& flags) {
  const bool on_gpu = engine::DeviceOf(flags.request.config.device).own_memory;
  const bool measures = flags.bandwidth.find("fast=") == std::string::npos;
  TierSpeeds speeds = on_gpu ? SpeedsOfGpu() : TierSpeeds();
  if (!on_gpu && (measures || flags.bandwidth.find("host=") == std::string::npos ||
                  flags.bandwidth.find("disk=") == std::string::npos)) {
    speeds = SpeedsOfThisCpu(static_cast<int>(flags.request.config.threads));
    if (speeds.fast <= 0) {
      return absl::ResourceExhaustedError(
          "there is no memory to measure a read loop in; say --bandwidth");
    }
  }
  return flags.bandwidth.empty() ? speeds : ParseSpeeds(flags.bandwidth, speeds);
}

// Serve's options as `winnow serve` would take them, checked as far as no file is touched.
absl::Status Resolve(PlanFlags& flags) {
  const auto environment = [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
  std::string file = flags.config_file;
  if (file.empty()) file = environment("WINNOW_CONFIG").value_or("");
  absl::StatusOr<server::ResolvedConfig> resolved =
      server::ResolveConfig(flags.serve, environment, file);
  if (!resolved.ok()) return resolved.status();
  flags.request.config = std::move(resolved->config);
  server::ServeConfig& config = flags.request.config;
  if (flags.like.empty() == config.model.empty()) {
    return absl::InvalidArgumentError("one of --like and --model is required");
  }
  flags.request.like = flags.like;
  if (!flags.like.empty()) config.model = flags.like;
  // Nothing is opened, so a size is enough.
  if (config.disk_bytes > 0 && config.store_dir.empty()) config.store_dir = "not opened";
  if (!flags.memory.empty()) {
    const absl::StatusOr<int64_t> bytes = server::ParseBytes(flags.memory);
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(
          engine::Concat("--memory: ", std::string(bytes.status().message())));
    }
    flags.request.memory_bytes = *bytes;
  }
  return server::CheckConfig(config);
}

int RunPlan(PlanFlags& flags) {
  if (absl::Status status = Resolve(flags); !status.ok()) {
    return server::ReportInputError("plan", status);
  }
  const absl::StatusOr<TierSpeeds> speeds = SpeedsOf(flags);
  if (!speeds.ok()) return server::ReportInputError("plan", speeds.status());
  const absl::StatusOr<Plan> plan = MakePlan(flags.request, *speeds);
  if (!plan.ok()) {
    return absl::IsInvalidArgument(plan.status()) ? server::ReportInputError("plan", plan.status())
                                                  : server::ReportModelError("plan", plan.status());
  }
  std::fputs(PlanText(*plan).c_str(), TableFile(flags.json));
  if (const int code = FinishBench(flags.json, PlanJson(*plan)); code != kExitOk) return code;
  return plan->memory_fits() && plan->sequences_fit() ? kExitOk : kExitFailure;
}

}  // namespace

void AddPlanCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<PlanFlags>();
  CLI::App* plan = app.add_subcommand(
      "plan", "What a server of these options holds and where, and what a decode step reads");
  plan->add_option("--like", flags->like, "A config.json: plan for its shape, without weights")
      ->type_name("CONFIG.json");
  plan->add_option("--context", flags->request.context,
                   "Keys that each sequence sees; absent: the server's whole context")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  plan->add_option("--batch", flags->request.batch, "Sequences in a step")
      ->check(CLI::Range(int64_t{1}, int64_t{65536}))
      ->capture_default_str();
  plan->add_option("--memory", flags->memory,
                   "What the GPU has, or with --device cpu the machine: says whether it is enough")
      ->type_name("BYTES");
  plan->add_option(
          "--bandwidth", flags->bandwidth,
          "GB a second that tiers give: fast=4532,host=48,disk=0.5; absent: measured now, or "
          "for --device cuda those of an H200")
      ->type_name("SPEEDS");
  plan->add_option("--row-cache-hits", flags->request.row_cache_hits,
                   "Share of the reads of slower tiers that the row cache saves")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  AddJsonFlag(*plan, flags->json);
  plan->add_option("--config", flags->config_file, "Serve's YAML file [WINNOW_CONFIG]");
  for (const server::ServeOption& option : server::ServeOptions()) {
    const auto store = [flags, name = option.name](const std::string& value) {
      flags->serve[name] = value;
    };
    // In the help of `serve`; here they would hide the few that are plan's.
    if (option.is_switch()) {
      plan->add_flag_function("--" + option.name,
                              [store](int64_t count) { store(count > 0 ? "true" : "false"); })
          ->group("");
    } else {
      auto* added = plan->add_option_function<std::string>("--" + option.name, store, option.help);
      added->type_name(option.value)->take_last();
      if (option.name != "model" && option.name != "policy") added->group("");
    }
  }
  plan->footer(
      "Every option of `winnow serve` is taken, too, and means the same: --kv-bytes, --host-bytes, "
      "--disk-bytes, --index, --max-running ...\nExit codes: 0 everything fits; 1 it does not "
      "(--memory, or more sequences than KV blocks); 2 options; 78 the model cannot be used.");
  plan->callback([flags, exit_code] { *exit_code = RunPlan(*flags); });
}

}  // namespace winnow::bench

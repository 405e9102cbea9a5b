#include "bench/model_commands.h"

#include "CLI/CLI.hpp"
#include "fmt/format.h"
#include "server/config.h"

namespace winnow::bench {

Json RunInfo(const ModelBenchFlags& flags, const BenchModel& model) {
  const bool random = flags.model.model_dir.empty();
  return {{"model", random ? flags.model.like : flags.model.model_dir},
          {"random_weights", random},
          {"backend", model.backend->name()},
          {"products", kernels::DTypeName(model.decoder->options().compute)},
          {"kv", kernels::DTypeName(model.decoder->options().kv_dtype)},
          {"weight_bytes", model.decoder->weight_bytes()},
          {"draft_weight_bytes", model.decoder->draft_weight_bytes()},
          {"expert_weight_bytes", model.decoder->expert_bytes()},
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

absl::Status SetHostKv(ModelBenchFlags& flags) {
  engine::ModelOptions& options = flags.model.model;
  const auto parse = [](const char* flag, const std::string& text, int64_t* to) -> absl::Status {
    if (text.empty()) return absl::OkStatus();
    const absl::StatusOr<int64_t> bytes = server::ParseBytes(text);
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
  if (!engine::HasDeviceMemory(options) && options.tiers.host_bytes != 0) {
    return absl::InvalidArgumentError(
        "--host-bytes: is for --device cuda; bench tiers measures the slower tiers of a CPU");
  }
  if (options.tiers.row_cache_bytes >= 0 && options.tiers.host_bytes == 0) {
    return absl::InvalidArgumentError("--row-cache-bytes: needs --host-bytes");
  }
  return absl::OkStatus();
}

int ReportModelBenchError(const ModelBenchFlags& flags, const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) return server::ReportFailure("bench", status);
  // A device that is not there: no fault of the model's, and nothing else here says so.
  if (absl::IsFailedPrecondition(status)) return server::ReportInputError("bench", status);
  return flags.model.model_dir.empty() ? server::ReportInputError("bench", status)
                                       : server::ReportModelError("bench", status);
}

absl::Status CheckLengths(const BenchModel& model, const std::vector<int64_t>& lengths,
                          const char* flag) {
  for (const int64_t length : lengths) {
    if (length <= model.decoder->max_context()) continue;
    return absl::InvalidArgumentError(fmt::format("{}: {} is more than the model's context of {}",
                                                  flag, length, model.decoder->max_context()));
  }
  return absl::OkStatus();
}

absl::Status ParsePolicies(const ModelBenchFlags& flags,
                           std::vector<engine::AttentionPolicy>& policies) {
  for (const std::string& text : flags.policies) {
    const auto policy = engine::ParseAttentionPolicy(text);
    if (!policy.ok()) return policy.status();
    if (policy->IsVerified()) {
      return absl::InvalidArgumentError(
          "--policy: nothing is verified here; bench verify and bench exact measure policies with "
          "verify");
    }
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

void AddModelBenchFlags(CLI::App& command, ModelBenchFlags& flags) {
  CLI::Option_group* model = command.add_option_group("model", "What to run: one of");
  model->add_option("--like", flags.model.like, "A config.json; random weights of its shape")
      ->type_name("CONFIG.json");
  model->add_option("--model", flags.model.model_dir, "A model directory or GGUF file")
      ->type_name("DIR|FILE.gguf");
  model->require_option(1);
  server::AddModelFlags(command, flags.model.model);
  server::AddArtifactFlag(command, flags.model.model);
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

}  // namespace winnow::bench

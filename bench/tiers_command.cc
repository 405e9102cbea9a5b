// `winnow bench tiers` and `winnow bench resume`: flags, tables and JSON around bench_tiers.h and
// bench_resume.h.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/output.h"
#include "bench/resume.h"
#include "bench/tiers.h"
#include "fmt/format.h"

namespace winnow::bench {
namespace {

struct TierBenchFlags {
  StoreBenchFlags store;
  std::vector<std::string> policies = {"lsh:k=2%"};  // bench tiers: one
  std::string prefetch = "off";
  std::string json_path;
  TiersFlags tiers;
  ResumeFlags resume;
};

int Failure(const absl::Status& status) {
  const bool usage =
      absl::IsInvalidArgument(status) || absl::IsNotFound(status) || absl::IsUnimplemented(status);
  return usage ? server::ReportInputError("bench", status) : server::ReportFailure("bench", status);
}

absl::StatusOr<std::vector<engine::AttentionPolicy>> Prepare(TierBenchFlags& flags) {
  flags.store.model.model.tiers.prefetch = flags.prefetch == "on";
  std::vector<engine::AttentionPolicy> policies;
  for (const std::string& text : flags.policies) {
    auto policy = engine::ParseAttentionPolicy(text);
    if (!policy.ok()) return policy.status();
    if (policy->IsVerified()) {
      return absl::InvalidArgumentError(
          "--policy: nothing is verified here; bench exact measures policies with verify");
    }
    if (policy->IsDense()) {
      return absl::InvalidArgumentError("--policy: dense chooses no rows");
    }
    policies.push_back(*policy);
  }
  return policies;
}

Json RunInfo(const TierBenchFlags& flags, const std::string& backend, const std::string& kv_dtype) {
  const bool random = flags.store.model.model_dir.empty();
  return {{"model", random ? flags.store.model.like : flags.store.model.model_dir},
          {"random_weights", random},
          {"kv_of", flags.store.text_path.empty() ? "noise" : "text"},
          {"prefetch", flags.prefetch == "on"},
          {"backend", backend},
          {"kv", kv_dtype}};
}

int BenchTiers(TierBenchFlags flags) {
  const auto policies = Prepare(flags);
  if (!policies.ok()) return Failure(policies.status());
  flags.tiers.store = flags.store;
  flags.tiers.policy = policies->front();
  FILE* const table = TableFile(flags.json_path);
  bool begun = false;
  const auto print = [&](const TiersResult& r) {
    if (!begun) {
      std::fprintf(table, "%8s %15s %9s %9s %8s %9s %9s %9s %9s %9s %9s %9s %8s %8s %8s %7s %7s\n",
                   "context", "in memory, %", "ms/token", "best", "waiting", "attending", "rows",
                   "cached", "from disk", "payload", "MB read", "pages", "reads", "IOPS", "device",
                   "share", "waiting");
      begun = true;
    }
    std::fprintf(table,
                 "%8lld %6.1f, %6.2f %9.2f %9.2f %8.2f %9.3f %9.0f %9.0f %9.0f %9.2f %9.2f %9.0f "
                 "%8.0f %8.0f %8.0f %6.1f%% %6.1f%%\n",
                 static_cast<long long>(r.context), 100 * r.share_asked, 100 * r.share_measured,
                 r.seconds_median / kMilli, r.seconds_min / kMilli, r.wait_seconds / kMilli,
                 r.attend_seconds / kMilli, r.selected_rows, r.cached_rows, r.stored_rows,
                 r.payload_bytes / kMega, r.device_bytes / kMega, r.pages, r.reads,
                 r.ReadsPerSecond(), r.DeviceRate(), 100 * r.ReadsPerSecond() / r.DeviceRate(),
                 100 * r.ReadsPerWaitingSecond() / r.DeviceRate());
    if (r.asked_rows > 0) {
      std::fprintf(table, "%8s of %.0f rows asked for ahead of time %.0f were used\n", "",
                   r.asked_rows, r.used_rows);
    }
    std::fflush(table);
  };
  const absl::StatusOr<TiersRun> run = RunTiers(flags.tiers, print);
  if (!run.ok()) return Failure(run.status());
  std::fprintf(
      table,
      "%s; %s, KV in %s, %.2f GB of it, %.2f GB of files, frames %.2f GB, row cache %.1f "
      "MB; %s\n"
      "device: random reads of 4 KiB through %s, %u in flight, %s; the better of before "
      "and after\n",
      flags.policies[0].c_str(), run->backend.c_str(), run->kv_dtype.c_str(),
      static_cast<double>(run->kv_bytes) / kGiga, static_cast<double>(run->stored_bytes) / kGiga,
      static_cast<double>(run->frame_bytes) / kGiga,
      static_cast<double>(run->row_cache_bytes) / kMega, run->store.c_str(),
      run->device.engine.c_str(), run->device.depth, run->device.direct ? "O_DIRECT" : "buffered");
  Json json = {{"tiers", Json::array()}, {"overlap", Json::array()}};
  for (const TiersResult& r : run->results) {
    json["tiers"].push_back(
        {{"context", r.context},
         {"share_asked", Round(r.share_asked)},
         {"share_in_memory", Round(r.share_measured)},
         {"ms_per_token", Round(r.seconds_median / kMilli)},
         {"ms_per_token_best", Round(r.seconds_min / kMilli)},
         {"ms_per_token_mean", Round(r.seconds_mean / kMilli)},
         {"ms_waiting", Round(r.wait_seconds / kMilli)},
         {"ms_attending", Round(r.attend_seconds / kMilli)},
         {"selected_rows", Round(r.selected_rows)},
         {"stored_rows", Round(r.stored_rows)},
         {"cached_rows", Round(r.cached_rows)},
         {"asked_ahead_rows", Round(r.asked_rows)},
         {"used_ahead_rows", Round(r.used_rows)},
         {"payload_bytes", Round(r.payload_bytes)},
         {"page_bytes", Round(r.page_bytes)},
         {"device_bytes", Round(r.device_bytes)},
         {"pages", Round(r.pages)},
         {"reads", Round(r.reads)},
         {"iops", Round(r.ReadsPerSecond())},
         {"iops_while_waiting", Round(r.ReadsPerWaitingSecond())},
         {"device_iops_before", Round(r.device_before)},
         {"device_iops_after", Round(r.device_after)},
         {"share_of_device", Round(r.ReadsPerSecond() / r.DeviceRate())},
         {"share_of_device_while_waiting", Round(r.ReadsPerWaitingSecond() / r.DeviceRate())}});
  }
  if (!run->overlaps.empty()) {
    std::fprintf(table, "\n%8s %6s %10s %10s %10s %14s\n", "context", "layer", "rows/head",
                 "pages/head", "overlap", "distinct rows");
  }
  for (const OverlapResult& r : run->overlaps) {
    std::fprintf(table, "%8lld %6d %10.1f %10.1f %9.1f%% %9.2f in %d\n",
                 static_cast<long long>(r.context), r.layer, r.rows, r.pages, 100 * r.overlap,
                 r.distinct, flags.tiers.steps);
    json["overlap"].push_back({{"context", r.context},
                               {"layer", r.layer},
                               {"rows_per_head", Round(r.rows)},
                               {"pages_per_head", Round(r.pages)},
                               {"overlap", Round(r.overlap)},
                               {"distinct_over_rows", Round(r.distinct)},
                               {"steps", flags.tiers.steps}});
  }
  json["run"] = RunInfo(flags, run->backend, run->kv_dtype);
  json["run"]["policy"] = flags.policies[0];
  json["run"]["steps"] = flags.tiers.steps;
  json["run"]["kv_bytes"] = run->kv_bytes;
  json["run"]["stored_bytes"] = run->stored_bytes;
  json["run"]["frame_bytes"] = run->frame_bytes;
  json["run"]["row_cache_bytes"] = run->row_cache_bytes;
  json["run"]["io"] = run->device.engine;
  json["run"]["queue_depth"] = run->device.depth;
  json["run"]["direct"] = run->device.direct;
  return FinishBench(flags.json_path, json);
}

int BenchResume(TierBenchFlags flags) {
  const auto policies = Prepare(flags);
  if (!policies.ok()) return Failure(policies.status());
  flags.resume.store = flags.store;
  flags.resume.policies = *policies;
  FILE* const table = TableFile(flags.json_path);
  double kv_bytes = 1;
  const auto begin = [&](const ResumeRun& run) {
    kv_bytes = static_cast<double>(run.kv_bytes);
    std::fprintf(table, "%s, KV in %s: %lld tokens (%s), %.1f MB; %s; opened in %.0f ms\n",
                 run.backend.c_str(), run.kv_dtype.c_str(),
                 static_cast<long long>(run.document_tokens), run.real ? "text" : "noise",
                 kv_bytes / kMega, run.store.c_str(), run.open_seconds / kMilli);
    for (size_t i = 0; i < flags.policies.size(); ++i) {
      std::fprintf(table, "policy %zu: %s, dense layers %.1f MB\n", i, flags.policies[i].c_str(),
                   static_cast<double>(run.dense_bytes[i]) / kMega);
    }
    std::fprintf(table,
                 "bytes are shares of the document's KV\n"
                 "%6s %8s %-8s %9s %9s %7s %7s %7s %8s %8s %8s %8s %8s %8s %8s %8s  %s\n",
                 "policy", "question", "way", "ms", "median", "names", "index", "load", "passes",
                 "MB read", "reads", "share", "dense", "pieces", "index", "rows", "summary");
  };
  const auto print = [&](const ResumeResult& r) {
    const auto share = [&](CountingStore::Part part) {
      return 100 * static_cast<double>(r.parts[part].device_bytes) / kv_bytes;
    };
    std::fprintf(
        table,
        "%6zu %8lld %-8s %9.1f %9.1f %7.1f %7.1f %7.1f %8.1f %8.1f %8llu %7.2f%% %7.2f%% "
        "%7.2f%% %7.2f%% %7.2f%% %6.3f%%%s\n",
        r.policy, static_cast<long long>(r.question), r.way.c_str(), r.seconds / kMilli,
        r.seconds_median / kMilli, r.name_seconds / kMilli, r.index_seconds / kMilli,
        r.load_seconds / kMilli, r.question_seconds / kMilli,
        static_cast<double>(r.device_bytes) / kMega, static_cast<unsigned long long>(r.reads),
        100 * static_cast<double>(r.device_bytes) / kv_bytes, share(CountingStore::kDenseLayers),
        share(CountingStore::kLayerBlocks), share(CountingStore::kIndex),
        share(CountingStore::kRows), share(CountingStore::kSummary),
        r.estimated ? fmt::format("  from {} chunks", r.measured_chunks).c_str() : "");
    std::fflush(table);
  };
  const absl::StatusOr<ResumeRun> run = RunResume(flags.resume, begin, print);
  if (!run.ok()) return Failure(run.status());
  Json json = {{"resume", Json::array()}};
  for (size_t i = 0; i < run->results.size(); ++i) {
    const ResumeResult& r = run->results[i];
    Json parts = Json::object();
    constexpr const char* kNames[] = {"dense_layers", "pieces", "rows", "index", "summary"};
    for (int part = 0; part < CountingStore::kParts; ++part) {
      parts[kNames[part]] = {{"operations", r.parts[part].operations},
                             {"payload_bytes", r.parts[part].payload_bytes},
                             {"device_bytes", r.parts[part].device_bytes}};
    }
    Json entry = {{"policy", flags.policies[r.policy]},
                  {"question_tokens", r.question},
                  {"way", r.way},
                  {"ms_to_first_token", Round(r.seconds / kMilli)},
                  {"ms_median", Round(r.seconds_median / kMilli)},
                  {"ms_names", Round(r.name_seconds / kMilli)},
                  {"ms_index", Round(r.index_seconds / kMilli)},
                  {"ms_load", Round(r.load_seconds / kMilli)},
                  {"ms_question", Round(r.question_seconds / kMilli)},
                  {"device_bytes", r.device_bytes},
                  {"device_reads", r.reads},
                  {"share_of_kv", Round(static_cast<double>(r.device_bytes) / kv_bytes)},
                  {"dense_layers_bytes", run->dense_bytes[r.policy]},
                  {"row_payload_bytes", r.row_payload_bytes},
                  {"parts", parts},
                  {"first_token", r.first_token < 0 ? Json() : Json(r.first_token)},
                  {"estimated", r.estimated},
                  {"measured_chunks", r.measured_chunks}};
    if (r.way == "lazy") {
      const ResumeResult &eager = run->results[i + 1], &prefill = run->results[i + 2];
      std::fprintf(table,
                   "policy %zu, question of %lld: lazy is %.1f times faster than prefill and %.2f "
                   "times faster than eager (%.2f by medians)\n",
                   r.policy, static_cast<long long>(r.question), prefill.seconds / r.seconds,
                   eager.seconds / r.seconds, eager.seconds_median / r.seconds_median);
      entry["times_faster_than_prefill"] = Round(prefill.seconds / r.seconds);
      entry["times_faster_than_eager"] = Round(eager.seconds / r.seconds);
      entry["times_faster_than_eager_by_medians"] = Round(eager.seconds_median / r.seconds_median);
    }
    json["resume"].push_back(std::move(entry));
  }
  json["run"] = RunInfo(flags, run->backend, run->kv_dtype);
  json["run"]["document_tokens"] = run->document_tokens;
  json["run"]["repetitions"] = flags.resume.repetitions;
  json["run"]["kv_bytes"] = run->kv_bytes;
  json["run"]["stored_bytes"] = run->stored_bytes;
  json["run"]["row_cache_bytes"] = run->row_cache_bytes;
  json["run"]["ms_open"] = Round(run->open_seconds / kMilli);
  json["run"]["s_fill"] = Round(run->fill_seconds);
  json["run"]["direct"] = run->direct;
  return FinishBench(flags.json_path, json);
}

void AddCommonFlags(CLI::App& command, TierBenchFlags& flags) {
  CLI::Option_group* model = command.add_option_group("model", "What to run: one of");
  model->add_option("--like", flags.store.model.like, "A config.json; random weights of its shape")
      ->type_name("CONFIG.json");
  model->add_option("--model", flags.store.model.model_dir, "A model directory or GGUF file")
      ->type_name("DIR|FILE.gguf");
  model->require_option(1);
  server::AddModelFlags(command, flags.store.model.model);
  server::AddArtifactFlag(command, flags.store.model.model);
  command
      .add_option("--text", flags.store.text_path,
                  "What the model of --model reads, for real KV; else KV is noise")
      ->type_name("FILE[.gz]");
  command
      .add_option("--store-dir", flags.store.store_dir,
                  "Directory of the store: made by the run, and removed at its end")
      ->required()
      ->type_name("DIR");
  command.add_option("--io", flags.store.io, "How the store reads and writes")
      ->check(CLI::IsMember({"auto", "uring", "threads"}))
      ->capture_default_str();
  command
      .add_option("--prefetch", flags.prefetch, "Read what the next layer is predicted to choose")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  command
      .add_option("--row-cache-bytes", flags.store.row_cache_bytes,
                  "Cache of rows that were read; absent: none for tiers, an eighth of the "
                  "document's KV for resume")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  command
      .add_option("--chunk-tokens", flags.store.model.model.max_batch_tokens,
                  "Prompts are cut into chunks of this size")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command.add_option("--json", flags.json_path, "Also write the results here; - is stdout")
      ->check(server::WrongOutputFile)
      ->type_name("OUT");
}

}  // namespace

void AddTierBenches(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<TierBenchFlags>();
  CLI::App* tiers = bench.add_subcommand(
      "tiers",
      "Decode with a share of the chosen rows in memory and the rest on disk, as a share "
      "of the disk's own random reads");
  AddCommonFlags(*tiers, *flags);
  tiers->add_option("--policy", flags->policies.front(), "Attention policy")
      ->type_name("POLICY")
      ->capture_default_str();
  tiers
      ->add_option("--contexts,--context", flags->tiers.contexts,
                   "Tokens that the last step attends to, cut to whole blocks and the steps")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  tiers
      ->add_option("--shares", flags->tiers.shares,
                   "Per cent of the document's blocks that have frames")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  tiers->add_option("--steps", flags->tiers.steps, "Tokens that are decoded and timed")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
  tiers
      ->add_option("--device-seconds", flags->tiers.device_seconds,
                   "Time for each measurement of the disk")
      ->check(CLI::Range(0.01, 600.0))
      ->capture_default_str();
  tiers->callback([flags, exit_code] { *exit_code = BenchTiers(*flags); });

  CLI::App* resume = bench.add_subcommand(
      "resume", "Time and bytes to the first token of a question about a stored document");
  AddCommonFlags(*resume, *flags);
  resume
      ->add_option(
          "--policy", flags->policies,
          "Attention policy of the questions; may be repeated, and the document is read once")
      ->type_name("POLICY")
      ->expected(1, 64)
      ->capture_default_str();
  resume->add_option("--tokens", flags->resume.tokens, "Of the document")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  resume
      ->add_option("--questions,--question", flags->resume.questions,
                   "Tokens of each question, all of which retrieve")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{65536}))
      ->capture_default_str();
  resume->add_option("--repetitions", flags->resume.repetitions, "Of lazy and eager")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  resume
      ->add_option("--prefill-chunks", flags->resume.prefill_chunks,
                   "Of noise: estimate prefill from so many chunks; 0: compute all of it")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  resume->callback([flags, exit_code] { *exit_code = BenchResume(*flags); });
}

}  // namespace winnow::bench

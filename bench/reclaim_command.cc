// `winnow bench reclaim`: flags and table around bench_reclaim.h.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/output.h"
#include "bench/reclaim.h"
#include "server/strings.h"

namespace winnow::bench {
namespace {

struct ReclaimFlags {
  ReclaimBenchOptions bench;
  std::string directory = ".";
  std::string json_path;
};

Json PrintCalls(FILE* out, const char* phase, const std::vector<CallTimes>& calls) {
  Json json;
  for (const CallTimes& times : calls) {
    fmt::print(out, "{:<9} {:<9} {:>9} {:>9.1f} {:>9.0f} {:>9.0f} {:>11.0f}\n", phase, times.call,
               times.calls, times.cpu_us_mean, times.cpu_us_p999, times.cpu_us_max,
               times.wall_us_max);
    json[times.call] = {{"calls", times.calls},
                        {"cpu_us_mean", Round(times.cpu_us_mean)},
                        {"cpu_us_p999", Round(times.cpu_us_p999)},
                        {"cpu_us_max", Round(times.cpu_us_max)},
                        {"wall_us_max", Round(times.wall_us_max)}};
  }
  return json;
}

int BenchReclaim(ReclaimFlags& flags) {
  flags.bench.directory =
      server::Concat(flags.directory, "/winnow-bench-reclaim-", int64_t{getpid()});
  const auto report = RunReclaimBench(flags.bench);
  std::error_code ignored;
  std::filesystem::remove_all(flags.bench.directory, ignored);
  if (!report.ok()) return server::ReportFailure("bench reclaim", report.status());
  FILE* const out = TableFile(flags.json_path);
  fmt::print(out, "Reclaim at {} entries: {} evicted, {} moved\n", report->entries, report->evicted,
             report->moved);
  fmt::print(out, "{:<9} {:<9} {:>9} {:>9} {:>9} {:>9} {:>11}\n", "phase", "call", "calls",
             "mean us", "p99.9 us", "max us", "max wall us");
  Json json = {
      {"entries", report->entries}, {"evicted", report->evicted}, {"moved", report->moved}};
  json["fill"] = PrintCalls(out, "fill", report->fill);
  json["reclaim"] = PrintCalls(out, "reclaim", report->reclaim);
  return FinishBench(flags.json_path, json);
}

}  // namespace

void AddReclaimBench(CLI::App& bench, int* exit_code) {
  auto flags = std::make_shared<ReclaimFlags>();
  CLI::App* reclaim = bench.add_subcommand(
      "reclaim", "How long a full store keeps its caller while it makes room, by call");
  reclaim->add_option("--entries", flags->bench.entries, "Blocks of 8 KiB in the store")
      ->check(CLI::Range(uint64_t{10'000}, uint64_t{100'000'000}))
      ->capture_default_str();
  reclaim->add_option("--segments", flags->bench.segments, "Reclaimed while it is measured")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  reclaim->add_option("--in-flight", flags->bench.in_flight, "Operations at a time")
      ->check(CLI::Range(1, 2048))
      ->capture_default_str();
  reclaim->add_option("--dir", flags->directory, "Where the store is made, and deleted")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  reclaim->add_option("--json", flags->json_path, "Also write the results here; - is stdout")
      ->type_name("OUT");
  reclaim->callback([flags, exit_code] { *exit_code = BenchReclaim(*flags); });
}

}  // namespace winnow::bench

// What the commands of `winnow bench` write, beside their tables.
#ifndef WINNOW_SERVER_BENCH_OUTPUT_H_
#define WINNOW_SERVER_BENCH_OUTPUT_H_

#include <cstdio>
#include <string>

#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/commands.h"
#include "server/model_flags.h"

namespace CLI {
class App;
}

namespace winnow::server {

using Json = nlohmann::ordered_json;

inline constexpr double kGiga = 1e9;
inline constexpr double kMega = 1e6;
inline constexpr double kMilli = 1e-3;

inline double Round(double value) { return std::stod(fmt::format("{:.6g}", value)); }

// Prints what was asked for as JSON too. The table has gone to stdout, or to stderr when stdout is
// where the JSON goes.
inline int FinishBench(const std::string& json_path, const Json& json) {
  if (json_path.empty()) return kExitOk;
  const absl::Status status = WriteTextFile(json_path, json.dump(1) + "\n");
  return status.ok() ? kExitOk : ReportFailure("bench", status);
}

inline FILE* TableFile(const std::string& json_path) { return json_path == "-" ? stderr : stdout; }

// `bench start` (bench_start_command.cc).
void AddStartBench(CLI::App& bench, int* exit_code);

// `bench tiers` and `bench resume` (bench_tiers_command.cc).
void AddTierBenches(CLI::App& bench, int* exit_code);

// `bench reclaim` (bench_reclaim_command.cc).
void AddReclaimBench(CLI::App& bench, int* exit_code);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_BENCH_OUTPUT_H_

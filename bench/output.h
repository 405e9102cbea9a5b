// Output of the commands of `winnow bench`, beside their tables.
#ifndef WINNOW_BENCH_OUTPUT_H_
#define WINNOW_BENCH_OUTPUT_H_

#include <cstdio>
#include <string>

#include "CLI/CLI.hpp"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/commands.h"
#include "server/model_flags.h"

namespace winnow::bench {

using Json = nlohmann::ordered_json;

inline constexpr double kGiga = 1e9;
inline constexpr double kMega = 1e6;
inline constexpr double kMilli = 1e-3;

inline double Round(double value) { return std::stod(fmt::format("{:.6g}", value)); }

// Writes the JSON where a path was given. The table has gone to stdout, or to stderr when stdout is
// where the JSON goes.
inline int FinishBench(const std::string& json_path, const Json& json) {
  if (json_path.empty()) return server::kExitOk;
  const absl::Status status = server::WriteTextFile(json_path, json.dump(1) + "\n");
  return status.ok() ? server::kExitOk : server::ReportFailure("bench", status);
}

inline FILE* TableFile(const std::string& json_path) { return json_path == "-" ? stderr : stdout; }

// Adds --json.
inline void AddJsonFlag(CLI::App& command, std::string& json_path) {
  command.add_option("--json", json_path, "Also write the results here; - is stdout")
      ->check(server::WrongOutputFile)
      ->type_name("OUT");
}

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_OUTPUT_H_

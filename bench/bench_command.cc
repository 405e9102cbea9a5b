// `winnow bench`: its subcommands, a file each.
#include "CLI/CLI.hpp"
#include "bench/commands.h"

namespace winnow::bench {

void AddBenchCommand(CLI::App& app, int* exit_code) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed beside a baseline in the same run");
  bench->require_subcommand(1);
  AddDecodeBench(*bench, exit_code);
  AddPrefillBench(*bench, /*baseline=*/nullptr, exit_code);
  AddExactBench(*bench, exit_code);
  AddReclaimBench(*bench, exit_code);
  AddKernelsBench(*bench, /*baseline=*/nullptr, exit_code);
  AddStartBench(*bench, exit_code);
  AddVerifyBench(*bench, exit_code);
  AddTierBenches(*bench, exit_code);
}

}  // namespace winnow::bench

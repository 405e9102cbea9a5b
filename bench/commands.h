// The subcommands that measure, and that make models to measure. Each Add function declares its flags on `app` (or on
// `bench`, for a subcommand of `bench`) and what to do when it is chosen; the chosen one writes what the process should
// exit with (server/commands.h has the codes).
#ifndef WINNOW_BENCH_COMMANDS_H_
#define WINNOW_BENCH_COMMANDS_H_

namespace CLI {
class App;
}
namespace winnow::kernels {
struct ProductBaseline;
}

namespace winnow::bench {

void AddEvalCommand(CLI::App& app, int* exit_code);
void AddBenchCommand(CLI::App& app, int* exit_code);
void AddMakeModelCommand(CLI::App& app, int* exit_code);
void AddPlanCommand(CLI::App& app, int* exit_code);

// Parts of AddBenchCommand. `baseline` is what matrix products are compared with; null: nothing, and it outlives the
// parsing.
void AddDecodeBench(CLI::App& bench, int* exit_code);
void AddExactBench(CLI::App& bench, int* exit_code);
void AddPrefillBench(CLI::App& bench, const kernels::ProductBaseline* baseline, int* exit_code);
void AddKernelsBench(CLI::App& bench, const kernels::ProductBaseline* baseline, int* exit_code);
void AddReclaimBench(CLI::App& bench, int* exit_code);
void AddStartBench(CLI::App& bench, int* exit_code);
void AddVerifyBench(CLI::App& bench, int* exit_code);
void AddTierBenches(CLI::App& bench, int* exit_code);  // tiers and resume

}  // namespace winnow::bench

#endif  // WINNOW_BENCH_COMMANDS_H_

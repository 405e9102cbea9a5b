// winnow_baselines: the measurements of `winnow bench` whose shares are of oneDNN. A program of its own, so that the server
// does without that library. The same flags, tables and JSON as `winnow bench prefill` and `winnow bench kernels`.
#include <cstdio>
#include <exception>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/onednn.h"
#include "server/commands.h"

int main(int argc, char** argv) {
  CLI::App app("winnow_baselines: winnow's products beside oneDNN's", "winnow_baselines");
  app.require_subcommand(1);
  const winnow::kernels::ProductBaseline baseline = winnow::bench::OneDnnBaseline();
  int exit_code = winnow::server::kExitOk;
  winnow::bench::AddPrefillBench(app, &baseline, &exit_code);
  winnow::bench::AddKernelsBench(app, &baseline, &exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error)
                                      : (app.exit(error), winnow::server::kExitUsage);
  } catch (const std::exception& error) {
    // Libraries below throw only where they cannot allocate or were misused.
    std::fprintf(stderr, "winnow_baselines: %s\n", error.what());
    return winnow::server::kExitFailure;
  }
  if (exit_code == winnow::server::kExitOk && (std::fflush(stdout) != 0 || std::ferror(stdout))) {
    std::fprintf(stderr, "winnow_baselines: standard output took no more\n");
    return winnow::server::kExitFailure;
  }
  return exit_code;
}

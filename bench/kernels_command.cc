// `winnow bench kernels`: flags, table and JSON around kernels/bench.h.
#include <cstdio>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "bench/output.h"
#include "engine/base/device.h"
#include "fmt/format.h"
#include "kernels/bench.h"

namespace winnow::bench {
namespace {

struct KernelFlags {
  std::string json_path;
  kernels::BenchOptions kernels;
};

int BenchKernels(const KernelFlags& flags) {
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
    return server::ReportInputError(
        "bench", absl::InvalidArgumentError(
                     "nothing to run: no kernel's name contains --filter, or this processor lacks "
                     "--isa"));
  }
  return FinishBench(flags.json_path, json);
}
}  // namespace

void AddKernelsBench(CLI::App& bench, const kernels::ProductBaseline* baseline, int* exit_code) {
  auto flags = std::make_shared<KernelFlags>();
  flags->kernels.products = baseline;
  CLI::App* kernels = bench.add_subcommand("kernels", "Every kernel at model shapes");
  kernels->add_option("--filter", flags->kernels.filter, "Only kernels whose name contains this");
  kernels->add_option("--isa", flags->kernels.isa, "Instruction set")
      ->check(CLI::IsMember(engine::InstructionSetNames()))
      ->capture_default_str();
  kernels->add_option("--threads", flags->kernels.num_threads, "0: as many as there are processors")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  kernels
      ->add_option("--seconds", flags->kernels.seconds_per_case, "Time for each kernel and shape")
      ->check(CLI::Range(0.01, 3600.0))
      ->capture_default_str();
  AddJsonFlag(*kernels, flags->json_path);
  kernels->callback([flags, exit_code] { *exit_code = BenchKernels(*flags); });
}

}  // namespace winnow::bench

// `winnow make-model`: random weights of a configuration, for speed measurements.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "bench/commands.h"
#include "engine/model/random_model.h"
#include "kernels/dtype.h"
#include "server/commands.h"

namespace winnow::bench {
namespace {

struct MakeModelFlags {
  std::string like, out, dtype, tokenizer_from;
  uint64_t seed = 0;
  int64_t shard_bytes = engine::RandomModelOptions{}.shard_bytes;
};

int MakeModel(const MakeModelFlags& flags) {
  using kernels::DType;
  engine::RandomModelOptions options;
  options.config_path = flags.like;
  options.out_dir = flags.out;
  options.seed = flags.seed;
  options.tokenizer_dir = flags.tokenizer_from;
  options.shard_bytes = flags.shard_bytes;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    if (flags.dtype == kernels::DTypeName(dtype)) options.dtype = dtype;
  }

  const auto begin = std::chrono::steady_clock::now();
  const absl::StatusOr<engine::RandomModelReport> report = engine::WriteRandomModel(options);
  if (!report.ok()) {
    std::fprintf(stderr, "winnow make-model: %s\n", std::string(report.status().message()).c_str());
    switch (report.status().code()) {
      case absl::StatusCode::kInvalidArgument:
      case absl::StatusCode::kUnimplemented:
      case absl::StatusCode::kNotFound:
      case absl::StatusCode::kAlreadyExists:
        return server::kExitUsage;
      default:
        return server::kExitFailure;
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%s: %llu parameters, %llu bytes in %d %s, %.1f s\n", flags.out.c_str(),
              static_cast<unsigned long long>(report->num_parameters),
              static_cast<unsigned long long>(report->weight_bytes), report->num_files,
              report->num_files == 1 ? "file" : "files", seconds.count());
  return server::kExitOk;
}

}  // namespace

void AddMakeModelCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<MakeModelFlags>();
  CLI::App* command =
      app.add_subcommand("make-model", "Write a model directory with random weights");
  command->add_option("--like", flags->like, "A config.json that gives the shape")
      ->required()
      ->type_name("CONFIG.json");
  command->add_option("--out", flags->out, "Where to write; must be empty or not be there")
      ->required()
      ->type_name("DIR");
  command->add_option("--seed", flags->seed, "The same seed gives the same weights")
      ->capture_default_str();
  command
      ->add_option("--dtype", flags->dtype, "Type of the weights; as CONFIG.json says if not given")
      ->check(CLI::IsMember({"bfloat16", "float16", "float32"}));
  command
      ->add_option("--tokenizer-from", flags->tokenizer_from,
                   "Copy the tokenizer's files from this model")
      ->type_name("DIR");
  command
      ->add_option("--shard-bytes", flags->shard_bytes,
                   "Cut the weights into files of at most this many bytes")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback([flags, exit_code] { *exit_code = MakeModel(*flags); });
}

}  // namespace winnow::bench

#include "server/model_flags.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include "CLI/CLI.hpp"
#include "engine/base/device.h"
#include "engine/model/weight_storage.h"
#include "server/commands.h"
#include "server/strings.h"

namespace winnow::server {
namespace {

int Report(const char* command, const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "winnow %s: %s\n", command, std::string(status.message()).c_str());
  return exit_code;
}

}  // namespace

void AddModelFlags(CLI::App& command, engine::ModelOptions& options) {
  command.add_option("--device", options.device, "Where the model runs")
      ->check(CLI::IsMember(engine::DeviceNames()))
      ->capture_default_str();
  command
      .add_option(
          "--weights", options.weights,
          "How weights are kept: wide (plain values), stored (a file's quantised weights as "
          "they are), int8, int4, fp8 (rounded while loading), w8a8, w4a8 (int8, int4, and what "
          "meets "
          "them is rounded to int8)")
      ->check(CLI::IsMember(engine::WeightStorageNames()))
      ->capture_default_str();
  command
      .add_option("--dtype", options.dtype, "Type of the weights in matrix products; f32 is exact")
      ->check(CLI::IsMember({"auto", "bf16", "f16", "f32"}))
      ->capture_default_str();
  command.add_option("--kv-dtype", options.kv_dtype, "Type of the KV cache")
      ->check(CLI::IsMember({"auto", "bf16", "f32", "int8", "fp8"}))
      ->capture_default_str();
  command.add_option("--isa", options.isa, "Instruction set")
      ->check(CLI::IsMember(engine::InstructionSetNames()))
      ->capture_default_str();
  command.add_option("--threads", options.num_threads, "0: as many as there are processors")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

void AddDraftWeightsFlag(CLI::App& command, engine::ModelOptions& options) {
  command
      .add_option("--draft-weights", options.draft_weights,
                  "What drafts under verify= are computed with: none (the weights), or a second "
                  "copy of the matrices in that form; answers stay the same")
      ->check(CLI::IsMember(engine::DraftWeightNames()))
      ->capture_default_str();
}

void AddArtifactFlag(CLI::App& command, engine::ModelOptions& options) {
  command
      .add_option(
          "--artifact", options.retrieval.artifact,
          "Learned functions for retrieval; where absent winnow-artifact.safetensors in the "
          "model's directory, if it is there; none: none")
      ->type_name("FILE");
}

int ReportModelError(const char* command, const absl::Status& status) {
  return Report(command, status, kExitModel);
}

int ReportInputError(const char* command, const absl::Status& status) {
  return Report(command, status, kExitUsage);
}

int ReportFailure(const char* command, const absl::Status& status) {
  return Report(command, status, kExitFailure);
}

std::string WrongOutputFile(const std::string& path) {
  if (path == "-") return "";
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return Concat(path, ": is a directory");
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  if (!parent.empty() && !std::filesystem::is_directory(parent, error)) {
    return Concat(path, ": there is no directory ", parent.string());
  }
  return "";
}

absl::Status WriteTextFile(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::fwrite(text.data(), 1, text.size(),
                stdout);  // main asks stdout whether it took everything
    return absl::OkStatus();
  }
  FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return absl::ErrnoToStatus(errno, path);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  if (std::fclose(file) != 0 || !written) return absl::ErrnoToStatus(written ? errno : error, path);
  return absl::OkStatus();
}

}  // namespace winnow::server

// `winnow serve` on a device that dies with SIGUSR1, as a GPU does that falls off its bus: whatever is asked of it from then
// on fails. Its arithmetic is the CPU's.
#include <signal.h>

#include <atomic>
#include <memory>
#include <utility>

#include "CLI/CLI.hpp"
#include "engine/base/status_macros.h"
#include "engine/model_loader.h"
#include "server/commands.h"
#include "tests/unit/engine/pretended_device.h"

namespace {

using winnow::engine::PretendedDevice;
using winnow::kernels::Backend;

std::atomic<bool> is_dead = false;

// The backend below it goes last.
class DyingDevice final : private std::unique_ptr<Backend>, public PretendedDevice {
 public:
  explicit DyingDevice(std::unique_ptr<Backend> cpu)
      : std::unique_ptr<Backend>(std::move(cpu)),
        PretendedDevice(*std::unique_ptr<Backend>::get()) {}

  bool Synchronize() override {
    if (is_dead) fail_after_waits = 0;
    return PretendedDevice::Synchronize();
  }
};

absl::StatusOr<std::unique_ptr<Backend>> MakeDyingDevice(
    const winnow::engine::ModelOptions& options) {
  WINNOW_ASSIGN_OR_RETURN(std::unique_ptr<Backend> cpu, winnow::engine::MakeBackend(options));
  return std::make_unique<DyingDevice>(std::move(cpu));
}

}  // namespace

int main(int argc, char** argv) {
  struct sigaction action = {};
  action.sa_handler = [](int) { is_dead = true; };
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  CLI::App app("winnow serve, on a device that dies with SIGUSR1");
  int exit_code = 0;
  winnow::server::AddServeCommand(app, &exit_code, MakeDyingDevice);
  winnow::server::AddGrammarWorkerCommand(app, &exit_code);
  CLI11_PARSE(app, argc, argv);
  return exit_code;
}

// The subcommands of the one program that serve and ask (bench/commands.h has those that measure). Each Add function declares its flags on `app` and what to do
// when it is chosen; the chosen one writes what the process should exit with.
#ifndef WINNOW_SERVER_COMMANDS_H_
#define WINNOW_SERVER_COMMANDS_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"

namespace CLI {
class App;
}
namespace winnow::engine {
struct ModelOptions;
}
namespace winnow::kernels {
class Backend;
}

namespace winnow::server {

// Makes the device that a model is loaded onto, as engine::MakeBackend does.
using BackendMaker = std::function<absl::StatusOr<std::unique_ptr<kernels::Backend>>(
    const engine::ModelOptions& options)>;

// What `winnow` exits with, whichever the command.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;      // the work was tried and failed
inline constexpr int kExitUsage = 2;        // flags, environment, configuration file or input files
inline constexpr int kExitUnreachable = 3;  // clients: no server answered (UNAVAILABLE)
inline constexpr int kExitDeadline = 4;     // clients: DEADLINE_EXCEEDED
inline constexpr int kExitSoftware = 70;    // serve: the engine failed while it served
inline constexpr int kExitModel = 78;       // the model directory cannot be used (EX_CONFIG)

void AddServeCommand(CLI::App& app, int* exit_code);
// The same on another device: a test's, which dies when it is told to.
void AddServeCommand(CLI::App& app, int* exit_code, BackendMaker make_backend);
void AddGenerateCommand(CLI::App& app, int* exit_code);
void AddChatCommand(CLI::App& app, int* exit_code);
void AddHealthcheckCommand(CLI::App& app, int* exit_code);
void AddTokenizeCommand(CLI::App& app, int* exit_code);
void AddStoreCommand(CLI::App& app, int* exit_code);
void AddGrammarWorkerCommand(CLI::App& app, int* exit_code);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_COMMANDS_H_

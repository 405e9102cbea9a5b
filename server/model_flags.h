// The flags of commands that run a model without serving it: eval and bench.
#ifndef WINNOW_SERVER_MODEL_FLAGS_H_
#define WINNOW_SERVER_MODEL_FLAGS_H_

#include <string>

#include "absl/status/status.h"
#include "engine/model_loader.h"

namespace CLI {
class App;
}

namespace winnow::server {

// --device, --dtype, --kv-dtype, --isa, --threads into `options`, which must outlive the parsing.
void AddModelFlags(CLI::App& command, engine::ModelOptions& options);

// --draft-weights, for commands that verify drafts (bench exact and verify).
void AddDraftWeightsFlag(CLI::App& command, engine::ModelOptions& options);

// --artifact, for commands that run policies (eval).
void AddArtifactFlag(CLI::App& command, engine::ModelOptions& options);

// Prints "winnow COMMAND: message" to stderr and gives the exit code that fits: kExitModel for a
// directory that cannot be used.
int ReportModelError(const char* command, const absl::Status& status);
// The same for input files and flags (kExitUsage), and for work that failed (kExitFailure).
int ReportInputError(const char* command, const absl::Status& status);
int ReportFailure(const char* command, const absl::Status& status);

// A check for flags that name a file to be written at the end: what is known to go wrong then should
// not cost the work before. "" or what is wrong; "-" is stdout.
std::string WrongOutputFile(const std::string& path);

// Writes `text` to the file; "-" is stdout. The status names the path.
absl::Status WriteTextFile(const std::string& path, const std::string& text);

}  // namespace winnow::server

#endif  // WINNOW_SERVER_MODEL_FLAGS_H_
